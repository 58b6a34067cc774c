#pragma once

/// @file
/// Importing weights: sizes of the canonical layout, and ggml's Q1_0 blocks.
///
/// `pack_weights` and `unpack_weights` themselves are in cpu.h and cuda.h.

#include <cstddef>
#include <cstdint>

#include "binary_gemm/views.h"

namespace binary_gemm {

/// Weights in a ggml Q1_0 block.
inline constexpr std::int64_t kQ1_0GroupSize = 128;
/// Bytes of a block: an fp16 scale, then the 128 bits, LSB first; bit 1 is +scale.
inline constexpr std::int64_t kQ1_0BlockBytes = 2 + kQ1_0GroupSize / 8;

/// Splits `[w.n, w.k / 128]` Q1_0 blocks, row-major and dense at `blocks` (any alignment), into the
/// canonical layout. The bits are copied as they are. `blocks_bytes` is the size of the input.
/// Throws std::invalid_argument unless w.group_size is 128, w is valid and the sizes agree.
void import_q1_0(const void* blocks, std::size_t blocks_bytes, const MutableWeightView& w);

/// The inverse of import_q1_0: writes `w.n * w.k / 128 * 18` bytes to `blocks`. Throws like it.
void export_q1_0(const WeightView& w, void* blocks, std::size_t blocks_bytes);

}  // namespace binary_gemm
