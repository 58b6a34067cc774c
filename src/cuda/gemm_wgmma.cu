#include "binary_gemm/kernels/gemm_wgmma.cuh"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

// The shared memory a CTA asks for, at least `needed`, so that a multiprocessor holds no more CTAs
// than an even distribution needs: with programmatic dependent launch they would gather where a
// kernel ahead ends first.
std::uint32_t shared_bytes_for(std::uint32_t needed, std::int64_t at_once,
                               const WgmmaShape& shape) {
  constexpr int kUnit = 128;  // in which it is given out
  const std::int64_t share = shape.shared_memory / at_once - kReservedSharedBytes;
  return std::max(needed, static_cast<std::uint32_t>(
                              std::min<std::int64_t>(share, shape.shared_limit) / kUnit * kUnit));
}

using kernels::kWgmmaTiles;
using kernels::WgmmaTile;

template <std::size_t kTile, int kGroup>
WgmmaLaunch plan(const WgmmaShape& shape) {
  constexpr WgmmaTile kTable = kWgmmaTiles[kTile];
  // Groups of 256 need more registers than there are with the most tokens.
  constexpr int kMostTokens = kGroup > 128 ? 160 : 255;
  constexpr int kTokens = std::min<int>(kTable.tokens, kMostTokens);
  constexpr bool kMayBeCut = kernels::may_be_cut(kTable.row_groups, kTable.turns, kTable.tokens);
  using Plan = kernels::GemmWgmma<kTable.row_groups, kTable.turns, kTokens, kGroup, false>;
  static_assert(Plan::kResident == kernels::resident(kTable), "the table's times are of so many");
  WgmmaLaunch launch;
  launch.kernel = reinterpret_cast<const void*>(
      &kernels::gemm_wgmma<kTable.row_groups, kTable.turns, kTokens, kGroup, false>);
  using CutPlan = kernels::GemmWgmma<kTable.row_groups, kTable.turns, kTokens, kGroup, kMayBeCut>;
  static_assert(CutPlan::kSharedBytes == Plan::kSharedBytes, "they are launched alike");
  static_assert(!kMayBeCut || (Plan::kResident == 1 && Plan::kRowGroups * Plan::kHandedBytes <=
                                                           kernels::kHandOverTileBytes),
                "there is memory for a CTA's tile on each multiprocessor");
  if (kMayBeCut && shape.config.cuts) {
    launch.kernel = reinterpret_cast<const void*>(
        &kernels::gemm_wgmma<kTable.row_groups, kTable.turns, kTokens, kGroup, kMayBeCut>);
  }
  const std::int64_t row_tiles = (shape.n + Plan::kRows - 1) / Plan::kRows;
  const std::int64_t tiles = row_tiles * ((shape.m + Plan::kTokens - 1) / Plan::kTokens);
  const std::int64_t at_once = std::min<std::int64_t>(
      (tiles + shape.multiprocessors - 1) / shape.multiprocessors, Plan::kResident);
  launch.grid =
      static_cast<std::uint32_t>(std::min<std::int64_t>(tiles, shape.multiprocessors * at_once));
  launch.threads = Plan::kThreads;
  launch.shared_bytes = shared_bytes_for(Plan::kSharedBytes, at_once, shape);
  launch.rows = Plan::kRows;
  launch.tokens = Plan::kTokens;
  launch.blocks = Plan::kStageBlocks;
  launch.engine_stores = Plan::kEngineStores;
  const std::int64_t whole =
      shape.config.cuts ? kernels::whole_tiles(tiles, shape.multiprocessors) : tiles;
  launch.shares.row_tiles = static_cast<std::uint32_t>(row_tiles);
  launch.shares.grid_rows = static_cast<std::uint32_t>(launch.grid % row_tiles);
  launch.shares.grid_tokens = static_cast<std::uint32_t>(launch.grid / row_tiles);
  launch.shares.whole = static_cast<std::uint32_t>(whole);
  if (whole < tiles) {
    const std::int64_t units = (tiles - whole) * ((shape.k + kSliceK - 1) / kSliceK);
    launch.shares.units = static_cast<std::uint32_t>(units / launch.grid);
    launch.shares.rest = static_cast<std::uint32_t>(units % launch.grid);
  }
  return launch;
}

bool has_tile(const kernels::KernelConfig& config, const WgmmaTile& tile) {
  return config.tokens == tile.tokens && config.row_groups == tile.row_groups &&
         config.turns == tile.turns;
}

// The table's tile that the configuration has.
template <int kGroup, std::size_t... kTiles>
WgmmaLaunch plan_group(const WgmmaShape& shape, std::index_sequence<kTiles...>) {
  WgmmaLaunch launch;
  static_cast<void>(((has_tile(shape.config, kWgmmaTiles[kTiles]) &&
                      (launch = plan<kTiles, kGroup>(shape), true)) ||
                     ...));
  return launch;
}

}  // namespace

WgmmaLaunch plan_wgmma(const WgmmaShape& shape) {
  return with_group_size(shape.group_size, [&](auto group) {
    return plan_group<decltype(group)::value>(shape,
                                              std::make_index_sequence<std::size(kWgmmaTiles)>{});
  });
}

std::vector<const void*> wgmma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    for (const WgmmaTile& tile : kWgmmaTiles) {
      for (const bool cuts : {false, true}) {
        if (cuts && !kernels::may_be_cut(tile.row_groups, tile.turns, tile.tokens)) continue;
        const kernels::KernelConfig config{kernels::Family::kWgmma, tile.tokens, tile.row_groups,
                                           tile.turns, cuts};
        all.push_back(plan_wgmma({config, 1, 1, 1, group, 1 << 17, 1 << 17, 1}).kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
