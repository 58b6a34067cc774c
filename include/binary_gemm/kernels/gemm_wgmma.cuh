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
/// same 64 rows by turns; they add to the totals in order. Where tiles would leave multiprocessors
/// without work at the end, large ones are cut between slices: a CTA begins a tile and hands its
/// totals to the next CTA, which goes on adding to them. Of the warpgroup after those that multiply
///   warp 0 drives the copy engine: x by stages of a few blocks of 128 of K, words by slices;
///   one warp, or two, turn scales into mantissas and units, a slice ahead;
///   the rest write finished tiles while the next is multiplied, large ones by the copy engine
///   (1 to 5% faster), and move totals between CTAs.
/// They meet by rings of stages, of which each turn has its own. Here is what the multiplying
/// warpgroups do; gemm_wgmma_warps.cuh has the last one, gemm_wgmma_plan.cuh the numbers of both.
///
/// A warpgroup that multiplies goes through a slice by dots: start the products of a dot; load the
/// next block's words and this dot's mantissas; wait for the products; expand the words and add up,
/// interleaved. Two things keep the tensor cores busy meanwhile. While a slice is finished (sums
/// rounded and added to the totals; after the last one, outputs scaled, rounded and staged) the
/// first dot of the next slice is multiplied: that took 8% off, 9% where totals are in registers.
/// And warpgroups hide each other's sums; one that is alone in its CTA has two dots instead.
///
/// Fragments, of warp w of a warpgroup: lane (g, t) = (lane / 4, lane % 4) has
///   of A (T32,V4) -> (M16,K32): word t of rows 16w + g and 16w + g + 8, expanded;
///   of C (T32,V4) -> (M16,N8): tokens 2t and 2t + 1 of those rows, for every 8 tokens.

#include <cuda.h>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/expand.cuh"
#include "binary_gemm/kernels/gemm_wgmma_plan.cuh"
#include "binary_gemm/kernels/gemm_wgmma_warps.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"
#include "binary_gemm/kernels/wgmma.cuh"

namespace binary_gemm {
namespace kernels {

#if __CUDA_ARCH_FEAT_SM90_ALL
/// Puts a warpgroup's C fragment in shared memory as [token][row].
template <class Plan, int kValues>
__device__ inline void store_fragment(char* to, const float (&value)[kValues], unsigned lane,
                                      unsigned warp) {
  float* out = reinterpret_cast<float*>(to) + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const unsigned token = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    out[token * Plan::kTotalStride + (i % 4 < 2 ? 0 : 8)] = value[i];
  }
}

/// A warpgroup starts to fetch what the epilogue wants for 64 rows: [token] scales of x, then [row]
/// biases. `thread`: of the warpgroup.
template <class Plan>
__device__ inline void fetch_epilogue(const GemmParams& params, std::uint32_t to, unsigned n0,
                                      unsigned m0, unsigned thread) {
#pragma unroll
  for (unsigned token = thread; token < Plan::kTokens; token += 128) {
    ptx::cp_async_4(to + token * 4, params.x_scales + min(m0 + token, params.m - 1));
  }
  if (params.bias != nullptr && thread < 64) {
    ptx::cp_async_4(to + (Plan::kTokens + thread) * 4,
                    params.bias + min(n0 + thread, params.n - 1));
  }
  ptx::cp_async_commit();
}

/// Scales, biases and rounds a warpgroup's totals, the C fragment `value`, and puts them in shared
/// memory as [token][row] of 2 bytes, where 16-byte columns of a token are swizzled by token % 8.
/// `operands`: what fetch_epilogue fetches.
template <class Plan, int kValues>
__device__ inline void stage_outputs(const GemmParams& params, char* staged, const float* operands,
                                     const float (&value)[kValues], unsigned lane, unsigned warp,
                                     unsigned warpgroup) {
  const unsigned g = lane / 4, t = lane % 4;
  // Lane i gives where column (token) i % 8 of matrix i / 8 goes: rows, rows + 8, of two blocks of
  // 8 tokens.
  const unsigned column = (2 * warp + lane / 8 % 2) ^ lane % 8;
  const std::uint32_t address =
      ptx::shared_address(staged) + (lane / 16 * 8 + lane % 8) * Plan::kStagedStride + column * 16;
  ptx::cp_async_wait<0>();
  ptx::named_barrier_sync(1 + warpgroup, 128);  // and all have read their totals
  // Without a bias, a fused add of -0 is the rounded product.
  const float* biases = operands + Plan::kTokens + warp * 16 + g;
  const bool has_bias = params.bias != nullptr;
  const float bias[2] = {has_bias ? biases[0] : -0.0f, has_bias ? biases[8] : -0.0f};
  const bool bf16 = params.y_type == DataType::kBFloat16;
#pragma unroll
  for (int i = 0; i < kValues; i += 8) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(operands + (i / 4 + j / 2) * 8 + 2 * t);
      const float low = __fmaf_rn(value[i + 2 * j], scale.x, bias[j % 2]);
      const float high = __fmaf_rn(value[i + 2 * j + 1], scale.y, bias[j % 2]);
      // Both, as a branch for each pair would take longer.
      const std::uint32_t as_bf16 = round_pair(DataType::kBFloat16, low, high);
      const std::uint32_t as_fp16 = round_pair(DataType::kFloat16, low, high);
      pairs[j] = bf16 ? as_bf16 : as_fp16;
    }
    ptx::stmatrix_x4_transposed(address + i / 8 * 16 * Plan::kStagedStride, pairs);
  }
}

/// A warpgroup that multiplies: its thread's registers, and the steps of a slice. All is inlined.
template <class Plan>
struct GemmWgmmaMultiplier {
  static constexpr int kGroup = Plan::kGroup;
  static constexpr int kTurns = Plan::kTurns;
  static constexpr int kValues = Plan::kTokens / 2;  ///< C fragment of 64 x kTokens
  static constexpr int kDotBlocks = kGroup > 128 ? kGroup / 128 : 1;  ///< blocks of a dot
  static constexpr int kDots = kGroup < 128 ? 128 / kGroup : 1;       ///< of a block
  static constexpr int kSteps = 4 / kDots;                            ///< of a dot in a block
  static constexpr int kSets = Plan::kTwoDots ? 2 : 1;

  /// Where a slice's blocks are in the ring of x: a slice goes round it several times, or fills it,
  /// or there is room for another one.
  struct XRing {
    unsigned first_parity = 0;  ///< of the slice's first stage,
    int first = 0;              ///< which is this one
    __device__ __forceinline__ int stage(int block) const {
      const int stage = block / Plan::kStageBlocks;
      return Plan::kRounds > 1 ? stage % Plan::kXStages : first + stage;
    }
    __device__ __forceinline__ unsigned parity(int block) const {
      return first_parity ^ (block / Plan::kStageBlocks / Plan::kXStages & 1);
    }
    /// To the next slice.
    __device__ __forceinline__ void advance() {
      if constexpr (Plan::kXStages > Plan::kSliceStages) first += Plan::kSliceStages;
      if (first == Plan::kXStages || Plan::kXStages == Plan::kSliceStages) {
        first = 0, first_parity ^= 1;
      }
      first_parity ^= Plan::kRounds > 1 ? Plan::kRounds & 1 : 0;
    }
  };

  // Where it is.
  const GemmParams& params;
  char* shared;
  unsigned lane, warp, warpgroup;
  unsigned part, turn;     ///< which rows; and which slices
  unsigned row0;           ///< of the tile; and row0 + 8
  unsigned lane_offset;    ///< of its words in a stage
  std::uint64_t x_stages;  ///< the descriptor of the turn's first stage of x
  GemmWgmmaRings<Plan> rings;
  GemmWgmmaTotals<Plan> total_ring;
  XRing x_ring;  ///< of the slice that is multiplied, or comes next

  // What it multiplies.
  std::uint32_t next_words[2];       ///< of the next block, for rows row0 and row0 + 8
  std::uint32_t signs[kSets][2][8];  ///< operand A of a block
  std::int32_t dots[kSets][kValues];
  std::int32_t sum[kValues];  ///< of a slice
  float total[kValues];       ///< the first are kept here, the others in shared memory

  // What goes with a slice: its rows' mantissas, those of the first dot, units, and whether a row
  // of the warpgroup is wide; the same for its warps, which multiply together.
  const std::int16_t* mantissas = nullptr;
  std::int32_t first_mantissas[2] = {};
  const float* units = nullptr;
  bool any_wide = false;
  std::int32_t last_mantissas[2] = {};  ///< of a dot that is still to be added, dots[1]

  __device__ __forceinline__ GemmWgmmaMultiplier(const GemmParams& params_, char* shared_,
                                                 std::uint32_t base, std::uint32_t barriers,
                                                 unsigned lane_, unsigned warp_,
                                                 unsigned warpgroup_)
      : params(params_),
        shared(shared_),
        lane(lane_),
        warp(warp_),
        warpgroup(warpgroup_),
        part(warpgroup / kTurns),
        turn(warpgroup % kTurns),
        row0(part * 64 + warp * 16 + lane / 4),
        // A block's column is swizzled by row % 8 = lane / 4.
        lane_offset(Plan::kWordOffset + turn * Plan::kWordStages * Plan::kWordBytes + row0 * 128 +
                    lane / 4 * 16 + lane_word_offset<kGroup>(lane % 4)),
        x_stages(
            ptx::descriptor_128b(base + Plan::kXOffset + turn * Plan::kXStages * Plan::kXBytes)),
        rings(barriers, turn),
        total_ring(barriers) {}

  __device__ __forceinline__ char* totals() const {
    return shared + Plan::kTotalOffset + part * Plan::kTotalBytes;
  }

  __device__ __forceinline__ void load_words(unsigned block) {
    const char* from = shared + (lane_offset + rings.words.stage * Plan::kWordBytes ^ block * 16);
    next_words[0] = lane_word<kGroup>(from, lane % 4);
    next_words[1] = lane_word<kGroup>(from + 8 * 128, lane % 4);
  }
  /// The first words of the next slice.
  __device__ __forceinline__ void load_next_slice_words() {
    rings.words.advance();
    rings.words.wait_full();
    load_words(0);
  }
  __device__ __forceinline__ void expand(std::uint32_t (&to)[2][8]) {
    expand_lane_word<kGroup>(next_words[0], to[0]);
    expand_lane_word<kGroup>(next_words[1], to[1]);
  }

  /// Of a block in a stage.
  __device__ __forceinline__ std::uint64_t x_descriptor(int stage, int block) const {
    return ptx::descriptor_at(
        x_stages, stage * Plan::kXBytes + block % Plan::kStageBlocks * Plan::kBlockBytes);
  }
  __device__ __forceinline__ void wait_for_x(int stage, unsigned parity) const {
    wait_for_barrier(rings.x.full + stage * 8, parity);
  }
  /// If `block` is the last of a stage.
  __device__ __forceinline__ void give_up_x(int stage, int block) const {
    if ((block + 1) % Plan::kStageBlocks == 0 && lane == 0) {
      ptx::mbarrier_arrive(rings.x.empty + stage * 8);
    }
  }

  /// Starts the products of a dot, or of its part in a block. `x`: of the block, `a`: expanded.
  __device__ __forceinline__ void start(std::int32_t (&dot)[kValues],
                                        const std::uint32_t (&a)[2][8], std::uint64_t x, int part,
                                        bool adds) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = part * kSteps + i;
      const std::uint32_t own[4] = {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1],
                                    a[1][2 * step + 1]};
      ptx::WgmmaS8<Plan::kTokens>::run(dot, own, ptx::descriptor_at(x, 32 * step), i > 0 || adds);
    }
    ptx::wgmma_commit();
  }

  /// Starts the first dot of a slice, while the slice before is finished. No product is in flight
  /// at the end of a loop, nor where branches meet: ptxas would wait for each (C7514). Without
  /// `any` slice it multiplies what lies there, and nobody reads it.
  __device__ __forceinline__ void start_slice(bool any) {
    if (any) wait_for_x(x_ring.first, x_ring.first_parity);
    start(dots[0], signs[0], x_descriptor(x_ring.first, 0), 0, false);
    if (any && (kDots == 1 || Plan::kTwoDots)) load_words(1);
  }

  __device__ __forceinline__ bool has_wide_row() const {
    return (reinterpret_cast<const unsigned*>(units)[Plan::kRows] >> part & 1) != 0;
  }
  __device__ __forceinline__ void take_scales() {
    rings.scales.wait_full();
    const unsigned stage = turn * Plan::kScaleStages + rings.scales.stage;
    mantissas = reinterpret_cast<const std::int16_t*>(shared + Plan::kMantissaOffset +
                                                      stage * Plan::kMantissaBytes) +
                row0 * Plan::kScales;
    first_mantissas[0] = mantissas[0], first_mantissas[1] = mantissas[8 * Plan::kScales];
    units = reinterpret_cast<const float*>(shared + Plan::kUnitOffset + stage * Plan::kUnitBytes);
    any_wide = has_wide_row();
  }

  /// For the x of a slice's second block, while the first multiplies.
  __device__ __forceinline__ void wait_for_second_x() const {
    if (Plan::kWaitsAhead && kDots == 1) {
      wait_for_x(x_ring.first + 1, x_ring.first_parity);
    }
  }

  /// The first slice's first dot.
  __device__ __forceinline__ void begin() {
    start_slice(true);
    take_scales();
    wait_for_second_x();
    ptx::wgmma_wait<0>(dots[0]);
  }

  /// All of a slice, whose first dot is there: leaves its sums, and the first block of the next
  /// one, if there is `more`, expanded. `kWide`: with wide rows. That is a copy of its own: a
  /// branch for each block would cost the allocation of registers dearly.
  template <bool kWide>
  __device__ __forceinline__ void multiply(bool more) {
    bool wide_row[2] = {};
    if constexpr (kWide) wide_row[0] = units[row0] == 0, wide_row[1] = units[row0 + 8] == 0;
    // With four dots a block ptxas spills in large tiles where all are unrolled. With as many as
    // the ring of x has, up to all in small tiles, M = 32 to 128 took up to 4% less and 2048 2%
    // more.
    constexpr bool kSpills = kDots > 2 && Plan::kRounds > 1;
    constexpr int kUnrolled = kWide ? 1 : kSpills ? Plan::kBlocks / 2 : Plan::kBlocks;
    constexpr bool kFirstDotSets = kUnrolled == Plan::kBlocks;
    if constexpr (!kFirstDotSets) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum[v] = 0;
    }
    std::int32_t(&dot)[kValues] = dots[0];
    const XRing ring = x_ring;
#pragma unroll(kUnrolled)
    for (int block = 0; block < Plan::kBlocks; ++block) {
      const bool ends = block + 1 == Plan::kBlocks;
#pragma unroll
      for (int part = 0; part < kDots; ++part) {
        const bool whole = (block + 1) % kDotBlocks == 0;  // or the dot goes on
        const int index = block / kDotBlocks * kDots + part;
        std::int32_t m[2] = {first_mantissas[0], first_mantissas[1]};
        if (block + part > 0) {
          if ((kWide || !Plan::kWaitsAhead) && part == 0 && block % Plan::kStageBlocks == 0) {
            wait_for_x(ring.stage(block), ring.parity(block));
          }
          start(dot, signs[0], x_descriptor(ring.stage(block), block), part,
                block % kDotBlocks > 0);
          // While it multiplies: what comes next from shared memory.
          if (whole) m[0] = mantissas[index], m[1] = mantissas[index + 8 * Plan::kScales];
          if (part == kDots - 1) {
            if (!ends) {
              load_words(block + 1);
            } else if (more) {
              load_next_slice_words();
            }
            // For the next block's x. After a slice's last block start_slice waits: where that is
            // not known when compiled it waits for its own, as a branch would be C7514.
            if (Plan::kWaitsAhead && !kWide && (!ends || kUnrolled < Plan::kBlocks)) {
              const int next = ends ? block : block + 1;
              wait_for_x(ring.stage(next), ring.parity(next));
            }
          }
          ptx::wgmma_wait<0>(dot);
        }
        if (part == kDots - 1) {
          give_up_x(ring.stage(block), block);
          expand(signs[0]);
        }
        if (!whole) continue;
        if constexpr (kWide) {
          add_with_wide<0>(sum, dot, m[0], wide_row[0]);
          add_with_wide<1>(sum, dot, m[1], wide_row[1]);
        } else {
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            sum[v] = m[v % 4 / 2] * dot[v] + (kFirstDotSets && index == 0 ? 0 : sum[v]);
          }
        }
      }
    }
    x_ring.advance();
    if constexpr (kWide) {  // floats, all of them
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        if (!wide_row[v % 4 / 2]) sum[v] = __float_as_int(static_cast<float>(sum[v]));
      }
    }
  }

  /// The same of a narrow slice with two dots, all unrolled: a piece is a dot's part in a block,
  /// and the next one multiplies while one is added up. The last dot is left to add_last_dot.
  __device__ __forceinline__ void multiply_overlapped(bool more) {
    constexpr int kPieces = Plan::kBlocks * kDots;
    const XRing ring = x_ring;
    // Starts a piece in the dot that is free; after the last one, all but that.
    const auto start_piece = [&](int piece) {
      const int block = piece / kDots, part = piece % kDots;
      if (part == 0) {
        expand(signs[block % 2]);
        if (block + 1 < Plan::kBlocks) {
          load_words(block + 1);
        } else if (block + 1 == Plan::kBlocks && more) {
          load_next_slice_words();
        }
      }
      if (piece == kPieces) {
        x_ring.advance();
        return;
      }
      if (part == 0 && block % Plan::kStageBlocks == 0) {
        wait_for_x(ring.stage(block), ring.parity(block));
      }
      start(dots[piece / kDotBlocks % 2], signs[block % 2], x_descriptor(ring.stage(block), block),
            part, block % kDotBlocks > 0);
    };
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int block = piece / kDots, index = piece / kDotBlocks;
      const bool whole = (block + 1) % kDotBlocks == 0;
      std::int32_t(&own)[kValues] = dots[index % 2];
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
      if ((piece + 1) % kDots == 0) give_up_x(ring.stage(block), block);
      if (piece + 1 == kPieces) {
        last_mantissas[0] = m[0], last_mantissas[1] = m[1];
      } else if (whole) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          sum[v] = m[v % 4 / 2] * own[v] + (index == 0 ? 0 : sum[v]);
        }
      }
    }
  }
  __device__ __forceinline__ void no_last_dot() {
    last_mantissas[0] = last_mantissas[1] = 0;
#pragma unroll
    for (int v = 0; v < kValues; ++v) dots[1][v] = 0;
  }
  __device__ __forceinline__ void add_last_dot() {
#pragma unroll
    for (int v = 0; v < kValues; ++v) sum[v] += last_mantissas[v % 4 / 2] * dots[1][v];
  }

  /// Barriers of the warpgroups that add up the same rows by turns; those before it are of one
  /// each.
  __device__ __forceinline__ unsigned turn_barrier(unsigned turn) const {
    return 1 + Plan::kConsumers + part * kTurns + turn;
  }

  /// Adds a slice's sums to the totals. `begins`, `ends`: it is the first, the last of a piece;
  /// `resumes`: and another CTA began the tile; `hands_over`: and another one finishes it. At the
  /// end of a tile `fetch` starts to fetch what its epilogue wants.
  template <class Fetch>
  __device__ __forceinline__ void add_slice(unsigned slice, bool begins, bool ends, bool resumes,
                                            bool hands_over, const Fetch& fetch) {
    // Loaded here, after the products were issued: else ptxas puts the conversions between them.
    const float unit[2] = {units[row0], units[row0 + 8]};
    const bool floats = has_wide_row();
    // Writers have read the tile before from where totals or outputs go.
    if (Plan::kRegisterTotals < kValues ? begins : ends) total_ring.wait_empty();
    if (resumes) wait_for_barrier(total_ring.taken, 0);
    if (kTurns > 1 && slice > 0) {
      ptx::named_barrier_sync(turn_barrier(turn), 256);  // the slice before is added
    }
    // All warps have read what was fetched for the tile before: they gave its outputs, or are here.
    if (ends && !hands_over) fetch();
    // A narrow slice's sum, rounded once, is an exact multiple of the unit, so that one fused
    // multiply-add is the contract's rounded product and sum. A wide one is added as it is.
    const float factor[2] = {unit[0] == 0 ? 1.0f : unit[0], unit[1] == 0 ? 1.0f : unit[1]};
    float4* own = reinterpret_cast<float4*>(totals()) + warp * kWarpSize + lane;
    const auto load = [&](int i) {
      const float4 four = own[i / 4 * 128];
      total[i] = four.x, total[i + 1] = four.y, total[i + 2] = four.z, total[i + 3] = four.w;
    };
    const auto store = [&](int i) {
      own[i / 4 * 128] = make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]);
    };
    if (resumes) {
#pragma unroll
      for (int i = 0; i < Plan::kRegisterTotals; i += 4) load(i);
    }
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      const bool is_shared = i >= Plan::kRegisterTotals;
      if (is_shared) {
        if (slice == 0) {
          total[i] = total[i + 1] = total[i + 2] = total[i + 3] = 0;
        } else {
          load(i);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = floats ? __int_as_float(sum[i + j]) : static_cast<float>(sum[i + j]);
        total[i + j] = __fmaf_rn(value, factor[j / 2], total[i + j]);
      }
      if (is_shared && (!ends || hands_over)) store(i);
    }
    if (hands_over) {
#pragma unroll
      for (int i = 0; i < Plan::kRegisterTotals; i += 4) store(i);
    }
    if (!ends && kTurns > 1) ptx::named_barrier_arrive(turn_barrier((turn + 1) % kTurns), 256);
  }

  /// The totals of the tile at (n0, m0) are done: hands them to the writers, or writes them.
  __device__ __forceinline__ void finish_tile(unsigned n0, unsigned m0, bool packed,
                                              bool last_piece) {
    if (packed) {
      stage_outputs<Plan>(params, totals(), epilogue_operands(), total, lane, warp, warpgroup);
    } else {
      ptx::cp_async_wait<0>();
      ptx::named_barrier_sync(1 + warpgroup, 128);  // all have read their totals
      store_fragment<Plan>(totals(), total, lane, warp);
    }
    if (last_piece) {
      // No main loop is left to hide the stores under: the warpgroup writes its own rows.
      ptx::named_barrier_sync(1 + warpgroup, 128);
      store_part<Plan>(params, totals(), packed, epilogue_operands(), n0, m0, warp, 4);
    } else {
      if (Plan::kEngineStores) ptx::fence_proxy_async();  // which reads what this thread staged
      give_totals();
    }
  }
  /// Gives the writers what lies where totals lie.
  __device__ __forceinline__ void give_totals() const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(total_ring.full_barrier());
  }
  __device__ __forceinline__ float* epilogue_operands() const {
    return reinterpret_cast<float*>(shared + Plan::kEpilogueOffset + part * Plan::kEpilogueBytes);
  }

  /// All of the CTA's pieces.
  __device__ __forceinline__ void run(GemmWgmmaPieces<Plan::kCuts> pieces) {
    const bool packed = stores_vectors(params, Plan::kEngineStores);
    const bool any = pieces && pieces.begin + turn < pieces.end;
    if (any) {
      rings.words.wait_full();
      load_words(0);
      expand(signs[0]);
    }
    ptx::wait_for_dependencies();
    if (any) begin();

    for (; pieces; pieces.advance()) {
      const bool last_piece = pieces.is_last();
      bool begins = true;
#pragma unroll
      for (int v = 0; v < Plan::kRegisterTotals; ++v) total[v] = 0;
#pragma unroll 1
      for (unsigned slice = pieces.begin + turn; slice < pieces.end; slice += kTurns) {
        const bool ends = slice + 1 == pieces.end;
        const bool more = !last_piece || slice + kTurns < pieces.end;  // for this warpgroup
        const std::uint32_t words_empty = rings.words.empty_barrier();
        if (any_wide) {
          multiply<true>(more);
          if constexpr (Plan::kTwoDots) no_last_dot();
        } else if constexpr (Plan::kTwoDots) {
          multiply_overlapped(more);
        } else {
          multiply<false>(more);
        }
        if constexpr (Plan::kStartsAhead) start_slice(more);
        if constexpr (Plan::kTwoDots) add_last_dot();
        __syncwarp();  // all lanes have read their words
        if (lane == 0) ptx::mbarrier_arrive(words_empty);

        add_slice(slice, kTurns > 1 ? slice == 0 : begins, ends, begins && pieces.resumes(),
                  ends && pieces.hands_over(), [&] {
                    fetch_epilogue<Plan>(params, ptx::shared_address(epilogue_operands()),
                                         pieces.row_tile * Plan::kRows + part * 64,
                                         pieces.token_tile * Plan::kTokens,
                                         warp * kWarpSize + lane);
                  });
        begins = false;
        if (ends) {
          if (pieces.hands_over()) {
            ptx::fence_proxy_async();
            give_totals();
          } else {
            finish_tile(pieces.row_tile * Plan::kRows + part * 64,
                        pieces.token_tile * Plan::kTokens, packed, last_piece);
          }
        }
        if constexpr (!Plan::kStartsAhead) start_slice(more);
        __syncwarp();  // all lanes have read the slice's mantissas and units
        if (lane == 0) ptx::mbarrier_arrive(rings.scales.empty_barrier());
        rings.scales.advance();
        if (more) {
          take_scales();
          wait_for_second_x();
        }
        ptx::wgmma_wait<0>(dots[0]);
      }
      total_ring.advance();
    }
  }
};

#endif

/// Grid: at most kResident CTAs a multiprocessor. Block: GemmWgmma::kThreads. Dynamic shared
/// memory: at least GemmWgmma::kSharedBytes. `shares`: the tiles, with memory to hand them over if
/// any is cut, which needs kCuts. `x_map`: params.x, in the order of expand_signs, as
/// (byte, token, block of 128) in boxes of (128, kTokens, kStageBlocks), its tokens past M
/// whatever; `bits_map`: words as (word, row) in boxes of (32, kRows); both with the 128-byte
/// swizzle and zeros out of bounds. `y_map`, where stores_vectors: y as (row of W, token) in boxes
/// of (64, kTokens), swizzled alike.
template <int kRowGroups, int kTurns, int kTokens, int kGroup, bool kCuts>
__global__ void __launch_bounds__(GemmWgmma<kRowGroups, kTurns, kTokens, kGroup, kCuts>::kThreads,
                                  GemmWgmma<kRowGroups, kTurns, kTokens, kGroup, kCuts>::kResident)
    gemm_wgmma(const __grid_constant__ GemmParams params, const __grid_constant__ TileShares shares,
               const __grid_constant__ CUtensorMap x_map,
               const __grid_constant__ CUtensorMap bits_map,
               const __grid_constant__ CUtensorMap y_map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Plan = GemmWgmma<kRowGroups, kTurns, kTokens, kGroup, kCuts>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const unsigned thread = threadIdx.x;
  // By a shuffle, so that it stays in a register: what depends on the thread's index alone ptxas
  // reads again wherever registers are short, 3% slower at large M.
  const unsigned lane = __shfl_sync(0xffffffffu, thread % kWarpSize, thread % kWarpSize);
  const unsigned warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);
  const unsigned warp = __shfl_sync(0xffffffffu, thread / kWarpSize % 4, 0);  // of the warpgroup

  const std::uint32_t barriers = base + Plan::kBarrierOffset;
  auto& cut = *reinterpret_cast<GemmWgmmaCut*>(shared + Plan::kCutOffset);

  if (warpgroup == Plan::kConsumers && warp == 0) {
    begin_copies<Plan>(params, shares, x_map, bits_map, cut, base, barriers);
  } else {
    ptx::named_barrier_sync(0, Plan::kThreads);  // __syncthreads, where that warp does not wait
  }
  ptx::launch_dependents();

  const GemmWgmmaPieces<Plan::kCuts> pieces(shares, cut, params.slices);

  if (warpgroup == Plan::kConsumers) {
    ptx::register_decrease<Plan::kProducerRegisters>();
    if (warp == 0) {
      if (lane != 0) return;
      copy_operands<Plan>(pieces, x_map, bits_map, base, barriers);
    } else if (warp <= Plan::kConverters) {
      convert_scales<Plan>(params, pieces, shared, barriers, warp - 1);
    } else {
      ptx::wait_for_dependencies();
      store_tiles<Plan>(params, shares, y_map, pieces, shared, barriers,
                        warp - 1 - Plan::kConverters);
    }
    return;
  }
  ptx::register_increase<Plan::kConsumerRegisters>();
  GemmWgmmaMultiplier<Plan>(params, shared, base, barriers, lane, warp, warpgroup).run(pieces);
#endif
}

}  // namespace kernels
}  // namespace binary_gemm
