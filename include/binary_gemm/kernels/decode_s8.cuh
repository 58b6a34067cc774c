#pragma once

/// Decode on the int8 tensor core: y = x · Wᵀ for up to 8 or 16 tokens, any N, K and G.
///
/// Weights are expanded in registers from a bit to a byte of +1 or -1, or -1 or -3 where that is
/// cheaper (LowSigns; dots start from what it takes), and multiply as operand A of
/// m16n8k32: 16 rows of W by 8 tokens. Within each 32 weights of a row the order of K is permuted,
/// so that a lane expands the word it holds and nothing moves between lanes: with bit 4i + j of a
/// word's half at byte i of register j (expand_signs), the bytes of x take the same places on their
/// way to shared memory.
///
/// A CTA has several teams of warps, which share its x; a warp of a team has one slice of K (1024
/// weights: a 128-byte line of a row), or one a round where K has more slices than a team has
/// warps. The CTA's blocks of 16 or 32 rows of W go round the teams. For each block
///   1. weights and scales are fetched: blocks ahead, to a ring of stages, by Hopper's copy engine;
///      or when they are needed, by cp.async;
///   2. a warp turns the rows' scales into mantissas, a row a lane;
///   3. for each group it multiplies, and adds mantissa · dot to int32 sums: lane
///      (g, t) = (lane / 4, lane % 4) has rows g and g + 8 of every 16 and tokens 2t and 2t + 1 of
///      every 8;
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

/// Puts 32 consecutive bytes (four a word) in the order of expand_signs.
__device__ inline void permute_as_signs(std::uint32_t (&words)[8]) {
  transpose_bytes(&words[0]);
  transpose_bytes(&words[4]);
}

/// The shapes and the shared-memory plan of decode_s8, for host and device.
template <int kTokens, int kGroup, int kTileRows>
struct DecodeS8 {
  using Tile = WeightTilePlan<kTileRows, kGroup>;
  static_assert(kTokens % 8 == 0, "a product has 8 tokens");
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kRows = Tile::kRows;  ///< of W, a block
  static constexpr int kRowTiles = kRows / 16;
  /// Whether weights are expanded by LowSigns; with more tokens there are not the registers.
  static constexpr bool kLowSigns = kTokens == 8;
  static constexpr int kMaxWarps = 20;
  static constexpr int kMaxTeams = 4;
  static constexpr int kMaxStages = 12;
  /// Blocks a CTA may have if K takes several rounds: their sums wait in shared memory.
  static constexpr int kMaxSummedBlocks = 4;

  // What a warp keeps in shared memory: units, and for each of two blocks mantissas, then in their
  // place slice sums.
  static constexpr int kMantissaBytes = Tile::kMantissas * kRows * 4;
  static constexpr int kSumBytes = kTokens * kRows * 4;  ///< of a block; also between rounds
  static constexpr int kUnitBytes = kRows * 4;
  static constexpr int kBlockBytes = kMantissaBytes > kSumBytes ? kMantissaBytes : kSumBytes;
  static constexpr int kKeptBytes = kUnitBytes + 2 * kBlockBytes;
  /// x of a slice, as [block of 128][half of its words' registers][token][t] of 16 bytes; then what
  /// dots start from, as C fragments: [eight tokens][dot of a row][t] of 16 bytes.
  static constexpr int kStartOffset = kTokens * static_cast<int>(kSliceK);
  static constexpr int kXBytes =
      kStartOffset + (kLowSigns ? kTokenTiles * Tile::kMantissas * 64 : 0);
  static constexpr int kZeroBytes = 16;
  static constexpr int kXScaleBytes = kTokens * 4;
  /// Of a stage: its barrier, and how often it has been filled again.
  static constexpr int kBarrierBytes = 16;
  static constexpr int kFillOffset = 8;

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
           kZeroBytes + kXScaleBytes;
  }

  /// The cut for `k` weights a row where a CTA may have `shared_limit` bytes: the fewest rounds
  /// that leave a stage a team, and one more for the copy engine.
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
        if (fitting < shape.teams + (engine ? 1 : 0)) continue;
        shape.stages = engine ? (fitting < kMaxStages ? fitting : kMaxStages) : shape.teams;
        return shape;
      }
    }
    return {};
  }
};

/// One warp's work on one slice.
template <int kTokens, int kGroup, int kTileRows>
struct DecodeS8Warp : WeightTile<kTileRows, kGroup> {
  using Plan = DecodeS8<kTokens, kGroup, kTileRows>;
  using Tile = WeightTile<kTileRows, kGroup>;
  using TilePlan = WeightTilePlan<kTileRows, kGroup>;
  using Tile::g, Tile::t, Tile::lane, Tile::params, Tile::own_row, Tile::line_column,
      Tile::mantissas;

  char* x;       ///< of the slice
  char* zeros;   ///< 16 bytes
  float* units;  ///< of the rows, in the order of their lanes
  LowSigns tables;

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
    if (Plan::kLowSigns) store_starts(m, words);
  }

  /// Turns the scales of row own_row() into mantissas and a unit, for the warp. They are in the
  /// order of own_row, so that a lane reads those of its rows at once.
  __device__ bool make_mantissas() const {
    std::uint32_t pairs[TilePlan::kScales / 2];
    this->load_scales(pairs);
    const unsigned own = lane % Plan::kRows;
    std::uint32_t* to = reinterpret_cast<std::uint32_t*>(mantissas) + own;
    constexpr int kTimes = TilePlan::kMantissas / TilePlan::kScales;
    const SliceUnit unit =
        kernels::make_mantissas(pairs, [&](int i, std::uint32_t low, std::uint32_t high) {
#pragma unroll
          for (int j = 0; j < kTimes; ++j) {
            to[(2 * i * kTimes + j) * Plan::kRows] = low - kMantissaBits;
            to[((2 * i + 1) * kTimes + j) * Plan::kRows] = high - kMantissaBits;
          }
        });
    units[own] = unit.unit;
    return unit.narrow;
  }

  /// The slice sums of all rows and tokens, rounded, in place of the mantissas.
  __device__ void multiply() const {
    Sums sums = {};
    // The loop is unrolled no further, for registers.
#pragma unroll(kTokens* Plan::kRows == 128 ? 2 : 1)
    for (int two = 0; two < TilePlan::kBlocks / 2; ++two) {
      // A words of blocks 2·two and 2·two + 1: word t of rows g and g + 8.
      std::uint32_t a[Plan::kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
        ptx::ldmatrix_x4(
            a[tile], ptx::shared_address(line_column(tile * 16 + lane % 16, 2 * two + lane / 16)));
      }
      multiply_block<0>(2 * two, a, sums);
      multiply_block<1>(2 * two + 1, a, sums);
    }
    float unit[2 * Plan::kRowTiles];
    load_of_rows(unit, units);
    __syncwarp();  // nobody reads mantissas
#pragma unroll
    for (int i = 0; i < 2 * Plan::kRowTiles; ++i) {
#pragma unroll
      for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          *slice_sum(mantissas, tokens * 8 + 2 * t() + j, i * 8 + g()) =
              __fmul_rn(static_cast<float>(sums[i / 2][tokens][i % 2 * 2 + j]), unit[i]);
        }
      }
    }
  }

  /// Where a row's and token's slice sum is. Without the exclusive or, lanes t of a warp would meet
  /// in one bank.
  __device__ static float* slice_sum(char* sums, unsigned m, unsigned row) {
    return reinterpret_cast<float*>(sums) + ((m * Plan::kRows + row) ^ m / 2 % 4 * 8);
  }

  /// Replaces the slice sums of wide rows. Right rather than fast: lane i has word i.
  __device__ void wide_sums(bool narrow) const {
    std::uint32_t wide = __ballot_sync(0xffffffffu, !narrow);
    if (Plan::kRows == 16) wide &= 0xffffu;  // lanes 16 on repeat the rows
#pragma unroll 1
    for (; wide != 0; wide &= wide - 1) {
      const unsigned row = __shfl_sync(0xffffffffu, own_row(), __ffs(static_cast<int>(wide)) - 1);
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
        const float sum = wide_sum<kGroup>(dot, scales, this->groups());
        if (lane == 0) *slice_sum(mantissas, m, row) = sum;
      }
    }
  }

 private:
  /// Four registers of all tokens: 64 bytes a token.
  __device__ char* x_words(unsigned block, unsigned half, unsigned m) const {
    return x + ((block * 2 + half) * kTokens + m) * 64;
  }

  /// Keeps what dots of tokens m and m + 1 start from; `words` are those of store_x, in order.
  __device__ void store_starts(unsigned m, const std::uint32_t (&words)[2][8]) const {
    constexpr unsigned kLanes = 4 / TilePlan::kDotsPerBlock;  // words of a dot
    std::int32_t start[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (const int j : {2, 3, 6, 7}) start[i] = ptx::dp4a(words[i][j], 0x02020202u, start[i]);
#pragma unroll
      for (unsigned lanes = 1; lanes < kLanes; lanes *= 2) {
        start[i] += __shfl_xor_sync(0xffffffffu, start[i], lanes);
      }
    }
    if (lane % kLanes == 0) {
      *starts(m / 8, lane / kLanes, m % 8 / 2) = make_int4(start[0], start[1], start[0], start[1]);
    }
  }

  /// What dots of lanes t start from: a C fragment.
  __device__ int4* starts(unsigned tokens, unsigned dot, unsigned t) const {
    return reinterpret_cast<int4*>(x + Plan::kStartOffset) +
           (tokens * TilePlan::kMantissas + dot) * 4 + t;
  }

  /// C fragments of Σ mantissa · dot: 16 rows by 8 tokens each.
  using Sums = std::int32_t[Plan::kRowTiles][Plan::kTokenTiles][4];

  /// Reads the values of rows g, g + 8, ... from an array in the order of own_row.
  template <class T>
  __device__ void load_of_rows(T (&values)[2 * Plan::kRowTiles], const void* from) const {
    struct alignas(sizeof(values)) All {
      T values[2 * Plan::kRowTiles];
    };
    const All all = static_cast<const All*>(from)[g()];
#pragma unroll
    for (int i = 0; i < 2 * Plan::kRowTiles; ++i) values[i] = all.values[i];
  }

  /// The registers of word t of all tokens g. Smaller groups: lanes that hold other groups' words
  /// multiply by zeros.
  __device__ void load_x(int block, int part, std::uint32_t (&b)[Plan::kTokenTiles][8]) const {
    const bool used = kGroup >= 128 || t() / (kGroup / 32) == static_cast<unsigned>(part);
#pragma unroll
    for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Tile::load_4_words(&b[tokens][4 * half],
                           used ? x_words(block, half, tokens * 8 + g()) + t() * 16 : zeros);
      }
    }
  }

  /// sums += mantissa · dot for the groups of a block: half kHalf of two.
  template <int kHalf>
  __device__ void multiply_block(int block, const std::uint32_t (&a)[Plan::kRowTiles][4],
                                 Sums& sums) const {
    constexpr int kParts = TilePlan::kDotsPerBlock;
    std::uint32_t b[Plan::kTokenTiles][8];
    int4 start[Plan::kTokenTiles];
    std::int32_t mantissa[2 * Plan::kRowTiles];
    const auto load = [&](int part) {
      load_x(block, part, b);
#pragma unroll
      for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
        start[tokens] =
            Plan::kLowSigns ? *starts(tokens, block * kParts + part, t()) : make_int4(0, 0, 0, 0);
      }
      load_of_rows(mantissa, mantissas + (block * kParts + part) * Plan::kRows * 4);
    };
    if (kParts == 1) load(0);
#pragma unroll
    for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
      std::uint32_t signs[2][8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (Plan::kLowSigns) {
          tables.expand(a[tile][2 * kHalf + i], signs[i]);
        } else {
          expand_signs(a[tile][2 * kHalf + i], signs[i]);
        }
      }
#pragma unroll(kParts* Plan::kTokenTiles == 8 ? 2 : kParts)  // for registers
      for (int part = 0; part < kParts; ++part) {
        if (kParts > 1) load(part);  // words kGroup / 32 · part and on of the block
#pragma unroll
        for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
          std::int32_t dot[4] = {start[tokens].x, start[tokens].y, start[tokens].z,
                                 start[tokens].w};
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            const std::uint32_t fragment[4] = {signs[0][2 * step], signs[1][2 * step],
                                               signs[0][2 * step + 1], signs[1][2 * step + 1]};
            ptx::mma_s8_m16n8k32(dot, fragment, b[tokens][2 * step], b[tokens][2 * step + 1]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[tile][tokens][i] += mantissa[2 * tile + i / 2] * dot[i];
          }
        }
      }
    }
  }
};

/// Adds `count` pairs of slice sums in order to `acc`; `sums` points at the first, `stride` bytes
/// apart.
__device__ inline float2 add_slice_pairs(float2 acc, const char* sums, unsigned stride,
                                         unsigned count) {
  constexpr unsigned kAtOnce = 5;
#pragma unroll 1
  for (unsigned s = 0; s < count; s += kAtOnce) {
    // acc is never -0, so adding the +0 of a missing slice changes nothing.
    float2 p[kAtOnce];
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      p[i] = make_float2(0, 0);
      if (s + i < count) p[i] = *reinterpret_cast<const float2*>(sums + (s + i) * stride);
    }
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      acc.x = __fadd_rn(acc.x, p[i].x);
      acc.y = __fadd_rn(acc.y, p[i].y);
    }
  }
  return acc;
}

/// How a CTA is cut: DecodeS8::Shape, and the number of blocks of rows in N.
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
/// (see weight_tile.cuh).
template <int kTokens, int kGroup, int kTileRows, bool kEngine>
__global__ void __launch_bounds__(DecodeS8<kTokens, kGroup, kTileRows>::kMaxWarps* kWarpSize, 1)
    decode_s8(const __grid_constant__ GemmParams params,
              const __grid_constant__ CUtensorMap bits_map,
              const __grid_constant__ DecodeS8Cut cut) {
  using Plan = DecodeS8<kTokens, kGroup, kTileRows>;
  using Warp = DecodeS8Warp<kTokens, kGroup, kTileRows>;
  using TilePlan = WeightTilePlan<kTileRows, kGroup>;
  extern __shared__ __align__(1024) char shared[];
  const unsigned lane = threadIdx.x;
  const unsigned slice = threadIdx.y;  // of the round
  const unsigned team = threadIdx.z;
  const unsigned warp = team * cut.slices + slice;
  const unsigned warps = cut.teams * cut.slices;
  // Stages of bits, stages of scales, what warps keep, x, sums between rounds, zeros, scales of
  // x, barriers.
  const unsigned bits_bytes = cut.slices * TilePlan::kBitsBytes;
  char* scales = shared + cut.stages * bits_bytes;
  char* kept = scales + cut.stages * cut.scale_bytes;
  char* x = kept + warps * Plan::kKeptBytes;
  char* sums = x + cut.slices * Plan::kXBytes;
  char* zeros = sums + (cut.rounds > 1 ? Plan::kMaxSummedBlocks * Plan::kSumBytes : 0);
  float* x_scales = reinterpret_cast<float*>(zeros + Plan::kZeroBytes);
  const std::uint32_t barriers = ptx::shared_address(x_scales) + Plan::kXScaleBytes;
  const auto fills = [&](unsigned stage) {
    return reinterpret_cast<volatile std::uint32_t*>(zeros + Plan::kZeroBytes + Plan::kXScaleBytes +
                                                     stage * Plan::kBarrierBytes +
                                                     Plan::kFillOffset);
  };

  // Items are (round, block) pairs of the CTA, rounds outermost: item i is in stage i % stages.
  const auto fetch = [&](unsigned round, unsigned block, unsigned stage) {
#if __CUDA_ARCH__ >= 900
    // Two arrivals complete the phase: one with the bits' bytes, one with the scales'.
    fetch_bits_by_engine(bits_map, block * Plan::kRows, Plan::kRows, round * cut.slices, cut.slices,
                         shared + stage * bits_bytes, barriers + stage * Plan::kBarrierBytes);
    fetch_scales_by_engine(params, block * Plan::kRows, Plan::kRows,
                           scales + stage * cut.scale_bytes,
                           barriers + stage * Plan::kBarrierBytes);
#endif
  };
#if __CUDA_ARCH__ >= 900
  if (kEngine && warp == 0 && lane == 0) {
#pragma unroll 1
    for (unsigned i = 0; i < cut.stages; ++i) {
      ptx::mbarrier_init(barriers + i * Plan::kBarrierBytes, 2);
      *fills(i) = 0;
    }
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

  char* own_kept = kept + warp * Plan::kKeptBytes;
  Warp work{{params, nullptr, nullptr,
             kEngine ? params.scales_stride * 2 : cut.slices * TilePlan::kScales * 2, nullptr, 0,
             slice, lane},
            nullptr,
            zeros,
            reinterpret_cast<float*>(own_kept),
            LowSigns::make(lane / kWarpSize)};
  char* team_kept = kept + team * cut.slices * Plan::kKeptBytes;  // the next warps' follow
  const unsigned team_thread = slice * kWarpSize + lane;
  const unsigned team_threads = cut.slices * kWarpSize;
  const unsigned own_blocks = (cut.blocks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  unsigned own_sums = Plan::kUnitBytes;  // offset of one of the two blocks' in what a warp keeps
  unsigned item = team, stage = team;
  unsigned fill = 0;  // of the stage
  ptx::wait_for_dependencies();
  if (warp == 0 && lane < params.m) {
    ptx::cp_async_4(ptx::shared_address(x_scales + lane), params.x_scales + lane);
    ptx::cp_async_commit();
  }

#pragma unroll 1
  for (unsigned round = 0; round < cut.rounds; ++round) {
    if (round > 0) __syncthreads();  // nobody reads the last round's x
    // Pairs of tokens of a slice go round the teams.
    work.slice = round * cut.slices + slice;
    work.x = x + slice * Plan::kXBytes;
#pragma unroll 1
    for (unsigned m = 2 * team; m < kTokens; m += 2 * cut.teams) work.store_x(m);
    ptx::cp_async_wait<0>();  // the scales of x
    const bool busy = work.slice < params.slices;
    const unsigned scale_slice = kEngine ? work.slice : slice;
    __syncthreads();  // x, and the barriers, are ready

#pragma unroll 1
    for (; item < (round + 1) * own_blocks; item += cut.teams) {
      const unsigned own_block = item - round * own_blocks;
      work.n0 = (blockIdx.x + own_block * gridDim.x) * Plan::kRows;
      work.bits = shared + stage * bits_bytes + slice * TilePlan::kBitsBytes;
      work.scales = scales + stage * cut.scale_bytes + scale_slice * TilePlan::kScales * 2;
      work.mantissas = own_kept + own_sums;
      if (kEngine) {
        // A barrier tells a phase from the next, not from the one after it, and the stage's last
        // block may have been another team's.
        while (*fills(stage) != fill) {
        }
        wait_for_barrier(barriers + stage * Plan::kBarrierBytes, fill & 1);
      } else if (busy) {
        work.fetch_bits();
        work.fetch_scales();
      }
      if (busy) {
        __syncwarp();
        const bool narrow = work.make_mantissas();
        if (!kEngine) ptx::cp_async_wait<0>();
        __syncwarp();
        work.multiply();
        if (__any_sync(0xffffffffu, !narrow)) {
          __syncwarp();
          work.wide_sums(narrow);
        }
      }
      ptx::named_barrier_sync(1 + team, team_threads);
      // The stage is free for the item that follows it there.
      const unsigned next = item + cut.stages;
      if (kEngine && team_thread == 0 && next < own_blocks * cut.rounds) {
        const unsigned next_round = cut.rounds == 1 ? 0 : next / own_blocks;
        fetch(next_round, blockIdx.x + (next - next_round * own_blocks) * gridDim.x, stage);
        *fills(stage) = fill + 1;
      }
      stage += cut.teams;
      if (stage >= cut.stages) stage -= cut.stages, ++fill;

      // A thread adds up two rows of a token.
      const unsigned at_once = min(cut.slices, params.slices - round * cut.slices);
      constexpr unsigned kPairs = Plan::kRows / 2;
#pragma unroll 1
      for (unsigned i = team_thread; i < params.m * kPairs; i += team_threads) {
        const unsigned row = i % kPairs * 2;
        const unsigned m = i / kPairs;
        float2* sum = reinterpret_cast<float2*>(sums + own_block * Plan::kSumBytes) + i;
        const float2 acc = add_slice_pairs(
            round == 0 ? make_float2(0, 0) : *sum,
            reinterpret_cast<const char*>(Warp::slice_sum(team_kept + own_sums, m, row)),
            Plan::kKeptBytes, at_once);
        if (round + 1 < cut.rounds) {
          *sum = acc;
        } else {
          store_pair(params, m, work.n0 + row, acc, x_scales[m]);
        }
      }
      own_sums = 2 * Plan::kUnitBytes + Plan::kBlockBytes - own_sums;
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
