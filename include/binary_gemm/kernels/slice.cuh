#pragma once

/// Slice scales on chip: one lane turns the fp16 scales of one row and slice into int16 mantissas.
///
/// Narrow (see reference.h): every scale is `mantissa * unit`, unit a power of two, |mantissa| <
/// 2^14.

#include <cuda_fp16.h>

#include <cstdint>

#include "binary_gemm/kernels/params.cuh"

namespace binary_gemm {
namespace kernels {

/// How one row's scales of one slice are to be summed.
struct SliceUnit {
  float unit;   ///< u, a power of two
  bool narrow;  ///< false: sum by fused multiply-adds in the order of the groups
};

/// Replaces `kPairs` pairs of fp16 scales by pairs of int16 mantissas (left undefined where the
/// slice is wide) and returns their unit.
template <int kPairs>
__device__ inline SliceUnit scales_to_mantissas(std::uint32_t (&pairs)[kPairs]) {
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
  const float inverse_unit = __uint_as_float((2u * 127u + 13u - field) << 23);
  SliceUnit slice{__uint_as_float((field - 13u) << 23), true};

  // Adding 1.5 * 2^23 leaves an integer of up to 22 bits in the low bits of the float.
  constexpr float kRound = 12582912.0f;
  // Exponents that differ by at most 3 always give integers; others are looked at one by one.
  bool integers = max_bits < kExponentBits;
  const bool close = (max_bits & kExponentBits) <= (min_bits & kExponentBits) + (3u << 10);
  if (integers && !close) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      const float low = __fmul_rn(scale.x, inverse_unit);
      const float high = __fmul_rn(scale.y, inverse_unit);
      integers = integers && low == rintf(low) && high == rintf(high);
    }
  }
  slice.narrow = integers;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    const std::uint32_t low = __float_as_uint(__fmaf_rn(scale.x, inverse_unit, kRound));
    const std::uint32_t high = __float_as_uint(__fmaf_rn(scale.y, inverse_unit, kRound));
    pairs[i] = __byte_perm(low, high, 0x5410);
  }
  return slice;
}

/// The sum of a wide slice of one row: lane i of the warp holds `dot`, that of word i; `scales` are
/// the row's of the slice.
template <int kGroup>
__device__ inline float wide_sum(std::int32_t dot, const __half* scales, unsigned groups) {
  float sum = 0;
#pragma unroll 1
  for (unsigned group = 0; group < groups; ++group) {
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
