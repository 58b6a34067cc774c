#pragma once

/// Decode on the int8 tensor core: y = x · Wᵀ for up to 8 or 16 tokens, any N, K and G. On Hopper
/// decode_ring.cuh takes some shapes: see takes_ring in tuning.h.
///
/// Weights are expanded in registers from a bit to a byte of +1 or -1, and multiply as operand A of
/// m16n8k32: 16 rows of W by 8 tokens. Within each 32 weights of a row the order of K is permuted,
/// so that a lane expands the word it holds and nothing moves between lanes: with bit 4i + j of a
/// word's half at byte i of register j (expand_signs), the bytes of x take the same places on their
/// way to shared memory.
///
/// A CTA has several teams of warps, which share its x; a warp of a team has one slice of K (1024
/// weights: a 128-byte line of a row), or one a round where K has more slices than a team has
/// warps. The CTA's blocks of 16 rows of W go round the teams. For each block
///   1. weights and scales are fetched: blocks ahead, to a ring of stages, by Hopper's copy engine;
///      or when they are needed, by cp.async;
///   2. a warp turns the rows' scales into mantissas, a row a lane;
///   3. for each group it multiplies, and adds mantissa · dot to int32 sums: lane
///      (g, t) = (lane / 4, lane % 4) has rows g and g + 8 and tokens 2t and 2t + 1 of every 8;
///   4. slice sums, rounded once, meet in shared memory; the team adds them in order.
/// x is put in shared memory once a round. Only that depends on an earlier kernel, so with
/// programmatic dependent launch the first weights are there before the wait.

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"

namespace binary_gemm {
namespace kernels {

/// The shapes and the shared-memory plan of decode_s8, for host and device.
template <int kTokens, int kGroup>
struct DecodeS8 {
  using Tile = WeightTilePlan<16, kGroup>;
  static_assert(kTokens % 8 == 0, "a product has 8 tokens");
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kRows = Tile::kRows;  ///< of W, a block
  static constexpr int kMaxWarps = 20;
  static constexpr int kMaxTeams = 4;
  static constexpr int kMaxStages = 12;
  /// Blocks a CTA may have if K takes several rounds: their sums wait in shared memory.
  static constexpr int kMaxSummedBlocks = 4;

  // What a warp keeps in shared memory: mantissas, units, slice sums of two blocks.
  static constexpr int kUnitOffset = Tile::kMantissaBytes;
  static constexpr int kPartialOffset = kUnitOffset + kRows * 4;
  static constexpr int kPartialStride = kRows + 4;  ///< floats of a token, padded
  static constexpr int kPartialBytes = kTokens * kPartialStride * 4;
  static constexpr int kKeptBytes = kPartialOffset + 2 * kPartialBytes;
  /// x of a slice, as [block of 128][half of its words' registers][token][t] of 16 bytes.
  static constexpr int kXBytes = kTokens * static_cast<int>(kSliceK);
  static constexpr int kSumBytes = kTokens * kRows * 4;  ///< of a block, between rounds
  static constexpr int kZeroBytes = 16;
  static constexpr int kBarrierBytes = 8;  ///< a stage

  /// How a CTA is cut; made by plan().
  struct Shape {
    int slices;  ///< at once: warps of a team; 0 if nothing fits
    int rounds;
    int teams;
    int stages;
    int scale_bytes;  ///< of a stage
  };

  static constexpr int stage_bytes(const Shape& shape) {
    return shape.slices * Tile::kBitsBytes + shape.scale_bytes + kBarrierBytes;
  }
  static constexpr int shared_bytes(const Shape& shape) {
    return shape.stages * stage_bytes(shape) + shape.teams * shape.slices * kKeptBytes +
           shape.slices * kXBytes + (shape.rounds > 1 ? kMaxSummedBlocks * kSumBytes : 0) +
           kZeroBytes;
  }

  /// The cut for `k` weights a row where a CTA may have `shared_limit` bytes: the fewest rounds
  /// that leave two stages a team for the copy engine (one, without it).
  static constexpr Shape plan(std::int64_t k, bool engine, int shared_limit) {
    const std::int64_t all = k > 0 ? (k + kSliceK - 1) / kSliceK : 1;
    for (std::int64_t rounds = (all + kMaxWarps - 1) / kMaxWarps; rounds <= all; ++rounds) {
      Shape shape{static_cast<int>((all + rounds - 1) / rounds), static_cast<int>(rounds),
                  kMaxTeams, 0, 0};
      // The copy engine brings the scales of all rounds.
      shape.scale_bytes =
          kRows * (engine ? static_cast<int>(all) : shape.slices) * Tile::kScales * 2;
      if (shape.teams * shape.slices > kMaxWarps) shape.teams = kMaxWarps / shape.slices;
      for (; shape.teams > 0; --shape.teams) {
        shape.stages = 0;
        const int left = shared_limit - shared_bytes(shape);
        const int fitting = left > 0 ? left / stage_bytes(shape) : 0;
        const int wanted = engine ? 2 * shape.teams : shape.teams;
        if (fitting < wanted) continue;
        // A multiple of the teams, so that a stage is always the same team's: a barrier's parity
        // does not tell the next fill from the last but one, which a team that is ahead of another
        // could take for it.
        const int most = fitting < kMaxStages ? fitting : kMaxStages;
        shape.stages = engine ? most / shape.teams * shape.teams : shape.teams;
        return shape;
      }
    }
    return {};
  }
};

/// One warp's work on one slice.
template <int kTokens, int kGroup, bool kHalf>
struct DecodeS8Warp : WeightTile<16, kGroup, kHalf> {
  using Plan = DecodeS8<kTokens, kGroup>;
  using Tile = WeightTile<16, kGroup, kHalf>;
  using TilePlan = WeightTilePlan<16, kGroup>;
  using Tile::g, Tile::t, Tile::lane, Tile::params, Tile::own_row, Tile::mantissa_row,
      Tile::line_column, Tile::mantissas;

  char* x;      ///< of the slice
  char* zeros;  ///< 16 bytes

  /// Puts tokens m and m + 1 of the slice in shared memory, zeros past M and K.
  __device__ void store_x(unsigned m) const {
    std::uint32_t words[2][8];  // word t of block g
    load_chunks(words, params, m, 1, this->k0() + lane * 32);
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      permute_as_signs(words[i]);
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
        *reinterpret_cast<uint4*>(x_words(g(), half, m + i) + t() * 16) =
            make_uint4(words[i][4 * half], words[i][4 * half + 1], words[i][4 * half + 2],
                       words[i][4 * half + 3]);
      }
    }
  }

  /// Keeps the unit of row own_row() for the warp.
  __device__ void store_unit(const SliceUnit& unit) const { units()[own_row()] = unit.unit; }

  /// The slice sums of all rows and tokens, rounded, to `partial`.
  __device__ void multiply(float* partial) const {
    // C fragments of Σ mantissa · dot. The loop is not unrolled further, for registers.
    std::int32_t acc[Plan::kTokenTiles][4] = {};
#pragma unroll(kTokens == 8 ? 2 : 1)
    for (int two = 0; two < TilePlan::kBlocks / 2; ++two) {
      // A words of blocks 2·two and 2·two + 1: word t of rows g and g + 8.
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, ptx::shared_address(line_column(lane % 16, 2 * two + lane / 16)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t signs[2][8];
        expand_signs(a[2 * i], signs[0]);
        expand_signs(a[2 * i + 1], signs[1]);
#pragma unroll
        for (int part = 0; part < TilePlan::kDotsPerBlock; ++part) {
          multiply_group(2 * two + i, part, signs, acc);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned row = i * 8 + g();
      const float unit = units()[row];
#pragma unroll
      for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          partial[(tokens * 8 + 2 * t() + j) * Plan::kPartialStride + row] =
              __fmul_rn(static_cast<float>(acc[tokens][2 * i + j]), unit);
        }
      }
    }
  }

  /// Replaces the slice sums of wide rows. Right rather than fast: lane i has word i.
  __device__ void wide_sums(bool narrow, float* partial) const {
    std::uint32_t wide = this->wide_lanes(narrow) & 0xffffu;  // lanes 16 on repeat the rows
#pragma unroll 1
    for (; wide != 0; wide &= wide - 1) {
      const unsigned row = static_cast<unsigned>(__ffs(static_cast<int>(wide)) - 1);
      const __half* scales = this->global_scales(row);
      std::uint32_t signs[8];
      expand_signs(
          *reinterpret_cast<const std::uint32_t*>(line_column(row, lane / 4) + lane % 4 * 4),
          signs);
#pragma unroll 1
      for (unsigned m = 0; m < kTokens; ++m) {
        std::uint32_t words[8];
        Tile::load_4_words(&words[0], x_words(g(), 0, m) + t() * 16);
        Tile::load_4_words(&words[4], x_words(g(), 1, m) + t() * 16);
        std::int32_t dot = 0;
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) dot = ptx::dp4a(signs[j], words[j], dot);
        const float sum = wide_sum<kGroup>(dot, scales, this->groups_begin(), this->groups_end());
        if (lane == 0) partial[m * Plan::kPartialStride + row] = sum;
      }
    }
  }

 private:
  /// Four registers of all tokens: 64 bytes a token.
  __device__ char* x_words(unsigned block, unsigned half, unsigned m) const {
    return x + ((block * 2 + half) * kTokens + m) * 64;
  }

  __device__ float* units() const {
    return reinterpret_cast<float*>(mantissas + Plan::kUnitOffset);
  }

  /// acc += mantissa · dot for one group: words kGroup / 32 · part and on of the block.
  __device__ void multiply_group(int block, int part, const std::uint32_t (&signs)[2][8],
                                 std::int32_t (&acc)[Plan::kTokenTiles][4]) const {
    // Smaller groups: lanes that hold other groups' words multiply by zeros.
    const bool used = kGroup >= 128 || t() / (kGroup / 32) == static_cast<unsigned>(part);
    std::int32_t mantissa[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mantissa[i] = reinterpret_cast<const std::int16_t*>(
          mantissa_row(i * 8 + g()))[block * TilePlan::kDotsPerBlock + part];
    }
#pragma unroll
    for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
      std::uint32_t b[8];  // the registers of word t of token g
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Tile::load_4_words(&b[4 * half],
                           used ? x_words(block, half, tokens * 8 + g()) + t() * 16 : zeros);
      }
      std::int32_t dot[4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::uint32_t fragment[4] = {signs[0][2 * step], signs[1][2 * step],
                                           signs[0][2 * step + 1], signs[1][2 * step + 1]};
        ptx::mma_s8_m16n8k32(dot, fragment, b[2 * step], b[2 * step + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[tokens][i] += mantissa[i / 2] * dot[i];
    }
  }
};

/// How a CTA is cut: DecodeS8::Shape, and the number of blocks of 16 rows in N.
struct DecodeS8Cut {
  std::uint32_t slices;
  std::uint32_t rounds;
  std::uint32_t teams;
  std::uint32_t stages;
  std::uint32_t scale_bytes;
  std::uint32_t blocks;
};

/// Grid: any number of CTAs in x, but if there are several rounds so many that none has more than
/// kMaxSummedBlocks blocks; CTA i has blocks i, i + gridDim.x, ... Block: (32, slices, teams).
/// Dynamic shared memory: DecodeS8::shared_bytes. With kEngine the copy engine fetches the weights
/// (see weight_tile.cuh). `kHalf`: the last slice is a half, see Windows; then there is one round.
template <int kTokens, int kGroup, bool kEngine, bool kHalf>
__global__ void __launch_bounds__(DecodeS8<kTokens, kGroup>::kMaxWarps* kWarpSize, 1)
    decode_s8(const __grid_constant__ GemmParams params,
              const __grid_constant__ BitsMaps<kHalf> bits_maps,
              const __grid_constant__ DecodeS8Cut cut) {
  using Plan = DecodeS8<kTokens, kGroup>;
  using TilePlan = WeightTilePlan<16, kGroup>;
  static_assert(kEngine || !kHalf, "a short slice needs no kernel of its own there");
  extern __shared__ __align__(1024) char shared[];
  const unsigned lane = threadIdx.x;
  const unsigned slice = threadIdx.y;  // of the round
  const unsigned team = threadIdx.z;
  const unsigned warp = team * cut.slices + slice;
  const unsigned warps = cut.teams * cut.slices;
  // Stages of bits, stages of scales, what warps keep, x, sums between rounds, zeros, barriers.
  const unsigned bits_bytes = cut.slices * TilePlan::kBitsBytes;
  char* scales = shared + cut.stages * bits_bytes;
  char* kept = scales + cut.stages * cut.scale_bytes;
  char* x = kept + warps * Plan::kKeptBytes;
  float* sums = reinterpret_cast<float*>(x + cut.slices * Plan::kXBytes);
  char* zeros = reinterpret_cast<char*>(sums) +
                (cut.rounds > 1 ? Plan::kMaxSummedBlocks * Plan::kSumBytes : 0);
  const std::uint32_t barriers = ptx::shared_address(zeros) + Plan::kZeroBytes;

  // Items are (round, block) pairs of the CTA, rounds outermost: item i is in stage i % stages.
  const auto fetch = [&](unsigned round, unsigned block, unsigned stage) {
#if __CUDA_ARCH__ >= 900
    // Two arrivals complete the phase: one with the bits' bytes, one with the scales'.
    fetch_bits_by_engine(params, bits_maps, block * Plan::kRows, Plan::kRows, round * cut.slices,
                         cut.slices, shared + stage * bits_bytes, barriers + stage * 8);
    fetch_scales_by_engine(params, block * Plan::kRows, Plan::kRows,
                           scales + stage * cut.scale_bytes, barriers + stage * 8);
#endif
  };
#if __CUDA_ARCH__ >= 900
  if (kEngine && warp == 0 && lane == 0) {
#pragma unroll 1
    for (unsigned i = 0; i < cut.stages; ++i) ptx::mbarrier_init(barriers + i * 8, 2);
    ptx::fence_mbarrier_init();
    unsigned round = 0, block = blockIdx.x;
#pragma unroll 1
    for (unsigned i = 0; i < cut.stages && round < cut.rounds; ++i) {
      fetch(round, block, i);
      block += gridDim.x;
      if (block >= cut.blocks) block = blockIdx.x, ++round;
    }
  }
  __syncwarp();
#endif
  ptx::launch_dependents();
  if (warp == warps - 1 && lane < Plan::kZeroBytes / 4) {
    reinterpret_cast<std::uint32_t*>(zeros)[lane] = 0;
  }

  DecodeS8Warp<kTokens, kGroup, kHalf> work{
      {params, nullptr, nullptr,
       kEngine ? params.scales_stride * 2 : cut.slices * TilePlan::kScales * 2,
       kept + warp * Plan::kKeptBytes, 0, slice, lane},
      nullptr,
      zeros};
  float* partial = reinterpret_cast<float*>(work.mantissas + Plan::kPartialOffset);
  // The slice sums of the team's first warp; the next warps' follow kKeptBytes apart.
  const float* team_partial = reinterpret_cast<const float*>(
      kept + team * cut.slices * Plan::kKeptBytes + Plan::kPartialOffset);
  const unsigned team_thread = slice * kWarpSize + lane;
  const unsigned team_threads = cut.slices * kWarpSize;
  const unsigned own_blocks = (cut.blocks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const unsigned items = own_blocks * cut.rounds;
  unsigned half = 0;  // of the two blocks' slice sums
  unsigned item = team, stage = team, parity = 0;
  ptx::wait_for_dependencies();

#pragma unroll 1
  for (unsigned round = 0; round < cut.rounds; ++round) {
    if (round > 0) __syncthreads();  // nobody reads the last round's x
    // Pairs of tokens of a slice go round the teams.
    work.slice = round * cut.slices + slice;
    work.x = x + slice * Plan::kXBytes;
#pragma unroll 1
    for (unsigned m = 2 * team; m < kTokens; m += 2 * cut.teams) work.store_x(m);
    const bool busy = work.slice < params.slices;
    // Of a stage's row of scales, all of K's or those of the round.
    const unsigned first_scale = kEngine ? work.k0() / kGroup : slice * TilePlan::kScales;
    __syncthreads();  // x, and the barriers, are ready

#pragma unroll 1
    for (; item < (round + 1) * own_blocks; item += cut.teams) {
      const unsigned own_block = item - round * own_blocks;
      work.n0 = (blockIdx.x + own_block * gridDim.x) * Plan::kRows;
      work.bits = shared + stage * bits_bytes + slice * TilePlan::kBitsBytes;
      work.scales = scales + stage * cut.scale_bytes + first_scale * 2;
      if (kEngine) {
        wait_for_barrier(barriers + stage * 8, parity);
      } else if (busy) {
        work.fetch_weights();
        ptx::cp_async_wait<1>();
      }
      float* own_partial = partial + half * (Plan::kPartialBytes / 4);
      if (busy) {
        __syncwarp();
        const SliceUnit unit = work.make_mantissas();
        work.store_unit(unit);
        if (!kEngine) ptx::cp_async_wait<0>();
        __syncwarp();
        work.multiply(own_partial);
        if (__any_sync(0xffffffffu, !unit.narrow)) {
          __syncwarp();
          work.wide_sums(unit.narrow, own_partial);
        }
      }
      ptx::named_barrier_sync(1 + team, team_threads);
      // The stage is free for the item that follows it there.
      const unsigned next = item + cut.stages;
      if (kEngine && team_thread == 0 && next < items) {
        const unsigned next_round = cut.rounds == 1 ? 0 : next / own_blocks;
        fetch(next_round, blockIdx.x + (next - next_round * own_blocks) * gridDim.x, stage);
      }
      stage += cut.teams;
      if (stage >= cut.stages) stage -= cut.stages, parity ^= 1;

      const unsigned at_once = min(cut.slices, params.slices - round * cut.slices);
#pragma unroll 1
      for (unsigned i = team_thread; i < params.m * Plan::kRows; i += team_threads) {
        const unsigned row = i % Plan::kRows;
        const unsigned m = i / Plan::kRows;
        float* sum = sums + own_block * (Plan::kSumBytes / 4) + i;
        const float acc = add_slices(
            round == 0 ? 0.0f : *sum,
            team_partial + half * (Plan::kPartialBytes / 4) + m * Plan::kPartialStride + row,
            Plan::kKeptBytes / 4, at_once);
        if (round + 1 < cut.rounds) {
          *sum = acc;
        } else if (work.n0 + row < params.n) {
          store_element(params, m, work.n0 + row, acc, params.x_scales[m]);
        }
      }
      half ^= 1;
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
