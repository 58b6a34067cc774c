#pragma once

/// The seam between the launch layer and the kernel families: one translation unit each, so that
/// they compile in parallel.

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "binary_gemm/kernels/tuning.h"

namespace binary_gemm {
namespace cuda {

/// How a decode kernel is launched.
struct DecodeLaunch {
  const void* kernel = nullptr;  ///< null if the family can't take the shape
  std::uint32_t rows = 0;        ///< of W, a CTA
  std::uint32_t warps = 0;       ///< of a CTA: block (32, warps)
  std::uint32_t shared_bytes = 0;
};

struct DecodeShape {
  kernels::KernelConfig config;
  std::int64_t k;
  std::int64_t group_size;
  bool engine;  ///< the copy engine can read the weights; the family may still not use it
  int shared_limit;
};

/// `engine` in the shape is cleared if the plan does not use it.
DecodeLaunch plan_decode_b1(DecodeShape& shape);
DecodeLaunch plan_decode_s8(DecodeShape& shape);

/// Every kernel of the family, for attributes.
std::vector<const void*> decode_b1_kernels();
std::vector<const void*> decode_s8_kernels();

}  // namespace cuda
}  // namespace binary_gemm
