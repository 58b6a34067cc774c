/// The path of any processor, in plain C++ that compilers vectorize: a slice of a weight row is
/// expanded to +1 and -1 bytes once for a block of tokens.

#include <algorithm>
#include <limits>

#include "kernel.h"

namespace binary_gemm {
namespace cpu {
namespace {

constexpr std::int64_t kTokenBlock = 64;

template <class T>
float quantize(const T* x, std::int64_t k, std::int8_t* q) {
  // Compared as integers, so that an infinity or a NaN is the maximum if the row has one.
  std::uint32_t largest_bits = 0;
  for (std::int64_t i = 0; i < k; ++i) {
    largest_bits = std::max(largest_bits, float_bits(to_float(x[i])) & 0x7fffffffu);
  }
  const float largest = float_from_bits(largest_bits);
  if (largest_bits >= 0x7f800000u || largest == 0) {
    std::fill(q, q + k, std::int8_t{0});
    return largest_bits >= 0x7f800000u ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  const float lift = largest < 0x1p-64f ? 0x1p64f : 1.0f;  // see reference.h
  const float inverse = 127.0f / (largest * lift);
  // Adding 1.5 * 2^23 rounds to an integer, to nearest even, and leaves it in the low mantissa.
  constexpr float kRound = 12582912.0f;
  for (std::int64_t i = 0; i < k; ++i) {
    const float scaled = to_float(x[i]) * lift * inverse;
    q[i] = static_cast<std::int8_t>(float_bits(scaled + kRound));
  }
  return largest / 127.0f;
}

float quantize_row(const void* x, DataType type, std::int64_t k, std::int8_t* q) {
  switch (type) {
    case DataType::kFloat16:
      return quantize(static_cast<const float16*>(x), k, q);
    case DataType::kBFloat16:
      return quantize(static_cast<const bfloat16*>(x), k, q);
    default:
      return quantize(static_cast<const float*>(x), k, q);
  }
}

template <class T>
void normalize(const T* x, std::int64_t k, const float* gain, float epsilon, float* values) {
  float sums[reference::kSquareSums] = {};
  for (std::int64_t i = 0; i < k; ++i) {
    const float value = to_float(x[i]);
    float& sum = sums[i % reference::kSquareSums];
    sum = std::fma(value, value, sum);
  }
  const float sum = add_neighbours(sums, std::min(k, reference::kSquareSums));
  const float inverse = inverse_of_root(sum, k, epsilon);
  for (std::int64_t i = 0; i < k; ++i) {
    const float value = to_float(x[i]) * inverse;
    values[i] = gain != nullptr ? value * gain[i] : value;
  }
}

void normalize_row(const void* x, DataType type, std::int64_t k, const float* gain, float epsilon,
                   float* values) {
  switch (type) {
    case DataType::kFloat16:
      return normalize(static_cast<const float16*>(x), k, gain, epsilon, values);
    case DataType::kBFloat16:
      return normalize(static_cast<const bfloat16*>(x), k, gain, epsilon, values);
    default:
      return normalize(static_cast<const float*>(x), k, gain, epsilon, values);
  }
}

template <class T>
void swiglu(const T* gate, const T* up, std::int64_t k, float* values) {
  for (std::int64_t i = 0; i < k; ++i) {
    values[i] = reference::silu(to_float(gate[i])) * to_float(up[i]);
  }
}

void swiglu_row(const void* gate, const void* up, DataType type, std::int64_t k, float* values) {
  switch (type) {
    case DataType::kFloat16:
      return swiglu(static_cast<const float16*>(gate), static_cast<const float16*>(up), k, values);
    case DataType::kBFloat16:
      return swiglu(static_cast<const bfloat16*>(gate), static_cast<const bfloat16*>(up), k,
                    values);
    default:
      return swiglu(static_cast<const float*>(gate), static_cast<const float*>(up), k, values);
  }
}

// Writes weight i of `bits` as +1 or -1 to signs[i].
void expand(const std::uint32_t* bits, std::int64_t count, std::int8_t* signs) {
  for (std::int64_t word = 0; word < count / 32; ++word) {
    for (int i = 0; i < 32; ++i) {
      signs[word * 32 + i] =
          static_cast<std::int8_t>(static_cast<int>(bits[word] >> i & 1u) * 2 - 1);
    }
  }
}

std::int32_t dot(const std::int8_t* a, const std::int8_t* b, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<std::int16_t>(a[i] * b[i]);
  return sum;
}

PackedShape packed_shape(const GemmArguments&) { return {0, 0}; }

void pack_block(const GemmArguments&, std::int64_t, char*) {}

void gemm_rows(const GemmArguments& a, const char*, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t g_size = a.group_size;
  alignas(64) std::int8_t signs[kSliceK];
  float acc[kTokenBlock];
  std::int32_t dots[kMaxSliceGroups];
  for (std::int64_t m0 = 0; m0 < a.m; m0 += kTokenBlock) {
    const std::int64_t tokens = std::min(kTokenBlock, a.m - m0);
    for (std::int64_t n = row_begin; n < row_end; ++n) {
      std::fill(acc, acc + tokens, 0.0f);
      for (std::int64_t k0 = 0; k0 < a.k; k0 += kSliceK) {
        const std::int64_t slice_k = std::min(kSliceK, a.k - k0);
        const std::int64_t groups = slice_k / g_size;
        const float16* scales = a.scales + n * a.scales_stride + k0 / g_size;
        expand(a.bits + n * a.bits_stride + k0 / 32, slice_k, signs);
        const SliceScales slice = slice_scales(scales, groups);
        for (std::int64_t m = 0; m < tokens; ++m) {
          const std::int8_t* q = a.x + (m0 + m) * a.x_stride + k0;
          for (std::int64_t g = 0; g < groups; ++g) {
            dots[g] = dot(signs + g * g_size, q + g * g_size, g_size);
          }
          if (slice.narrow) {
            std::int32_t sum = 0;
            for (std::int64_t g = 0; g < groups; ++g) sum += slice.mantissas[g] * dots[g];
            acc[m] += static_cast<float>(sum) * slice.unit;
          } else {
            acc[m] += wide_sum(scales, dots, groups);
          }
        }
      }
      for (std::int64_t m = 0; m < tokens; ++m) store_output(a, m0 + m, n, acc[m]);
    }
  }
}

}  // namespace

const PathKernels kPortableKernels = {quantize_row, normalize_row, swiglu_row,
                                      packed_shape, pack_block,    gemm_rows};

}  // namespace cpu
}  // namespace binary_gemm
