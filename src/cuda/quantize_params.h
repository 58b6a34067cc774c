#pragma once

/// The arguments that the quantizer and the steps with a quantizer behind them share.

#include <cstdint>

#include "binary_gemm/kernels/quantize.cuh"
#include "binary_gemm/views.h"

namespace binary_gemm {
namespace cuda {

inline bool is_aligned(const void* pointer, std::uintptr_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

/// The rows of x, of which q's k columns are made; `middle`: the column where a second half begins.
inline kernels::QuantizeParams quantize_params(const ConstMatrixView& x, std::int64_t middle,
                                               const MutableActivationView& q) {
  const std::int64_t element = size_of(x.type);
  kernels::QuantizeParams params{};
  params.x = static_cast<const char*>(x.data) + x.offset * element;
  params.x_stride = x.row_stride;
  params.q = q.values + q.offset;
  params.q_stride = q.row_stride;
  params.scales = q.scales + q.scales_offset;
  params.k = q.k;
  params.vectorized = is_aligned(params.x, 16) && x.row_stride * element % 16 == 0 &&
                      middle * element % 16 == 0 && is_aligned(params.q, 8) &&
                      q.row_stride % 8 == 0 && q.k % kernels::kQuantizeVector == 0;
  return params;
}

}  // namespace cuda
}  // namespace binary_gemm
