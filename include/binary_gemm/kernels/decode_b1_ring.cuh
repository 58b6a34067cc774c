#pragma once

/// Decode of 2 to 4 tokens on Hopper, by the binary tensor core and a ring of stages: y = x · Wᵀ
/// for any N, G = 128 and 256, K of whole slices or, with G = 128, of a last one that is a half
/// (see Windows in params.cuh). decode_b1.cuh is for the others; it says how bit planes are
/// multiplied.
///
/// A CTA fills a multiprocessor. It makes the planes of all of x once, in shared memory, and blocks
/// of 16 rows of W go through a ring of stages:
///   1. a thread fetches bits and scales by the copy engine;
///   2. one of some warps turns the scales into mantissas;
///   3. the warps that multiply share out the slices of all blocks, one after the other, and leave
///      the exact integer sum of each;
///   4. when all are there, one of some warps adds the block's slices in order, writes the outputs,
///      and fetches the next block to the stage.
/// Only x depends on an earlier kernel, so with programmatic dependent launch 1 and 2 run before
/// the wait; but see kEarlyBytes.
///
/// Fragments of m16n8k128, lane (g, t) = (lane / 4, lane % 4):
///   A (T32,V2) -> (M16,K128): word t of rows g and g + 8;
///   B (T32,V1) -> (K128,N8): word t of plane g;
///   C (T32,V4) -> (M16,N8): planes 2t and 2t + 1 of rows g, then g + 8.

#include <cuda.h>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/ring.cuh"
#include "binary_gemm/kernels/slice.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"

namespace binary_gemm {
namespace kernels {

/// How a CTA works; made by DecodeB1Ring::plan.
struct DecodeB1RingCut {
  std::uint32_t stages;  ///< 0: the shape does not fit
  std::uint32_t early;   ///< stages that are fetched at once
  std::uint32_t blocks;  ///< of 16 rows, in N,
  std::uint32_t own;     ///< and the most that a CTA has
  std::uint32_t stage_bytes;
  std::uint32_t ring_bytes;  ///< of all stages; x comes after them
};

/// The shapes and the shared-memory plan of decode_b1_ring, for host and device.
template <int kTokens_, int kGroup_, bool kHalf_>
struct DecodeB1Ring {
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroup = kGroup_;
  static constexpr bool kHalf = kHalf_;  ///< the last slice is a half
  using Windows = kernels::Windows<kHalf>;
  static_assert(kGroup >= 128, "a product of 128 is a group, or half of one");
  static constexpr int kRows = 16;   ///< of a block
  static constexpr int kBlocks = 8;  ///< of 128, a slice
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;

  // Warps, by what they do: as many as 96 registers each leave room for. A stage has always the
  // same one of those that convert, and of those that add. On an H200, LM head at M = 3 and 4, us,
  // with a warp more that only fetched, by how many multiply, convert and add:
  //   12, 3, 4: 51.2, 63.3     12, 4, 3: 51.7, 64.1     11, 4, 4: 53.2, 65.1
  //   10, 4, 5: 54.6, 69.6     12, 5, 2: 58.3, 68.4
  static constexpr int kMultipliers = 12;
  static constexpr int kConverters = 4;
  static_assert(kConverters <= kMaxConverters, "");
  static constexpr int kAdders = 4;
  static constexpr int kWarps = kMultipliers + kConverters + kAdders;
  static constexpr int kMaxStages = 16;
  static constexpr bool kSharesScales = false;  ///< K = 17408, M = 3, us: 7.69, shared 7.68

  /// What a CTA fetches at once, in whole stages; then a block that is there asks for the one so
  /// far on, until all stages are full. What is asked for sooner comes sooner: all stages are 30
  /// MB, or 6 us, and x would come last. On an H200, back to back, us: gate, M = 3, with 16
  /// KiB 5.8, 32 5.9; but a step of 64 layers, M = 2 1889, 1861; K = 17408, M = 2, with 48 7.2,
  /// 32 6.25.
  static constexpr unsigned kEarlyBytes = 32 * 1024;

  // What a slice has in a stage, see DecodeRingStage: mantissas are int16, [slice][row][block];
  // sums [slice][token][row].
  static constexpr int kLineBytes = static_cast<int>(kSliceK) / 8;
  static constexpr int kBitsBytes = kRows * kLineBytes;
  static constexpr int kRowMantissaBytes = kBlocks * 2;
  static constexpr int kMantissaBytes = kRows * kRowMantissaBytes;
  static constexpr int kSumBytes = kTokens * kRows * 4;
  static constexpr int kUnitBytes = kRows * 4;
  static constexpr int kScaleBytes = kRows * kScales * 2;
  __host__ __device__ static constexpr unsigned sum_index(unsigned row, unsigned m) {
    return m * kRows + row;
  }

#ifdef __CUDACC__
  /// A row's of a slice.
  template <int kPairs>
  __device__ static void store_mantissas(char* row, std::uint32_t (&pairs)[kPairs],
                                         float inverse_unit) {
    pairs_to_mantissas(pairs, inverse_unit);
    kernels::store_mantissas(row, pairs);
  }
#endif

  // x of a slice and token: planes [block][plane], padded, then the sums of pairs of blocks.
  static constexpr int kPlaneStride = kPlanes * 16 + 16;
  static constexpr int kPairOffset = kBlocks * kPlaneStride;
  static constexpr int kXBytes = kPairOffset + kBlocks / 2 * 4;

  // Named barriers at the start: mbarriers are ready for those who convert and add; and for those
  // who multiply, when all of x is there.
  static constexpr unsigned kHelpersBegin = 1;
  static constexpr unsigned kMultipliersBegin = 2;

  static constexpr int shared_bytes(const DecodeB1RingCut& cut, int slices) {
    return static_cast<int>(cut.ring_bytes) + slices * kTokens * kXBytes;
  }

  /// For a CTA of `own` blocks, of `blocks` in all.
  static constexpr DecodeB1RingCut plan(int slices, std::int64_t own, std::int64_t blocks,
                                        int shared_limit) {
    DecodeB1RingCut cut{};
    cut.stage_bytes = DecodeRingStage<DecodeB1Ring>{static_cast<unsigned>(slices)}.bytes();
    const int left = shared_limit - shared_bytes(cut, slices);
    std::int64_t stages = left < 0 ? 0 : left / static_cast<int>(cut.stage_bytes);
    if (stages > own) stages = own;
    if (stages > kMaxStages) stages = kMaxStages;
    cut.stages = static_cast<std::uint32_t>(stages);
    cut.early = (kEarlyBytes + cut.stage_bytes - 1) / cut.stage_bytes;
    cut.blocks = static_cast<std::uint32_t>(blocks);
    cut.own = static_cast<std::uint32_t>(own);
    cut.ring_bytes = cut.stages * cut.stage_bytes;
    return cut;
  }
};

#if __CUDA_ARCH__ >= 900
/// A warp that adds: the slices of the blocks in its stages.
template <class Plan>
struct DecodeB1Adder {
  // A lane has a row, and of every two tokens one. Of three, what it adds for a fourth is not used.
  static constexpr unsigned kTurnTokens = kWarpSize / Plan::kRows;
  static constexpr unsigned kTurns = (Plan::kTokens + kTurnTokens - 1) / kTurnTokens;

  const GemmParams& params;
  const DecodeRingStage<Plan>& in;
  float x_scale[kTurns];

  __device__ static unsigned row() { return threadIdx.x % Plan::kRows; }
  __device__ static unsigned token(unsigned turn) {
    return turn * kTurnTokens + threadIdx.x / Plan::kRows;
  }

  __device__ DecodeB1Adder(const GemmParams& params_, const DecodeRingStage<Plan>& in_)
      : params(params_), in(in_) {
#pragma unroll
    for (unsigned i = 0; i < kTurns; ++i) {
      x_scale[i] = params.x_scales[min(token(i), params.m - 1)];
    }
  }

  /// A block of rows from n0 on, when all of its slices are there.
  __device__ __forceinline__ void add_block(char* stage, std::uint32_t done, unsigned parity,
                                            unsigned n0) const {
    const unsigned n = n0 + row();
    // What does not depend on the sums is loaded while they are waited for.
    float bias = 0, residual[kTurns] = {}, total[kTurns] = {};
    if (params.bias != nullptr) bias = params.bias[min(n, params.n - 1)];
    if (params.residual != nullptr) {
#pragma unroll
      for (unsigned i = 0; i < kTurns; ++i) {
        residual[i] = load_residual(params, min(token(i), params.m - 1), min(n, params.n - 1));
      }
    }
    wait_for_barrier(done, parity);
    const auto* units = reinterpret_cast<const float*>(stage + in.units());
    auto* sums = reinterpret_cast<std::int32_t*>(stage + in.sums());
    const bool wide = *reinterpret_cast<const int*>(stage + in.wide()) != 0;
    if (wide) sum_wide_slices<Plan>(params, reinterpret_cast<float*>(sums), units, n0);
#pragma unroll 5
    for (unsigned slice = 0; slice < in.slices; ++slice) {
      const float unit = units[slice * Plan::kRows + row()];
#pragma unroll
      for (unsigned i = 0; i < kTurns; ++i) {
        constexpr unsigned kSums = Plan::kSumBytes / 4;
        const std::int32_t sum = sums[slice * kSums + (i * kWarpSize + threadIdx.x) % kSums];
        // A narrow slice's sum, rounded once, is an exact multiple of the unit: see gemm_wgmma.
        total[i] = wide && unit == 0 ? __fadd_rn(total[i], __int_as_float(sum))
                                     : __fmaf_rn(static_cast<float>(sum), unit, total[i]);
      }
    }
#pragma unroll
    for (unsigned i = 0; i < kTurns; ++i) {
      if (n < params.n && token(i) < params.m) {
        store_output(params.y, params.y_type, token(i) * params.y_stride + n,
                     finish(params, total[i], x_scale[i], bias, residual[i]));
      }
    }
  }
};

/// `row_of`: a block's first row; `fetch`: starts to fetch a block to a stage.
template <class Plan, class RowOf, class Fetch>
__device__ __forceinline__ void add_blocks(const GemmParams& params, const DecodeB1RingCut& cut,
                                           const DecodeRingStage<Plan>& in, char* shared,
                                           unsigned own, unsigned adder, const RowOf& row_of,
                                           const Fetch& fetch) {
  const std::uint32_t base = ptx::shared_address(shared);
  ptx::wait_for_dependencies();
  const DecodeB1Adder<Plan> work(params, in);
  for_own_blocks({cut.stage_bytes, cut.ring_bytes, Plan::kAdders}, own, adder,
                 [&](unsigned block, unsigned stage, unsigned parity) {
                   work.add_block(shared + stage, base + stage + in.done(), parity, row_of(block));
                   __syncwarp();
                   if (threadIdx.x == 0 && block + cut.stages < own) {
                     fetch(block + cut.stages, stage);
                   }
                 });
}

/// The warps that multiply make planes of all of x, and the sums of its blocks: of a slice and
/// token, a warp at once. `x`: [slice][token].
template <class Plan>
__device__ __forceinline__ void make_ring_planes(const GemmParams& params, char* x, unsigned warp) {
  constexpr int kAtOnce = 2;  // loads of so many are in flight
  const unsigned lane = threadIdx.x;
  const unsigned count = params.slices * Plan::kTokens;
#pragma unroll 1
  for (unsigned first = warp; first < count; first += kAtOnce * Plan::kMultipliers) {
    std::uint32_t words[kAtOnce][8];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned part = first + i * Plan::kMultipliers;
      const unsigned slice = part / Plan::kTokens, m = part % Plan::kTokens;
      load_aligned_chunk(
          words[i],
          params.x + m * params.x_stride + Plan::Windows::begin(params, slice) + lane * 32,
          part < count && m < params.m);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned part = first + i * Plan::kMultipliers;
      if (part >= count) break;
      char* own = x + part * Plan::kXBytes;
      std::int32_t sum = sum_chunk(words[i]);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const auto even = static_cast<std::uint32_t>(sum);
      const auto odd = static_cast<std::uint32_t>(__shfl_xor_sync(0xffffffffu, sum, 4));
      if (lane % 8 == 0) {  // as 16 bits: the low bytes of a pair, then the high ones
        reinterpret_cast<std::uint32_t*>(own + Plan::kPairOffset)[lane / 8] =
            __byte_perm(even, odd, 0x5140);
      }
      transpose_to_planes(words[i]);
      char* planes = own + lane / 4 * Plan::kPlaneStride + lane % 4 * 4;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        *reinterpret_cast<std::uint32_t*>(planes + p * 16) = words[i][p];
      }
    }
  }
}

/// The exact sums of a slice of a block: lanes with t < 2 get row g + 8t. `bits`: the line of this
/// lane's row, at its column of blocks 0 and 1; `mantissas`: of row g; `x`: of the slice.
template <class Plan>
__device__ __forceinline__ void multiply_slice(std::uint32_t bits, std::uint32_t mantissas,
                                               std::uint32_t x,
                                               std::uint32_t (&sum)[Plan::kTokens]) {
  const unsigned lane = threadIdx.x;
  const unsigned t = lane % 4;
  constexpr unsigned kUpper = 8 * Plan::kRowMantissaBytes;  // from row g to row g + 8
  std::int32_t acc[Plan::kTokens][2][2] = {};  // row g + 8i, plane 2t + j: Σ mantissa · count
#pragma unroll(Plan::kTokens <= 3 ? 2 : 1)     // with 4 tokens a register would spill
  for (unsigned half = 0; half < 2; ++half) {
    std::uint32_t a[2][4], b[Plan::kTokens][4];
#pragma unroll
    for (unsigned two = 0; two < 2; ++two) {
      ptx::ldmatrix_x4(a[two], bits ^ (half * 2 + two) * 32);
    }
#pragma unroll
    for (int m = 0; m < Plan::kTokens; ++m) {
      ptx::ldmatrix_x4(
          b[m], x + m * Plan::kXBytes + (half * 4 + lane / 8) * Plan::kPlaneStride + lane % 8 * 16);
    }
    std::uint32_t mantissa[2][2];  // of row g + 8i: two pairs of blocks
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const uint2 pairs = ptx::load_shared_8(mantissas + i * kUpper + half * 8);
      mantissa[i][0] = pairs.x, mantissa[i][1] = pairs.y;
    }
#pragma unroll
    for (unsigned two = 0; two < 2; ++two) {
#pragma unroll
      for (int m = 0; m < Plan::kTokens; ++m) {
        std::int32_t counts[2][4];
        ptx::mma_and_popc_m16n8k128(counts[0], a[two][0], a[two][1], b[m][2 * two]);
        ptx::mma_and_popc_m16n8k128(counts[1], a[two][2], a[two][3], b[m][2 * two + 1]);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          // Counts are at most 128, so two of them share a word as bytes.
          const std::uint32_t pair = __byte_perm(counts[0][v], counts[1][v], 0x40);
          acc[m][v / 2][v % 2] = ptx::dp2a_lo(mantissa[v / 2][two], pair, acc[m][v / 2][v % 2]);
        }
      }
    }
  }
  // Planes 2t and 2t + 1 weigh 4^t and 2 · 4^t, the last -2^7; the dot takes twice the counts, less
  // Σ q, of which this lane takes that of its pair of blocks. In unsigned words, since sums may
  // wrap on the way to a total that fits.
  const std::uint32_t weight = 2u << (2 * t);
  const std::uint32_t upper_weight = t == 3 ? 0u - 2 * weight : 2 * weight;
  const std::uint32_t own_mantissa[2] = {ptx::load_shared_4(mantissas + t * 4),
                                         ptx::load_shared_4(mantissas + kUpper + t * 4)};
#pragma unroll
  for (int m = 0; m < Plan::kTokens; ++m) {
    const std::uint32_t pair =
        ptx::load_shared_4(x + m * Plan::kXBytes + Plan::kPairOffset + t * 4);
    std::uint32_t v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto low = static_cast<std::uint32_t>(ptx::dp2a_lo(own_mantissa[i], pair, 0));
      const auto high = static_cast<std::uint32_t>(ptx::dp2a_hi(own_mantissa[i], pair, 0));
      v[i] = static_cast<std::uint32_t>(acc[m][i][0]) * weight +
             static_cast<std::uint32_t>(acc[m][i][1]) * upper_weight - (low + 256 * high);
    }
    const bool odd = t % 2 != 0;
    const std::uint32_t kept =
        (odd ? v[1] : v[0]) + __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1);
    sum[m] = kept + __shfl_xor_sync(0xffffffffu, kept, 2);
  }
}

/// A warp that multiplies: its part of all slices of all blocks.
template <class Plan>
__device__ __forceinline__ void multiply_blocks(const GemmParams& params,
                                                const DecodeB1RingCut& cut,
                                                const DecodeRingStage<Plan>& in, char* shared,
                                                unsigned own, unsigned warp) {
  const unsigned lane = threadIdx.x;
  const std::uint32_t base = ptx::shared_address(shared);
  char* x = shared + cut.ring_bytes;
  ptx::wait_for_dependencies();
  make_ring_planes<Plan>(params, x, warp);
  ptx::named_barrier_sync(Plan::kMultipliersBegin, (Plan::kMultipliers + 1) * kWarpSize);

  // In stage and slice 0: blocks 0 and 1 of a row, columns swizzled by row % 8; mantissas; sums.
  const unsigned row = lane % 16;
  const std::uint32_t bits = base + row * Plan::kLineBytes + ((lane / 16) ^ (row % 8)) * 16;
  const std::uint32_t mantissas = base + in.mantissas() + lane / 4 * Plan::kRowMantissaBytes;
  const std::uint32_t planes = ptx::shared_address(x);
  char* sums = shared + in.sums() + (lane % 4 * 8 + lane / 4) * 4;
  unsigned slice = warp, stage = 0, parity = 0;
#pragma unroll 1
  for (unsigned block = 0; block < own; ++block) {
    // For blocks of which it has no slice too: a barrier's parity does not tell a block from the
    // last but one that was there.
    wait_for_barrier(base + stage + in.ready(), parity);
#pragma unroll 1
    for (; slice < in.slices; slice += Plan::kMultipliers) {
      std::uint32_t sum[Plan::kTokens];
      multiply_slice<Plan>(bits + stage + slice * Plan::kBitsBytes,
                           mantissas + stage + slice * Plan::kMantissaBytes,
                           planes + slice * (Plan::kTokens * Plan::kXBytes), sum);
      if (lane % 4 < 2) {
        auto* own_sums = reinterpret_cast<std::uint32_t*>(sums + stage + slice * Plan::kSumBytes);
#pragma unroll
        for (int m = 0; m < Plan::kTokens; ++m) own_sums[m * Plan::kRows] = sum[m];
      }
    }
    slice -= in.slices;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(base + stage + in.done());
    stage += cut.stage_bytes;
    if (stage == cut.ring_bytes) stage = 0, parity ^= 1;
  }
}
#endif

/// Grid: any number of CTAs up to cut.blocks, for which the plan was made; CTA i has blocks i,
/// i + gridDim.x, ... Block: (32, DecodeB1Ring::kWarps). Dynamic shared memory:
/// DecodeB1Ring::shared_bytes. See weight_tile.cuh for `bits_maps`.
template <int kTokens, int kGroup, bool kHalf>
__global__ void __launch_bounds__(DecodeB1Ring<kTokens, kGroup, kHalf>::kWarps* kWarpSize, 1)
    decode_b1_ring(const __grid_constant__ GemmParams params,
                   const __grid_constant__ BitsMaps<kHalf> bits_maps,
                   const __grid_constant__ DecodeB1RingCut cut) {
#if __CUDA_ARCH__ >= 900
  using Plan = DecodeB1Ring<kTokens, kGroup, kHalf>;
  extern __shared__ __align__(1024) char shared[];
  const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.y, 0);
  const unsigned slices = params.slices;
  // cut.own blocks or one less. Not by a division, as all else waits for it: 1% at M = 3.
  const unsigned own = cut.own - (blockIdx.x + (cut.own - 1) * gridDim.x < cut.blocks ? 0 : 1);
  const std::uint32_t base = ptx::shared_address(shared);
  const DecodeRingStage<Plan> in{slices};
  const RingFill fill{cut.early, min(cut.stages, own)};  // not all CTAs have as many blocks
  const auto row_of = [&](unsigned block) {
    return (blockIdx.x + block * gridDim.x) * Plan::kRows;
  };
  const auto fetch = [&](unsigned block, unsigned stage) {
    fetch_ring_block<Plan>(params, bits_maps, in, shared, stage, row_of(block));
  };

  if (warp < Plan::kMultipliers) {
    multiply_blocks<Plan>(params, cut, in, shared, own, warp);
    return;
  }
  const unsigned helper = warp - Plan::kMultipliers;
  constexpr unsigned kHelperThreads = (Plan::kConverters + Plan::kAdders) * kWarpSize;
  if (helper == 0) {
    if (threadIdx.x == 0) {
      init_ring_barriers(in, base, cut.stage_bytes, cut.ring_bytes,
                         in.converters(Plan::kConverters), Plan::kMultipliers);
    }
    __syncwarp();
    ptx::named_barrier_arrive(Plan::kHelpersBegin, kHelperThreads);
    ptx::named_barrier_arrive(Plan::kMultipliersBegin, (Plan::kMultipliers + 1) * kWarpSize);
#pragma unroll 1
    for (unsigned block = 0; block < min(cut.early, fill.stages); ++block) {
      if (threadIdx.x == 0) fetch(block, block * cut.stage_bytes);
    }
    ptx::launch_dependents();
    __syncwarp();
  } else {
    ptx::named_barrier_sync(Plan::kHelpersBegin, kHelperThreads);
  }
  if (helper >= Plan::kConverters) {
    add_blocks<Plan>(params, cut, in, shared, own, helper - Plan::kConverters, row_of, fetch);
  } else {
    convert_blocks<Plan>(params, in, shared, own, helper,
                         {cut.stage_bytes, cut.ring_bytes, Plan::kConverters}, fill, fetch);
  }
#endif
}

}  // namespace kernels
}  // namespace binary_gemm
