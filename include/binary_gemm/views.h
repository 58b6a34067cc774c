#pragma once

/// @file
/// Views: where the operands lie. A view owns nothing and is copied freely.
///
/// Every buffer is named by its base, which must be 16-byte aligned (every call checks it), and by
/// an offset and strides in elements, which may be anything: so a shard of rows, or of columns on a
/// group boundary, is a view with another offset and never a copy. Shapes are `int64_t` and in
/// elements.
///
/// A view is mutable (its elements may be written) or constant; mutable converts to constant.

#include <cstdint>
#include <type_traits>

#include "binary_gemm/errors.h"
#include "binary_gemm/types.h"

namespace binary_gemm {

/// Weights along K that share one slice sum: one 128-byte line of a weight row (see reference.h).
inline constexpr std::int64_t kSliceK = 1024;

/// A dense row-major matrix `[rows, cols]` of bf16, fp16, fp32 (or int8, for pack and unpack).
template <class Void>
struct BasicMatrixView {
  Void* data = nullptr;                ///< The base, 16-byte aligned.
  DataType type = DataType::kFloat32;  ///< Of an element.
  std::int64_t rows = 0;               ///< Tokens, or outputs of a dense weight.
  std::int64_t cols = 0;               ///< Elements of a row.
  std::int64_t row_stride = 0;         ///< Elements from a row to the next, at least `cols`.
  std::int64_t offset = 0;             ///< Elements from `data` to element (0, 0).

  /// Rows `[begin, begin + count)`. Throws std::invalid_argument if they are not all in the matrix.
  BasicMatrixView row_range(std::int64_t begin, std::int64_t count) const {
    detail::check_range("row", begin, count, rows);
    BasicMatrixView part = *this;
    part.rows = count;
    part.offset += begin * row_stride;
    return part;
  }

  /// Columns `[begin, begin + count)`. Throws like row_range.
  BasicMatrixView column_range(std::int64_t begin, std::int64_t count) const {
    detail::check_range("column", begin, count, cols);
    BasicMatrixView part = *this;
    part.cols = count;
    part.offset += begin;
    return part;
  }

  /// The constant view. A template, so that a constant view has no conversion to itself.
  template <class Constant,
            std::enable_if_t<std::is_same_v<Constant, BasicMatrixView<const void>> &&
                                 !std::is_same_v<Constant, BasicMatrixView>,
                             int> = 0>
  operator Constant() const {
    return {data, type, rows, cols, row_stride, offset};
  }
};

/// A matrix that may be written.
using MatrixView = BasicMatrixView<void>;
/// A matrix that is only read.
using ConstMatrixView = BasicMatrixView<const void>;

/// A view of `T data[rows][cols]`; `row_stride` defaults to `cols`.
template <class T>
auto matrix_view(T* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride = -1) {
  using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
  using Element = std::remove_const_t<T>;
  static_assert(std::is_same_v<Element, float> || std::is_same_v<Element, float16> ||
                    std::is_same_v<Element, bfloat16> || std::is_same_v<Element, std::int8_t>,
                "a matrix holds float, float16, bfloat16 or int8_t");
  return BasicMatrixView<Void>{
      data, data_type_of<Element>, rows, cols, row_stride < 0 ? cols : row_stride, 0};
}

/// 1-bit weights `[n, k]`: bits `uint32 [n, k/32]`, where bit `i` of word `j` is weight `32j + i`
/// and 1 means +scale, 0 means -scale; scales `fp16 [n, k/group_size]`.
template <class Word, class Scale>
struct BasicWeightView {
  Word* bits = nullptr;            ///< The bits' base, 16-byte aligned.
  Scale* scales = nullptr;         ///< The scales' base, 16-byte aligned.
  std::int64_t n = 0;              ///< Rows: outputs of the layer.
  std::int64_t k = 0;              ///< Weights of a row, a multiple of group_size.
  std::int64_t group_size = 128;   ///< Weights per scale: 32, 64, 128 or 256.
  std::int64_t bits_stride = 0;    ///< Words from a row to the next, at least k / 32.
  std::int64_t scales_stride = 0;  ///< Scales from a row to the next, at least k / group_size.
  std::int64_t bits_offset = 0;    ///< Words from `bits` to row 0.
  std::int64_t scales_offset = 0;  ///< Scales from `scales` to row 0.

  /// Rows `[begin, begin + count)` of N. Throws std::invalid_argument if they are not all there.
  BasicWeightView row_range(std::int64_t begin, std::int64_t count) const {
    detail::check_range("weight row", begin, count, n);
    BasicWeightView part = *this;
    part.n = count;
    part.bits_offset += begin * bits_stride;
    part.scales_offset += begin * scales_stride;
    return part;
  }

  /// Columns `[begin, begin + count)` of K, both multiples of the group size. Throws like
  /// row_range.
  BasicWeightView column_range(std::int64_t begin, std::int64_t count) const {
    detail::check_range("weight column", begin, count, k);
    detail::check_multiple("weight column range begin", begin, "group size", group_size);
    detail::check_multiple("weight column range count", count, "group size", group_size);
    BasicWeightView part = *this;
    part.k = count;
    part.bits_offset += begin / 32;
    part.scales_offset += begin / group_size;
    return part;
  }

  /// The constant view. A template, so that a constant view has no conversion to itself.
  template <class Constant,
            std::enable_if_t<
                std::is_same_v<Constant, BasicWeightView<const std::uint32_t, const float16>> &&
                    !std::is_same_v<Constant, BasicWeightView>,
                int> = 0>
  operator Constant() const {
    return {bits, scales, n, k, group_size, bits_stride, scales_stride, bits_offset, scales_offset};
  }
};

/// Weights that may be written.
using MutableWeightView = BasicWeightView<std::uint32_t, float16>;
/// Weights that are only read.
using WeightView = BasicWeightView<const std::uint32_t, const float16>;

/// A dense, unsharded weight view.
template <class Word, class Scale>
BasicWeightView<Word, Scale> weight_view(Word* bits, Scale* scales, std::int64_t n, std::int64_t k,
                                         std::int64_t group_size) {
  return {bits, scales, n, k, group_size, k / 32, group_size > 0 ? k / group_size : 0, 0, 0};
}

/// Quantized activations: int8 `[m, k]` row-major and one fp32 scale a row (token).
template <class Value, class Scale>
struct BasicActivationView {
  Value* values = nullptr;         ///< The values' base, 16-byte aligned.
  Scale* scales = nullptr;         ///< The scales' base, 16-byte aligned.
  std::int64_t m = 0;              ///< Rows: tokens.
  std::int64_t k = 0;              ///< Values of a row.
  std::int64_t row_stride = 0;     ///< Elements from a row to the next, at least k.
  std::int64_t offset = 0;         ///< Elements from `values` to element (0, 0).
  std::int64_t scales_offset = 0;  ///< Elements from `scales` to token 0.

  /// Tokens `[begin, begin + count)`. Throws std::invalid_argument if they are not all there.
  BasicActivationView row_range(std::int64_t begin, std::int64_t count) const {
    detail::check_range("activation row", begin, count, m);
    BasicActivationView part = *this;
    part.m = count;
    part.offset += begin * row_stride;
    part.scales_offset += begin;
    return part;
  }

  /// Columns `[begin, begin + count)` of K. Throws like row_range.
  BasicActivationView column_range(std::int64_t begin, std::int64_t count) const {
    detail::check_range("activation column", begin, count, k);
    BasicActivationView part = *this;
    part.k = count;
    part.offset += begin;
    return part;
  }

  /// The constant view. A template, so that a constant view has no conversion to itself.
  template <class Constant,
            std::enable_if_t<
                std::is_same_v<Constant, BasicActivationView<const std::int8_t, const float>> &&
                    !std::is_same_v<Constant, BasicActivationView>,
                int> = 0>
  operator Constant() const {
    return {values, scales, m, k, row_stride, offset, scales_offset};
  }
};

/// Activations that may be written.
using MutableActivationView = BasicActivationView<std::int8_t, float>;
/// Activations that are only read.
using ActivationView = BasicActivationView<const std::int8_t, const float>;

/// A dense activation view.
template <class Value, class Scale>
BasicActivationView<Value, Scale> activation_view(Value* values, Scale* scales, std::int64_t m,
                                                  std::int64_t k) {
  return {values, scales, m, k, k, 0, 0};
}

/// An optional fp32 bias of `n` elements; a default-constructed one means none.
struct BiasView {
  const float* data = nullptr;  ///< The base, 16-byte aligned; null: no bias.
  std::int64_t n = 0;           ///< Elements: rows of the weights.
  std::int64_t offset = 0;      ///< Elements from `data` to the bias of row 0.

  /// The bias of rows `[begin, begin + count)`. Throws std::invalid_argument if they are not all
  /// there; no bias stays none.
  BiasView row_range(std::int64_t begin, std::int64_t count) const {
    if (data == nullptr) return {};
    detail::check_range("bias", begin, count, n);
    return {data, count, offset + begin};
  }
};

/// What a product adds before its one rounding to y's type: any of these, or nothing. A bias alone
/// converts to it.
struct Epilogue {
  BiasView bias;             ///< `[n]`, fp32.
  ConstMatrixView residual;  ///< `[m, n]` of y's type; null data: none. It may be y itself.

  /// Nothing.
  Epilogue() = default;
  /// A bias, or none, and a residual, or none.
  Epilogue(const BiasView& bias_view, const ConstMatrixView& residual_view = {})
      : bias(bias_view), residual(residual_view) {}
};

}  // namespace binary_gemm
