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

inline constexpr unsigned kOrderBlock = 128;

/// The column, in its block of 128, of the value at `position` of the permuted order.
template <int kGroup>
__host__ __device__ constexpr unsigned source_column(unsigned position) {
  // position = 32 step + 16 half + 4t + i
  const unsigned step = position / 32, half = position / 16 % 2, t = position / 4 % 4,
                 i = position % 4;
  if (kGroup >= 128) {
    const unsigned j = 2 * (step % 2) + half;
    return 32 * t + 16 * (step / 2) + 4 * i + j;
  }
  if (kGroup == 64) {
    const unsigned j = 2 * (step % 2) + half;
    return 64 * (step / 2) + 16 * t + 4 * i + j;
  }
  return 32 * step + 8 * t + 2 * half + i / 2 + 4 * (i % 2);
}

/// The 32 weights of a word as bytes of +1 (bit 1) or -1: byte i of register j is bit 4i + j, of
/// register 4 + j bit 16 + 4i + j.
///
/// A byte permute looks up four selectors of 3 bits in a table of 8 bytes; a table that depends on
/// one bit of its index picks that bit out of each nibble of the word. 13 instructions. The
/// permute's sign mode does the fourth bit in two less, but gives -3 or -1, and adding back what
/// that takes from the dot cost more: 5% less time at M = 8, 12% more at M = 16.
inline constexpr std::uint32_t kSignByBit0 = 0x01ff01ffu;  // of selectors 0..3, and 4..7 alike
inline constexpr std::uint32_t kSignByBit1 = 0x0101ffffu;
inline constexpr std::uint32_t kMinusOnes = 0xffffffffu, kPlusOnes = 0x01010101u;  // by bit 2

__device__ inline void expand_signs(std::uint32_t word, std::uint32_t (&signs)[8]) {
  const std::uint32_t low3 = word & 0x77777777u;
  const std::uint32_t bit3 = (word >> 3) & 0x11111111u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t selectors = low3 >> (16 * half);
    signs[4 * half + 0] = ptx::permute_bytes(kSignByBit0, kSignByBit0, selectors);
    signs[4 * half + 1] = ptx::permute_bytes(kSignByBit1, kSignByBit1, selectors);
    signs[4 * half + 2] = ptx::permute_bytes(kMinusOnes, kPlusOnes, selectors);
    signs[4 * half + 3] = ptx::permute_bytes(kSignByBit0, kSignByBit0, bit3 >> (16 * half));
  }
}

/// Lane t's registers of a block of 128 (16 bytes at `block`): signs[2s] and signs[2s + 1] go to
/// the halves of step s.
template <int kGroup>
__device__ inline void expand_block(const char* block, unsigned t, std::uint32_t (&signs)[8]) {
  const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(block);
  if constexpr (kGroup >= 128) {
    expand_signs(words[t], signs);
  } else if constexpr (kGroup == 64) {
    expand_signs(__byte_perm(words[t / 2], words[2 + t / 2], t % 2 == 0 ? 0x5410 : 0x7632), signs);
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(block);
    const std::uint32_t all[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      // Byte t twice; the second copy moved down a bit, so that its nibbles' low bit is the next
      // one.
      const std::uint32_t twice = __byte_perm(all[w], 0, t * 0x11);
      const std::uint32_t selectors = (twice & 0x0077u) | (twice >> 1 & 0x7700u);
      signs[2 * w] = ptx::permute_bytes(kSignByBit0, kSignByBit0, selectors);
      signs[2 * w + 1] = ptx::permute_bytes(kMinusOnes, kPlusOnes, selectors);
    }
  }
}

}  // namespace kernels
}  // namespace binary_gemm
