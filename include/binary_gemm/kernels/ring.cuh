#pragma once

/// A ring of stages in shared memory, through which blocks of 16 rows of W go: what decode_ring.cuh
/// and decode_b1_ring.cuh have in common.

#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"  // load_aligned_chunk
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"  // wait_for_barrier, fetches

namespace binary_gemm {
namespace kernels {

/// Rows of a slice whose scales a lane converts at once, since the chain of 60 instructions is
/// long: as many as 5 slices give it.
inline constexpr int kConvertedAtOnce = 3;
/// Warps that may share a block's scales. What they saw is read as one word, a byte each.
inline constexpr int kMaxConverters = 4;
static_assert(kMaxConverters == sizeof(int), "");

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
  /// Whether a slice is wide: a byte for each of kMaxConverters.
  __host__ __device__ constexpr unsigned wide() const {
    return scales() + slices * Plan::kScaleBytes;
  }
  // Barriers, of 8 bytes: by the copy engine, by those who convert, by those who multiply.
  __host__ __device__ constexpr unsigned full() const { return wide() + 8; }
  __host__ __device__ constexpr unsigned ready() const { return full() + 8; }
  __host__ __device__ constexpr unsigned done() const { return ready() + 8; }
  /// How many of `warps` that convert share a block: one has it, or all do if it has more scales
  /// than one converts at once. On an H200, us, plain and back to back, by all, by one:
  ///   M = 8: gate 9.8, 8.4; 9.5, 8.4. But K = 17408 12.1, 9.8; 12.7, 10.0
  ///   M = 16: LM head 93.8, 91.3; 89.7, 87.7
  __host__ __device__ constexpr unsigned converters(unsigned warps) const {
    return Plan::kSharesScales && slices * Plan::kRows > kConvertedAtOnce * kWarpSize ? warps : 1;
  }
  /// Of all; the swizzle wants the next stage's bits at a multiple of 1024.
  __host__ __device__ constexpr unsigned bytes() const { return (done() + 8 + 1023) / 1024 * 1024; }
};

#if __CUDA_ARCH__ >= 900
/// Turns the fp16 scales of a block, [row][slice], into mantissas, by Plan::store_mantissas, and
/// units: one of `parts` warps. Returns whether a slice of its part is wide.
template <class Plan>
__device__ __forceinline__ bool convert_block(const GemmParams& params, const char* scales,
                                              char* mantissas, float* units, unsigned part,
                                              unsigned parts) {
  constexpr int kPairs = Plan::kScales / 2;
  constexpr int kAtOnce = Plan::kHalf ? kConvertedAtOnce - 1 : kConvertedAtOnce;  // or it spills
  const unsigned slices = params.slices, count = slices * Plan::kRows;
  const unsigned begin = part * kWarpSize + threadIdx.x, step = parts * kWarpSize;
  const auto load = [&](unsigned own, std::uint32_t(&pairs)[kPairs]) {
    const unsigned row = own % Plan::kRows, slice = own / Plan::kRows;
    if constexpr (Plan::kHalf) {
      const unsigned first = Plan::Windows::begin(params, slice) / Plan::kGroup;
      load_row_scales(scales + (row * params.scales_stride + first) * 2, pairs);
      zero_first_half(pairs, slice + 1 == slices);
    } else {
      load_row_scales(scales + (row * slices + slice) * (Plan::kScales * 2), pairs);
    }
  };
  bool unsure = false;
#pragma unroll 1
  for (unsigned first = begin; first < count; first += kAtOnce * step) {
    std::uint32_t pairs[kAtOnce][kPairs];
    // Past the end a lane's first one again.
    const auto entry = [&](int i) { return first + i * step < count ? first + i * step : first; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load(entry(i), pairs[i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float inverse_unit;
      const SliceUnit unit = unit_of_close_scales(pairs[i], inverse_unit);
      Plan::store_mantissas(mantissas + entry(i) * Plan::kRowMantissaBytes, pairs[i], inverse_unit);
      units[entry(i)] = unit.unit;
      unsure = unsure || !unit.narrow;
    }
  }
  if (!__any_sync(0xffffffffu, unsure)) return false;
  bool wide = false;
#pragma unroll 1
  for (unsigned own = begin; own < count; own += step) {
    std::uint32_t pairs[kPairs];
    load(own, pairs);
    float inverse_unit;
    if (!unit_of_scales(pairs, inverse_unit).narrow) units[own] = 0, wide = true;
  }
  return __any_sync(0xffffffffu, wide);
}

/// How warps of a kind share a CTA's blocks. A stage has always the same one: a barrier's parity
/// does not tell a block from the last but one that was there, so who waits for it must have seen
/// them all.
struct RingTurns {
  unsigned stage_bytes;
  unsigned ring_bytes;
  unsigned warps;
};

/// Calls `work(block, stage, parity)` for the blocks of warp `own_turn`, in order; `stage`: its
/// offset; `parity`: that of the stage's barriers.
template <class Work>
__device__ __forceinline__ void for_own_blocks(const RingTurns& turns, unsigned blocks,
                                               unsigned own_turn, const Work& work) {
  unsigned stage = 0, parity = 0, turn = 0;
#pragma unroll 1
  for (unsigned block = 0; block < blocks; ++block) {
    if (turn == own_turn) work(block, stage, parity);
    if (++turn == turns.warps) turn = 0;
    stage += turns.stage_bytes;
    if (stage == turns.ring_bytes) stage = 0, parity ^= 1, turn = 0;
  }
}

/// How stages are filled the first time: `early` of them at once, by one thread; then a block that
/// is there asks for the one so far on.
struct RingFill {
  unsigned early;
  unsigned stages;  ///< no more than blocks
};

/// By one thread: the barriers of all stages, for `converters` warps of a block and `multipliers`
/// that arrive.
template <class Plan>
__device__ __forceinline__ void init_ring_barriers(const DecodeRingStage<Plan>& in,
                                                   std::uint32_t base, unsigned stage_bytes,
                                                   unsigned ring_bytes, unsigned converters,
                                                   unsigned multipliers) {
#pragma unroll 1
  for (unsigned stage = 0; stage < ring_bytes; stage += stage_bytes) {
    ptx::mbarrier_init(base + stage + in.full(), 2);
    ptx::mbarrier_init(base + stage + in.ready(), converters);
    ptx::mbarrier_init(base + stage + in.done(), multipliers);
  }
  ptx::fence_mbarrier_init();
}

/// One thread starts to fetch the block of rows from n0 on to the stage at this offset.
template <class Plan>
__device__ __forceinline__ void fetch_ring_block(const GemmParams& params,
                                                 const BitsMaps<Plan::kHalf>& bits_maps,
                                                 const DecodeRingStage<Plan>& in, char* shared,
                                                 unsigned stage, unsigned n0) {
  const std::uint32_t full = ptx::shared_address(shared) + stage + in.full();
  fetch_bits_by_engine(params, bits_maps, n0, Plan::kRows, 0, in.slices, shared + stage, full);
  fetch_scales_by_engine(params, n0, Plan::kRows, shared + stage + in.scales(), full);
}

/// A warp that converts: the scales of the blocks in its stages; of long rows, a part of all. It
/// fills stages the first time, too; adders do after that. `fetch`: starts to fetch a block to a
/// stage.
template <class Plan, class Fetch>
__device__ __forceinline__ void convert_blocks(const GemmParams& params,
                                               const DecodeRingStage<Plan>& in, char* shared,
                                               unsigned blocks, unsigned converter, RingTurns turns,
                                               const RingFill& fill, const Fetch& fetch) {
  const std::uint32_t base = ptx::shared_address(shared);
  const unsigned parts = in.converters(turns.warps);
  const unsigned part = parts > 1 ? converter : 0;
  if (parts > 1) converter = 0, turns.warps = 1;
  for_own_blocks(turns, blocks, converter, [&](unsigned block, unsigned stage, unsigned parity) {
    wait_for_barrier(base + stage + in.full(), parity);
    if (threadIdx.x == 0 && part == 0 && block + fill.early < fill.stages) {
      fetch(block + fill.early, stage + fill.early * turns.stage_bytes);
    }
    const bool wide =
        convert_block<Plan>(params, shared + stage + in.scales(), shared + stage + in.mantissas(),
                            reinterpret_cast<float*>(shared + stage + in.units()), part, parts);
    // The last part has the bytes of parts that there are not.
    char* flags = shared + stage + in.wide();
    if (threadIdx.x >= part && threadIdx.x < kMaxConverters &&
        (threadIdx.x == part || part + 1 == parts)) {
      flags[threadIdx.x] = wide;
    }
    __syncwarp();
    if (threadIdx.x == 0) ptx::mbarrier_arrive(base + stage + in.ready());
  });
}

/// A wide slice's sum of row `n` and token `m`, by all lanes. Right rather than fast.
template <class Plan>
__device__ inline float wide_slice_sum(const GemmParams& params, unsigned n, unsigned m,
                                       unsigned slice) {
  const unsigned lane = threadIdx.x;
  const unsigned k0 = Plan::Windows::begin(params, slice);
  std::uint32_t signs[8], x[8];
  expand_signs(params.bits[std::uint64_t{n} * params.bits_stride + k0 / 32 + lane], signs);
  load_aligned_chunk(x, params.x + m * params.x_stride + k0 + lane * 32, true);
  permute_as_signs(x);
  std::int32_t dot = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) dot = ptx::dp4a(signs[i], x[i], dot);
  return wide_sum<Plan::kGroup>(
      dot, params.scales + std::uint64_t{n} * params.scales_stride + k0 / Plan::kGroup,
      Plan::Windows::overlap(params, slice) / Plan::kGroup, Plan::kScales);
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
        const float sum = wide_slice_sum<Plan>(params, n0 + row, m, slice);
        if (lane == 0) sums[slice * (Plan::kSumBytes / 4) + Plan::sum_index(row, m)] = sum;
      }
    }
  }
  __syncwarp();
}
#endif

}  // namespace kernels
}  // namespace binary_gemm
