#pragma once

/// Puts the columns of int8 activations in the order of expand.cuh, for the kernels that read them
/// by the copy engine. Rows of the result are padded with zeros to a multiple of 128.

#include <cstdint>

#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"

namespace binary_gemm {
namespace kernels {

struct PermuteParams {
  const std::int8_t* x;  ///< [m, k]
  std::int64_t x_stride;
  std::int8_t* permuted;  ///< [m, k rounded up to 128]
  std::int64_t permuted_stride;
  std::uint32_t k;
  bool vectorized;       ///< x's rows are 16-byte aligned
  std::uint32_t* flags;  ///< see TileShares: to be zeroed, kHandOverCtas of them; or null
};

/// Half a block of 128: 64 values of the permuted order, from four runs of 16.
template <int kGroup>
__device__ inline void permute_half(std::uint32_t (&runs)[4][4]) {
  if constexpr (kGroup >= 64) {
    // Run t has the values of lane t, byte i of its word i ... transposed, word j is register j's.
#pragma unroll
    for (int t = 0; t < 4; ++t) transpose_bytes(runs[t]);
      // Registers outermost: the transpose of the 4x4 words.
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int j = t + 1; j < 4; ++j) {
        const std::uint32_t word = runs[t][j];
        runs[t][j] = runs[j][t];
        runs[j][t] = word;
      }
    }
  } else {
    // Two groups of 32: runs 2w and 2w + 1 have lanes 0, 1 and 2, 3, eight values each.
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      std::uint32_t out[2][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const std::uint32_t low = runs[2 * w + t / 2][t % 2 * 2];
        const std::uint32_t high = runs[2 * w + t / 2][t % 2 * 2 + 1];
        out[0][t] = __byte_perm(low, high, 0x5140);
        out[1][t] = __byte_perm(low, high, 0x7362);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < 4; ++t) runs[2 * w + half][t] = out[half][t];
      }
    }
  }
}

inline constexpr int kPermuteThreads = 256;

/// Grid: (groups of kPermuteThreads half blocks, m up to 65535 a launch step). A thread has half a
/// block of 128.
template <int kGroup>
__global__ void __launch_bounds__(kPermuteThreads)
    permute_rows(const __grid_constant__ PermuteParams params) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  zero_flags<kPermuteThreads>(params.flags);
  const unsigned halves = (params.k + kOrderBlock - 1) / kOrderBlock * 2;
  const std::int64_t row = blockIdx.x;
  for (unsigned index = threadIdx.x; index < halves; index += kPermuteThreads) {
    const unsigned block = index / 2 * kOrderBlock, half = index % 2;
    std::uint32_t runs[4][4];
#pragma unroll
    for (unsigned t = 0; t < 4; ++t) {
      // G >= 128: lane t's 32 values, half of them; else a half of the block as it lies.
      const unsigned column = block + (kGroup >= 128 ? 32 * t + 16 * half : 64 * half + 16 * t);
      const std::int8_t* source = params.x + row * params.x_stride + column;
#pragma unroll
      for (std::uint32_t& word : runs[t]) word = 0;
      if (column >= params.k) continue;
      if (params.vectorized) {
        const uint4 four = *reinterpret_cast<const uint4*>(source);
        runs[t][0] = four.x, runs[t][1] = four.y, runs[t][2] = four.z, runs[t][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          runs[t][i / 4] |= std::uint32_t{static_cast<std::uint8_t>(source[i])} << 8 * (i % 4);
        }
      }
    }
    permute_half<kGroup>(runs);
    uint4* target = reinterpret_cast<uint4*>(params.permuted + row * params.permuted_stride +
                                             block + 64 * half);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      target[i] = make_uint4(runs[i][0], runs[i][1], runs[i][2], runs[i][3]);
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
