#pragma once

/// From the fp32 sum over K to the element of y: the token's scale, the bias, one rounding.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "binary_gemm/kernels/params.cuh"

namespace binary_gemm {
namespace kernels {

__device__ inline float apply_scale_and_bias(float acc, float x_scale, const float* bias,
                                             std::int64_t n) {
  return bias != nullptr ? __fmaf_rn(acc, x_scale, bias[n]) : __fmul_rn(acc, x_scale);
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

}  // namespace kernels
}  // namespace binary_gemm
