#include "binary_gemm/kernels/decode_ring.cuh"
#include "binary_gemm/kernels/decode_s8.cuh"

#include <algorithm>
#include <cstring>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kTokens, int kGroup>
DecodeLaunch plan_ring(const DecodeShape& shape) {
  using Plan = kernels::DecodeRing<kTokens, kGroup>;
  const std::int64_t blocks = (shape.n + Plan::kRows - 1) / Plan::kRows;
  const int slices = static_cast<int>(shape.k / kSliceK);
  // Two CTAs a multiprocessor if each can have all of x.
  constexpr int kReservedBytes = 1024;  // of shared memory, by the system for each CTA
  const int ctas = 2 * slices * Plan::kSliceParts <= Plan::kMaxWarps ? 2 : 1;
  const std::int64_t grid = std::min<std::int64_t>(blocks, ctas * shape.multiprocessors);
  const int limit = std::min(shape.shared_limit, shape.shared_memory / ctas - kReservedBytes);
  const kernels::DecodeRingCut cut =
      Plan::plan(slices, (blocks + grid - 1) / grid, blocks, Plan::kMaxWarps / ctas, limit);
  if (cut.warps == 0) return {};
  DecodeLaunch launch;
  launch.engine = true;
  launch.kernel = reinterpret_cast<const void*>(&kernels::decode_ring<kTokens, kGroup>);
  launch.grid = static_cast<std::uint32_t>(grid);
  launch.warps = cut.warps * cut.sets + 2 * cut.helpers;
  launch.shared_bytes = cut.ring_bytes;
  launch.rows = Plan::kRows;
  launch.slices = static_cast<std::uint32_t>(slices);
  static_assert(sizeof(cut) <= sizeof(launch.cut), "");
  std::memcpy(launch.cut, &cut, sizeof(cut));
  return launch;
}

template <int kTokens, int kGroup>
DecodeLaunch plan(const DecodeShape& shape) {
  constexpr bool kMayBeRing = kernels::takes_ring(16, 1, kSliceK, kGroup, 1);
  if constexpr (kMayBeRing) {
    if (shape.engine &&
        kernels::takes_ring(kTokens, shape.n, shape.k, kGroup, shape.multiprocessors)) {
      const DecodeLaunch ring = plan_ring<kTokens, kGroup>(shape);
      if (ring.kernel != nullptr) return ring;
    }
  }
  using Plan = kernels::DecodeS8<kTokens, kGroup>;
  static_assert(Plan::kRows == kDecodeS8Rows, "");
  // With 16 tokens the engine always goes by a ring, but for rows that are too long for one.
  constexpr bool kMayBeEngine = !kMayBeRing || kTokens == 8;
  DecodeLaunch launch;
  launch.engine = kMayBeEngine && shape.engine;
  const typename Plan::Shape cta = Plan::plan(shape.k, launch.engine, shape.shared_limit);
  if (cta.slices == 0) return {};
  const auto kernel = launch.engine ? &kernels::decode_s8<kTokens, kGroup, kMayBeEngine>
                                    : &kernels::decode_s8<kTokens, kGroup, false>;
  launch.kernel = reinterpret_cast<const void*>(kernel);
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
  static_assert(sizeof(cut) <= sizeof(launch.cut), "");
  std::memcpy(launch.cut, &cut, sizeof(cut));
  return launch;
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
    for (const std::int64_t group : kGroupSizes) {
      for (const std::uint8_t tokens : {std::uint8_t{8}, std::uint8_t{16}}) {
        const kernels::KernelConfig config{kernels::Family::kDecodeS8, tokens, 0, 0};
        DecodeShape shape = smallest_shape(config, group, engine);
        all.push_back(plan_decode_s8(shape).kernel);
        shape.k = 11 * kSliceK;  // long rows, by a ring
        all.push_back(plan_decode_s8(shape).kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
