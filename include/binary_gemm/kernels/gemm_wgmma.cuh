#pragma once

/// Large batches on Hopper (sm_90a): y = x · Wᵀ by wgmma, weights expanded in registers.
///
/// Rows of W are operand A of m64nNk32, which may lie in registers: a lane expands the word it
/// holds to bytes of +1 and -1 (expand.cuh) and a weight never is a byte in memory. Tokens are
/// operand B, in shared memory; within each 128 of K their bytes are in the order that this
/// expansion gives (permute.cuh). A dot of one group is an int32 accumulator; times the row's
/// mantissa it is added to the slice's int32 sum, and once a slice (1024 of K) that is rounded and
/// added to the total.
///
/// A CTA is persistent and computes tiles of 64 · kConsumers rows by kTokens tokens. Warpgroups
/// 0 .. kConsumers - 1 multiply, 64 rows each. Of the last warpgroup
///   warp 0 drives the copy engine: x by blocks of 128 of K, words by slices;
///   warp 1 turns scales into mantissas and units, slices ahead;
///   warps 2 and 3 write finished tiles while the next is multiplied.
///
/// Fragments, of warp w of a warpgroup: lane (g, t) = (lane / 4, lane % 4) has rows 16w + g and 16w
/// + g
/// + 8 and, of every 8 tokens, 2t and 2t + 1.

#include <cuda.h>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"  // wait_for_barrier
#include "binary_gemm/kernels/wgmma.cuh"

namespace binary_gemm {
namespace kernels {

/// The shapes and the shared-memory plan of gemm_wgmma, for host and device.
template <int kConsumers_, int kTokens_, int kGroup>
struct GemmWgmma {
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlock = 128;  ///< of K: a stage of x
  static constexpr int kBlocks = static_cast<int>(kSliceK) / kBlock;
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;
  static constexpr int kWordStages = 2;
  static constexpr int kScaleStages = 3;

  /// CTAs of a multiprocessor.
  static constexpr int kResident = kConsumers == 1 ? (kTokens <= 32 ? 3 : 2) : 1;
  /// Registers a thread of the consumers and of the last warpgroup (setmaxnreg), where a CTA is
  /// alone.
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 224;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 56;

  // Bytes of a stage.
  static constexpr int kXBytes = kTokens * kBlock;
  static constexpr int kWordBytes = kRows * static_cast<int>(kSliceK) / 8;
  static constexpr int kMantissaBytes = kRows * kScales * 2;  ///< [row][scale]
  static constexpr int kUnitBytes = kRows * 4;
  /// Totals of a warpgroup: while it adds up, four a thread; when done, [token][row], padded so
  /// that lanes (g, t) hit different banks.
  static constexpr int kTotalStride = 64 + 4;
  static constexpr int kTotalBytes = kTokens * kTotalStride * 4;

  static constexpr int kXStagesWanted = 8;
  static constexpr int kSharedLimit = 228 * 1024 / kResident - 1024;
  static constexpr int kFixedBytes = kWordStages * kWordBytes +
                                     kScaleStages * (kMantissaBytes + kUnitBytes) +
                                     kConsumers * kTotalBytes + 512;
  static constexpr int kXStages = (kSharedLimit - kFixedBytes) / kXBytes < kXStagesWanted
                                      ? (kSharedLimit - kFixedBytes) / kXBytes
                                      : kXStagesWanted;
  static_assert(kXStages >= 2, "too little shared memory");

  // Offsets: what the swizzle wants aligned to 1024 bytes comes first.
  static constexpr int kXOffset = 0;
  static constexpr int kWordOffset = kXOffset + kXStages * kXBytes;
  static constexpr int kTotalOffset = kWordOffset + kWordStages * kWordBytes;
  static constexpr int kMantissaOffset = kTotalOffset + kConsumers * kTotalBytes;
  static constexpr int kUnitOffset = kMantissaOffset + kScaleStages * kMantissaBytes;
  static constexpr int kBarrierOffset = kUnitOffset + kScaleStages * kUnitBytes;
  static constexpr int kBarriers = 2 * (kXStages + kWordStages + kScaleStages + 1);
  static constexpr int kSharedBytes = kBarrierOffset + kBarriers * 8;
};

/// A ring of stages with a full and an empty mbarrier each.
template <int kStages>
struct Ring {
  std::uint32_t full;   ///< address of the first full barrier
  std::uint32_t empty;  ///< and of the first empty one
  unsigned stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ std::uint32_t full_barrier() const { return full + stage * 8; }
  __device__ std::uint32_t empty_barrier() const { return empty + stage * 8; }
  __device__ void wait_full() const { wait_for_barrier(full_barrier(), parity); }
  __device__ void wait_empty() const { wait_for_barrier(empty_barrier(), parity ^ 1); }
};

/// sum += mantissa · dot in narrow rows; in wide ones `sum` is a float, `m` an fp16 scale, and the
/// contract's fused multiply-add is done. For rows g (0) and g + 8 (1).
template <int kValues>
__device__ inline void add_with_wide(std::int32_t (&sum)[kValues],
                                     const std::int32_t (&dot)[kValues], std::uint16_t m0,
                                     std::uint16_t m1, bool wide0, bool wide1) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const std::uint16_t m = i % 4 < 2 ? m0 : m1;
    if (i % 4 < 2 ? wide0 : wide1) {
      sum[i] = __float_as_int(__fmaf_rn(__half2float(__ushort_as_half(m)),
                                        static_cast<float>(dot[i]), __int_as_float(sum[i])));
    } else {
      sum[i] += static_cast<std::int16_t>(m) * dot[i];
    }
  }
}

/// Grid: at most kResident CTAs a multiprocessor. Block: GemmWgmma::kThreads. Dynamic shared
/// memory: GemmWgmma::kSharedBytes. `x_map`: params.x, in the order of expand_signs, as (byte,
/// token) in boxes of (128, kTokens); `bits_map`: words as (word, row) in boxes of (32, kRows);
/// both with the 128-byte swizzle and zeros out of bounds.
template <int kConsumers, int kTokens, int kGroup>
__global__ void __launch_bounds__(GemmWgmma<kConsumers, kTokens, kGroup>::kThreads,
                                  GemmWgmma<kConsumers, kTokens, kGroup>::kResident)
    gemm_wgmma(const __grid_constant__ GemmParams params, const __grid_constant__ CUtensorMap x_map,
               const __grid_constant__ CUtensorMap bits_map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Plan = GemmWgmma<kConsumers, kTokens, kGroup>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const unsigned thread = threadIdx.x;
  const unsigned lane = thread % kWarpSize;
  const unsigned warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);
  const unsigned warp = __shfl_sync(0xffffffffu, thread / kWarpSize % 4, 0);  // of the warpgroup

  const std::uint32_t barriers = base + Plan::kBarrierOffset;
  Ring<Plan::kXStages> x_ring{barriers, barriers + Plan::kXStages * 8};
  const std::uint32_t word_barriers = barriers + 2 * Plan::kXStages * 8;
  Ring<Plan::kWordStages> word_ring{word_barriers, word_barriers + Plan::kWordStages * 8};
  const std::uint32_t scale_barriers = word_barriers + 2 * Plan::kWordStages * 8;
  Ring<Plan::kScaleStages> scale_ring{scale_barriers, scale_barriers + Plan::kScaleStages * 8};
  const std::uint32_t total_barriers = scale_barriers + 2 * Plan::kScaleStages * 8;
  Ring<1> total_ring{total_barriers, total_barriers + 8};

  if (thread == 0) {
    for (int i = 0; i < Plan::kXStages; ++i) {
      ptx::mbarrier_init(x_ring.full + i * 8, 1);
      ptx::mbarrier_init(x_ring.empty + i * 8, 4 * kConsumers);
    }
    for (int i = 0; i < Plan::kWordStages; ++i) {
      ptx::mbarrier_init(word_ring.full + i * 8, 1);
      ptx::mbarrier_init(word_ring.empty + i * 8, 4 * kConsumers);
    }
    for (int i = 0; i < Plan::kScaleStages; ++i) {
      ptx::mbarrier_init(scale_ring.full + i * 8, 1);
      ptx::mbarrier_init(scale_ring.empty + i * 8, 4 * kConsumers);
    }
    ptx::mbarrier_init(total_ring.full, 4 * kConsumers);
    ptx::mbarrier_init(total_ring.empty, 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::launch_dependents();

  const unsigned row_tiles = (params.n + Plan::kRows - 1) / Plan::kRows;
  const unsigned token_tiles = (params.m + kTokens - 1) / kTokens;
  const unsigned tiles = row_tiles * token_tiles;

  if (warpgroup == kConsumers) {
    if (Plan::kResident == 1) ptx::register_decrease<Plan::kProducerRegisters>();
    if (warp == 0) {
      if (lane != 0) return;
      ptx::wait_for_dependencies();
      for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const unsigned n0 = tile % row_tiles * Plan::kRows;
        const unsigned m0 = tile / row_tiles * kTokens;
        for (unsigned slice = 0; slice < params.slices; ++slice) {
          word_ring.wait_empty();
          ptx::mbarrier_arrive_expect_tx(word_ring.full_barrier(), Plan::kWordBytes);
          ptx::tensor_copy_2d(base + Plan::kWordOffset + word_ring.stage * Plan::kWordBytes,
                              &bits_map, slice * 32, n0, word_ring.full_barrier());
          word_ring.advance();
          const unsigned k0 = slice * static_cast<unsigned>(kSliceK);
          const unsigned blocks =
              min(unsigned{Plan::kBlocks}, (params.k - k0 + Plan::kBlock - 1) / Plan::kBlock);
          for (unsigned block = 0; block < blocks; ++block) {
            x_ring.wait_empty();
            ptx::mbarrier_arrive_expect_tx(x_ring.full_barrier(), Plan::kXBytes);
            ptx::tensor_copy_2d(base + Plan::kXOffset + x_ring.stage * Plan::kXBytes, &x_map,
                                k0 + block * Plan::kBlock, m0, x_ring.full_barrier());
            x_ring.advance();
          }
        }
      }
    } else if (warp == 1) {
      for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const unsigned n0 = tile % row_tiles * Plan::kRows;
        for (unsigned slice = 0; slice < params.slices; ++slice) {
          scale_ring.wait_empty();
          char* mantissas =
              shared + Plan::kMantissaOffset + scale_ring.stage * Plan::kMantissaBytes;
          float* units = reinterpret_cast<float*>(shared + Plan::kUnitOffset +
                                                  scale_ring.stage * Plan::kUnitBytes);
          for (unsigned row = lane; row < Plan::kRows; row += kWarpSize) {
            // Rows past N repeat the last one; they are not stored.
            const __half* scales =
                params.scales + std::uint64_t{min(n0 + row, params.n - 1)} * params.scales_stride +
                slice * Plan::kScales;
            const unsigned count =
                min(unsigned{Plan::kScales},
                    (params.k - slice * static_cast<unsigned>(kSliceK)) / kGroup);
            std::uint32_t pairs[Plan::kScales / 2];
            std::uint32_t raw[Plan::kScales / 2];
#pragma unroll
            for (unsigned i = 0; i < Plan::kScales / 2; ++i) {
              const std::uint32_t low =
                  2 * i < count ? __half_as_ushort(scales[2 * i]) : std::uint32_t{0};
              const std::uint32_t high =
                  2 * i + 1 < count ? __half_as_ushort(scales[2 * i + 1]) : std::uint32_t{0};
              raw[i] = pairs[i] = low | high << 16;
            }
            const SliceUnit unit = scales_to_mantissas(pairs);
            // A wide row keeps its scales; its unit is 0, which no narrow row's is.
            units[row] = unit.narrow ? unit.unit : 0.0f;
#pragma unroll
            for (unsigned i = 0; i < Plan::kScales / 2; ++i) {
              reinterpret_cast<std::uint32_t*>(mantissas)[row * (Plan::kScales / 2) + i] =
                  unit.narrow ? pairs[i] : raw[i];
            }
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(scale_ring.full_barrier());
          scale_ring.advance();
        }
      }
    } else {
      // Two warps write the tiles: tokens by turns, two rows a lane.
      ptx::wait_for_dependencies();
      for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const unsigned n0 = tile % row_tiles * Plan::kRows;
        const unsigned m0 = tile / row_tiles * kTokens;
        total_ring.wait_full();
        for (unsigned token = warp - 2; token < min(unsigned{kTokens}, params.m - m0); token += 2) {
          const unsigned m = m0 + token;
          const float x_scale = params.x_scales[m];
#pragma unroll 1
          for (int part = 0; part < kConsumers; ++part) {
            const float2 total = *reinterpret_cast<const float2*>(
                shared + Plan::kTotalOffset + part * Plan::kTotalBytes +
                (token * Plan::kTotalStride + 2 * lane) * 4);
            const unsigned n = n0 + part * 64 + 2 * lane;
            store_pair(params, m, n, total, x_scale);
          }
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(total_ring.empty_barrier());
        total_ring.advance();
      }
    }
    return;
  }

  if (Plan::kResident == 1) ptx::register_increase<Plan::kConsumerRegisters>();
  const unsigned g = lane / 4, t = lane % 4;
  const unsigned row0 = warpgroup * 64 + warp * 16 + g;  // of the tile; and row0 + 8
  char* totals = shared + Plan::kTotalOffset + warpgroup * Plan::kTotalBytes;
  constexpr int kValues = kTokens / 2;  // a thread: C fragment of 64 x kTokens

  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
    for (unsigned slice = 0; slice < params.slices; ++slice) {
      word_ring.wait_full();
      scale_ring.wait_full();
      const char* words = shared + Plan::kWordOffset + word_ring.stage * Plan::kWordBytes;
      const char* mantissas = shared + Plan::kMantissaOffset +
                              scale_ring.stage * Plan::kMantissaBytes + row0 * Plan::kScales * 2;
      const float* units = reinterpret_cast<const float*>(shared + Plan::kUnitOffset +
                                                          scale_ring.stage * Plan::kUnitBytes);
      const float unit0 = units[row0], unit1 = units[row0 + 8];
      const bool any_wide = __any_sync(0xffffffffu, unit0 == 0 || unit1 == 0);
      const unsigned blocks = min(
          unsigned{Plan::kBlocks},
          (params.k - slice * static_cast<unsigned>(kSliceK) + Plan::kBlock - 1) / Plan::kBlock);

      std::int32_t sum[kValues] = {};
      constexpr int kDotBlocks = kGroup > 128 ? kGroup / 128 : 1;  // blocks of a dot
      constexpr int kParts = kGroup < 128 ? 128 / kGroup : 1;      // dots of a block
      constexpr int kSteps = 4 / kParts;                           // of a dot in a block
#pragma unroll 1
      for (unsigned first = 0; first < blocks; first += kDotBlocks) {
        std::int32_t dot[kValues];
#pragma unroll
        for (unsigned block = first; block < first + kDotBlocks; ++block) {
          std::uint32_t signs[2][8];
          const char* column = words + row0 * 128 + (block ^ g) * 16;  // swizzled by row % 8 = g
          expand_block<kGroup>(column, t, signs[0]);
          expand_block<kGroup>(column + 8 * 128, t, signs[1]);
          x_ring.wait_full();
          const std::uint64_t x =
              ptx::descriptor_128b(base + Plan::kXOffset + x_ring.stage * Plan::kXBytes);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
              const int step = part * kSteps + i;
              const std::uint32_t a[4] = {signs[0][2 * step], signs[1][2 * step],
                                          signs[0][2 * step + 1], signs[1][2 * step + 1]};
              ptx::WgmmaS8<kTokens>::run(dot, a, x + 2 * step, i > 0 || block > first);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            if (part == kParts - 1) {
              if (lane == 0) ptx::mbarrier_arrive(x_ring.empty_barrier());
              x_ring.advance();
            }
            if (block + 1 < first + kDotBlocks) continue;  // the dot goes on
            const unsigned index = first / kDotBlocks * kParts + part;
            const std::uint16_t m0 = reinterpret_cast<const std::uint16_t*>(mantissas)[index];
            const std::uint16_t m1 =
                reinterpret_cast<const std::uint16_t*>(mantissas + 8 * Plan::kScales * 2)[index];
            if (!any_wide) {
              const std::int32_t mantissa0 = static_cast<std::int16_t>(m0);
              const std::int32_t mantissa1 = static_cast<std::int16_t>(m1);
#pragma unroll
              for (int v = 0; v < kValues; ++v) {
                sum[v] += (v % 4 < 2 ? mantissa0 : mantissa1) * dot[v];
              }
            } else {
              add_with_wide<kValues>(sum, dot, m0, m1, unit0 == 0, unit1 == 0);
            }
          }
        }
      }
      if (lane == 0) {
        ptx::mbarrier_arrive(word_ring.empty_barrier());
        ptx::mbarrier_arrive(scale_ring.empty_barrier());
      }
      word_ring.advance();
      scale_ring.advance();

      // The slice's sum, rounded once, is an exact multiple of the unit, so that one fused
      // multiply-add is the contract's rounded product and sum.
      if (slice == 0) total_ring.wait_empty();
      const bool last = slice + 1 == params.slices;
      float* own = reinterpret_cast<float*>(totals) + thread % 128 * 4;
      float value[kValues];
#pragma unroll
      for (int i = 0; i < kValues; i += 4) {
        float4 before = make_float4(0, 0, 0, 0);
        if (slice > 0) before = *reinterpret_cast<const float4*>(own + i / 4 * 512);
        const float befores[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float unit = j < 2 ? unit0 : unit1;
          const float rounded =
              any_wide && unit == 0 ? __int_as_float(sum[i + j]) : static_cast<float>(sum[i + j]);
          value[i + j] = __fmaf_rn(rounded, any_wide && unit == 0 ? 1.0f : unit, befores[j]);
        }
        if (!last) {
          *reinterpret_cast<float4*>(own + i / 4 * 512) =
              make_float4(value[i], value[i + 1], value[i + 2], value[i + 3]);
        }
      }
      if (last) {
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all have read their totals
        float* out = reinterpret_cast<float*>(totals) + warp * 16 + g;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          out[(i / 4 * 8 + 2 * t + i % 2) * Plan::kTotalStride + (i % 4 < 2 ? 0 : 8)] = value[i];
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(total_ring.full_barrier());
        total_ring.advance();
      }
    }
  }
#endif
}

}  // namespace kernels
}  // namespace binary_gemm
