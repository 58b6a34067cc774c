#pragma once

/// Launches, for the translation units of the six names.

#include "runtime.h"

namespace binary_gemm {
namespace cuda {

/// Launches a kernel as `launch` says and checks that it was. `cluster`: CTAs of a cluster, along
/// x; more than 1 from compute capability 9.0 on.
void launch_kernel(const Device& device, const void* kernel, dim3 grid, dim3 block,
                   std::size_t shared_bytes, const Launch& launch, void** arguments,
                   unsigned cluster = 1);

/// The quantizer, for arguments that have been checked. `order`: 0 for row-major q, or a group
/// size: see kernels/quantize.cuh. `flags`: kernels::kHandOverCtas words to be zeroed, or null.
void launch_quantize(const Device& device, const ConstMatrixView& x, const MutableActivationView& q,
                     int order, std::uint32_t* flags, const Launch& launch);

/// Puts x in the order of a group size: see kernels/permute.cuh. `flags` as above.
void launch_permute(const Device& device, const ActivationView& x, std::int8_t* permuted,
                    std::int64_t permuted_stride, std::int64_t group_size, std::uint32_t* flags,
                    const Launch& launch);

/// Throws std::invalid_argument unless kernels on `device` can use the pointer.
void check_device(const char* name, const void* pointer, const Device& device);

}  // namespace cuda
}  // namespace binary_gemm
