#pragma once

/// Decode of many or long rows on Hopper, by the int8 tensor core and the copy engine: y = x · Wᵀ
/// for up to 8 or 16 tokens, any N, G = 128 and 256, K of whole slices or, with G = 128, of a last
/// one that is a half (see Windows in params.cuh). decode_s8.cuh is for the others.
///
/// A warp keeps its part of x, 512 or 256 of K, in registers as operand B of m16n8k32, and
/// multiplies it with that part of all blocks of 16 rows of W that its CTA has. The weights are
/// expanded in registers as operand A; both are in the order of expand.cuh, so nothing moves
/// between lanes, and x is read once. A part's Σ mantissa · dot is an exact integer, so the parts
/// of a slice are added up in any order, in shared memory. Blocks go through a ring of stages:
///   1. a thread fetches bits and scales by the copy engine;
///   2. one of some warps turns the scales into mantissas; of long rows all do, a part each;
///   3. the warps that multiply add their sums to the stage's;
///   4. when all have, another warp adds the slices in order, writes the outputs, and fetches the
///      next block to the stage.
/// None of them waits for another while there are blocks. Where there are more parts than warps,
/// they take rounds: all blocks of a phase, as many as there are stages, stay in shared memory
/// until a warp has multiplied them with all its parts. Where there are less, sets of warps share
/// the blocks.
///
/// At the start weights are asked for little by little: see kEarlyBytes.
///
/// On an H200, us at M = 8, back to back: gate 9.2 by decode_s8, now 7.8; K = 17408 13.5, 9.8; LM
/// head 79, 71. What limits it is the integer pipe: 26 of its instructions for 16 rows by 128 of K,
/// and its warps issue two of three cycles. What lost, LM head at M = 8 or as said:
///   256 of K a warp, sums of parts kept apart until the end: 109; 512 of K, added up in shared
///     memory 82
///   a warp that adds slices has a quarter of each block: 82; a whole one of every fourth 76
///   the shifts of expand_signs by multiplication: 79, without 75; two dots of 64 a group: 77
///   the binary tensor core in its place, M = 4: 64 against 74, but gate 8.5, 8.2, out 4.4, 4.0
///   slices added by the warps that multiplied, a value each, when they are done: QKV 5.9, 5.3
///   24 and 32 tokens, in parts of 128: QKV 9.0, 10.7, gate 15.4, 17.9; wgmma 7.8, 7.6, 13.8, 13.9
///
/// Fragments, lane (g, t) = (lane / 4, lane % 4):
///   A (T32,V4) -> (M16,K32): word t of rows g and g + 8, expanded;
///   B (T32,V2) -> (N8,K32): the same columns of token g;
///   C (T32,V4) -> (M16,N8): tokens 2t and 2t + 1 of rows g, then g + 8.

#include <cuda.h>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"  // load_aligned_chunk
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/ring.cuh"
#include "binary_gemm/kernels/slice.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"

namespace binary_gemm {
namespace kernels {

/// How a CTA works; made by DecodeRing::plan.
struct DecodeRingCut {
  std::uint32_t warps;    ///< that multiply, of a set; 0: the shape does not fit
  std::uint32_t helpers;  ///< warps that convert, and as many that add: 4, or 2
  std::uint32_t parts;    ///< of a slice, at once
  std::uint32_t rounds;   ///< with other parts, until all of K is done
  std::uint32_t sets;     ///< of warps, which share the blocks
  std::uint32_t stages;
  std::uint32_t early;        ///< stages that are fetched at once
  std::uint32_t phase;        ///< blocks that go through all rounds before the next ones do
  std::uint32_t blocks;       ///< of 16 rows, in N
  std::uint32_t stage_bytes;  ///< shared memory of a stage,
  std::uint32_t set_bytes;    ///< from a set's stage to its next,
  std::uint32_t ring_bytes;   ///< and of all stages

  __host__ __device__ std::uint32_t multipliers() const { return warps * sets; }
};

/// The shapes and the shared-memory plan of decode_ring, for host and device.
template <int kTokens_, int kGroup_, bool kHalf_>
struct DecodeRing {
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroup = kGroup_;
  static constexpr bool kHalf = kHalf_;  ///< the last slice is a half
  using Windows = kernels::Windows<kHalf>;
  static_assert(kTokens % 8 == 0, "a product has 8 tokens");
  static_assert(kGroup >= 128, "a lane expands the word that it holds");
  static constexpr int kTiles = kTokens / 8;
  static constexpr int kRows = 16;            ///< of a block
  static constexpr int kValues = 4 * kTiles;  ///< of a block, a lane

  // Warps: those that multiply; those that convert scales, and those that add slices, stage i's by
  // i % helpers of each. A CTA has a multiprocessor, or half of it: then CTAs of the next kernel
  // start when the first of this one end.
  static constexpr int kMaxWarps = 20;
  static constexpr int kMaxHelpers = kMaxConverters;  ///< of each
  static constexpr int kMaxThreads = (kMaxWarps + 2 * kMaxHelpers) * kWarpSize;
  static constexpr int kMaxStages = 16;
  /// What has 16 tokens has no long rows, nor a register for it.
  static constexpr bool kSharesScales = kTokens <= 8;

  /// What a CTA fetches at once, in whole stages; then a block that is there asks for the one so
  /// far on, until all stages are full. What is asked for sooner comes sooner, and all stages are
  /// up to 30 MB, or 6 us: x would come last, and the reads of a quantizer before. On an H200, us:
  /// gate, M = 8, plain and back to back, all at once 11.1, 9.0; two of 18 KiB 9.7, 8.3; one 9.1,
  /// 8.1. A step of 64 layers, M = 8, 16 with one 2734, 3634; two 2752, 3583; three 2762 and four
  /// 2820.
  static constexpr unsigned kEarlyBytes = (kTokens <= 8 ? 16 : 32) * 1024;

  /// What a warp has of K: as much of x as there are registers for.
  static constexpr int kPartBlocks = kTokens <= 8 ? 4 : 2;  ///< of 128
  static constexpr int kPartK = kPartBlocks * 128;
  static constexpr int kSliceParts = static_cast<int>(kSliceK) / kPartK;
  static constexpr int kDots = kPartK / kGroup;  ///< groups of a part
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;

  // What a slice has in a stage, see DecodeRingStage: mantissas are [slice][row][scale], sums
  // [slice][value][lane].
  static constexpr int kLineBytes = static_cast<int>(kSliceK) / 8;
  static constexpr int kBitsBytes = kRows * kLineBytes;
  static constexpr int kRowMantissaBytes = kScales * 4;
  static constexpr int kMantissaBytes = kRows * kRowMantissaBytes;
  static constexpr int kSumBytes = kTokens * kRows * 4;
  static constexpr int kUnitBytes = kRows * 4;
  static constexpr int kScaleBytes = kRows * kScales * 2;

#ifdef __CUDACC__
  /// A row's of a slice, as int32.
  template <int kPairs>
  __device__ static void store_mantissas(char* row, const std::uint32_t (&pairs)[kPairs],
                                         float inverse_unit) {
    const std::uint32_t zero = __float_as_uint(kRoundToInteger);
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      const uint2 low = mantissa_bits(pairs[i], inverse_unit);
      const uint2 high = mantissa_bits(pairs[i + 1], inverse_unit);
      reinterpret_cast<uint4*>(row)[i / 2] =
          make_uint4(low.x - zero, low.y - zero, high.x - zero, high.y - zero);
    }
  }
#endif

  // Named barriers at the start: mbarriers are ready for those who convert and add; and for those
  // who multiply, whose sums are zeros and whose loads of x are on their way.
  static constexpr unsigned kHelpersBegin = 1;
  static constexpr unsigned kMultipliersBegin = 2;

  /// Where lane (g, t)'s value v is: row g + row_of(v), token token_of(v, t).
  __host__ __device__ static constexpr unsigned row_of(unsigned v) { return v % 4 / 2 * 8; }
  __host__ __device__ static constexpr unsigned token_of(unsigned v, unsigned t) {
    return v / 4 * 8 + 2 * t + v % 2;
  }
  /// The other way round, in sums, [value][lane].
  __host__ __device__ static constexpr unsigned sum_index(unsigned row, unsigned m) {
    const unsigned value = m / 8 * 4 + row / 8 * 2 + m % 2;
    return value * kWarpSize + row % 8 * 4 + m % 8 / 2;
  }
  /// Which of a lane's tokens, kValues / 2 in order, that is.
  __host__ __device__ static constexpr unsigned own_token_of(unsigned v) {
    return v / 4 * 2 + v % 2;
  }

  /// For a CTA of `own` blocks, of `blocks` in all, with up to `max_warps` that multiply.
  static constexpr DecodeRingCut plan(int slices, std::int64_t own, std::int64_t blocks,
                                      int max_warps, int shared_limit) {
    DecodeRingCut cut{};
    cut.stage_bytes = DecodeRingStage<DecodeRing>{static_cast<unsigned>(slices)}.bytes();
    const int fitting = shared_limit / static_cast<int>(cut.stage_bytes);
    if (fitting < 1) return cut;
    int parts = kSliceParts;
    while (parts > 1 && slices * parts > max_warps) parts /= 2;
    const int passes = (slices * parts + max_warps - 1) / max_warps;
    cut.parts = static_cast<std::uint32_t>(parts);
    cut.warps = static_cast<std::uint32_t>((slices * parts + passes - 1) / passes);
    cut.helpers = static_cast<std::uint32_t>(max_warps * kMaxHelpers / kMaxWarps);
    cut.rounds = static_cast<std::uint32_t>(passes * kSliceParts / parts);
    cut.stages = static_cast<std::uint32_t>(fitting < own ? fitting : own);
    if (cut.stages > kMaxStages) cut.stages = kMaxStages;
    cut.early = (kEarlyBytes + cut.stage_bytes - 1) / cut.stage_bytes;
    cut.sets = cut.rounds == 1 ? static_cast<std::uint32_t>(max_warps) / cut.warps : 1;
    if (cut.sets > cut.stages) cut.sets = cut.stages;
    // A stage is always the same set's: a barrier's parity does not tell a block from the last but
    // one that was there, so who waits for it must have seen them all.
    if (cut.stages < own) cut.stages -= cut.stages % cut.sets;
    cut.phase = cut.rounds == 1 ? static_cast<std::uint32_t>(own) : cut.stages;
    cut.blocks = static_cast<std::uint32_t>(blocks);
    cut.set_bytes = cut.sets * cut.stage_bytes;
    cut.ring_bytes = cut.stages * cut.stage_bytes;
    return cut;
  }
};

#if __CUDA_ARCH__ >= 900
/// `value`, which ptxas keeps in a register rather than compute it again.
__device__ inline std::uint32_t keep(std::uint32_t value) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x));
}

/// Loads 1, 2 or 4 ints of shared memory, as aligned as they are many.
template <int kCount>
__device__ inline void load_ints(std::int32_t (&to)[kCount], std::uint32_t from) {
  if constexpr (kCount == 1) {
    to[0] = static_cast<std::int32_t>(ptx::load_shared_4(from));
  } else if constexpr (kCount == 2) {
    const uint2 two = ptx::load_shared_8(from);
    to[0] = static_cast<std::int32_t>(two.x), to[1] = static_cast<std::int32_t>(two.y);
  } else {
    static_assert(kCount == 4, "");
    const uint4 four = ptx::load_shared_16(from);
    to[0] = static_cast<std::int32_t>(four.x), to[1] = static_cast<std::int32_t>(four.y);
    to[2] = static_cast<std::int32_t>(four.z), to[3] = static_cast<std::int32_t>(four.w);
  }
}

/// Adds the slices of a block in order and leaves zeros. `wide`: sum_wide_slices was there.
template <class Plan>
__device__ inline void add_slices_in_order(float (&total)[Plan::kValues], std::int32_t* sums,
                                           const float* units, unsigned slices, bool wide) {
#pragma unroll(Plan::kValues <= 4 ? 5 : 2)
  for (unsigned slice = 0; slice < slices; ++slice) {
    const float unit[2] = {units[0], units[8]};
#pragma unroll
    for (int v = 0; v < Plan::kValues; ++v) {
      const std::int32_t sum = sums[v * kWarpSize];
      sums[v * kWarpSize] = 0;
      // A narrow slice's sum, rounded once, is an exact multiple of the unit: see gemm_wgmma.
      const float u = unit[Plan::row_of(v) / 8];
      if (wide && u == 0) {
        total[v] = __fadd_rn(total[v], __int_as_float(sum));
      } else {
        total[v] = __fmaf_rn(static_cast<float>(sum), u, total[v]);
      }
    }
    sums += Plan::kSumBytes / 4, units += Plan::kRows;
  }
}

/// An adder's work on a block of rows from n0 on.
template <class Plan>
__device__ inline void add_block(const GemmParams& params, const DecodeRingStage<Plan>& in,
                                 char* stage, unsigned n0,
                                 const float (&x_scales)[Plan::kValues / 2]) {
  const unsigned lane = threadIdx.x;
  auto* sums = reinterpret_cast<std::int32_t*>(stage + in.sums());
  const auto* units = reinterpret_cast<const float*>(stage + in.units());
  const int wide = *reinterpret_cast<const int*>(stage + in.wide());
  float total[Plan::kValues] = {};
  if (wide == 0) {
    add_slices_in_order<Plan>(total, sums + lane, units + lane / 4, params.slices, false);
  } else {
    sum_wide_slices<Plan>(params, reinterpret_cast<float*>(sums), units, n0);
    add_slices_in_order<Plan>(total, sums + lane, units + lane / 4, params.slices, true);
  }
  n0 += lane / 4;
  if (params.residual == nullptr && params.y_type != DataType::kFloat32) {
    float bias[2] = {-0.0f, -0.0f};  // a fused add of -0 is the rounded product
    if (params.bias != nullptr) {
      bias[0] = params.bias[min(n0, params.n - 1)],
      bias[1] = params.bias[min(n0 + 8, params.n - 1)];
    }
#pragma unroll
    for (int v = 0; v < Plan::kValues; ++v) {
      const unsigned row = Plan::row_of(v), m = Plan::token_of(v, lane % 4);
      const float value = __fmaf_rn(total[v], x_scales[Plan::own_token_of(v)], bias[row / 8]);
      const std::uint32_t rounded = round_pair(params.y_type, value, value);
      if (n0 + row < params.n && m < params.m) {
        static_cast<std::uint16_t*>(params.y)[m * params.y_stride + n0 + row] =
            static_cast<std::uint16_t>(rounded);
      }
    }
    return;
  }
  // One copy of store_element's cases, as fewer want it.
#pragma unroll 1
  for (int v = 0; v < Plan::kValues; ++v) {
    float value = total[0], x_scale = x_scales[0];
#pragma unroll
    for (int i = 1; i < Plan::kValues; ++i) {
      if (i == v) value = total[i], x_scale = x_scales[Plan::own_token_of(i)];
    }
    const unsigned n = n0 + Plan::row_of(v), m = Plan::token_of(v, lane % 4);
    if (n < params.n && m < params.m) store_element(params, m, n, value, x_scale);
  }
}

/// A warp's part of x as operand B.
template <class Plan>
struct DecodeRingX {
  static constexpr int kTiles = Plan::kTiles;
  static constexpr int kDotSteps = Plan::kGroup / 32;
  std::uint32_t x[kTiles][Plan::kPartBlocks][8];

  /// From column k0 on; zeros if not `busy`.
  __device__ __forceinline__ void load(const GemmParams& params, unsigned k0, bool busy) {
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const unsigned m = tile * 8 + g;
#pragma unroll
      for (int i = 0; i < Plan::kPartBlocks; ++i) {
        load_aligned_chunk(x[tile][i], params.x + m * params.x_stride + k0 + i * 128 + t * 32,
                           busy && m < params.m);
      }
    }
  }

  /// What was loaded, before it is multiplied. It is waited for here, not before a barrier above.
  __device__ __forceinline__ void permute() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < Plan::kPartBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) asm volatile("" : "+r"(x[tile][i][j])::"memory");
        permute_as_signs(x[tile][i]);
      }
    }
  }

  /// The sums of a block. `words`: of row g in the part's first block; `mantissas`: of row g.
  __device__ __forceinline__ void multiply(std::uint32_t words, std::uint32_t mantissas,
                                           std::int32_t (&sum)[Plan::kValues]) const {
    std::int32_t mantissa[2][Plan::kDots];
    load_ints(mantissa[0], mantissas);
    load_ints(mantissa[1], mantissas + 8 * Plan::kScales * 4);
    std::int32_t dot[kTiles][4];
#pragma unroll
    for (int v = 0; v < Plan::kValues; ++v) sum[v] = 0;
#pragma unroll
    for (int i = 0; i < Plan::kPartBlocks; ++i) {
      std::uint32_t signs[2][8];
      const std::uint32_t from = words ^ i * 16;
      expand_signs(ptx::load_shared_4(from), signs[0]);
      expand_signs(ptx::load_shared_4(from + 8 * Plan::kLineBytes), signs[1]);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int all = i * 4 + step;
        const std::uint32_t a[4] = {signs[0][2 * step], signs[1][2 * step], signs[0][2 * step + 1],
                                    signs[1][2 * step + 1]};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (all % kDotSteps == 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) dot[tile][j] = 0;
          }
          ptx::mma_s8_m16n8k32(dot[tile], a, x[tile][i][2 * step], x[tile][i][2 * step + 1]);
          if ((all + 1) % kDotSteps == 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              sum[tile * 4 + j] += mantissa[j / 2][all / kDotSteps] * dot[tile][j];
            }
          }
        }
      }
    }
  }
};

/// A warp that adds: the slices of the blocks in its stages. `row_of`: a block's first row;
/// `fetch`: starts to fetch a block to a stage.
template <class Plan, class RowOf, class Fetch>
__device__ __forceinline__ void add_blocks(const GemmParams& params, const DecodeRingCut& cut,
                                           const DecodeRingStage<Plan>& in, char* shared,
                                           unsigned own, unsigned adder, const RowOf& row_of,
                                           const Fetch& fetch) {
  const unsigned lane = threadIdx.x;
  const std::uint32_t base = ptx::shared_address(shared);
  ptx::wait_for_dependencies();
  float x_scales[Plan::kValues / 2];
#pragma unroll
  for (int v = 0; v < Plan::kValues; ++v) {
    const unsigned m = Plan::token_of(v, lane % 4);
    if (Plan::row_of(v) == 0) {
      x_scales[Plan::own_token_of(v)] = params.x_scales[min(m, params.m - 1)];
    }
  }
  for_own_blocks({cut.stage_bytes, cut.ring_bytes, cut.helpers}, own, adder,
                 [&](unsigned block, unsigned stage, unsigned parity) {
                   wait_for_barrier(base + stage + in.done(), parity);
                   add_block<Plan>(params, in, shared + stage, row_of(block), x_scales);
                   __syncwarp();
                   if (lane == 0 && block + cut.stages < own) fetch(block + cut.stages, stage);
                 });
}

/// The warps that multiply zero the sums of all stages; adders leave zeros.
template <class Plan>
__device__ __forceinline__ void zero_sums(const DecodeRingCut& cut, const DecodeRingStage<Plan>& in,
                                          char* shared, unsigned warp) {
  const unsigned count = in.slices * (Plan::kSumBytes / 16);
#pragma unroll 1
  for (unsigned stage = 0; stage < cut.ring_bytes; stage += cut.stage_bytes) {
    auto* sums = reinterpret_cast<uint4*>(shared + stage + in.sums());
    for (unsigned i = warp * kWarpSize + threadIdx.x; i < count;
         i += cut.multipliers() * kWarpSize) {
      sums[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

/// A warp that multiplies: its parts of all blocks, or of its set's.
template <class Plan>
__device__ __forceinline__ void multiply_blocks(const GemmParams& params, const DecodeRingCut& cut,
                                                const DecodeRingStage<Plan>& in, char* shared,
                                                unsigned own, unsigned warp) {
  const unsigned lane = threadIdx.x;
  const std::uint32_t base = ptx::shared_address(shared);
  const unsigned slices = in.slices;
  const unsigned g = lane / 4, t = lane % 4;
  const unsigned set = warp / cut.warps, own_warp = warp % cut.warps;
  const unsigned own_slice = own_warp / cut.parts, own_part = own_warp % cut.parts;
  zero_sums<Plan>(cut, in, shared, warp);
  ptx::wait_for_dependencies();
#pragma unroll 1
  for (unsigned first = 0; first < own; first += cut.phase) {
    unsigned slice = own_slice, part = own_part;
#pragma unroll 1
    for (unsigned round = 0; round < cut.rounds; ++round) {
      const bool busy = slice < slices;
      const bool last = round + 1 == cut.rounds;
      DecodeRingX<Plan> x;
      x.load(params, Plan::Windows::begin(params, slice) + part * Plan::kPartK, busy);
      if (first + round == 0) {
        ptx::named_barrier_sync(Plan::kMultipliersBegin, (cut.multipliers() + 1) * kWarpSize);
      }
      x.permute();

      // In the first stage: words of row g in the part's blocks, columns swizzled by row % 8;
      // mantissas of row g; sums.
      const std::uint32_t words = keep(base + slice * Plan::kBitsBytes + g * Plan::kLineBytes +
                                       ((part * Plan::kPartBlocks) ^ g) * 16 + t * 4);
      const std::uint32_t mantissas = keep(base + in.mantissas() + slice * Plan::kMantissaBytes +
                                           (g * Plan::kScales + part * Plan::kDots) * 4);
      const std::uint32_t sums = keep(base + in.sums() + slice * Plan::kSumBytes + lane * 4);
      std::uint32_t ready = base + in.ready();
      // Elsewhere something else would spill.
      if (Plan::kTokens <= 8 && !Plan::kHalf) ready = keep(ready);
      unsigned stage = set * cut.stage_bytes, parity = first / cut.phase & 1;
      int left = static_cast<int>(keep(min(cut.phase, own - first)) - set);
#pragma unroll 1
      for (; left > 0; left -= static_cast<int>(cut.sets)) {
        wait_for_barrier(ready + stage, parity);
        if (busy) {
          std::int32_t sum[Plan::kValues];
          x.multiply(words + stage, mantissas + stage, sum);
#pragma unroll
          for (int v = 0; v < Plan::kValues; ++v) {
            ptx::add_shared(sums + stage + v * kWarpSize * 4, sum[v]);
          }
        }
        if (last) {
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(ready + (in.done() - in.ready()) + stage);
        }
        stage += cut.set_bytes;
        if (stage >= cut.ring_bytes) stage -= cut.ring_bytes, parity ^= 1;
      }
      // The slice's next part, or the next pass, by as many slices as a pass has.
      part += cut.parts;
      if (part >= Plan::kSliceParts) part = own_part, slice += cut.warps / cut.parts;
    }
  }
}
#endif

/// Grid: any number of CTAs up to cut.blocks, for which the plan was made; CTA i has blocks i,
/// i + gridDim.x, ... Block: (32, cut.warps · cut.sets + 2 · cut.helpers). Dynamic shared memory:
/// cut.ring_bytes. See weight_tile.cuh for `bits_maps`.
template <int kTokens, int kGroup, bool kHalf>
__global__ void __launch_bounds__(DecodeRing<kTokens, kGroup, kHalf>::kMaxThreads, 1)
    decode_ring(const __grid_constant__ GemmParams params,
                const __grid_constant__ BitsMaps<kHalf> bits_maps,
                const __grid_constant__ DecodeRingCut cut) {
#if __CUDA_ARCH__ >= 900
  using Plan = DecodeRing<kTokens, kGroup, kHalf>;
  extern __shared__ __align__(1024) char shared[];
  const unsigned lane = threadIdx.x;
  const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.y, 0);
  const unsigned multipliers = cut.multipliers();
  const unsigned slices = params.slices;
  const unsigned own = (cut.blocks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const std::uint32_t base = ptx::shared_address(shared);
  const DecodeRingStage<Plan> in{slices};
  const RingFill fill{cut.early, min(cut.stages, own)};  // not all CTAs have as many blocks
  const auto row_of = [&](unsigned block) {
    return (blockIdx.x + block * gridDim.x) * Plan::kRows;
  };
  const auto fetch = [&](unsigned block, unsigned stage) {
    fetch_ring_block<Plan>(params, bits_maps, in, shared, stage, row_of(block));
  };

  if (warp < multipliers) {
    multiply_blocks<Plan>(params, cut, in, shared, own, warp);
    return;
  }
  const unsigned helper = warp - multipliers;
  const unsigned helper_threads = 2 * cut.helpers * kWarpSize;
  if (helper == 0) {
    if (lane == 0) {
      init_ring_barriers(in, base, cut.stage_bytes, cut.ring_bytes, in.converters(cut.helpers),
                         cut.warps);
    }
    __syncwarp();
    ptx::named_barrier_arrive(Plan::kHelpersBegin, helper_threads);
    ptx::named_barrier_arrive(Plan::kMultipliersBegin, (multipliers + 1) * kWarpSize);
#pragma unroll 1
    for (unsigned slot = 0; slot < min(cut.early, fill.stages); ++slot) {
      if (lane == 0) fetch(slot, slot * cut.stage_bytes);
    }
    ptx::launch_dependents();
    __syncwarp();
  } else {
    ptx::named_barrier_sync(Plan::kHelpersBegin, helper_threads);
  }
  if (helper >= cut.helpers) {
    add_blocks<Plan>(params, cut, in, shared, own, helper - cut.helpers, row_of, fetch);
  } else {
    convert_blocks<Plan>(params, in, shared, own, helper,
                         {cut.stage_bytes, cut.ring_bytes, cut.helpers}, fill, fetch);
  }
#endif
}

}  // namespace kernels
}  // namespace binary_gemm
