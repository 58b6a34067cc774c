#pragma once

/// What the tests of every backend share: random operands of the kinds that matter, buffers that
/// notice a stray write, and comparison of bits.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "binary_gemm/aligned_vector.h"
#include "binary_gemm/types.h"
#include "binary_gemm/views.h"

namespace binary_gemm {
namespace testing {

/// A seeded generator (splitmix64): the same numbers on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits();
  std::int64_t integer(std::int64_t low, std::int64_t high);  ///< In [low, high].
  double uniform();                                           ///< In [0, 1).
  float gaussian();
  bool chance(double probability) { return uniform() < probability; }

 private:
  std::uint64_t state_;
};

/// `[rows, cols]` elements in a buffer of their own: the base is 16-byte but not 32-byte aligned,
/// and every byte starts as 0xff (a NaN in every float type). The bytes before, after and between
/// the rows are guards. Under AddressSanitizer those before and after may not even be read.
class GuardedBuffer {
 public:
  GuardedBuffer() : GuardedBuffer(0, 0, 1) {}
  GuardedBuffer(std::int64_t rows, std::int64_t cols, std::int64_t element_bytes,
                std::int64_t padding = 0, std::int64_t offset = 0);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&&) = default;
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;

  template <class T>
  T* base() {
    return reinterpret_cast<T*>(storage_.data() + kFront);
  }
  template <class T>
  const T* base() const {
    return reinterpret_cast<const T*>(storage_.data() + kFront);
  }
  template <class T>
  T* row(std::int64_t r) {
    return base<T>() + offset_ + r * stride_;
  }
  template <class T>
  const T* row(std::int64_t r) const {
    return base<T>() + offset_ + r * stride_;
  }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  std::int64_t stride() const { return stride_; }  ///< elements
  std::int64_t offset() const { return offset_; }  ///< elements

  MatrixView view(DataType type) { return {base<void>(), type, rows_, cols_, stride_, offset_}; }
  ConstMatrixView view(DataType type) const {
    return {base<void>(), type, rows_, cols_, stride_, offset_};
  }

  /// Whether every guard byte is still 0xff.
  ::testing::AssertionResult guards_intact() const;
  /// Whether every byte is still 0xff, elements too: nothing was written.
  ::testing::AssertionResult untouched() const;

  /// The whole allocation, guards included, to copy to another memory and back; `base` is
  /// `kFront` bytes into it, and its last `kBack` bytes are a guard. Lifts AddressSanitizer's ban.
  unsigned char* raw();
  std::size_t raw_bytes() const { return storage_.size(); }
  static constexpr std::size_t kFront = 80;
  static constexpr std::size_t kBack = 64;

 private:
  void forbid_guards(bool forbid) const;
  ::testing::AssertionResult check(bool elements_too) const;

  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t element_bytes_;
  std::int64_t stride_;
  std::int64_t offset_;
  aligned_vector<unsigned char> storage_;
};

/// What a problem's scales are like.
enum class ScalePattern {
  kUnit,       ///< all 1
  kNarrow,     ///< like trained weights: every slice narrow
  kWide,       ///< exponents far apart: every slice of two groups or more is wide
  kMixed,      ///< each slice of each row narrow or wide
  kEdge,       ///< exponents 3 to 13 apart, mantissas that just fit or just do not
  kZero,       ///< zeros of both signs, alone and in whole slices, among narrow ones
  kNegative,   ///< narrow and wide ones of both signs
  kSubnormal,  ///< subnormals, and the smallest normals
  kInfinite,   ///< some infinities
  kNan,        ///< some NaNs
  kAnyBits,    ///< any 16 bits
};
std::vector<ScalePattern> all_scale_patterns();
const char* name(ScalePattern pattern);

/// What a problem's quantized activations are like; kinds of rows alternate.
enum class ActivationPattern {
  kRandom,    ///< any int8, every third row large ones; scales up to 1/32
  kExtreme,   ///< rows of -128, of 127, alternating; scales 0, subnormal, huge, negative
  kPoisoned,  ///< every third row a NaN or an infinite scale
};
std::vector<ActivationPattern> all_activation_patterns();
const char* name(ActivationPattern pattern);

/// Paddings (elements between the rows) and offsets (elements before the first) of the operands.
struct Layout {
  const char* name;
  std::int64_t x_padding, x_offset, x_scales_offset;
  std::int64_t bits_padding, bits_offset;
  std::int64_t scales_padding, scales_offset;
  std::int64_t bias_offset;
  std::int64_t y_padding, y_offset;
};
/// Dense; padded by multiples of 16 bytes; odd everywhere.
std::vector<Layout> all_layouts();

struct Shape {
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  std::int64_t g;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);

inline constexpr std::int64_t kGroupSizes[] = {32, 64, 128, 256};
/// K for group size g: one group, several, whole slices, slices and a short last one; K / 8 a
/// multiple of 16 and not.
std::vector<std::int64_t> interesting_k(std::int64_t g);
/// N: 1, odd, even, around powers of two; at most 67.
std::vector<std::int64_t> interesting_n();

/// The operands of one product. Weights are signs of Gaussians, but in every third row mostly +1.
struct Problem {
  Shape shape;
  Layout layout;
  GuardedBuffer values;     ///< int8 [m, k]
  GuardedBuffer x_scales;   ///< float [1, m]
  GuardedBuffer bits;       ///< uint32 [n, k / 32]
  GuardedBuffer scales;     ///< float16 [n, k / g]
  GuardedBuffer bias_data;  ///< float [1, n]

  ActivationView x() const;
  WeightView w() const;
  BiasView bias() const;
  GuardedBuffer output(DataType type) const { return output(type, shape.m, shape.n); }
  GuardedBuffer output(DataType type, std::int64_t m, std::int64_t n) const;
  ::testing::AssertionResult guards_intact() const;
};

Problem make_problem(Shape shape, ScalePattern scales, ActivationPattern activations,
                     const Layout& layout, std::uint64_t seed);

/// Fills `[rows, cols]` of fp32, fp16 or bf16 with rows of alternating kinds: Gaussian, zeros, one
/// NaN, one infinity, subnormals, the largest values, one outlier, ties of the quantizer.
void fill_activations(const MatrixView& x, Random& random);

/// Fills it with any bits at all: each row's exponents are in a part of the range, with NaNs now
/// and then. `type` is that of x.
void fill_any_bits(GuardedBuffer& x, DataType type, Random& random);

/// Fills a matrix of any float type with Gaussians.
void fill_gaussian(const MatrixView& x, Random& random, float deviation = 1.0f);

/// Element (m, n) as its bits.
std::uint32_t bits_at(const ConstMatrixView& matrix, std::int64_t m, std::int64_t n);

/// Whether the elements have equal bits, where a NaN equals a NaN. Names the first that differs.
::testing::AssertionResult equal_bits(const ConstMatrixView& actual,
                                      const ConstMatrixView& expected);

inline constexpr DataType kFloatTypes[] = {DataType::kFloat32, DataType::kFloat16,
                                           DataType::kBFloat16};

// ---- Wrong arguments ----

inline constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
inline constexpr DataType kUnknownType = static_cast<DataType>(17);

/// What a message must contain.
using Parts = std::vector<std::string>;

/// Expects std::invalid_argument with a message of the library that has all the parts.
void expect_invalid(const std::function<void()>& call, const Parts& parts);

/// A pointer as messages print it.
std::string hex(const void* pointer);

/// 8 bytes further, where the bases of views may not be.
template <class T>
T* misaligned(T* base) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(base) + 8);
}

}  // namespace testing
}  // namespace binary_gemm
