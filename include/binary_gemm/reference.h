#pragma once

/// @file
/// The contract of numbers, as code: every backend, kernel and batch size gives these bits.
///
/// - Weights are +s or -s, with one fp16 scale `s` per group of G along K. The dot product of a
///   group with int8 activations is an exact int32.
/// - K is cut in slices of 1024. If every scale of a slice is an integer multiple of one power of
///   two `u`, not above 2^14 in magnitude, the slice is *narrow*: its sum is exact in int32 and
///   rounded once. Otherwise it is *wide*: groups are added in order by fused multiply-add.
/// - Slices are added in order, in fp32. Then the token's scale and the bias are applied, and the
///   result is rounded once to the output type.
///
/// So row m of y depends on row m of x alone. All arithmetic is fp32, round to nearest even, with
/// subnormals kept; compile with contraction off and never with fast-math. These loops are slow and
/// check nothing: they are here to be read, and to judge the rest.

#include <cmath>
#include <cstdint>
#include <limits>

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

/// `y[m, n] = acc * act_scale[m]`, or with a bias `fma(acc, act_scale[m], bias[n])`.
inline void binary_gemm(const ActivationView& x, const WeightView& w, const BiasView& bias,
                        const MatrixView& y) {
  for (std::int64_t m = 0; m < x.m; ++m) {
    const float scale = x.scales[x.scales_offset + m];
    for (std::int64_t n = 0; n < w.n; ++n) {
      const float acc = accumulate(x, w, m, n);
      const float result =
          bias.data != nullptr ? std::fma(acc, scale, bias.data[bias.offset + n]) : acc * scale;
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

}  // namespace reference
}  // namespace binary_gemm
