#include "binary_gemm/kernels/decode_b1_ring.cuh"

#include <algorithm>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kTokens, int kGroup, bool kHalf>
DecodeLaunch plan_slices(const DecodeShape& shape) {
  using Plan = kernels::DecodeB1Ring<kTokens, kGroup, kHalf>;
  static_assert(kTokens <= kernels::kMaxB1RingTokens, "");
  const std::int64_t blocks = (shape.n + Plan::kRows - 1) / Plan::kRows;
  const int slices = static_cast<int>((shape.k + kSliceK - 1) / kSliceK);
  const std::int64_t grid = std::min<std::int64_t>(blocks, shape.multiprocessors);
  const kernels::DecodeB1RingCut cut =
      Plan::plan(slices, (blocks + grid - 1) / grid, blocks, shape.shared_limit);
  if (cut.stages == 0) return {};
  DecodeLaunch launch;
  launch.engine = true;
  launch.kernel = reinterpret_cast<const void*>(&kernels::decode_b1_ring<kTokens, kGroup, kHalf>);
  launch.grid = static_cast<std::uint32_t>(grid);
  launch.warps = Plan::kWarps;
  launch.shared_bytes = static_cast<std::uint32_t>(Plan::shared_bytes(cut, slices));
  launch.rows = Plan::kRows;
  launch.slices = static_cast<std::uint32_t>(slices);
  launch.set_cut(cut);
  return launch;
}

template <int kTokens, int kGroup>
DecodeLaunch plan(const DecodeShape& shape) {
  return with_half_slice<kGroup>(shape.k, [&](auto half) {
    return plan_slices<kTokens, kGroup, decltype(half)::value>(shape);
  });
}

template <int kGroup>
DecodeLaunch plan_group(const DecodeShape& shape) {
  if constexpr (kGroup >= 128) {
    switch (shape.config.tokens) {
      case 2:
        return plan<2, kGroup>(shape);
      case 3:
        return plan<3, kGroup>(shape);
      case 4:
        return plan<4, kGroup>(shape);
    }
  }
  return {};
}

}  // namespace

DecodeLaunch plan_decode_b1_ring(const DecodeShape& shape) {
  if (!shape.engine || !kernels::takes_b1_ring(shape.config.tokens, shape.n, shape.k,
                                               shape.group_size, shape.multiprocessors)) {
    return {};
  }
  return with_group_size(shape.group_size,
                         [&](auto group) { return plan_group<decltype(group)::value>(shape); });
}

std::vector<const void*> decode_b1_ring_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    for (const std::uint8_t tokens : {std::uint8_t{2}, std::uint8_t{3}, std::uint8_t{4}}) {
      DecodeShape shape = smallest_shape({kernels::Family::kDecodeB1, tokens, 0, 0}, group, true);
      // Long rows take it with any of these.
      for (const std::int64_t more : {kSliceK, kSliceK / 2}) {
        shape.k = kernels::kRingLongRow + more;
        const DecodeLaunch launch = plan_decode_b1_ring(shape);
        if (launch.kernel != nullptr) all.push_back(launch.kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
