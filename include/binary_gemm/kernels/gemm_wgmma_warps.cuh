#pragma once

/// The warpgroup of gemm_wgmma that does not multiply: a warp that copies words and x, one or two
/// that convert scales, and those that write outputs and move totals between CTAs.

#include <cuda.h>

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/gemm_wgmma_plan.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/slice.cuh"

namespace binary_gemm {
namespace kernels {

#if __CUDA_ARCH_FEAT_SM90_ALL
/// One thread starts the copy of a slice's words to a stage of a turn.
template <class Plan>
__device__ inline void copy_words(const CUtensorMap& bits_map, std::uint32_t base,
                                  std::uint32_t barriers, unsigned turn, unsigned stage,
                                  unsigned slice, unsigned n0) {
  const std::uint32_t full = GemmWgmmaRings<Plan>(barriers, turn).words.full + stage * 8;
  ptx::mbarrier_arrive_expect_tx(full, Plan::kWordBytes);
  ptx::tensor_copy_2d(
      base + Plan::kWordOffset + (turn * Plan::kWordStages + stage) * Plan::kWordBytes, &bits_map,
      slice * 32, n0, full);
}

/// What everything else waits for, by the warp that copies: barriers, the CTA's part of the tiles
/// that are cut, and the copies of each turn's first words. Started here, before the CTA has met
/// for the first time, they arrive about 1000 clocks sooner.
template <class Plan>
__device__ inline void begin_copies(const GemmParams& params, const TileShares& shares,
                                    const CUtensorMap& x_map, const CUtensorMap& bits_map,
                                    GemmWgmmaCut& cut, std::uint32_t base, std::uint32_t barriers) {
  static_assert(sizeof(GemmWgmmaCut) == Plan::kCutBytes, "");
  const unsigned lane = threadIdx.x % kWarpSize;
  if (lane == 0) {
    ptx::prefetch_tensor_map(&bits_map);
    ptx::prefetch_tensor_map(&x_map);
    // By one thread: 4 clocks each, where lanes side by side take 64.
    constexpr unsigned kWarpsOfTurn = 4 * Plan::kRowGroups;
#pragma unroll
    for (unsigned turn = 0; turn < Plan::kTurns; ++turn) {
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
    const GemmWgmmaTotals<Plan> totals(barriers);
    ptx::mbarrier_init(totals.full, kWarpsOfTurn);
    ptx::mbarrier_init(totals.empty, Plan::kWriters);
    ptx::mbarrier_init(totals.taken, 1);
    ptx::fence_mbarrier_init();
    if (Plan::kCuts) cut = GemmWgmmaCut(shares, params.slices);
  }
  __syncwarp();
  ptx::named_barrier_arrive(0, Plan::kThreads);
  const GemmWgmmaPieces<Plan::kCuts> pieces(shares, cut, params.slices);
  if (lane == 0 && pieces) {
#pragma unroll
    for (unsigned turn = 0; turn < Plan::kTurns; ++turn) {
      if (pieces.begin + turn >= pieces.end) break;
      copy_words<Plan>(bits_map, base, barriers, turn, 0, pieces.begin + turn,
                       pieces.row_tile * Plan::kRows);
    }
  }
}

/// One thread brings words, by slices, and x, by stages, of the CTA's pieces.
template <class Plan>
__device__ inline void copy_operands(GemmWgmmaPieces<Plan::kCuts> pieces, const CUtensorMap& x_map,
                                     const CUtensorMap& bits_map, std::uint32_t base,
                                     std::uint32_t barriers) {
  constexpr int kTurns = Plan::kTurns;
  unsigned word_stage[kTurns] = {}, word_parity[kTurns] = {};
  unsigned x_stage[kTurns] = {}, x_parity[kTurns] = {};
  bool begun = true;  // by begin_copies
  for (; pieces; pieces.advance()) {
    const unsigned n0 = pieces.row_tile * Plan::kRows;
    const unsigned m0 = pieces.token_tile * Plan::kTokens;
    for (unsigned first = pieces.begin; first < pieces.end; first += kTurns) {
#pragma unroll
      for (unsigned turn = 0; turn < kTurns; ++turn) {
        if (first + turn >= pieces.end) break;
        if (!begun) {
          wait_for_barrier(GemmWgmmaRings<Plan>(barriers, turn).words.empty + word_stage[turn] * 8,
                           word_parity[turn] ^ 1);
          copy_words<Plan>(bits_map, base, barriers, turn, word_stage[turn], first + turn, n0);
        }
        if (++word_stage[turn] == Plan::kWordStages) word_stage[turn] = 0, word_parity[turn] ^= 1;
      }
      begun = false;
      // After the first words; it does not wait again. Past K both words and x are zeros.
      ptx::wait_for_dependencies();
#pragma unroll 1
      for (unsigned block = 0; block < Plan::kBlocks; block += Plan::kStageBlocks) {
#pragma unroll
        for (unsigned turn = 0; turn < kTurns; ++turn) {
          if (first + turn >= pieces.end) break;
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
}

/// Converter `warp` turns scales of the CTA's pieces into mantissas and units. They arrive by
/// cp.async where the mantissas will be. A turn has one converter, as its ring is waited for in
/// order.
template <class Plan>
__device__ inline void convert_scales(const GemmParams& params, GemmWgmmaPieces<Plan::kCuts> pieces,
                                      char* shared, std::uint32_t barriers, unsigned warp) {
  constexpr int kRowBytes = Plan::kScales * 2;
  /// Rows of a lane: M = 48 and 64 are up to 3% faster so than by one, others by less.
  constexpr int kAtOnce = Plan::kScales <= 8 ? 2 : 1;
  const unsigned lane = threadIdx.x % kWarpSize;
  const bool aligned = scales_are_aligned<kRowBytes>(params.scales, params.scales_stride);
  // The slice that is fetched next, its turn, and where the rings of the turns are.
  unsigned slice = pieces.begin, turn = 0;
  unsigned parities = 0, stages = 0;  // a bit and a byte for each turn
  const auto advance = [&] {
    if ((stages >> 8 * turn & 0xff) + 1 == Plan::kScaleStages) {
      stages &= ~(0xffu << 8 * turn), parities ^= 1u << turn;
    } else {
      stages += 1u << 8 * turn;
    }
    if (++turn == Plan::kTurns) turn = 0;
    if (++slice == pieces.end) {
      pieces.advance();
      slice = pieces.begin, turn = 0;
    }
  };
  // Fetches the converter's next slice. Its place in the rings, [turn][stage]; or -1.
  const auto fetch_next = [&] {
    while (pieces && turn % Plan::kConverters != warp) advance();
    int place = -1;
    if (pieces) {
      const unsigned stage = stages >> 8 * turn & 0xff;
      place = static_cast<int>(turn * Plan::kScaleStages + stage);
      wait_for_barrier(GemmWgmmaRings<Plan>(barriers, turn).scales.empty + stage * 8,
                       (parities >> turn & 1) ^ 1);
      char* target = shared + Plan::kMantissaOffset + place * Plan::kMantissaBytes;
      const unsigned first = slice * Plan::kScales;
      const unsigned count = params.k / Plan::kGroup - first;
      const unsigned row0 = pieces.row_tile * Plan::kRows;
      const auto for_rows = [&](const auto& fetch) {
#pragma unroll 1
        for (unsigned row = lane; row < Plan::kRows; row += kWarpSize) {
          // Rows past N repeat the last one; they are not stored.
          const unsigned n = min(row0 + row, params.n - 1);
          fetch(target + row * kRowBytes,
                params.scales + std::uint64_t{n} * params.scales_stride + first);
        }
      };
      if (aligned && count >= Plan::kScales) {
        for_rows(
            [](char* to, const __half* from) { fetch_aligned_scales<Plan::kScales>(to, from); });
      } else {
        for_rows([count](char* to, const __half* from) {
          fetch_some_scales<Plan::kScales>(to, from, count);
        });
      }
      advance();
    }
    ptx::cp_async_commit();  // of nothing at the end: the count of groups stays right
    return place;
  };
  int done = fetch_next();
#pragma unroll 1
  while (done >= 0) {
    const int ahead = fetch_next();
    ptx::cp_async_wait<1>();
    char* mantissas = shared + Plan::kMantissaOffset + done * Plan::kMantissaBytes;
    float* units = reinterpret_cast<float*>(shared + Plan::kUnitOffset + done * Plan::kUnitBytes);
    unsigned wide_groups = 0;
#pragma unroll 1
    for (unsigned first = lane; first < Plan::kRows; first += kAtOnce * kWarpSize) {
      // Without a branch, so that the chains of all overlap.
      std::uint32_t pairs[kAtOnce][Plan::kScales / 2];
      SliceUnit unit[kAtOnce];
      float inverse_unit[kAtOnce];
      bool unsure = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        load_row_scales(mantissas + (first + i * kWarpSize) * kRowBytes, pairs[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        unit[i] = unit_of_close_scales(pairs[i], inverse_unit[i]);
        unsure = unsure || !unit[i].narrow;
      }
      if (unsure) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) unit[i] = unit_of_scales(pairs[i], inverse_unit[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned row = first + i * kWarpSize;
        pairs_to_mantissas(pairs[i], inverse_unit[i]);
        if (unit[i].narrow) store_row_mantissas(mantissas + row * kRowBytes, pairs[i]);
        units[row] = unit[i].narrow ? unit[i].unit : 0;
        if (!unit[i].narrow) wide_groups |= 1u << row / 64;
      }
    }
    wide_groups = __reduce_or_sync(0xffffffffu, wide_groups);
    __syncwarp();
    if (lane == 0) {
      reinterpret_cast<unsigned*>(units)[Plan::kRows] = wide_groups;
      ptx::mbarrier_arrive(GemmWgmmaRings<Plan>(barriers, done / Plan::kScaleStages).scales.full +
                           done % Plan::kScaleStages * 8);
    }
    done = ahead;
  }
}

/// Whether rows of a matrix of y's type can be read and written by four elements.
__device__ inline bool takes_fours(const GemmParams& params, const void* data,
                                   std::int64_t stride) {
  const unsigned bytes = params.y_type == DataType::kFloat32 ? 16 : 8;
  return stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

/// Scales, biases, adds the residual to and writes totals of 64 rows by `tokens` tokens, which lie
/// in shared memory as [token][row]; `operands`: what fetch_epilogue fetches. Sixteen lanes take a
/// token's rows by fours, and load the next token's residual ahead. On an H200, 5120 x 5120 at M =
/// 2048, us, pair by pair with all it takes loaded before each, and so: fp32 207, 120; bf16 with
/// the residual 441, 201 (without 101); rows not on 16 bytes 183, 125; on 2 bytes, one by one, 190,
/// 252.
template <class Plan>
__device__ inline void store_totals(const GemmParams& params, const char* from,
                                    const float* operands, unsigned n0, unsigned m0,
                                    unsigned tokens, unsigned warp, unsigned warps) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const bool has_residual = params.residual != nullptr;
  if (n0 + 64 > params.n || !takes_fours(params, params.y, params.y_stride) ||
      (has_residual && !takes_fours(params, params.residual, params.residual_stride))) {
    // A lane has rows `lane` and 32 + `lane` of a token, one after the other: right, not fast.
#pragma unroll 1
    for (unsigned part = warp; part < 2 * tokens; part += warps) {
      const unsigned token = part / 2, row = part % 2 * kWarpSize + lane;
      if (n0 + row >= params.n) continue;
      const float total = reinterpret_cast<const float*>(from)[token * Plan::kTotalStride + row];
      store_element(params, m0 + token, n0 + row, total, operands[token]);
    }
    return;
  }
  const unsigned row = lane % 16 * 4;
  const bool is_float = params.y_type == DataType::kFloat32;
  const unsigned first = warp * 2 + lane / 16, step = 2 * warps;
  // Without a bias, a fused add of -0 is the rounded product.
  float4 bias = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
  if (params.bias != nullptr) {
    bias = *reinterpret_cast<const float4*>(operands + Plan::kTokens + row);
  }
  const unsigned bytes = is_float ? 4 : 2;
  const auto offset = [&](unsigned token, std::int64_t stride) {
    return ((m0 + token) * stride + n0 + row) * bytes;
  };
  uint4 ahead = {};  // four elements of the residual
  const auto load_ahead = [&](unsigned token) {
    if (!has_residual || token >= tokens) return;
    const char* at =
        static_cast<const char*>(params.residual) + offset(token, params.residual_stride);
    if (is_float) {
      ahead = *reinterpret_cast<const uint4*>(at);
    } else {
      const uint2 pairs = *reinterpret_cast<const uint2*>(at);
      ahead.x = pairs.x, ahead.y = pairs.y;
    }
  };
  load_ahead(first);
#pragma unroll 1
  for (unsigned token = first; token < tokens; token += step) {
    const uint4 residual = ahead;
    load_ahead(token + step);
    const float4 total =
        *reinterpret_cast<const float4*>(from + (token * Plan::kTotalStride + row) * 4);
    const float scale = operands[token];
    float4 value =
        make_float4(__fmaf_rn(total.x, scale, bias.x), __fmaf_rn(total.y, scale, bias.y),
                    __fmaf_rn(total.z, scale, bias.z), __fmaf_rn(total.w, scale, bias.w));
    if (has_residual) {
      float4 add = *reinterpret_cast<const float4*>(&residual);
      if (!is_float) {
        const float2 low = unpack_pair(params.y_type, residual.x);
        const float2 high = unpack_pair(params.y_type, residual.y);
        add = make_float4(low.x, low.y, high.x, high.y);
      }
      value = make_float4(__fadd_rn(add.x, value.x), __fadd_rn(add.y, value.y),
                          __fadd_rn(add.z, value.z), __fadd_rn(add.w, value.w));
    }
    char* at = static_cast<char*>(params.y) + offset(token, params.y_stride);
    if (is_float) {
      *reinterpret_cast<float4*>(at) = value;
    } else {
      *reinterpret_cast<uint2*>(at) = make_uint2(round_pair(params.y_type, value.x, value.y),
                                                 round_pair(params.y_type, value.z, value.w));
    }
  }
}

/// Writes the outputs of 64 rows by kTokens tokens from shared memory; `warps` warps take turns.
/// `packed`: they are stage_outputs'; else they are totals.
template <class Plan>
__device__ inline void store_part(const GemmParams& params, const char* from, bool packed,
                                  const float* operands, unsigned n0, unsigned m0, unsigned warp,
                                  unsigned warps) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned tokens = min(unsigned{Plan::kTokens}, params.m - m0);
  if (!packed) {
    store_totals<Plan>(params, from, operands, n0, m0, tokens, warp, warps);
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

/// Brings the residual of a tile to the L2 cache, by all writers, while the tile is multiplied:
/// 5120 x 5120 at M = 2048 253 us without, 201.
template <class Plan>
__device__ inline void prefetch_residual(const GemmParams& params, unsigned n0, unsigned m0,
                                         unsigned writer) {
  constexpr unsigned kLine = 128;
  const unsigned bytes = params.y_type == DataType::kFloat32 ? 4 : 2;
  const unsigned row_bytes = min(unsigned{Plan::kRows}, params.n - n0) * bytes;
  const unsigned tokens = min(unsigned{Plan::kTokens}, params.m - m0);
#pragma unroll 1
  for (unsigned token = writer * kWarpSize + threadIdx.x % kWarpSize; token < tokens;
       token += Plan::kWriters * kWarpSize) {
    const char* from = static_cast<const char*>(params.residual) +
                       ((m0 + token) * params.residual_stride + n0) * bytes;
#pragma unroll 1
    for (unsigned i = 0; i < row_bytes; i += kLine) ptx::prefetch_l2(from + i);
  }
}

/// Writes the CTA's tiles but the last, by the copy engine if the plan says so and outputs are
/// packed, and moves totals of tiles that are cut. `writer`: of the Plan::kWriters warps.
template <class Plan>
__device__ inline void store_tiles(const GemmParams& params, const TileShares& shares,
                                   const CUtensorMap& y_map, GemmWgmmaPieces<Plan::kCuts> pieces,
                                   char* shared, std::uint32_t barriers, unsigned writer) {
  constexpr unsigned kHandedFloats = Plan::kRowGroups * Plan::kHandedBytes / 4;
  const unsigned lane = threadIdx.x % kWarpSize;
  const bool packed = stores_vectors(params, Plan::kEngineStores);
  const std::uint32_t totals = ptx::shared_address(shared + Plan::kTotalOffset);
  GemmWgmmaTotals<Plan> ring(barriers);
  for (; pieces; pieces.advance()) {
    if (pieces.resumes() && writer == 0 && lane == 0) {
      ring.wait_empty();
      std::uint32_t* flag = shares.flags + blockIdx.x - 1;
      while (ptx::load_acquire(flag) == 0) {
      }
      *flag = 0;  // as it was found
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive_expect_tx(ring.taken, kHandedFloats * 4);
      const float* from = shares.totals + std::size_t{blockIdx.x - 1} * kHandedFloats;
#pragma unroll 1
      for (int part = 0; part < Plan::kRowGroups; ++part) {
        ptx::bulk_copy(totals + part * Plan::kTotalBytes, from + part * (Plan::kHandedBytes / 4),
                       Plan::kHandedBytes, ring.taken);
      }
    }
    if (pieces.hands_over()) {
      ring.wait_full();
      if (writer == 0 && lane == 0) {
        float* to = shares.totals + std::size_t{blockIdx.x} * kHandedFloats;
#pragma unroll 1
        for (int part = 0; part < Plan::kRowGroups; ++part) {
          ptx::bulk_store(to + part * (Plan::kHandedBytes / 4), totals + part * Plan::kTotalBytes,
                          Plan::kHandedBytes);
        }
        ptx::bulk_commit();
        ptx::bulk_wait();
        ptx::store_release(shares.flags + blockIdx.x, 1);
      }
    } else {
      const unsigned n0 = pieces.row_tile * Plan::kRows, m0 = pieces.token_tile * Plan::kTokens;
      if (params.residual != nullptr) prefetch_residual<Plan>(params, n0, m0, writer);
      if (pieces.is_last()) break;
      ring.wait_full();
      if (Plan::kEngineStores && packed) {
        if (writer == 0 && lane == 0) {
#pragma unroll 1
          for (int part = 0; part < Plan::kRowGroups; ++part) {
            if (n0 + part * 64 >= params.n) break;
            ptx::tensor_store_2d(&y_map, n0 + part * 64, m0, totals + part * Plan::kTotalBytes);
          }
          ptx::bulk_commit();
          ptx::bulk_wait_read();
        }
      } else {
#pragma unroll 1
        for (int part = 0; part < Plan::kRowGroups; ++part) {
          store_part<Plan>(params, shared + Plan::kTotalOffset + part * Plan::kTotalBytes, packed,
                           reinterpret_cast<const float*>(shared + Plan::kEpilogueOffset +
                                                          part * Plan::kEpilogueBytes),
                           n0 + part * 64, m0, writer, Plan::kWriters);
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ring.empty_barrier());
    ring.advance();
  }
}
#endif

}  // namespace kernels
}  // namespace binary_gemm
