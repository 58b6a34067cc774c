#include "binary_gemm/kernels/gemm_mma.cuh"

#include <limits>
#include <stdexcept>
#include <string>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kGroup>
MmaLaunch plan(std::int64_t m, std::int64_t n) {
  using Plan = kernels::GemmMma<kGroup>;
  constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max();
  const std::int64_t tiles =
      (n + Plan::kRows - 1) / Plan::kRows * ((m + Plan::kTokens - 1) / Plan::kTokens);
  if (tiles > kMostTiles) {
    throw std::invalid_argument("binary_gemm: M = " + std::to_string(m) +
                                ", N = " + std::to_string(n) +
                                " has more tiles than a grid of the kernel mma");
  }
  return {reinterpret_cast<const void*>(&kernels::gemm_mma<kGroup>),
          static_cast<std::uint32_t>(tiles), Plan::kThreads, Plan::kSharedBytes};
}

}  // namespace

MmaLaunch plan_mma(std::int64_t m, std::int64_t n, std::int64_t group_size) {
  return with_group_size(group_size,
                         [&](auto group) { return plan<decltype(group)::value>(m, n); });
}

std::vector<const void*> mma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) all.push_back(plan_mma(1, 1, group).kernel);
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
