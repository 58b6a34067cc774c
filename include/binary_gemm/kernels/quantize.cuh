#pragma once

/// The activation quantizer: a CTA or a cluster a row (token), the same bits as reference.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"

namespace binary_gemm {
namespace kernels {

struct QuantizeParams {
  const void* x;  ///< [m, k]
  std::int64_t x_stride;
  std::int8_t* q;  ///< [m, k]
  std::int64_t q_stride;
  float* scales;  ///< [m]
  std::int64_t k;
  /// 0: q is row-major. Else the group size whose order (expand.cuh) q has, in rows padded with
  /// zeros to a multiple of 128 and 16-byte aligned.
  int order;
  bool vectorized;       ///< x's rows are 16-byte aligned, q's 8-byte, and k is a multiple of 8
  std::uint32_t* flags;  ///< see TileShares: to be zeroed, kHandOverCtas of them; or null
};

__device__ inline float as_float(float value) { return value; }
__device__ inline float as_float(__half value) { return __half2float(value); }
__device__ inline float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }

/// Elements a thread takes at once.
inline constexpr int kQuantizeVector = 8;
inline constexpr int kQuantizeThreads = 512;
/// Vectors a thread keeps in registers between the two passes; longer rows are read twice.
inline constexpr int kQuantizeKept = 2;

template <class T>
struct alignas(16) QuantizeVector {
  T values[kQuantizeVector];
};

/// Eight elements of a row from `column`; zeros from `end` on. If `kVectorized`, the row is 16-byte
/// aligned and `end` a multiple of 8. Nothing is decided at run time, so that a load need not be
/// waited for before the next one.
template <bool kVectorized, class T>
__device__ inline QuantizeVector<T> load_columns(const T* row, std::int64_t column,
                                                 std::int64_t end) {
  QuantizeVector<T> vector;
  if constexpr (kVectorized) {
    constexpr int kWords = sizeof(vector) / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (column < end) words = reinterpret_cast<const uint4*>(row + column)[i];
      reinterpret_cast<uint4*>(&vector)[i] = words;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) {
      vector.values[i] = column + i < end ? row[column + i] : T{};
    }
  }
  return vector;
}

/// Magnitudes as bits: they compare as the values do, and infinities and NaNs are the largest.
template <class T>
__device__ inline std::uint32_t largest_magnitude(const QuantizeVector<T>& vector) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kQuantizeVector; ++i) {
    largest = max(largest, __float_as_uint(as_float(vector.values[i])) & 0x7fffffffu);
  }
  return largest;
}

/// Eight values of a block of 128, from `column` of it on (a multiple of 8), to their places in the
/// order that expand.cuh gives.
__device__ inline void store_ordered(std::int8_t* block, unsigned column, int group,
                                     std::uint32_t low, std::uint32_t high) {
  if (group == 32) {
    // column = 32 step + 8t: the halves' words of lane t.
    std::int8_t* target = block + column / 32 * 32 + column / 8 % 4 * 4;
    *reinterpret_cast<std::uint32_t*>(target) = __byte_perm(low, high, 0x5140);
    *reinterpret_cast<std::uint32_t*>(target + 16) = __byte_perm(low, high, 0x7362);
    return;
  }
  // The 16 values of which these are half belong to lane t; values v and v + 4 go side by side.
  const unsigned half = group >= 128 ? column / 16 % 2 : column / 64;
  const unsigned t = group >= 128 ? column / 32 : column / 16 % 4;
  std::int8_t* target = block + 64 * half + 4 * t + column / 8 % 2 * 2;
#pragma unroll
  for (unsigned j = 0; j < 4; ++j) {
    *reinterpret_cast<std::uint16_t*>(target + 16 * j) =
        static_cast<std::uint16_t>(__byte_perm(low, high, j | (4 + j) << 4));
  }
}

/// How a row is quantized: see reference.h.
struct RowScale {
  float scale;    ///< NaN if the row has an infinity or a NaN
  float lift;     ///< 127 / a would overflow for a tiny a; scaling both by 2^64 changes no mantissa
  float inverse;  ///< 127 / (a · lift), or 0 for a row of zeros
  bool finite;
};

/// From the bits of the row's largest magnitude.
__device__ inline RowScale row_scale(std::uint32_t largest) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  const float a = __uint_as_float(largest);
  RowScale row;
  row.finite = largest < kInfinity;
  row.scale = row.finite ? __fdiv_rn(a, 127.0f) : __uint_as_float(0x7fc00000u);
  row.lift = a < 0x1p-64f ? 0x1p64f : 1.0f;
  row.inverse = row.finite && a > 0 ? __fdiv_rn(127.0f, __fmul_rn(a, row.lift)) : 0.0f;
  return row;
}

/// A value that is finite, as an int8 in the low byte.
__device__ inline std::uint32_t quantize_value(float value, const RowScale& row) {
  // Adding 1.5 * 2^23 rounds to an integer, to nearest even, and leaves it in the low mantissa.
  constexpr float kRound = 12582912.0f;
  return __float_as_uint(__fadd_rn(__fmul_rn(__fmul_rn(value, row.lift), row.inverse), kRound));
}

/// Eight int8, four a word.
template <class T>
__device__ inline uint2 quantize_vector(const QuantizeVector<T>& vector, const RowScale& row) {
  std::uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    std::uint32_t bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bytes[i] = quantize_value(as_float(vector.values[4 * w + i]), row);
    }
    const std::uint32_t low = __byte_perm(bytes[0], bytes[1], 0x0040);
    const std::uint32_t high = __byte_perm(bytes[2], bytes[3], 0x0040);
    words[w] = __byte_perm(low, high, 0x5410);
  }
  return row.finite ? make_uint2(words[0], words[1]) : make_uint2(0, 0);
}

/// Writes eight int8 of a row that is not ordered, those below k. If `kVectorized`, the row is
/// 8-byte aligned and k a multiple of 8.
template <bool kVectorized>
__device__ inline void store_columns(std::int8_t* row, std::int64_t column, std::int64_t k,
                                     uint2 words) {
  if constexpr (kVectorized) {
    *reinterpret_cast<uint2*>(row + column) = words;
  } else {
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) {
      if (column + i < k) {
        row[column + i] = static_cast<std::int8_t>((i < 4 ? words.x : words.y) >> i % 4 * 8);
      }
    }
  }
}

/// CTAs of a cluster that share a row in quantize_parts; 8 is what every device has.
inline constexpr int kRowParts = 8;

/// The values of x themselves, for quantize_parts.
template <class T>
struct PlainValues {
  const T* x;

  __device__ PlainValues(const void* rows, std::int64_t row_begin, std::int64_t)
      : x(static_cast<const T*>(rows) + row_begin) {}

  __device__ QuantizeVector<float> operator()(std::int64_t column, std::int64_t end) const {
    const QuantizeVector<T> vector = load_columns<true>(x, column, end);
    QuantizeVector<float> values;
#pragma unroll
    for (int i = 0; i < kQuantizeVector; ++i) values.values[i] = as_float(vector.values[i]);
    return values;
  }
};

/// Rows that are vectorized and not ordered, in parts: `Values` gives eight values from a column,
/// from a pointer to the row and its length. Grid: kParts CTAs a row in x, a cluster if there are
/// several. Block: kQuantizeThreads or fewer warps.
template <class Values, int kParts>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_parts(const __grid_constant__ QuantizeParams params) {
  constexpr unsigned kWarps = kQuantizeThreads / kWarpSize;
  __shared__ std::uint32_t warp_largest[kParts * kWarps];  // of all CTAs of the row
  ptx::launch_dependents();
  const unsigned part = blockIdx.x % kParts;  // of the row
  const std::int64_t m = blockIdx.x / kParts;
  const Values row_values(params.x, m * params.x_stride, params.k);
  std::int8_t* q = params.q + m * params.q_stride;
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned warps = blockDim.x / kWarpSize;
  // Vectors, of which each CTA has as many as the others, but for the last.
  const std::int64_t vectors = (params.k + kQuantizeVector - 1) / kQuantizeVector;
  const std::int64_t share = (vectors + kParts - 1) / kParts * kQuantizeVector;
  const std::int64_t first =
      part * share + static_cast<std::int64_t>(threadIdx.x) * kQuantizeVector;
  const std::int64_t end = min(params.k, (part + 1) * share);
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kQuantizeVector;
#if __CUDA_ARCH__ >= 900
  if constexpr (kParts > 1) ptx::cluster_arrive();  // this CTA runs: it can be written to
#endif
  ptx::wait_for_dependencies();

  // The first values stay; those of longer rows are read and computed again.
  QuantizeVector<float> kept{};
  std::uint32_t largest = 0;
#pragma unroll 1
  for (std::int64_t column = first; column < end; column += step) {
    const QuantizeVector<float> values = row_values(column, end);
    if (column == first) kept = values;
    largest = max(largest, largest_magnitude(values));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if constexpr (kParts > 1) {
#if __CUDA_ARCH__ >= 900
    ptx::cluster_wait();
    if (lane < kParts) {
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
  for (unsigned i = lane; i < kParts * warps; i += kWarpSize) {
    largest = max(largest, warp_largest[i]);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);

  const RowScale row = row_scale(largest);
  if (part == 0 && threadIdx.x == 0) params.scales[m] = row.scale;
#pragma unroll 1
  for (std::int64_t column = first; column < end; column += step) {
    if (column != first) kept = row_values(column, end);
    store_columns<true>(q, column, params.k, quantize_vector(kept, row));
  }
}

/// Two values of a 2-byte type in a word.
__device__ inline float2 unpack_pair(std::uint32_t word, __nv_bfloat16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ inline float2 unpack_pair(std::uint32_t word, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

/// The largest magnitude of 32 values, two a word, as the bits of a float.
template <class T>
__device__ inline std::uint32_t largest_of_chunk(const std::uint32_t (&pairs)[16]) {
  constexpr std::uint32_t kMagnitudes = 0x7fff7fffu;
  std::uint32_t largest = pairs[0] & kMagnitudes;
#pragma unroll
  for (int i = 1; i < 16; ++i) largest = __vmaxu2(largest, pairs[i] & kMagnitudes);
  return __float_as_uint(unpack_pair(max(largest & 0xffffu, largest >> 16), T{}).x);
}

/// 32 values, two a word, to int8, four a word.
template <class T>
__device__ inline void quantize_chunk(std::uint32_t (&words)[8], const std::uint32_t (&pairs)[16],
                                      const RowScale& row) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    QuantizeVector<float> vector;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpack_pair(pairs[4 * i + j], T{});
      vector.values[2 * j] = two.x, vector.values[2 * j + 1] = two.y;
    }
    const uint2 eight = quantize_vector(vector, row);
    words[2 * i] = eight.x, words[2 * i + 1] = eight.y;
  }
}

/// Grid: a CTA a row in x. Block: kQuantizeThreads.
template <class T, bool kVectorized>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows(const __grid_constant__ QuantizeParams params) {
  __shared__ std::uint32_t warp_largest[kQuantizeThreads / kWarpSize];
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  zero_flags<kQuantizeThreads>(params.flags);
  const T* x = static_cast<const T*>(params.x) + blockIdx.x * params.x_stride;
  std::int8_t* q = params.q + blockIdx.x * params.q_stride;
  constexpr int kStep = kQuantizeThreads * kQuantizeVector;
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x) * kQuantizeVector;

  QuantizeVector<T> kept[kQuantizeKept];
#pragma unroll
  for (int i = 0; i < kQuantizeKept; ++i) {
    kept[i] = load_columns<kVectorized>(x, first + i * kStep, params.k);
  }
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kQuantizeKept; ++i) largest = max(largest, largest_magnitude(kept[i]));
  for (std::int64_t column = first + kQuantizeKept * kStep; column < params.k; column += kStep) {
    largest = max(largest, largest_magnitude(load_columns<kVectorized>(x, column, params.k)));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % kWarpSize == 0) warp_largest[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
  largest =
      __reduce_max_sync(0xffffffffu, warp_largest[threadIdx.x % (kQuantizeThreads / kWarpSize)]);

  const RowScale row = row_scale(largest);
  if (threadIdx.x == 0) params.scales[blockIdx.x] = row.scale;
  const std::int64_t columns =
      params.order != 0 ? (params.k + kOrderBlock - 1) / kOrderBlock * kOrderBlock : params.k;
  const auto store = [&](std::int64_t column, const QuantizeVector<T>& vector) {
    if (column >= columns) return;
    const uint2 words = quantize_vector(vector, row);
    if (params.order != 0) {
      store_ordered(q + column / kOrderBlock * kOrderBlock,
                    static_cast<unsigned>(column % kOrderBlock), params.order, words.x, words.y);
    } else {
      store_columns<kVectorized>(q, column, params.k, words);
    }
  };
#pragma unroll
  for (int i = 0; i < kQuantizeKept; ++i) store(first + i * kStep, kept[i]);
  for (std::int64_t column = first + kQuantizeKept * kStep; column < columns; column += kStep) {
    store(column, load_columns<kVectorized>(x, column, params.k));
  }
}

}  // namespace kernels
}  // namespace binary_gemm
