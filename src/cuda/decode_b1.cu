#include "binary_gemm/kernels/decode_b1.cuh"

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kTokens, int kGroup>
DecodeLaunch plan(DecodeShape& shape) {
  using Plan = kernels::DecodeB1<kTokens, kGroup>;
  const int warps = Plan::warps(shape.k, shape.shared_limit);
  shape.engine = shape.engine && warps >= (shape.k + kSliceK - 1) / kSliceK;
  const auto kernel = shape.engine ? &kernels::decode_b1<kTokens, kGroup, true>
                                   : &kernels::decode_b1<kTokens, kGroup, false>;
  return {reinterpret_cast<const void*>(kernel), Plan::kRows, static_cast<std::uint32_t>(warps),
          static_cast<std::uint32_t>(Plan::shared_bytes(warps))};
}

template <int kGroup>
DecodeLaunch plan_group(DecodeShape& shape) {
  switch (shape.config.tokens) {
    case 1:
      return plan<1, kGroup>(shape);
    case 2:
      return plan<2, kGroup>(shape);
    case 3:
      return plan<3, kGroup>(shape);
  }
  return {};
}

}  // namespace

DecodeLaunch plan_decode_b1(DecodeShape& shape) {
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
        DecodeShape shape{{kernels::Family::kDecodeB1, tokens, 0}, kSliceK, group, engine, 1 << 17};
        all.push_back(plan_decode_b1(shape).kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
