/// The reference against an independent computation of the contract, in integers (exact.h): every
/// finite fp16 scale is an integer of units of 2^-24, so slice sums, wide ones too, are int64.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "binary_gemm/reference.h"
#include "exact.h"
#include "support.h"

namespace binary_gemm {
namespace testing {
namespace {

constexpr int kUnitExponent = -24;
constexpr int kFloatPrecision = 24;

// `v` units rounded to 24 bits, in units: rounding a float that is a multiple of 2^-24 leaves one.
std::int64_t round_units(Int128 v) {
  const Exact rounded = round_to_bits({v, 0}, kFloatPrecision);
  return static_cast<std::int64_t>(rounded.mantissa * (Int128{1} << rounded.exponent));
}

// An fp32 sum in units of 2^-24, or an infinity or a NaN.
struct Sum {
  std::int64_t units = 0;
  int infinity = 0;  // -1, +1
  bool nan = false;

  // Adds `other`, rounding once.
  void add(const Sum& other) {
    nan = nan || other.nan || infinity * other.infinity < 0;
    infinity = infinity != 0 ? infinity : other.infinity;
    units = round_units(Int128{units} + other.units);
  }
};

std::int64_t scale_units(float16 scale) {
  const Exact value = decode(scale.bits, kFloat16Format);
  return static_cast<std::int64_t>(value.mantissa *
                                   (Int128{1} << (value.exponent - kUnitExponent)));
}

// Narrow by the magnitudes in units alone: all are multiples of a power of two that leaves the
// largest at most 14 bits.
bool is_narrow(const std::vector<float16>& scales) {
  Unsigned128 all = 0;
  for (const float16 scale : scales) {
    if (!kFloat16Format.is_finite(scale.bits)) return false;
    all |= magnitude(scale_units(scale));
  }
  // The or of magnitudes has the largest's length, and its low bits are zero where all are.
  const int length = bit_length(all);
  return length <= 14 || (all & ((Unsigned128{1} << (length - 14)) - 1)) == 0;
}

Sum slice_sum(const std::vector<float16>& scales, const std::vector<std::int64_t>& dots) {
  Sum sum;
  if (is_narrow(scales)) {
    Int128 exact = 0;
    for (std::size_t g = 0; g < scales.size(); ++g)
      exact += Int128{scale_units(scales[g])} * dots[g];
    sum.units = round_units(exact);
    return sum;
  }
  for (std::size_t g = 0; g < scales.size(); ++g) {
    const std::uint32_t bits = scales[g].bits;
    Sum term;
    if (kFloat16Format.is_finite(bits)) {
      const Int128 exact = Int128{scale_units(scales[g])} * dots[g];
      // The product and the sum are rounded together.
      sum.units = round_units(Int128{sum.units} + exact);
      continue;
    }
    term.nan = kFloat16Format.is_nan(bits) || dots[g] == 0;
    if (!term.nan) term.infinity = kFloat16Format.is_negative(bits) == (dots[g] < 0) ? 1 : -1;
    sum.add(term);
  }
  return sum;
}

// The weight as +1 or -1, read by bytes.
std::int64_t weight_sign(const Problem& p, std::int64_t n, std::int64_t k) {
  const auto* row = reinterpret_cast<const unsigned char*>(p.bits.row<std::uint32_t>(n));
  return (row[k / 8] >> (k % 8) & 1) != 0 ? 1 : -1;
}

Sum accumulate(const Problem& p, std::int64_t m, std::int64_t n) {
  Sum acc;
  std::vector<float16> scales;
  std::vector<std::int64_t> dots;
  for (std::int64_t k = 0; k < p.shape.k; ++k) {
    if (k % p.shape.g == 0) {
      scales.push_back(p.scales.row<float16>(n)[k / p.shape.g]);
      dots.push_back(0);
    }
    dots.back() += weight_sign(p, n, k) * p.values.row<std::int8_t>(m)[k];
    if ((k + 1) % 1024 == 0 || k + 1 == p.shape.k) {
      acc.add(slice_sum(scales, dots));
      scales.clear();
      dots.clear();
    }
  }
  return acc;
}

// The bits of acc * scale, or with a bias of the fused acc * scale + bias, in fp32.
std::uint32_t scaled(const Sum& acc, float scale, const float* bias) {
  constexpr std::uint32_t kNan = 0x7fc00000u;
  const Format f = kFloat32Format;
  const std::uint32_t scale_bits = float_bits(scale);
  const bool acc_zero = acc.units == 0 && acc.infinity == 0;
  if (acc.nan || f.is_nan(scale_bits)) return kNan;
  const bool acc_negative = acc.infinity != 0 ? acc.infinity < 0 : acc.units < 0;
  const bool negative = acc_negative != f.is_negative(scale_bits);
  if (acc.infinity != 0 || f.is_infinite(scale_bits)) {
    if (acc_zero || scale == 0) return kNan;
    return (negative ? f.sign() : 0) | f.infinity();
  }
  // In 24 bits: units are fewer than 2^63, of which rounding left the top 24.
  const Exact acc_value = round_to_bits({acc.units, kUnitExponent}, kFloatPrecision);
  const Exact product = multiply(acc_value, decode(scale_bits, f));
  if (bias == nullptr) return encode(product, f, negative);
  const std::uint32_t bias_bits = float_bits(*bias);
  return encode(add(product, decode(bias_bits, f)), f,
                product.mantissa == 0 && negative && f.is_negative(bias_bits));
}

std::uint32_t to_type(std::uint32_t bits, DataType type) {
  if (type == DataType::kFloat32) return bits;
  const Format format = type == DataType::kFloat16 ? kFloat16Format : kBFloat16Format;
  const bool negative = kFloat32Format.is_negative(bits);
  if (kFloat32Format.is_nan(bits)) return format.infinity() | 1u;
  if (kFloat32Format.is_infinite(bits)) return (negative ? format.sign() : 0) | format.infinity();
  return encode(decode(bits, kFloat32Format), format, negative);
}

void expect_contract(const Problem& p) {
  std::vector<Sum> sums;
  for (std::int64_t m = 0; m < p.shape.m; ++m) {
    for (std::int64_t n = 0; n < p.shape.n; ++n) sums.push_back(accumulate(p, m, n));
  }
  for (const DataType type : kFloatTypes) {
    for (const bool with_bias : {false, true}) {
      GuardedBuffer actual = p.output(type);
      GuardedBuffer expected = p.output(type);
      reference::binary_gemm(p.x(), p.w(), with_bias ? p.bias() : BiasView{}, actual.view(type));
      for (std::int64_t m = 0; m < p.shape.m; ++m) {
        for (std::int64_t n = 0; n < p.shape.n; ++n) {
          const std::uint32_t bits = to_type(
              scaled(sums[static_cast<std::size_t>(m * p.shape.n + n)], p.x_scales.row<float>(0)[m],
                     with_bias ? p.bias_data.row<float>(0) + n : nullptr),
              type);
          if (type == DataType::kFloat32) {
            expected.row<std::uint32_t>(m)[n] = bits;
          } else {
            expected.row<std::uint16_t>(m)[n] = static_cast<std::uint16_t>(bits);
          }
        }
      }
      EXPECT_TRUE(equal_bits(actual.view(type), expected.view(type)))
          << p.shape << " layout " << p.layout.name << " bias " << with_bias;
      EXPECT_TRUE(actual.guards_intact());
    }
  }
}

float16 h(float value) { return to_float16(value); }

// ---- The product ----

TEST(Contract, ReferenceEqualsIntegerArithmetic) {
  std::uint64_t seed = 1;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : interesting_k(g)) {
      for (const ScalePattern scales : all_scale_patterns()) {
        for (const ActivationPattern activations : all_activation_patterns()) {
          const auto layouts = all_layouts();
          SCOPED_TRACE(std::string(name(scales)) + " " + name(activations));
          expect_contract(make_problem({9, 3, k, g}, scales, activations,
                                       layouts[seed % layouts.size()], seed));
          ++seed;
        }
      }
    }
  }
}

TEST(Contract, ProblemsHaveNarrowAndWideSlices) {
  // The patterns are worth nothing if they do not make the slices they are named after.
  for (const std::int64_t g : kGroupSizes) {
    for (const ScalePattern pattern : all_scale_patterns()) {
      const Problem p =
          make_problem({1, 64, 1024, g}, pattern, ActivationPattern::kRandom, all_layouts()[0], 7);
      int narrow = 0;
      for (std::int64_t n = 0; n < 64; ++n) {
        const float16* row = p.scales.row<float16>(n);
        narrow += is_narrow({row, row + 1024 / g}) ? 1 : 0;
      }
      SCOPED_TRACE(name(pattern));
      switch (pattern) {
        case ScalePattern::kUnit:
        case ScalePattern::kNarrow:
        case ScalePattern::kZero:
          EXPECT_EQ(narrow, 64);
          break;
        case ScalePattern::kWide:
          EXPECT_EQ(narrow, 0);
          break;
        case ScalePattern::kAnyBits:
          EXPECT_LT(narrow, 8);
          break;
        default:
          EXPECT_GT(narrow, 0);
          EXPECT_TRUE(narrow < 64 || pattern == ScalePattern::kSubnormal);
      }
    }
  }
}

TEST(Contract, NarrownessEqualsDivisibility) {
  Random random(11);
  int narrow_seen = 0;
  int wide_seen = 0;
  const auto expect_same = [&](const std::vector<float16>& scales) {
    const bool narrow = is_narrow(scales);
    (narrow ? narrow_seen : wide_seen)++;
    const int exponent =
        reference::slice_unit_exponent(scales.data(), static_cast<std::int64_t>(scales.size()));
    ASSERT_EQ(exponent != reference::kWide, narrow);
    if (!narrow) return;
    std::int64_t largest = 0;
    for (const float16 s : scales) largest = std::max(largest, std::abs(scale_units(s)));
    if (largest == 0) return;
    EXPECT_EQ(exponent, bit_length(static_cast<Unsigned128>(largest)) - 1 - 24 - 13);
  };
  // Every fp16 alone: a finite one is narrow.
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const std::vector<float16> one{{static_cast<std::uint16_t>(bits)}};
    EXPECT_EQ(is_narrow(one), kFloat16Format.is_finite(bits));
    expect_same(one);
  }
  // Every pair of exponents, with every number of trailing zeros in the mantissas.
  for (std::uint32_t a = 0; a < 32; ++a) {
    for (std::uint32_t b = 0; b < 32; ++b) {
      for (std::uint32_t zeros = 0; zeros <= 10; ++zeros) {
        const std::uint32_t fraction = (1u << zeros) & 0x3ffu;
        expect_same({{static_cast<std::uint16_t>(a << 10 | 0x3ffu)},
                     {static_cast<std::uint16_t>(b << 10 | fraction)}});
      }
    }
  }
  for (int i = 0; i < 20000; ++i) {
    std::vector<float16> scales(static_cast<std::size_t>(random.integer(1, 32)));
    const std::int64_t spread = random.integer(0, 8);
    for (float16& s : scales) {
      s.bits = static_cast<std::uint16_t>(random.integer(8, 8 + spread) << 10 |
                                          (random.integer(0, 1023) & ~random.integer(0, 15)));
    }
    expect_same(scales);
  }
  EXPECT_GT(narrow_seen, 1000);
  EXPECT_GT(wide_seen, 1000);
}

TEST(Contract, ExponentsAtMostThreeApartAreNarrow) {
  const auto at = [](int exponent) {
    return float16{static_cast<std::uint16_t>(exponent << 10 | 0x3ff)};
  };
  for (int e = 1; e <= 26; ++e) {
    const float16 three[] = {at(e), at(e + 3)};
    EXPECT_NE(reference::slice_unit_exponent(three, 2), reference::kWide) << e;
    const float16 four[] = {at(e), at(e + 4)};
    EXPECT_EQ(reference::slice_unit_exponent(four, 2), reference::kWide) << e;
  }
}

TEST(Contract, SliceSumsByHand) {
  {
    // 1025 * 16385 = 16794625, odd and above 2^24: a tie between two floats.
    const float16 scales[] = {h(1025.0f)};
    const std::int32_t dots[] = {16385};
    EXPECT_EQ(reference::slice_sum(scales, dots, 1), 16794624.0f);  // 16794625 ties to even
    const std::int32_t next[] = {16387};                            // 16796675 ties to even
    EXPECT_EQ(reference::slice_sum(scales, next, 1), 16796676.0f);
  }
  {
    // A narrow sum is exact where fma in order would round thrice and give 16794624.
    const float16 scales[] = {h(1025.0f), h(1024.0f), h(1025.0f), h(1024.0f)};
    const std::int32_t dots[] = {16385, 0, 1, -1};
    EXPECT_EQ(reference::slice_sum(scales, dots, 4), 16794626.0f);
  }
  {
    // Wide: 2^15 * 2^14 swallows 2^-24; the order of groups shows.
    const float16 scales[] = {h(32768.0f), h(0x1p-24f), h(32768.0f)};
    const std::int32_t there[] = {16384, 1, -16384};
    EXPECT_EQ(reference::slice_sum(scales, there, 3), 0.0f);
    const float16 other[] = {h(32768.0f), h(32768.0f), h(0x1p-24f)};
    const std::int32_t back[] = {16384, -16384, 1};
    EXPECT_EQ(reference::slice_sum(other, back, 3), 0x1p-24f);
  }
  {
    const float16 scales[] = {h(0.0f), h(-0.0f)};
    const std::int32_t dots[] = {-5, 5};
    EXPECT_EQ(float_bits(reference::slice_sum(scales, dots, 2)), 0u) << "zero scales give +0";
  }
  {
    const float inf = std::numeric_limits<float>::infinity();
    const float16 scales[] = {h(1.0f), h(inf)};
    const std::int32_t negative[] = {5, -3};
    EXPECT_EQ(reference::slice_sum(scales, negative, 2), -inf);
    const std::int32_t zero[] = {5, 0};
    EXPECT_TRUE(std::isnan(reference::slice_sum(scales, zero, 2))) << "inf * 0";
    const float16 both[] = {h(inf), h(-inf)};
    const std::int32_t ones[] = {1, 1};
    EXPECT_TRUE(std::isnan(reference::slice_sum(both, ones, 2))) << "inf - inf";
  }
}

TEST(Contract, SlicesEndAtMultiplesOf1024) {
  // Scales 2^15 and 2^-24 in one slice make it wide and lose the small term; in neighboring slices
  // each is narrow, and the sum of slices loses it as well, but a cancelling third slice tells
  // which came first.
  constexpr std::int64_t kG = 256;
  for (const std::int64_t boundary : {std::int64_t{1024}, std::int64_t{2048}}) {
    const std::int64_t k = boundary + 1024;
    Problem p = make_problem({1, 1, k, kG}, ScalePattern::kZero, ActivationPattern::kRandom,
                             all_layouts()[0], 5);
    float16* scales = p.scales.row<float16>(0);
    std::fill(scales, scales + k / kG, h(0.0f));
    std::fill(p.values.row<std::int8_t>(0), p.values.row<std::int8_t>(0) + k, std::int8_t{1});
    std::fill(p.bits.row<std::uint32_t>(0), p.bits.row<std::uint32_t>(0) + k / 32, ~0u);
    const std::int64_t at = boundary / kG;
    // [.., 2^15, 2^-24 | -2^15, ..]: the first slice is wide and rounds the small term away.
    scales[at - 2] = h(32768.0f);
    scales[at - 1] = h(0x1p-24f);
    scales[at] = h(-32768.0f);
    EXPECT_EQ(reference::accumulate(p.x(), p.w(), 0, 0), 0.0f);
    // [.., 2^15, -2^15 | 2^-24, ..]: the same terms, and it survives.
    scales[at - 1] = h(-32768.0f);
    scales[at] = h(0x1p-24f);
    EXPECT_EQ(reference::accumulate(p.x(), p.w(), 0, 0), 0x1p-16f);
    // [.., 2^15 | -2^15, 2^-24]: acc = 2^23, p = -2^23 (wide) swallows it.
    scales[at - 1] = h(32768.0f);
    scales[at - 2] = h(0.0f);
    scales[at] = h(-32768.0f);
    scales[at + 1] = h(0x1p-24f);
    EXPECT_EQ(reference::accumulate(p.x(), p.w(), 0, 0), 0.0f);
    // [.., 2^15, -2^15, 2^-24 |]: within a wide slice groups add in order, and it survives.
    scales[at - 3] = h(32768.0f);
    scales[at - 2] = h(-32768.0f);
    scales[at - 1] = h(0x1p-24f);
    scales[at] = scales[at + 1] = h(0.0f);
    EXPECT_EQ(reference::accumulate(p.x(), p.w(), 0, 0), 0x1p-16f);
  }
}

TEST(Contract, SlicesAddInOrder) {
  // One group a slice; 2^23 * 2^8 then 2^-16 then -2^31: (big + small) - big = 0, but
  // (big - big) + small = small.
  constexpr std::int64_t kG = 256;
  Problem p = make_problem({1, 1, 3072, kG}, ScalePattern::kZero, ActivationPattern::kRandom,
                           all_layouts()[0], 5);
  float16* scales = p.scales.row<float16>(0);
  std::fill(p.values.row<std::int8_t>(0), p.values.row<std::int8_t>(0) + 3072, std::int8_t{1});
  std::fill(p.bits.row<std::uint32_t>(0), p.bits.row<std::uint32_t>(0) + 96, ~0u);
  const auto sum = [&](float a, float b, float c) {
    std::fill(scales, scales + 12, h(0.0f));
    scales[0] = h(a);
    scales[4] = h(b);
    scales[8] = h(c);
    return reference::accumulate(p.x(), p.w(), 0, 0);
  };
  EXPECT_EQ(sum(32768.0f, 0x1p-24f, -32768.0f), 0.0f);
  EXPECT_EQ(sum(0x1p-24f, 32768.0f, -32768.0f), 0.0f);
  EXPECT_EQ(sum(32768.0f, -32768.0f, 0x1p-24f), 0x1p-16f);
}

// ---- Quantization ----

struct QuantizedRow {
  std::uint32_t scale_bits;
  std::vector<int> q;
};

// The contract's quantizer in integers: quotients with sticky bits, each rounded to 24 bits with
// any exponent. The stored scale is rounded once, to fp32 as it is.
QuantizedRow quantize_exactly(const std::vector<std::uint32_t>& row, Format format) {
  QuantizedRow result{0, std::vector<int>(row.size(), 0)};
  std::uint32_t largest = 0;
  for (const std::uint32_t bits : row) largest = std::max(largest, bits & (format.sign() - 1u));
  if (!format.is_finite(largest)) {
    result.scale_bits = 0x7fc00000u;
    return result;
  }
  if (largest == 0) return result;
  const Exact a = decode(largest, format);
  result.scale_bits = encode(divide(a, {127, 0}), kFloat32Format);
  const Exact inverse = round_to_bits(divide({127, 0}, a), kFloatPrecision);
  for (std::size_t i = 0; i < row.size(); ++i) {
    const Exact product = round_to_bits(multiply(decode(row[i], format), inverse), kFloatPrecision);
    const Exact rounded = round_at(product, 0);
    result.q[i] = static_cast<int>(rounded.mantissa * (Int128{1} << rounded.exponent));
  }
  return result;
}

void expect_quantized(ConstMatrixView x) {
  const Format format = x.type == DataType::kFloat32   ? kFloat32Format
                        : x.type == DataType::kFloat16 ? kFloat16Format
                                                       : kBFloat16Format;
  GuardedBuffer values(x.rows, x.cols, 1, 3, 2);
  GuardedBuffer scales(1, x.rows, 4, 0, 1);
  reference::quantize_activation(x, {values.base<std::int8_t>(), scales.base<float>(), x.rows,
                                     x.cols, values.stride(), values.offset(), scales.offset()});
  for (std::int64_t m = 0; m < x.rows; ++m) {
    std::vector<std::uint32_t> row;
    for (std::int64_t k = 0; k < x.cols; ++k) row.push_back(bits_at(x, m, k));
    const QuantizedRow expected = quantize_exactly(row, format);
    const std::uint32_t scale_bits = float_bits(scales.row<float>(0)[m]);
    if (kFloat32Format.is_nan(expected.scale_bits)) {
      EXPECT_TRUE(kFloat32Format.is_nan(scale_bits)) << "m=" << m;
    } else {
      EXPECT_EQ(scale_bits, expected.scale_bits) << "m=" << m;
    }
    for (std::int64_t k = 0; k < x.cols; ++k) {
      ASSERT_EQ(int{values.row<std::int8_t>(m)[k]}, expected.q[static_cast<std::size_t>(k)])
          << name(x.type) << " m=" << m << " k=" << k << " x=" << std::hex
          << row[static_cast<std::size_t>(k)];
    }
  }
  EXPECT_TRUE(values.guards_intact());
  EXPECT_TRUE(scales.guards_intact());
}

TEST(Contract, QuantizerOfEveryKindOfRow) {
  Random random(21);
  for (const DataType type : kFloatTypes) {
    for (const std::int64_t k : {1, 2, 31, 32, 257}) {
      GuardedBuffer x(40, k, size_of(type), 3, 1);
      fill_activations(x.view(type), random);
      expect_quantized(x.view(type));
    }
  }
}

TEST(Contract, QuantizerAtEveryExponent) {
  // Rows whose maximum has each exponent of fp32, subnormals down to 2^-149 and max float included.
  Random random(22);
  for (int exponent = -149; exponent <= 127; ++exponent) {
    GuardedBuffer x(4, 64, 4);
    for (std::int64_t m = 0; m < 4; ++m) {
      float a = std::ldexp(1.0f, exponent);
      if (m == 1) a = std::nextafter(a * 2, 0.0f);
      if (m >= 2) a = std::ldexp(1.0f + static_cast<float>(random.uniform()) * 0.99f, exponent);
      ASSERT_TRUE(std::isfinite(a) || m == 1);
      if (!std::isfinite(a)) a = std::numeric_limits<float>::max();
      for (std::int64_t k = 0; k < 64; ++k) {
        const double part = k == 0 ? 1.0 : 2 * random.uniform() - 1;
        x.row<float>(m)[k] = static_cast<float>(static_cast<double>(a) * part);
      }
      x.row<float>(m)[1] = -a;
      for (std::int64_t k = 2; k < 20; ++k) {  // near the quantizer's ties
        const double step = static_cast<double>(a) / 127;
        x.row<float>(m)[k] =
            static_cast<float>(step * (static_cast<double>(random.integer(-127, 126)) + 0.5));
      }
    }
    expect_quantized(x.view(DataType::kFloat32));
  }
}

TEST(Contract, QuantizerScaleOfEverySubnormalMaximum) {
  // a / 127 is subnormal itself: one rounding.
  GuardedBuffer x(4096, 2, 4);
  Random random(23);
  for (std::int64_t m = 0; m < 4096; ++m) {
    const auto bits = static_cast<std::uint32_t>(m < 2048 ? m : random.integer(1, 0x03ffffff));
    x.row<std::uint32_t>(m)[0] = bits;
    x.row<std::uint32_t>(m)[1] = 0x80000000u | bits / 2;
  }
  expect_quantized(x.view(DataType::kFloat32));
}

TEST(Contract, QuantizedMaximumIs127) {
  Random random(24);
  for (int i = 0; i < 20000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.integer(1, 0x7f7fffff));
    const float x[] = {float_from_bits(bits), -float_from_bits(bits)};
    std::int8_t q[2] = {};
    float scale = 0;
    reference::quantize_activation(matrix_view(x, 1, 2), activation_view(q, &scale, 1, 2));
    ASSERT_EQ(int{q[0]}, 127) << std::hex << bits;
    ASSERT_EQ(int{q[1]}, -127) << std::hex << bits;
  }
}

TEST(Contract, PoisonedRowsStayAlone) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (std::int64_t at = 0; at < 33; ++at) {
      GuardedBuffer x(3, 33, 4);
      Random random(25);
      fill_gaussian(x.view(DataType::kFloat32), random);
      x.row<float>(1)[at] = poison;
      std::int8_t q[99];
      float scales[3];
      reference::quantize_activation(x.view(DataType::kFloat32), activation_view(q, scales, 3, 33));
      EXPECT_TRUE(std::isnan(scales[1]));
      for (int k = 0; k < 33; ++k) EXPECT_EQ(int{q[33 + k]}, 0);
      EXPECT_GT(scales[0], 0.0f);
      EXPECT_GT(scales[2], 0.0f);
    }
  }
}

// ---- Types ----

TEST(Types, Float16RoundTripsAllValues) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float16 value{static_cast<std::uint16_t>(bits)};
    const float widened = to_float(value);
    if (kFloat16Format.is_nan(bits)) {
      ASSERT_TRUE(std::isnan(widened)) << std::hex << bits;
      ASSERT_TRUE(kFloat16Format.is_nan(to_float16(widened).bits)) << std::hex << bits;
      continue;
    }
    if (kFloat16Format.is_finite(bits)) {
      ASSERT_EQ(float_bits(widened), encode(decode(bits, kFloat16Format), kFloat32Format,
                                            kFloat16Format.is_negative(bits)))
          << std::hex << bits;
    } else {
      ASSERT_TRUE(std::isinf(widened)) << std::hex << bits;
    }
    ASSERT_EQ(std::uint32_t{to_float16(widened).bits}, bits) << std::hex << bits;
  }
}

TEST(Types, BFloat16RoundTripsAllValues) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float widened = to_float(bfloat16{static_cast<std::uint16_t>(bits)});
    if (kBFloat16Format.is_nan(bits)) {
      ASSERT_TRUE(std::isnan(widened)) << std::hex << bits;
      ASSERT_TRUE(kBFloat16Format.is_nan(to_bfloat16(widened).bits)) << std::hex << bits;
      continue;
    }
    ASSERT_EQ(float_bits(widened), bits << 16);
    ASSERT_EQ(std::uint32_t{to_bfloat16(widened).bits}, bits) << std::hex << bits;
  }
}

void expect_rounds(std::uint32_t bits) {
  const float value = float_from_bits(bits);
  const std::uint32_t fp16 = to_float16(value).bits;
  const std::uint32_t bf16 = to_bfloat16(value).bits;
  if (kFloat32Format.is_nan(bits)) {
    ASSERT_TRUE(kFloat16Format.is_nan(fp16)) << std::hex << bits;
    ASSERT_TRUE(kBFloat16Format.is_nan(bf16)) << std::hex << bits;
    return;
  }
  ASSERT_EQ(fp16, to_type(bits, DataType::kFloat16)) << std::hex << bits;
  ASSERT_EQ(bf16, to_type(bits, DataType::kBFloat16)) << std::hex << bits;
}

TEST(Types, RoundsToNearestEven) {
  // Every value of both 16-bit types, the midpoint to its neighbor, and a unit to either side.
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const auto around = [](std::uint32_t center, std::uint32_t half) {
      for (const std::uint32_t at : {center, center + half}) {
        expect_rounds(at - 1);
        expect_rounds(at);
        expect_rounds(at + 1);
      }
    };
    around(bits << 16, 0x8000u);
    if (!kFloat16Format.is_finite(bits)) continue;
    around(float_bits(to_float(float16{static_cast<std::uint16_t>(bits)})), 0x1000u);
    if ((bits & 0x7c00u) != 0) continue;
    // Below 2^-14 the midpoints are odd multiples of 2^-25.
    const Exact middle = add(decode(bits, kFloat16Format), {(bits & 0x8000u) != 0 ? -1 : 1, -25});
    around(encode(middle, kFloat32Format), 0);
  }
  Random random(31);
  for (int i = 0; i < 300000; ++i) expect_rounds(static_cast<std::uint32_t>(random.bits()));
}

TEST(Types, Edges) {
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_float16(-65520.0f).bits, 0xfc00);
  EXPECT_EQ(to_float16(0x1p-25f).bits, 0x0000) << "a tie, to even";
  EXPECT_EQ(to_float16(0x1.000002p-25f).bits, 0x0001);
  EXPECT_EQ(to_float16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bfloat16(0x1p-149f).bits, 0x0000);
  EXPECT_EQ(to_bfloat16(float_from_bits(0x7f800001u)).bits & 0x7fff, 0x7fc0)
      << "a NaN whose payload lies in the lower half stays a NaN";
}

TEST(Types, SizesAndNames) {
  EXPECT_EQ(size_of(DataType::kFloat32), 4);
  EXPECT_EQ(size_of(DataType::kFloat16), 2);
  EXPECT_EQ(size_of(DataType::kBFloat16), 2);
  EXPECT_EQ(size_of(DataType::kInt8), 1);
  EXPECT_STREQ(name(DataType::kFloat32), "float32");
  EXPECT_STREQ(name(DataType::kFloat16), "float16");
  EXPECT_STREQ(name(DataType::kBFloat16), "bfloat16");
  EXPECT_STREQ(name(DataType::kInt8), "int8");
  EXPECT_EQ(data_type_of<float>, DataType::kFloat32);
  EXPECT_EQ(data_type_of<float16>, DataType::kFloat16);
  EXPECT_EQ(data_type_of<bfloat16>, DataType::kBFloat16);
  EXPECT_EQ(data_type_of<std::int8_t>, DataType::kInt8);
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
