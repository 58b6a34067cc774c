#pragma once

/// Launches, for the translation units of the six names.

#include "runtime.h"

namespace binary_gemm {
namespace cuda {

/// Launches a kernel as `launch` says and checks that it was.
void launch_kernel(const Device& device, const void* kernel, dim3 grid, dim3 block,
                   std::size_t shared_bytes, const Launch& launch, void** arguments);

/// The quantizer, for arguments that have been checked.
void launch_quantize(const Device& device, const ConstMatrixView& x, const MutableActivationView& q,
                     const Launch& launch);

/// Throws std::invalid_argument unless kernels on `device` can use the pointer.
void check_device(const char* name, const void* pointer, const Device& device);

}  // namespace cuda
}  // namespace binary_gemm
