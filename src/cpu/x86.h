#pragma once

/// What the x86 paths share. Included by their files alone.
///
/// BINARY_GEMM_AVX2 and BINARY_GEMM_AVX512 mark a function that may use these instructions. GCC
/// inlines such a function only into one marked at least as well, and never into a lambda.

#include <immintrin.h>

#include <cstdint>

#include "kernel.h"

#define BINARY_GEMM_AVX2 __attribute__((target("avx2,fma,f16c")))
#define BINARY_GEMM_AVX512 \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")))

// Unrolls the loop that follows, so that an array indexed by its counter can live in registers.
#ifdef __clang__
#define BINARY_GEMM_UNROLL _Pragma("unroll")
#else
#define BINARY_GEMM_UNROLL _Pragma("GCC unroll 32")
#endif

// GCC before 13 takes the undefined registers in its own AVX-512 header for a mistake (GCC bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#define BINARY_GEMM_AVX512_WARNINGS                     \
  _Pragma("GCC diagnostic ignored \"-Wuninitialized\"") \
      _Pragma("GCC diagnostic ignored \"-Wmaybe-uninitialized\"")
#else
#define BINARY_GEMM_AVX512_WARNINGS
#endif

namespace binary_gemm {
namespace cpu {

/// Bit planes of a 32-bit word of weights: plane p is bit p of each of its four bytes, so the
/// weights p, p + 8, p + 16 and p + 24.
inline constexpr int kPlanes = 8;

/// Tokens are multiplied in `count` equal blocks of `size`, the last filled up with zero tokens.
/// A block is packed as
///
///   seeds   int32 [groups][size]              one a group and token, see the paths
///   values  int8  [k / 32][kPlanes][size][4]  the four activations that meet a plane of a word
struct TokenBlocks {
  std::int64_t count;
  std::int64_t size;

  TokenBlocks(std::int64_t m, std::int64_t max_size)
      : count((m + max_size - 1) / max_size), size((m + count - 1) / count) {}
};

inline std::int64_t packed_seeds_bytes(const GemmArguments& a, std::int64_t size) {
  return (a.k / a.group_size * size * 4 + 63) / 64 * 64;
}

inline std::int64_t packed_block_bytes(const GemmArguments& a, std::int64_t size) {
  return packed_seeds_bytes(a, size) + (a.k * size + 63) / 64 * 64;
}

/// What a group's sum starts from: minus the sum of its activations, as one int32 or as two int16
/// for the first and the last 16 of each 32 (bytes 0 and 1, and bytes 2 and 3, of a plane).
enum class Seeds { kInt32, kInt16Pairs };

/// Sixteen activations' sum.
BINARY_GEMM_AVX2 inline std::int32_t sum16(__m128i q) {
  const __m128i biased = _mm_xor_si128(q, _mm_set1_epi8(-128));
  const __m128i halves = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
}

/// Thirty-two activations, and the sums of their first and last sixteen.
struct WordOfActivations {
  __m128i first;
  __m128i last;
  std::int32_t first_sum;
  std::int32_t last_sum;
};

BINARY_GEMM_AVX2 inline WordOfActivations load_activations(const std::int8_t* q) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + 16));
  return {first, last, sum16(first), sum16(last)};
}

/// planes[p]: the four activations that meet plane p. `planes` is 16-byte aligned.
BINARY_GEMM_AVX2 inline void store_by_plane(const WordOfActivations& q,
                                            std::uint32_t planes[kPlanes]) {
  const __m128i pair_bytes = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  const __m128i first = _mm_shuffle_epi8(q.first, pair_bytes);
  const __m128i last = _mm_shuffle_epi8(q.last, pair_bytes);
  _mm_store_si128(reinterpret_cast<__m128i*>(planes), _mm_unpacklo_epi16(first, last));
  _mm_store_si128(reinterpret_cast<__m128i*>(planes + 4), _mm_unpackhi_epi16(first, last));
}

/// Packs the tokens [block * size, (block + 1) * size) as TokenBlocks says.
BINARY_GEMM_AVX2 inline void pack_block(const GemmArguments& a, std::int64_t block,
                                        std::int64_t size, Seeds kind, char* packed) {
  const std::int64_t words_per_group = a.group_size / 32;
  for (std::int64_t t = 0; t < size; ++t) {
    auto* seeds = reinterpret_cast<std::uint32_t*>(packed) + t;
    auto* values = reinterpret_cast<std::uint32_t*>(packed + packed_seeds_bytes(a, size)) + t;
    const std::int64_t m = block * size + t;
    if (m >= a.m) {
      for (std::int64_t i = 0; i < a.k / a.group_size; ++i) seeds[i * size] = 0;
      for (std::int64_t i = 0; i < a.k / 4; ++i) values[i * size] = 0;
      continue;
    }
    const std::int8_t* q = a.x + m * a.x_stride;
    for (std::int64_t g = 0; g < a.k / a.group_size; ++g) {
      std::int32_t first = 0;
      std::int32_t last = 0;
      for (std::int64_t j = 0; j < words_per_group; ++j) {
        const WordOfActivations word = load_activations(q);
        q += 32;
        first += word.first_sum;
        last += word.last_sum;
        alignas(16) std::uint32_t planes[kPlanes];
        store_by_plane(word, planes);
        for (int p = 0; p < kPlanes; ++p) values[p * size] = planes[p];
        values += kPlanes * size;
      }
      seeds[g * size] = kind == Seeds::kInt32 ? static_cast<std::uint32_t>(-(first + last))
                                              : (static_cast<std::uint32_t>(-first) & 0xffffu) |
                                                    static_cast<std::uint32_t>(-last) << 16;
    }
  }
}

/// The QuantizeRow of all x86 paths (x86_quantize.cpp).
float avx2_quantize_row(const void* x, DataType type, std::int64_t k, std::int8_t* q);
void avx2_normalize_row(const void* x, DataType type, std::int64_t k, const float* gain,
                        float epsilon, float* values);
void avx2_swiglu_row(const void* gate, const void* up, DataType type, std::int64_t k,
                     float* values);

/// The AVX-512 path's parts for one token (avx512_vector.cpp), as in PathKernels.
PackedShape avx512_vector_shape(const GemmArguments& a);
void avx512_vector_pack(const GemmArguments& a, std::int64_t block, char* packed);
void avx512_vector_rows(const GemmArguments& a, const char* packed, std::int64_t row_begin,
                        std::int64_t row_end);

}  // namespace cpu
}  // namespace binary_gemm
