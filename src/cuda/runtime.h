#pragma once

/// What the CUDA launch layer needs of the runtime: checked calls, the device guard, and what is
/// known of a device.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "binary_gemm/cuda.h"

namespace binary_gemm {
namespace cuda {

inline bool is_aligned(const void* pointer, std::uintptr_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

inline void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw CudaError(code, call);
}
#define BINARY_GEMM_CUDA(call) ::binary_gemm::cuda::check_cuda((call), #call)

/// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// A prepared device.
struct Device {
  int index;
  int architecture;   ///< of the compiled code that runs on it, as in 90
  int source;         ///< of the PTX that the driver or nvcc compiled to it: what the code may use
  int shared_limit;   ///< bytes of shared memory a CTA may have
  int shared_memory;  ///< bytes of shared memory of a multiprocessor
  int multiprocessors;
};

/// Prepares `device` on first use.
const Device& prepared_device(int device);

/// The device of a pointer that its kernels will read or write. Throws std::invalid_argument unless
/// it is device, managed or pinned host memory; pinned host memory gives `fallback`.
int device_of(const char* name, const void* pointer, int fallback);

}  // namespace cuda
}  // namespace binary_gemm
