#pragma once

/// Shapes for which the tuning table chooses a given wgmma tile, so that tests can run every one.

#include <cstdint>

#include "binary_gemm/kernels/tuning.h"

namespace binary_gemm {
namespace testing {

struct WgmmaTileShape {
  std::int64_t m = 0;  ///< 0: there is none
  std::int64_t n = 0;
  std::int64_t k = 0;
};

/// The smallest product that has the tile on so many multiprocessors; if `cuts`, and that it is
/// cut. N is no multiple of a tile, but of 8, so that rows of y can be written as vectors. K has a
/// short last slice, and where warpgroups take turns more slices than turns, twice as many: they
/// are for long rows.
inline WgmmaTileShape shape_of_tile(const kernels::WgmmaTile& tile, bool cuts,
                                    int multiprocessors) {
  constexpr std::int64_t kMaxM = 400;
  constexpr std::int64_t kMaxRowBlocks = 140;  // of 64
  WgmmaTileShape best;
  const std::int64_t k = (tile.turns > 1 ? 9 : cuts ? 5 : 1) * 1024 + 256;
  for (std::int64_t block = 1; block <= kMaxRowBlocks; ++block) {
    const std::int64_t n = 64 * block - 8;
    for (std::int64_t m = 1; m <= kMaxM && (best.m == 0 || m * n < best.m * best.n); ++m) {
      const kernels::KernelConfig config =
          kernels::choose_wgmma(m, n, k, m >= kernels::kWgmmaCutMinTokens, multiprocessors);
      if (config.tokens == tile.tokens && config.row_groups == tile.row_groups &&
          config.turns == tile.turns && config.cuts == cuts) {
        best = {m, n, k};
        break;
      }
    }
  }
  return best;
}

/// A product that has the tile, whole and so often that a CTA has several, of which it writes all
/// but the last while it multiplies. N is one row of tiles, all but 8.
inline WgmmaTileShape shape_of_many_tiles(const kernels::WgmmaTile& tile, int multiprocessors) {
  const std::int64_t n = 64 * tile.row_groups - 8;
  constexpr std::int64_t kK = 1024 + 256;
  for (std::int64_t tiles = 2 * multiprocessors + 1; tiles <= 4 * multiprocessors; ++tiles) {
    const std::int64_t m = tile.tokens * tiles - 3;
    const kernels::KernelConfig config = kernels::choose_wgmma(m, n, kK, true, multiprocessors);
    if (config.tokens == tile.tokens && config.row_groups == tile.row_groups &&
        config.turns == tile.turns && !config.cuts) {
      return {m, n, kK};
    }
  }
  return {};
}

}  // namespace testing
}  // namespace binary_gemm
