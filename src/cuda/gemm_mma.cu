#include "binary_gemm/kernels/gemm_mma.cuh"

#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

using kernels::GemmMma;

/// A tile and the nanoseconds that its CTAs take for a block of 128 of K, while a multiprocessor
/// has 1, 2, .. of them: an H200's, products of K = 5120 by the blocks that they have (G = 32
/// partly estimated). Elsewhere all are longer or shorter, at about the same ratios.
template <class Plan_, int... kNs>
struct Tile {
  using Plan = Plan_;
  static constexpr std::int64_t kBlockNs[] = {kNs...};
  static_assert(sizeof...(kNs) == Plan::kResident, "a time for each number of CTAs");
};
template <class... Tile>
struct Tiles {};

/// 128 x 64; 128 x 32; and 64 x 32 by two warps each, for few tiles.
template <int kGroup>
struct TilesOf {
  using Type = Tiles<Tile<GemmMma<4, 1, 8, kGroup>, 865, 1180, 1520>,
                     Tile<GemmMma<4, 1, 4, kGroup>, 570, 780, 1020, 1260>,
                     Tile<GemmMma<2, 2, 4, kGroup>, 380, 510, 650, 780>>;
};
/// Short groups have more dots, and these more registers, than a warp of 64 tokens leaves.
template <>
struct TilesOf<64> {
  using Type =
      Tiles<Tile<GemmMma<4, 1, 4, 64>, 640, 890, 1190>, Tile<GemmMma<2, 2, 4, 64>, 400, 540, 700>>;
};
template <>
struct TilesOf<32> {
  using Type = Tiles<Tile<GemmMma<4, 1, 4, 32>, 900, 1270>, Tile<GemmMma<2, 2, 4, 32>, 520, 740>>;
};

template <class Plan>
std::int64_t tiles(std::int64_t m, std::int64_t n) {
  return (n + Plan::kRows - 1) / Plan::kRows * ((m + Plan::kTokens - 1) / Plan::kTokens);
}

/// Nanoseconds of a product for each block of K: full multiprocessors, then what is left.
template <class Tile>
std::int64_t block_ns(std::int64_t m, std::int64_t n, int multiprocessors, int shared_memory) {
  using Plan = typename Tile::Plan;
  constexpr std::int64_t kReserved = 1024;  // of shared memory, for each CTA
  const std::int64_t fitting = shared_memory / (Plan::kSharedBytes + kReserved);
  const std::int64_t resident =
      std::clamp(fitting, std::int64_t{1}, std::int64_t{std::size(Tile::kBlockNs)});
  const std::int64_t all = tiles<Plan>(m, n), turn = multiprocessors * resident;
  const std::int64_t left = (all % turn + multiprocessors - 1) / multiprocessors;
  return all / turn * Tile::kBlockNs[resident - 1] + (left > 0 ? Tile::kBlockNs[left - 1] : 0);
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

template <class... Tile>
MmaLaunch fastest(Tiles<Tile...> /*of*/, std::int64_t m, std::int64_t n, int multiprocessors,
                  int shared_memory) {
  const std::int64_t ns[] = {block_ns<Tile>(m, n, multiprocessors, shared_memory)...};
  MmaLaunch (*const launches[])(std::int64_t, std::int64_t) = {&launch<typename Tile::Plan>...};
  return launches[std::min_element(std::begin(ns), std::end(ns)) - std::begin(ns)](m, n);
}

template <class... Tile>
std::vector<const void*> kernels_of(Tiles<Tile...> /*of*/) {
  return {launch<typename Tile::Plan>(1, 1).kernel...};
}

}  // namespace

MmaLaunch plan_mma(std::int64_t m, std::int64_t n, std::int64_t group_size, int multiprocessors,
                   int shared_memory) {
  return with_group_size(group_size, [&](auto group) {
    return fastest(typename TilesOf<decltype(group)::value>::Type{}, m, n, multiprocessors,
                   shared_memory);
  });
}

std::vector<const void*> mma_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    const auto of_group = [](auto size) {
      return kernels_of(typename TilesOf<decltype(size)::value>::Type{});
    };
    for (const void* kernel : with_group_size(group, of_group)) all.push_back(kernel);
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
