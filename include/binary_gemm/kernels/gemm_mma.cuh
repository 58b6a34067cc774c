#pragma once

/// Large batches from sm_80 on: y = x · Wᵀ by mma.sync, weights expanded in registers.
///
/// The arithmetic of gemm_wgmma.cuh by warps: rows of W are operand A of m16n8k32, which a lane
/// expands from the word it holds (expand.cuh); tokens are operand B, in the order that goes with
/// it (permute.cuh). A dot of one group, times the row's mantissa, is added to the slice's int32
/// sum; once a slice (1024 of K) that is rounded and added to the total.
///
/// A warp has 32 rows by 8 kTokenTiles tokens of a CTA's 32 kRowWarps by as many, and sums in
/// registers. Totals, touched once in 8 blocks of 128 of K, are in shared memory: that makes room
/// for 12 warps of 64 tokens, or 16 of 32, a multiprocessor. With 8, and 253 registers each, the
/// tensor cores were busy 37% of the time and issue slots as long: warps waited for their own
/// products, and there were too few others.
///
/// For 64 tokens and G = 128 a block is about 300 instructions: 64 products, 64 integer
/// multiply-adds, 53 that expand words, 27 loads; the rest are copies and addresses. Its units are
/// the dots of 16 tokens: while one is multiplied, the one before can be added to the sums, and
/// under a block's last the next block's words are expanded.
///
/// Where there are few tiles, kDepthWarps share a warp's K: each takes its own blocks of a stage.
/// As a narrow slice's sum is exact, they may add up once a slice, through shared memory.
///
/// All warps of a CTA fetch by cp.async: stages of x and words go round a ring, scales come by
/// slices, twice buffered. A row's own thread turns its scales into mantissas where they lie. A
/// stage has one barrier, before a warp's last block of it: behind it the next stage is there, and
/// nobody reads the one before. So nobody waits where a stage begins, and what a block needs first
/// is read under the block before.
///
/// While a slice has a wide row among a warp's, that warp takes another, slow way; of those that
/// share K the first takes it alone, as groups have their order.
///
/// Fragments: lane (g, t) = (lane / 4, lane % 4) has
///   of A (T32,V4) -> (M16,K32): word t of rows g and g + 8, expanded;
///   of B (T32,V2) -> (N8,K32): bytes 4t and 16 + 4t of token g;
///   of C (T32,V4) -> (M16,N8): tokens 2t and 2t + 1 of rows g and g + 8.

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"

namespace binary_gemm {
namespace kernels {

/// The shapes and the shared-memory plan of gemm_mma, for host and device.
template <int kRowWarps_, int kDepthWarps_, int kTokenTiles_, int kGroup_>
struct GemmMma {
  static constexpr int kGroup = kGroup_;
  static constexpr int kRowWarps = kRowWarps_, kDepthWarps = kDepthWarps_;
  static constexpr int kRowTiles = 2, kTokenTiles = kTokenTiles_;  ///< products of a warp
  static constexpr int kRows = 16 * kRowTiles * kRowWarps;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kWarps = kRowWarps * kDepthWarps;
  static constexpr int kThreads = kWarpSize * kWarps;
  static constexpr std::uint32_t kBarrier = 1;  ///< of the main loop, for all threads
  /// CTAs of a multiprocessor, by their registers: 8 warps have 255 each, 12 have 168, 16 have 128.
  static constexpr int kResident = (kGroup < 64                       ? 8
                                    : kTokenTiles > 4 || kGroup < 128 ? 12
                                                                      : 16) /
                                   kWarps;

  static constexpr int kBlock = 128;  ///< of K
  static constexpr int kBlocks = static_cast<int>(kSliceK) / kBlock;
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;
  static constexpr int kDots = kGroup < kBlock ? kBlock / kGroup : 1;  ///< of a block
  static constexpr int kSteps = 4 / kDots;                             ///< products of a dot

  // Bytes of a block, then of a slice.
  static constexpr int kXBytes = kTokens * kBlock;
  static constexpr int kWordBytes = kRows * kBlock / 8;
  static constexpr int kRowScaleBytes = kScales * 2;
  static constexpr int kMantissaBytes = kRows * kRowScaleBytes;
  static constexpr int kUnitBytes = kRows * 4;

  /// A block for each warp that shares K, and whole groups.
  static constexpr int kStageBlocks = kGroup > kDepthWarps* kBlock ? kGroup / kBlock : kDepthWarps;
  static constexpr int kWarpBlocks = kStageBlocks / kDepthWarps;  ///< of a stage
  /// Three are the fewest: one is read, the next is there, another is under way.
  static constexpr int kStages = kTokenTiles > 4 || kStageBlocks > 1 ? 3 : 4;
  static constexpr int kSliceStages = kBlocks / kStageBlocks;
  static_assert(kStages <= kSliceStages && kSliceStages > 3, "a slice's scales are there in time");

  static constexpr int kStageWordOffset = kStageBlocks * kXBytes;
  static constexpr int kStageBytes = kStageBlocks * (kXBytes + kWordBytes);
  static constexpr int kMantissaOffset = kStages * kStageBytes;
  static constexpr int kUnitOffset = kMantissaOffset + 2 * kMantissaBytes;
  /// Of a warp's tiles of 8 tokens, those whose totals it has.
  static constexpr int kOwnTiles = kTokenTiles / kDepthWarps;
  /// Totals, as [quad][thread]; of warps that share K, each other's sums, as [other][quad][thread].
  static constexpr int kTotalBytes = kThreads * kRowTiles * kOwnTiles * 16;
  static constexpr int kTotalOffset = kUnitOffset + 2 * kUnitBytes;
  static constexpr int kSumOffset = kTotalOffset + kTotalBytes;
  static constexpr int kSharedBytes = kSumOffset + (kDepthWarps - 1) * kTotalBytes;
  static_assert(kSharedBytes <= 99 * 1024, "what a CTA of sm_86 may have");
  /// At the end totals lie over the ring, as [token][row], padded so that lanes (g, t) hit
  /// different banks.
  static constexpr int kTotalStride = kRows + 4;
  static_assert(kTokens * kTotalStride * 4 <= kTotalOffset, "totals fit");
};

/// `value`, of which the compiler knows nothing: it neither keeps parts of an address in registers
/// to compute the rest in each block, nor what follows from the value.
__device__ inline std::uint32_t keep(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// CTAs of a multiprocessor that both registers and shared memory, of the architecture that this is
/// compiled for, have room for.
template <class Plan>
constexpr int resident_ctas() {
#ifdef __CUDA_ARCH__
  constexpr int kArch = __CUDA_ARCH__;
#else
  constexpr int kArch = 0;
#endif
  constexpr int kShared = kArch >= 900 && kArch < 1200 ? 228 : kArch == 800 ? 164 : 100;
  constexpr int kFitting = kShared * 1024 / (Plan::kSharedBytes + 1024);
  return kFitting < Plan::kResident ? kFitting : Plan::kResident;
}

/// threadIdx.x, read anew. What is needed once a stage or a slice is computed from it, in a few
/// instructions, and doesn't take registers meanwhile: a dozen, which 168 have no room for.
__device__ inline unsigned thread_again() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Grid: tiles, row tiles fastest. Block: GemmMma::kThreads. Dynamic shared memory:
/// GemmMma::kSharedBytes. params.x is in the order of expand_signs, its rows padded with zeros to
/// x_stride, a multiple of 128; rows of x and of bits are 16-byte aligned; k > 0.
template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, resident_ctas<Plan>())
    gemm_mma(const __grid_constant__ GemmParams params) {
  constexpr int kGroup = Plan::kGroup, kRowTiles = Plan::kRowTiles;
  constexpr int kTokenTiles = Plan::kTokenTiles, kStageBlocks = Plan::kStageBlocks;
  extern __shared__ __align__(1024) char shared[];
  const unsigned row_tiles = (params.n + Plan::kRows - 1) / Plan::kRows;
  const unsigned n0 = blockIdx.x % row_tiles * Plan::kRows;
  const unsigned m0 = blockIdx.x / row_tiles * Plan::kTokens;
  const unsigned x_blocks = static_cast<unsigned>(params.x_stride / Plan::kBlock);
  const unsigned stages = (x_blocks + kStageBlocks - 1) / kStageBlocks;
  const std::uint32_t shared_base = ptx::shared_address(shared);

  // A stage's x is [block][token][128 bytes], 16-byte columns swizzled by the token's number % 8.
  // A thread copies one column of every kTokenStep-th token. Past M and K come zeros, so that what
  // lies there of words and scales does no harm.
  constexpr unsigned kXColumns = 8 * kStageBlocks;
  constexpr unsigned kTokenStep = Plan::kThreads / kXColumns;
  static_assert(kTokenStep % 8 == 0, "a thread's tokens have one swizzle");
  const auto fetch_x = [&](unsigned stage, std::uint32_t slot) {
    const unsigned thread = thread_again();
    const unsigned x_token = thread / kXColumns, x_column = thread % kXColumns;
    const std::uint32_t target = shared_base + x_column / 8 * Plan::kXBytes +
                                 x_token * Plan::kBlock + (x_column % 8 ^ x_token % 8) * 16 + slot;
    const std::int8_t* source =
        params.x + m0 * params.x_stride + stage * (kStageBlocks * Plan::kBlock);
    source += std::uint64_t{x_token} * static_cast<unsigned>(params.x_stride) + x_column * 16;
    const bool inside = kStageBlocks == 1 || stage * kStageBlocks + x_column / 8 < x_blocks;
    const int tokens = inside ? static_cast<int>(params.m - m0 - x_token) : 0;
#pragma unroll
    for (unsigned i = 0; i * kTokenStep < Plan::kTokens; ++i) {
      if ((i + 1) * kTokenStep > Plan::kTokens && x_token + i * kTokenStep >= Plan::kTokens) break;
      const bool there = static_cast<int>(i * kTokenStep) < tokens;
      ptx::cp_async_16_or_zeros(target + i * kTokenStep * Plan::kBlock, source, there ? 16 : 0);
      source += kTokenStep * params.x_stride;
    }
  };
  // Its words are [row][block], four each. Of two blocks the first is where bit 2 of the row says:
  // eight rows' words lie in different banks.
  constexpr unsigned kRowStep = Plan::kThreads / kStageBlocks;
  constexpr unsigned kRowPieces = (Plan::kRows + kRowStep - 1) / kRowStep;
  // Rows past N repeat the last one; they are not stored.
  const auto global_row = [&](unsigned row) { return std::uint64_t{min(n0 + row, params.n - 1)}; };
  const auto fetch_words = [&](unsigned stage, std::uint32_t slot) {
    const unsigned thread = thread_again();
    const unsigned row = thread / kStageBlocks, column = thread % kStageBlocks;
    if (Plan::kRows < kRowStep && row >= Plan::kRows) return;
    const std::uint32_t target = shared_base + Plan::kStageWordOffset + row * (kStageBlocks * 16) +
                                 (column ^ row / 4 % kStageBlocks) * 16 + slot;
    const unsigned word = (stage * kStageBlocks + column) * 4;
    const int left = static_cast<int>(params.k / 8 - word * 4);
#pragma unroll
    for (unsigned i = 0; i < kRowPieces; ++i) {
      ptx::cp_async_16_or_zeros(
          target + i * kRowStep * (kStageBlocks * 16),
          params.bits + global_row(row + i * kRowStep) * params.bits_stride + word,
          max(min(left, 16), 0));
    }
  };
  const bool scales_aligned =
      scales_are_aligned<Plan::kRowScaleBytes>(params.scales, params.scales_stride);
  const auto own_scales = [&](unsigned slice, unsigned row) {
    return shared + Plan::kMantissaOffset + slice % 2 * Plan::kMantissaBytes +
           row * Plan::kRowScaleBytes;
  };
  static_assert(Plan::kRows <= Plan::kThreads, "a row has a thread");
  const auto fetch_scales = [&](unsigned slice) {
    const unsigned row = thread_again();
    if (row >= Plan::kRows) return;
    const unsigned first = slice * Plan::kScales;
    const __half* source = params.scales + global_row(row) * params.scales_stride + first;
    const unsigned count = params.k / kGroup - first;
    if (scales_aligned && count >= Plan::kScales) {
      fetch_aligned_scales<Plan::kScales>(own_scales(slice, row), source);
    } else {
      fetch_some_scales<Plan::kScales>(own_scales(slice, row), source, count);
    }
  };
  const auto units_of = [&](unsigned slice) {
    return reinterpret_cast<float*>(shared + Plan::kUnitOffset + slice % 2 * Plan::kUnitBytes);
  };
  const auto convert_scales = [&](unsigned slice) {
    const unsigned row = thread_again();
    if (row < Plan::kRows) {
      units_of(slice)[row] = convert_row_scales<Plan::kScales>(own_scales(slice, row));
    }
  };

  // Groups of copies: scales and words of the first stages, then the x of each of them; later one
  // for each stage.
  fetch_scales(0);
#pragma unroll
  for (unsigned i = 0; i < Plan::kStages - 1; ++i) fetch_words(i, i * Plan::kStageBytes);
  ptx::cp_async_commit();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
#pragma unroll
  for (unsigned i = 0; i < Plan::kStages - 1; ++i) {
    if (i < stages) fetch_x(i, i * Plan::kStageBytes);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<Plan::kStages - 2>();
  convert_scales(0);
  __syncthreads();  // the first stage is there, and the first slice's mantissas

  // Where a lane reads in a stage: of x, for each step, row lane % 8 of matrix lane / 8 of
  // ldmatrix: the first and the second 16 bytes of 8 tokens, then of the next 8; of words, rows g
  // of the first fragment.
  static_assert(16 * kRowTiles == kWarpSize, "a lane for each row");
  const auto warp_row = [](unsigned thread) {
    return thread / kWarpSize % Plan::kRowWarps * kWarpSize;
  };
  const auto row_of = [&](unsigned thread) { return warp_row(thread) + thread % kWarpSize / 4; };
  const auto depth_of = [](unsigned thread) {
    return thread / kWarpSize / Plan::kRowWarps % Plan::kDepthWarps;
  };
  const unsigned depth = depth_of(threadIdx.x);
  const auto x_of = [&](unsigned thread) {
    const unsigned lane = thread % kWarpSize;
    return shared_base + (lane / 16 * 8 + lane % 8) * Plan::kBlock + (lane / 8 % 2 ^ lane % 8) * 16;
  };
  const auto words_of = [&](unsigned thread) {
    const unsigned row = row_of(thread);
    return Plan::kStageWordOffset + row * (kStageBlocks * 16) + row / 4 % kStageBlocks * 16 +
           lane_word_offset<kGroup>(thread % 4);
  };
  const auto mantissas_of = [&](unsigned thread) {
    return Plan::kMantissaOffset + row_of(thread) * Plan::kRowScaleBytes;
  };
  const std::uint32_t x_from = keep(x_of(threadIdx.x));
  const std::uint32_t words_from = keep(words_of(threadIdx.x));
  const auto load_b = [&](std::uint32_t from, std::uint32_t slot, unsigned block, int pair,
                          unsigned step, std::uint32_t(&b)[4]) {
    ptx::ldmatrix_x4(
        b, (from ^ step * 32) + slot + block * Plan::kXBytes + pair * (16 * Plan::kBlock));
  };
  const auto load_words = [&](std::uint32_t words_at, std::uint32_t slot, unsigned block,
                              int row_tile, std::uint32_t(&words)[2]) {
    const char* from = shared + (words_at ^ block % kStageBlocks * 16) + slot;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[half] = lane_word<kGroup>(from + (2 * row_tile + half) * 8 * (kStageBlocks * 16),
                                      threadIdx.x % 4);
    }
  };
  const auto load_mantissas = [&](std::uint32_t mantissas_at, unsigned slice, int row_tile,
                                  unsigned dot, std::int16_t(&m)[2]) {
    const std::int16_t* own = reinterpret_cast<const std::int16_t*>(
                                  shared + mantissas_at + slice % 2 * Plan::kMantissaBytes) +
                              16 * row_tile * Plan::kScales + dot;
    m[0] = own[0], m[1] = own[8 * Plan::kScales];
  };

  std::int32_t sum[kRowTiles][kTokenTiles][4] = {};
  // A thread reads, adds to and writes its own once a slice.
  float4* totals = reinterpret_cast<float4*>(shared + Plan::kTotalOffset);
  const auto total_of = [&](unsigned thread, int r, int n) -> float4& {
    return totals[thread + (r * Plan::kOwnTiles + n) * Plan::kThreads];
  };
  std::uint32_t slot = 0;  // the stage that is read, in bytes from the first
  const auto slot_after = [](std::uint32_t s) {
    return s + Plan::kStageBytes == Plan::kMantissaOffset ? 0 : s + Plan::kStageBytes;
  };
  const auto slot_before = [](std::uint32_t s) {
    return s == 0 ? Plan::kMantissaOffset - Plan::kStageBytes : s - Plan::kStageBytes;
  };
  // Once a stage, before its last block: behind the barrier the next stage is there, and nobody
  // reads the one before.
  const auto next_stage = [&](unsigned stage) {
    ptx::cp_async_wait<Plan::kStages - 3>();
    ptx::named_barrier_sync(Plan::kBarrier, Plan::kThreads);
    const unsigned fetched = stage + Plan::kStages - 1;
    if (fetched < stages) {
      fetch_words(fetched, slot_before(slot));
      fetch_x(fetched, slot_before(slot));
    }
    ptx::cp_async_commit();
  };

  // What a block starts with: its words, expanded.
  std::uint32_t signs[kRowTiles][2][8];
  const auto expand = [&](std::uint32_t slot) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      std::uint32_t words[2];
      load_words(words_from, slot, depth * Plan::kWarpBlocks, r, words);
      expand_lane_word<kGroup>(words[0], signs[r][0]);
      expand_lane_word<kGroup>(words[1], signs[r][1]);
    }
  };
  // A block whose slice is narrow in all rows of the warp; leaves the next one's signs.
  // ptxas 13.0 would multiply the whole block first and then add all its dots, with 64
  // registers for these, were it not that loop iterations hold a block each; and expand the next
  // words at once, into other registers than those of this block's, were it not for `after`: both
  // spill.
  const auto multiply_block = [&](unsigned stage, unsigned block) {
    constexpr int kPairs = kTokenTiles / 2, kDots = Plan::kDots;
    const bool last = block + 1 == Plan::kWarpBlocks;
    if (last) next_stage(stage);
    const unsigned stage_block = depth * Plan::kWarpBlocks + block;
    std::int16_t m[kRowTiles][kDots][2];
    {
      const std::uint32_t mantissas = mantissas_of(thread_again());
      const unsigned index = stage * kStageBlocks + stage_block;
      const unsigned slice = index / Plan::kBlocks, dots = index % Plan::kBlocks * 128 / kGroup;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int part = 0; part < kDots; ++part) {
          load_mantissas(mantissas, slice, r, dots + part, m[r][part]);
        }
      }
    }
    std::int32_t dot[2][kRowTiles][2][4];  // of this unit and of the one before
    const auto add = [&](int unit) {
      const int pair = unit / kDots, part = unit % kDots;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[r][2 * pair + i / 4][i % 4] += m[r][part][i % 4 / 2] * dot[unit % 2][r][i / 4][i % 4];
        }
      }
    };
    LaneSigns<kGroup> next[2 * kRowTiles];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const std::uint32_t from = keep(x_from);
      if (pair + 1 == kPairs) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          std::uint32_t words[2];
          load_words(words_from, last ? slot_after(slot) : slot,
                     last ? depth * Plan::kWarpBlocks : stage_block + 1, r, words);
          next[2 * r] = LaneSigns<kGroup>(words[0]);
          next[2 * r + 1] = LaneSigns<kGroup>(words[1]);
        }
      }
#pragma unroll
      for (int part = 0; part < kDots; ++part) {
        const int unit = pair * kDots + part;
#pragma unroll
        for (int i = 0; i < Plan::kSteps; ++i) {
          const int step = part * Plan::kSteps + i;
          std::uint32_t b[4];
          load_b(from, slot, stage_block, pair, step, b);
#pragma unroll
          for (int tile = 0; tile < 2 * kRowTiles; ++tile) {
            const int r = tile % kRowTiles, n = tile / kRowTiles;
            const std::uint32_t a[4] = {signs[r][0][2 * step], signs[r][1][2 * step],
                                        signs[r][0][2 * step + 1], signs[r][1][2 * step + 1]};
            if (i == 0) {
#pragma unroll
              for (int& v : dot[unit % 2][r][n]) v = 0;
            }
            ptx::mma_s8_m16n8k32(dot[unit % 2][r][n], a, b[2 * n], b[2 * n + 1]);
          }
          if (pair + 1 == kPairs) {
            const std::uint32_t after =
                static_cast<std::uint32_t>(dot[unit % 2][kRowTiles - 1][1][3]);
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles; ++i) {
              next[i].expand(step, after, &signs[i / 2][i % 2][2 * step]);
            }
          }
        }
        if (unit > 0) add(unit - 1);
      }
    }
    add(kPairs * kDots - 1);
  };

  // Any stage, dots of 16 rows and 16 tokens one after the other. Words are expanded anew for each:
  // it may be slow, but not take more registers.
  const auto multiply_wide_stage = [&](unsigned stage) {
    next_stage(stage);
    constexpr unsigned kDotBlocks = kGroup > 128 ? kGroup / 128 : 1;
    constexpr unsigned kStageDots = kStageBlocks * 128 / kGroup;
    const unsigned slice = stage / Plan::kSliceStages;
#pragma unroll 1
    for (unsigned index = depth == 0 ? 0 : kStageDots; index < kStageDots; ++index) {
      const unsigned first = index * kGroup / 128, part = index % Plan::kDots;
#pragma unroll
      for (int tile = 0; tile < kRowTiles * kTokenTiles / 2; ++tile) {
        const int r = tile % kRowTiles, n = tile / kRowTiles * 2;
        const std::uint32_t at = keep(slot);
        const unsigned blocks = keep(kDotBlocks);  // a loop even of one keeps tiles apart
        std::int32_t dot[2][4] = {};
#pragma unroll 1
        for (unsigned block = 0; block < blocks; ++block) {
          std::uint32_t words[2], own[2][8];
          load_words(words_of(thread_again()), at, first + block, r, words);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            expand_lane_word<kGroup>(words[half], own[half]);
#pragma unroll
            for (unsigned other = 1; other < Plan::kDots; ++other) {
#pragma unroll
              for (int i = 0; i < 2 * Plan::kSteps; ++i) {
                if (part == other) own[half][i] = own[half][2 * Plan::kSteps * other + i];
              }
            }
          }
#pragma unroll
          for (int step = 0; step < Plan::kSteps; ++step) {
            std::uint32_t b[4];
            load_b(x_of(thread_again()), at, first + block, n / 2, part * Plan::kSteps + step, b);
            const std::uint32_t a[4] = {own[0][2 * step], own[1][2 * step], own[0][2 * step + 1],
                                        own[1][2 * step + 1]};
            ptx::mma_s8_m16n8k32(dot[0], a, b[0], b[1]);
            ptx::mma_s8_m16n8k32(dot[1], a, b[2], b[3]);
          }
        }
        std::int16_t own_m[2];
        load_mantissas(mantissas_of(thread_again()), slice, r,
                       stage % Plan::kSliceStages * kStageDots + index, own_m);
        const float* units = units_of(slice) + row_of(thread_again()) + 16 * r;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          add_with_wide<0>(sum[r][n + i], dot[i], own_m[0], units[0] == 0);
          add_with_wide<1>(sum[r][n + i], dot[i], own_m[1], units[8] == 0);
        }
      }
    }
    expand(slot_after(slot));
  };

  expand(0);
  unsigned stage = 0;
#pragma unroll 1
  for (unsigned slice = 0; slice < params.slices; ++slice) {
    const unsigned own_row = warp_row(thread_again()) + thread_again() % kWarpSize;
    const bool any_wide = __any_sync(0xffffffffu, units_of(slice)[own_row] == 0);
    // The next slice's scales are fetched behind the barrier of a slice's first stage, as the slice
    // before has their place until then, and converted before that of its last.
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      const unsigned until = part == 0   ? 1
                             : part == 1 ? Plan::kSliceStages - 1
                                         : Plan::kSliceStages;
      const unsigned end = min(slice * Plan::kSliceStages + until, stages);
      if (any_wide) {
#pragma unroll 1
        for (; stage < end; ++stage) {
          multiply_wide_stage(stage);
          slot = slot_after(slot);
        }
      } else {
#pragma unroll 1
        for (; stage < end; ++stage) {
#pragma unroll 1
          for (unsigned block = 0; block < Plan::kWarpBlocks; ++block) multiply_block(stage, block);
          slot = slot_after(slot);
        }
      }
      if (slice + 1 < params.slices) {
        if (part == 0) fetch_scales(slice + 1);
        if (part == 1) {
          ptx::cp_async_wait<Plan::kSliceStages - 3>();  // they came with the second stage's copies
          convert_scales(slice + 1);
        }
      }
    }

    const unsigned thread = thread_again();
    // Warps that share K each add up what they all have of some tokens.
    if constexpr (Plan::kDepthWarps > 1) {
      int4* sums = reinterpret_cast<int4*>(shared + Plan::kSumOffset);
      const auto place = [&](unsigned from, unsigned to, int r, int n) -> int4& {
        const unsigned nth = (from - to) % Plan::kDepthWarps - 1;
        return sums[((nth * kRowTiles + r) * Plan::kOwnTiles + n) * Plan::kThreads +
                    to * (Plan::kRowWarps * kWarpSize) + thread % (Plan::kRowWarps * kWarpSize)];
      };
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          const unsigned to = n / Plan::kOwnTiles;
          std::int32_t(&own)[4] = sum[r][n];
          if (to != depth) {
            place(depth, to, r, n % Plan::kOwnTiles) = make_int4(own[0], own[1], own[2], own[3]);
          }
        }
      }
      ptx::named_barrier_sync(Plan::kBarrier, Plan::kThreads);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int n = 0; n < Plan::kOwnTiles; ++n) {
#pragma unroll
          for (int v = 0; v < 4; ++v) {
#pragma unroll
            for (unsigned other = 1; other < Plan::kDepthWarps; ++other) {
              if (depth == other) sum[r][n][v] = sum[r][other * Plan::kOwnTiles + n][v];
            }
          }
#pragma unroll
          for (unsigned nth = 1; nth < Plan::kDepthWarps; ++nth) {
            const int4 more = place(depth + nth, depth, r, n);
            sum[r][n][0] += more.x, sum[r][n][1] += more.y;
            sum[r][n][2] += more.z, sum[r][n][3] += more.w;
          }
        }
      }
    }
    // A narrow slice's sum, rounded once, is an exact multiple of the unit, so that one fused
    // multiply-add is the contract's rounded product and sum. A wide one is added as it is.
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const float* units = units_of(slice) + row_of(thread) + 16 * r;
      const float unit[2] = {units[0], units[8]};
      const auto add = [&](std::int32_t value, int half, float all) {
        const bool wide = unit[half] == 0;
        const float rounded = wide ? __int_as_float(value) : static_cast<float>(value);
        return __fmaf_rn(rounded, wide ? 1.0f : unit[half], all);
      };
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        std::int32_t(&own)[4] = sum[r][n];
        if (n < Plan::kOwnTiles) {
          const float4 all = slice > 0 ? total_of(thread, r, n) : float4{};
          total_of(thread, r, n) = {add(own[0], 0, all.x), add(own[1], 0, all.y),
                                    add(own[2], 1, all.z), add(own[3], 1, all.w)};
        }
#pragma unroll
        for (std::int32_t& value : own) value = 0;
      }
    }
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // nobody reads the ring
  float* outputs = reinterpret_cast<float*>(shared);
  const unsigned thread = thread_again();
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < Plan::kOwnTiles; ++n) {
      const float4 own = total_of(thread, r, n);
      const unsigned token = 8 * (depth_of(thread) * Plan::kOwnTiles + n) + 2 * (thread % 4);
      float* to = outputs + token * Plan::kTotalStride + row_of(thread) + 16 * r;
      to[0] = own.x, to[Plan::kTotalStride] = own.y;
      to[8] = own.z, to[Plan::kTotalStride + 8] = own.w;
    }
  }
  __syncthreads();
  // A warp writes every kWarps-th token; lane i has the scale of its i-th.
  constexpr unsigned kWarps = Plan::kWarps;
  static_assert(Plan::kTokens <= kWarps * kWarpSize, "a lane for each token");
  const unsigned tokens = min(unsigned{Plan::kTokens}, params.m - m0);
  const float x_scales =
      params.x_scales[min(m0 + thread / kWarpSize + thread % kWarpSize * kWarps, params.m - 1)];
#pragma unroll 1
  for (unsigned token = thread / kWarpSize; token < tokens; token += kWarps) {
    const float x_scale = __shfl_sync(0xffffffffu, x_scales, static_cast<int>(token / kWarps));
#pragma unroll
    for (unsigned row = thread % kWarpSize * 2; row < Plan::kRows; row += 2 * kWarpSize) {
      const float2 two =
          *reinterpret_cast<const float2*>(outputs + token * Plan::kTotalStride + row);
      store_pair(params, m0 + token, n0 + row, two, x_scale);
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
