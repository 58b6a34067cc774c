#pragma once

/// The plan of gemm_wgmma: shapes, registers and shared memory for host and device, the rings by
/// which its warps meet, and the pieces of the product that a CTA computes.

#include <cstdint>

#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"  // wait_for_barrier
#include "binary_gemm/types.h"

namespace binary_gemm {
namespace kernels {

/// The shapes and the shared-memory plan of gemm_wgmma, for host and device. With `kCuts_` tiles
/// may be cut: a CTA begins one and the next finishes it.
template <int kRowGroups_, int kTurns_, int kTokens_, int kGroup_, bool kCuts_>
struct GemmWgmma {
  static constexpr int kRowGroups = kRowGroups_;  ///< of 64 rows
  static constexpr int kTurns = kTurns_;          ///< warpgroups of the same rows
  static constexpr int kConsumers = kRowGroups * kTurns;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroup = kGroup_;
  static constexpr bool kCuts = kCuts_;
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
  static constexpr int kOtherRegisters = kTurns == 1 && kGroup < 128 ? 64 : 34;
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
  /// registers for it. Warpgroups that take turns do not wait for themselves: 1 to 5% slower there.
  static constexpr bool kStartsAhead = kTokens <= 128 && kTurns == 1;
  /// Whether a block's x is waited for while the block before multiplies: 2% faster with two
  /// warpgroups, no faster with three; with one, or by turns, ptxas serializes products (C7514).
  static constexpr bool kWaitsAhead = kRowGroups == 2 && kTurns == 1;

  // Bytes of a stage.
  /// A stage of x has several blocks if they are small: one thread issues a copy in about 200
  /// clocks.
  static constexpr int kStageBlocks = kTokens <= 16 ? 8 : kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;
  static_assert(!kWaitsAhead || kStageBlocks == 1, "it waits for each block");
  static constexpr int kBlockBytes = kTokens * kBlock;
  static constexpr int kXBytes = kStageBlocks * kBlockBytes;
  static constexpr int kWordBytes = kRows * static_cast<int>(kSliceK) / 8;
  static constexpr int kMantissaBytes = kRows * kScales * 2;  ///< [row][scale]
  static constexpr int kUnitBytes = kRows * 4 + 16;  ///< [row], and which row groups are wide
  /// Totals of a warpgroup: while it adds up, four a thread; when done, [token][row], padded so
  /// that lanes (g, t) hit different banks.
  static constexpr int kTotalStride = 64 + 4;
  /// Whether the copy engine writes outputs from there, and how it wants them aligned, for its
  /// swizzle.
  static constexpr bool kEngineStores = engine_stores(kRowGroups, kTurns);
  static constexpr int kTotalAlignment = kEngineStores ? 1024 : 128;
  static constexpr int kTotalBytes =
      (kTokens * kTotalStride * 4 + kTotalAlignment - 1) / kTotalAlignment * kTotalAlignment;
  static constexpr int kStagedStride = 64 * 2;  ///< bytes of a token's rounded outputs

  static constexpr int kEpilogueBytes = (kTokens + 64) * 4;  ///< of 64 rows: scales of x, biases

  /// Of a multiprocessor's 228 KiB; the system takes one for each CTA, and barriers less than one.
  static constexpr int kSharedLimit = 228 * 1024 / kResident - 1024;
  static constexpr int kBarrierBytes = 896;  ///< at most, with GemmWgmmaCut
  static constexpr int kFixedBytes =
      kTurns * (kWordStages * kWordBytes + kScaleStages * (kMantissaBytes + kUnitBytes)) +
      kRowGroups * (kTotalBytes + kEpilogueBytes) + kBarrierBytes + kTotalAlignment;
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
  static_assert(kXStagesFitting >= kXStages, "too little shared memory");

  // Offsets: what the swizzle wants aligned to 1024 bytes comes first. Rings are [turn][stage].
  static constexpr int kXOffset = 0;
  static constexpr int kWordOffset = kXOffset + kTurns * kXStages * kXBytes;
  static constexpr int kMantissaOffset = kWordOffset + kTurns * kWordStages * kWordBytes;
  static constexpr int kUnitOffset = kMantissaOffset + kTurns * kScaleStages * kMantissaBytes;
  static constexpr int kBarrierOffset = kUnitOffset + kTurns * kScaleStages * kUnitBytes;
  static constexpr int kTurnBarriers = 2 * (kXStages + kWordStages + kScaleStages);
  static constexpr int kTotalBarriers = 3;  ///< of GemmWgmmaTotals
  static constexpr int kBarriers = kTurns * kTurnBarriers + kTotalBarriers;
  static constexpr int kCutOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kCutBytes = 16;  ///< GemmWgmmaCut
  static constexpr int kEpilogueOffset = (kCutOffset + kCutBytes + 15) / 16 * 16;
  static_assert(kEpilogueOffset - kBarrierOffset <= kBarrierBytes, "");
  static constexpr int kTotalOffset =
      (kEpilogueOffset + kRowGroups * kEpilogueBytes + kTotalAlignment - 1) / kTotalAlignment *
      kTotalAlignment;
  static constexpr int kHandedBytes = 64 * kTokens * 4;  ///< totals of 64 rows
  static constexpr int kSharedBytes = kTotalOffset + kRowGroups * kTotalBytes;
  static_assert(kSharedBytes <= kSharedLimit, "too little shared memory");
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

/// The ring of totals, or of outputs, between warpgroups that multiply and writers, one stage; and
/// the barrier of totals that another CTA hands over.
template <class Plan>
struct GemmWgmmaTotals : Ring<1> {
  std::uint32_t taken;

  __device__ explicit GemmWgmmaTotals(std::uint32_t barriers) {
    full = barriers + Plan::kTurns * Plan::kTurnBarriers * 8;
    empty = full + 8, taken = full + 16;
  }
};

#if __CUDA_ARCH_FEAT_SM90_ALL
/// A CTA's part of the tiles that are cut: from a slice of one tile up to a slice of another.
struct GemmWgmmaCut {
  unsigned first, begin;  ///< the first tile, and its first slice
  unsigned last, end;     ///< the last tile, and the slice after its last one; end = 0: no part

  __device__ GemmWgmmaCut(const TileShares& shares, unsigned slices) : first(0), end(0) {
    const unsigned count = shares.units + (blockIdx.x < shares.rest ? 1 : 0);
    if (count == 0) return;
    const unsigned unit = blockIdx.x * shares.units + min(blockIdx.x, shares.rest);
    first = shares.whole + unit / slices, begin = unit % slices;
    last = shares.whole + (unit + count - 1) / slices, end = (unit + count - 1) % slices + 1;
  }
};

/// What a CTA computes, piece by piece: slices [begin, end) of a tile. First its whole tiles; then
/// of those that are cut what it begins, what it has whole, and what the CTA before it began. So
/// that is long there when it is wanted; and a CTA waits for the one before it, which started
/// sooner, as CTAs start in their order, and hands over before it waits itself.
template <bool kCuts>
struct GemmWgmmaPieces {
  const TileShares& shares;
  const GemmWgmmaCut& cut;  ///< in shared memory: divisions and registers are dear
  unsigned slices;
  unsigned tile, row_tile, token_tile;  ///< which one, and where it is along N and M
  unsigned begin, end;

  __device__ GemmWgmmaPieces(const TileShares& shares_, const GemmWgmmaCut& cut_, unsigned slices_)
      : shares(shares_), cut(cut_), slices(slices_), tile(blockIdx.x), begin(0), end(slices_) {
    if (tile < shares.whole) {
      place();
    } else {
      go_on_with_cut();
    }
  }
  __device__ explicit operator bool() const { return end != 0; }
  __device__ void advance() {
    if (!kCuts || tile < shares.whole) {
      tile += gridDim.x;
      row_tile += shares.grid_rows, token_tile += shares.grid_tokens;
      if (row_tile >= shares.row_tiles) row_tile -= shares.row_tiles, ++token_tile;
      if (tile >= shares.whole) go_on_with_cut();
    } else if (tile == cut.first) {
      end = 0;
    } else {
      --tile, begin = tile == cut.first ? cut.begin : 0, end = slices;
      if (row_tile == 0) row_tile = shares.row_tiles, --token_tile;
      --row_tile;
    }
  }
  /// Finds where the tile is: at first, and once more for those that are cut. From one whole tile
  /// to the next it takes steps: a division there cost small products 2 to 3%.
  __device__ void place() {
    row_tile = tile, token_tile = 0;
    if (tile >= shares.row_tiles) {
      token_tile = tile / shares.row_tiles, row_tile = tile % shares.row_tiles;
    }
  }
  __device__ void go_on_with_cut() {
    if constexpr (kCuts) {
      tile = cut.last, end = cut.end;
      begin = tile == cut.first ? cut.begin : 0;
      place();
    } else {
      end = 0;
    }
  }
  __device__ bool is_last() const {
    return !kCuts || tile < shares.whole
               ? tile + gridDim.x >= shares.whole && (!kCuts || cut.end == 0)
               : tile == cut.first;
  }
  /// Whether another CTA began the tile, and whether another finishes it.
  __device__ bool resumes() const { return kCuts && begin > 0; }
  __device__ bool hands_over() const { return kCuts && end < slices; }
};
#endif

}  // namespace kernels
}  // namespace binary_gemm
