#pragma once

/// From words of weights to bytes of +1 and -1 in registers, and the order of x that goes with it.
///
/// Tensor-core operand A wants, in lane (g, t) = (lane / 4, lane % 4), 4 bytes of row g at bytes 4t
/// of the first and of the second 16 of each 32 of K. Which weight is there is free, if x has the
/// same order. So nothing moves between lanes: a lane expands a register of its own, and x is
/// permuted once on its way. The order depends on the group, since each 32 of K must lie in one:
///   G >= 128: the register is word t of the block of 128;
///   G = 64: its halves are bits 16t of both groups of the block;
///   G = 32: bits 8t of each of the four groups.

#include <cstdint>

#include "binary_gemm/kernels/ptx.cuh"

namespace binary_gemm {
namespace kernels {

// Position 32 step + 16 half + 4t + i of a block has the value of column
//   G >= 128: 32t + 16 (step / 2) + 4i + 2 (step % 2) + half
//   G = 64: 64 (step / 2) + 16t + 4i + 2 (step % 2) + half
//   G = 32: 32 step + 8t + 2 half + i / 2 + 4 (i % 2)

/// Bytes +1 or -1 by bit 0, or by bit 1, of a selector in 4 .. 7 of permute_bytes. Only its second
/// table is an immediate operand, so that selectors are kept from looking at the first.
inline constexpr std::uint32_t kSignByBit0 = 0x01ff01ffu;
inline constexpr std::uint32_t kSignByBit1 = 0x0101ffffu;

/// The 32 weights of a word as bytes of +1 (bit 1) or -1: byte i of register j is bit 4i + j, of
/// register 4 + j bit 16 + 4i + j.
///
/// A byte permute looks up four selectors of 3 bits in a table of 8 bytes; a table that depends on
/// one bit of its index picks that bit out of each nibble of the word. 13 instructions. The
/// permute's sign mode does it in two less, but gives -3 or -1, and adding back what that takes
/// from the dot cost more: 5% less time at M = 8, 12% more at M = 16.
__device__ inline void expand_signs(std::uint32_t word, std::uint32_t (&signs)[8]) {
  const std::uint32_t low = ptx::and_or(word, 0x33333333u, 0x44444444u);
  const std::uint32_t high = ptx::and_or(word >> 2, 0x33333333u, 0x44444444u);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    signs[4 * half + 0] = ptx::permute_bytes(0, kSignByBit0, low >> (16 * half));
    signs[4 * half + 1] = ptx::permute_bytes(0, kSignByBit1, low >> (16 * half));
    signs[4 * half + 2] = ptx::permute_bytes(0, kSignByBit0, high >> (16 * half));
    signs[4 * half + 3] = ptx::permute_bytes(0, kSignByBit1, high >> (16 * half));
  }
}

/// Where, in the 16 bytes of a block of 128, lane_word starts to read.
template <int kGroup>
__device__ inline unsigned lane_word_offset(unsigned t) {
  return kGroup >= 128 ? 4 * t : 0;
}

/// The 32 weights of a block of 128 that lane t expands, as one word. `from`: the block's 16 bytes
/// and lane_word_offset.
template <int kGroup>
__device__ inline std::uint32_t lane_word(const char* from, unsigned t) {
  const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(from);
  if constexpr (kGroup >= 128) {
    return words[0];
  } else if constexpr (kGroup == 64) {
    return __byte_perm(words[t / 2], words[2 + t / 2], t % 2 == 0 ? 0x5410 : 0x7632);
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    const unsigned pick = t | (4 + t) << 4;  // byte t of both
    return __byte_perm(__byte_perm(four.x, four.y, pick), __byte_perm(four.z, four.w, pick),
                       0x5410);
  }
}

/// For groups of 32: selectors that look at bits 0 and 4, then 1 and 5, of a byte (half 0), or at
/// bits 2, 6, 3 and 7. `twice`: the byte, two times.
__device__ inline std::uint32_t short_group_selectors(std::uint32_t twice, int half) {
  return (twice >> 2 * half & 0x0033u) | (twice >> (2 * half + 1) & 0x3300u) | 0x4444u;
}

/// The registers of a lane_word: signs[2s] and signs[2s + 1] go to the halves of step s.
template <int kGroup>
__device__ inline void expand_lane_word(std::uint32_t word, std::uint32_t (&signs)[8]) {
  if constexpr (kGroup >= 64) {
    expand_signs(word, signs);
  } else {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint32_t twice = __byte_perm(word, 0, step * 0x11);
      signs[2 * step] = ptx::permute_bytes(0, kSignByBit0, short_group_selectors(twice, 0));
      signs[2 * step + 1] = ptx::permute_bytes(0, kSignByBit0, short_group_selectors(twice, 1));
    }
  }
}

/// expand_lane_word in steps, for who has other work between them.
template <int kGroup>
struct LaneSigns {
  std::uint32_t low, high;  ///< selectors, or the word

  LaneSigns() = default;
  __device__ explicit LaneSigns(std::uint32_t word) {
    if constexpr (kGroup >= 64) {
      low = (word & 0x33333333u) | 0x44444444u;
      high = (word >> 2 & 0x33333333u) | 0x44444444u;
    } else {
      low = word;
    }
  }
  /// Registers 2 step and 2 step + 1. `after`: any register. It is the table that no selector looks
  /// at, and keeps ptxas from doing this before what computes it.
  __device__ void expand(int step, std::uint32_t after, std::uint32_t* signs) const {
    if constexpr (kGroup >= 64) {
      const std::uint32_t selectors = (step % 2 == 0 ? low : high) >> (step / 2 * 16);
      signs[0] = ptx::permute_bytes(after, kSignByBit0, selectors);
      signs[1] = ptx::permute_bytes(after, kSignByBit1, selectors);
    } else {
      const std::uint32_t twice = __byte_perm(low, 0, step * 0x11);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        signs[i] = ptx::permute_bytes(after, kSignByBit0, short_group_selectors(twice, i));
      }
    }
  }
};

/// The 4x4 transpose of the bytes of four words: what is in the order of expand_signs and what is
/// in that of columns differ by it.
__device__ inline void transpose_bytes(std::uint32_t* w) {
  const std::uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);   // w0.0 w1.0 w0.1 w1.1
  const std::uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);  // w0.2 w1.2 w0.3 w1.3
  const std::uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
  const std::uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410);
  w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410);
  w[3] = __byte_perm(high01, high23, 0x7632);
}

/// Puts 32 consecutive bytes (four a word) in the order of expand_signs.
__device__ inline void permute_as_signs(std::uint32_t (&words)[8]) {
  transpose_bytes(&words[0]);
  transpose_bytes(&words[4]);
}

}  // namespace kernels
}  // namespace binary_gemm
