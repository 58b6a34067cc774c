#pragma once

/// Packing dense weights and unpacking them: off the hot path, so simple. The same bits as cpu.h.

#include <cstdint>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/params.cuh"

namespace binary_gemm {
namespace kernels {

struct PackParams {
  const void* dense;  ///< [n, k] of `type`
  void* unpacked;     ///< the same, for unpack_rows
  DataType type;
  std::int64_t dense_stride;
  std::uint32_t* bits;
  std::int64_t bits_stride;
  __half* scales;  ///< null: signs alone
  std::int64_t scales_stride;
  std::int64_t k;
  int group_size;
};

__device__ inline float load_dense(const void* data, DataType type, std::int64_t index) {
  switch (type) {
    case DataType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DataType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DataType::kInt8:
      return static_cast<float>(static_cast<const std::int8_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

/// Grid: a CTA a row in x. Block: any number of warps; each takes a group at a time.
static __global__ void pack_rows(const __grid_constant__ PackParams params) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const std::int64_t row = blockIdx.x;
  const std::int64_t groups = params.k / params.group_size;
  for (std::int64_t group = threadIdx.x / kWarpSize; group < groups;
       group += blockDim.x / kWarpSize) {
    double sum = 0;
    for (int i = 0; i < params.group_size / kWarpSize; ++i) {
      const std::int64_t column = group * params.group_size + i * kWarpSize;
      const float value =
          load_dense(params.dense, params.type, row * params.dense_stride + column + lane);
      const std::uint32_t word = __ballot_sync(0xffffffffu, value > 0);
      if (lane == 0) params.bits[row * params.bits_stride + column / 32] = word;
      // In the order of the columns.
      for (int j = 0; params.scales != nullptr && j < kWarpSize; ++j) {
        sum = __dadd_rn(sum, fabs(static_cast<double>(__shfl_sync(0xffffffffu, value, j))));
      }
    }
    if (params.scales != nullptr && lane == 0) {
      params.scales[row * params.scales_stride + group] =
          __float2half_rn(__double2float_rn(__ddiv_rn(sum, params.group_size)));
    }
  }
}

/// Grid: a CTA a row in x. Block: any.
static __global__ void unpack_rows(const __grid_constant__ PackParams params) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t column = threadIdx.x; column < params.k; column += blockDim.x) {
    const std::uint32_t word = params.bits[row * params.bits_stride + column / 32];
    const float magnitude =
        params.scales != nullptr
            ? __half2float(params.scales[row * params.scales_stride + column / params.group_size])
            : 1.0f;
    const float value = (word >> column % 32 & 1u) != 0 ? magnitude : -magnitude;
    const std::int64_t index = row * params.dense_stride + column;
    if (params.type == DataType::kInt8) {
      static_cast<std::int8_t*>(params.unpacked)[index] = static_cast<std::int8_t>(value);
    } else {
      store_output(params.unpacked, params.type, index, value);
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
