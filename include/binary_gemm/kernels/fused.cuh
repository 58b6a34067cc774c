#pragma once

/// The steps of an engine that end in a quantized activation: RMSNorm and SwiGLU, each with the
/// quantizer behind it, with the same bits as reference.h.
///
/// In a decode step one row is all there is, and what counts is how long it takes: all loads of a
/// row are in flight at once, and its values stay in registers between the maximum and the
/// rounding.
/// - RMSNorm: a CTA a row. The sums of squares are those that its threads have anyway, eight
///   columns each, and the tree over them is that of a warp's butterfly.
/// - SwiGLU: a value takes 40 operations, which for the 17408 of a row are 3 us of one
///   multiprocessor. A cluster of eight CTAs shares a row (quantize_parts); they exchange maxima
///   through shared memory. Without clusters, or with rows enough for all multiprocessors, a CTA a
///   row again.
///
/// Before the wait for an earlier kernel: the gain, which is a weight.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/quantize.cuh"

namespace binary_gemm {
namespace kernels {

/// Of a CTA; SwiGLU has fewer where a row has no work for them.
inline constexpr int kFusedThreads = 512;
inline constexpr int kFusedWarps = kFusedThreads / kWarpSize;
/// Columns that so many threads take at once.
inline constexpr int kFusedStep = kFusedThreads * kQuantizeVector;
/// Vectors a thread of RMSNorm keeps in registers; the rest of longer rows is read again.
inline constexpr int kFusedKept = 2;
struct RmsNormParams {
  QuantizeParams rows;  ///< order 0; the gain is aligned to 16 bytes too if vectorized
  DataType type;        ///< of x
  const void* gain;     ///< [k] or null
  DataType gain_type;
  float epsilon;
};

struct SwigluParams {
  QuantizeParams
      rows;       ///< x is gate and up, [m, 2k], its middle aligned too if vectorized; order 0
  DataType type;  ///< of x
};

/// Eight values of the gain from `column`; ones if there is none.
__device__ inline QuantizeVector<float> load_gain(const RmsNormParams& params,
                                                  std::int64_t column) {
  QuantizeVector<float> gain;
  const auto load = [&](const auto* data) {
    const auto vector = load_columns<true>(data, column, params.rows.k);
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) gain.values[i] = as_float(vector.values[i]);
  };
  if (params.gain == nullptr) {
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) gain.values[i] = 1;
  } else if (params.gain_type == DataType::kBFloat16) {
    load(static_cast<const __nv_bfloat16*>(params.gain));
  } else if (params.gain_type == DataType::kFloat16) {
    load(static_cast<const __half*>(params.gain));
  } else {
    load(static_cast<const float*>(params.gain));
  }
  return gain;
}

/// Adds the squares to eight sums.
template <class T>
__device__ inline void add_squares(float (&sums)[kQuantizeVector],
                                   const QuantizeVector<T>& vector) {
#pragma unroll
  for (int i = 0; i < kQuantizeVector; ++i) {
    const float value = as_float(vector.values[i]);
    sums[i] = __fmaf_rn(value, value, sums[i]);
  }
}

/// The sum of kCount of them, a power of two: neighbours first, then neighbours of these sums, and
/// so on.
template <int kCount>
__device__ inline float add_neighbours(const float* sums) {
  if constexpr (kCount == 1) {
    return sums[0];
  } else {
    return __fadd_rn(add_neighbours<kCount / 2>(sums),
                     add_neighbours<kCount / 2>(sums + kCount / 2));
  }
}

/// The same over the lanes of a warp. All get the same bits, as a + b is b + a.
__device__ inline float add_lanes(float sum) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  return sum;
}

/// The values of eight columns.
template <class T>
__device__ inline QuantizeVector<float> normalize(const QuantizeVector<T>& x,
                                                  const QuantizeVector<float>& gain,
                                                  float inverse) {
  QuantizeVector<float> values;
#pragma unroll
  for (int i = 0; i < kQuantizeVector; ++i) {
    values.values[i] = __fmul_rn(__fmul_rn(as_float(x.values[i]), inverse), gain.values[i]);
  }
  return values;
}

/// The sum over a CTA of kFusedThreads, neighbours first. Called once.
__device__ inline float add_block(float sum) {
  __shared__ alignas(16) float warp_sums[kFusedWarps];  // read by all, four at once
  sum = add_lanes(sum);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  return add_neighbours<kFusedWarps>(warp_sums);
}

/// The largest of a CTA's. Called once.
__device__ inline std::uint32_t largest_of_block(std::uint32_t largest) {
  __shared__ std::uint32_t warp_largest[kFusedWarps];
  const unsigned lane = threadIdx.x % kWarpSize;
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) warp_largest[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < blockDim.x / kWarpSize ? warp_largest[lane] : 0);
}

/// What a row is multiplied with, from its sum of squares. If that is not finite: NaN, which makes
/// all values NaN and the row's scale too. Without columns there is nothing to be NaN.
__device__ inline float inverse_of_root(const RmsNormParams& params, float sum, float inverse_k) {
  if ((__float_as_uint(sum) & 0x7fffffffu) >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  if (params.rows.k == 0) return 0;
  return __fdiv_rn(1.0f, __fsqrt_rn(__fmaf_rn(sum, inverse_k, params.epsilon)));
}

/// Quantizes a row whose values a function gives, one column at a time.
template <class ValueAt>
__device__ inline void quantize_values(const QuantizeParams& rows, std::int64_t m, std::int8_t* q,
                                       const ValueAt& value_at) {
  std::uint32_t largest = 0;
#pragma unroll 1
  for (std::int64_t column = threadIdx.x; column < rows.k; column += blockDim.x) {
    largest = max(largest, __float_as_uint(value_at(column)) & 0x7fffffffu);
  }
  const RowScale row = row_scale(largest_of_block(largest));
  if (threadIdx.x == 0) rows.scales[m] = row.scale;
#pragma unroll 1
  for (std::int64_t column = threadIdx.x; column < rows.k; column += blockDim.x) {
    const std::uint32_t value = quantize_value(value_at(column), row);
    q[column] = static_cast<std::int8_t>(row.finite ? value : 0);
  }
}

/// Rows that are vectorized. Grid: a CTA a row in x. Block: kFusedThreads.
template <class T>
__global__ void __launch_bounds__(kFusedThreads)
    rms_norm_quantize_rows(const __grid_constant__ RmsNormParams params) {
  static_assert(kFusedStep == 4096, "the contract's sums: a thread has the same eight each time");
  ptx::launch_dependents();
  const QuantizeParams& rows = params.rows;
  const T* x = static_cast<const T*>(rows.x) + blockIdx.x * rows.x_stride;
  std::int8_t* q = rows.q + blockIdx.x * rows.q_stride;
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x) * kQuantizeVector;
  constexpr std::int64_t kRest = kFusedKept * kFusedStep;

  QuantizeVector<float> gain[kFusedKept];
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    gain[i] = load_gain(params, first + i * kFusedStep);
  }
  const float inverse_k = __fdiv_rn(1.0f, __ll2float_rn(rows.k));
  ptx::wait_for_dependencies();

  QuantizeVector<T> kept[kFusedKept];
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    kept[i] = load_columns<true>(x, first + i * kFusedStep, rows.k);
  }
  float sums[kQuantizeVector] = {};
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    // Most warps have nothing left but the first time, and the others are waited for.
    if (first + i * kFusedStep < rows.k) add_squares(sums, kept[i]);
  }
  for (std::int64_t column = first + kRest; column < rows.k; column += kFusedStep) {
    add_squares(sums, load_columns<true>(x, column, rows.k));
  }
  const float inverse =
      inverse_of_root(params, add_block(add_neighbours<kQuantizeVector>(sums)), inverse_k);
  const auto rest = [&](std::int64_t column) {
    return normalize(load_columns<true>(x, column, rows.k), load_gain(params, column), inverse);
  };
  QuantizeVector<float> values[kFusedKept] = {};
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    if (first + i * kFusedStep >= rows.k) continue;
    values[i] = normalize(kept[i], gain[i], inverse);
    largest = max(largest, largest_magnitude(values[i]));
  }
  for (std::int64_t column = first + kRest; column < rows.k; column += kFusedStep) {
    largest = max(largest, largest_magnitude(rest(column)));
  }
  largest = largest_of_block(largest);

  const RowScale row = row_scale(largest);
  if (threadIdx.x == 0) rows.scales[blockIdx.x] = row.scale;
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    const std::int64_t column = first + i * kFusedStep;
    if (column >= rows.k) continue;
    store_columns<true>(q, column, rows.k, quantize_vector(values[i], row));
  }
  for (std::int64_t column = first + kRest; column < rows.k; column += kFusedStep) {
    store_columns<true>(q, column, rows.k, quantize_vector(rest(column), row));
  }
}

/// Rows of any type, alignment and length, one column at a time: right rather than fast. Grid and
/// block as above.
static __global__ void __launch_bounds__(kFusedThreads)
    rms_norm_quantize_any(const __grid_constant__ RmsNormParams params) {
  __shared__ float sums[kFusedStep];
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const QuantizeParams& rows = params.rows;
  const unsigned thread = threadIdx.x;
  const std::int64_t row_begin = blockIdx.x * rows.x_stride;
  std::int8_t* q = rows.q + blockIdx.x * rows.q_stride;
  float own[kQuantizeVector] = {};  // sums thread, thread + kFusedThreads, ...
  for (std::int64_t first = 0; first < rows.k; first += kFusedStep) {
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) {
      const std::int64_t column = first + i * kFusedThreads + thread;
      if (column >= rows.k) continue;
      const float value = load_input(rows.x, params.type, row_begin + column);
      own[i] = __fmaf_rn(value, value, own[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kQuantizeVector; ++i) sums[i * kFusedThreads + thread] = own[i];
  __syncthreads();
  const float sum = add_block(add_neighbours<kQuantizeVector>(sums + thread * kQuantizeVector));
  const float inverse = inverse_of_root(params, sum, __fdiv_rn(1.0f, __ll2float_rn(rows.k)));
  const auto value_at = [&](std::int64_t column) {
    const float value = __fmul_rn(load_input(rows.x, params.type, row_begin + column), inverse);
    if (params.gain == nullptr) return value;
    return __fmul_rn(value, load_input(params.gain, params.gain_type, column));
  };
  quantize_values(rows, blockIdx.x, q, value_at);
}

/// reference::exponential.
__device__ inline float exponential(float value) {
  constexpr float kRound = 12582912.0f;
  const float x = value < -80.0f ? -80.0f : value > 89.0f ? 89.0f : value;
  const float shifted = __fmaf_rn(x, 0x1.715476p+0f, kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fmaf_rn(n, 0x1.bd0106p-13f, __fmaf_rn(n, -0x1.63p-1f, x));
  float p = 0x1.6a242ap-10f;
  p = __fmaf_rn(p, r, 0x1.1239ecp-7f);
  p = __fmaf_rn(p, r, 0x1.5558f2p-5f);
  p = __fmaf_rn(p, r, 0x1.555492p-3f);
  p = __fmaf_rn(p, r, 0x1.fffffcp-2f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  const float power = __uint_as_float((__float_as_uint(shifted) << 23) + (126u << 23));
  return __fmul_rn(__fmul_rn(p, power), 2.0f);
}

/// reference::silu.
__device__ inline float silu(float gate) {
  return __fdiv_rn(gate, __fadd_rn(1.0f, exponential(-gate)));
}

/// SwiGLU of the two halves of a row, for quantize_parts.
template <class T>
struct SwigluValues {
  const T* gate;
  const T* up;

  __device__ SwigluValues(const void* x, std::int64_t row_begin, std::int64_t k)
      : gate(static_cast<const T*>(x) + row_begin), up(gate + k) {}

  __device__ QuantizeVector<float> operator()(std::int64_t column, std::int64_t end) const {
    const QuantizeVector<T> gates = load_columns<true>(gate, column, end);
    const QuantizeVector<T> ups = load_columns<true>(up, column, end);
    QuantizeVector<float> values;
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) {
      values.values[i] = __fmul_rn(silu(as_float(gates.values[i])), as_float(ups.values[i]));
    }
    return values;
  }
};

/// Rows of any type, alignment and length, one column at a time: right rather than fast. Grid: a
/// CTA a row in x. Block: kFusedThreads or fewer warps.
static __global__ void __launch_bounds__(kFusedThreads)
    swiglu_quantize_any(const __grid_constant__ SwigluParams params) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const QuantizeParams& rows = params.rows;
  const std::int64_t gate = blockIdx.x * rows.x_stride;
  quantize_values(rows, blockIdx.x, rows.q + blockIdx.x * rows.q_stride, [&](std::int64_t column) {
    return __fmul_rn(silu(load_input(rows.x, params.type, gate + column)),
                     load_input(rows.x, params.type, gate + rows.k + column));
  });
}

}  // namespace kernels
}  // namespace binary_gemm
