#include "runtime.h"

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "families.h"
#include "launch.h"

namespace binary_gemm {
namespace cuda {
namespace {

constexpr int kMaxDevices = 64;

struct DeviceState {
  std::once_flag once;
  Device device;
};

std::array<DeviceState, kMaxDevices>& device_states() {
  static std::array<DeviceState, kMaxDevices> states;
  return states;
}

Device prepare_device(int index) {
  int major = 0, minor = 0;
  BINARY_GEMM_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  BINARY_GEMM_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
  if (major < 8) {
    throw std::invalid_argument("binary_gemm: device " + std::to_string(index) +
                                " has compute capability " + std::to_string(major) + "." +
                                std::to_string(minor) + "; 8.0 or newer is needed");
  }
  Device device{index, 0, 0, 0, 0, 0};
  BINARY_GEMM_CUDA(
      cudaDeviceGetAttribute(&device.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  BINARY_GEMM_CUDA(cudaDeviceGetAttribute(&device.shared_memory,
                                          cudaDevAttrMaxSharedMemoryPerMultiprocessor, index));
  BINARY_GEMM_CUDA(
      cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index));
  const DeviceGuard guard(index);
  // Reading a kernel's attributes loads it, so that nothing is loaded inside a capture.
  const auto load = [](const void* kernel) {
    cudaFuncAttributes attributes;
    BINARY_GEMM_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    return attributes;
  };
  for (const std::vector<const void*>& family :
       {wgmma_kernels(), mma_kernels(), decode_b1_kernels(), decode_b1_ring_kernels(),
        decode_s8_kernels(), decode_ring_kernels()}) {
    for (const void* kernel : family) {
      const cudaFuncAttributes attributes = load(kernel);
      device.architecture = attributes.binaryVersion;
      device.source = attributes.ptxVersion;
      BINARY_GEMM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            device.shared_limit));
      BINARY_GEMM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared));
    }
  }
  for (const void* kernel : quantize_kernels()) {
    const cudaFuncAttributes attributes = load(kernel);
    BINARY_GEMM_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             device.shared_limit - static_cast<int>(attributes.sharedSizeBytes)));
    BINARY_GEMM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared));
  }
  for (const std::vector<const void*>& family : {pack_kernels(), fused_kernels()}) {
    for (const void* kernel : family) load(kernel);
  }
  return device;
}

}  // namespace

CudaError::CudaError(cudaError_t code, const std::string& call)
    : std::runtime_error("binary_gemm: " + call + ": " + cudaGetErrorName(code) + " (" +
                         cudaGetErrorString(code) + ")"),
      code_(code) {}

DeviceGuard::DeviceGuard(int device) {
  BINARY_GEMM_CUDA(cudaGetDevice(&previous_));
  // Also where it is the current one: this gives a thread its context, without which the driver
  // encodes no tensor map.
  BINARY_GEMM_CUDA(cudaSetDevice(device));
  changed_ = previous_ != device;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(previous_);
}

const Device& prepared_device(int device) {
  if (device < 0 || device >= kMaxDevices) {
    throw std::invalid_argument("binary_gemm: device " + std::to_string(device) +
                                " must be in [0, " + std::to_string(kMaxDevices) + ")");
  }
  DeviceState& state = device_states()[static_cast<std::size_t>(device)];
  // A call that throws leaves the flag unset: the next one tries again.
  std::call_once(state.once, [&] { state.device = prepare_device(device); });
  return state.device;
}

int device_of(const char* name, const void* pointer, int fallback) {
  cudaPointerAttributes attributes;
  BINARY_GEMM_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
    case cudaMemoryTypeManaged:
      return attributes.device;
    case cudaMemoryTypeHost:
      return fallback;
    default:
      break;
  }
  throw std::invalid_argument(std::string("binary_gemm: ") + name +
                              " is not device memory: its pointer is of pageable host memory");
}

void check_device(const char* name, const void* pointer, const Device& device) {
  const int owner = device_of(name, pointer, device.index);
  if (owner != device.index) {
    throw std::invalid_argument(std::string("binary_gemm: ") + name + " is on device " +
                                std::to_string(owner) + ", but the call runs on device " +
                                std::to_string(device.index));
  }
}

void launch_kernel(const Device& device, const void* kernel, dim3 grid, dim3 block,
                   std::size_t shared_bytes, const Launch& launch, void** arguments,
                   unsigned cluster) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (launch.programmatic && device.source >= 90) {
    cudaLaunchAttribute& programmatic = attributes[config.numAttrs++];
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& dimension = attributes[config.numAttrs++];
    dimension.id = cudaLaunchAttributeClusterDimension;
    dimension.val.clusterDim.x = cluster;
    dimension.val.clusterDim.y = 1;
    dimension.val.clusterDim.z = 1;
  }
  BINARY_GEMM_CUDA(cudaLaunchKernelExC(&config, kernel, arguments));
}

}  // namespace cuda
}  // namespace binary_gemm
