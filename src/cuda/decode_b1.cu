#include "binary_gemm/kernels/decode_b1.cuh"

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kTokens, int kGroup>
DecodeLaunch plan(const DecodeShape& shape) {
  using Plan = kernels::DecodeB1<kTokens, kGroup>;
  static_assert(Plan::kRows == kDecodeB1Rows, "");
  const std::int64_t slices = (shape.k + kSliceK - 1) / kSliceK;
  const int warps = Plan::warps(shape.k, shape.shared_limit);
  DecodeLaunch launch;
  launch.engine = shape.engine && warps >= slices;
  const auto kernel = launch.engine ? &kernels::decode_b1<kTokens, kGroup, true>
                                    : &kernels::decode_b1<kTokens, kGroup, false>;
  launch.kernel = reinterpret_cast<const void*>(kernel);
  launch.grid = static_cast<std::uint32_t>((shape.n + Plan::kRows - 1) / Plan::kRows);
  launch.warps = static_cast<std::uint32_t>(warps);
  launch.shared_bytes = static_cast<std::uint32_t>(Plan::shared_bytes(warps));
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
  switch (shape.group_size) {
    case 32:
      return plan_group<32>(shape);
    case 64:
      return plan_group<64>(shape);
    case 128:
      return plan_group<128>(shape);
    case 256:
      return plan_group<256>(shape);
  }
  return {};
}

std::vector<const void*> decode_b1_kernels() {
  std::vector<const void*> all;
  for (const bool engine : {false, true}) {
    for (const std::int64_t group : {32, 64, 128, 256}) {
      for (const std::uint8_t tokens : {std::uint8_t{1}, std::uint8_t{2}, std::uint8_t{3}}) {
        const DecodeShape shape{
            {kernels::Family::kDecodeB1, tokens}, 32, kSliceK, group, engine, 1 << 17, 1};
        const void* kernel = plan_decode_b1(shape).kernel;
        if (kernel != nullptr) all.push_back(kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
