#pragma once

#include <cuda_runtime_api.h>

namespace binary_gemm {
namespace testing {

/// Launches a kernel that traps: the context is lost then, and every CUDA call of the process that
/// needs it fails.
void launch_trap(cudaStream_t stream);

}  // namespace testing
}  // namespace binary_gemm
