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

#include "avx512.h"

#ifdef __x86_64__

namespace binary_gemm {
namespace cpu {
namespace avx512 {
namespace {

constexpr int kMaxTileTokens = 8;

// A tile's sums over one slice. They stay in memory: they are touched once a group, and the 32
// registers hold the dots.
template <int T>
struct Sums {
  alignas(64) std::int32_t lanes[kHalves][T][kLanes];
};

template <int T>
BINARY_GEMM_AVX512 inline void join_group(const Half& w, std::int64_t g, Join join,
                                          const __m512i (&dots)[T], std::int32_t (*sums)[kLanes]) {
  const __m512i factors = join == Join::kFloat ? load(w.scales[g]) : load(w.mantissas[g]);
  BINARY_GEMM_UNROLL
  for (int t = 0; t < T; ++t) {
    const __m512i sum = load(sums[t]);
    _mm512_store_si512(sums[t],
                       join == Join::kInt16   ? join_dots<Join::kInt16>(sum, dots[t], factors)
                       : join == Join::kInt32 ? join_dots<Join::kInt32>(sum, dots[t], factors)
                                              : join_dots<Join::kFloat>(sum, dots[t], factors));
  }
}

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
  for (const bool wide : {false, true}) {
    if (wide ? !any_wide(w) : !any_narrow(w)) continue;
    add_groups<T>(w, seeds, x, wide ? Join::kFloat : narrow_join(w), sums);
    for (int h = 0; h < kHalves; ++h) {
      add_slice(w.halves[h], wide, T, sums.lanes[h], acc + h * T);
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
    point_to_rows(a, n, row_end, rows);
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
      store_rows(a, m, n, row_end - n, _mm512_load_ps(sums[0]));
      if (n + kLanes < row_end) {
        store_rows(a, m, n + kLanes, row_end - n - kLanes, _mm512_load_ps(sums[blocks.size]));
      }
    }
  }
}

}  // namespace

}  // namespace avx512

const PathKernels kAvx512VnniKernels = {avx2_quantize_row, avx2_normalize_row,
                                        avx2_swiglu_row,   avx512::packed_shape,
                                        avx512::pack,      avx512::gemm_rows};

}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__
