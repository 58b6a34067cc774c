#include "binary_gemm/kernels/fused.cuh"

#include <cstddef>
#include <stdexcept>
#include <string>

#include "check.h"
#include "families.h"
#include "launch.h"
#include "quantize_params.h"

namespace binary_gemm {
namespace cuda {
namespace {

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16};

const void* rms_norm_kernel(DataType type, bool vectorized) {
  if (!vectorized) return reinterpret_cast<const void*>(&kernels::rms_norm_quantize_any);
  switch (type) {
    case DataType::kFloat16:
      return reinterpret_cast<const void*>(&kernels::rms_norm_quantize_rows<__half>);
    case DataType::kBFloat16:
      return reinterpret_cast<const void*>(&kernels::rms_norm_quantize_rows<__nv_bfloat16>);
    default:
      return reinterpret_cast<const void*>(&kernels::rms_norm_quantize_rows<float>);
  }
}

template <class T>
const void* swiglu_kernel(bool in_parts) {
  using Values = kernels::SwigluValues<T>;
  return in_parts
             ? reinterpret_cast<const void*>(&kernels::quantize_parts<Values, kernels::kRowParts>)
             : reinterpret_cast<const void*>(&kernels::quantize_parts<Values, 1>);
}

const void* swiglu_kernel(DataType type, bool vectorized, bool in_parts) {
  if (!vectorized) return reinterpret_cast<const void*>(&kernels::swiglu_quantize_any);
  switch (type) {
    case DataType::kFloat16:
      return swiglu_kernel<__half>(in_parts);
    case DataType::kBFloat16:
      return swiglu_kernel<__nv_bfloat16>(in_parts);
    default:
      return swiglu_kernel<float>(in_parts);
  }
}

// The device of the call; checks that x and q are there.
const Device& device_of_call(const char* x_name, const ConstMatrixView& x,
                             const MutableActivationView& q) {
  // A cluster has kRowParts CTAs a row, and a grid at most 2^31 - 1.
  constexpr std::int64_t kMaxRows = INT32_MAX / kernels::kRowParts;
  if (x.rows > kMaxRows) {
    throw std::invalid_argument("binary_gemm: M = " + std::to_string(x.rows) + " must be at most " +
                                std::to_string(kMaxRows) + " on CUDA");
  }
  int current = 0;
  BINARY_GEMM_CUDA(cudaGetDevice(&current));
  const Device& device = prepared_device(device_of("activation scales", q.scales, current));
  if (q.k > 0) {
    check_device(x_name, x.data, device);
    check_device("activation values", q.values, device);
  }
  return device;
}

}  // namespace

std::vector<const void*> fused_kernels() {
  std::vector<const void*> all = {rms_norm_kernel(DataType::kFloat32, false),
                                  swiglu_kernel(DataType::kFloat32, false, false)};
  for (const DataType type : kTypes) {
    all.insert(all.end(), {rms_norm_kernel(type, true), swiglu_kernel(type, true, false),
                           swiglu_kernel(type, true, true)});
  }
  return all;
}

void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                       const MutableActivationView& q, const Launch& launch) {
  check::rms_norm_quantize(x, gain, epsilon, q);
  if (x.rows == 0) return;
  const Device& device = device_of_call("x", x, q);
  kernels::RmsNormParams params{};
  params.rows = quantize_params(x, 0, q);
  params.type = x.type;
  params.epsilon = epsilon;
  if (gain.data != nullptr && q.k > 0) {
    check_device("gain", gain.data, device);
    params.gain = static_cast<const char*>(gain.data) + gain.offset * size_of(gain.type);
    params.gain_type = gain.type;
    params.rows.vectorized = params.rows.vectorized && is_aligned(params.gain, 16);
  }
  const DeviceGuard guard(device.index);
  void* arguments[] = {&params};
  launch_kernel(device, rms_norm_kernel(x.type, params.rows.vectorized),
                dim3(static_cast<unsigned>(x.rows)), dim3(kernels::kFusedThreads), 0, launch,
                arguments);
}

void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q,
                     const Launch& launch) {
  check::swiglu_quantize(gate_up, q);
  if (gate_up.rows == 0) return;
  const Device& device = device_of_call("gate_up", gate_up, q);
  kernels::SwigluParams params{quantize_params(gate_up, q.k, q), gate_up.type};
  const bool vectorized = params.rows.vectorized;
  const PartsLaunch parts = parts_launch(
      gate_up.rows, q.k,
      vectorized && quantizes_in_parts(device, gate_up.rows, q.k, kernels::kFusedStep / 2));
  const DeviceGuard guard(device.index);
  // The one takes all of it, the other the rows alone, which come first.
  static_assert(offsetof(kernels::SwigluParams, rows) == 0, "");
  void* arguments[] = {&params};
  launch_kernel(device, swiglu_kernel(gate_up.type, vectorized, parts.parts > 1), parts.grid,
                parts.block, 0, launch, arguments, parts.parts);
}

}  // namespace cuda
}  // namespace binary_gemm
