#include "binary_gemm/kernels/decode_s8.cuh"

#include "families.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <int kTokens, int kGroup>
DecodeLaunch plan(DecodeShape& shape) {
  using Plan = kernels::DecodeS8<kTokens, kGroup>;
  // Fewer rows a CTA where shared memory is small.
  int row_warps = 1 << shape.config.row_shift;
  int slices = Plan::slices(shape.k, row_warps, shape.shared_limit);
  while (slices == 0 && row_warps > 1) {
    row_warps /= 2;
    --shape.config.row_shift;
    slices = Plan::slices(shape.k, row_warps, shape.shared_limit);
  }
  if (slices == 0) return {};
  shape.engine = shape.engine && slices >= (shape.k + kSliceK - 1) / kSliceK;
  const auto kernel = shape.engine ? &kernels::decode_s8<kTokens, kGroup, true>
                                   : &kernels::decode_s8<kTokens, kGroup, false>;
  return {reinterpret_cast<const void*>(kernel),
          static_cast<std::uint32_t>(Plan::kRows * row_warps),
          static_cast<std::uint32_t>(slices * row_warps),
          static_cast<std::uint32_t>(Plan::shared_bytes(slices, row_warps))};
}

template <int kGroup>
DecodeLaunch plan_group(DecodeShape& shape) {
  switch (shape.config.tokens) {
    case 8:
      return plan<8, kGroup>(shape);
    case 16:
      return plan<16, kGroup>(shape);
    case 32:
      return plan<32, kGroup>(shape);
  }
  return {};
}

}  // namespace

DecodeLaunch plan_decode_s8(DecodeShape& shape) {
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

std::vector<const void*> decode_s8_kernels() {
  std::vector<const void*> all;
  for (const bool engine : {false, true}) {
    for (const std::int64_t group : {32, 64, 128, 256}) {
      for (const std::uint8_t tokens : {std::uint8_t{8}, std::uint8_t{16}, std::uint8_t{32}}) {
        DecodeShape shape{{kernels::Family::kDecodeS8, tokens, 0}, kSliceK, group, engine, 1 << 17};
        all.push_back(plan_decode_s8(shape).kernel);
      }
    }
  }
  return all;
}

}  // namespace cuda
}  // namespace binary_gemm
