#include "binary_gemm/kernels/gemm_wgmma.cuh"

#include <algorithm>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

// The shared memory a CTA asks for, at least `needed`, so that a multiprocessor holds no more CTAs
// than an even distribution needs: with programmatic dependent launch they would gather where a
// kernel ahead ends first.
std::uint32_t shared_bytes_for(std::uint32_t needed, std::int64_t at_once,
                               const WgmmaShape& shape) {
  constexpr int kReservedBytes = 1024;  // of shared memory, by the system for each CTA
  constexpr int kUnit = 128;            // in which it is given out
  const std::int64_t share = shape.shared_memory / at_once - kReservedBytes;
  return std::max(needed, static_cast<std::uint32_t>(
                              std::min<std::int64_t>(share, shape.shared_limit) / kUnit * kUnit));
}

template <int kRowGroups, int kTurns, int kTokens, int kGroup>
WgmmaLaunch plan(const WgmmaShape& shape) {
  using Plan = kernels::GemmWgmma<kRowGroups, kTurns, kTokens, kGroup>;
  WgmmaLaunch launch;
  launch.kernel =
      reinterpret_cast<const void*>(&kernels::gemm_wgmma<kRowGroups, kTurns, kTokens, kGroup>);
  const std::int64_t tiles =
      (shape.n + Plan::kRows - 1) / Plan::kRows * ((shape.m + Plan::kTokens - 1) / Plan::kTokens);
  const std::int64_t at_once = std::min<std::int64_t>(
      (tiles + shape.multiprocessors - 1) / shape.multiprocessors, Plan::kResident);
  launch.grid =
      static_cast<std::uint32_t>(std::min<std::int64_t>(tiles, shape.multiprocessors * at_once));
  launch.threads = Plan::kThreads;
  launch.shared_bytes = shared_bytes_for(Plan::kSharedBytes, at_once, shape);
  launch.rows = Plan::kRows;
  launch.tokens = Plan::kTokens;
  launch.blocks = Plan::kStageBlocks;
  return launch;
}

template <int kGroup>
WgmmaLaunch plan_group(const WgmmaShape& shape) {
  // Groups of 256 need more registers than there are with the most tokens.
  constexpr int kMostTokens = kGroup > 128 ? 160 : 176;
  const kernels::KernelConfig& config = shape.config;
  switch (config.row_groups * 10000 + config.turns * 1000 + config.tokens) {
    case 14016:
      return plan<1, 4, 16, kGroup>(shape);
    case 13032:
      return plan<1, 3, 32, kGroup>(shape);
    case 11032:
      return plan<1, 1, 32, kGroup>(shape);
    case 11048:
      return plan<1, 1, 48, kGroup>(shape);
    case 13064:
      return plan<1, 3, 64, kGroup>(shape);
    case 11064:
      return plan<1, 1, 64, kGroup>(shape);
    case 12096:
      return plan<1, 2, 96, kGroup>(shape);
    case 12128:
      return plan<1, 2, 128, kGroup>(shape);
    case 21096:
      return plan<2, 1, 96, kGroup>(shape);
    case 21112:
      return plan<2, 1, 112, kGroup>(shape);
    case 21128:
      return plan<2, 1, 128, kGroup>(shape);
    case 21160:
      return plan<2, 1, 160, kGroup>(shape);
    case 21176:
      return plan<2, 1, kMostTokens, kGroup>(shape);
  }
  return {};
}

}  // namespace

WgmmaLaunch plan_wgmma(const WgmmaShape& shape) {
  return with_group_size(shape.group_size,
                         [&](auto group) { return plan_group<decltype(group)::value>(shape); });
}

std::vector<const void*> wgmma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
      const kernels::KernelConfig config{kernels::Family::kWgmma, tile.tokens, tile.row_groups,
                                         tile.turns};
      all.push_back(plan_wgmma({config, 1, 1, group, 1 << 17, 1 << 17, 1}).kernel);
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
