/// How the launch layer cuts a product, for GPUs of other sizes too. Nothing is launched.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "binary_gemm/cuda.h"
#include "binary_gemm/kernels/decode_b1.cuh"
#include "binary_gemm/kernels/decode_b1_ring.cuh"
#include "binary_gemm/kernels/decode_ring.cuh"
#include "cuda/families.h"

namespace binary_gemm {
namespace cuda {
namespace {

using kernels::Family;

struct Gpu {
  int multiprocessors;
  int shared_limit;   ///< bytes, a CTA
  int shared_memory;  ///< bytes, a multiprocessor
};
constexpr int kKiB = 1024;
constexpr Gpu kGpus[] = {{132, 227 * kKiB, 228 * kKiB},
                         {78, 227 * kKiB, 228 * kKiB},
                         {108, 163 * kKiB, 164 * kKiB},
                         {84, 99 * kKiB, 100 * kKiB},
                         {1, 99 * kKiB, 100 * kKiB}};
constexpr std::int64_t kRowCounts[] = {1, 15, 16, 17, 2112, 2113, 5120, 17408, 248320};
constexpr std::uint32_t kMaxThreads = 1024;

DecodeShape decode_shape(const Gpu& gpu, Family family, std::uint8_t tokens, std::int64_t n,
                         std::int64_t k, std::int64_t group_size, bool engine) {
  return {{family, tokens, 0, 0}, n, k, group_size, engine, gpu.shared_limit, gpu.shared_memory,
          gpu.multiprocessors};
}

// Kernels that are loaded and given their shared memory before they can be launched.
bool is_prepared(const void* kernel) {
  static const std::set<const void*> all = [] {
    std::set<const void*> kernels;
    for (const auto& family : {decode_b1_kernels(), decode_b1_ring_kernels(), decode_s8_kernels(),
                               decode_ring_kernels(), mma_kernels(), wgmma_kernels()}) {
      kernels.insert(family.begin(), family.end());
    }
    return kernels;
  }();
  return all.count(kernel) == 1;
}

void expect_legal(const DecodeLaunch& launch, const Gpu& gpu) {
  EXPECT_TRUE(is_prepared(launch.kernel));
  EXPECT_GT(launch.grid, 0u);
  EXPECT_GT(launch.warps, 0u);
  EXPECT_LE(launch.warps * launch.teams * kernels::kWarpSize, kMaxThreads);
  EXPECT_LE(launch.shared_bytes, static_cast<std::uint32_t>(gpu.shared_limit));
}

// Of decode_b1: the memory is busy before x is there, and CTAs of the first wave alone are late,
// but for grids of two.
void expect_some_fetch_early(const DecodeLaunch& launch, const Gpu& gpu) {
  kernels::DecodeB1Cut cut;
  std::memcpy(&cut, launch.cut, sizeof(cut));
  const auto multiprocessors = static_cast<std::uint32_t>(gpu.multiprocessors);
  EXPECT_EQ(cut.late_begin, 2 * multiprocessors);
  const std::uint32_t end = cut.late_begin + cut.late_count;
  if (launch.grid <= cut.late_begin) EXPECT_EQ(cut.late_count, 0u);
  if (end > 4 * multiprocessors) {
    EXPECT_EQ(end, launch.grid);
    EXPECT_LT(launch.grid, 10 * multiprocessors) << "two waves of four, to the nearest";
  }
}

TEST(Plan, DecodeLaunchesAreLegal) {
  for (const Gpu& gpu : kGpus) {
    for (const std::int64_t g : kGroupSizes) {
      for (const std::int64_t n : kRowCounts) {
        for (const std::int64_t k :
             {g, 5 * kSliceK, 2 * kSliceK + 512, 17 * kSliceK, 21 * kSliceK + g, 66 * kSliceK}) {
          for (const bool engine : {false, true}) {
            if (engine && !kernels::engine_takes(k, g)) continue;
            SCOPED_TRACE(::testing::Message()
                         << "N = " << n << ", K = " << k << ", G = " << g << ", engine " << engine
                         << ", shared memory " << gpu.shared_limit);
            for (const std::uint8_t tokens : {8, 16}) {
              const DecodeLaunch launch =
                  plan_decode_s8(decode_shape(gpu, Family::kDecodeS8, tokens, n, k, g, engine));
              ASSERT_NE(launch.kernel, nullptr);
              expect_legal(launch, gpu);
            }
            for (std::uint8_t tokens = 1; tokens <= kernels::max_tokens(Family::kDecodeB1, g);
                 ++tokens) {
              const DecodeShape shape =
                  decode_shape(gpu, Family::kDecodeB1, tokens, n, k, g, engine);
              const DecodeLaunch launch = plan_decode_b1(shape);
              const bool ring = plan_decode_b1_ring(shape).kernel != nullptr;
              ASSERT_EQ(launch.kernel != nullptr, ring || tokens <= kernels::max_b1_tokens(g));
              if (launch.kernel == nullptr) continue;
              expect_legal(launch, gpu);
              if (!ring) expect_some_fetch_early(launch, gpu);
            }
          }
        }
      }
    }
  }
}

TEST(Plan, EvenGridsTakeAsLong) {
  for (std::int64_t most = 1; most <= 150; most += 7) {
    for (std::int64_t blocks = 1; blocks < 2000; blocks += 3) {
      const std::int64_t grid = even_grid(blocks, most), each = (blocks + most - 1) / most;
      ASSERT_LE(grid, most) << blocks;
      ASSERT_EQ((blocks + grid - 1) / grid, each) << blocks << " by " << grid;
      if (grid > 1) ASSERT_GT((blocks + grid - 2) / (grid - 1), each) << "there are fewer";
    }
  }
  EXPECT_EQ(even_grid(320, 132), 107);
  EXPECT_EQ(even_grid(0, 132), 0);
}

TEST(Plan, BatchLaunchesAreLegal) {
  for (const Gpu& gpu : kGpus) {
    for (const std::int64_t g : kGroupSizes) {
      for (const std::int64_t n : kRowCounts) {
        for (const std::int64_t m : {1, 17, 64, 65, 300, 4096, 70000}) {
          SCOPED_TRACE(::testing::Message() << "M = " << m << ", N = " << n << ", G = " << g
                                            << ", shared memory " << gpu.shared_limit);
          const MmaLaunch mma = plan_mma(m, n, g, gpu.multiprocessors, gpu.shared_memory);
          EXPECT_TRUE(is_prepared(mma.kernel));
          EXPECT_GT(mma.grid, 0u);
          EXPECT_LE(mma.threads, kMaxThreads);
          EXPECT_LE(mma.shared_bytes, static_cast<std::uint32_t>(gpu.shared_limit));
          if (gpu.shared_limit < 227 * kKiB) continue;  // not Hopper
          for (const std::int64_t k : {g, 5 * kSliceK, 17 * kSliceK}) {
            for (const bool may_cut : {false, true}) {
              const WgmmaLaunch wgmma =
                  plan_wgmma({kernels::choose_wgmma(m, n, k, may_cut, gpu.multiprocessors), m, n, k,
                              g, gpu.shared_limit, gpu.shared_memory, gpu.multiprocessors});
              EXPECT_TRUE(is_prepared(wgmma.kernel));
              EXPECT_GT(wgmma.grid, 0u);
              // A CTA's next whole tile is found by steps, without a division.
              const kernels::TileShares& shares = wgmma.shares;
              EXPECT_EQ(shares.row_tiles, (n + wgmma.rows - 1) / wgmma.rows);
              EXPECT_EQ(shares.grid_tokens * shares.row_tiles + shares.grid_rows, wgmma.grid);
              EXPECT_LT(shares.grid_rows, shares.row_tiles);
              EXPECT_LE(wgmma.threads, kMaxThreads);
              EXPECT_LE(wgmma.shared_bytes, static_cast<std::uint32_t>(gpu.shared_limit));
            }
          }
        }
      }
    }
  }
}

// Each part of each slice is some warp's in some round, once; and no waiter can take a stage's
// filling for the last but one.
template <int kTokens>
void check_ring(const DecodeLaunch& launch, const Gpu& gpu, std::int64_t n, unsigned slices) {
  using Plan = kernels::DecodeRing<kTokens, 128, false>;  // cut alike for all groups
  kernels::DecodeRingCut cut;
  std::memcpy(&cut, launch.cut, sizeof(cut));
  const auto blocks = static_cast<std::uint32_t>((n + Plan::kRows - 1) / Plan::kRows);
  const std::uint32_t own = (blocks + launch.grid - 1) / launch.grid;
  EXPECT_EQ(cut.blocks, blocks);
  EXPECT_LE(launch.grid, blocks);
  EXPECT_EQ(launch.warps, cut.warps * cut.sets + 2 * cut.helpers);
  EXPECT_GE(cut.helpers, 1u);
  EXPECT_LE(cut.helpers, static_cast<std::uint32_t>(kernels::kMaxConverters));
  EXPECT_GE(cut.stages, 1u);
  EXPECT_LE(cut.stages, own);
  EXPECT_GE(cut.early, 1u);
  EXPECT_EQ(launch.shared_bytes, cut.stages * cut.stage_bytes);
  EXPECT_EQ(cut.ring_bytes, launch.shared_bytes);
  EXPECT_EQ(cut.stage_bytes % 1024, 0u);
  EXPECT_EQ(cut.set_bytes, cut.sets * cut.stage_bytes);
  EXPECT_LE(cut.sets, cut.stages);
  if (cut.stages < own) EXPECT_EQ(cut.stages % cut.sets, 0u) << "a set sees all that a stage has";
  if (cut.rounds > 1) {
    EXPECT_EQ(cut.sets, 1u);
    EXPECT_LE(cut.phase, cut.stages) << "blocks stay for all rounds";
  } else {
    EXPECT_EQ(cut.phase, own);
  }
  if (launch.grid > static_cast<std::uint32_t>(gpu.multiprocessors)) {  // two a multiprocessor
    EXPECT_LE(2 * (launch.shared_bytes + kReservedSharedBytes),
              static_cast<std::uint32_t>(gpu.shared_memory));
    EXPECT_LE(2 * launch.warps * kernels::kWarpSize, Plan::kMaxThreads);
  }

  std::vector<int> done(slices * Plan::kSliceParts);
  for (std::uint32_t warp = 0; warp < cut.warps; ++warp) {
    std::uint32_t slice = warp / cut.parts, part = warp % cut.parts;
    for (std::uint32_t round = 0; round < cut.rounds; ++round) {
      if (slice < slices) ++done[slice * Plan::kSliceParts + part];
      part += cut.parts;
      if (part >= Plan::kSliceParts) part = warp % cut.parts, slice += cut.warps / cut.parts;
    }
  }
  for (const int times : done) ASSERT_EQ(times, 1);
}

TEST(Plan, RingsDoEachPartOnce) {
  int rings = 0;
  for (const Gpu& gpu : kGpus) {
    for (const std::int64_t g : {128, 256}) {
      for (const std::int64_t n : kRowCounts) {
        for (unsigned slices = 1; slices <= 66; ++slices) {
          SCOPED_TRACE(::testing::Message() << "N = " << n << ", " << slices << " slices, G = " << g
                                            << ", shared memory " << gpu.shared_limit);
          for (const std::uint8_t tokens : {8, 16}) {
            const DecodeLaunch launch = plan_decode_ring(
                decode_shape(gpu, Family::kDecodeS8, tokens, n, slices * kSliceK, g, true));
            if (launch.kernel == nullptr) continue;
            ++rings;
            expect_legal(launch, gpu);
            if (tokens == 8) {
              check_ring<8>(launch, gpu, n, slices);
            } else {
              check_ring<16>(launch, gpu, n, slices);
            }
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(rings, 1000);
}

template <int kTokens>
void check_b1_ring(const DecodeLaunch& launch, std::int64_t n, unsigned slices) {
  using Plan = kernels::DecodeB1Ring<kTokens, 128, false>;  // cut alike for all groups
  kernels::DecodeB1RingCut cut;
  std::memcpy(&cut, launch.cut, sizeof(cut));
  const auto blocks = static_cast<std::uint32_t>((n + Plan::kRows - 1) / Plan::kRows);
  EXPECT_EQ(cut.blocks, blocks);
  EXPECT_LE(launch.grid, blocks);
  EXPECT_EQ(cut.own, (blocks + launch.grid - 1) / launch.grid);
  EXPECT_EQ(launch.warps, static_cast<std::uint32_t>(Plan::kWarps));
  EXPECT_GE(cut.stages, 1u);
  EXPECT_LE(cut.stages, cut.own);
  EXPECT_GE(cut.early, 1u);
  EXPECT_EQ(cut.stage_bytes % 1024, 0u);
  EXPECT_EQ(cut.ring_bytes, cut.stages * cut.stage_bytes);
  EXPECT_EQ(launch.shared_bytes, cut.ring_bytes + slices * kTokens * Plan::kXBytes);
  EXPECT_EQ(launch.slices, slices);
}

// All that takes_b1_ring promises fits on Hopper, whose shared memory it is for.
TEST(Plan, B1RingsFit) {
  const Gpu& h200 = kGpus[0];
  int rings = 0;
  for (const std::int64_t g : {128, 256}) {
    for (const std::int64_t n : kRowCounts) {
      for (unsigned slices = 1; slices <= 26; ++slices) {
        for (const std::uint8_t tokens : {1, 2, 3, 4}) {
          SCOPED_TRACE(::testing::Message()
                       << tokens << " tokens, N = " << n << ", " << slices << " slices, G = " << g);
          const std::int64_t k = slices * kSliceK;
          const DecodeLaunch launch =
              plan_decode_b1_ring(decode_shape(h200, Family::kDecodeB1, tokens, n, k, g, true));
          ASSERT_EQ(launch.kernel != nullptr,
                    kernels::takes_b1_ring(tokens, n, k, g, h200.multiprocessors));
          if (launch.kernel == nullptr) continue;
          ++rings;
          expect_legal(launch, h200);
          if (tokens == 2) check_b1_ring<2>(launch, n, slices);
          if (tokens == 3) check_b1_ring<3>(launch, n, slices);
          if (tokens == 4) check_b1_ring<4>(launch, n, slices);
        }
      }
    }
  }
  EXPECT_GT(rings, 100);
}

// Else they would be right, but go without the copy engine.
TEST(Plan, HalfSlicesHaveKernelsOfTheCopyEngine) {
  const Gpu& h200 = kGpus[0];
  const auto check = [&](const DecodeLaunch& half, const DecodeLaunch& whole) {
    ASSERT_NE(half.kernel, nullptr);
    expect_legal(half, h200);
    EXPECT_TRUE(half.engine);
    EXPECT_EQ(half.slices, whole.slices);
    EXPECT_NE(half.kernel, whole.kernel);
  };
  for (const std::int64_t slices : {2, 3, 10, 17}) {
    const std::int64_t k = slices * kSliceK - kSliceK / 2;
    ASSERT_TRUE(kernels::has_half_slice(k, 128));
    for (const std::int64_t n : kRowCounts) {
      SCOPED_TRACE(::testing::Message() << "N = " << n << ", " << slices << " slices");
      const auto shape = [&](Family family, std::uint8_t tokens, std::int64_t own_k) {
        return decode_shape(h200, family, tokens, n, own_k, 128, true);
      };
      for (const std::uint8_t tokens : {1, 2, 3, 4}) {
        DecodeShape half = shape(Family::kDecodeB1, tokens, k);
        DecodeShape whole = shape(Family::kDecodeB1, tokens, slices * kSliceK);
        check(plan_decode_b1(half), plan_decode_b1(whole));
        half.quantizes = whole.quantizes = true;
        if (tokens == 1) check(plan_decode_b1(half), plan_decode_b1(whole));
      }
      for (const std::uint8_t tokens : {8, 16}) {
        check(plan_decode_s8(shape(Family::kDecodeS8, tokens, k)),
              plan_decode_s8(shape(Family::kDecodeS8, tokens, slices * kSliceK)));
      }
    }
  }
  EXPECT_FALSE(kernels::has_half_slice(kSliceK / 2, 128));
  EXPECT_FALSE(kernels::has_half_slice(2 * kSliceK + 512, 256));
  EXPECT_FALSE(kernels::engine_takes(2 * kSliceK + 256, 128));
}

// The workspace has the rows that the last tiles read past M, in bounds: from 17 tokens on, as up
// to 16 a tile may be more than twice M.
TEST(Plan, TheWorkspaceHasWholeTiles) {
  constexpr std::int64_t kK = 1024;
  std::size_t before = 0;
  for (std::int64_t m = 17; m <= 2000; ++m) {
    const std::size_t bytes = gemm_workspace_bytes(m, kK);
    ASSERT_GE(bytes, before) << "M = " << m;
    ASSERT_LE(bytes, linear_workspace_bytes(m, kK)) << "M = " << m;
    before = bytes;
    const std::int64_t hand_over =
        m < kernels::kWgmmaCutMinTokens ? 0 : std::int64_t{kernels::kHandOverBytes};
    const std::int64_t rows = (static_cast<std::int64_t>(bytes) - hand_over) / kK;
    for (const std::int64_t n : {1024, 2560, 5120, 8192, 17408, 248320}) {
      const kernels::KernelConfig config =
          kernels::choose_wgmma(m, n, kK, true, kGpus[0].multiprocessors);
      const std::int64_t whole = (m + config.tokens - 1) / config.tokens * config.tokens;
      ASSERT_LE(whole, rows) << "M = " << m << ", N = " << n << ", " << int{config.tokens}
                             << " tokens a tile";
    }
  }
}

// Groups of 32 and 64, few short rows of 8 tokens, and what the copy engine can't read go without.
TEST(Plan, RingsAreForWhatTheyAreFasterFor) {
  const Gpu& h200 = kGpus[0];
  const auto is_ring = [&](std::uint8_t tokens, std::int64_t n, std::int64_t k, std::int64_t g,
                           bool engine) {
    return plan_decode_ring(decode_shape(h200, Family::kDecodeS8, tokens, n, k, g, engine))
               .kernel != nullptr;
  };
  EXPECT_TRUE(is_ring(16, 5120, 5120, 128, true));
  EXPECT_TRUE(is_ring(8, 17408, 5120, 128, true));
  EXPECT_TRUE(is_ring(8, 5120, 17408, 256, true));
  EXPECT_FALSE(is_ring(8, 5120, 5120, 128, true));
  EXPECT_FALSE(is_ring(16, 5120, 5120, 64, true));
  EXPECT_FALSE(is_ring(16, 5120, 5120, 128, false));
}

}  // namespace
}  // namespace cuda
}  // namespace binary_gemm
