#include "binary_gemm/kernels/gemm_mma.cuh"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

using kernels::GemmMma;

/// Tiles, for many of them and for few: 256 rows x 64 tokens, or 64 x 64. Short groups have more
/// dots, and these more registers, than a warp of 64 tokens leaves: 128 x 64.
template <int kGroup>
using Large =
    std::conditional_t<(kGroup < 128), GemmMma<4, 2, 4, kGroup>, GemmMma<8, 1, 8, kGroup>>;
template <int kGroup>
using Small = GemmMma<2, 2, 4, kGroup>;

template <class Plan>
std::int64_t tiles(std::int64_t m, std::int64_t n) {
  return (n + Plan::kRows - 1) / Plan::kRows * ((m + Plan::kTokens - 1) / Plan::kTokens);
}

/// How long the tiles of a product take, in products of a multiprocessor's tensor cores: full
/// multiprocessors, then what is left. A product of a warp that has no other on its scheduler takes
/// twice as long as one of many; this is an estimate, not measured.
template <class Plan>
std::int64_t cost(std::int64_t m, std::int64_t n, int multiprocessors, int shared_memory) {
  constexpr std::int64_t kReserved = 1024;  // of shared memory, for each CTA
  const std::int64_t resident = std::max(
      std::min<std::int64_t>(Plan::kResident, shared_memory / (Plan::kSharedBytes + kReserved)),
      std::int64_t{1});
  const std::int64_t all = tiles<Plan>(m, n);
  // CTAs at once on a multiprocessor, of which `warps` share a scheduler.
  const auto turn = [&](std::int64_t at_once) {
    const std::int64_t warps = std::max<std::int64_t>(at_once * Plan::kWarps / 4, 1);
    const std::int64_t products = Plan::kRowTiles * Plan::kTokenTiles;
    return std::max(warps, std::int64_t{2}) * products;
  };
  const std::int64_t left = all % (multiprocessors * resident);
  return all / (multiprocessors * resident) * turn(resident) +
         (left > 0 ? turn((left + multiprocessors - 1) / multiprocessors) : 0);
}

template <class Plan>
MmaLaunch launch(std::int64_t m, std::int64_t n) {
  constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max();
  const std::int64_t all = tiles<Plan>(m, n);
  if (all > kMostTiles) {
    throw std::invalid_argument("binary_gemm: M = " + std::to_string(m) +
                                ", N = " + std::to_string(n) +
                                " has more tiles than a grid of the kernel mma");
  }
  return {reinterpret_cast<const void*>(&kernels::gemm_mma<Plan>), static_cast<std::uint32_t>(all),
          Plan::kThreads, Plan::kSharedBytes};
}

template <int kGroup>
MmaLaunch plan(std::int64_t m, std::int64_t n, int multiprocessors, int shared_memory) {
  // The large tile reads less from the L2 cache.
  return cost<Large<kGroup>>(m, n, multiprocessors, shared_memory) <=
                 cost<Small<kGroup>>(m, n, multiprocessors, shared_memory)
             ? launch<Large<kGroup>>(m, n)
             : launch<Small<kGroup>>(m, n);
}

}  // namespace

MmaLaunch plan_mma(std::int64_t m, std::int64_t n, std::int64_t group_size, int multiprocessors,
                   int shared_memory) {
  return with_group_size(group_size, [&](auto group) {
    return plan<decltype(group)::value>(m, n, multiprocessors, shared_memory);
  });
}

std::vector<const void*> mma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    const auto of_group = [](auto size) {
      constexpr int kGroup = decltype(size)::value;
      return std::vector<const void*>{launch<Large<kGroup>>(1, 1).kernel,
                                      launch<Small<kGroup>>(1, 1).kernel};
    };
    for (const void* kernel : with_group_size(group, of_group)) all.push_back(kernel);
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
