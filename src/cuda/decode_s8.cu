#include "binary_gemm/kernels/decode_s8.cuh"

#include <algorithm>

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kTokens, int kGroup>
DecodeLaunch plan(const DecodeShape& shape) {
  using Plan = kernels::DecodeS8<kTokens, kGroup>;
  static_assert(Plan::kRows == kDecodeS8Rows, "");
  // What always goes by a ring, but for rows that are too long for one, has no kernel for the
  // engine.
  constexpr bool kMayBeEngine = !kernels::takes_ring(kTokens, 1, kSliceK, kGroup, 1);
  DecodeLaunch launch;
  launch.engine = kMayBeEngine && shape.engine;
  typename Plan::Shape cta = Plan::plan(shape.k, launch.engine, shape.shared_limit);
  // It would bring the scales of all of K at once; or a half slice in a round of its own.
  const bool half = kernels::has_half_slice(shape.k, kGroup);
  if (launch.engine && (cta.slices == 0 || (half && cta.rounds > 1))) {
    launch.engine = false;
    cta = Plan::plan(shape.k, false, shape.shared_limit);
  }
  if (cta.slices == 0) return {};
  launch.kernel =
      !launch.engine
          ? reinterpret_cast<const void*>(&kernels::decode_s8<kTokens, kGroup, false, false>)
          : with_half_slice<kGroup>(shape.k, [](auto half_slice) {
              constexpr bool kHalf = kMayBeEngine && decltype(half_slice)::value;
              return reinterpret_cast<const void*>(
                  &kernels::decode_s8<kTokens, kGroup, kMayBeEngine, kHalf>);
            });
  // A CTA fills a multiprocessor, so there is one each at most, and fewer where that takes as long:
  // binary_linear on an H200, back to back, us, with 132 CTAs -> with 128 or 107: QKV M = 4 6.16 ->
  // 5.66, M = 8 6.59 -> 6.30; out 5.53 -> 5.05, 6.00 -> 5.41. (decode_ring loses: gate 8.1 -> 8.9,
  // and 8.7 with 131.) More where the sums of several rounds have to wait in shared memory.
  const auto blocks = static_cast<std::uint32_t>((shape.n + Plan::kRows - 1) / Plan::kRows);
  launch.grid = static_cast<std::uint32_t>(even_grid(blocks, shape.multiprocessors));
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
  launch.set_cut(cut);
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
  const DecodeLaunch ring = plan_decode_ring(shape);
  if (ring.kernel != nullptr) return ring;
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
        shape.k += kSliceK / 2;
        if (engine && kernels::has_half_slice(shape.k, group)) {
          all.push_back(plan_decode_s8(shape).kernel);
        }
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
