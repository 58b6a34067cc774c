/// The AVX-512 path for one token: a weight row streams through in the order of memory.
///
/// A register holds 16 words (512 weights, a chunk) of one row. Plane p of it (one GFNI
/// instruction) is 64 bytes of 0 and 2, which vpdpbusd multiplies with the activations of the same
/// weights, packed in that order once a call:
///
///   lane j:  dot += sum_b 2 * bit(p + 8 b of word j) * q[32 j + p + 8 b]
///
/// From a seed of -sum(q) over the word, `dot` becomes the exact product of its 32 weights. Lanes
/// times the mantissas of their groups add up in int32 by one vpdpwssd, whatever G is, and only the
/// slices of 16 rows are summed over lanes, together: 18 instructions for 512 weights and about
/// 10 a row and slice beside them.
///
/// Scales become mantissas as integers of 16 bits: a row's fp16 are m * 2^(e - 25) with
/// 0 <= m < 2^11 and 1 <= e <= 30, so with u = 2^(max e - 28) a mantissa is m * 8 >> (max e - e).
/// (For subnormal maxima u is larger than the contract's, which changes no result: all scales are
/// then multiples of either.)

#include "avx512.h"

#ifdef __x86_64__

namespace binary_gemm {
namespace cpu {
namespace {

constexpr int kRows = 16;
constexpr std::int64_t kChunkWords = 16;
constexpr std::int64_t kSliceChunks = kSliceK / 32 / kChunkWords;
constexpr std::int64_t kMaxSpanSlices = 20;  // 17408 in one: 1275 us instead of 1600 at N = 5120

// How far ahead of its use memory is fetched, in bytes: to L2 early, to L1 shortly before. That far
// past the end of a row is the next one, unless the weights are a shard of columns.
// Tried, 5120x5120 from memory with two threads, best of eight runs in us: 196 like this; 208 with
// L2 at 8 KiB; 279 with L1 alone; 320 also without the scales.
constexpr int kToL1 = 2048;
constexpr int kToL2 = 16384;
constexpr int kScalesToL1 = 1024;

// The activations of 512 weights; zeros past the end of K.
struct Chunk {
  alignas(64) std::uint32_t values[kPlanes][kChunkWords];
  alignas(64) std::int32_t seeds[kChunkWords];
};

// The slices of 16 rows over a span of K.
struct Span {
  // For the row at hand: mantissas by group, and the largest e of a group's slice.
  alignas(64) std::int16_t mantissas[kMaxSpanSlices * kMaxSliceGroups + 32];
  alignas(64) std::int16_t exponents[kMaxSpanSlices * kMaxSliceGroups];
  // By slice and row.
  alignas(64) std::int32_t lanes[kMaxSpanSlices][kRows][kChunkWords];
  alignas(64) float units[kMaxSpanSlices][kRows];
  alignas(64) float wide_sums[kMaxSpanSlices][kRows];
  __mmask16 wide[kMaxSpanSlices];
};

// The maximum of each aligned segment of `length` (4, 8, 16 or 32) 16-bit lanes, in all of them.
BINARY_GEMM_AVX512 inline __m512i segment_max(__m512i v, std::int64_t length) {
  v = _mm512_max_epu16(v, _mm512_rol_epi32(v, 16));
  v = _mm512_max_epu16(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
  if (length >= 8) v = _mm512_max_epu16(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
  if (length >= 16) v = _mm512_max_epu16(v, _mm512_permutex_epi64(v, 0x4e));
  if (length >= 32) v = _mm512_max_epu16(v, _mm512_shuffle_i64x2(v, v, 0x4e));
  return v;
}

// Mantissas and exponents of `count` scales. Returns whether all slices are narrow; those of a wide
// slice have an exponent of 0 in a group that is no multiple of u.
BINARY_GEMM_AVX512 bool load_scales(const float16* scales, std::int64_t count,
                                    std::int64_t slice_groups, Span& span) {
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i implicit = _mm512_set1_epi16(0x400);
  __mmask32 any_wide = 0;
  for (std::int64_t g = 0; g < count; g += 32) {
    const auto mask = static_cast<__mmask32>(
        count - g >= 32 ? 0xffffffffu : (std::uint32_t{1} << (count - g)) - 1);
    const __m512i bits = _mm512_maskz_loadu_epi16(mask, scales + g);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    const __m512i exponent = _mm512_max_epu16(_mm512_srli_epi16(magnitude, 10), one);
    const __m512i fraction = _mm512_and_si512(magnitude, _mm512_set1_epi16(0x3ff));
    const __mmask32 normal = _mm512_cmpge_epu16_mask(magnitude, implicit);
    const __m512i significand =
        _mm512_slli_epi16(_mm512_mask_add_epi16(fraction, normal, fraction, implicit), 3);
    const __m512i largest = segment_max(exponent, slice_groups);
    const __m512i shift = _mm512_sub_epi16(largest, exponent);
    const __m512i mantissa = _mm512_srlv_epi16(significand, shift);
    const __mmask32 wide =
        _mm512_cmpneq_epi16_mask(_mm512_sllv_epi16(mantissa, shift), significand) |
        _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x7c00));
    any_wide |= wide;
    const __mmask32 negative = _mm512_movepi16_mask(bits);
    _mm512_store_si512(span.mantissas + g,
                       _mm512_mask_sub_epi16(mantissa, negative, _mm512_setzero_si512(), mantissa));
    _mm512_store_si512(span.exponents + g,
                       _mm512_mask_mov_epi16(largest, wide, _mm512_setzero_si512()));
  }
  return any_wide == 0;
}

// Each word's dot product with its 32 activations.
BINARY_GEMM_AVX512 inline __m512i chunk_dots(__m512i words, const Chunk& x) {
  __m512i dots = avx512::load(x.seeds);
  BINARY_GEMM_UNROLL
  for (int p = 0; p < kPlanes; ++p) {
    // Byte 6 of the matrix makes bit 1 of the result: here bit p of the operand.
    const __m512i plane =
        _mm512_gf2p8affine_epi64_epi8(words, _mm512_set1_epi64(1LL << (48 + p)), 0);
    dots = _mm512_dpbusd_epi32(dots, plane, avx512::load(x.values[p]));
  }
  return dots;
}

BINARY_GEMM_AVX512 inline __m512i load_chunk(const std::uint32_t* bits, std::int64_t words) {
  const auto mask = static_cast<__mmask16>(words >= kChunkWords ? 0xffff : (1 << words) - 1);
  return _mm512_maskz_loadu_epi32(mask, bits);
}

// The sum of a wide slice of `words` words.
BINARY_GEMM_AVX512 float wide_slice(const std::uint32_t* bits, const float16* scales,
                                    std::int64_t words, std::int64_t group_words, const Chunk* x) {
  alignas(64) std::int32_t word_dots[kSliceChunks * kChunkWords];
  for (std::int64_t j = 0; j < words; j += kChunkWords) {
    _mm512_store_si512(word_dots + j,
                       chunk_dots(load_chunk(bits + j, words - j), x[j / kChunkWords]));
  }
  std::int32_t dots[kMaxSliceGroups];
  for (std::int64_t g = 0; g < words / group_words; ++g) {
    dots[g] = 0;
    for (std::int64_t j = 0; j < group_words; ++j) dots[g] += word_dots[g * group_words + j];
  }
  return wide_sum(scales, dots, words / group_words);
}

// (row R16, lane L16) -> the 16 rows' sums over lanes.
BINARY_GEMM_AVX512 __m512i sum_lanes(const std::int32_t (*lanes)[kChunkWords]) {
  __m512i a[8];
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 8; ++i) {
    const __m512i even = avx512::load(lanes[2 * i]);
    const __m512i odd = avx512::load(lanes[2 * i + 1]);
    a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd));
  }
  // A 128-bit lane of b[i]: the rows 4 i to 4 i + 3, summed over that lane.
  __m512i b[4];
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                            _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  }
  const __m512i c0 = _mm512_add_epi32(_mm512_shuffle_i32x4(b[0], b[1], 0x88),
                                      _mm512_shuffle_i32x4(b[0], b[1], 0xdd));
  const __m512i c1 = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2], b[3], 0x88),
                                      _mm512_shuffle_i32x4(b[2], b[3], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(c0, c1, 0x88), _mm512_shuffle_i32x4(c0, c1, 0xdd));
}

// Fills the span's slices of row r, of `words` words from `bits` on.
BINARY_GEMM_AVX512 void add_row(const std::uint32_t* bits, const float16* scales,
                                std::int64_t words, std::int64_t group_words, const Chunk* x, int r,
                                Span& span) {
  const std::int64_t slice_words = kSliceK / 32;
  const std::int64_t slice_groups = slice_words / group_words;
  for (std::int64_t bytes = 0; bytes < words / group_words * 2; bytes += 64) {
    _mm_prefetch(avx512::ahead(scales, kScalesToL1 + bytes), _MM_HINT_T0);
  }
  const bool narrow = load_scales(scales, words / group_words, slice_groups, span);
  // In each 32-bit lane j, the group of word j, and nothing in the upper half.
  const __m512i word_index =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i group_index = _mm512_srl_epi32(
      word_index, _mm_cvtsi64_si128(__builtin_ctzll(static_cast<unsigned long long>(group_words))));
  const std::int64_t chunk_groups = kChunkWords / group_words;
  const std::int16_t* mantissas = span.mantissas;
  for (std::int64_t s = 0; s * slice_words < words; ++s) {
    const std::int64_t left = words - s * slice_words;
    __m512i sum = _mm512_setzero_si512();
    BINARY_GEMM_UNROLL
    for (int c = 0; c < kSliceChunks; ++c) {
      const std::uint32_t* chunk = bits + s * slice_words + c * kChunkWords;
      if (c * kChunkWords >= left) break;
      _mm_prefetch(avx512::ahead(chunk, kToL1), _MM_HINT_T0);
      _mm_prefetch(avx512::ahead(chunk, kToL2), _MM_HINT_T1);
      const __m512i dots = chunk_dots(load_chunk(chunk, left - c * kChunkWords), *x++);
      const __m512i lane_mantissas =
          _mm512_maskz_permutexvar_epi16(0x55555555, group_index, _mm512_loadu_si512(mantissas));
      mantissas += chunk_groups;
      sum = _mm512_dpwssd_epi32(sum, dots, lane_mantissas);
    }
    _mm512_store_si512(span.lanes[s][r], sum);
    const auto field = static_cast<std::uint32_t>(span.exponents[s * slice_groups]) + 127 - 28;
    span.units[s][r] = float_from_bits(field << 23);
  }
  if (narrow) return;
  for (std::int64_t s = 0; s * slice_words < words; ++s) {
    const std::int64_t left = std::min(slice_words, words - s * slice_words);
    const std::int16_t* exponents = span.exponents + s * slice_groups;
    if (std::find(exponents, exponents + left / group_words, 0) == exponents + left / group_words) {
      continue;
    }
    span.wide[s] = static_cast<__mmask16>(span.wide[s] | 1u << r);
    span.wide_sums[s][r] =
        wide_slice(bits + s * slice_words, scales + s * slice_groups, left, group_words,
                   x - (words + kChunkWords - 1) / kChunkWords + s * kSliceChunks);
  }
}

}  // namespace

PackedShape avx512_vector_shape(const GemmArguments& a) {
  return {1, (a.k / 32 + kChunkWords - 1) / kChunkWords * std::int64_t{sizeof(Chunk)}};
}

BINARY_GEMM_AVX512 void avx512_vector_pack(const GemmArguments& a, std::int64_t, char* packed) {
  auto* chunks = reinterpret_cast<Chunk*>(packed);
  const std::int64_t words = a.k / 32;
  for (std::int64_t j = 0; j < (words + kChunkWords - 1) / kChunkWords * kChunkWords; ++j) {
    Chunk& chunk = chunks[j / kChunkWords];
    alignas(16) std::uint32_t planes[kPlanes] = {};
    std::int32_t sum = 0;
    if (j < words) {
      const WordOfActivations q = load_activations(a.x + 32 * j);
      store_by_plane(q, planes);
      sum = q.first_sum + q.last_sum;
    }
    for (int p = 0; p < kPlanes; ++p) chunk.values[p][j % kChunkWords] = planes[p];
    chunk.seeds[j % kChunkWords] = -sum;
  }
}

BINARY_GEMM_AVX512 void avx512_vector_rows(const GemmArguments& a, const char* packed,
                                           std::int64_t row_begin, std::int64_t row_end) {
  const auto* x = reinterpret_cast<const Chunk*>(packed);
  const std::int64_t slices = (a.k + kSliceK - 1) / kSliceK;
  const std::int64_t spans = (slices + kMaxSpanSlices - 1) / kMaxSpanSlices;
  const std::int64_t span_slices = spans == 0 ? 0 : (slices + spans - 1) / spans;
  Span span;
  for (std::int64_t n = row_begin; n < row_end; n += kRows) {
    const std::int64_t rows = std::min<std::int64_t>(kRows, row_end - n);
    __m512 acc = _mm512_setzero_ps();
    for (std::int64_t s0 = 0; s0 < slices; s0 += span_slices) {
      const std::int64_t k0 = s0 * kSliceK;
      const std::int64_t words = std::min(span_slices * kSliceK, a.k - k0) / 32;
      std::fill(span.wide, span.wide + kMaxSpanSlices, __mmask16{0});
      for (std::int64_t r = 0; r < rows; ++r) {
        add_row(a.bits + (n + r) * a.bits_stride + k0 / 32,
                a.scales + (n + r) * a.scales_stride + k0 / a.group_size, words, a.group_size / 32,
                x + s0 * kSliceChunks, static_cast<int>(r), span);
      }
      for (std::int64_t s = 0; s * kSliceK < words * 32; ++s) {
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum_lanes(span.lanes[s])),
                                         _mm512_load_ps(span.units[s]));
        acc = _mm512_add_ps(
            acc, _mm512_mask_mov_ps(sum, span.wide[s], _mm512_load_ps(span.wide_sums[s])));
      }
    }
    avx512::store_rows(a, 0, n, rows, acc);
  }
}

}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__
