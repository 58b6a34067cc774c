#pragma once

/// Slice scales on chip: one lane turns the fp16 scales of one row and slice into int16 mantissas.
///
/// Narrow (see reference.h): every scale is `mantissa * unit`, unit a power of two, |mantissa| <
/// 2^14.

#include <cuda_fp16.h>

#include <cstdint>

#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"

namespace binary_gemm {
namespace kernels {

/// How one row's scales of one slice are to be summed.
struct SliceUnit {
  float unit;   ///< u, a power of two
  bool narrow;  ///< false: sum by fused multiply-adds in the order of the groups
};

/// Adding 1.5 * 2^23 leaves an integer of up to 22 bits in the low bits of a float.
inline constexpr float kRoundToInteger = 12582912.0f;

/// The unit of `kPairs` pairs of fp16 scales, and its inverse. Narrow: surely, as they are finite
/// and their exponents differ by at most 3. Does not branch, so that several can be in flight.
template <int kPairs>
__device__ inline SliceUnit unit_of_close_scales(const std::uint32_t (&pairs)[kPairs],
                                                 float& inverse_unit) {
  constexpr std::uint32_t kMagnitudes = 0x7fff7fffu;
  constexpr std::uint32_t kExponentBits = 0x7c00u;  // also the magnitude of infinity
  // fp16 magnitudes compare as their bits do.
  std::uint32_t largest = pairs[0] & kMagnitudes;
  std::uint32_t smallest = largest;
#pragma unroll
  for (int i = 1; i < kPairs; ++i) {
    const std::uint32_t magnitude = pairs[i] & kMagnitudes;
    largest = __vmaxu2(largest, magnitude);
    smallest = __vminu2(smallest, magnitude);
  }
  const std::uint32_t max_bits = max(largest & 0xffffu, largest >> 16);
  const std::uint32_t min_bits = min(smallest & 0xffffu, smallest >> 16);

  // Every nonzero fp16 is a normal float, so the exponent field is floor(log2) + 127.
  const float s_max = __half2float(__ushort_as_half(static_cast<unsigned short>(max_bits)));
  const std::uint32_t field = max_bits == 0 ? 127u : __float_as_uint(s_max) >> 23;
  inverse_unit = __uint_as_float((2u * 127u + 13u - field) << 23);
  const bool finite = max_bits < kExponentBits;
  const bool close = (max_bits & kExponentBits) <= (min_bits & kExponentBits) + (3u << 10);
  return {__uint_as_float((field - 13u) << 23), finite && close};
}

/// The unit of `kPairs` pairs of fp16 scales, and its inverse.
template <int kPairs>
__device__ inline SliceUnit unit_of_scales(const std::uint32_t (&pairs)[kPairs],
                                           float& inverse_unit) {
  constexpr float kUnitOfInfinity = 0x1p115f;  // and of NaN; others are far below it
  SliceUnit slice = unit_of_close_scales(pairs, inverse_unit);
  if (!slice.narrow && slice.unit < kUnitOfInfinity) {
    slice.narrow = true;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      const float low = __fmul_rn(scale.x, inverse_unit);
      const float high = __fmul_rn(scale.y, inverse_unit);
      slice.narrow = slice.narrow && low == rintf(low) && high == rintf(high);
    }
  }
  return slice;
}

/// A pair of scales as mantissas, in the low 22 bits.
__device__ inline uint2 mantissa_bits(std::uint32_t pair, float inverse_unit) {
  const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return make_uint2(__float_as_uint(__fmaf_rn(scale.x, inverse_unit, kRoundToInteger)),
                    __float_as_uint(__fmaf_rn(scale.y, inverse_unit, kRoundToInteger)));
}

/// Replaces `kPairs` pairs of fp16 scales by pairs of int16 mantissas, left undefined where the
/// slice is wide.
template <int kPairs>
__device__ inline void pairs_to_mantissas(std::uint32_t (&pairs)[kPairs], float inverse_unit) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint2 two = mantissa_bits(pairs[i], inverse_unit);
    pairs[i] = __byte_perm(two.x, two.y, 0x5410);
  }
}

/// The same, and returns their unit.
template <int kPairs>
__device__ inline SliceUnit scales_to_mantissas(std::uint32_t (&pairs)[kPairs]) {
  float inverse_unit;
  const SliceUnit unit = unit_of_scales(pairs, inverse_unit);
  pairs_to_mantissas(pairs, inverse_unit);
  return unit;
}

/// Stores a row's mantissas of a slice, a pair a word, 16-byte aligned; two pairs are of groups of
/// 256, and each mantissa counts for two blocks of 128.
template <int kPairs>
__device__ inline void store_mantissas(char* row, const std::uint32_t (&pairs)[kPairs]) {
  auto* target = reinterpret_cast<uint4*>(row);
  if constexpr (kPairs == 2) {
    *target = make_uint4(__byte_perm(pairs[0], 0, 0x1010), __byte_perm(pairs[0], 0, 0x3232),
                         __byte_perm(pairs[1], 0, 0x1010), __byte_perm(pairs[1], 0, 0x3232));
  } else {
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i) {
      target[i] = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
    }
  }
}

/// Whether rows of scales can be copied by the kBytes of a slice, or 16 of them.
template <int kBytes>
__device__ inline bool scales_are_aligned(const __half* scales, std::uint32_t stride) {
  constexpr std::uint32_t kUnit = kBytes < 16 ? kBytes : 16;
  return (static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(scales)) | stride * 2) %
             kUnit ==
         0;
}

/// Copies a row's kScales of one slice, which are aligned, to shared memory by cp.async.
template <int kScales>
__device__ inline void fetch_aligned_scales(char* target, const __half* source) {
  if constexpr (kScales == 4) {
    ptx::cp_async_8(ptx::shared_address(target), source);
  } else {
#pragma unroll
    for (int i = 0; i < kScales; i += 8) {
      ptx::cp_async_16(ptx::shared_address(target) + i * 2, source + i);
    }
  }
}

/// The same of any alignment: by cp.async too, of pairs, if they lie on 4 bytes. `count`: how many
/// are left in the row; zeros past them. (2560 x 9728, whose rows are of 152 bytes, at M = 32 on an
/// H200, us: one by one 17.9, by pairs 10.0.)
template <int kScales>
__device__ inline void fetch_some_scales(char* target, const __half* source, unsigned count) {
  if (reinterpret_cast<std::uintptr_t>(source) % 4 == 0) {
    const std::uint32_t to = ptx::shared_address(target);
#pragma unroll 4
    for (unsigned i = 0; i < kScales; i += 2) {
      const unsigned bytes = i < count ? min((count - i) * 2, 4) : 0;
      ptx::cp_async_4_or_zeros(to + i * 2, source + i, bytes);
    }
  } else {
#pragma unroll 1
    for (unsigned i = 0; i < kScales; ++i) {
      reinterpret_cast<__half*>(target)[i] = i < count ? source[i] : __half{};
    }
  }
}

/// A row's scales of one slice from shared memory, 8-byte aligned, a pair a word.
template <int kPairs>
__device__ inline void load_row_scales(const char* row, std::uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; i += 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(row + i * 4);
    pairs[i] = two.x, pairs[i + 1] = two.y;
  }
}

/// Puts a row's mantissas where its scales were.
template <int kPairs>
__device__ inline void store_row_mantissas(char* row, const std::uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; i += 2) {
    *reinterpret_cast<uint2*>(row + i * 4) = make_uint2(pairs[i], pairs[i + 1]);
  }
}

/// Turns a row's scales of one slice into mantissas, in place, and returns their unit. A wide row
/// keeps its scales; its unit is 0, which no narrow row's is.
template <int kScales>
__device__ inline float convert_row_scales(char* row) {
  std::uint32_t pairs[kScales / 2];
  load_row_scales(row, pairs);
  const SliceUnit unit = scales_to_mantissas(pairs);
  if (!unit.narrow) return 0;
  store_row_mantissas(row, pairs);
  return unit.unit;
}

/// Row `half` of a fragment (g, or g + 8): sum += mantissa · dot if it is narrow. If it is wide,
/// sum is a float, `m` an fp16 scale, and the contract's fused multiply-add is done.
template <int kHalf, int kValues>
__device__ inline void add_with_wide(std::int32_t (&sum)[kValues],
                                     const std::int32_t (&dot)[kValues], std::int16_t m,
                                     bool wide) {
  if (wide) {
    const float scale = __half2float(__short_as_half(m));
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i % 4 / 2 != kHalf) continue;
      sum[i] = __float_as_int(__fmaf_rn(scale, static_cast<float>(dot[i]), __int_as_float(sum[i])));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i % 4 / 2 == kHalf) sum[i] += m * dot[i];
    }
  }
}

/// Zeros in place of the first half of a slice's scales, if so.
template <int kPairs>
__device__ inline void zero_first_half(std::uint32_t (&pairs)[kPairs], bool yes) {
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i) pairs[i] = yes ? 0 : pairs[i];
}

/// The sum of a wide slice of one row: lane i of the warp holds `dot`, that of word i of what is
/// read; `scales` are the row's of that, of which those of groups `begin` to `end` are the slice's.
template <int kGroup>
__device__ inline float wide_sum(std::int32_t dot, const __half* scales, unsigned begin,
                                 unsigned end) {
  float sum = 0;
#pragma unroll 1
  for (unsigned group = begin; group < end; ++group) {
    std::int32_t total = 0;
    for (unsigned i = 0; i < kGroup / 32; ++i) {
      total += __shfl_sync(0xffffffffu, dot, static_cast<int>(group * (kGroup / 32) + i));
    }
    sum = __fmaf_rn(__half2float(scales[group]), static_cast<float>(total), sum);
  }
  return sum;
}

}  // namespace kernels
}  // namespace binary_gemm
