#pragma once

/// A warp's weights on chip: 16 or 32 rows of one slice of K, as the decode kernels hold them in
/// shared memory.

#include <cuda.h>

#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"

namespace binary_gemm {
namespace kernels {

/// The tile's shape and its part of the shared-memory plan, for host and device.
template <int kTileRows, int kGroup>
struct WeightTilePlan {
  static constexpr int kRows = kTileRows;
  static constexpr int kBlocks = 8;  ///< of 128 weights, a slice
  /// Scales of a row and slice as stored, and mantissas as used: a group of 256 counts as two.
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;
  static constexpr int kMantissas = kGroup > 128 ? kBlocks : kScales;
  static constexpr int kDotsPerBlock = kMantissas / kBlocks;

  /// A row's 1024 bits; its 16-byte columns are swizzled by row % 8, as the copy engine does.
  static constexpr int kLineBytes = static_cast<int>(kSliceK) / 8;
  /// A row's mantissas, padded where that avoids bank conflicts.
  static constexpr int kMantissaStride = kMantissas * 2 + (kMantissas > 8 ? 16 : 0);

  static constexpr int kBitsBytes = kRows * kLineBytes;
  static constexpr int kScaleBytes = kRows * kScales * 2;
  static constexpr int kMantissaBytes = kRows * kMantissaStride;
};

/// In shared memory, bits are [slice][row] and scales [row][slice]. `kHalf`: what the copy engine
/// brought has a last slice that is a half, see Windows.
template <int kTileRows, int kGroup, bool kHalf>
struct WeightTile {
  using Windows = kernels::Windows<kHalf>;
  using Plan = WeightTilePlan<kTileRows, kGroup>;

  const GemmParams& params;
  char* bits;              ///< line 0
  char* scales;            ///< the slice's scales of row 0
  unsigned scales_stride;  ///< bytes from a row's scales to the next row's
  char* mantissas;         ///< of row 0
  unsigned n0;             ///< first row
  unsigned slice;
  unsigned lane;

  __device__ unsigned g() const { return lane / 4; }
  __device__ unsigned t() const { return lane % 4; }
  /// The row whose scales this lane converts. Of 32, it is where decode_b1's transpose leaves the
  /// row's total; of 16, two lanes have the same.
  __device__ unsigned own_row() const { return Plan::kRows == 32 ? g() + 8 * t() : lane % 16; }
  /// Where what is read for the slice begins.
  __device__ unsigned k0() const { return Windows::begin(params, slice); }
  /// Rows past N repeat the last one; they are not stored.
  __device__ std::int64_t global_row(unsigned row) const { return min(n0 + row, params.n - 1); }
  /// Of the groups from there on, those of the slice: [groups_begin, groups_end).
  __device__ unsigned groups_begin() const { return Windows::overlap(params, slice) / kGroup; }
  __device__ unsigned groups_end() const {
    return min(static_cast<unsigned>(kSliceK), params.k - k0()) / kGroup;
  }

  /// 16 bytes (one block) of a row's line.
  __device__ char* line_column(unsigned row, unsigned column) const {
    return bits + row * Plan::kLineBytes + (column ^ row % 8) * 16;
  }
  __device__ char* mantissa_row(unsigned row) const {
    return mantissas + row * Plan::kMantissaStride;
  }
  __device__ const __half* global_scales(unsigned row) const {
    return params.scales + global_row(row) * params.scales_stride + k0() / kGroup;
  }

  /// Copies the scales of row own_row(), of any view, by cp.async, one group; zeros past K.
  __device__ void fetch_scales() const {
    const __half* source = global_scales(own_row());
    char* target = scales + own_row() * scales_stride;
    if (groups_end() == Plan::kScales && scales_are_aligned<Plan::kScales * 2>(source, 0)) {
      fetch_aligned_scales<Plan::kScales>(target, source);
    } else {
      fetch_some_scales<Plan::kScales>(target, source, groups_end());
    }
    ptx::cp_async_commit();
  }

  /// Copies the bits of any view by cp.async, one group. Words past K are left as they are.
  __device__ void fetch_bits() const {
    if (params.vectorized) {
      // Eight lanes copy a line, so a step covers four rows.
      const unsigned word = lane % 8 * 4;
      if (k0() + word * 32 < params.k) {
#pragma unroll 4
        for (unsigned row = lane / 8; row < Plan::kRows; row += 4) {
          ptx::cp_async_16(ptx::shared_address(line_column(row, lane % 8)),
                           params.bits + global_row(row) * params.bits_stride + (k0() / 32 + word));
        }
      }
    } else if (k0() + lane * 32 < params.k) {
#pragma unroll 1
      for (unsigned row = 0; row < Plan::kRows; ++row) {  // lane i copies word i
        ptx::cp_async_4(ptx::shared_address(line_column(row, lane / 4)) + lane % 4 * 4,
                        params.bits + global_row(row) * params.bits_stride + (k0() / 32 + lane));
      }
    }
    ptx::cp_async_commit();
  }

  /// Both: scales are there when all groups but the last are.
  __device__ void fetch_weights() const {
    fetch_scales();
    fetch_bits();
  }

  /// Turns the scales of row own_row() into mantissas; the warp must synchronize before others use
  /// them.
  __device__ SliceUnit make_mantissas() const {
    const char* source = scales + own_row() * scales_stride;
    std::uint32_t pairs[Plan::kScales / 2];
    if constexpr (kHalf) {
      load_row_scales(source, pairs);
      zero_first_half(pairs, groups_begin() > 0);
    } else if constexpr (Plan::kScales == 4) {
      const uint2 four = *reinterpret_cast<const uint2*>(source);
      pairs[0] = four.x, pairs[1] = four.y;
    } else {
#pragma unroll
      for (int i = 0; i < Plan::kScales / 8; ++i) load_4_words(&pairs[4 * i], source + 16 * i);
    }
    const SliceUnit unit = scales_to_mantissas(pairs);
    store_mantissas(mantissa_row(own_row()), pairs);
    return unit;
  }

  /// The lanes whose row is wide. Rows past N, of which the copy engine brings nothing, are not: 20
  /// of them, of whatever scales, took 15 us.
  __device__ std::uint32_t wide_lanes(bool narrow) const {
    return __ballot_sync(0xffffffffu, !narrow && n0 + own_row() < params.n);
  }

  __device__ static void load_4_words(std::uint32_t* words, const char* from) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }
};

/// The copy engine's part (sm_90). One thread fetches `rows` rows of all K: scales, which must be
/// dense, and bits. All views are 16-byte aligned, and engine_takes(K).
#if __CUDA_ARCH__ >= 900
/// Fetches the scales of rows [n0, n0 + rows), less those past N.
__device__ inline void fetch_scales_by_engine(const GemmParams& params, unsigned n0, unsigned rows,
                                              const char* target, std::uint32_t barrier) {
  const std::uint32_t bytes = min(rows, params.n - n0) * params.scales_stride * 2;
  ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  ptx::bulk_copy(ptx::shared_address(target),
                 params.scales + std::uint64_t{n0} * params.scales_stride, bytes, barrier);
}

/// Fetches `slices` slices from `slice` on: all of K's if the last one is a half.
template <bool kHalf>
__device__ inline void fetch_bits_by_engine(const GemmParams& params, const BitsMaps<kHalf>& maps,
                                            unsigned n0, unsigned rows, unsigned slice,
                                            unsigned slices, const char* target,
                                            std::uint32_t barrier) {
  const unsigned line_bytes = rows * static_cast<unsigned>(kSliceK / 8);
  ptx::mbarrier_arrive_expect_tx(barrier, slices * line_bytes);
  const std::uint32_t to = ptx::shared_address(target);
  ptx::tensor_copy_3d(to, &maps.slices, 0, n0, slice, barrier);
  if constexpr (kHalf) {
    ptx::tensor_copy_2d(to + (slices - 1) * line_bytes, &maps.rows,
                        Windows<kHalf>::begin(params, slices - 1) / 32, n0, barrier);
  }
}
#endif

__device__ inline void wait_for_barrier(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

/// Adds `count` slice sums in order to `acc`; `sums` points at the first, `stride` floats apart.
__device__ inline float add_slices(float acc, const float* sums, unsigned stride, unsigned count) {
  constexpr unsigned kAtOnce = 5;
#pragma unroll 1
  for (unsigned s = 0; s < count; s += kAtOnce) {
    // acc is never -0, so adding the +0 of a missing slice changes nothing.
    float p[kAtOnce];
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) p[i] = s + i < count ? sums[(s + i) * stride] : 0.0f;
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) acc = __fadd_rn(acc, p[i]);
  }
  return acc;
}

}  // namespace kernels
}  // namespace binary_gemm
