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
/// A CTA is persistent and computes tiles of 64 · kRowGroups rows by kTokens tokens. For small
/// tiles, where a warpgroup would mostly wait for itself, kTurns warpgroups take the slices of the
/// same 64 rows by turns; they add to the totals in order. Of the warpgroup after those that
/// multiply
///   warp 0 drives the copy engine: x by stages of a few blocks of 128 of K, words by slices;
///   one warp, or two, turn scales into mantissas and units, a slice ahead;
///   the rest write finished tiles while the next is multiplied.
/// They meet by rings of stages, of which each turn has its own.
///
/// A warpgroup that multiplies goes through a slice by dots: start the products of a dot; load the
/// next block's words and this dot's mantissas; wait for the products; expand the words and add up,
/// interleaved. Two things keep the tensor cores busy meanwhile. While a slice is finished (sums
/// rounded and added to the totals; after the last one, outputs scaled, rounded and staged) the
/// first dot of the next slice is multiplied: K = 17408 at M = 2048 328 -> 302 us on an H200. And
/// warpgroups hide each other's sums; one that is alone in its CTA has two dots instead.
///
/// Fragments, of warp w of a warpgroup: lane (g, t) = (lane / 4, lane % 4) has
///   of A (T32,V4) -> (M16,K32): word t of rows 16w + g and 16w + g + 8, expanded;
///   of C (T32,V4) -> (M16,N8): tokens 2t and 2t + 1 of those rows, for every 8 tokens.

#include <cuda.h>

#include <type_traits>

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
template <int kRowGroups_, int kTurns_, int kTokens_, int kGroup_>
struct GemmWgmma {
  static constexpr int kRowGroups = kRowGroups_;  ///< of 64 rows
  static constexpr int kTurns = kTurns_;          ///< warpgroups of the same rows
  static constexpr int kConsumers = kRowGroups * kTurns;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroup = kGroup_;
  static constexpr int kRows = 64 * kRowGroups;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlock = 128;  ///< of K: 4 steps of wgmma
  static constexpr int kBlocks = static_cast<int>(kSliceK) / kBlock;
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;

  // Stages of a turn.
  static constexpr int kWordStages = 2;
  static constexpr int kScaleStages = 3;
  /// Of the last warpgroup's warps one drives the copy engine; others convert scales, each those of
  /// its turns, and the rest write tiles. Converters fetch one slice ahead.
  static constexpr int kConverters = kTurns > 1 ? 2 : 1;
  static constexpr int kWriters = 3 - kConverters;

  /// CTAs of a multiprocessor.
  static constexpr int kResident = kConsumers == 1 ? (kTokens <= 32 ? 3 : 2) : 1;
  /// Registers a thread: at launch, then of the last warpgroup and of the others (setmaxnreg).
  static constexpr int kFileRegisters = 65536;  ///< of a multiprocessor, given out by 8 a thread
  static constexpr int kLaunchRegisters = kFileRegisters / (kThreads * kResident) / 8 * 8;
  static constexpr int kProducerRegisters = kResident == 3 ? 48 : kScales > 16 ? 64 : 56;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;

  /// What a thread needs beside dots, sums, totals and operand A: more than this spills.
  static constexpr int kOtherRegisters = 34;
  /// Two dots, one added up while the other is multiplied: where a warpgroup is alone in its CTA
  /// and there are registers for them, sums, and two blocks' operands A. Others hide each other's
  /// sums: two dots are no faster there, and up to 8% slower.
  static constexpr bool kTwoDots = kConsumers == 1 && (kGroup == 64 || kGroup == 128) &&
                                   kTokens >= 48 &&
                                   3 * kTokens / 2 + 32 + kOtherRegisters <= kConsumerRegisters;
  /// Of a thread's kTokens / 2 totals those in registers, as many as fit. Warpgroups that take
  /// turns share theirs.
  static constexpr int kFreeRegisters =
      kConsumerRegisters - (kTwoDots ? 3 * kTokens / 2 + 32 : kTokens + 16) - kOtherRegisters;
  static constexpr int kRegisterTotals = kTurns > 1 || kFreeRegisters < 0 ? 0
                                         : kFreeRegisters < kTokens / 2   ? kFreeRegisters / 4 * 4
                                                                          : kTokens / 2;
  /// Whether a slice's first dot is multiplied while the slice before is finished, if there are
  /// registers for it.
  static constexpr bool kStartsAhead = kTokens <= 128;

  // Bytes of a stage.
  /// A stage of x has several blocks if they are small: one thread issues a copy in about 200
  /// clocks.
  static constexpr int kStageBlocks = kTokens <= 16 ? 8 : kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;
  static constexpr int kBlockBytes = kTokens * kBlock;
  static constexpr int kXBytes = kStageBlocks * kBlockBytes;
  static constexpr int kWordBytes = kRows * static_cast<int>(kSliceK) / 8;
  static constexpr int kMantissaBytes = kRows * kScales * 2;  ///< [row][scale]
  static constexpr int kUnitBytes = kRows * 4 + 16;  ///< [row], and which row groups are wide
  /// Totals of a warpgroup: while it adds up, four a thread; when done, [token][row], padded so
  /// that lanes (g, t) hit different banks.
  static constexpr int kTotalStride = 64 + 4;
  static constexpr int kTotalBytes = kTokens * kTotalStride * 4;
  static constexpr int kStagedStride = 64 * 2;  ///< bytes of a token's rounded outputs

  /// Of a multiprocessor's 228 KiB; the system takes one for each CTA, and the barriers less than
  /// one.
  static constexpr int kSharedLimit = 228 * 1024 / kResident - 1024;
  static constexpr int kFixedBytes =
      kTurns * (kWordStages * kWordBytes + kScaleStages * (kMantissaBytes + kUnitBytes)) +
      kRowGroups * kTotalBytes + 1024;
  /// A slice goes round the ring a whole number of times, so that a block's place is a constant.
  static constexpr int kXStagesFitting = (kSharedLimit - kFixedBytes) / (kTurns * kXBytes);
  static constexpr int kSliceStages = kBlocks / kStageBlocks;
  static constexpr int kXStages = kXStagesFitting >= 2 * kSliceStages && kSliceStages < 4
                                      ? 2 * kSliceStages
                                  : kXStagesFitting >= kSliceStages ? kSliceStages
                                  : kXStagesFitting >= 4            ? 4
                                                                    : 2;
  static constexpr int kRounds =
      kXStages < kSliceStages ? kSliceStages / kXStages : 1;  ///< a slice
  static constexpr int kRoundStages = kSliceStages / kRounds;
  static_assert(kXStagesFitting >= kXStages, "too little shared memory");

  // Offsets: what the swizzle wants aligned to 1024 bytes comes first. Rings are [turn][stage].
  static constexpr int kXOffset = 0;
  static constexpr int kWordOffset = kXOffset + kTurns * kXStages * kXBytes;
  static constexpr int kMantissaOffset = kWordOffset + kTurns * kWordStages * kWordBytes;
  static constexpr int kUnitOffset = kMantissaOffset + kTurns * kScaleStages * kMantissaBytes;
  static constexpr int kBarrierOffset = kUnitOffset + kTurns * kScaleStages * kUnitBytes;
  static constexpr int kTurnBarriers = 2 * (kXStages + kWordStages + kScaleStages);
  static constexpr int kBarriers = kTurns * kTurnBarriers + 2;
  static constexpr int kTotalOffset = (kBarrierOffset + kBarriers * 8 + 127) / 128 * 128;
  static constexpr int kSharedBytes = kTotalOffset + kRowGroups * kTotalBytes;
};

/// A ring of stages with a full and an empty mbarrier each.
template <int kStages>
struct Ring {
  std::uint32_t full = 0;   ///< address of the first full barrier
  std::uint32_t empty = 0;  ///< and of the first empty one
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

/// The rings of a turn.
template <class Plan>
struct GemmWgmmaRings {
  Ring<Plan::kXStages> x;
  Ring<Plan::kWordStages> words;
  Ring<Plan::kScaleStages> scales;

  __device__ GemmWgmmaRings(std::uint32_t barriers, unsigned turn) {
    barriers += turn * Plan::kTurnBarriers * 8;
    x.full = barriers, x.empty = x.full + Plan::kXStages * 8;
    words.full = x.empty + Plan::kXStages * 8, words.empty = words.full + Plan::kWordStages * 8;
    scales.full = words.empty + Plan::kWordStages * 8;
    scales.empty = scales.full + Plan::kScaleStages * 8;
  }
};

#if __CUDA_ARCH_FEAT_SM90_ALL
/// Converter `warp` turns scales of the CTA's tiles into mantissas and units. They arrive by
/// cp.async where the mantissas will be. A turn has one converter, as its ring is waited for in
/// order.
template <class Plan>
__device__ inline void convert_scales(const GemmParams& params, char* shared,
                                      std::uint32_t barriers, unsigned tiles, unsigned row_tiles,
                                      unsigned warp) {
  constexpr int kRowBytes = Plan::kScales * 2;
  const unsigned lane = threadIdx.x % kWarpSize;
  const bool aligned = scales_are_aligned<kRowBytes>(params.scales, params.scales_stride);
  // Walks over the slices of the tiles, and over the stages of their turns.
  struct Walk {
    unsigned tile, slice, turn, parities, stages;  // a bit or a byte of the last two for each turn

    __device__ unsigned stage() const { return stages >> 8 * turn & 0xff; }
    __device__ unsigned parity() const { return parities >> turn & 1; }
    __device__ void advance(unsigned slices) {
      if (stage() + 1 == Plan::kScaleStages) {
        stages &= ~(0xffu << 8 * turn), parities ^= 1u << turn;
      } else {
        stages += 1u << 8 * turn;
      }
      if (++turn == Plan::kTurns) turn = 0;
      if (++slice == slices) slice = 0, turn = 0, tile += gridDim.x;
    }
  };
  const auto place = [](const Walk& walk) {
    return static_cast<int>(walk.turn * Plan::kScaleStages + walk.stage());
  };
  const auto fetch = [&](const Walk& walk) {
    char* target = shared + Plan::kMantissaOffset + place(walk) * Plan::kMantissaBytes;
    const unsigned first = walk.slice * Plan::kScales;
    const unsigned count = params.k / Plan::kGroup - first;
#pragma unroll 1
    for (unsigned row = lane; row < Plan::kRows; row += kWarpSize) {
      // Rows past N repeat the last one; they are not stored.
      const unsigned n = min(walk.tile % row_tiles * Plan::kRows + row, params.n - 1);
      const __half* source = params.scales + std::uint64_t{n} * params.scales_stride + first;
      char* own = target + row * kRowBytes;
      fetch_row_scales<Plan::kScales>(own, source, count, aligned);
    }
  };
  // To the converter's next slice, from `walk` itself on.
  const auto find = [&](Walk& walk) {
    while (walk.tile < tiles && walk.turn % Plan::kConverters != warp) walk.advance(params.slices);
  };
  const auto fetch_next = [&](const Walk& walk) {
    if (walk.tile < tiles) {
      const GemmWgmmaRings<Plan> rings(barriers, walk.turn);
      wait_for_barrier(rings.scales.empty + walk.stage() * 8, walk.parity() ^ 1);
      fetch(walk);
    }
    ptx::cp_async_commit();  // of nothing at the end: the count of groups stays right
  };
  Walk done{blockIdx.x, 0, 0, 0, 0};
  find(done);
  Walk ahead = done;
  fetch_next(ahead);
#pragma unroll 1
  for (; done.tile < tiles; done = ahead) {
    ahead.advance(params.slices);
    find(ahead);
    fetch_next(ahead);
    ptx::cp_async_wait<1>();
    char* mantissas = shared + Plan::kMantissaOffset + place(done) * Plan::kMantissaBytes;
    float* units =
        reinterpret_cast<float*>(shared + Plan::kUnitOffset + place(done) * Plan::kUnitBytes);
    unsigned wide_groups = 0;
#pragma unroll 1
    for (unsigned row = lane; row < Plan::kRows; row += kWarpSize) {
      units[row] = convert_row_scales<Plan::kScales>(mantissas + row * kRowBytes);
      if (units[row] == 0) wide_groups |= 1u << row / 64;
    }
    wide_groups = __reduce_or_sync(0xffffffffu, wide_groups);
    __syncwarp();
    if (lane == 0) {
      reinterpret_cast<unsigned*>(units)[Plan::kRows] = wide_groups;
      ptx::mbarrier_arrive(GemmWgmmaRings<Plan>(barriers, done.turn).scales.full +
                           done.stage() * 8);
    }
  }
}

/// Puts a warpgroup's C fragment in shared memory as [token][row].
template <class Plan, int kValues>
__device__ inline void store_fragment(char* to, const float (&value)[kValues]) {
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  float* out = reinterpret_cast<float*>(to) + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const unsigned token = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    out[token * Plan::kTotalStride + (i % 4 < 2 ? 0 : 8)] = value[i];
  }
}

/// Whether 64 rows of a token are written as vectors of 16 bytes. A residual is added to unrounded
/// outputs by those who write them.
__device__ inline bool stores_vectors(const GemmParams& params) {
  return params.residual == nullptr && params.y_type != DataType::kFloat32 &&
         params.y_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(params.y) % 16 == 0;
}

/// Brings scales and biases to the L1 cache a slice before stage_outputs wants them.
template <class Plan>
__device__ inline void touch_epilogue(const GemmParams& params, unsigned n0, unsigned m0) {
  constexpr unsigned kSector = 8;  // floats
  const unsigned first = threadIdx.x % kWarpSize * kSector;
  if (first < Plan::kTokens) ptx::touch(params.x_scales + min(m0 + first, params.m - 1));
  if (params.bias != nullptr && first < 64) ptx::touch(params.bias + min(n0 + first, params.n - 1));
}

/// Scales, biases and rounds a warpgroup's totals, the C fragment `value`, and puts them in shared
/// memory as [token][row] of 2 bytes, where 16-byte columns of a token are swizzled by token % 8.
template <class Plan, int kValues>
__device__ inline void stage_outputs(const GemmParams& params, char* staged,
                                     const float (&value)[kValues], unsigned n0, unsigned m0) {
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const unsigned g = lane / 4, t = lane % 4;
  float scales[kValues / 2];
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    scales[i] = params.x_scales[min(m0 + i / 2 * 8 + 2 * t + i % 2, params.m - 1)];
  }
  const unsigned n = n0 + warp * 16 + g;
  const bool has_bias = params.bias != nullptr;
  const float bias0 = has_bias ? params.bias[min(n, params.n - 1)] : 0.0f;
  const float bias1 = has_bias ? params.bias[min(n + 8, params.n - 1)] : 0.0f;
  const auto finish = [&](int i) {
    const float scale = scales[i / 4 * 2 + i % 2];
    return has_bias ? __fmaf_rn(value[i], scale, i % 4 < 2 ? bias0 : bias1)
                    : __fmul_rn(value[i], scale);
  };
  // Lane i gives where column (token) i % 8 of matrix i / 8 goes: rows, rows + 8, of two blocks of
  // 8 tokens.
  const unsigned column = (2 * warp + lane / 8 % 2) ^ lane % 8;
  const std::uint32_t address =
      ptx::shared_address(staged) + (lane / 16 * 8 + lane % 8) * Plan::kStagedStride + column * 16;
  ptx::named_barrier_sync(1 + threadIdx.x / 128, 128);  // all have read their totals
#pragma unroll
  for (int i = 0; i < kValues; i += 8) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = round_pair(params.y_type, finish(i + 2 * j), finish(i + 2 * j + 1));
    }
    ptx::stmatrix_x4_transposed(address + i / 8 * 16 * Plan::kStagedStride, pairs);
  }
}

/// Writes the outputs of 64 rows by kTokens tokens from shared memory; `warps` warps take turns.
/// `packed`: they are stage_outputs'; else they are unscaled totals as [token][row].
template <class Plan>
__device__ inline void store_part(const GemmParams& params, const char* from, bool packed,
                                  unsigned n0, unsigned m0, unsigned warp, unsigned warps) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned tokens = min(unsigned{Plan::kTokens}, params.m - m0);
  if (!packed) {
#pragma unroll 1
    for (unsigned token = warp; token < tokens; token += warps) {
      const float2 total =
          *reinterpret_cast<const float2*>(from + (token * Plan::kTotalStride + 2 * lane) * 4);
      store_pair(params, m0 + token, n0 + 2 * lane, total, params.x_scales[m0 + token]);
    }
    return;
  }
  // Eight lanes write a token's 64 rows, a warp four tokens.
  const unsigned n = n0 + lane % 8 * 8;
  if (n >= params.n) return;
#pragma unroll 2
  for (unsigned token = warp * 4 + lane / 8; token < tokens; token += warps * 4) {
    const uint4 eight = *reinterpret_cast<const uint4*>(from + token * Plan::kStagedStride +
                                                        (lane % 8 ^ token % 8) * 16);
    auto* y = static_cast<std::uint16_t*>(params.y) + (m0 + token) * params.y_stride + n;
    if (n + 8 <= params.n) {
      *reinterpret_cast<uint4*>(y) = eight;
    } else {
      const std::uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (unsigned i = 0; i < 7; ++i) {
        if (n + i < params.n) y[i] = static_cast<std::uint16_t>(pairs[i / 2] >> 16 * (i % 2));
      }
    }
  }
}

#endif

/// Grid: at most kResident CTAs a multiprocessor. Block: GemmWgmma::kThreads. Dynamic shared
/// memory: at least GemmWgmma::kSharedBytes. `x_map`: params.x, in the order of expand_signs, as
/// (byte, token, block of 128) in boxes of (128, kTokens, kStageBlocks); `bits_map`: words as
/// (word, row) in boxes of (32, kRows); both with the 128-byte swizzle and zeros out of bounds.
template <int kRowGroups, int kTurns, int kTokens, int kGroup>
__global__ void __launch_bounds__(GemmWgmma<kRowGroups, kTurns, kTokens, kGroup>::kThreads,
                                  GemmWgmma<kRowGroups, kTurns, kTokens, kGroup>::kResident)
    gemm_wgmma(const __grid_constant__ GemmParams params, const __grid_constant__ CUtensorMap x_map,
               const __grid_constant__ CUtensorMap bits_map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Plan = GemmWgmma<kRowGroups, kTurns, kTokens, kGroup>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const unsigned thread = threadIdx.x;
  const unsigned lane = thread % kWarpSize;
  const unsigned warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);
  const unsigned warp = __shfl_sync(0xffffffffu, thread / kWarpSize % 4, 0);  // of the warpgroup

  const std::uint32_t barriers = base + Plan::kBarrierOffset;
  const std::uint32_t total_barriers = barriers + kTurns * Plan::kTurnBarriers * 8;
  Ring<1> total_ring{total_barriers, total_barriers + 8};

  if (thread == 0) {
    constexpr unsigned kWarpsOfTurn = 4 * kRowGroups;
    for (unsigned turn = 0; turn < kTurns; ++turn) {
      const auto init = [&](std::uint32_t full, std::uint32_t empty, int stages) {
        for (int i = 0; i < stages; ++i) {
          ptx::mbarrier_init(full + i * 8, 1);
          ptx::mbarrier_init(empty + i * 8, kWarpsOfTurn);
        }
      };
      const GemmWgmmaRings<Plan> rings(barriers, turn);
      init(rings.x.full, rings.x.empty, Plan::kXStages);
      init(rings.words.full, rings.words.empty, Plan::kWordStages);
      init(rings.scales.full, rings.scales.empty, Plan::kScaleStages);
    }
    ptx::mbarrier_init(total_ring.full, kWarpsOfTurn);
    ptx::mbarrier_init(total_ring.empty, Plan::kWriters);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::launch_dependents();

  const unsigned row_tiles = (params.n + Plan::kRows - 1) / Plan::kRows;
  const unsigned tiles = row_tiles * ((params.m + kTokens - 1) / kTokens);
  const bool packed = stores_vectors(params);

  if (warpgroup == Plan::kConsumers) {
    ptx::register_decrease<Plan::kProducerRegisters>();
    if (warp == 0) {
      if (lane != 0) return;
      ptx::prefetch_tensor_map(&bits_map);
      ptx::prefetch_tensor_map(&x_map);
      unsigned word_stage[kTurns] = {}, word_parity[kTurns] = {};
      unsigned x_stage[kTurns] = {}, x_parity[kTurns] = {};
      for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const unsigned n0 = tile % row_tiles * Plan::kRows;
        const unsigned m0 = tile / row_tiles * kTokens;
        for (unsigned first = 0; first < params.slices; first += kTurns) {
#pragma unroll
          for (unsigned turn = 0; turn < kTurns; ++turn) {
            if (first + turn >= params.slices) break;
            const GemmWgmmaRings<Plan> rings(barriers, turn);
            const std::uint32_t full = rings.words.full + word_stage[turn] * 8;
            wait_for_barrier(rings.words.empty + word_stage[turn] * 8, word_parity[turn] ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, Plan::kWordBytes);
            ptx::tensor_copy_2d(
                base + Plan::kWordOffset +
                    (turn * Plan::kWordStages + word_stage[turn]) * Plan::kWordBytes,
                &bits_map, (first + turn) * 32, n0, full);
            if (++word_stage[turn] == Plan::kWordStages)
              word_stage[turn] = 0, word_parity[turn] ^= 1;
          }
          // After the first words; it does not wait again. Past K both words and x are zeros.
          ptx::wait_for_dependencies();
#pragma unroll 1
          for (unsigned block = 0; block < Plan::kBlocks; block += Plan::kStageBlocks) {
#pragma unroll
            for (unsigned turn = 0; turn < kTurns; ++turn) {
              if (first + turn >= params.slices) break;
              const GemmWgmmaRings<Plan> rings(barriers, turn);
              const std::uint32_t full = rings.x.full + x_stage[turn] * 8;
              wait_for_barrier(rings.x.empty + x_stage[turn] * 8, x_parity[turn] ^ 1);
              ptx::mbarrier_arrive_expect_tx(full, Plan::kXBytes);
              ptx::tensor_copy_3d(
                  base + Plan::kXOffset + (turn * Plan::kXStages + x_stage[turn]) * Plan::kXBytes,
                  &x_map, 0, m0, (first + turn) * Plan::kBlocks + block, full);
              if (++x_stage[turn] == Plan::kXStages) x_stage[turn] = 0, x_parity[turn] ^= 1;
            }
          }
        }
      }
    } else if (warp <= Plan::kConverters) {
      convert_scales<Plan>(params, shared, barriers, tiles, row_tiles, warp - 1);
    } else {
      // All tiles but the last.
      ptx::wait_for_dependencies();
      for (unsigned tile = blockIdx.x; tile + gridDim.x < tiles; tile += gridDim.x) {
        total_ring.wait_full();
#pragma unroll 1
        for (int part = 0; part < kRowGroups; ++part) {
          store_part<Plan>(params, shared + Plan::kTotalOffset + part * Plan::kTotalBytes, packed,
                           tile % row_tiles * Plan::kRows + part * 64, tile / row_tiles * kTokens,
                           warp - 1 - Plan::kConverters, Plan::kWriters);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(total_ring.empty_barrier());
        total_ring.advance();
      }
    }
    return;
  }

  ptx::register_increase<Plan::kConsumerRegisters>();
  const unsigned g = lane / 4, t = lane % 4;
  const unsigned part = warpgroup / kTurns, turn = warpgroup % kTurns;  // rows; and which slices
  const unsigned row0 = part * 64 + warp * 16 + g;                      // of the tile; and row0 + 8
  char* totals = shared + Plan::kTotalOffset + part * Plan::kTotalBytes;
  constexpr int kValues = kTokens / 2;  // a thread: C fragment of 64 x kTokens
  GemmWgmmaRings<Plan> rings(barriers, turn);
  const std::uint64_t x_stages =
      ptx::descriptor_128b(base + Plan::kXOffset + turn * Plan::kXStages * Plan::kXBytes);

  // The lane's words of the next block, for rows row0 and row0 + 8: loaded a block ahead. A block's
  // column is swizzled by row % 8 = g.
  const unsigned lane_offset = Plan::kWordOffset + turn * Plan::kWordStages * Plan::kWordBytes +
                               row0 * 128 + g * 16 + lane_word_offset<kGroup>(t);
  std::uint32_t next_words[2];
  const auto load_words = [&](unsigned block) {
    const char* from = shared + (lane_offset + rings.words.stage * Plan::kWordBytes ^ block * 16);
    next_words[0] = lane_word<kGroup>(from, t);
    next_words[1] = lane_word<kGroup>(from + 8 * 128, t);
  };
  constexpr int kSets = Plan::kTwoDots ? 2 : 1;
  std::uint32_t signs[kSets][2][8];  // operand A of a block
  const auto expand = [&](std::uint32_t(&to)[2][8]) {
    expand_lane_word<kGroup>(next_words[0], to[0]);
    expand_lane_word<kGroup>(next_words[1], to[1]);
  };

  constexpr int kDotBlocks = kGroup > 128 ? kGroup / 128 : 1;  // blocks of a dot
  constexpr int kDots = kGroup < 128 ? 128 / kGroup : 1;       // of a block
  constexpr int kSteps = 4 / kDots;                            // of a dot in a block
  std::int32_t sum[kValues], dots[kSets][kValues];
  std::int32_t(&dot)[kValues] = dots[0];
  // Starts the products of a dot, or of its part in a block. `x`: of the block, `a`: expanded.
  const auto start = [&](std::int32_t(&to)[kValues], const std::uint32_t(&a)[2][8], std::uint64_t x,
                         int part, bool adds) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = part * kSteps + i;
      const std::uint32_t own[4] = {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1],
                                    a[1][2 * step + 1]};
      ptx::WgmmaS8<kTokens>::run(to, own, ptx::descriptor_at(x, 32 * step), i > 0 || adds);
    }
    ptx::wgmma_commit();
  };

  // What goes with a slice: its rows' mantissas, those of the first dot, units, and whether a row
  // of the warpgroup is wide; the same for its warps, which multiply together.
  const std::int16_t* mantissas = nullptr;
  std::int32_t first_mantissas[2] = {};
  const float* units = nullptr;
  bool any_wide = false;
  const auto take_scales = [&] {
    rings.scales.wait_full();
    const unsigned stage = turn * Plan::kScaleStages + rings.scales.stage;
    mantissas = reinterpret_cast<const std::int16_t*>(shared + Plan::kMantissaOffset +
                                                      stage * Plan::kMantissaBytes) +
                row0 * Plan::kScales;
    first_mantissas[0] = mantissas[0], first_mantissas[1] = mantissas[8 * Plan::kScales];
    units = reinterpret_cast<const float*>(shared + Plan::kUnitOffset + stage * Plan::kUnitBytes);
    any_wide = (reinterpret_cast<const unsigned*>(units)[Plan::kRows] >> part & 1) != 0;
  };

  unsigned x_parity = 0;
  int x_first = 0;  // stage of the next round
  // Starts the first dot of a slice, while the slice before is finished. No product is in flight at
  // the end of a loop, nor where branches meet: ptxas would wait for each (C7514).
  const auto start_slice = [&](bool any) {
    if (any) wait_for_barrier(rings.x.full + x_first * 8, x_parity);
    start(dot, signs[0], ptx::descriptor_at(x_stages, x_first * Plan::kXBytes), 0, false);
    if (any && (kDots == 1 || Plan::kTwoDots)) load_words(1);
  };
  const bool any = blockIdx.x < tiles && turn < params.slices;
  if (any) {
    rings.words.wait_full();
    load_words(0);
    expand(signs[0]);
  }
  ptx::wait_for_dependencies();
  if (any) {
    start_slice(true);
    take_scales();
    ptx::wgmma_wait<0>(dot);
  }
  // Barriers of the warpgroups that add up the same rows by turns; those before it are of one each.
  const auto turn_barrier = [](unsigned part, unsigned turn) {
    return 1 + Plan::kConsumers + part * kTurns + turn;
  };
  float total[kValues];  // the first are kept here, the others in shared memory
#pragma unroll
  for (int v = 0; v < Plan::kRegisterTotals; ++v) total[v] = 0;

  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const bool last_tile = tile + gridDim.x >= tiles;
#pragma unroll 1
    for (unsigned slice = turn; slice < params.slices; slice += kTurns) {
      const bool last = slice + 1 == params.slices;
      const bool more = !last_tile || slice + kTurns < params.slices;  // for this warpgroup
      const std::uint32_t words_empty = rings.words.empty_barrier();
      if (last) {
        touch_epilogue<Plan>(params, tile % row_tiles * Plan::kRows + part * 64,
                             tile / row_tiles * kTokens);
      }

      // All of the slice; its first dot is there. `wide` has a copy of its own: a branch for each
      // block would cost the allocation of registers dearly.
      const auto multiply = [&](auto wide) {
        constexpr bool kWide = decltype(wide)::value;
        constexpr int kRoundBlocks = Plan::kRoundStages * Plan::kStageBlocks;
        static_assert(kRoundBlocks % kDotBlocks == 0, "a round ends with a dot");
        bool wide_row[2] = {};
        if constexpr (kWide) wide_row[0] = units[row0] == 0, wide_row[1] = units[row0 + 8] == 0;
        // Without a loop over rounds, the first dot sets the sum.
        constexpr bool kOneRound = Plan::kRounds == 1 && !kWide;
        if constexpr (!kOneRound) {
#pragma unroll
          for (int v = 0; v < kValues; ++v) sum[v] = 0;
        }
#pragma unroll 1
        for (unsigned first = 0; first < Plan::kBlocks; first += kRoundBlocks) {
#pragma unroll(kWide ? 1 : kRoundBlocks)
          for (int block = 0; block < kRoundBlocks; ++block) {
            const int stage = x_first + block / Plan::kStageBlocks;
            const std::uint64_t x = ptx::descriptor_at(
                x_stages, stage * Plan::kXBytes + block % Plan::kStageBlocks * Plan::kBlockBytes);
            const bool ends = block + 1 == kRoundBlocks && first + kRoundBlocks == Plan::kBlocks;
#pragma unroll
            for (int part = 0; part < kDots; ++part) {
              const bool whole = (block + 1) % kDotBlocks == 0;  // or the dot goes on
              const int index = block / kDotBlocks * kDots + part;
              std::int32_t m[2] = {first_mantissas[0], first_mantissas[1]};
              if (first + block + part > 0) {
                if (part == 0 && block % Plan::kStageBlocks == 0) {
                  wait_for_barrier(rings.x.full + stage * 8, x_parity);
                }
                start(dot, signs[0], x, part, block % kDotBlocks > 0);
                // While it multiplies: what comes next from shared memory.
                if (whole) m[0] = mantissas[index], m[1] = mantissas[index + 8 * Plan::kScales];
                if (part == kDots - 1) {
                  if (!ends) {
                    load_words(first + block + 1);
                  } else if (more) {
                    rings.words.advance();
                    rings.words.wait_full();
                    load_words(0);
                  }
                }
                ptx::wgmma_wait<0>(dot);
              }
              if (part == kDots - 1) {
                if ((block + 1) % Plan::kStageBlocks == 0 && lane == 0) {
                  ptx::mbarrier_arrive(rings.x.empty + stage * 8);
                }
                expand(signs[0]);
              }
              if (!whole) continue;
              if constexpr (kWide) {
                add_with_wide<0>(sum, dot, m[0], wide_row[0]);
                add_with_wide<1>(sum, dot, m[1], wide_row[1]);
              } else {
#pragma unroll
                for (int v = 0; v < kValues; ++v) {
                  sum[v] = m[v % 4 / 2] * dot[v] + (kOneRound && index == 0 ? 0 : sum[v]);
                }
              }
            }
          }
          if constexpr (Plan::kXStages > Plan::kRoundStages) x_first += Plan::kRoundStages;
          if (x_first == Plan::kXStages || Plan::kXStages == Plan::kRoundStages) {
            x_first = 0, x_parity ^= 1;
          }
          mantissas += kRoundBlocks * kDots / kDotBlocks;
        }
        if constexpr (kWide) {  // floats, all of them
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            if (!wide_row[v % 4 / 2]) sum[v] = __float_as_int(static_cast<float>(sum[v]));
          }
        }
      };
      // The same of a narrow slice with two dots, all unrolled: a piece is a dot's part in a block,
      // and the next one multiplies while one is added up. The last dot is left to be added, times
      // last_mantissas.
      std::int32_t last_mantissas[2] = {};
      [[maybe_unused]] const auto multiply_overlapped = [&](auto& both) {
        constexpr int kPieces = Plan::kBlocks * kDots;  // parts of dots in blocks
        const int slice_first = x_first;
        const unsigned slice_parity = x_parity;
        const auto stage_of = [&](int block) {
          const int stage = block / Plan::kStageBlocks;
          return Plan::kRounds > 1 ? stage % Plan::kXStages : slice_first + stage;
        };
        // Starts a piece in the dot that is free; after the last one, all but that.
        const auto start_piece = [&](int piece) {
          const int block = piece / kDots, part = piece % kDots;
          if (part == 0) {
            expand(signs[block % 2]);
            if (block + 1 < Plan::kBlocks) {
              load_words(block + 1);
            } else if (block + 1 == Plan::kBlocks && more) {
              rings.words.advance();
              rings.words.wait_full();
              load_words(0);
            }
          }
          if (piece == kPieces) {
            if constexpr (Plan::kXStages > Plan::kSliceStages) x_first += Plan::kSliceStages;
            if (x_first == Plan::kXStages || Plan::kXStages == Plan::kSliceStages) {
              x_first = 0, x_parity ^= 1;
            }
            x_parity ^= Plan::kRounds > 1 ? Plan::kRounds & 1 : 0;
            return;
          }
          const int stage = stage_of(block);
          if (part == 0 && block % Plan::kStageBlocks == 0) {
            const int round = block / Plan::kStageBlocks / Plan::kXStages;
            wait_for_barrier(rings.x.full + stage * 8,
                             slice_parity ^ (Plan::kRounds > 1 ? round & 1 : 0));
          }
          const std::uint64_t x = ptx::descriptor_at(
              x_stages, stage * Plan::kXBytes + block % Plan::kStageBlocks * Plan::kBlockBytes);
          start(both[piece / kDotBlocks % 2], signs[block % 2], x, part, block % kDotBlocks > 0);
        };
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int block = piece / kDots, index = piece / kDotBlocks;
          const bool whole = (block + 1) % kDotBlocks == 0;
          std::int32_t(&own)[kValues] = both[index % 2];
          start_piece(piece + 1);
          std::int32_t m[2] = {};
          if (piece == 0) {
            m[0] = first_mantissas[0], m[1] = first_mantissas[1];
          } else if (whole) {
            m[0] = mantissas[index], m[1] = mantissas[index + 8 * Plan::kScales];
          }
          if (piece + 1 == kPieces) {
            ptx::wgmma_wait<0>(own);
          } else if (whole && piece > 0) {
            ptx::wgmma_wait<1>(own);
          } else if (piece > 0) {
            ptx::wgmma_wait<1>();
          }
          if ((piece + 1) % kDots == 0 && (block + 1) % Plan::kStageBlocks == 0 && lane == 0) {
            ptx::mbarrier_arrive(rings.x.empty + stage_of(block) * 8);
          }
          if (piece + 1 == kPieces) {
            last_mantissas[0] = m[0], last_mantissas[1] = m[1];
          } else if (whole) {
#pragma unroll
            for (int v = 0; v < kValues; ++v) {
              sum[v] = m[v % 4 / 2] * own[v] + (index == 0 ? 0 : sum[v]);
            }
          }
        }
      };
      if (any_wide) {
        multiply(std::true_type{});
        if constexpr (Plan::kTwoDots) {  // it is added times 0
#pragma unroll
          for (int v = 0; v < kValues; ++v) dots[1][v] = 0;
        }
      } else if constexpr (Plan::kTwoDots) {
        multiply_overlapped(dots);
      } else {
        multiply(std::false_type{});
      }
      if constexpr (Plan::kStartsAhead) start_slice(more);  // without more, nobody reads it
      if constexpr (Plan::kTwoDots) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) sum[v] += last_mantissas[v % 4 / 2] * dots[1][v];
      }
      __syncwarp();  // all lanes have read their words
      if (lane == 0) ptx::mbarrier_arrive(words_empty);
      // Loaded again, after the products were issued: else ptxas puts the conversions between them.
      const float unit[2] = {units[row0], units[row0 + 8]};
      const bool floats = (reinterpret_cast<const unsigned*>(units)[Plan::kRows] >> part & 1) != 0;

      // A narrow slice's sum, rounded once, is an exact multiple of the unit, so that one fused
      // multiply-add is the contract's rounded product and sum. A wide one is added as it is.
      if (Plan::kRegisterTotals < kValues ? slice == 0 : last) {
        total_ring.wait_empty();
      }
      if (kTurns > 1 && slice > 0) {
        ptx::named_barrier_sync(turn_barrier(part, turn), 256);  // the slice before is added
      }
      const float factor[2] = {unit[0] == 0 ? 1.0f : unit[0], unit[1] == 0 ? 1.0f : unit[1]};
      float4* own = reinterpret_cast<float4*>(totals) + thread % 128;
#pragma unroll
      for (int i = 0; i < kValues; i += 4) {
        const bool shares = i >= Plan::kRegisterTotals;
        if (shares) {
          const float4 four = slice == 0 ? make_float4(0, 0, 0, 0) : own[i / 4 * 128];
          total[i] = four.x, total[i + 1] = four.y, total[i + 2] = four.z, total[i + 3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float value = floats ? __int_as_float(sum[i + j]) : static_cast<float>(sum[i + j]);
          total[i + j] = __fmaf_rn(value, factor[j / 2], total[i + j]);
        }
        if (shares && !last) {
          own[i / 4 * 128] = make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]);
        }
      }
      if (!last) {
        if (kTurns > 1) ptx::named_barrier_arrive(turn_barrier(part, (turn + 1) % kTurns), 256);
      } else {
        const unsigned n0 = tile % row_tiles * Plan::kRows + part * 64;
        const unsigned m0 = tile / row_tiles * kTokens;
        if (packed) {
          stage_outputs<Plan>(params, totals, total, n0, m0);
        } else {
          ptx::named_barrier_sync(1 + warpgroup, 128);  // all have read their totals
          store_fragment<Plan>(totals, total);
        }
        if (last_tile) {
          // No main loop is left to hide the stores under: the warpgroup writes its own rows.
          ptx::named_barrier_sync(1 + warpgroup, 128);
          store_part<Plan>(params, totals, packed, n0, m0, warp, 4);
        } else {
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(total_ring.full_barrier());
        }
#pragma unroll
        for (int v = 0; v < Plan::kRegisterTotals; ++v) total[v] = 0;
      }
      if constexpr (!Plan::kStartsAhead) start_slice(more);
      __syncwarp();  // all lanes have read the slice's mantissas and units
      if (lane == 0) ptx::mbarrier_arrive(rings.scales.empty_barrier());
      rings.scales.advance();
      if (more) take_scales();
      ptx::wgmma_wait<0>(dot);
    }
    total_ring.advance();
  }
#endif
}

}  // namespace kernels
}  // namespace binary_gemm
