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

/// The smallest product that has the tile, in one launch, on so many multiprocessors. N is no
/// multiple of a tile, but of 8, so that rows of y can be written as vectors. K has a short last
/// slice, and where warpgroups take turns more slices than turns.
inline WgmmaTileShape shape_of_tile(const kernels::WgmmaTile& tile, int multiprocessors) {
  constexpr std::int64_t kMaxM = 400;
  constexpr std::int64_t kMaxRowBlocks = 140;  // of 64
  WgmmaTileShape best;
  const std::int64_t k = (tile.turns > 1 ? 5 : 1) * 1024 + 256;
  for (std::int64_t block = 1; block <= kMaxRowBlocks; ++block) {
    const std::int64_t n = 64 * block - 8;
    for (std::int64_t m = 1; m <= kMaxM && (best.m == 0 || m * n < best.m * best.n); ++m) {
      const kernels::KernelConfig config = kernels::choose_wgmma(m, n, k, multiprocessors);
      if (config.tokens == tile.tokens && config.row_groups == tile.row_groups &&
          config.turns == tile.turns && kernels::first_rows_wgmma(m, n, k, multiprocessors) == n) {
        best = {m, n, k};
        break;
      }
    }
  }
  return best;
}

/// The smallest product of K = 1280 whose rows go in two launches.
inline WgmmaTileShape shape_of_two_launches(int multiprocessors) {
  constexpr std::int64_t kK = 1024 + 256;
  constexpr std::int64_t kMaxM = 128;
  const std::int64_t max_row_blocks = 3 * std::int64_t{multiprocessors};  // of 64
  WgmmaTileShape best;
  for (std::int64_t block = 1; block <= max_row_blocks; ++block) {
    const std::int64_t n = 64 * block - 8;
    for (std::int64_t m = 1; m <= kMaxM && (best.m == 0 || m * n < best.m * best.n); ++m) {
      if (kernels::first_rows_wgmma(m, n, kK, multiprocessors) < n) {
        best = {m, n, kK};
        break;
      }
    }
  }
  return best;
}

}  // namespace testing
}  // namespace binary_gemm
