#include "binary_gemm/kernels/decode_s8.cuh"

#include <algorithm>
#include <cstring>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

// Blocks of 32 rows read x half as often and halve what a block costs beside its products. They are
// for the copy engine; with more tokens or smaller groups there is not the shared memory for as
// many teams.
template <int kTokens, int kGroup>
constexpr bool has_32_rows() {
  return kTokens == 8 && kGroup >= 128;
}

template <int kTokens, int kGroup, int kTileRows>
const void* kernel(bool engine) {
  if constexpr (kTileRows == 16) {
    if (!engine) {
      return reinterpret_cast<const void*>(&kernels::decode_s8<kTokens, kGroup, kTileRows, false>);
    }
  }
  return reinterpret_cast<const void*>(&kernels::decode_s8<kTokens, kGroup, kTileRows, true>);
}

template <int kTokens, int kGroup, int kTileRows>
DecodeLaunch plan_rows(const DecodeShape& shape) {
  using Plan = kernels::DecodeS8<kTokens, kGroup, kTileRows>;
  static_assert(Plan::kRows % kDecodeS8Rows == 0, "");
  const typename Plan::Shape cta = Plan::plan(shape.k, shape.engine, shape.shared_limit);
  if (cta.slices == 0) return {};
  DecodeLaunch launch;
  launch.engine = shape.engine;
  launch.kernel = kernel<kTokens, kGroup, kTileRows>(shape.engine);
  // A CTA fills a multiprocessor, so there is one each; more where the sums of several rounds have
  // to wait in shared memory.
  const auto blocks = static_cast<std::uint32_t>((shape.n + Plan::kRows - 1) / Plan::kRows);
  launch.grid = std::min(blocks, static_cast<std::uint32_t>(shape.multiprocessors));
  if (cta.rounds > 1) {
    launch.grid =
        std::max(launch.grid, (blocks + Plan::kMaxSummedBlocks - 1) / Plan::kMaxSummedBlocks);
  }
  launch.warps = static_cast<std::uint32_t>(cta.slices);
  launch.teams = static_cast<std::uint32_t>(cta.teams);
  launch.shared_bytes = static_cast<std::uint32_t>(Plan::shared_bytes(cta));
  launch.rows = Plan::kRows;
  launch.slices = static_cast<std::uint32_t>(cta.slices);
  const kernels::DecodeS8Cut cut{
      static_cast<std::uint32_t>(cta.slices),      static_cast<std::uint32_t>(cta.rounds),
      static_cast<std::uint32_t>(cta.teams),       static_cast<std::uint32_t>(cta.stages),
      static_cast<std::uint32_t>(cta.scale_bytes), blocks};
  static_assert(sizeof(cut) == sizeof(launch.cut), "");
  std::memcpy(launch.cut, &cut, sizeof(cut));
  return launch;
}

template <int kTokens, int kGroup>
DecodeLaunch plan(const DecodeShape& shape) {
  if constexpr (has_32_rows<kTokens, kGroup>()) {
    using Plan = kernels::DecodeS8<kTokens, kGroup, 32>;
    const typename Plan::Shape cta = Plan::plan(shape.k, shape.engine, shape.shared_limit);
    // Where a team would have none, or K takes several rounds, 16 rows are better.
    const std::int64_t teams = std::int64_t{cta.teams} * shape.multiprocessors;
    if (shape.engine && cta.rounds == 1 && shape.n / Plan::kRows >= teams) {
      return plan_rows<kTokens, kGroup, 32>(shape);
    }
  }
  return plan_rows<kTokens, kGroup, 16>(shape);
}

template <int kGroup>
DecodeLaunch plan_group(const DecodeShape& shape) {
  switch (shape.config.tokens) {
    case 8:
      return plan<8, kGroup>(shape);
    case 16:
      return plan<16, kGroup>(shape);
  }
  return {};
}

}  // namespace

DecodeLaunch plan_decode_s8(const DecodeShape& shape) {
  return with_group_size(shape.group_size,
                         [&](auto group) { return plan_group<decltype(group)::value>(shape); });
}

std::vector<const void*> decode_s8_kernels() {
  std::vector<const void*> all;
  for (const bool engine : {false, true}) {
    for (const std::int64_t group_size : kGroupSizes) {
      with_group_size(group_size, [&](auto group) {
        constexpr int kGroup = decltype(group)::value;
        all.push_back(kernel<8, kGroup, 16>(engine));
        all.push_back(kernel<16, kGroup, 16>(engine));
        if constexpr (has_32_rows<8, kGroup>()) {
          if (engine) all.push_back(kernel<8, kGroup, 32>(engine));
        }
        return DecodeLaunch{};
      });
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
