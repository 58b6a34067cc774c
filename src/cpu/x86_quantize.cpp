/// Activation quantization of the x86 paths, in AVX2: 32 elements a step, in two passes over a row
/// that fits a cache. (AVX-512 has no say in it: a row of 5120 takes about a microsecond.) And the
/// steps that an engine has before it, eight elements at once; see reference.h for what they are.

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

template <class T>
BINARY_GEMM_AVX2 void normalize(const T* x, std::int64_t k, const float* gain, float epsilon,
                                float* values) {
  static_assert(reference::kSquareSums % 8 == 0, "eight columns are eight neighbouring sums");
  alignas(32) float sums[reference::kSquareSums] = {};
  std::int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    float* sum = sums + i % reference::kSquareSums;
    const __m256 v = load8(x + i);
    _mm256_store_ps(sum, _mm256_fmadd_ps(v, v, _mm256_load_ps(sum)));
  }
  for (; i < k; ++i) {
    float& sum = sums[i % reference::kSquareSums];
    const float v = to_float(x[i]);
    sum = std::fma(v, v, sum);
  }
  const float sum = add_neighbours(sums, std::min(k, reference::kSquareSums));
  const float inverse = inverse_of_root(sum, k, epsilon);
  const __m256 inverses = _mm256_set1_ps(inverse);
  for (i = 0; i + 8 <= k; i += 8) {
    __m256 v = _mm256_mul_ps(load8(x + i), inverses);
    if (gain != nullptr) v = _mm256_mul_ps(v, _mm256_loadu_ps(gain + i));
    _mm256_storeu_ps(values + i, v);
  }
  for (; i < k; ++i) {
    const float v = to_float(x[i]) * inverse;
    values[i] = gain != nullptr ? v * gain[i] : v;
  }
}

// reference::exponential. The order of the operands of min and max keeps NaNs.
BINARY_GEMM_AVX2 inline __m256 exponential(__m256 value) {
  const __m256 x =
      _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(_mm256_set1_ps(-80.0f), value));
  const __m256 round = _mm256_set1_ps(12582912.0f);
  const __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(0x1.715476p+0f), round);
  const __m256 n = _mm256_sub_ps(shifted, round);
  const __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(0x1.bd0106p-13f),
                                   _mm256_fmadd_ps(n, _mm256_set1_ps(-0x1.63p-1f), x));
  __m256 p = _mm256_set1_ps(0x1.6a242ap-10f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.1239ecp-7f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.5558f2p-5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.555492p-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.fffffcp-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23),
                                         _mm256_set1_epi32(126 << 23));
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), _mm256_set1_ps(2.0f));
}

template <class T>
BINARY_GEMM_AVX2 void swiglu(const T* gate, const T* up, std::int64_t k, float* values) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 sign = _mm256_set1_ps(-0.0f);
  std::int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    const __m256 g = load8(gate + i);
    const __m256 e = exponential(_mm256_xor_ps(g, sign));
    const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, e));
    _mm256_storeu_ps(values + i, _mm256_mul_ps(silu, load8(up + i)));
  }
  for (; i < k; ++i) values[i] = reference::silu(to_float(gate[i])) * to_float(up[i]);
}

}  // namespace

BINARY_GEMM_AVX2 void avx2_normalize_row(const void* x, DataType type, std::int64_t k,
                                         const float* gain, float epsilon, float* values) {
  switch (type) {
    case DataType::kFloat16:
      return normalize(static_cast<const float16*>(x), k, gain, epsilon, values);
    case DataType::kBFloat16:
      return normalize(static_cast<const bfloat16*>(x), k, gain, epsilon, values);
    default:
      return normalize(static_cast<const float*>(x), k, gain, epsilon, values);
  }
}

BINARY_GEMM_AVX2 void avx2_swiglu_row(const void* gate, const void* up, DataType type,
                                      std::int64_t k, float* values) {
  switch (type) {
    case DataType::kFloat16:
      return swiglu(static_cast<const float16*>(gate), static_cast<const float16*>(up), k, values);
    case DataType::kBFloat16:
      return swiglu(static_cast<const bfloat16*>(gate), static_cast<const bfloat16*>(up), k,
                    values);
    default:
      return swiglu(static_cast<const float*>(gate), static_cast<const float*>(up), k, values);
  }
}

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
