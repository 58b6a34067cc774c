#pragma once

/// What every product kernel takes: the views of the call as pointers at element (0, 0).

#include <cuda_fp16.h>

#include <cstdint>

#include "binary_gemm/types.h"
#include "binary_gemm/views.h"

namespace binary_gemm {
namespace kernels {

inline constexpr int kWarpSize = 32;
/// Rows of x in the order of expand.cuh are padded with zeros to a multiple of this.
inline constexpr unsigned kOrderBlock = 128;

struct GemmParams {
  const std::int8_t* x;  ///< [m, k]
  std::int64_t x_stride;
  const float* x_scales;        ///< [m]
  const std::uint32_t* bits;    ///< [n, k / 32]
  const __half* scales;         ///< [n, k / G]
  std::uint32_t bits_stride;    ///< words
  std::uint32_t scales_stride;  ///< scales
  const float* bias;            ///< [n] or null
  const void* residual;         ///< [m, n] of y's type, or null; may be y
  std::int64_t residual_stride;
  void* y;  ///< [m, n]
  std::int64_t y_stride;
  std::uint32_t m;
  std::uint32_t n;
  std::uint32_t k;
  std::uint32_t slices;  ///< of K
  DataType y_type;
  bool vectorized;  ///< all rows of bits and x are 16-byte aligned, slices of scales to 16 bytes or
                    ///< to their size
  bool dependent;   ///< launched with programmatic dependent launch
  const void* input;    ///< [k] of a kernel that quantizes x itself, 16-byte aligned; M = 1
  DataType input_type;  ///< bf16 or fp16
};

}  // namespace kernels
}  // namespace binary_gemm
