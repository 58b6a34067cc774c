#pragma once

/// From the fp32 sum over K to the element of y: the token's scale, the bias, the residual, one
/// rounding. The residual may be y itself, so the thread that stores an element is the one that
/// loads its residual.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "binary_gemm/kernels/params.cuh"

namespace binary_gemm {
namespace kernels {

/// Element `index` of bf16, fp16 or fp32.
__device__ inline float load_input(const void* data, DataType type, std::int64_t index) {
  switch (type) {
    case DataType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DataType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

/// Element (m, n) of the residual; 0 if there is none.
__device__ inline float load_residual(const GemmParams& params, unsigned m, unsigned n) {
  if (params.residual == nullptr) return 0;
  return load_input(params.residual, params.y_type, m * params.residual_stride + n);
}

/// `acc` by the token's scale, with the bias and the residual that have been loaded for it.
__device__ inline float finish(const GemmParams& params, float acc, float x_scale, float bias,
                               float residual) {
  const float r = params.bias != nullptr ? __fmaf_rn(acc, x_scale, bias) : __fmul_rn(acc, x_scale);
  return params.residual != nullptr ? __fadd_rn(residual, r) : r;
}

/// Rounds `value` to the output type and writes element `index` of y.
__device__ inline void store_output(void* y, DataType type, std::int64_t index, float value) {
  switch (type) {
    case DataType::kBFloat16:
      static_cast<__nv_bfloat16*>(y)[index] = __float2bfloat16_rn(value);
      break;
    case DataType::kFloat16:
      static_cast<__half*>(y)[index] = __float2half_rn(value);
      break;
    default:
      static_cast<float*>(y)[index] = value;
  }
}

/// Finishes the sum of token m and row n and writes it.
__device__ inline void store_element(const GemmParams& params, unsigned m, unsigned n, float acc,
                                     float x_scale) {
  const float bias = params.bias != nullptr ? params.bias[n] : 0;
  store_output(params.y, params.y_type, m * params.y_stride + n,
               finish(params, acc, x_scale, bias, load_residual(params, m, n)));
}

/// Two values rounded to a 2-byte output type; `low` comes first in memory.
__device__ inline std::uint32_t round_pair(DataType type, float low, float high) {
  if (type == DataType::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// The other way round.
__device__ inline float2 unpack_pair(DataType type, std::uint32_t bits) {
  if (type == DataType::kBFloat16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
  }
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

/// Finishes the sums of token m and rows n and n + 1 and writes those below N.
__device__ inline void store_pair(const GemmParams& params, unsigned m, unsigned n, float2 acc,
                                  float x_scale) {
  if (n >= params.n) return;
  const bool both = n + 1 < params.n;
  float bias0 = 0, bias1 = 0;
  if (params.bias != nullptr) {
    bias0 = params.bias[n];
    if (both) bias1 = params.bias[n + 1];
  }
  const float low = finish(params, acc.x, x_scale, bias0, load_residual(params, m, n));
  const float high =
      finish(params, acc.y, x_scale, bias1, both ? load_residual(params, m, n + 1) : 0);
  const std::int64_t index = m * params.y_stride + n;
  if (both && params.y_type != DataType::kFloat32) {
    char* address = static_cast<char*>(params.y) + index * 2;
    if (reinterpret_cast<std::uintptr_t>(address) % 4 == 0) {
      if (params.y_type == DataType::kBFloat16) {
        *reinterpret_cast<__nv_bfloat162*>(address) = __floats2bfloat162_rn(low, high);
      } else {
        *reinterpret_cast<__half2*>(address) = __floats2half2_rn(low, high);
      }
      return;
    }
  }
  store_output(params.y, params.y_type, index, low);
  if (both) store_output(params.y, params.y_type, index + 1, high);
}

}  // namespace kernels
}  // namespace binary_gemm
