#pragma once

/// What the AVX-512 and AMX paths share: 16 weight rows in the sixteen 32-bit lanes, from memory to
/// the output. The products between are in avx512.cpp and amx.cpp.

#ifdef __x86_64__

#include <algorithm>

#include "x86.h"

BINARY_GEMM_AVX512_WARNINGS

namespace binary_gemm {
namespace cpu {
namespace avx512 {

inline constexpr int kLanes = 16;
inline constexpr int kHalves = 2;
inline constexpr int kRows = kHalves * kLanes;
inline constexpr std::int64_t kSliceWords = kSliceK / 32;

/// How a group's dot joins the sum of its slice.
enum class Join {
  kInt16,  // narrow, |dot| <= 2^14
  kInt32,  // narrow, |dot| <= 2^15 (G = 256)
  kFloat,  // wide
};

/// Sixteen rows of one slice, rows in lanes.
struct Half {
  __mmask16 wide;  // rows whose slice is wide
  alignas(64) float units[kLanes];
  alignas(64) std::uint32_t words[kSliceWords][kLanes];
  alignas(64) float scales[kMaxSliceGroups][kLanes];
  alignas(64) std::int32_t mantissas[kMaxSliceGroups][kLanes];
};

struct Weights {
  std::int64_t groups;
  std::int64_t words_per_group;
  Half halves[kHalves];
};

/// Pointers to 16 rows; rows past the end of the range repeat its last.
struct Rows {
  const std::uint32_t* bits[kLanes];
  const float16* scales[kLanes];
  std::int64_t bits_ahead;  // words from a row to the one to prefetch
};

BINARY_GEMM_AVX512 inline __m512i load(const void* p) { return _mm512_load_si512(p); }

/// An address to prefetch, which may lie past the end of the buffer: nothing is read.
inline const char* ahead(const void* p, std::int64_t bytes) {
  return reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(p) +
                                       static_cast<std::uintptr_t>(bytes));
}

/// (row R16, word W16) in memory -> words[W16][R16]. Words from `count` on come out 0.
BINARY_GEMM_AVX512 inline void transpose_words(const Rows& rows, std::int64_t first,
                                               std::int64_t count, std::uint32_t (*words)[kLanes]) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
  __m512i a[16];
  __m512i b[16];
  BINARY_GEMM_UNROLL
  for (int r = 0; r < 16; ++r) {
    a[r] = _mm512_maskz_loadu_epi32(mask, rows.bits[r] + first);
    // The row's next slice, and this slice of the rows that come next: 5120x5120 from memory at
    // M = 2 in 534 us instead of 584 with the latter alone, to L1.
    _mm_prefetch(ahead(rows.bits[r] + first, kSliceK / 8), _MM_HINT_T0);
    _mm_prefetch(ahead(rows.bits[r] + first, rows.bits_ahead * 4), _MM_HINT_T1);
  }
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 i + c]: 128-bit lane v is word 4 v + c of rows 4 i to 4 i + 3.
  BINARY_GEMM_UNROLL
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
  }
  BINARY_GEMM_UNROLL
  for (int c = 0; c < 4; ++c) {
    _mm512_store_si512(words[c], _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88));
    _mm512_store_si512(words[8 + c], _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd));
    _mm512_store_si512(words[4 + c], _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88));
    _mm512_store_si512(words[12 + c], _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd));
  }
}

/// Four rows' scales, a row in a 128-bit lane.
BINARY_GEMM_AVX512 inline __m512i load_scales(const Rows& rows, int r, std::int64_t first,
                                              std::int64_t count) {
  const auto mask = static_cast<__mmask8>(count >= 8 ? 0xff : (1 << count) - 1);
  __m512i v = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(mask, rows.scales[r] + first));
  v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(mask, rows.scales[r + 4] + first), 1);
  v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(mask, rows.scales[r + 8] + first), 2);
  return _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(mask, rows.scales[r + 12] + first), 3);
}

/// (row R16, group G8) fp16 in memory -> scales[G8][R16] as floats. Returns the 16 rows' largest
/// magnitudes as fp16 bits. Groups from `count` on come out 0.
BINARY_GEMM_AVX512 inline __m256i transpose_scales(const Rows& rows, std::int64_t first,
                                                   std::int64_t count, float (*scales)[kLanes]) {
  // A 128-bit lane v of these four vectors is rows 4 v, 4 v + 1, 4 v + 2 and 4 v + 3.
  const __m512i r0 = load_scales(rows, 0, first, count);
  const __m512i r1 = load_scales(rows, 1, first, count);
  const __m512i r2 = load_scales(rows, 2, first, count);
  const __m512i r3 = load_scales(rows, 3, first, count);
  const __m512i r02_low = _mm512_unpacklo_epi16(r0, r2);
  const __m512i r02_high = _mm512_unpackhi_epi16(r0, r2);
  const __m512i r13_low = _mm512_unpacklo_epi16(r1, r3);
  const __m512i r13_high = _mm512_unpackhi_epi16(r1, r3);
  // Each lane: two groups of four rows.
  const __m512i pairs[4] = {
      _mm512_unpacklo_epi16(r02_low, r13_low), _mm512_unpackhi_epi16(r02_low, r13_low),
      _mm512_unpacklo_epi16(r02_high, r13_high), _mm512_unpackhi_epi16(r02_high, r13_high)};
  const __m512i split = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i groups = _mm512_permutexvar_epi64(split, pairs[i]);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(groups, magnitude));
    _mm512_store_ps(scales[2 * i], _mm512_cvtph_ps(_mm512_castsi512_si256(groups)));
    _mm512_store_ps(scales[2 * i + 1], _mm512_cvtph_ps(_mm512_extracti64x4_epi64(groups, 1)));
  }
  return _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
}

/// The slice's scales, and from them what slice_scales() in kernel.h gives for each row.
BINARY_GEMM_AVX512 inline void load_scales(const Rows& rows, std::int64_t first, std::int64_t count,
                                           bool int16_mantissas, Half& w) {
  __m256i largest = _mm256_setzero_si256();
  for (std::int64_t g = 0; g < count; g += 8) {
    largest = _mm256_max_epu16(largest, transpose_scales(rows, first + g, count - g, w.scales + g));
  }
  const __m512i magnitude = _mm512_castps_si512(_mm512_cvtph_ps(largest));
  const __m512i one_field = _mm512_set1_epi32(127);
  const __m512i field =
      _mm512_sub_epi32(_mm512_mask_srli_epi32(
                           one_field, _mm512_test_epi32_mask(magnitude, magnitude), magnitude, 23),
                       _mm512_set1_epi32(13));
  const __m512i inverse_field = _mm512_sub_epi32(_mm512_set1_epi32(2 * 127), field);
  const __m512 inverse_unit = _mm512_castsi512_ps(_mm512_slli_epi32(inverse_field, 23));
  __mmask16 wide = _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  // vpdpwssd multiplies the lower half of a mantissa with a dot, and its upper half with nothing.
  const __m512i keep = _mm512_set1_epi32(int16_mantissas ? 0xffff : -1);
  for (std::int64_t g = 0; g < count; ++g) {
    const __m512 mantissa = _mm512_mul_ps(_mm512_load_ps(w.scales[g]), inverse_unit);
    const __m512i integer = _mm512_cvtps_epi32(mantissa);
    wide = static_cast<__mmask16>(
        wide | _mm512_cmp_ps_mask(_mm512_cvtepi32_ps(integer), mantissa, _CMP_NEQ_UQ));
    _mm512_store_si512(w.mantissas[g], _mm512_and_si512(integer, keep));
  }
  w.wide = wide;
  _mm512_store_si512(w.units, _mm512_slli_epi32(field, 23));
}

BINARY_GEMM_AVX512 inline void load_weights(const GemmArguments& a, const Rows (&rows)[kHalves],
                                            std::int64_t k0, Weights& w) {
  const std::int64_t words = std::min(kSliceK, a.k - k0) / 32;
  w.words_per_group = a.group_size / 32;
  w.groups = words / w.words_per_group;
  for (int h = 0; h < kHalves; ++h) {
    for (std::int64_t j = 0; j < words; j += 16) {
      transpose_words(rows[h], k0 / 32 + j, words - j, w.halves[h].words + j);
    }
    load_scales(rows[h], k0 / a.group_size, w.groups, a.group_size <= 128, w.halves[h]);
  }
}

/// The 32 rows from n on, of those before row_end.
inline void point_to_rows(const GemmArguments& a, std::int64_t n, std::int64_t row_end,
                          Rows (&rows)[kHalves]) {
  for (std::int64_t r = 0; r < kRows; ++r) {
    const std::int64_t row = std::min(n + r, row_end - 1);
    rows[r / kLanes].bits[r % kLanes] = a.bits + row * a.bits_stride;
    rows[r / kLanes].scales[r % kLanes] = a.scales + row * a.scales_stride;
  }
  for (Rows& half : rows) half.bits_ahead = n + 2 * kRows <= row_end ? kRows * a.bits_stride : 0;
}

/// A slice's sum (int32 or, for Join::kFloat, float bits) with a group's dots added. `factors` are
/// the group's mantissas or, for Join::kFloat, its scales.
template <Join kJoin>
BINARY_GEMM_AVX512 inline __m512i join_dots(__m512i sum, __m512i dots, __m512i factors) {
  if constexpr (kJoin == Join::kInt16) {
    return _mm512_dpwssd_epi32(sum, dots, factors);
  } else if constexpr (kJoin == Join::kInt32) {
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(dots, factors));
  } else {
    return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(factors),
                                               _mm512_cvtepi32_ps(dots), _mm512_castsi512_ps(sum)));
  }
}

inline bool any_wide(const Weights& w) { return (w.halves[0].wide | w.halves[1].wide) != 0; }
inline bool any_narrow(const Weights& w) { return (w.halves[0].wide & w.halves[1].wide) != 0xffff; }

/// The Join of narrow slices.
inline Join narrow_join(const Weights& w) {
  return w.words_per_group <= 4 ? Join::kInt16 : Join::kInt32;
}

/// Adds the sums of the slice's narrow or wide rows to acc[tokens][16].
BINARY_GEMM_AVX512 inline void add_slice(const Half& w, bool wide, int tokens,
                                         const std::int32_t (*sums)[kLanes], float (*acc)[kLanes]) {
  const auto rows = static_cast<__mmask16>(wide ? w.wide : ~w.wide);
  const __m512 units = _mm512_load_ps(w.units);
  for (int t = 0; t < tokens; ++t) {
    const __m512i lanes = load(sums[t]);
    const __m512 sum =
        wide ? _mm512_castsi512_ps(lanes) : _mm512_mul_ps(_mm512_cvtepi32_ps(lanes), units);
    const __m512 old = _mm512_load_ps(acc[t]);
    _mm512_store_ps(acc[t], _mm512_mask_add_ps(old, rows, old, sum));
  }
}

/// `mask` of 16 elements of the residual from y[m, n] on.
BINARY_GEMM_AVX512 inline __m512 load_residual(const GemmArguments& a, std::int64_t m,
                                               std::int64_t n, __mmask16 mask) {
  const char* from =
      static_cast<const char*>(a.residual) + (m * a.residual_stride + n) * size_of(a.y_type);
  if (a.y_type == DataType::kFloat32) return _mm512_maskz_loadu_ps(mask, from);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, from);
  return a.y_type == DataType::kFloat16
             ? _mm512_cvtph_ps(half)
             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/// Applies token m's scale, the bias and the residual to the sums of rows n to n + 15 and writes
/// y[m, n] and on, `count` elements at most.
BINARY_GEMM_AVX512 inline void store_rows(const GemmArguments& a, std::int64_t m, std::int64_t n,
                                          std::int64_t count, __m512 sums) {
  const auto mask = static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << count) - 1);
  const __m512 scale = _mm512_set1_ps(a.x_scales[m]);
  __m512 result = a.bias != nullptr
                      ? _mm512_fmadd_ps(sums, scale, _mm512_maskz_loadu_ps(mask, a.bias + n))
                      : _mm512_mul_ps(sums, scale);
  if (a.residual != nullptr) result = _mm512_add_ps(load_residual(a, m, n, mask), result);
  char* y = static_cast<char*>(a.y) + (m * a.y_stride + n) * size_of(a.y_type);
  const __mmask16 nan = _mm512_cmp_ps_mask(result, result, _CMP_UNORD_Q);
  if (a.y_type == DataType::kFloat32) {
    _mm512_mask_storeu_ps(y, mask, result);
  } else if (a.y_type == DataType::kBFloat16) {
    const __m512i bits = _mm512_castps_si512(result);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(y, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  } else {
    const __m256i half = _mm512_cvtps_ph(result, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // The reference's NaN, of which the conversion would keep the payload.
    const __m256i sign = _mm256_and_si256(half, _mm256_set1_epi16(static_cast<short>(0x8000)));
    _mm256_mask_storeu_epi16(
        y, mask,
        _mm256_mask_mov_epi16(half, nan, _mm256_or_si256(sign, _mm256_set1_epi16(0x7e00))));
  }
}

}  // namespace avx512
}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__
