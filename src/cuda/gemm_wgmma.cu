#include "binary_gemm/kernels/gemm_wgmma.cuh"

#include <algorithm>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kConsumers, int kTokens, int kGroup>
WgmmaLaunch plan(std::int64_t m, std::int64_t n, int multiprocessors) {
  using Plan = kernels::GemmWgmma<kConsumers, kTokens, kGroup>;
  WgmmaLaunch launch;
  launch.kernel = reinterpret_cast<const void*>(&kernels::gemm_wgmma<kConsumers, kTokens, kGroup>);
  const std::int64_t tiles =
      (n + Plan::kRows - 1) / Plan::kRows * ((m + Plan::kTokens - 1) / Plan::kTokens);
  launch.grid = static_cast<std::uint32_t>(
      std::min<std::int64_t>(tiles, std::int64_t{multiprocessors} * Plan::kResident));
  launch.threads = Plan::kThreads;
  launch.shared_bytes = Plan::kSharedBytes;
  launch.rows = Plan::kRows;
  launch.tokens = Plan::kTokens;
  return launch;
}

template <int kGroup>
WgmmaLaunch plan_group(const kernels::KernelConfig& config, std::int64_t m, std::int64_t n,
                       int multiprocessors) {
  // Groups of 256 need more registers than there are with the most tokens.
  constexpr int kMostTokens = kGroup > 128 ? 160 : 176;
  switch (config.consumers == 1 ? config.tokens : std::min<int>(config.tokens, kMostTokens)) {
    case 32:
      return plan<1, 32, kGroup>(m, n, multiprocessors);
    case 48:
      return plan<1, 48, kGroup>(m, n, multiprocessors);
    case 64:
      return plan<1, 64, kGroup>(m, n, multiprocessors);
    case 96:
      return plan<2, 96, kGroup>(m, n, multiprocessors);
    case 112:
      return plan<2, 112, kGroup>(m, n, multiprocessors);
    case 128:
      return plan<2, 128, kGroup>(m, n, multiprocessors);
    case 160:
      return plan<2, 160, kGroup>(m, n, multiprocessors);
    case 176:
      return plan<2, kMostTokens, kGroup>(m, n, multiprocessors);
  }
  return {};
}

}  // namespace

WgmmaLaunch plan_wgmma(const kernels::KernelConfig& config, std::int64_t m, std::int64_t n,
                       std::int64_t group_size, int multiprocessors) {
  return with_group_size(group_size, [&](auto group) {
    return plan_group<decltype(group)::value>(config, m, n, multiprocessors);
  });
}

std::vector<const void*> wgmma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
      const kernels::KernelConfig config{kernels::Family::kWgmma, tile.tokens, tile.consumers};
      all.push_back(plan_wgmma(config, 1, 1, group, 1).kernel);
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
