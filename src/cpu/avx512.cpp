/// The AVX-512 path: weight rows in the sixteen 32-bit lanes, for every shape.
///
/// For 16 rows and a slice of K, lane r of vector j is word j of row r (a transpose of the words as
/// they lie in memory). Of each such vector, plane p (one GFNI instruction) is bytes of 0 and 2
/// that vpdpbusd multiplies with four activations of a token, broadcast to all lanes:
///
///   lane r:  dot += sum_b 2 * bit(p + 8 b of row r's word) * q[32 j + p + 8 b]
///
/// From a seed of -sum(q) over the group, `dot` becomes the group's exact product with +1 and -1.
/// It fits int16 for G up to 128, as does a scale's mantissa, so a slice adds up mantissa * dot by
/// one vpdpwssd a group and needs no sum over lanes.
///
/// A tile is two such halves (32 rows) by up to 8 tokens, whose dots stay in 16 registers: a plane
/// is made once for 8 products, a broadcast once for 2.
/// Tried, 512x5120 from the cache at M = 64, TOPS of a thread: 0.62 as it is, 0.55 with up to 12
/// tokens a tile (registers spill).

#ifdef __x86_64__

#include <algorithm>

#include "x86.h"

BINARY_GEMM_AVX512_WARNINGS

namespace binary_gemm {
namespace cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kHalves = 2;
constexpr int kRows = kHalves * kLanes;
constexpr int kMaxTileTokens = 8;
constexpr std::int64_t kSliceWords = kSliceK / 32;

// How a group's dot joins the sum of its slice.
enum class Join {
  kInt16,  // narrow, |dot| <= 2^14
  kInt32,  // narrow, |dot| <= 2^15 (G = 256)
  kFloat,  // wide
};

// Sixteen rows of one slice, rows in lanes.
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

// Pointers to 16 rows; rows past the end of the range repeat its last.
struct Rows {
  const std::uint32_t* bits[kLanes];
  const float16* scales[kLanes];
  std::int64_t bits_ahead;  // elements from a row to the one to prefetch
  std::int64_t scales_ahead;
};

BINARY_GEMM_AVX512 inline __m512i load(const void* p) { return _mm512_load_si512(p); }

BINARY_GEMM_AVX512 inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

// (row R16, word W16) in memory -> words[W16][R16]. Words from `count` on come out 0.
BINARY_GEMM_AVX512 void transpose_words(const Rows& rows, std::int64_t first, std::int64_t count,
                                        std::uint32_t (*words)[kLanes]) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
  __m512i a[16];
  __m512i b[16];
  BINARY_GEMM_UNROLL
  for (int r = 0; r < 16; ++r) {
    a[r] = _mm512_maskz_loadu_epi32(mask, rows.bits[r] + first);
    prefetch(rows.bits[r] + first + rows.bits_ahead);
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

// Four rows' scales, a row in a 128-bit lane.
BINARY_GEMM_AVX512 inline __m512i load_scales(const Rows& rows, int r, std::int64_t first,
                                              std::int64_t count) {
  const auto mask = static_cast<__mmask8>(count >= 8 ? 0xff : (1 << count) - 1);
  __m512i v = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(mask, rows.scales[r] + first));
  v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(mask, rows.scales[r + 4] + first), 1);
  v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(mask, rows.scales[r + 8] + first), 2);
  return _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(mask, rows.scales[r + 12] + first), 3);
}

// (row R16, group G8) fp16 in memory -> scales[G8][R16] as floats. Returns the 16 rows' largest
// magnitudes as fp16 bits. Groups from `count` on come out 0.
BINARY_GEMM_AVX512 __m256i transpose_scales(const Rows& rows, std::int64_t first,
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

// The slice's scales, and from them what slice_scales() in kernel.h gives for each row.
BINARY_GEMM_AVX512 void load_scales(const Rows& rows, std::int64_t first, std::int64_t count,
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

BINARY_GEMM_AVX512 void load_weights(const GemmArguments& a, const Rows (&rows)[kHalves],
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

// Adds the dots of 16 rows with group g to their sums.
template <int T>
BINARY_GEMM_AVX512 inline void join_group(const Half& w, std::int64_t g, Join join,
                                          const __m512i (&dots)[T], std::int32_t (*sums)[kLanes]) {
  switch (join) {
    case Join::kInt16: {
      const __m512i mantissas = load(w.mantissas[g]);
      BINARY_GEMM_UNROLL
      for (int t = 0; t < T; ++t) {
        _mm512_store_si512(sums[t], _mm512_dpwssd_epi32(load(sums[t]), dots[t], mantissas));
      }
      break;
    }
    case Join::kInt32: {
      const __m512i mantissas = load(w.mantissas[g]);
      BINARY_GEMM_UNROLL
      for (int t = 0; t < T; ++t) {
        const __m512i product = _mm512_mullo_epi32(dots[t], mantissas);
        _mm512_store_si512(sums[t], _mm512_add_epi32(load(sums[t]), product));
      }
      break;
    }
    case Join::kFloat: {
      const __m512 scales = _mm512_load_ps(w.scales[g]);
      BINARY_GEMM_UNROLL
      for (int t = 0; t < T; ++t) {
        _mm512_store_ps(
            sums[t], _mm512_fmadd_ps(scales, _mm512_cvtepi32_ps(dots[t]), _mm512_load_ps(sums[t])));
      }
      break;
    }
  }
}

// A tile's sums over one slice, as int32 or, for Join::kFloat, as float bits.
//
// They stay in memory: they are touched once a group, and the 32 registers hold the dots.
template <int T>
struct Sums {
  alignas(64) std::int32_t lanes[kHalves][T][kLanes];
};

template <int T>
BINARY_GEMM_AVX512 inline void add_groups(const Weights& w, const std::int32_t* seeds,
                                          const std::int32_t* x, Join join, Sums<T>& sums) {
  BINARY_GEMM_UNROLL
  for (int t = 0; t < T; ++t) {
    _mm512_store_si512(sums.lanes[0][t], _mm512_setzero_si512());
    _mm512_store_si512(sums.lanes[1][t], _mm512_setzero_si512());
  }
  std::int64_t j = 0;
  for (std::int64_t g = 0; g < w.groups; ++g) {
    __m512i low[T];  // the dots of rows 0 to 15
    __m512i high[T];
    BINARY_GEMM_UNROLL
    for (int t = 0; t < T; ++t) low[t] = high[t] = _mm512_set1_epi32(seeds[t]);
    seeds += T;
    const std::int64_t end = j + w.words_per_group;
    do {
      const __m512i low_word = load(w.halves[0].words[j]);
      const __m512i high_word = load(w.halves[1].words[j]);
      BINARY_GEMM_UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        // Byte 6 of the matrix makes bit 1 of the result: here bit p of the operand.
        const __m512i select = _mm512_set1_epi64(1LL << (48 + p));
        const __m512i low_plane = _mm512_gf2p8affine_epi64_epi8(low_word, select, 0);
        const __m512i high_plane = _mm512_gf2p8affine_epi64_epi8(high_word, select, 0);
        BINARY_GEMM_UNROLL
        for (int t = 0; t < T; ++t) {
          const __m512i q = _mm512_set1_epi32(x[t]);
          low[t] = _mm512_dpbusd_epi32(low[t], low_plane, q);
          high[t] = _mm512_dpbusd_epi32(high[t], high_plane, q);
          // Keeps GCC from reordering the chains, which costs it 10% in copies between registers.
          __asm__("" : "+v"(low[t]), "+v"(high[t]));
        }
        x += T;
      }
    } while (++j < end);
    join_group<T>(w.halves[0], g, join, low, sums.lanes[0]);
    join_group<T>(w.halves[1], g, join, high, sums.lanes[1]);
  }
}

// Adds a slice's sums to acc[kHalves][T][16] for T tokens of a packed block.
template <int T>
BINARY_GEMM_AVX512 void tile(const Weights& w, const std::int32_t* seeds, const std::int32_t* x,
                             float (*acc)[kLanes]) {
  Sums<T> sums;
  const unsigned wide[kHalves] = {w.halves[0].wide, w.halves[1].wide};
  if ((wide[0] & wide[1]) != 0xffff) {
    add_groups<T>(w, seeds, x, w.words_per_group <= 4 ? Join::kInt16 : Join::kInt32, sums);
    for (int h = 0; h < kHalves; ++h) {
      const __m512 units = _mm512_load_ps(w.halves[h].units);
      for (int t = 0; t < T; ++t) {
        const __m512 old = _mm512_load_ps(acc[h * T + t]);
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(load(sums.lanes[h][t])), units);
        _mm512_store_ps(acc[h * T + t],
                        _mm512_mask_add_ps(old, static_cast<__mmask16>(~wide[h]), old, sum));
      }
    }
  }
  if ((wide[0] | wide[1]) != 0) {
    add_groups<T>(w, seeds, x, Join::kFloat, sums);
    for (int h = 0; h < kHalves; ++h) {
      for (int t = 0; t < T; ++t) {
        const __m512 old = _mm512_load_ps(acc[h * T + t]);
        const __m512 sum = _mm512_load_ps(sums.lanes[h][t]);
        _mm512_store_ps(acc[h * T + t],
                        _mm512_mask_add_ps(old, static_cast<__mmask16>(wide[h]), old, sum));
      }
    }
  }
}

using TileFunction = void (*)(const Weights&, const std::int32_t*, const std::int32_t*,
                              float (*)[kLanes]);

constexpr TileFunction kTiles[kMaxTileTokens + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>,
                                                     tile<5>, tile<6>, tile<7>, tile<8>};

PackedShape packed_shape(const GemmArguments& a) {
  if (a.m == 1) return avx512_vector_shape(a);
  const TokenBlocks blocks(a.m, kMaxTileTokens);
  return {blocks.count, packed_block_bytes(a, blocks.size)};
}

BINARY_GEMM_AVX512 void pack(const GemmArguments& a, std::int64_t block, char* packed) {
  if (a.m == 1) return avx512_vector_pack(a, block, packed);
  pack_block(a, block, TokenBlocks(a.m, kMaxTileTokens).size, Seeds::kInt32, packed);
}

BINARY_GEMM_AVX512 void gemm_rows(const GemmArguments& a, const char* packed,
                                  std::int64_t row_begin, std::int64_t row_end) {
  if (a.m == 1) return avx512_vector_rows(a, packed, row_begin, row_end);
  const TokenBlocks blocks(a.m, kMaxTileTokens);
  const std::int64_t block_bytes = packed_block_bytes(a, blocks.size);
  const std::int64_t seeds_bytes = packed_seeds_bytes(a, blocks.size);
  const TileFunction tile_of_size = kTiles[blocks.size];
  Weights w;
  Rows rows[kHalves];
  alignas(64) float acc[kHalves * (kMaxPassTokens + kMaxTileTokens)][kLanes];
  for (std::int64_t n = row_begin; n < row_end; n += kRows) {
    const bool ahead = n + 2 * kRows <= row_end;
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::int64_t row = std::min(n + r, row_end - 1);
      rows[r / kLanes].bits[r % kLanes] = a.bits + row * a.bits_stride;
      rows[r / kLanes].scales[r % kLanes] = a.scales + row * a.scales_stride;
    }
    for (Rows& half : rows) {
      half.bits_ahead = ahead ? kRows * a.bits_stride : 0;
      half.scales_ahead = ahead ? kRows * a.scales_stride : 0;
    }
    std::fill(acc[0], acc[kHalves * blocks.count * blocks.size], 0.0f);
    for (std::int64_t k0 = 0; k0 < a.k; k0 += kSliceK) {
      load_weights(a, rows, k0, w);
      for (std::int64_t b = 0; b < blocks.count; ++b) {
        const char* block = packed + b * block_bytes;
        const auto* seeds = reinterpret_cast<const std::int32_t*>(block);
        const auto* x = reinterpret_cast<const std::int32_t*>(block + seeds_bytes);
        tile_of_size(w, seeds + k0 / a.group_size * blocks.size, x + k0 / 4 * blocks.size,
                     acc + b * kHalves * blocks.size);
      }
    }
    for (std::int64_t m = 0; m < a.m; ++m) {
      const float(*sums)[kLanes] = acc + m / blocks.size * kHalves * blocks.size + m % blocks.size;
      avx512_store_rows(a, m, n, row_end - n, _mm512_load_ps(sums[0]));
      if (n + kLanes < row_end) {
        avx512_store_rows(a, m, n + kLanes, row_end - n - kLanes,
                          _mm512_load_ps(sums[blocks.size]));
      }
    }
  }
}

}  // namespace

BINARY_GEMM_AVX512 void avx512_store_rows(const GemmArguments& a, std::int64_t m, std::int64_t n,
                                          std::int64_t count, __m512 sums) {
  const auto mask = static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << count) - 1);
  const __m512 scale = _mm512_set1_ps(a.x_scales[m]);
  const __m512 result = a.bias != nullptr
                            ? _mm512_fmadd_ps(sums, scale, _mm512_maskz_loadu_ps(mask, a.bias + n))
                            : _mm512_mul_ps(sums, scale);
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

const PathKernels kAvx512VnniKernels = {avx2_quantize_row, packed_shape, pack, gemm_rows};

}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__
