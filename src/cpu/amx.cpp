/// The AMX path: batches of 5 tokens and more on the matrix unit. Fewer go the way of AVX-512,
/// which is as fast at 4 tokens and faster below (one tile takes the same time whatever it holds).
///
/// A chunk of 256 weights of 32 rows is expanded to bytes of +1 and -1, plane by plane in the order
/// that avx512.cpp explains, one GFNI instruction and one store for 64 weights. Sixteen such
/// vectors are a tile of operand B as they lie: (quad of K 16, row 16, byte 4), the K of two words.
/// Operand A is up to 16 tokens by the same 64 activations. Two A and two B tiles make four
/// products, whose int32 dots have weight rows in lanes:
///
///   tile 0 to 3   dots: (tokens 0, rows 0), (tokens 0, rows 1), (tokens 1, rows 0), ...
///   tile 4, 5     A: tokens 0 and tokens 1, the halves of a block of up to 32
///   tile 6, 7     B: rows 0 and rows 1, the halves of 32
///
/// A group's dots go through memory, and join the slice's sums as in avx512.cpp.
///
/// What counts is that signs, activations and dots of a chunk stay in L1. TOPS of a thread at
/// M = 64, K = 5120: 1.45; with a whole slice expanded at once 1.22; with the dots of a block
/// joined under the multiplies of the next 1.29. Prefetching the next block's activations: 1.50
/// for 1.77 (in a quieter hour). The multiplies alone would run at 6.5.

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.h"

#define BINARY_GEMM_AMX  \
  __attribute__((target( \
      "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni,amx-tile,amx-int8")))

namespace binary_gemm {
namespace cpu {
namespace avx512 {
namespace {

constexpr int kTileTokens = 16;
constexpr int kBlockTokens = 2 * kTileTokens;
constexpr int kMaxBlocks = kMaxPassTokens / kBlockTokens;
constexpr std::int64_t kChunkWords = 8;
constexpr std::int64_t kMinTokens = 5;

// Has what was written in memory before the tile instructions that follow: GCC's wrappers of those
// that read do not tell it so.
inline void finish_stores() { __asm__ volatile("" : : : "memory"); }

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// A block of tokens is one or two tiles of `tile_tokens`. It is packed as int8
// [(k + 63) / 64][tiles * tile_tokens][64] with each 32 activations in the order of the planes, so
// a tile of A is read from consecutive lines.
struct Blocks {
  std::int64_t count;
  int tiles;
  int tile_tokens;
  std::int64_t bytes;
  std::int64_t tokens() const { return tiles * tile_tokens; }
  // Bytes from the block's start to the activations of word j.
  std::int64_t offset(std::int64_t j) const { return j / 2 * tokens() * 64 + j % 2 * 32; }
};

Blocks blocks_of(const GemmArguments& a) {
  const TokenBlocks blocks(a.m, kBlockTokens);
  const std::int64_t tiles = blocks.size > kTileTokens ? 2 : 1;
  const std::int64_t tile_tokens = (blocks.size + tiles - 1) / tiles;
  return {blocks.count, static_cast<int>(tiles), static_cast<int>(tile_tokens),
          (a.k + 63) / 64 * 64 * tiles * tile_tokens};
}

// The weights of a chunk as bytes, and room for what is made of them.
struct Scratch {
  alignas(64) std::int8_t signs[kHalves][kChunkWords][kPlanes][kLanes * 4];
  alignas(64) std::int32_t dots[kChunkWords][4][kTileTokens][kLanes];  // by group
  alignas(64) std::int32_t sums[kMaxBlocks][4][kTileTokens][kLanes];
};

BINARY_GEMM_AVX512 void expand(const Weights& w, std::int64_t first_word, std::int64_t words,
                               Scratch& scratch) {
  for (int h = 0; h < kHalves; ++h) {
    for (std::int64_t j = 0; j < words; ++j) {
      const __m512i word = load(w.halves[h].words[first_word + j]);
      BINARY_GEMM_UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        // Bits 1 to 7 of the result are the complement of bit p, and bit 0 is 1.
        const __m512i select = _mm512_set1_epi64(0x0001010101010101LL << p);
        _mm512_store_si512(scratch.signs[h][j][p],
                           _mm512_gf2p8affine_epi64_epi8(word, select, 0xff));
      }
    }
  }
}

// The dots of the group of `words` words from word j of the chunk on, whose activations are at x.
BINARY_GEMM_AMX inline void multiply_group(const Blocks& blocks, const std::int8_t* x,
                                           const Scratch& scratch, std::int64_t j,
                                           std::int64_t words,
                                           std::int32_t (*dots)[kTileTokens][kLanes]) {
  const std::int64_t step_words = std::min<std::int64_t>(words, 2);
  const bool two = blocks.tiles == 2;
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (const std::int64_t end = j + words; j < end; j += step_words) {
    const std::int8_t* a = x + blocks.offset(j);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, scratch.signs[0][j], 64);
    _tile_loadd(7, scratch.signs[1][j], 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if (two) {
      _tile_loadd(5, a + blocks.tile_tokens * 64, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, dots[0], 64);
  _tile_stored(1, dots[1], 64);
  if (two) {
    _tile_stored(2, dots[2], 64);
    _tile_stored(3, dots[3], 64);
  }
}

// Joins groups [g, g + kGroups), whose dots are `tile` of dots[kGroups][4], to the tile's sums.
template <Join kJoin, int kGroups>
BINARY_GEMM_AVX512 inline void join_tile(const Half& w, std::int64_t g, int tile, int tokens,
                                         const std::int32_t (*dots)[4][kTileTokens][kLanes],
                                         std::int32_t (*sums)[kLanes]) {
  __m512i factors[kGroups];
  BINARY_GEMM_UNROLL
  for (int i = 0; i < kGroups; ++i) {
    factors[i] = kJoin == Join::kFloat ? load(w.scales[g + i]) : load(w.mantissas[g + i]);
  }
  for (int t = 0; t < tokens; ++t) {
    __m512i sum = g == 0 ? _mm512_setzero_si512() : load(sums[t]);
    BINARY_GEMM_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      sum = join_dots<kJoin>(sum, load(dots[i][tile][t]), factors[i]);
    }
    _mm512_store_si512(sums[t], sum);
  }
}

// The sums of a slice, whose first word is `first_word` of a row, for all blocks.
template <Join kJoin>
BINARY_GEMM_AMX void add_groups(const Weights& w, const Blocks& blocks, const std::int8_t* x,
                                std::int64_t first_word, Scratch& scratch) {
  const std::int64_t group_words = w.words_per_group;
  const std::int64_t words = w.groups * group_words;
  for (std::int64_t j = 0; j < words; j += kChunkWords) {
    const std::int64_t chunk_words = std::min(kChunkWords, words - j);
    expand(w, j, chunk_words, scratch);
    const std::int64_t g = j / group_words;
    const std::int64_t groups = chunk_words / group_words;
    for (std::int64_t b = 0; b < blocks.count; ++b) {
      for (std::int64_t i = 0; i < groups; ++i) {
        multiply_group(blocks, x + b * blocks.bytes + blocks.offset(first_word + j), scratch,
                       i * group_words, group_words, scratch.dots[i]);
      }
      for (int tile = 0; tile < kHalves * blocks.tiles; ++tile) {
        const Half& half = w.halves[tile % kHalves];
        auto* sums = scratch.sums[b][tile];
        if (groups == 2) {
          join_tile<kJoin, 2>(half, g, tile, blocks.tile_tokens, scratch.dots, sums);
          continue;
        }
        for (std::int64_t i = 0; i < groups; ++i) {
          join_tile<kJoin, 1>(half, g + i, tile, blocks.tile_tokens, scratch.dots + i, sums);
        }
      }
    }
  }
}

PackedShape packed_shape(const GemmArguments& a) {
  if (a.m < kMinTokens) return kAvx512VnniKernels.packed_shape(a);
  const Blocks blocks = blocks_of(a);
  return {blocks.count, blocks.bytes};
}

BINARY_GEMM_AVX512 void pack(const GemmArguments& a, std::int64_t block, char* packed) {
  if (a.m < kMinTokens) return kAvx512VnniKernels.pack_block(a, block, packed);
  const Blocks blocks = blocks_of(a);
  const std::int64_t tokens = TokenBlocks(a.m, kBlockTokens).size;
  if (a.k % 64 != 0) {  // half of the last tile is unused, but may be loaded
    std::fill(packed + blocks.bytes - 64 * blocks.tokens(), packed + blocks.bytes, char{0});
  }
  for (std::int64_t t = 0; t < blocks.tokens(); ++t) {
    const std::int64_t m = block * tokens + t;
    const bool empty = t >= tokens || m >= a.m;
    for (std::int64_t j = 0; j < a.k / 32; ++j) {
      auto* planes = reinterpret_cast<std::uint32_t*>(packed + blocks.offset(j) + t * 64);
      if (empty) {
        std::fill(planes, planes + kPlanes, 0u);
      } else {
        store_by_plane(load_activations(a.x + m * a.x_stride + j * 32), planes);
      }
    }
  }
}

BINARY_GEMM_AMX void gemm_rows(const GemmArguments& a, const char* packed, std::int64_t row_begin,
                               std::int64_t row_end) {
  if (a.m < kMinTokens) {
    return kAvx512VnniKernels.gemm_rows(a, packed, row_begin, row_end);
  }
  const Blocks blocks = blocks_of(a);
  const std::int64_t tokens = TokenBlocks(a.m, kBlockTokens).size;
  const auto step_words = static_cast<std::uint8_t>(std::min<std::int64_t>(a.group_size / 32, 2));
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) {
    config.rows[tile] = static_cast<std::uint8_t>(blocks.tile_tokens);
    config.row_bytes[tile] = static_cast<std::uint16_t>(tile < 4 ? kLanes * 4 : step_words * 32);
  }
  for (int tile = 6; tile < 8; ++tile) {
    config.rows[tile] = static_cast<std::uint8_t>(step_words * kPlanes);
    config.row_bytes[tile] = kLanes * 4;
  }
  finish_stores();
  _tile_loadconfig(&config);
  Weights w;
  Rows rows[kHalves];
  Scratch scratch;
  alignas(64) float acc[kMaxBlocks][4][kTileTokens][kLanes];
  for (std::int64_t n = row_begin; n < row_end; n += kRows) {
    point_to_rows(a, n, row_end, rows);
    std::fill_n(acc[0][0][0], blocks.count * (4 * kTileTokens * kLanes), 0.0f);
    for (std::int64_t k0 = 0; k0 < a.k; k0 += kSliceK) {
      load_weights(a, rows, k0, w);
      for (const bool wide : {false, true}) {
        if (wide ? !any_wide(w) : !any_narrow(w)) continue;
        const auto* x = reinterpret_cast<const std::int8_t*>(packed);
        if (wide) {
          add_groups<Join::kFloat>(w, blocks, x, k0 / 32, scratch);
        } else if (narrow_join(w) == Join::kInt16) {
          add_groups<Join::kInt16>(w, blocks, x, k0 / 32, scratch);
        } else {
          add_groups<Join::kInt32>(w, blocks, x, k0 / 32, scratch);
        }
        for (std::int64_t b = 0; b < blocks.count; ++b) {
          for (int tile = 0; tile < kHalves * blocks.tiles; ++tile) {
            add_slice(w.halves[tile % kHalves], wide, blocks.tile_tokens, scratch.sums[b][tile],
                      acc[b][tile]);
          }
        }
      }
    }
    for (std::int64_t m = 0; m < a.m; ++m) {
      const std::int64_t t = m % tokens;
      const std::int64_t tile = t / blocks.tile_tokens * kHalves;
      for (int h = 0; h < kHalves && n + h * kLanes < row_end; ++h) {
        const float* sums = acc[m / tokens][tile + h][t % blocks.tile_tokens];
        store_rows(a, m, n + h * kLanes, row_end - n - h * kLanes, _mm512_load_ps(sums));
      }
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace avx512

bool amx_is_permitted() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kTile = 1u << 24;
  constexpr unsigned kInt8 = 1u << 25;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kTile) == 0 || (edx & kInt8) == 0) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const PathKernels kAmxKernels = {avx2_quantize_row,    avx2_normalize_row, avx2_swiglu_row,
                                 avx512::packed_shape, avx512::pack,       avx512::gemm_rows};

}  // namespace cpu
}  // namespace binary_gemm

#endif  // __x86_64__ && __linux__
