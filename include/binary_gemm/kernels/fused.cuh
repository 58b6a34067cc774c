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
///   multiprocessor. A cluster of eight CTAs shares a row; they exchange maxima through shared
///   memory. Without clusters, or with rows enough for all multiprocessors, a CTA a row again.
///
/// Before the wait for an earlier kernel: the gain, which is a weight.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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
/// Vectors a thread keeps in registers; what is left of longer rows is read and computed again.
inline constexpr int kFusedKept = 2;
/// CTAs of a cluster that share a row; 8 is what every device has.
inline constexpr int kSwigluCluster = 8;

struct RmsNormParams {
  QuantizeParams rows;  ///< order 0; the gain is aligned to 16 bytes too if vectorized
  const void* gain;     ///< [k] or null
  DataType gain_type;
  float epsilon;
};

/// x is gate and up, [m, 2k]; its rows and their middle are aligned if vectorized.
using SwigluParams = QuantizeParams;

/// Eight values of the gain from `column`; ones if there is none.
template <bool kVectorized>
__device__ inline QuantizeVector<float> load_gain(const RmsNormParams& params,
                                                  std::int64_t column) {
  QuantizeVector<float> gain;
  const auto load = [&](const auto* data) {
    const auto vector = load_columns<kVectorized>(data, column, params.rows.k);
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

/// Grid: a CTA a row in x. Block: kFusedThreads.
template <class T, bool kVectorized>
__global__ void __launch_bounds__(kFusedThreads)
    rms_norm_quantize_rows(const __grid_constant__ RmsNormParams params) {
  static_assert(kFusedStep == 4096, "the contract's sums: a thread has the same eight each time");
  __shared__ alignas(16) float warp_sums[kFusedWarps];  // read by all, four at once
  __shared__ std::uint32_t warp_largest[kFusedWarps];
  ptx::launch_dependents();
  const QuantizeParams& rows = params.rows;
  const T* x = static_cast<const T*>(rows.x) + blockIdx.x * rows.x_stride;
  std::int8_t* q = rows.q + blockIdx.x * rows.q_stride;
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x) * kQuantizeVector;
  constexpr std::int64_t kRest = kFusedKept * kFusedStep;
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = threadIdx.x / kWarpSize;

  QuantizeVector<float> gain[kFusedKept];
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    gain[i] = load_gain<kVectorized>(params, first + i * kFusedStep);
  }
  const float inverse_k = __fdiv_rn(1.0f, __ll2float_rn(rows.k));
  ptx::wait_for_dependencies();

  QuantizeVector<T> kept[kFusedKept];
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    kept[i] = load_columns<kVectorized>(x, first + i * kFusedStep, rows.k);
  }
  float sums[kQuantizeVector] = {};
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    // Most warps have nothing left but the first time, and the others are waited for.
    if (first + i * kFusedStep < rows.k) add_squares(sums, kept[i]);
  }
  for (std::int64_t column = first + kRest; column < rows.k; column += kFusedStep) {
    add_squares(sums, load_columns<kVectorized>(x, column, rows.k));
  }
  float sum = add_lanes(add_neighbours<kQuantizeVector>(sums));
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  sum = add_neighbours<kFusedWarps>(warp_sums);

  // Not finite: NaN, which makes all values NaN and the row's scale too. Without columns there is
  // nothing to be NaN.
  float inverse = __uint_as_float(0x7fc00000u);
  if ((__float_as_uint(sum) & 0x7fffffffu) < 0x7f800000u) {
    const float mean = __fmaf_rn(sum, inverse_k, params.epsilon);
    inverse = rows.k > 0 ? __fdiv_rn(1.0f, __fsqrt_rn(mean)) : 0;
  }
  const auto rest = [&](std::int64_t column) {
    return normalize(load_columns<kVectorized>(x, column, rows.k),
                     load_gain<kVectorized>(params, column), inverse);
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
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) warp_largest[warp] = largest;
  __syncthreads();
  largest = __reduce_max_sync(0xffffffffu, warp_largest[lane % kFusedWarps]);

  const RowScale row = row_scale(largest);
  if (threadIdx.x == 0) rows.scales[blockIdx.x] = row.scale;
#pragma unroll
  for (int i = 0; i < kFusedKept; ++i) {
    const std::int64_t column = first + i * kFusedStep;
    if (column >= rows.k) continue;
    store_columns<kVectorized>(q, column, rows.k, quantize_vector(values[i], row));
  }
  for (std::int64_t column = first + kRest; column < rows.k; column += kFusedStep) {
    store_columns<kVectorized>(q, column, rows.k, quantize_vector(rest(column), row));
  }
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

template <class T>
__device__ inline QuantizeVector<float> swiglu(const QuantizeVector<T>& gate,
                                               const QuantizeVector<T>& up) {
  QuantizeVector<float> values;
#pragma unroll
  for (int i = 0; i < kQuantizeVector; ++i) {
    values.values[i] = __fmul_rn(silu(as_float(gate.values[i])), as_float(up.values[i]));
  }
  return values;
}

/// Grid: kCluster CTAs a row in x, a cluster if there are several. Block: kFusedThreads or fewer
/// warps.
template <class T, int kCluster, bool kVectorized>
__global__ void __launch_bounds__(kFusedThreads)
    swiglu_quantize_rows(const __grid_constant__ SwigluParams params) {
  __shared__ std::uint32_t warp_largest[kCluster * kFusedWarps];  // of all CTAs of the row
  constexpr int kKept = kCluster > 1 ? 1 : kFusedKept;            // 32768 columns of a cluster
  ptx::launch_dependents();
  const unsigned part = blockIdx.x % kCluster;  // of the row
  const std::int64_t m = blockIdx.x / kCluster;
  const T* gate = static_cast<const T*>(params.x) + m * params.x_stride;
  const T* up = gate + params.k;
  std::int8_t* q = params.q + m * params.q_stride;
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned warps = blockDim.x / kWarpSize;
  // Vectors, of which each CTA has as many as the others, but for the last.
  const std::int64_t vectors = (params.k + kQuantizeVector - 1) / kQuantizeVector;
  const std::int64_t share = (vectors + kCluster - 1) / kCluster * kQuantizeVector;
  const std::int64_t first =
      part * share + static_cast<std::int64_t>(threadIdx.x) * kQuantizeVector;
  const std::int64_t end = min(params.k, (part + 1) * share);
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kQuantizeVector;
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) ptx::cluster_arrive();  // this CTA runs: it can be written to
#endif
  ptx::wait_for_dependencies();

  // Columns from `end` on are another CTA's, or none: they are taken as zeros, whose value is 0.
  QuantizeVector<T> gates[kKept], ups[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    gates[i] = load_columns<kVectorized>(gate, first + i * step, end);
    ups[i] = load_columns<kVectorized>(up, first + i * step, end);
  }
  const auto rest = [&](std::int64_t column) {
    return swiglu(load_columns<kVectorized>(gate, column, end),
                  load_columns<kVectorized>(up, column, end));
  };
  QuantizeVector<float> values[kKept];
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    values[i] = QuantizeVector<float>{};
    if (first + i * step < end) {
      values[i] = swiglu(gates[i], ups[i]);
      largest = max(largest, largest_magnitude(values[i]));
    }
  }
  for (std::int64_t column = first + kKept * step; column < end; column += step) {
    largest = max(largest, largest_magnitude(rest(column)));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if constexpr (kCluster > 1) {
#if __CUDA_ARCH__ >= 900
    ptx::cluster_wait();
    if (lane < kCluster) {
      const std::uint32_t slot = ptx::shared_address(&warp_largest[part * warps + warp]);
      ptx::store_cluster(ptx::map_shared_address(slot, lane), largest);
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
#endif
  } else {
    if (lane == 0) warp_largest[warp] = largest;
    __syncthreads();
  }
  for (unsigned i = lane; i < kCluster * warps; i += kWarpSize) {
    largest = max(largest, warp_largest[i]);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);

  const RowScale row = row_scale(largest);
  if (part == 0 && threadIdx.x == 0) params.scales[m] = row.scale;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const std::int64_t column = first + i * step;
    if (column >= end) continue;
    store_columns<kVectorized>(q, column, params.k, quantize_vector(values[i], row));
  }
  for (std::int64_t column = first + kKept * step; column < end; column += step) {
    store_columns<kVectorized>(q, column, params.k, quantize_vector(rest(column), row));
  }
}

}  // namespace kernels
}  // namespace binary_gemm
