/// The AVX2 path: weight rows in the eight 32-bit lanes, for every shape.
///
/// The same plan as avx512.cpp with what AVX2 has. For 8 rows and a slice of K, lane r of vector j
/// is word j of row r. Of each such vector, plane p (a shift and a mask) is bytes of 0 and 2 that
/// vpmaddubsw multiplies with four activations of a token, broadcast to all lanes, into two int16:
///
///   lane r:  (first, last) += sum_b 2 * bit(p + 8 b of row r's word) * q[32 j + p + 8 b],
///                             b = 0, 1 for `first` and b = 2, 3 for `last`
///
/// From seeds of -sum(q) over the same activations of the group, the two become its exact products
/// with +1 and -1, of at most 2^14 (G = 256); int16 may wrap on the way. A slice adds up
/// mantissa * first + mantissa * last by one vpmaddwd a group and needs no sum over lanes.

#ifdef __x86_64__

#include <algorithm>

#include "x86.h"

namespace binary_gemm {
namespace cpu {
namespace {

constexpr int kRows = 8;
constexpr int kMaxTileTokens = 8;
constexpr std::int64_t kSliceWords = kSliceK / 32;

// Eight rows of one slice, rows in lanes.
struct Weights {
  std::int64_t groups;
  std::int64_t words_per_group;
  bool any_narrow;
  bool any_wide;
  alignas(32) std::int32_t wide[kRows];  // -1 in the rows whose slice is wide, else 0
  alignas(32) float units[kRows];
  alignas(32) std::uint32_t words[kSliceWords][kRows];
  alignas(32) float scales[kMaxSliceGroups][kRows];
  alignas(32) std::int32_t mantissas[kMaxSliceGroups][kRows];  // twice in each lane, as int16
};

// Pointers to 8 rows; rows past the end of the range repeat its last.
struct Rows {
  const std::uint32_t* bits[kRows];
  const float16* scales[kRows];
  std::int64_t bits_ahead;  // words from a row to the one to prefetch
};

BINARY_GEMM_AVX2 inline __m256i load(const void* p) {
  return _mm256_load_si256(static_cast<const __m256i*>(p));
}

BINARY_GEMM_AVX2 inline void store(void* p, __m256i v) {
  _mm256_store_si256(static_cast<__m256i*>(p), v);
}

// (row R8, column C8) -> (C8, R8), of 32-bit elements.
BINARY_GEMM_AVX2 inline void transpose(__m256i (&a)[8]) {
  __m256i b[8];
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 i + c]: 128-bit lane v is column 4 v + c of rows 4 i to 4 i + 3.
  BINARY_GEMM_UNROLL
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm256_permute2x128_si256(a[c], a[4 + c], 0x20);
    b[4 + c] = _mm256_permute2x128_si256(a[c], a[4 + c], 0x31);
  }
  BINARY_GEMM_UNROLL
  for (int i = 0; i < 8; ++i) a[i] = b[i];
}

// Words [first, first + 8) of the rows, of which `count` are there; the others come out 0.
BINARY_GEMM_AVX2 void load_words(const Rows& rows, std::int64_t first, std::int64_t count,
                                 std::uint32_t (*words)[kRows]) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(
      _mm256_set1_epi32(static_cast<int>(std::min<std::int64_t>(count, 8))), index);
  __m256i a[8];
  BINARY_GEMM_UNROLL
  for (int r = 0; r < 8; ++r) {
    const std::uint32_t* bits = rows.bits[r] + first;
    a[r] = _mm256_maskload_epi32(reinterpret_cast<const int*>(bits), mask);
    _mm_prefetch(reinterpret_cast<const char*>(bits + rows.bits_ahead), _MM_HINT_T0);
  }
  transpose(a);
  BINARY_GEMM_UNROLL
  for (int r = 0; r < 8; ++r) store(words[r], a[r]);
}

// Scales [first, first + 8) of the rows, of which `count` are there; the others come out 0.
BINARY_GEMM_AVX2 void load_scales(const Rows& rows, std::int64_t first, std::int64_t count,
                                  float (*scales)[kRows]) {
  __m256i a[8];
  if (count >= 8) {
    BINARY_GEMM_UNROLL
    for (int r = 0; r < 8; ++r) {
      const auto* row = reinterpret_cast<const __m128i*>(rows.scales[r] + first);
      a[r] = _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(row)));
    }
  } else {
    for (int r = 0; r < 8; ++r) {
      alignas(16) float16 row[8] = {};
      std::copy_n(rows.scales[r] + first, count, row);
      const __m128i half = _mm_load_si128(reinterpret_cast<const __m128i*>(row));
      a[r] = _mm256_castps_si256(_mm256_cvtph_ps(half));
    }
  }
  transpose(a);
  BINARY_GEMM_UNROLL
  for (int r = 0; r < 8; ++r) _mm256_store_ps(scales[r], _mm256_castsi256_ps(a[r]));
}

// From the scales, what slice_scales() in kernel.h gives for each row.
BINARY_GEMM_AVX2 void make_mantissas(Weights& w) {
  // Magnitudes compare as their bits do.
  __m256i largest = _mm256_setzero_si256();
  for (std::int64_t g = 0; g < w.groups; ++g) {
    largest = _mm256_max_epu32(largest,
                               _mm256_and_si256(load(w.scales[g]), _mm256_set1_epi32(0x7fffffff)));
  }
  const __m256i is_zero = _mm256_cmpeq_epi32(largest, _mm256_setzero_si256());
  const __m256i field = _mm256_sub_epi32(
      _mm256_blendv_epi8(_mm256_srli_epi32(largest, 23), _mm256_set1_epi32(127), is_zero),
      _mm256_set1_epi32(13));
  const __m256 inverse_unit = _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(2 * 127), field), 23));
  __m256i wide = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff));
  for (std::int64_t g = 0; g < w.groups; ++g) {
    const __m256 mantissa = _mm256_mul_ps(_mm256_load_ps(w.scales[g]), inverse_unit);
    const __m256i integer = _mm256_cvtps_epi32(mantissa);
    wide = _mm256_or_si256(wide, _mm256_castps_si256(_mm256_cmp_ps(_mm256_cvtepi32_ps(integer),
                                                                   mantissa, _CMP_NEQ_UQ)));
    store(w.mantissas[g], _mm256_blend_epi16(integer, _mm256_slli_epi32(integer, 16), 0xaa));
  }
  const int wide_rows = _mm256_movemask_ps(_mm256_castsi256_ps(wide));
  w.any_narrow = wide_rows != 0xff;
  w.any_wide = wide_rows != 0;
  store(w.wide, wide);
  store(w.units, _mm256_slli_epi32(field, 23));
}

BINARY_GEMM_AVX2 void load_weights(const GemmArguments& a, const Rows& rows, std::int64_t k0,
                                   Weights& w) {
  const std::int64_t words = std::min(kSliceK, a.k - k0) / 32;
  w.words_per_group = a.group_size / 32;
  w.groups = words / w.words_per_group;
  for (std::int64_t j = 0; j < words; j += 8) {
    load_words(rows, k0 / 32 + j, words - j, w.words + j);
  }
  for (std::int64_t g = 0; g < w.groups; g += 8) {
    load_scales(rows, k0 / a.group_size + g, w.groups - g, w.scales + g);
  }
  make_mantissas(w);
}

// A tile's sums over one slice, as int32 or, of wide slices, as float bits. They stay in memory:
// they are touched once a group, and the 16 registers hold the dots.
template <int T>
struct Sums {
  alignas(32) std::int32_t lanes[T][kRows];
};

template <int T>
BINARY_GEMM_AVX2 inline void add_groups(const Weights& w, const std::int32_t* seeds,
                                        const std::int32_t* x, bool wide, Sums<T>& sums) {
  BINARY_GEMM_UNROLL
  for (int t = 0; t < T; ++t) store(sums.lanes[t], _mm256_setzero_si256());
  std::int64_t j = 0;
  for (std::int64_t g = 0; g < w.groups; ++g) {
    __m256i dots[T];
    BINARY_GEMM_UNROLL
    for (int t = 0; t < T; ++t) dots[t] = _mm256_set1_epi32(seeds[t]);
    seeds += T;
    const std::int64_t end = j + w.words_per_group;
    do {
      const __m256i word = load(w.words[j]);
      BINARY_GEMM_UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        // A shift of 16-bit lanes moves bit p of each byte to its bit 1.
        const __m256i shifted =
            p == 0 ? _mm256_add_epi16(word, word) : _mm256_srli_epi16(word, p - 1);
        const __m256i plane = _mm256_and_si256(shifted, _mm256_set1_epi8(2));
        BINARY_GEMM_UNROLL
        for (int t = 0; t < T; ++t) {
          const __m256i product = _mm256_maddubs_epi16(plane, _mm256_set1_epi32(x[t]));
          dots[t] = _mm256_add_epi16(dots[t], product);
          // Compilers would add the products up in another order, and keep them all until then.
          __asm__("" : "+x"(dots[t]));
        }
        x += T;
      }
    } while (++j < end);
    if (!wide) {
      const __m256i mantissas = load(w.mantissas[g]);
      BINARY_GEMM_UNROLL
      for (int t = 0; t < T; ++t) {
        store(sums.lanes[t],
              _mm256_add_epi32(load(sums.lanes[t]), _mm256_madd_epi16(dots[t], mantissas)));
      }
    } else {
      const __m256 scales = _mm256_load_ps(w.scales[g]);
      BINARY_GEMM_UNROLL
      for (int t = 0; t < T; ++t) {
        const __m256i dot = _mm256_madd_epi16(dots[t], _mm256_set1_epi16(1));
        const __m256 sum = _mm256_castsi256_ps(load(sums.lanes[t]));
        store(sums.lanes[t],
              _mm256_castps_si256(_mm256_fmadd_ps(scales, _mm256_cvtepi32_ps(dot), sum)));
      }
    }
  }
}

// Adds a slice's sums to acc[T][8] for T tokens of a packed block.
template <int T>
BINARY_GEMM_AVX2 void tile(const Weights& w, const std::int32_t* seeds, const std::int32_t* x,
                           float (*acc)[kRows]) {
  Sums<T> sums;
  const __m256 wide = _mm256_castsi256_ps(load(w.wide));
  if (w.any_narrow) {
    add_groups<T>(w, seeds, x, false, sums);
    const __m256 units = _mm256_load_ps(w.units);
    for (int t = 0; t < T; ++t) {
      const __m256 old = _mm256_load_ps(acc[t]);
      const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(load(sums.lanes[t])), units);
      _mm256_store_ps(acc[t], _mm256_blendv_ps(_mm256_add_ps(old, sum), old, wide));
    }
  }
  if (w.any_wide) {
    add_groups<T>(w, seeds, x, true, sums);
    for (int t = 0; t < T; ++t) {
      const __m256 old = _mm256_load_ps(acc[t]);
      const __m256 sum = _mm256_castsi256_ps(load(sums.lanes[t]));
      _mm256_store_ps(acc[t], _mm256_blendv_ps(old, _mm256_add_ps(old, sum), wide));
    }
  }
}

using TileFunction = void (*)(const Weights&, const std::int32_t*, const std::int32_t*,
                              float (*)[kRows]);

constexpr TileFunction kTiles[kMaxTileTokens + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>,
                                                     tile<5>, tile<6>, tile<7>, tile<8>};

// Eight elements of the residual from y[m, n] on.
BINARY_GEMM_AVX2 __m256 load_residual(const GemmArguments& a, std::int64_t m, std::int64_t n) {
  const char* from =
      static_cast<const char*>(a.residual) + (m * a.residual_stride + n) * size_of(a.y_type);
  if (a.y_type == DataType::kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return a.y_type == DataType::kFloat16
             ? _mm256_cvtph_ps(half)
             : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Applies token m's scale, the bias and the residual to the sums of rows n to n + 7 and writes y[m,
// n] and on, `count` elements at most.
BINARY_GEMM_AVX2 void store_rows(const GemmArguments& a, std::int64_t m, std::int64_t n,
                                 std::int64_t count, const float* acc) {
  if (count < kRows) {
    for (std::int64_t r = 0; r < count; ++r) store_output(a, m, n + r, acc[r]);
    return;
  }
  const __m256 sums = _mm256_load_ps(acc);
  const __m256 scale = _mm256_set1_ps(a.x_scales[m]);
  __m256 result = a.bias != nullptr ? _mm256_fmadd_ps(sums, scale, _mm256_loadu_ps(a.bias + n))
                                    : _mm256_mul_ps(sums, scale);
  if (a.residual != nullptr) result = _mm256_add_ps(load_residual(a, m, n), result);
  char* y = static_cast<char*>(a.y) + (m * a.y_stride + n) * size_of(a.y_type);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(result, result, _CMP_UNORD_Q));
  if (a.y_type == DataType::kFloat32) {
    _mm256_storeu_ps(reinterpret_cast<float*>(y), result);
  } else if (a.y_type == DataType::kBFloat16) {
    const __m256i bits = _mm256_castps_si256(result);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(y),
        _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y),
                     _mm256_cvtps_ph(result, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

PackedShape packed_shape(const GemmArguments& a) {
  const TokenBlocks blocks(a.m, kMaxTileTokens);
  return {blocks.count, packed_block_bytes(a, blocks.size)};
}

BINARY_GEMM_AVX2 void pack(const GemmArguments& a, std::int64_t block, char* packed) {
  pack_block(a, block, TokenBlocks(a.m, kMaxTileTokens).size, Seeds::kInt16Pairs, packed);
}

BINARY_GEMM_AVX2 void gemm_rows(const GemmArguments& a, const char* packed, std::int64_t row_begin,
                                std::int64_t row_end) {
  const TokenBlocks blocks(a.m, kMaxTileTokens);
  const std::int64_t block_bytes = packed_block_bytes(a, blocks.size);
  const std::int64_t seeds_bytes = packed_seeds_bytes(a, blocks.size);
  const TileFunction tile_of_size = kTiles[blocks.size];
  Weights w;
  Rows rows;
  alignas(32) float acc[kMaxPassTokens + kMaxTileTokens][kRows];
  for (std::int64_t n = row_begin; n < row_end; n += kRows) {
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::int64_t row = std::min(n + r, row_end - 1);
      rows.bits[r] = a.bits + row * a.bits_stride;
      rows.scales[r] = a.scales + row * a.scales_stride;
    }
    rows.bits_ahead = n + 2 * kRows <= row_end ? kRows * a.bits_stride : 0;
    std::fill(acc[0], acc[blocks.count * blocks.size], 0.0f);
    for (std::int64_t k0 = 0; k0 < a.k; k0 += kSliceK) {
      load_weights(a, rows, k0, w);
      for (std::int64_t b = 0; b < blocks.count; ++b) {
        const char* block = packed + b * block_bytes;
        const auto* seeds = reinterpret_cast<const std::int32_t*>(block);
        const auto* x = reinterpret_cast<const std::int32_t*>(block + seeds_bytes);
        tile_of_size(w, seeds + k0 / a.group_size * blocks.size, x + k0 / 4 * blocks.size,
                     acc + b * blocks.size);
      }
    }
    for (std::int64_t m = 0; m < a.m; ++m) store_rows(a, m, n, row_end - n, acc[m]);
  }
}

}  // namespace

const PathKernels kAvx2Kernels = {
    avx2_quantize_row, avx2_normalize_row, avx2_swiglu_row, packed_shape, pack, gemm_rows};

}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__
