#pragma once

/// Decode on the int8 tensor core: y = x · Wᵀ for up to 8, 16 or 32 tokens, any N, K and G.
///
/// Weights are expanded in registers from a bit to a byte of +1 or -1, and multiply as operand A of
/// m16n8k32: 16 rows of W by 8 tokens. Within each 32 weights of a row the order of K is permuted,
/// so that a lane expands the word it holds and nothing moves between lanes: with bit 4i + j of a
/// word's half at byte i of register j (expand_signs), the bytes of x take the same places on their
/// way to shared memory.
///
/// A CTA computes 32, 64 or 128 rows of W, the same for all slices of K (1024 weights: a 128-byte
/// line of each row), in rounds where K has more slices than fit. Each warp has 32 rows and one
/// slice:
///   1. all weights and scales of the CTA are fetched at once, by the copy engine on Hopper, else
///   by
///      cp.async;
///   2. meanwhile the warps of a slice put its x in shared memory;
///   3. a warp turns its rows' scales into mantissas, a row a lane;
///   4. for each group it multiplies, and adds mantissa · dot to int32 sums: lane (g, t) = (lane /
///   4,
///      lane % 4) has rows g + 8i and tokens 2t, 2t + 1 of every 8;
///   5. slice sums, rounded once, meet in shared memory and are added in order.

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"

namespace binary_gemm {
namespace kernels {

/// The 32 weights of a word as bytes of +1 (bit 1) or -1: byte i of register j is bit 4i + j, of
/// register 4 + j bit 16 + 4i + j.
///
/// A byte permute looks up four selectors of 3 bits in a table of 8 bytes; a table that depends on
/// one bit of its index picks that bit out of each nibble of the word. 13 instructions.
__device__ inline void expand_signs(std::uint32_t word, std::uint32_t (&signs)[8]) {
  constexpr std::uint32_t kByBit0 = 0x01ff01ffu;  // of selectors 0..3, and 4..7 alike
  constexpr std::uint32_t kByBit1 = 0x0101ffffu;
  constexpr std::uint32_t kMinus = 0xffffffffu, kPlus = 0x01010101u;  // by bit 2
  const std::uint32_t low3 = word & 0x77777777u;
  const std::uint32_t bit3 = (word >> 3) & 0x11111111u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t selectors = low3 >> (16 * half);
    signs[4 * half + 0] = __byte_perm(kByBit0, kByBit0, selectors);
    signs[4 * half + 1] = __byte_perm(kByBit1, kByBit1, selectors);
    signs[4 * half + 2] = __byte_perm(kMinus, kPlus, selectors);
    signs[4 * half + 3] = __byte_perm(kByBit0, kByBit0, bit3 >> (16 * half));
  }
}

/// Puts 32 consecutive bytes (four a word) in the order of expand_signs: two 4x4 byte transposes.
__device__ inline void permute_as_signs(std::uint32_t (&words)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t* w = &words[4 * half];
    const std::uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);   // w0.0 w1.0 w0.1 w1.1
    const std::uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);  // w0.2 w1.2 w0.3 w1.3
    const std::uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
    const std::uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(low01, low23, 0x5410);
    w[1] = __byte_perm(low01, low23, 0x7632);
    w[2] = __byte_perm(high01, high23, 0x5410);
    w[3] = __byte_perm(high01, high23, 0x7632);
  }
}

/// The shapes and the shared-memory plan of decode_s8, for host and device.
template <int kTokens, int kGroup>
struct DecodeS8 {
  using Tile = WeightTilePlan<kGroup>;
  static_assert(kTokens % 8 == 0, "a product has 8 tokens");
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kRows = Tile::kRows;  ///< of W, a warp
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kMaxWarps = 20;  ///< by registers: 96 a thread

  // Shared memory beside the weights: a warp's mantissas, units and slice sums; a slice's x, as
  // [block of 128][half of its words' registers][token][t] of 16 bytes; the sums of earlier rounds;
  // 16 bytes of zeros.
  static constexpr int kUnitOffset = Tile::kMantissaBytes;
  static constexpr int kPartialOffset = kUnitOffset + kRows * 4;
  static constexpr int kPartialStride = kRows + 8;  ///< floats of a token, padded
  static constexpr int kKeptBytes = kPartialOffset + kTokens * kPartialStride * 4;
  static constexpr int kWarpBytes = Tile::kBitsBytes + Tile::kScaleBytes + kKeptBytes;
  static constexpr int kXBytes = kTokens * static_cast<int>(kSliceK);
  static constexpr int kSumBytes = kTokens * kRows * 4;  ///< for 32 rows
  static constexpr int kZeroBytes = 16;

  static constexpr int shared_bytes(int slices, int row_warps) {
    return slices * (row_warps * kWarpBytes + kXBytes) + row_warps * kSumBytes + kZeroBytes +
           TileBarriers::kBytes;
  }

  /// Slices at once for `k` weights a row and CTAs of `row_warps` times 32 rows: all, or equal
  /// rounds of as many as `shared_limit` bytes hold.
  static constexpr int slices(std::int64_t k, int row_warps, int shared_limit) {
    const std::int64_t by_memory =
        (shared_limit - shared_bytes(0, row_warps)) / (row_warps * kWarpBytes + kXBytes);
    const std::int64_t by_warps = kMaxWarps / row_warps;
    const std::int64_t most = by_memory < by_warps ? by_memory : by_warps;
    const std::int64_t all = k > 0 ? (k + kSliceK - 1) / kSliceK : 1;
    if (most <= 0) return 0;
    const std::int64_t rounds = (all + most - 1) / most;
    return static_cast<int>((all + rounds - 1) / rounds);
  }
};

/// One warp's work on one slice.
template <int kTokens, int kGroup>
struct DecodeS8Warp : WeightTile<kGroup> {
  using Plan = DecodeS8<kTokens, kGroup>;
  using Tile = WeightTile<kGroup>;
  using TilePlan = WeightTilePlan<kGroup>;
  using Tile::g, Tile::t, Tile::lane, Tile::params, Tile::own_row, Tile::mantissa_row,
      Tile::line_column, Tile::mantissas;

  char* x;      ///< the slice's x
  char* zeros;  ///< 16 bytes

  /// Puts tokens first, first + step, ... of the slice in shared memory, zeros past M and K. Loads
  /// of several tokens are in flight at once.
  __device__ void store_x(unsigned first, unsigned step) const {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (unsigned m0 = first; m0 < kTokens; m0 += kAtOnce * step) {
      std::uint32_t words[kAtOnce][8];  // word t of block g
      load_chunks(words, params, m0, step, this->k0() + lane * 32);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned m = m0 + i * step;
        if (m >= kTokens) break;
        permute_as_signs(words[i]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<uint4*>(x_words(g(), half, m) + t() * 16) =
              make_uint4(words[i][4 * half], words[i][4 * half + 1], words[i][4 * half + 2],
                         words[i][4 * half + 3]);
        }
      }
    }
  }

  /// Keeps the unit of row own_row() for the warp.
  __device__ void store_unit(const SliceUnit& unit) const { units()[own_row()] = unit.unit; }

  /// The slice sums of all rows and tokens, rounded, to shared memory.
  __device__ void multiply() const {
    std::int32_t acc[Plan::kRowTiles][Plan::kTokenTiles][4] =
        {};  // C fragments of Σ mantissa · dot
             // Not unrolled further: registers.
#pragma unroll 1
    for (int two = 0; two < TilePlan::kBlocks / 2; ++two) {
      // A words of blocks 2·two and 2·two + 1: word t of rows g and g + 8.
      std::uint32_t a[Plan::kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
        ptx::ldmatrix_x4(
            a[tile], ptx::shared_address(line_column(tile * 16 + lane % 16, 2 * two + lane / 16)));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = 2 * two + i;
        std::uint32_t signs[Plan::kRowTiles][2][8];
#pragma unroll
        for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
          expand_signs(a[tile][2 * i], signs[tile][0]);
          expand_signs(a[tile][2 * i + 1], signs[tile][1]);
        }
#pragma unroll
        for (int part = 0; part < TilePlan::kDotsPerBlock; ++part) {
          multiply_group(block, part, signs, acc);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned row = tile * 16 + i * 8 + g();
        const float unit = units()[row];
#pragma unroll
        for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            partial(tokens * 8 + 2 * t() + j)[row] =
                __fmul_rn(static_cast<float>(acc[tile][tokens][2 * i + j]), unit);
          }
        }
      }
    }
  }

  /// Replaces the slice sums of wide rows. Right rather than fast: lane i has word i.
  __device__ void wide_sums(bool narrow) const {
    std::uint32_t wide = __ballot_sync(0xffffffffu, !narrow);
#pragma unroll 1
    for (; wide != 0; wide &= wide - 1) {
      const int owner = __ffs(static_cast<int>(wide)) - 1;
      const unsigned row = __shfl_sync(0xffffffffu, own_row(), owner);
      const __half* scales = this->global_scales(row);
      std::uint32_t signs[8];
      expand_signs(
          *reinterpret_cast<const std::uint32_t*>(line_column(row, lane / 4) + lane % 4 * 4),
          signs);
#pragma unroll 1
      for (unsigned m = 0; m < kTokens; ++m) {
        std::int32_t dot = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const char* words = x_words(g(), j / 4, m) + t() * 16;
          dot = ptx::dp4a(signs[j], reinterpret_cast<const std::uint32_t*>(words)[j % 4], dot);
        }
        const float sum = wide_sum<kGroup>(dot, scales, this->groups());
        if (lane == static_cast<unsigned>(owner)) partial(m)[row] = sum;
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

  __device__ float* partial(unsigned m) const {
    return reinterpret_cast<float*>(mantissas + Plan::kPartialOffset) + m * Plan::kPartialStride;
  }

  /// acc += mantissa · dot for one group: words kGroup / 32 · part and on of the block.
  __device__ void multiply_group(int block, int part,
                                 const std::uint32_t (&signs)[Plan::kRowTiles][2][8],
                                 std::int32_t (&acc)[Plan::kRowTiles][Plan::kTokenTiles][4]) const {
    // Smaller groups: lanes that hold other groups' words multiply by zeros.
    const bool used = kGroup >= 128 || t() / (kGroup / 32) == static_cast<unsigned>(part);
    std::int32_t mantissa[Plan::kRowTiles][2];
#pragma unroll
    for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mantissa[tile][i] = reinterpret_cast<const std::int16_t*>(
            mantissa_row(tile * 16 + i * 8 + g()))[block * TilePlan::kDotsPerBlock + part];
      }
    }
#pragma unroll
    for (int tokens = 0; tokens < Plan::kTokenTiles; ++tokens) {
      std::uint32_t b[8];  // the registers of word t of token g
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Tile::load_4_words(&b[4 * half],
                           used ? x_words(block, half, tokens * 8 + g()) + t() * 16 : zeros);
      }
#pragma unroll
      for (int tile = 0; tile < Plan::kRowTiles; ++tile) {
        std::int32_t dot[4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const std::uint32_t fragment[4] = {signs[tile][0][2 * step], signs[tile][1][2 * step],
                                             signs[tile][0][2 * step + 1],
                                             signs[tile][1][2 * step + 1]};
          ptx::mma_s8_m16n8k32(dot, fragment, b[2 * step], b[2 * step + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][tokens][i] += mantissa[tile][i / 2] * dot[i];
      }
    }
  }
};

/// Grid: CTAs of 32 · 2^row_shift rows of W in x. Block: (32, slices · 2^row_shift), slices from
/// DecodeS8::slices. Dynamic shared memory: DecodeS8::shared_bytes. With kEngine the copy engine
/// fetches the weights: see TileBarriers; all slices have warps.
template <int kTokens, int kGroup, bool kEngine>
__global__ void __launch_bounds__(DecodeS8<kTokens, kGroup>::kMaxWarps* kWarpSize, 1)
    decode_s8(const __grid_constant__ GemmParams params,
              const __grid_constant__ CUtensorMap bits_map, unsigned row_shift) {
  using Plan = DecodeS8<kTokens, kGroup>;
  using TilePlan = WeightTilePlan<kGroup>;
  extern __shared__ __align__(1024) char shared[];
  const unsigned lane = threadIdx.x;
  const unsigned warp = threadIdx.y;
  const unsigned warps = blockDim.y;
  const unsigned row_warps = 1u << row_shift;
  const unsigned at_once = warps >> row_shift;  // slices
  const unsigned slices = params.slices;
  const unsigned rows = Plan::kRows << row_shift;
  const unsigned n0 = blockIdx.x * rows;
  char* scales = shared + warps * TilePlan::kBitsBytes;
  char* kept = scales + warps * TilePlan::kScaleBytes;
  char* x = kept + warps * Plan::kKeptBytes;
  float* earlier = reinterpret_cast<float*>(x + at_once * Plan::kXBytes);
  char* zeros = x + at_once * Plan::kXBytes + (Plan::kSumBytes << row_shift);
  const TileBarriers barriers(ptx::shared_address(zeros) + Plan::kZeroBytes);
#if __CUDA_ARCH__ >= 900
  if (kEngine && warp == 0 && lane == 0) {
    barriers.fetch(params, bits_map, n0, rows, shared, scales);
  }
  __syncwarp();
#endif
  ptx::launch_dependents();
  if (warp == warps - 1 && lane < Plan::kZeroBytes / 4) {
    reinterpret_cast<std::uint32_t*>(zeros)[lane] = 0;
  }

  // Warps of a slice are neighbours; so are the lines of their rows.
  const unsigned slice = warp >> row_shift;
  const unsigned row_warp = warp & (row_warps - 1);
  const unsigned stride = kEngine ? params.scales_stride * 2 : at_once * TilePlan::kScales * 2;
  DecodeS8Warp<kTokens, kGroup> work{
      {params, shared + warp * TilePlan::kBitsBytes,
       scales + row_warp * Plan::kRows * stride + slice * TilePlan::kScales * 2, stride,
       kept + warp * Plan::kKeptBytes, n0 + row_warp * Plan::kRows, slice, lane},
      x + slice * Plan::kXBytes,
      zeros};
  SliceUnit unit{};
  const bool early = kEngine && params.dependent;  // mantissas before the wait
  if (early) {
    __syncthreads();  // the barriers are ready
    TileBarriers::wait(barriers.scales);
    unit = work.make_mantissas();
    work.store_unit(unit);
  }
  ptx::wait_for_dependencies();

  // Elements (m, row) of the CTA's y are thread, thread + threads, ...
  const unsigned thread = warp * kWarpSize + lane;
  const unsigned threads = warps * kWarpSize;
  for (unsigned first = 0;; first += at_once) {
    work.slice = first + slice;
    const bool busy = work.slice < slices;
    if (busy) {
      if (!kEngine) {
        work.fetch_bits();
        work.fetch_scales();
      }
      work.store_x(row_warp, row_warps);
    }
    __syncthreads();  // x, and the barriers, are ready
    if (busy) {
      if (!early) {
        if (kEngine) TileBarriers::wait(barriers.scales);
        unit = work.make_mantissas();
        work.store_unit(unit);
      }
      if (kEngine) {
        TileBarriers::wait(barriers.bits);
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncwarp();
      work.multiply();
      if (__any_sync(0xffffffffu, !unit.narrow)) {
        __syncwarp();
        work.wide_sums(unit.narrow);
      }
    }
    __syncthreads();
    const bool last = kEngine || first + at_once >= slices;
    const unsigned elements = params.m << (5 + row_shift);
#pragma unroll 1
    for (unsigned element = thread; element < elements; element += threads) {
      const unsigned row = element & (rows - 1);
      const unsigned m = element >> (5 + row_shift);
      const float* sums =
          reinterpret_cast<const float*>(kept + (row / Plan::kRows) * Plan::kKeptBytes +
                                         Plan::kPartialOffset) +
          m * Plan::kPartialStride + row % Plan::kRows;
      const float sum =
          add_slices(first == 0 ? 0.0f : earlier[element], sums,
                     (Plan::kKeptBytes / 4) << row_shift, min(at_once, slices - first));
      if (!last) earlier[element] = sum;
      if (last && n0 + row < params.n) {
        store_output(params.y, params.y_type, m * params.y_stride + n0 + row,
                     apply_scale_and_bias(sum, params.x_scales[m], params.bias, n0 + row));
      }
    }
    if (last) break;
    __syncthreads();
  }
}

}  // namespace kernels
}  // namespace binary_gemm
