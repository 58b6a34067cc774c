#pragma once

/// Decode on the binary tensor core: y = x · Wᵀ for 1 to 3 tokens, any N, K and G. On Hopper
/// decode_b1_ring.cuh takes some shapes: see takes_b1_ring in tuning.h.
///
/// The weights' bits are never expanded. A token's int8 values are split in 8 bit planes, which are
/// the 8 columns of an AND-popcount product m16n8k128; its rows are weight rows as they lie in
/// memory. With c_p the count of plane p in a group, `dot = 2 · Σ_p ±2^p c_p - Σ q` (the last
/// plane's weight is negative, and a 0 bit counts as -1).
///
/// A CTA computes 32 rows of W. Each of its warps takes one slice of K (1024 weights: a 128-byte
/// line of each row), or one a round where K has more slices than fit.
///   1. All weights and scales of the CTA are fetched at once: on Hopper by the copy engine, an
///      instruction each, and one for a last slice that is a half; elsewhere, and for views that
///      the engine cannot read, by cp.async.
///   2. While they are in flight, a warp makes the planes of its slice of x;
///   3. it turns the scales into mantissas, a row a lane,
///   4. and multiplies: lane (g, t) = (lane / 4, lane % 4) gets the counts of planes 2t and 2t + 1
///      for rows g, g + 8, g + 16 and g + 24, and adds mantissa · count over the slice's groups;
///   5. a transpose over the four lanes of a row leaves lane (g, t) with the exact total of row
///      g + 8t: one rounding.
/// Slice sums meet in shared memory and are added in order. Only x depends on an earlier kernel, so
/// with programmatic dependent launch 1 and 3 run before the wait; but see DecodeB1Cut.
///
/// Exact int32 sums may wrap on the way: only the total must fit, and it does (reference.h).

#include "binary_gemm/kernels/epilogue.cuh"
#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/planes.cuh"
#include "binary_gemm/kernels/ptx.cuh"
#include "binary_gemm/kernels/quantize.cuh"
#include "binary_gemm/kernels/weight_tile.cuh"

namespace binary_gemm {
namespace kernels {

/// The shapes and the shared-memory plan of decode_b1, for host and device.
template <int kTokens, int kGroup>
struct DecodeB1 {
  using Tile = WeightTilePlan<32, kGroup>;
  static constexpr int kRows = Tile::kRows;  ///< of W, a CTA
  static constexpr int kTiles = 2;           ///< of 16 rows: an A fragment
  /// By registers: 64 a thread, or 96.
  static constexpr int kMaxWarps = kTokens == 1 && kGroup > 32 ? 32 : 20;
  static constexpr int kPlaneStride = kPlanes * 16 + 16;  ///< bytes of a block's planes, padded

  // What a warp keeps in shared memory: mantissas, planes, sums of x, slice sums.
  static constexpr int kPlaneOffset = Tile::kMantissaBytes;
  static constexpr int kSumOffset = kPlaneOffset + kTokens * Tile::kBlocks * kPlaneStride;
  static constexpr int kPartialOffset = kSumOffset + kTokens * Tile::kMantissas * 4;
  static constexpr int kKeptBytes = kPartialOffset + kTokens * kRows * 4;
  static constexpr int kWarpBytes = Tile::kBitsBytes + Tile::kScaleBytes + kKeptBytes;

  static constexpr int kBarrierBytes = 16;     ///< scales, bits
  static constexpr int kMaximaBytes = 32 * 4;  ///< of x by warp, where the kernel quantizes

  static constexpr int shared_bytes(int warps) { return warps * kWarpBytes + kBarrierBytes; }

  /// Warps of a CTA for `k` weights a row: one for each slice, or equal rounds of as many as
  /// `shared_limit` bytes hold; at least one for each token, to add and write its y.
  static constexpr int warps(std::int64_t k, int shared_limit) {
    const std::int64_t fitting = (shared_limit - kBarrierBytes) / kWarpBytes;
    const std::int64_t most = fitting < kMaxWarps ? fitting : kMaxWarps;
    const std::int64_t slices = k > 0 ? (k + kSliceK - 1) / kSliceK : 1;
    const std::int64_t rounds = (slices + most - 1) / most;
    const std::int64_t warps = (slices + rounds - 1) / rounds;
    return static_cast<int>(warps > kTokens ? warps : kTokens);
  }
};

/// One warp's work on one slice.
template <int kTokens, int kGroup, bool kHalf>
struct DecodeB1Warp : WeightTile<32, kGroup, kHalf> {
  using Plan = DecodeB1<kTokens, kGroup>;
  using Tile = WeightTile<32, kGroup, kHalf>;
  using TilePlan = WeightTilePlan<32, kGroup>;
  using Tile::g, Tile::t, Tile::lane, Tile::params, Tile::own_row, Tile::mantissa_row,
      Tile::line_column, Tile::mantissas;

  /// This lane's 32 values of every token's slice: word t of block g.
  __device__ void load_x(std::uint32_t (&words)[kTokens][8]) const {
    load_chunks(words, params, 0, 1, this->k0() + lane * 32);
  }

  /// The same of one token in bf16 or fp16, quantized. All warps of the CTA, which have all slices,
  /// call it. Returns the row's scale.
  template <class T>
  __device__ float quantize_x(std::uint32_t (&words)[8], std::uint32_t* maxima,
                              unsigned warps) const {
    const uint4* source = static_cast<const uint4*>(params.input) + (this->k0() + lane * 32) / 8;
    std::uint32_t pairs[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = source[i];
      pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y;
      pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
    }
    std::uint32_t largest = __reduce_max_sync(0xffffffffu, largest_of_chunk<T>(pairs));
    if (lane == 0) maxima[this->slice] = largest;
    __syncthreads();
    largest = __reduce_max_sync(0xffffffffu, lane < warps ? maxima[lane] : 0);
    const RowScale row = row_scale(largest);
    quantize_chunk<T>(words, pairs, row);
    return row.scale;
  }

  /// Makes the planes of every token's slice, and the sums of its groups.
  __device__ void make_planes(std::uint32_t (&words)[kTokens][8]) const {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      std::int32_t sum = sum_chunk(words[m]);
      if (kGroup >= 64) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      if (kGroup >= 128) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      constexpr unsigned kLanesPerSum = kWarpSize / TilePlan::kMantissas;
      if (lane % kLanesPerSum == 0) sums(m)[lane / kLanesPerSum] = sum;
      transpose_to_planes(words[m]);
      char* own = plane_words(m, g()) + t() * 4;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p)
        *reinterpret_cast<std::uint32_t*>(own + p * 16) = words[m][p];
    }
  }

  /// What multiply needs of x: B fragments, and Σ mantissa · Σ q for row own_row().
  struct Operand {
    std::uint32_t b[kTokens][TilePlan::kBlocks];  ///< word t of plane g of each block
    std::int32_t correction[kTokens];
  };

  __device__ void load_operand(Operand& x) const {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t four[4];
        ptx::ldmatrix_x4(four,
                         ptx::shared_address(plane_words(m, half * 4 + lane / 8) + lane % 8 * 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) x.b[m][half * 4 + i] = four[i];
      }
      x.correction[m] = correction(m);
    }
  }

  /// Every token's slice sum for row own_row(), rounded.
  __device__ void multiply(const Operand& x, const SliceUnit& unit, float (&p)[kTokens]) const {
    // Planes 2t and 2t + 1 weigh 4^t and 2 · 4^t, the last -2^7; the dot takes twice the counts.
    // In unsigned words, since sums may wrap on the way to a total that fits.
    const std::uint32_t weight = 2u << (2 * t());
    const std::uint32_t upper_weight = t() == 3 ? 0u - 2 * weight : 2 * weight;
    // A fragments of blocks 2i and 2i + 1: word t of rows g and g + 8 of the tile.
    std::uint32_t a[Plan::kTiles][TilePlan::kBlocks / 2][4];
    const auto load_tile = [&](int tile) {
#pragma unroll
      for (int i = 0; i < TilePlan::kBlocks / 2; ++i) {
        ptx::ldmatrix_x4(
            a[tile][i], ptx::shared_address(line_column(tile * 16 + lane % 16, 2 * i + lane / 16)));
      }
    };
    // With one token there are registers to load all before the first product.
    if (kTokens == 1) load_tile(0), load_tile(1);
    std::uint32_t v[kTokens][4];  // this lane's part of row g + 8i
#pragma unroll
    for (int tile = 0; tile < Plan::kTiles; ++tile) {
      if (kTokens > 1) load_tile(tile);
      std::int32_t acc[kTokens][2][2] = {};  // row g + 8i, plane 2t + j: Σ mantissa · count
      std::uint32_t mantissa[2][4];          // row g + 8i: the current four pairs
#pragma unroll
      for (int two = 0; two < TilePlan::kBlocks / 2; ++two) {
#pragma unroll
        for (int i = 0; i < TilePlan::kDotsPerBlock; ++i) {
          const int pair = two * TilePlan::kDotsPerBlock + i;
          if (pair % 4 == 0) {
            Tile::load_4_words(mantissa[0], mantissa_row(tile * 16 + g()) + pair * 4);
            Tile::load_4_words(mantissa[1], mantissa_row(tile * 16 + g() + 8) + pair * 4);
          }
#pragma unroll
          for (int m = 0; m < kTokens; ++m) {
            multiply_pair(i, a[tile][two], &x.b[m][2 * two], mantissa[0][pair % 4],
                          mantissa[1][pair % 4], acc[m]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          v[m][2 * tile + i] = static_cast<std::uint32_t>(acc[m][i][0]) * weight +
                               static_cast<std::uint32_t>(acc[m][i][1]) * upper_weight;
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      const std::uint32_t wrapped =
          transpose_add(v[m]) - static_cast<std::uint32_t>(x.correction[m]);
      const std::int32_t total = static_cast<std::int32_t>(wrapped);
      p[m] = __fmul_rn(static_cast<float>(total), unit.unit);
    }
  }

  /// Replaces p in the lanes whose row is wide. Right rather than fast: lane i counts word i.
  __device__ void wide_sums(bool narrow, float (&p)[kTokens]) const {
    std::uint32_t wide = this->wide_lanes(narrow);
#pragma unroll 1
    for (; wide != 0; wide &= wide - 1) {
      const int owner = __ffs(static_cast<int>(wide)) - 1;
      const unsigned row = __shfl_sync(0xffffffffu, own_row(), owner);
      const __half* scales = this->global_scales(row);
      const std::uint32_t word =
          *reinterpret_cast<const std::uint32_t*>(line_column(row, lane / 4) + lane % 4 * 4);
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        std::int32_t dot = 0;
#pragma unroll 1
        for (unsigned plane = 0; plane < kPlanes; ++plane) {
          const std::uint32_t values =
              *reinterpret_cast<const std::uint32_t*>(plane_words(m, g()) + plane * 16 + t() * 4);
          const std::int32_t count = (2 * __popc(word & values) - __popc(values)) << plane;
          dot += plane == kPlanes - 1 ? -count : count;
        }
        const float sum = wide_sum<kGroup>(dot, scales, this->groups_begin(), this->groups_end());
        if (lane == static_cast<unsigned>(owner)) p[m] = sum;
      }
    }
  }

  /// This warp's slice sums of token m.
  __device__ float* partial(int m) const {
    return reinterpret_cast<float*>(mantissas + Plan::kPartialOffset) + m * Plan::kRows;
  }

 private:
  /// Eight planes of four words.
  __device__ char* plane_words(int m, unsigned block) const {
    return mantissas + Plan::kPlaneOffset + (m * TilePlan::kBlocks + block) * Plan::kPlaneStride;
  }

  __device__ std::int32_t* sums(int m) const {
    return reinterpret_cast<std::int32_t*>(mantissas + Plan::kSumOffset) + m * TilePlan::kMantissas;
  }

  /// Dots 2i and 2i + 1 of two blocks, weighed by the mantissa pairs of rows g and g + 8.
  __device__ void multiply_pair(int i, const std::uint32_t (&a)[4], const std::uint32_t* b,
                                std::uint32_t mantissas0, std::uint32_t mantissas1,
                                std::int32_t (&acc)[2][2]) const {
    std::int32_t counts[2][4];  // [dot][C fragment]
#pragma unroll
    for (int dot = 0; dot < 2; ++dot) {
      const int block = (2 * i + dot) / TilePlan::kDotsPerBlock;
      const unsigned part = (2 * i + dot) % TilePlan::kDotsPerBlock;  // kGroup / 32 words each
      // Smaller groups: only the lanes that hold the group's words keep them.
      const bool used = kGroup >= 128 || t() / (kGroup / 32) == part;
      ptx::mma_and_popc_m16n8k128(counts[dot], a[2 * block], a[2 * block + 1], used ? b[block] : 0);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Counts are at most 128, so two of them share a word as bytes.
      const std::uint32_t row_g = __byte_perm(counts[0][j], counts[1][j], 0x40);
      const std::uint32_t row_g8 = __byte_perm(counts[0][2 + j], counts[1][2 + j], 0x40);
      acc[0][j] = ptx::dp2a_lo(mantissas0, row_g, acc[0][j]);
      acc[1][j] = ptx::dp2a_lo(mantissas1, row_g8, acc[1][j]);
    }
  }

  /// v[i] holds this lane's part of row g + 8i; returns the sum over the four lanes for row g + 8t.
  __device__ std::uint32_t transpose_add(const std::uint32_t (&v)[4]) const {
    const bool upper = (lane & 2) != 0;
    std::uint32_t kept0 = upper ? v[2] : v[0], kept1 = upper ? v[3] : v[1];
    kept0 += __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 2);
    kept1 += __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], 2);
    const bool odd = (lane & 1) != 0;
    return (odd ? kept1 : kept0) + __shfl_xor_sync(0xffffffffu, odd ? kept0 : kept1, 1);
  }

  /// Σ mantissa · Σ q over the slice's groups, for row own_row().
  __device__ std::int32_t correction(int m) const {
    std::int32_t total = 0;
    const char* own = mantissa_row(own_row());
#pragma unroll
    for (int i = 0; i < TilePlan::kMantissas; i += 8) {
      std::uint32_t pairs[4];
      Tile::load_4_words(pairs, own + 2 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int2 sum = *reinterpret_cast<const int2*>(&sums(m)[i + 2 * j]);
        total += static_cast<std::int16_t>(pairs[j] & 0xffffu) * sum.x;
        total += (static_cast<std::int32_t>(pairs[j]) >> 16) * sum.y;
      }
    }
    return total;
  }
};

/// CTAs that fetch their bits only when their x is on its way, with programmatic dependent launch.
/// What is asked for sooner comes sooner: the weights of all CTAs that fit on the GPU at once are
/// 15 MB, or 3 us. Those before `late_begin` are enough to keep the memory busy; those after the
/// late ones start when others have ended.
struct DecodeB1Cut {
  std::uint32_t late_begin;
  std::uint32_t late_count;
};

/// Grid: CTAs of 32 rows of W in x. Block: (32, DecodeB1::warps). Dynamic shared memory:
/// DecodeB1::shared_bytes. With kEngine the copy engine fetches the weights (see weight_tile.cuh):
/// all slices have a warp. With kQuantizes, too, every CTA quantizes the one token, params.input,
/// itself; it has DecodeB1::kMaximaBytes more. `kHalf`: the last slice is a half, see Windows.
template <int kTokens, int kGroup, bool kEngine, bool kQuantizes, bool kHalf>
__global__ void __launch_bounds__(DecodeB1<kTokens, kGroup>::kMaxWarps* kWarpSize)
    decode_b1(const __grid_constant__ GemmParams params,
              const __grid_constant__ BitsMaps<kHalf> bits_maps,
              const __grid_constant__ DecodeB1Cut cut) {
  using Plan = DecodeB1<kTokens, kGroup>;
  using TilePlan = WeightTilePlan<32, kGroup>;
  static_assert(kEngine || !kHalf, "a short slice needs no kernel of its own there");
  static_assert(!kQuantizes || (kEngine && kTokens == 1), "all warps have a slice of one token");
  extern __shared__ __align__(1024) char shared[];
  const unsigned lane = threadIdx.x;
  const unsigned warp = threadIdx.y;
  const unsigned warps = blockDim.y;
  const unsigned slices = params.slices;
  const unsigned n0 = blockIdx.x * Plan::kRows;
  char* scales = shared + warps * TilePlan::kBitsBytes;
  char* kept = scales + warps * TilePlan::kScaleBytes;
  const std::uint32_t scales_barrier = ptx::shared_address(shared) + warps * Plan::kWarpBytes;
  const std::uint32_t bits_barrier = scales_barrier + 8;
  [[maybe_unused]] const bool fetches = kEngine && warp == 0 && lane == 0;
  [[maybe_unused]] const bool fetches_late =
      kEngine && !kQuantizes && params.dependent && blockIdx.x - cut.late_begin < cut.late_count;
#if __CUDA_ARCH__ >= 900
  if (fetches) {
    ptx::mbarrier_init(scales_barrier, 1);
    ptx::mbarrier_init(bits_barrier, 1);
    ptx::fence_mbarrier_init();
    fetch_scales_by_engine(params, n0, Plan::kRows, scales, scales_barrier);
    if (!fetches_late) {
      fetch_bits_by_engine(params, bits_maps, n0, Plan::kRows, 0, slices, shared, bits_barrier);
    }
  }
  __syncwarp();
#endif
  ptx::launch_dependents();

  DecodeB1Warp<kTokens, kGroup, kHalf> work{
      {params, shared + warp * TilePlan::kBitsBytes, scales + warp * TilePlan::kScales * 2,
       warps * TilePlan::kScales * 2, kept + warp * Plan::kKeptBytes, n0, warp, lane}};
  if (kEngine) {
    work.scales_stride = params.scales_stride * 2;
    work.scales = scales + work.k0() / kGroup * 2;
  }
  SliceUnit unit{};
  const bool early = kEngine && params.dependent;  // mantissas before the wait
  if (early) {
    __syncthreads();  // the barriers are ready
    if (warp < slices) {
      wait_for_barrier(scales_barrier, 0);
      unit = work.make_mantissas();
    }
  }

  // Warp m adds up and writes token m, a row a lane.
  const unsigned n = n0 + lane;
  const bool writes = warp < kTokens && warp < params.m && n < params.n;
  float x_scale = 0, bias = 0, residual = 0, acc = 0;
  for (unsigned first = 0;; first += warps) {
    work.slice = first + warp;
    const bool busy = work.slice < slices;
    if (!kEngine && busy) work.fetch_weights();
    if (first == 0) {  // weights do not depend on what is waited for
      ptx::wait_for_dependencies();
      if (writes) {
        if (!kQuantizes) x_scale = params.x_scales[warp];
        if (params.bias != nullptr) bias = params.bias[n];
        residual = load_residual(params, warp, n);
      }
    }
    if (busy) {
      std::uint32_t words[kTokens][8];
      if constexpr (kQuantizes) {
        auto* maxima = reinterpret_cast<std::uint32_t*>(shared + warps * Plan::kWarpBytes +
                                                        Plan::kBarrierBytes);
        x_scale = params.input_type == DataType::kBFloat16
                      ? work.template quantize_x<__nv_bfloat16>(words[0], maxima, warps)
                      : work.template quantize_x<__half>(words[0], maxima, warps);
      } else {
        work.load_x(words);
#if __CUDA_ARCH__ >= 900
        if (fetches && fetches_late) {
          fetch_bits_by_engine(params, bits_maps, n0, Plan::kRows, 0, slices, shared, bits_barrier);
        }
#endif
      }
      work.make_planes(words);
    }
    if (kEngine && !kQuantizes && !early) __syncthreads();  // the barriers are ready
    if (busy) {
      if (!early) {
        if (kEngine) {
          wait_for_barrier(scales_barrier, 0);
        } else {
          ptx::cp_async_wait<1>();
        }
        unit = work.make_mantissas();
      }
      __syncwarp();
      typename DecodeB1Warp<kTokens, kGroup, kHalf>::Operand x;
      work.load_operand(x);
      if (kEngine) {
        wait_for_barrier(bits_barrier, 0);
      } else {
        ptx::cp_async_wait<0>();
        __syncwarp();
      }
      float p[kTokens];
      work.multiply(x, unit, p);
      if (__any_sync(0xffffffffu, !unit.narrow)) work.wide_sums(unit.narrow, p);
#pragma unroll
      for (int m = 0; m < kTokens; ++m) work.partial(m)[work.own_row()] = p[m];
    }
    __syncthreads();
    if (writes) {
      const float* sums =
          reinterpret_cast<const float*>(kept + Plan::kPartialOffset) + warp * Plan::kRows + lane;
      acc = add_slices(acc, sums, Plan::kKeptBytes / 4, min(warps, slices - first));
    }
    if (kEngine || first + warps >= slices) break;
    __syncthreads();
  }
  if (writes) {
    store_output(params.y, params.y_type, warp * params.y_stride + n,
                 finish(params, acc, x_scale, bias, residual));
  }
}

}  // namespace kernels
}  // namespace binary_gemm
