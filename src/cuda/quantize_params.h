#pragma once

/// The arguments that the quantizer and the steps with a quantizer behind them share.

#include <cstdint>

#include <algorithm>

#include "binary_gemm/kernels/quantize.cuh"
#include "binary_gemm/views.h"
#include "runtime.h"

namespace binary_gemm {
namespace cuda {

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

/// How quantize_parts is launched on `rows` rows.
struct PartsLaunch {
  unsigned parts;  ///< CTAs of a row, a cluster
  dim3 grid;
  dim3 block;
};

/// `in_parts`: a cluster of kernels::kRowParts a row, else a CTA. No more threads than a row has
/// vectors for.
inline PartsLaunch parts_launch(std::int64_t rows, std::int64_t k, bool in_parts) {
  const unsigned parts = in_parts ? kernels::kRowParts : 1;
  constexpr std::int64_t kWarpColumns = kernels::kWarpSize * kernels::kQuantizeVector;
  constexpr std::int64_t kMostWarps = kernels::kQuantizeThreads / kernels::kWarpSize;
  const std::int64_t warps = (k + parts * kWarpColumns - 1) / (parts * kWarpColumns);
  return {parts, dim3(static_cast<unsigned>(rows) * parts),
          dim3(static_cast<unsigned>(std::clamp<std::int64_t>(warps, 1, kMostWarps)) *
               kernels::kWarpSize)};
}

/// Whether clusters share the rows: where a CTA of a row would have much to do and multiprocessors
/// would stand idle.
inline bool quantizes_in_parts(const Device& device, std::int64_t rows, std::int64_t k,
                               std::int64_t least_k) {
  return device.source >= 90 && k > least_k && rows * 2 <= device.multiprocessors;
}

}  // namespace cuda
}  // namespace binary_gemm
