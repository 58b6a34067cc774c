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

/// In shared memory, bits are [slice][row] and scales [row][slice].
template <int kTileRows, int kGroup>
struct WeightTile {
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
  __device__ unsigned k0() const { return slice * static_cast<unsigned>(kSliceK); }
  /// Rows past N repeat the last one; they are not stored.
  __device__ std::int64_t global_row(unsigned row) const { return min(n0 + row, params.n - 1); }
  /// The slice's groups: fewer in a last short slice.
  __device__ unsigned groups() const {
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

  /// Loads the scales of row own_row(), of any view; zeros past K.
  __device__ void fetch_scales() const {
    const __half* source = global_scales(own_row());
    __half* target = reinterpret_cast<__half*>(scales + own_row() * scales_stride);
    const unsigned count = groups();
#pragma unroll 1
    for (unsigned i = 0; i < Plan::kScales; ++i) target[i] = i < count ? source[i] : __half{};
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

  /// Turns the scales of row own_row() into mantissas; the warp must synchronize before others use
  /// them.
  __device__ SliceUnit make_mantissas() const {
    const char* source = scales + own_row() * scales_stride;
    std::uint32_t pairs[Plan::kScales / 2];
    if constexpr (Plan::kScales == 4) {
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

  __device__ static void load_4_words(std::uint32_t* words, const char* from) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }
};

/// The copy engine's part (sm_90). One thread fetches `rows` rows of all K: scales, which must be
/// dense, and bits. All views are 16-byte aligned and K is a multiple of 1024. `bits_map` has the
/// bits as a tensor (word of a line, row, slice), in boxes of (32, rows, slices at once) with the
/// 128-byte swizzle; out of bounds it reads zeros.
#if __CUDA_ARCH__ >= 900
/// Fetches the scales of rows [n0, n0 + rows), less those past N.
__device__ inline void fetch_scales_by_engine(const GemmParams& params, unsigned n0, unsigned rows,
                                              const char* target, std::uint32_t barrier) {
  const std::uint32_t bytes = min(rows, params.n - n0) * params.scales_stride * 2;
  ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  ptx::bulk_copy(ptx::shared_address(target),
                 params.scales + std::uint64_t{n0} * params.scales_stride, bytes, barrier);
}

/// Fetches a box of `slices` slices from `slice` on.
__device__ inline void fetch_bits_by_engine(const CUtensorMap& bits_map, unsigned n0, unsigned rows,
                                            unsigned slice, unsigned slices, const char* target,
                                            std::uint32_t barrier) {
  ptx::mbarrier_arrive_expect_tx(barrier, rows * slices * static_cast<unsigned>(kSliceK / 8));
  ptx::tensor_copy_3d(ptx::shared_address(target), &bits_map, 0, n0, slice, barrier);
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
