#pragma once

/// What a CPU path implements, and what the paths share. Checks, threads and choice are in cpu.cpp.
///
/// The functions of a vector path carry their instruction set as a function attribute, not as a
/// flag of the file: so no inline function that other files share is ever compiled for a processor
/// that may not be there.

#include <cmath>
#include <cstdint>
#include <limits>

#include "binary_gemm/cpu.h"
#include "binary_gemm/reference.h"

namespace binary_gemm {
namespace cpu {

/// One product with its views resolved to pointers at element (0, 0).
struct GemmArguments {
  const std::int8_t* x;  ///< [m, k]
  std::int64_t x_stride;
  const float* x_scales;      ///< [m]
  const std::uint32_t* bits;  ///< [n, k / 32]
  std::int64_t bits_stride;
  const float16* scales;  ///< [n, k / group_size]
  std::int64_t scales_stride;
  const float* bias;     ///< [n] or null
  const void* residual;  ///< [m, n] of y's type, or null; may be y
  std::int64_t residual_stride;
  void* y;  ///< [m, n]
  DataType y_type;
  std::int64_t y_stride;
  std::int64_t m;
  std::int64_t k;
  std::int64_t group_size;
};

/// Quantizes one row of `k` elements of `type` at `x`: writes `q` and returns the scale.
using QuantizeRow = float (*)(const void* x, DataType type, std::int64_t k, std::int8_t* q);

/// Writes a row of rms_norm_quantize's values. `gain` is null, or fp32 like `values`.
using NormalizeRow = void (*)(const void* x, DataType type, std::int64_t k, const float* gain,
                              float epsilon, float* values);

/// Writes a row of swiglu_quantize's values. `gate` and `up` are rows of `k` elements.
using SwigluRow = void (*)(const void* gate, const void* up, DataType type, std::int64_t k,
                           float* values);

/// Most tokens in one call of a GemmRows: bounds what a path keeps on its stack. cpu.cpp cuts
/// longer batches in equal passes.
inline constexpr std::int64_t kMaxPassTokens = 256;

/// Activations as a path's kernel reads them: blocks of tokens, packed before any row is computed
/// and shared by all threads. No blocks if the kernel reads GemmArguments::x itself.
struct PackedShape {
  std::int64_t blocks;
  std::int64_t block_bytes;  ///< a multiple of 64
};

/// Packs one block to `packed`, which is its own and 64-byte aligned.
using PackBlock = void (*)(const GemmArguments& arguments, std::int64_t block, char* packed);

/// Computes y[:, row_begin:row_end] on the calling thread, for 1 to kMaxPassTokens tokens.
using GemmRows = void (*)(const GemmArguments& arguments, const char* packed,
                          std::int64_t row_begin, std::int64_t row_end);

/// A path's functions.
struct PathKernels {
  QuantizeRow quantize_row;
  NormalizeRow normalize_row;
  SwigluRow swiglu_row;
  PackedShape (*packed_shape)(const GemmArguments& arguments);
  PackBlock pack_block;
  GemmRows gemm_rows;
};

extern const PathKernels kPortableKernels;
#ifdef __x86_64__
extern const PathKernels kAvx2Kernels;
extern const PathKernels kAvx512VnniKernels;
#endif
#if defined(__x86_64__) && defined(__linux__)
extern const PathKernels kAmxKernels;

/// Whether the processor has AMX for int8 and the system lets this process use it, for which it
/// must be asked.
bool amx_is_permitted();
#endif

inline constexpr std::int64_t kMinGroupSize = 32;
inline constexpr std::int64_t kMaxSliceGroups = kSliceK / kMinGroupSize;

/// The scales of one slice of one row, as the slice's sum needs them.
struct SliceScales {
  bool narrow;
  float unit;                               ///< narrow: u, a power of two
  std::int32_t mantissas[kMaxSliceGroups];  ///< narrow: scale / u
};

inline SliceScales slice_scales(const float16* scales, std::int64_t groups) {
  SliceScales slice;
  std::uint32_t largest = 0;  // fp16 magnitudes compare as their bits do
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::uint32_t magnitude = scales[g].bits & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  slice.narrow = largest < 0x7c00u;
  if (!slice.narrow) return slice;
  // A nonzero fp16 is a normal float, so its exponent field is floor(log2) + 127.
  const std::uint32_t field =
      largest == 0 ? 127u
                   : float_bits(to_float(float16{static_cast<std::uint16_t>(largest)})) >> 23;
  slice.unit = float_from_bits((field - 13u) << 23);
  const float inverse_unit = float_from_bits((2u * 127u - (field - 13u)) << 23);
  bool integers = true;
  for (std::int64_t g = 0; g < groups; ++g) {
    const float mantissa = to_float(scales[g]) * inverse_unit;
    slice.mantissas[g] = static_cast<std::int32_t>(mantissa);
    integers = integers && static_cast<float>(slice.mantissas[g]) == mantissa;
  }
  slice.narrow = integers;
  return slice;
}

/// A wide slice's sum: fused multiply-adds in the order of the groups.
inline float wide_sum(const float16* scales, const std::int32_t* dots, std::int64_t groups) {
  float sum = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    sum = std::fma(to_float(scales[g]), static_cast<float>(dots[g]), sum);
  }
  return sum;
}

/// Applies token m's scale, row n's bias and the residual to `acc` and writes y[m, n].
inline void store_output(const GemmArguments& a, std::int64_t m, std::int64_t n, float acc) {
  float result = a.bias != nullptr ? std::fma(acc, a.x_scales[m], a.bias[n]) : acc * a.x_scales[m];
  if (a.residual != nullptr) {
    result += reference::load(a.residual, a.y_type, m * a.residual_stride + n);
  }
  reference::store(a.y, a.y_type, m * a.y_stride + n, result);
}

/// What rms_norm_quantize multiplies a row with: NaN if the sum is not finite.
inline float inverse_of_root(float sum_of_squares, std::int64_t k, float epsilon) {
  if (!(sum_of_squares <= std::numeric_limits<float>::max())) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return 1.0f / std::sqrt(std::fma(sum_of_squares, 1.0f / static_cast<float>(k), epsilon));
}

/// The sum of `sums`, which are zeros from `count` on: neighbours first, as the reference does.
/// Overwrites them.
inline float add_neighbours(float (&sums)[reference::kSquareSums], std::int64_t count) {
  std::int64_t left = 1;
  while (left < count) left *= 2;
  for (left /= 2; left > 0; left /= 2) {
    for (std::int64_t i = 0; i < left; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

}  // namespace cpu
}  // namespace binary_gemm
