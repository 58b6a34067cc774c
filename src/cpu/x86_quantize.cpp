/// Activation quantization of the x86 paths, in AVX2: 32 elements a step, in two passes over a row
/// that fits a cache. (AVX-512 has no say in it: a row of 5120 takes about a microsecond.)

#ifdef __x86_64__

#include <algorithm>
#include <limits>

#include "x86.h"

namespace binary_gemm {
namespace cpu {
namespace {

BINARY_GEMM_AVX2 inline __m256 load8(const float* x) { return _mm256_loadu_ps(x); }

BINARY_GEMM_AVX2 inline __m256 load8(const float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

BINARY_GEMM_AVX2 inline __m256 load8(const bfloat16* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

BINARY_GEMM_AVX2 inline std::uint32_t max_of_lanes(__m256i v) {
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(half));
}

// The largest magnitude's bits, which compare as the magnitudes do, infinities and NaNs above all.
template <class T>
BINARY_GEMM_AVX2 std::uint32_t largest_magnitude(const T* x, std::int64_t k) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i lanes[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  std::int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const __m256i x0 = _mm256_castps_si256(load8(x + i));
    const __m256i x1 = _mm256_castps_si256(load8(x + i + 8));
    lanes[0] = _mm256_max_epu32(lanes[0], _mm256_and_si256(x0, magnitude));
    lanes[1] = _mm256_max_epu32(lanes[1], _mm256_and_si256(x1, magnitude));
  }
  std::uint32_t largest = max_of_lanes(_mm256_max_epu32(lanes[0], lanes[1]));
  for (; i < k; ++i) largest = std::max(largest, float_bits(to_float(x[i])) & 0x7fffffffu);
  return largest;
}

template <class T>
BINARY_GEMM_AVX2 float quantize(const T* x, std::int64_t k, std::int8_t* q) {
  const std::uint32_t largest_bits = largest_magnitude(x, k);
  const float largest = float_from_bits(largest_bits);
  if (largest_bits >= 0x7f800000u || largest_bits == 0) {
    std::fill(q, q + k, std::int8_t{0});
    return largest_bits == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float lift = largest < 0x1p-64f ? 0x1p64f : 1.0f;  // see reference.h
  const float inverse = 127.0f / (largest * lift);
  const __m256 lifts = _mm256_set1_ps(lift);
  const __m256 inverses = _mm256_set1_ps(inverse);
  // The two packs leave elements 4 i to 4 i + 3 in lane 0, 4, 1, 5, 2, 6, 3, 7.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  std::int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    __m256i v[4];
    BINARY_GEMM_UNROLL
    for (int j = 0; j < 4; ++j) {
      v[j] =
          _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(load8(x + i + 8 * j), lifts), inverses));
    }
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i),
                        _mm256_permutevar8x32_epi32(bytes, order));
  }
  for (; i < k; ++i) {
    q[i] = static_cast<std::int8_t>(_mm_cvtss_si32(_mm_set_ss(to_float(x[i]) * lift * inverse)));
  }
  return largest / 127.0f;
}

}  // namespace

BINARY_GEMM_AVX2 float avx2_quantize_row(const void* x, DataType type, std::int64_t k,
                                         std::int8_t* q) {
  switch (type) {
    case DataType::kFloat16:
      return quantize(static_cast<const float16*>(x), k, q);
    case DataType::kBFloat16:
      return quantize(static_cast<const bfloat16*>(x), k, q);
    default:
      return quantize(static_cast<const float*>(x), k, q);
  }
}

}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__
