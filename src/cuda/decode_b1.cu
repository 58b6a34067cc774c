#include "binary_gemm/kernels/decode_b1.cuh"

#include <algorithm>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

// The shared memory a CTA asks for, at least `needed`, so that a multiprocessor holds no more CTAs
// than is good. With programmatic dependent launch CTAs of later kernels take what room there is: a
// kernel ahead hides the fetch, but more of them are in each other's way. At M = 1 on an H200, us a
// call back to back, for CTAs a multiprocessor (the table's choice is marked):
//   out:   2* 2.18, 3 2.34, 4 2.54, 5 2.84, 7 3.55    qkv: 2 2.92, 3* 2.54, 4 2.98, 5 3.11, 7 3.71
//   gate:  4 5.41, 5 4.74, 6* 4.40, 7 4.82            lm_head: 4 43.05, 5* 42.61, 6 42.94, 7 43.17
std::uint32_t shared_bytes_for_residency(std::uint32_t needed, std::uint32_t grid,
                                         const DecodeShape& shape) {
  constexpr int kMostResident = 6;
  constexpr int kManyWaves = 5;  // CTAs where the grid takes several waves
  const double wave = static_cast<double>(grid) / shape.multiprocessors;
  const int resident = wave > kMostResident ? kManyWaves : static_cast<int>(1.4 * wave) + 1;
  const int share = shape.shared_memory / std::min(resident, kMostResident) - kReservedSharedBytes;
  // Rounded down to the unit in which shared memory is given out.
  constexpr int kUnit = 128;
  return std::max(needed, static_cast<std::uint32_t>(
                              std::max(0, std::min(share, shape.shared_limit) / kUnit * kUnit)));
}

// See DecodeB1Cut. From two CTAs a multiprocessor on they are late: up to four, or to the last
// where those that follow are about as many again. On an H200, us, back to back and binary_linear,
// none late -> so: gate M = 1 4.34, 5.51 -> 4.08, 5.08, M = 2 6.28, 7.78 -> 5.87, 6.74, M = 3 8.35,
// 9.73 -> 7.96, 8.87; LM head M = 1 42.2, 44.4 -> 41.8, 43.5; a step of 64 layers M = 1 1662 ->
// 1578, M = 2 2115 -> 2036. What lost: late from one or three on, the step 1638 and 1592; all late,
// LM head 45.2; up to four always, the step 1603; late ones when their scales are there, the step
// 1594 -> 1563, but gate M = 1 binary_linear 5.21 -> 5.55, LM head 41.3 -> 42.0. (M = 3, and gate
// at M = 2, go by a ring since.)
kernels::DecodeB1Cut late_ctas(std::uint32_t grid, const DecodeShape& shape) {
  constexpr std::uint32_t kEarly = 2, kWave = 4;  // CTAs a multiprocessor
  const auto multiprocessors = static_cast<std::uint32_t>(shape.multiprocessors);
  const std::uint32_t begin = kEarly * multiprocessors, end = kWave * multiprocessors;
  if (grid <= begin) return {begin, 0};
  const bool two_waves = (grid + end / 2) / end == 2;  // to the nearest
  return {begin, (two_waves ? grid : end) - begin};
}

template <int kTokens, int kGroup>
DecodeLaunch plan(const DecodeShape& shape) {
  using Plan = kernels::DecodeB1<kTokens, kGroup>;
  static_assert(Plan::kRows == kDecodeB1Rows, "");
  const std::int64_t slices = (shape.k + kSliceK - 1) / kSliceK;
  const int warps = Plan::warps(shape.k, shape.shared_limit);
  // What always goes by a ring, but for rows that are too long for one, has no kernel for the
  // engine.
  constexpr bool kMayBeEngine = !kernels::takes_b1_ring(kTokens, 1, kSliceK, kGroup, 1);
  DecodeLaunch launch;
  launch.engine = kMayBeEngine && shape.engine && warps >= slices;
  const auto engine_kernel = [](auto quantizes, auto half_slice) {
    constexpr bool kHalf = kMayBeEngine && decltype(half_slice)::value;
    return reinterpret_cast<const void*>(
        &kernels::decode_b1<kTokens, kGroup, kMayBeEngine, decltype(quantizes)::value, kHalf>);
  };
  launch.kernel =
      !launch.engine
          ? reinterpret_cast<const void*>(&kernels::decode_b1<kTokens, kGroup, false, false, false>)
          : with_half_slice<kGroup>(
                shape.k, [&](auto half) { return engine_kernel(std::false_type{}, half); });
  auto needed = static_cast<std::uint32_t>(Plan::shared_bytes(warps));
  if constexpr (kTokens == 1) {
    if (shape.quantizes) {
      needed += Plan::kMaximaBytes;
      if (!launch.engine || needed > static_cast<std::uint32_t>(shape.shared_limit)) return {};
      launch.kernel = with_half_slice<kGroup>(
          shape.k, [&](auto half) { return engine_kernel(std::true_type{}, half); });
    }
  }
  launch.grid = static_cast<std::uint32_t>((shape.n + Plan::kRows - 1) / Plan::kRows);
  launch.warps = static_cast<std::uint32_t>(warps);
  launch.shared_bytes = shared_bytes_for_residency(needed, launch.grid, shape);
  const kernels::DecodeB1Cut cut = late_ctas(launch.grid, shape);
  launch.set_cut(cut);
  launch.rows = Plan::kRows;
  launch.slices = static_cast<std::uint32_t>(slices);
  return launch;
}

template <int kGroup>
DecodeLaunch plan_group(const DecodeShape& shape) {
  if (shape.config.tokens == 1) return plan<1, kGroup>(shape);
  if constexpr (kGroup > 32) {
    if (shape.config.tokens == 2) return plan<2, kGroup>(shape);
    if (shape.config.tokens == 3) return plan<3, kGroup>(shape);
  }
  return {};
}

}  // namespace

DecodeLaunch plan_decode_b1(const DecodeShape& shape) {
  const DecodeLaunch ring = plan_decode_b1_ring(shape);
  if (ring.kernel != nullptr) return ring;
  return with_group_size(shape.group_size,
                         [&](auto group) { return plan_group<decltype(group)::value>(shape); });
}

std::vector<const void*> decode_b1_kernels() {
  std::vector<const void*> all;
  const auto add = [&](const DecodeShape& shape) {
    const void* kernel = plan_decode_b1(shape).kernel;
    if (kernel != nullptr) all.push_back(kernel);
  };
  // With whole slices and a last half one.
  const auto add_engine = [&](DecodeShape shape) {
    add(shape);
    shape.k += kSliceK / 2;
    if (kernels::has_half_slice(shape.k, shape.group_size)) add(shape);
  };
  for (const std::int64_t group : kGroupSizes) {
    for (const std::uint8_t tokens : {std::uint8_t{1}, std::uint8_t{2}, std::uint8_t{3}}) {
      const kernels::KernelConfig config{kernels::Family::kDecodeB1, tokens, 0, 0};
      add(smallest_shape(config, group, false));
      add_engine(smallest_shape(config, group, true));
    }
    DecodeShape shape = smallest_shape({kernels::Family::kDecodeB1, 1, 0, 0}, group, true);
    shape.quantizes = true;
    add_engine(shape);
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
