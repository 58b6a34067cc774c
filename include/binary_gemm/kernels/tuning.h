#pragma once

/// Which kernel takes a product: a table from (architecture of the compiled code, M, G). N and K
/// choose the grid and the cut of a CTA, in src/cuda/.
///
/// No CUDA is needed to read or print it. What was tried for decode_b1 and lost, us on an H200 at
/// M = 1, G = 128, plain graph replay of the layers in bench/results:
///   fetching by cp.async, all issued at once: out 2.52, gate 4.76, down 5.17, LM head 46.2 for the
///     fetch alone; the copy engine 2.36, 4.30, 4.33, 42.9
///   persistent CTAs with a ring of stages: gate 6.7 against 5.5 (back to back 4.46)
///   16 rows a CTA: gate 7.5

#include <cstdint>

namespace binary_gemm {
namespace kernels {

enum class Family : std::uint8_t { kDecodeB1, kDecodeS8, kWgmma };

/// A kernel family and its template and launch parameters.
struct KernelConfig {
  Family family;
  std::uint8_t tokens;     ///< batch tile: tokens of a CTA
  std::uint8_t consumers;  ///< wgmma: warpgroups that multiply, 64 rows each
};

constexpr const char* name(Family family) {
  return family == Family::kDecodeB1   ? "decode_b1"
         : family == Family::kDecodeS8 ? "decode_s8"
                                       : "wgmma";
}

/// The binary tensor core is native from sm_80 to sm_90 and emulated after.
constexpr bool has_b1(int compiled_architecture) {
  return compiled_architecture >= 80 && compiled_architecture < 100;
}

/// The most tokens a family's kernels take at once; larger M is cut. decode_b1 with groups of 32
/// needs more registers than there are for a second token.
constexpr std::int64_t max_tokens(Family family, std::int64_t group_size) {
  return family == Family::kWgmma      ? std::int64_t{1} << 31
         : family == Family::kDecodeS8 ? 32
         : group_size == 32            ? 1
                                       : 3;
}

/// A tile of the wgmma kernel, and what a block of 128 of K takes it when a multiprocessor has no
/// other tile, in clocks.
struct WgmmaTile {
  std::uint8_t consumers;
  std::uint8_t tokens;
  int block_clocks;
};
inline constexpr WgmmaTile kWgmmaTiles[] = {
    {3, 128, 800}, {2, 128, 560}, {3, 96, 620}, {2, 64, 300}, {1, 64, 260}, {1, 32, 200},
};

/// The tile that takes the fewest clocks, by waves over the multiprocessors.
constexpr KernelConfig choose_wgmma(std::int64_t m, std::int64_t n, int multiprocessors) {
  WgmmaTile best = kWgmmaTiles[0];
  std::int64_t best_clocks = 0;
  for (const WgmmaTile& tile : kWgmmaTiles) {
    const std::int64_t rows = 64 * tile.consumers;
    const std::int64_t tiles = (n + rows - 1) / rows * ((m + tile.tokens - 1) / tile.tokens);
    const std::int64_t waves = (tiles + multiprocessors - 1) / multiprocessors;
    const std::int64_t clocks = waves * tile.block_clocks;
    if (best_clocks == 0 || clocks < best_clocks) best = tile, best_clocks = clocks;
  }
  return {Family::kWgmma, best.tokens, best.consumers};
}

/// From this M on the wgmma kernel is faster than decode_s8.
inline constexpr std::int64_t kWgmmaMinTokens = 17;

/// The configuration of a decode family for M tokens.
constexpr KernelConfig configure(Family family, std::int64_t m, std::int64_t group_size) {
  const std::int64_t most = max_tokens(family, group_size);
  const std::int64_t tokens = m < most ? m : most;
  if (family == Family::kDecodeB1) return {family, static_cast<std::uint8_t>(tokens), 0};
  return {family, static_cast<std::uint8_t>(tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32), 0};
}

/// The table's choice; `wgmma`: it can take the product. At M = 4 the decode families meet: see
/// bench/results.
constexpr KernelConfig choose(int compiled_architecture, std::int64_t m, std::int64_t n,
                              std::int64_t group_size, bool wgmma, int multiprocessors) {
  if (wgmma && m >= kWgmmaMinTokens) return choose_wgmma(m, n, multiprocessors);
  const bool b1 = has_b1(compiled_architecture) && m <= max_tokens(Family::kDecodeB1, group_size);
  return configure(b1 ? Family::kDecodeB1 : Family::kDecodeS8, m, group_size);
}

}  // namespace kernels
}  // namespace binary_gemm
