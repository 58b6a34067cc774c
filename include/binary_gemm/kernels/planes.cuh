#pragma once

/// Bit planes of int8 activations: what the binary tensor core multiplies with.
///
/// Plane p of 32 values is a word whose bit i is bit p of value i, so that in two's complement
/// `q = sum_{p < 7} 2^p plane_p - 2^7 plane_7`.

#include <cstdint>

#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/ptx.cuh"

namespace binary_gemm {
namespace kernels {

inline constexpr int kPlanes = 8;

/// 32 consecutive int8, four a word, 16-byte aligned; zeros if not `inside`. Does not branch, so
/// that loads of several chunks can be in flight at once.
__device__ inline void load_aligned_chunk(std::uint32_t (&words)[8], const std::int8_t* source,
                                          bool inside) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint4 four = make_uint4(0, 0, 0, 0);
    if (inside) four = reinterpret_cast<const uint4*>(source)[i];
    words[4 * i] = four.x, words[4 * i + 1] = four.y;
    words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
  }
}

/// The same at any alignment.
__device__ inline void load_any_chunk(std::uint32_t (&words)[8], const std::int8_t* source,
                                      bool inside) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    words[i] = 0;
#pragma unroll 1
    for (int j = 0; inside && j < 4; ++j) {
      words[i] |= std::uint32_t{static_cast<std::uint8_t>(source[4 * i + j])} << (8 * j);
    }
  }
}

/// The chunks of `kCount` rows, `step` rows apart from `row`, at `column` (a multiple of 32); zeros
/// past M and K.
template <int kCount>
__device__ inline void load_chunks(std::uint32_t (&words)[kCount][8], const GemmParams& params,
                                   unsigned row, unsigned step, unsigned column) {
  const std::int8_t* source = params.x + row * params.x_stride + column;
  if (params.vectorized) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      load_aligned_chunk(words[i], source + i * step * params.x_stride,
                         row + i * step < params.m && column < params.k);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      load_any_chunk(words[i], source + i * step * params.x_stride,
                     row + i * step < params.m && column < params.k);
    }
  }
}

/// The sum of the chunk's 32 values.
__device__ inline std::int32_t sum_chunk(const std::uint32_t (&words)[8]) {
  std::int32_t sum = 0;
#pragma unroll
  for (const std::uint32_t word : words) sum = ptx::dp4a(word, 0x01010101u, sum);
  return sum;
}

/// One step of an 8x8 bit-matrix transpose in every byte: the bits of `a` above `shift` and those
/// of `b` below it (by `mask`) change places.
__device__ inline void swap_bits(std::uint32_t& a, std::uint32_t& b, int shift,
                                 std::uint32_t mask) {
  const std::uint32_t raised = b << shift;
  const std::uint32_t lowered = a >> shift;
  a = (a & mask) | (raised & ~mask);
  b = (lowered & mask) | (b & ~mask);
}

/// Transposes 32 int8 values (four a word) to their 8 planes, in place.
__device__ inline void transpose_to_planes(std::uint32_t (&words)[8]) {
  // Bytes first: word i takes bytes i, 8 + i, 16 + i, 24 + i, so that byte b of the result is
  // values 8b .. 8b + 7, bit i of it from word i.
  std::uint32_t v[8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // values 8b + 4·half .. + 3 lie in words 2b + half
    const std::uint32_t w0 = words[half], w1 = words[2 + half];
    const std::uint32_t w2 = words[4 + half], w3 = words[6 + half];
    const std::uint32_t low01 = __byte_perm(w0, w1, 0x5140);   // w0.0 w1.0 w0.1 w1.1
    const std::uint32_t high01 = __byte_perm(w0, w1, 0x7362);  // w0.2 w1.2 w0.3 w1.3
    const std::uint32_t low23 = __byte_perm(w2, w3, 0x5140);
    const std::uint32_t high23 = __byte_perm(w2, w3, 0x7362);
    v[4 * half + 0] = __byte_perm(low01, low23, 0x5410);
    v[4 * half + 1] = __byte_perm(low01, low23, 0x7632);
    v[4 * half + 2] = __byte_perm(high01, high23, 0x5410);
    v[4 * half + 3] = __byte_perm(high01, high23, 0x7632);
  }
  // Then an 8x8 bit transpose in each byte lane, by three rounds of swaps.
#pragma unroll
  for (int i = 0; i < 4; ++i) swap_bits(v[i], v[i + 4], 4, 0x0f0f0f0fu);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i % 4 < 2) swap_bits(v[i], v[i + 2], 2, 0x33333333u);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) swap_bits(v[i], v[i + 1], 1, 0x55555555u);
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) words[p] = v[p];
}

}  // namespace kernels
}  // namespace binary_gemm
