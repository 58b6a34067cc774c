#include "binary_gemm/kernels/decode_ring.cuh"

#include <algorithm>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

constexpr int kMostTokens = 16;

template <int kTokens, int kGroup, bool kHalf>
DecodeLaunch plan_slices(const DecodeShape& shape) {
  using Plan = kernels::DecodeRing<kTokens, kGroup, kHalf>;
  static_assert(Plan::kRows == kDecodeS8Rows, "");
  const std::int64_t blocks = (shape.n + Plan::kRows - 1) / Plan::kRows;
  const int slices = static_cast<int>((shape.k + kSliceK - 1) / kSliceK);
  // Two CTAs a multiprocessor if each can have all of x.
  const int ctas = 2 * slices * Plan::kSliceParts <= Plan::kMaxWarps ? 2 : 1;
  const std::int64_t grid = std::min<std::int64_t>(blocks, ctas * shape.multiprocessors);
  const int limit = std::min(shape.shared_limit, shape.shared_memory / ctas - kReservedSharedBytes);
  const kernels::DecodeRingCut cut =
      Plan::plan(slices, (blocks + grid - 1) / grid, blocks, Plan::kMaxWarps / ctas, limit);
  if (cut.warps == 0) return {};
  DecodeLaunch launch;
  launch.engine = true;
  launch.kernel = reinterpret_cast<const void*>(&kernels::decode_ring<kTokens, kGroup, kHalf>);
  launch.grid = static_cast<std::uint32_t>(grid);
  launch.warps = cut.warps * cut.sets + 2 * cut.helpers;
  launch.shared_bytes = cut.ring_bytes;
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
  if constexpr (kernels::takes_ring(kMostTokens, 1, kSliceK, kGroup, 1)) {
    switch (shape.config.tokens) {
      case 8:
        return plan<8, kGroup>(shape);
      case kMostTokens:
        return plan<kMostTokens, kGroup>(shape);
    }
  }
  return {};
}

}  // namespace

DecodeLaunch plan_decode_ring(const DecodeShape& shape) {
  if (!shape.engine || !kernels::takes_ring(shape.config.tokens, shape.n, shape.k, shape.group_size,
                                            shape.multiprocessors)) {
    return {};
  }
  return with_group_size(shape.group_size,
                         [&](auto group) { return plan_group<decltype(group)::value>(shape); });
}

std::vector<const void*> decode_ring_kernels() {
  std::vector<const void*> all;
  for (const std::int64_t group : kGroupSizes) {
    for (const std::uint8_t tokens : {std::uint8_t{8}, std::uint8_t{kMostTokens}}) {
      DecodeShape shape = smallest_shape({kernels::Family::kDecodeS8, tokens, 0, 0}, group, true);
      // Long rows take it with any tile.
      for (const std::int64_t more : {kSliceK, kSliceK / 2}) {
        shape.k = kernels::kRingLongRow + more;
        const DecodeLaunch launch = plan_decode_ring(shape);
        if (launch.kernel != nullptr) all.push_back(launch.kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
