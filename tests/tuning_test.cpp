/// The tuning table, which needs no CUDA to be read.

#include "binary_gemm/kernels/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "wgmma_shapes.h"

namespace binary_gemm {
namespace kernels {
namespace {

constexpr int kMultiprocessors = 132;
constexpr std::int64_t kGroups[] = {32, 64, 128, 256};

struct Layer {
  std::int64_t n;
  std::int64_t k;
};
constexpr Layer kLayers[] = {{8192, 5120},   {5120, 5120}, {17408, 5120}, {5120, 17408},
                             {248320, 5120}, {1, 32},      {65, 1024}};

std::int64_t wgmma_ns(const KernelConfig& config, std::int64_t m, const Layer& layer) {
  for (const WgmmaTile& tile : kWgmmaTiles) {
    if (tile.tokens == config.tokens && tile.row_groups == config.row_groups &&
        tile.turns == config.turns) {
      return config.cuts ? cut_wgmma_ns(tile, m, layer.n, layer.k, kMultiprocessors)
                         : wgmma_ns(tile, m, layer.n, layer.k, kMultiprocessors);
    }
  }
  ADD_FAILURE() << "no tile of the table: " << int{config.tokens} << " tokens";
  return 0;
}

constexpr Family family_of(int architecture, std::int64_t m, const Layer& layer,
                           const Allowed& allowed) {
  return choose(architecture, m, layer.n, layer.k, 128, allowed, kMultiprocessors).family;
}

TEST(Tuning, IsKnownToTheCompiler) {
  constexpr Allowed kAll{true, true, true, true};
  constexpr Allowed kNoWgmma{true, false, true, true};
  constexpr Allowed kNoEngine{true, true, true, false};
  constexpr Layer kQkv{8192, 5120}, kDown{5120, 17408};
  static_assert(family_of(90, 1, kQkv, kAll) == Family::kDecodeB1, "");
  static_assert(family_of(90, 8, kQkv, kAll) == Family::kDecodeS8, "");
  static_assert(family_of(90, 2048, kQkv, kAll) == Family::kWgmma, "");
  static_assert(family_of(80, 2048, kQkv, kNoWgmma) == Family::kMma, "");
  static_assert(family_of(90, 2, kDown, kAll) == Family::kDecodeB1, "");
  static_assert(family_of(90, 4, kDown, kAll) == Family::kDecodeB1, "by a ring");
  static_assert(family_of(90, 4, kDown, kNoEngine) == Family::kDecodeS8, "without one");
  static_assert(family_of(90, 3, {5120, 32768}, kAll) == Family::kDecodeS8,
                "too long for that ring");
  static_assert(family_of(90, 8, kDown, kAll) == Family::kDecodeS8, "by a ring");
  static_assert(family_of(90, 9, kDown, kAll) == Family::kWgmma, "");
  static_assert(family_of(90, 3, kDown, kNoEngine) == Family::kDecodeB1, "without one");
  static_assert(family_of(90, 8, kDown, kNoEngine) == Family::kWgmma, "without one");
  static_assert(family_of(100, 1, kQkv, kNoWgmma) == Family::kDecodeS8,
                "the binary tensor core is emulated");
}

TEST(Tuning, NamesAreDifferent) {
  const std::string names[] = {name(Family::kDecodeB1), name(Family::kDecodeS8), name(Family::kMma),
                               name(Family::kWgmma)};
  for (auto i = std::begin(names); i != std::end(names); ++i) {
    EXPECT_EQ(std::count(std::begin(names), std::end(names), *i), 1) << *i;
  }
}

// A family is only chosen for as many tokens as it takes at once, or more, which are cut.
TEST(Tuning, TilesHoldTheirTokens) {
  for (const std::int64_t g : kGroups) {
    for (std::int64_t m = 1; m <= 64; ++m) {
      const KernelConfig config =
          choose(90, m, 8192, 5120, g, {false, false, false, true}, kMultiprocessors);
      const std::int64_t most = max_tokens(config.family, g);
      EXPECT_GE(config.tokens, std::min(m, most)) << "M = " << m << ", G = " << g;
      EXPECT_TRUE(config.family != Family::kDecodeB1 || m <= most) << "M = " << m;
    }
  }
}

// Else it would be a kernel that nobody launches, and no test could.
TEST(Tuning, EveryWgmmaTileIsChosenForSomeShape) {
  for (const WgmmaTile& tile : kWgmmaTiles) {
    for (const bool cuts : {false, true}) {
      if (cuts && !may_be_cut(tile.row_groups, tile.turns, tile.tokens)) continue;
      EXPECT_GT(testing::shape_of_tile(tile, cuts, kMultiprocessors).m, 0)
          << 64 * tile.row_groups << " rows, " << int{tile.tokens} << " tokens, " << int{tile.turns}
          << " turns" << (cuts ? ", cut" : "");
    }
  }
}

// Those that the copy engine writes must be: a CTA's last tile it does not.
TEST(Tuning, EveryTileThatTheEngineWritesIsChosenForManyTiles) {
  for (const WgmmaTile& tile : kWgmmaTiles) {
    if (!engine_stores(tile.row_groups, tile.turns)) continue;
    EXPECT_GT(testing::shape_of_many_tiles(tile, kMultiprocessors).m, 0)
        << int{tile.tokens} << " tokens";
  }
}

TEST(Tuning, TheWgmmaTileIsTheFastest) {
  for (const Layer& layer : kLayers) {
    std::int64_t before = 0;
    for (std::int64_t m = 1; m <= 9000; m += m < 600 ? 1 : 97) {
      const KernelConfig config =
          choose_wgmma(m, layer.n, layer.k, m >= kWgmmaCutMinTokens, kMultiprocessors);
      const std::int64_t ns = wgmma_ns(config, m, layer);
      for (const WgmmaTile& tile : kWgmmaTiles) {
        EXPECT_LE(ns, wgmma_ns(tile, m, layer.n, layer.k, kMultiprocessors));
        if (m < kWgmmaCutMinTokens) continue;
        EXPECT_LE(ns, cut_wgmma_ns(tile, m, layer.n, layer.k, kMultiprocessors));
      }
      EXPECT_GE(ns, before) << "N = " << layer.n << ", M = " << m << ": more tokens take less time";
      before = ns;
    }
  }
}

// A CTA that finishes a tile of another waits for it, unless it has at least a tile's time to do
// before. And tiles are only cut where there is memory for that, and where it pays.
TEST(Tuning, TilesAreCutWhereThatIsFaster) {
  int cuts = 0;
  for (const Layer& layer : kLayers) {
    for (std::int64_t m = 1; m <= 9000; m += m < 600 ? 1 : 97) {
      EXPECT_FALSE(choose_wgmma(m, layer.n, layer.k, false, kMultiprocessors).cuts);
      const KernelConfig config = choose_wgmma(m, layer.n, layer.k, true, kMultiprocessors);
      if (!config.cuts) continue;
      ++cuts;
      EXPECT_GE(m, kWgmmaCutMinTokens);
      for (const WgmmaTile& tile : kWgmmaTiles) {
        EXPECT_LT(wgmma_ns(config, m, layer), wgmma_ns(tile, m, layer.n, layer.k, kMultiprocessors))
            << "N = " << layer.n << ", M = " << m;
      }
    }
  }
  EXPECT_GT(cuts, 0);
  for (std::int64_t tiles = 1; tiles < 1000; ++tiles) {
    const std::int64_t whole = whole_tiles(tiles, kMultiprocessors);
    EXPECT_TRUE(whole % kMultiprocessors == 0 || whole == tiles) << tiles;
    if (whole == tiles) continue;
    EXPECT_GT(tiles - whole, kMultiprocessors) << tiles;
    EXPECT_LT(tiles - whole, 2 * kMultiprocessors) << tiles;
  }
  // 17408 x 256: 272 tiles of 128 x 128, 8 more than two for each of 132.
  EXPECT_TRUE(choose_wgmma(256, 17408, 5120, true, kMultiprocessors).cuts);
}

}  // namespace
}  // namespace kernels
}  // namespace binary_gemm
