#pragma once

/// A ring of stages in shared memory, through which blocks of 16 rows of W go: what decode_ring.cuh
/// and decode_b1_ring.cuh have in common.

#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"  // load_aligned_chunk
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"

namespace binary_gemm {
namespace kernels {

/// Where things are in a stage, in bytes, for host and device.
template <class Plan>
struct DecodeRingStage {
  unsigned slices;

  // Of all slices: bits [slice][row], which are swizzled; mantissas [slice][row][...]; sums
  // [slice][...]; units [slice][row], 0 where a slice is wide; scales [row][slice][scale].
  __host__ __device__ constexpr unsigned mantissas() const { return slices * Plan::kBitsBytes; }
  __host__ __device__ constexpr unsigned sums() const {
    return mantissas() + slices * Plan::kMantissaBytes;
  }
  __host__ __device__ constexpr unsigned units() const { return sums() + slices * Plan::kSumBytes; }
  __host__ __device__ constexpr unsigned scales() const {
    return units() + slices * Plan::kUnitBytes;
  }
  /// Whether a converter saw a wide slice: an int for each of kMaxConverters.
  __host__ __device__ constexpr unsigned wide() const {
    return scales() + slices * Plan::kScaleBytes;
  }
  // Barriers: by the copy engine, by those who convert, by those who multiply.
  __host__ __device__ constexpr unsigned full() const {
    return wide() + (Plan::kMaxConverters * 4 + 7) / 8 * 8;
  }
  __host__ __device__ constexpr unsigned ready() const { return full() + 8; }
  __host__ __device__ constexpr unsigned done() const { return ready() + 8; }
  /// Of all; the swizzle wants the next stage's bits at a multiple of 1024.
  __host__ __device__ constexpr unsigned bytes() const { return (done() + 8 + 1023) / 1024 * 1024; }
};

#if __CUDA_ARCH__ >= 900
/// A wide slice's sum of row `n` and token `m`, by all lanes. Right rather than fast.
template <int kGroup>
__device__ inline float wide_slice_sum(const GemmParams& params, unsigned n, unsigned m,
                                       unsigned slice) {
  const unsigned lane = threadIdx.x;
  const unsigned k0 = slice * static_cast<unsigned>(kSliceK);
  std::uint32_t signs[8], x[8];
  expand_signs(params.bits[std::uint64_t{n} * params.bits_stride + k0 / 32 + lane], signs);
  load_aligned_chunk(x, params.x + m * params.x_stride + k0 + lane * 32, true);
  permute_as_signs(x);
  std::int32_t dot = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) dot = ptx::dp4a(signs[i], x[i], dot);
  return wide_sum<kGroup>(
      dot, params.scales + std::uint64_t{n} * params.scales_stride + k0 / kGroup, kSliceK / kGroup);
}

/// Replaces the sums of wide slices, which are not used, by the contract's, as floats. Those of a
/// slice are Plan::kSumBytes, that of a row and token at Plan::sum_index.
template <class Plan>
__device__ inline void sum_wide_slices(const GemmParams& params, float* sums, const float* units,
                                       unsigned n0) {
  const unsigned lane = threadIdx.x;
#pragma unroll 1
  for (unsigned first = 0; first < params.slices * Plan::kRows; first += kWarpSize) {
    const unsigned own = first + lane;
    std::uint32_t wide =
        __ballot_sync(0xffffffffu, own < params.slices * Plan::kRows &&
                                       n0 + own % Plan::kRows < params.n && units[own] == 0);
#pragma unroll 1
    for (; wide != 0; wide &= wide - 1) {
      const unsigned index = first + static_cast<unsigned>(__ffs(static_cast<int>(wide)) - 1);
      const unsigned slice = index / Plan::kRows, row = index % Plan::kRows;
#pragma unroll 1
      for (unsigned m = 0; m < params.m; ++m) {
        const float sum = wide_slice_sum<Plan::kGroup>(params, n0 + row, m, slice);
        if (lane == 0) sums[slice * (Plan::kSumBytes / 4) + Plan::sum_index(row, m)] = sum;
      }
    }
  }
  __syncwarp();
}
#endif

}  // namespace kernels
}  // namespace binary_gemm
