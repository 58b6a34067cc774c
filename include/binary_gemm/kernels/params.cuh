#pragma once

/// What every product kernel takes: the views of the call as pointers at element (0, 0).

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "binary_gemm/kernels/tuning.h"
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

/// The bits as the decode kernels' copy engine reads them, with the 128-byte swizzle; out of bounds
/// it reads zeros. `kHalf`: the last slice is a half, see Windows.
template <bool kHalf>
struct BitsMaps {
  /// Slices that are whole, as (word, row, slice) in boxes of (32, rows, slices at once).
  CUtensorMap slices;
};
template <>
struct BitsMaps<true> {
  CUtensorMap slices;
  CUtensorMap rows;  ///< as (word, row) in boxes of (32, rows): for the last slice
};

/// Where the decode kernels of the copy engine read slices. A last slice that is a half is read
/// with the half before it, [K - 1024, K): in bounds, and as many blocks as any slice. Scales of
/// that half count as zeros, so it adds nothing.
template <bool kHalf>
struct Windows {
  static constexpr unsigned kHalfK = static_cast<unsigned>(kSliceK) / 2;
  /// How much of what is read for a slice is not the slice's; and where that begins.
  __host__ __device__ static unsigned overlap(const GemmParams& params, unsigned slice) {
    return kHalf && slice + 1 == params.slices ? kHalfK : 0;
  }
  __host__ __device__ static unsigned begin(const GemmParams& params, unsigned slice) {
    return slice * static_cast<unsigned>(kSliceK) - overlap(params, slice);
  }
};

/// Whether gemm_wgmma writes rounded outputs by vectors of 16 bytes. A residual is added to
/// unrounded ones by those who write them. `by_engine`: the copy engine does; where a tensor ends
/// within 16 bytes it would write all of them, past N.
__host__ __device__ inline bool stores_vectors(const GemmParams& params, bool by_engine) {
  return params.residual == nullptr && params.y_type != DataType::kFloat32 &&
         params.y_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(params.y) % 16 == 0 &&
         (!by_engine || params.n % 8 == 0);
}

/// How the CTAs of gemm_wgmma share its tiles, of which tile i is the i % row_tiles-th along N, the
/// i / row_tiles-th along M. Of all tiles a part is taken whole, tile i by CTA i % grid. The others
/// are cut: CTA i takes `units` slices of them, one more if i < `rest`, after those of the CTAs
/// before it.
struct TileShares {
  std::uint32_t row_tiles;
  /// How far a whole tile and the next one of a CTA are apart along N and M: grid % row_tiles, grid
  /// / row_tiles.
  std::uint32_t grid_rows;
  std::uint32_t grid_tokens;
  std::uint32_t whole;
  std::uint32_t units;
  std::uint32_t rest;
  /// Totals of the tile that a CTA begins and the next one finishes: [CTA][as they lie in shared
  /// memory].
  float* totals;
  std::uint32_t* flags;  ///< [CTA]: not 0 once its totals are there
};

#ifdef __CUDACC__
/// The first CTA of a kernel that gemm_wgmma follows zeroes its flags, if there are any.
template <int kThreads>
__device__ inline void zero_flags(std::uint32_t* flags) {
  static_assert(kThreads >= kHandOverCtas, "a flag a thread");
  if (flags != nullptr && blockIdx.x == 0 && threadIdx.x < kHandOverCtas) flags[threadIdx.x] = 0;
}
#endif

}  // namespace kernels
}  // namespace binary_gemm
