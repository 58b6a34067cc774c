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
WgmmaLaunch plan_group(int consumers, int tokens, std::int64_t m, std::int64_t n,
                       int multiprocessors) {
  // Smaller groups need more registers than three warpgroups with 128 tokens have.
  constexpr int kMostTokens = kGroup < 128 ? 96 : 128;
  if (consumers == 3 && tokens > 96) return plan<3, kMostTokens, kGroup>(m, n, multiprocessors);
  if (consumers == 3) return plan<3, 96, kGroup>(m, n, multiprocessors);
  if (consumers == 2 && tokens > 64) return plan<2, 128, kGroup>(m, n, multiprocessors);
  if (consumers == 2) return plan<2, 64, kGroup>(m, n, multiprocessors);
  if (tokens > 32) return plan<1, 64, kGroup>(m, n, multiprocessors);
  return plan<1, 32, kGroup>(m, n, multiprocessors);
}

}  // namespace

WgmmaLaunch plan_wgmma(const kernels::KernelConfig& config, std::int64_t m, std::int64_t n,
                       std::int64_t group_size, int multiprocessors) {
  switch (group_size) {
    case 32:
      return plan_group<32>(config.consumers, config.tokens, m, n, multiprocessors);
    case 64:
      return plan_group<64>(config.consumers, config.tokens, m, n, multiprocessors);
    case 128:
      return plan_group<128>(config.consumers, config.tokens, m, n, multiprocessors);
    default:
      return plan_group<256>(config.consumers, config.tokens, m, n, multiprocessors);
  }
}

std::vector<const void*> wgmma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : {32, 64, 128, 256}) {
    for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
      const kernels::KernelConfig config{kernels::Family::kWgmma, tile.tokens, tile.consumers};
      all.push_back(plan_wgmma(config, 1, 1, group, 1).kernel);
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
