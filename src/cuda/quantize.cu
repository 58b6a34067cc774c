#include "binary_gemm/kernels/quantize.cuh"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "binary_gemm/kernels/permute.cuh"
#include "check.h"
#include "families.h"
#include "launch.h"
#include "quantize_params.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <class T>
const void* kernel_for(bool vectorized) {
  return vectorized ? reinterpret_cast<const void*>(&kernels::quantize_rows<T, true>)
                    : reinterpret_cast<const void*>(&kernels::quantize_rows<T, false>);
}

const void* kernel_for(DataType type, bool vectorized) {
  switch (type) {
    case DataType::kFloat16:
      return kernel_for<__half>(vectorized);
    case DataType::kBFloat16:
      return kernel_for<__nv_bfloat16>(vectorized);
    default:
      return kernel_for<float>(vectorized);
  }
}

template <class T>
const void* kernel_in_parts() {
  return reinterpret_cast<const void*>(
      &kernels::quantize_parts<kernels::PlainValues<T>, kernels::kRowParts>);
}

const void* kernel_in_parts(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return kernel_in_parts<__half>();
    case DataType::kBFloat16:
      return kernel_in_parts<__nv_bfloat16>();
    default:
      return kernel_in_parts<float>();
  }
}

}  // namespace

const void* permute_kernel(std::int64_t group_size) {
  return group_size == 32   ? reinterpret_cast<const void*>(&kernels::permute_rows<32>)
         : group_size == 64 ? reinterpret_cast<const void*>(&kernels::permute_rows<64>)
                            : reinterpret_cast<const void*>(&kernels::permute_rows<128>);
}

std::vector<const void*> quantize_kernels() {
  std::vector<const void*> all = {permute_kernel(32), permute_kernel(64), permute_kernel(128)};
  for (const DataType type : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
    all.insert(all.end(), {kernel_for(type, false), kernel_for(type, true), kernel_in_parts(type)});
  }
  return all;
}

namespace {

// Dynamic shared memory for one of `ctas` CTAs, which needs none: so much that a multiprocessor
// holds at most twice its even share of them. Those that start early else gather on the few
// multiprocessors that a kernel ahead leaves free.
std::uint32_t spreading_bytes(const Device& device, std::int64_t ctas, const Launch& launch) {
  if (!launch.programmatic) return 0;
  constexpr std::int64_t kOtherBytes = 2048;  // the system's of each CTA, and static ones
  const std::int64_t most = 2 * ((ctas + device.multiprocessors - 1) / device.multiprocessors);
  const std::int64_t share = device.shared_memory / most - kOtherBytes;
  return static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(share, 0, device.shared_limit - kOtherBytes));
}

}  // namespace

void launch_permute(const Device& device, const ActivationView& x, std::int8_t* permuted,
                    std::int64_t permuted_stride, std::int64_t group_size, std::uint32_t* flags,
                    const Launch& launch) {
  kernels::PermuteParams params{};
  params.x = x.values + x.offset;
  params.x_stride = x.row_stride;
  params.permuted = permuted;
  params.permuted_stride = permuted_stride;
  params.flags = flags;
  params.k = static_cast<std::uint32_t>(x.k);
  params.vectorized = is_aligned(params.x, 16) && x.row_stride % 16 == 0;
  void* arguments[] = {&params};
  launch_kernel(device, permute_kernel(group_size), dim3(static_cast<unsigned>(x.m)),
                dim3(kernels::kPermuteThreads), spreading_bytes(device, x.m, launch), launch,
                arguments);
}

void launch_quantize(const Device& device, const ConstMatrixView& x, const MutableActivationView& q,
                     int order, std::uint32_t* flags, const Launch& launch) {
  kernels::QuantizeParams params = quantize_params(x, 0, q);
  params.order = order;
  params.flags = flags;
  void* arguments[] = {&params};
  // Rows that one CTA would read twice. On an H200, binary_linear of K = 17408 back to back, us, M
  // = 1: 7.1 -> 6.2, 8: 17.9 -> 15.7; of K = 5120 0.5 more than by a CTA.
  constexpr std::int64_t kInPartsFrom =
      std::int64_t{kernels::kQuantizeKept} * kernels::kQuantizeThreads * kernels::kQuantizeVector;
  if (params.vectorized && order == 0 &&
      quantizes_in_parts(device, x.rows, params.k, kInPartsFrom)) {
    const PartsLaunch parts = parts_launch(x.rows, params.k, true);
    return launch_kernel(device, kernel_in_parts(x.type), parts.grid, parts.block, 0, launch,
                         arguments, parts.parts);
  }
  launch_kernel(device, kernel_for(x.type, params.vectorized), dim3(static_cast<unsigned>(x.rows)),
                dim3(kernels::kQuantizeThreads),
                order != 0 ? spreading_bytes(device, x.rows, launch) : 0, launch, arguments);
}

void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q,
                         const Launch& launch) {
  check::quantize_activation(x, q);
  if (x.rows == 0) return;
  if (x.rows > INT32_MAX) {
    throw std::invalid_argument("binary_gemm: M = " + std::to_string(x.rows) + " must be at most " +
                                std::to_string(INT32_MAX) + " on CUDA");
  }
  int current = 0;
  BINARY_GEMM_CUDA(cudaGetDevice(&current));
  const Device& device = prepared_device(device_of("activation scales", q.scales, current));
  if (x.cols > 0) {
    check_device("x", x.data, device);
    check_device("activation values", q.values, device);
  }
  const DeviceGuard guard(device.index);
  launch_quantize(device, x, q, 0, nullptr, launch);
}

}  // namespace cuda
}  // namespace binary_gemm
