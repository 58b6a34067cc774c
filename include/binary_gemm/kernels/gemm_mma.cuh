#pragma once

/// Large batches from sm_80 on: y = x · Wᵀ by mma.sync, weights expanded in registers.
///
/// The arithmetic of gemm_wgmma.cuh by warps: rows of W are operand A of m16n8k32, which a lane
/// expands from the word it holds (expand.cuh); tokens are operand B, in the order that goes with
/// it (permute.cuh). A dot of one group, times the row's mantissa, is added to the slice's int32
/// sum; once a slice (1024 of K) that is rounded and added to the total.
///
/// A CTA computes a tile of 192 rows by 64 tokens. Its 12 warps have 32 rows by 32 tokens each. All
/// of them fetch by cp.async: x by blocks of 128 of K into a ring, words and scales by slices,
/// twice buffered. A row's own thread turns its scales into mantissas where they lie.
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
template <int kGroup_>
struct GemmMma {
  static constexpr int kGroup = kGroup_;
  static constexpr int kRowWarps = 6, kTokenWarps = 2;
  static constexpr int kRowTiles = 2, kTokenTiles = 4;  ///< products of a warp
  static constexpr int kRows = 16 * kRowTiles * kRowWarps;
  static constexpr int kTokens = 8 * kTokenTiles * kTokenWarps;
  static constexpr int kThreads = kWarpSize * kRowWarps * kTokenWarps;
  static constexpr int kBlock = 128;  ///< of K: a stage of x
  static constexpr int kBlocks = static_cast<int>(kSliceK) / kBlock;
  static constexpr int kScales = static_cast<int>(kSliceK) / kGroup;
  static constexpr int kXStages = kGroup == 32 ? 2 : 4;

  static constexpr int kXBytes = kTokens * kBlock;
  static constexpr int kLineBytes = static_cast<int>(kSliceK) / 8;
  static constexpr int kWordBytes = kRows * kLineBytes;
  static constexpr int kRowScaleBytes = kScales * 2;
  static constexpr int kMantissaBytes = kRows * kRowScaleBytes;
  static constexpr int kUnitBytes = kRows * 4;

  static constexpr int kWordOffset = kXStages * kXBytes;
  static constexpr int kMantissaOffset = kWordOffset + 2 * kWordBytes;
  static constexpr int kUnitOffset = kMantissaOffset + 2 * kMantissaBytes;
  static constexpr int kSharedBytes = kUnitOffset + 2 * kUnitBytes;
  static_assert(kSharedBytes <= 99 * 1024, "what a CTA of sm_86 may have");
  /// At the end the totals lie over x and the words, as [token][row], padded so that lanes (g, t)
  /// hit different banks.
  static constexpr int kTotalStride = kRows + 4;
  static_assert(kTokens * kTotalStride * 4 <= kMantissaOffset, "totals fit");
};

/// Grid: tiles, row tiles fastest. Block: GemmMma::kThreads. Dynamic shared memory:
/// GemmMma::kSharedBytes. params.x is in the order of expand_signs, its rows padded with zeros to
/// x_stride, a multiple of 128; rows of x and of bits are 16-byte aligned; k > 0.
template <int kGroup>
__global__ void __launch_bounds__(GemmMma<kGroup>::kThreads, 1)
    gemm_mma(const __grid_constant__ GemmParams params) {
  using Plan = GemmMma<kGroup>;
  extern __shared__ __align__(1024) char shared[];
  const unsigned thread = threadIdx.x;
  const unsigned lane = thread % kWarpSize, warp = thread / kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  const unsigned row_tiles = (params.n + Plan::kRows - 1) / Plan::kRows;
  const unsigned n0 = blockIdx.x % row_tiles * Plan::kRows;
  const unsigned m0 = blockIdx.x / row_tiles * Plan::kTokens;
  const unsigned all_blocks = params.slices * Plan::kBlocks;
  // 16-byte columns of a line are swizzled by its number % 8.
  constexpr unsigned kColumns = Plan::kBlock / 16;
  static_assert(Plan::kLineBytes == Plan::kBlock, "lines of x and of words are alike");

  // A thread's pieces of x: 16 bytes of a token's block each. Past M and K x is zeros, so that what
  // lies there of words and scales does no harm.
  constexpr unsigned kPieces = Plan::kTokens * kColumns;
  constexpr unsigned kThreadPieces = (kPieces + Plan::kThreads - 1) / Plan::kThreads;
  const std::int8_t* x_source[kThreadPieces];
  std::uint32_t x_target[kThreadPieces];
  bool x_there[kThreadPieces];
#pragma unroll
  for (unsigned i = 0; i < kThreadPieces; ++i) {
    const unsigned piece = thread + i * Plan::kThreads;
    const unsigned token = piece / kColumns, column = piece % kColumns;
    x_there[i] = piece < kPieces && m0 + token < params.m;
    x_source[i] =
        params.x + (x_there[i] ? (m0 + token) * params.x_stride + column * 16 : std::int64_t{0});
    x_target[i] = ptx::shared_address(shared) + token * Plan::kBlock + (column ^ token % 8) * 16;
  }
  const unsigned x_blocks = static_cast<unsigned>(params.x_stride / Plan::kBlock);
  const auto fetch_x = [&](unsigned block) {
    const bool inside = block < x_blocks;
#pragma unroll
    for (unsigned i = 0; i < kThreadPieces; ++i) {
      if (i * Plan::kThreads + thread >= kPieces) continue;
      ptx::cp_async_16_or_zeros(
          x_target[i] + block % Plan::kXStages * Plan::kXBytes,
          x_source[i] + (inside ? block : 0) * static_cast<unsigned>(Plan::kBlock),
          x_there[i] && inside ? 16 : 0);
    }
  };
  // Rows past N repeat the last one; they are not stored.
  const auto global_row = [&](unsigned row) { return std::uint64_t{min(n0 + row, params.n - 1)}; };
  const auto fetch_words = [&](unsigned slice) {
    const std::uint32_t target =
        ptx::shared_address(shared) + Plan::kWordOffset + slice % 2 * Plan::kWordBytes;
    const unsigned words = params.k / 32;
    for (unsigned i = thread; i < Plan::kRows * kColumns; i += Plan::kThreads) {
      const unsigned row = i / kColumns, column = i % kColumns;
      const unsigned word = slice * (Plan::kLineBytes / 4) + column * 4;
      const unsigned count = word < words ? min(words - word, 4u) : 0;
      const std::uint32_t* source =
          params.bits + global_row(row) * params.bits_stride + (count > 0 ? word : 0);
      ptx::cp_async_16_or_zeros(target + row * Plan::kLineBytes + (column ^ row % 8) * 16, source,
                                count * 4);
    }
  };
  const bool scales_aligned =
      scales_are_aligned<Plan::kRowScaleBytes>(params.scales, params.scales_stride);
  const auto own_scales = [&](unsigned slice) {
    return shared + Plan::kMantissaOffset + slice % 2 * Plan::kMantissaBytes +
           thread * Plan::kRowScaleBytes;
  };
  const auto fetch_scales = [&](unsigned slice) {
    if (thread >= Plan::kRows) return;
    const unsigned first = slice * Plan::kScales;
    const __half* source = params.scales + global_row(thread) * params.scales_stride + first;
    fetch_row_scales<Plan::kScales>(own_scales(slice), source, params.k / kGroup - first,
                                    scales_aligned);
  };
  const auto units_of = [&](unsigned slice) {
    return reinterpret_cast<float*>(shared + Plan::kUnitOffset + slice % 2 * Plan::kUnitBytes);
  };
  const auto convert_scales = [&](unsigned slice) {
    if (thread < Plan::kRows) {
      units_of(slice)[thread] = convert_row_scales<Plan::kScales>(own_scales(slice));
    }
  };

  // Groups of copies: the first slice's words and scales, then one for each block.
  fetch_words(0);
  fetch_scales(0);
  ptx::cp_async_commit();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
#pragma unroll
  for (unsigned block = 0; block < Plan::kXStages - 1; ++block) {
    fetch_x(block);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<Plan::kXStages - 1>();
  convert_scales(0);

  const unsigned row0 = warp / Plan::kTokenWarps * (16 * Plan::kRowTiles);  // of the tile
  const unsigned token0 = warp % Plan::kTokenWarps * (8 * Plan::kTokenTiles);
  constexpr int kDotBlocks = kGroup > 128 ? kGroup / 128 : 1;  // blocks of a dot
  constexpr int kDots = kGroup < 128 ? 128 / kGroup : 1;       // of a block
  constexpr int kSteps = 4 / kDots;                            // of a dot in a block
  std::int32_t dot[Plan::kRowTiles][Plan::kTokenTiles][4];
  std::int32_t sum[Plan::kRowTiles][Plan::kTokenTiles][4];
  float total[Plan::kRowTiles][Plan::kTokenTiles][4] = {};
  const auto for_all = [](const auto& f) {
#pragma unroll
    for (int r = 0; r < Plan::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < Plan::kTokenTiles; ++n) f(r, n);
    }
  };
  float unit[Plan::kRowTiles][2];
  bool any_wide = false;

#pragma unroll 1
  for (unsigned index = 0; index < all_blocks; ++index) {
    const unsigned slice = index / Plan::kBlocks, block = index % Plan::kBlocks;
    ptx::cp_async_wait<Plan::kXStages - 2>();
    __syncthreads();  // the block is there, and nobody reads the stage of the one before
    const unsigned ahead = index + Plan::kXStages - 1;
    if (ahead < all_blocks) {
      fetch_x(ahead);
      if (ahead % Plan::kBlocks == 0) fetch_words(ahead / Plan::kBlocks);
    }
    if (block == 0 && slice + 1 < params.slices) fetch_scales(slice + 1);
    ptx::cp_async_commit();

    if (block == 0) {
      any_wide = false;
#pragma unroll
      for (int r = 0; r < Plan::kRowTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unit[r][half] = units_of(slice)[row0 + 16 * r + 8 * half + g];
          any_wide = any_wide || unit[r][half] == 0;
        }
      }
      any_wide = __any_sync(0xffffffffu, any_wide);
      for_all([&](int r, int n) {
#pragma unroll
        for (int& v : sum[r][n]) v = 0;
      });
    }

    std::uint32_t signs[Plan::kRowTiles][2][8];
#pragma unroll
    for (int r = 0; r < Plan::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned row = row0 + 16 * r + 8 * half + g;  // row % 8 = g
        const char* from = shared + Plan::kWordOffset + slice % 2 * Plan::kWordBytes +
                           row * Plan::kLineBytes + (block ^ g) * 16 + lane_word_offset<kGroup>(t);
        expand_lane_word<kGroup>(lane_word<kGroup>(from, t), signs[r][half]);
      }
    }
    const std::uint32_t x = ptx::shared_address(shared) + index % Plan::kXStages * Plan::kXBytes;
    const std::int16_t* mantissas = reinterpret_cast<const std::int16_t*>(
        shared + Plan::kMantissaOffset + slice % 2 * Plan::kMantissaBytes);
#pragma unroll
    for (int part = 0; part < kDots; ++part) {
      if (block % kDotBlocks == 0) {
        for_all([&](int r, int n) {
#pragma unroll
          for (int& v : dot[r][n]) v = 0;
        });
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = part * kSteps + i;
        std::uint32_t b[Plan::kTokenTiles][2];
#pragma unroll
        for (int two = 0; two < Plan::kTokenTiles; two += 2) {
          // Lane i gives row i % 8 of matrix i / 8: tokens of `two`, first and second 16 bytes of
          // the step; then of the next.
          const unsigned token = token0 + two * 8 + lane / 16 * 8 + lane % 8;
          const unsigned column = 2 * step + lane / 8 % 2;
          std::uint32_t four[4];
          ptx::ldmatrix_x4(four, x + token * Plan::kBlock + (column ^ lane % 8) * 16);
          b[two][0] = four[0], b[two][1] = four[1];
          b[two + 1][0] = four[2], b[two + 1][1] = four[3];
        }
        for_all([&](int r, int n) {
          const std::uint32_t a[4] = {signs[r][0][2 * step], signs[r][1][2 * step],
                                      signs[r][0][2 * step + 1], signs[r][1][2 * step + 1]};
          ptx::mma_s8_m16n8k32(dot[r][n], a, b[n][0], b[n][1]);
        });
      }
      if ((block + 1) % kDotBlocks != 0) continue;  // the dot goes on
      const unsigned dot_index = block / kDotBlocks * kDots + part;
#pragma unroll
      for (int r = 0; r < Plan::kRowTiles; ++r) {
        const std::int16_t* own = mantissas + (row0 + 16 * r + g) * Plan::kScales + dot_index;
        const std::int16_t m[2] = {own[0], own[8 * Plan::kScales]};
#pragma unroll
        for (int n = 0; n < Plan::kTokenTiles; ++n) {
          if (any_wide) {
            add_with_wide<0>(sum[r][n], dot[r][n], m[0], unit[r][0] == 0);
            add_with_wide<1>(sum[r][n], dot[r][n], m[1], unit[r][1] == 0);
          } else {
#pragma unroll
            for (int v = 0; v < 4; ++v) sum[r][n][v] += m[v / 2] * dot[r][n][v];
          }
        }
      }
    }
    if (block + 1 < Plan::kBlocks) continue;

    // A narrow slice's sum, rounded once, is an exact multiple of the unit, so that one fused
    // multiply-add is the contract's rounded product and sum. A wide one is added as it is.
    for_all([&](int r, int n) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const bool wide = any_wide && unit[r][v / 2] == 0;
        const float rounded =
            wide ? __int_as_float(sum[r][n][v]) : static_cast<float>(sum[r][n][v]);
        total[r][n][v] = __fmaf_rn(rounded, wide ? 1.0f : unit[r][v / 2], total[r][n][v]);
      }
    });
    if (slice + 1 < params.slices) {
      // Fetched seven blocks ago; their group is older than those that may be in flight.
      convert_scales(slice + 1);
    }
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // nobody reads x or words
  float* totals = reinterpret_cast<float*>(shared);
  for_all([&](int r, int n) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned row = row0 + 16 * r + 8 * (v / 2) + g;
      totals[(token0 + 8 * n + 2 * t + v % 2) * Plan::kTotalStride + row] = total[r][n][v];
    }
  });
  __syncthreads();
  constexpr unsigned kWarps = Plan::kThreads / kWarpSize;
  const unsigned tokens = min(unsigned{Plan::kTokens}, params.m - m0);
#pragma unroll 1
  for (unsigned token = warp; token < tokens; token += kWarps) {
    const float x_scale = params.x_scales[m0 + token];
#pragma unroll
    for (unsigned row = 2 * lane; row < Plan::kRows; row += 2 * kWarpSize) {
      const float2 two =
          *reinterpret_cast<const float2*>(totals + token * Plan::kTotalStride + row);
      store_pair(params, m0 + token, n0 + row, two, x_scale);
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
