#pragma once

/// @file
/// The contract of numbers, as code: every backend, kernel and batch size gives these bits.
///
/// - Weights are +s or -s, with one fp16 scale `s` per group of G along K. The dot product of a
///   group with int8 activations is an exact int32.
/// - K is cut in slices of 1024. If every scale of a slice is an integer multiple of one power of
///   two `u`, not above 2^14 in magnitude, the slice is *narrow*: its sum is exact in int32 and
///   rounded once. Otherwise it is *wide*: groups are added in order by fused multiply-add.
/// - Slices are added in order, in fp32. Then the token's scale, the bias and the residual are
///   applied, and the result is rounded once to the output type.
/// - The fused steps, rms_norm_quantize and swiglu_quantize, compute a row of fp32 values in a
/// fixed
///   order and quantize it as any other.
///
/// So row m of y depends on row m of x alone. All arithmetic is fp32, round to nearest even, with
/// subnormals kept; compile with contraction off and never with fast-math. These loops are slow and
/// check nothing: they are here to be read, and to judge the rest.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "binary_gemm/types.h"
#include "binary_gemm/views.h"

namespace binary_gemm {
/// The contract of numbers: reference.h.
namespace reference {

/// What slice_unit_exponent says of a wide slice.
inline constexpr int kWide = std::numeric_limits<int>::max();

/// The exponent of a narrow slice's unit `u = 2^(floor(log2 s_max) - 13)`, where `s_max` is the
/// largest |scale| of `groups` scales, or `kWide` if some scale is not finite or no multiple of u.
inline int slice_unit_exponent(const float16* scales, std::int64_t groups) {
  float largest = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const float magnitude = std::fabs(to_float(scales[g]));
    if (!std::isfinite(magnitude)) return kWide;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest == 0) return 0;
  const int exponent = std::ilogb(largest) - 13;
  for (std::int64_t g = 0; g < groups; ++g) {
    const float mantissa = std::ldexp(to_float(scales[g]), -exponent);
    if (mantissa != std::nearbyint(mantissa)) return kWide;
  }
  return exponent;
}

/// The sum of one slice: `scales` and `dots` of its `groups` groups.
inline float slice_sum(const float16* scales, const std::int32_t* dots, std::int64_t groups) {
  const int exponent = slice_unit_exponent(scales, groups);
  if (exponent == kWide) {
    float sum = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      sum = std::fma(to_float(scales[g]), static_cast<float>(dots[g]), sum);
    }
    return sum;
  }
  // |mantissa| < 2^14 and the |dots| of a slice add up to at most 2^17, so int32 holds the sum.
  std::int32_t sum = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const float mantissa = std::ldexp(to_float(scales[g]), -exponent);
    sum += static_cast<std::int32_t>(mantissa) * dots[g];
  }
  return std::ldexp(static_cast<float>(sum), exponent);
}

/// The weight `w[n, k]` of the view as +1 or -1.
inline std::int32_t sign_of(const WeightView& w, std::int64_t n, std::int64_t k) {
  const std::uint32_t word = w.bits[w.bits_offset + n * w.bits_stride + k / 32];
  return (word >> (k % 32) & 1u) != 0 ? 1 : -1;
}

/// `acc[m, n]`: the fp32 sum over K before the token's scale is applied.
inline float accumulate(const ActivationView& x, const WeightView& w, std::int64_t m,
                        std::int64_t n) {
  const float16* scales = w.scales + w.scales_offset + n * w.scales_stride;
  const std::int8_t* q = x.values + x.offset + m * x.row_stride;
  float acc = 0;
  for (std::int64_t k0 = 0; k0 < w.k; k0 += kSliceK) {
    const std::int64_t k1 = k0 + kSliceK < w.k ? k0 + kSliceK : w.k;
    std::int32_t dots[kSliceK / 32] = {};
    for (std::int64_t k = k0; k < k1; ++k) {
      dots[(k - k0) / w.group_size] += sign_of(w, n, k) * q[k];
    }
    acc += slice_sum(scales + k0 / w.group_size, dots, (k1 - k0) / w.group_size);
  }
  return acc;
}

/// Element `index` of a matrix, counted from its base.
inline float load(const void* data, DataType type, std::int64_t index) {
  switch (type) {
    case DataType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DataType::kFloat16:
      return to_float(static_cast<const float16*>(data)[index]);
    case DataType::kBFloat16:
      return to_float(static_cast<const bfloat16*>(data)[index]);
    case DataType::kInt8:
      return to_float(static_cast<const std::int8_t*>(data)[index]);
  }
  return 0;
}

/// Writes `value`, rounded once to the type.
inline void store(void* data, DataType type, std::int64_t index, float value) {
  switch (type) {
    case DataType::kFloat32:
      static_cast<float*>(data)[index] = value;
      break;
    case DataType::kFloat16:
      static_cast<float16*>(data)[index] = to_float16(value);
      break;
    case DataType::kBFloat16:
      static_cast<bfloat16*>(data)[index] = to_bfloat16(value);
      break;
    case DataType::kInt8:
      static_cast<std::int8_t*>(data)[index] = static_cast<std::int8_t>(value);
  }
}

/// `r = acc * act_scale[m]`, or with a bias `r = fma(acc, act_scale[m], bias[n])`. Then y[m, n] is
/// r or, with a residual, `residual[m, n] + r`: rounded to fp32, then to y's type.
inline void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                        const MatrixView& y) {
  const BiasView& bias = epilogue.bias;
  const ConstMatrixView& residual = epilogue.residual;
  for (std::int64_t m = 0; m < x.m; ++m) {
    const float scale = x.scales[x.scales_offset + m];
    for (std::int64_t n = 0; n < w.n; ++n) {
      const float acc = accumulate(x, w, m, n);
      float result =
          bias.data != nullptr ? std::fma(acc, scale, bias.data[bias.offset + n]) : acc * scale;
      if (residual.data != nullptr) {
        result += load(residual.data, residual.type, residual.offset + m * residual.row_stride + n);
      }
      store(y.data, y.type, y.offset + m * y.row_stride + n, result);
    }
  }
}

/// Per token: `a = max|x|`, `scale = a / 127`, `q = rint(x * (127 / a))`, computed as if the
/// exponent range were unbounded. A row of zeros gives scale 0; a row with a NaN or an infinity
/// gives scale NaN and q = 0.
inline void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q) {
  for (std::int64_t m = 0; m < x.rows; ++m) {
    const std::int64_t row = x.offset + m * x.row_stride;
    std::int8_t* out = q.values + q.offset + m * q.row_stride;
    float largest = 0;
    bool finite = true;
    for (std::int64_t k = 0; k < x.cols; ++k) {
      const float magnitude = std::fabs(load(x.data, x.type, row + k));
      finite = finite && std::isfinite(magnitude);
      largest = magnitude > largest ? magnitude : largest;
    }
    q.scales[q.scales_offset + m] =
        finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    // 127 / a would overflow below 2^-121; scaling both by 2^64 changes no mantissa.
    const float lift = largest < 0x1p-64f ? 0x1p64f : 1.0f;
    const float inverse = finite && largest > 0 ? 127.0f / (largest * lift) : 0.0f;
    for (std::int64_t k = 0; k < x.cols; ++k) {
      const float value = finite ? load(x.data, x.type, row + k) * lift : 0.0f;
      out[k] = static_cast<std::int8_t>(std::nearbyint(value * inverse));
    }
  }
}

/// Quantizes fp32 values as row m of q.
inline void quantize_row(const std::vector<float>& values, std::int64_t m,
                         const MutableActivationView& q) {
  const auto k = static_cast<std::int64_t>(values.size());
  quantize_activation(matrix_view(values.data(), 1, k), q.row_range(m, 1));
}

/// A row's squares are added to this many sums: column k to sum k % 4096.
inline constexpr std::int64_t kSquareSums = 4096;

/// The sum of the squares of row m: each of the kSquareSums by fused multiply-adds in the order of
/// the columns, from +0; then neighbours are added, then neighbours of these sums, and so on.
inline float sum_of_squares(const ConstMatrixView& x, std::int64_t m) {
  std::vector<float> sums(kSquareSums);
  for (std::int64_t k = 0; k < x.cols; ++k) {
    const float value = load(x.data, x.type, x.offset + m * x.row_stride + k);
    float& sum = sums[static_cast<std::size_t>(k % kSquareSums)];
    sum = std::fma(value, value, sum);
  }
  for (std::size_t count = kSquareSums / 2; count > 0; count /= 2) {
    for (std::size_t i = 0; i < count; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

/// Per token: `inverse = 1 / sqrt(fma(sum_of_squares, 1 / K, epsilon))`, and the values
/// `x * inverse * gain`, or `x * inverse` if gain has no data, are quantized. gain is `[1, k]`. A
/// row whose sum of squares is not finite (it has a NaN or an infinity, or the sum overflows) gives
/// scale NaN and q = 0, as does one where a value is not finite.
inline void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                              const MutableActivationView& q) {
  std::vector<float> values(static_cast<std::size_t>(x.cols));
  for (std::int64_t m = 0; m < x.rows; ++m) {
    const float sum = sum_of_squares(x, m);
    const float mean = std::fma(sum, 1.0f / static_cast<float>(x.cols), epsilon);
    const float inverse =
        std::isfinite(sum) ? 1.0f / std::sqrt(mean) : std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t k = 0; k < x.cols; ++k) {
      float& value = values[static_cast<std::size_t>(k)];
      value = load(x.data, x.type, x.offset + m * x.row_stride + k) * inverse;
      if (gain.data != nullptr) value *= load(gain.data, gain.type, gain.offset + k);
    }
    quantize_row(values, m, q);
  }
}

/// The exponential function as silu has it: right to about 2 units in the last place, and 0 or
/// infinity for nothing that matters there. Below -80 it is that of -80, above 89 infinity.
inline float exponential(float value) {
  constexpr float kLowest = -80.0f;
  constexpr float kHighest = 89.0f;
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.63p-1f;
  constexpr float kLn2Low = -0x1.bd0106p-13f;
  // Adding 1.5 * 2^23 rounds to an integer, to nearest even, and leaves it in the low mantissa.
  constexpr float kRound = 12582912.0f;
  const float x = value < kLowest ? kLowest : value > kHighest ? kHighest : value;
  const float shifted = std::fma(x, kLog2E, kRound);
  const float n = shifted - kRound;
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));  // |r| < ln(2) / 2, nearly
  float p = 0x1.6a242ap-10f;
  p = std::fma(p, r, 0x1.1239ecp-7f);
  p = std::fma(p, r, 0x1.5558f2p-5f);
  p = std::fma(p, r, 0x1.555492p-3f);
  p = std::fma(p, r, 0x1.fffffcp-2f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // p * 2^n in two steps, as 2^128 is no float.
  const float power = float_from_bits((float_bits(shifted) << 23) + (126u << 23));
  return p * power * 2.0f;
}

/// `gate / (1 + exponential(-gate))`.
inline float silu(float gate) { return gate / (1.0f + exponential(-gate)); }

/// Per token of gate_up `[m, 2k]`: the values `silu(gate) * up` are quantized, where gate is the
/// first k columns and up the others. A row where a value is not finite, as where gate or up is
/// not, gives scale NaN and q = 0.
inline void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q) {
  std::vector<float> values(static_cast<std::size_t>(q.k));
  for (std::int64_t m = 0; m < gate_up.rows; ++m) {
    const std::int64_t row = gate_up.offset + m * gate_up.row_stride;
    for (std::int64_t k = 0; k < q.k; ++k) {
      values[static_cast<std::size_t>(k)] = silu(load(gate_up.data, gate_up.type, row + k)) *
                                            load(gate_up.data, gate_up.type, row + q.k + k);
    }
    quantize_row(values, m, q);
  }
}

}  // namespace reference
}  // namespace binary_gemm
