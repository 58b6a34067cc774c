/// The fused steps and the residual: the reference against float64 arithmetic and orders by hand,
/// and every path of the CPU against the reference, bit for bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/reference.h"
#include "support.h"

namespace binary_gemm {
namespace testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Quantized activations on guarded memory.
struct Quantized {
  Quantized(std::int64_t m, std::int64_t k, std::int64_t padding = 0)
      : values(m, k, 1, padding, padding > 0 ? 3 : 0), scales(1, m, 4, 0, padding > 0 ? 1 : 0) {}

  MutableActivationView view() {
    return {values.base<std::int8_t>(),
            scales.base<float>(),
            values.rows(),
            values.cols(),
            values.stride(),
            values.offset(),
            scales.offset()};
  }
  // The value that (m, k) stands for.
  double at(std::int64_t m, std::int64_t k) const {
    return static_cast<double>(values.row<std::int8_t>(m)[k]) *
           static_cast<double>(scales.row<float>(0)[m]);
  }

  GuardedBuffer values;
  GuardedBuffer scales;
};

::testing::AssertionResult equal(const Quantized& actual, const Quantized& expected) {
  const auto values =
      equal_bits(actual.values.view(DataType::kInt8), expected.values.view(DataType::kInt8));
  if (!values) return values;
  const auto scales =
      equal_bits(actual.scales.view(DataType::kFloat32), expected.scales.view(DataType::kFloat32));
  if (!scales) return scales;
  const auto guards = actual.values.guards_intact();
  return guards ? actual.scales.guards_intact() : guards;
}

// ---- The reference ----

TEST(FusedContract, ExponentialIsCloseToThatOfFloat64) {
  Random random(1);
  double worst = 0;
  for (int i = 0; i < 400000; ++i) {
    const auto x = static_cast<float>(random.uniform() * 168.7 - 80);  // to 88.7, below overflow
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::fabs(static_cast<double>(reference::exponential(x)) / exact - 1));
  }
  EXPECT_LT(worst, 0x1p-22);
  EXPECT_EQ(reference::exponential(0.0f), 1.0f);
  EXPECT_EQ(reference::exponential(-0.0f), 1.0f);
  EXPECT_EQ(reference::exponential(89.0f), kInfinity);
  EXPECT_EQ(reference::exponential(kInfinity), kInfinity);
  EXPECT_EQ(reference::exponential(-kInfinity), reference::exponential(-80.0f));
  EXPECT_TRUE(std::isnan(reference::exponential(kNan)));
}

TEST(FusedContract, SiluAtItsEnds) {
  EXPECT_EQ(float_bits(reference::silu(0.0f)), float_bits(0.0f));
  EXPECT_EQ(float_bits(reference::silu(-0.0f)), float_bits(-0.0f));
  EXPECT_EQ(float_bits(reference::silu(-1e30f)), float_bits(-0.0f));
  EXPECT_EQ(reference::silu(1e30f), 1e30f);
  EXPECT_EQ(reference::silu(std::numeric_limits<float>::max()), std::numeric_limits<float>::max());
  EXPECT_FALSE(std::isfinite(reference::silu(kInfinity)));
  EXPECT_FALSE(std::isfinite(reference::silu(-kInfinity)));
  EXPECT_TRUE(std::isnan(reference::silu(kNan)));
  for (float x = -90; x < 90; x += 0.37f) {
    const double exact = static_cast<double>(x) / (1 + std::exp(-static_cast<double>(x)));
    EXPECT_NEAR(reference::silu(x), exact, std::fabs(exact) * 0x1p-21 + 1e-36) << x;
  }
}

TEST(FusedContract, SquaresAreAddedInTheirOrder) {
  const auto sum_of = [](const aligned_vector<float>& row) {
    return reference::sum_of_squares(
        matrix_view(row.data(), 1, static_cast<std::int64_t>(row.size())), 0);
  };
  constexpr float kLarge = 4096;  // its square is 2^24, to which 1 can't be added but 2 can
  constexpr float kSquare = kLarge * kLarge;
  aligned_vector<float> row(2 * reference::kSquareSums);
  row[0] = kLarge;
  row[1] = 1;                       // its neighbour
  row[reference::kSquareSums] = 1;  // added to the same sum
  EXPECT_EQ(sum_of(row), kSquare);  // so each is lost by itself
  row[2] = row[3] = 1;              // these add up before
  EXPECT_EQ(sum_of(row), kSquare + 2);
  std::fill(row.begin(), row.end(), 0.0f);
  row[0] = 1;
  row[reference::kSquareSums] = kLarge;  // after it
  row[reference::kSquareSums / 2] = row[reference::kSquareSums / 2 + 1] = 1;
  EXPECT_EQ(sum_of(row), kSquare + 2);
  // Fused: 2^-12 is not lost from the square of 1 + 2^-12, whose last term is 2^-24, half a unit.
  std::fill(row.begin(), row.end(), 0.0f);
  row[7] = 0x1p-12f;
  row[7 + reference::kSquareSums] = 1 + 0x1p-12f;
  EXPECT_EQ(sum_of(row), 1 + 0x1p-11f + 0x1p-23f);
  // Integers are exact in any order.
  Random random(2);
  for (const std::int64_t k : {1, 2, 3, 64, 511, 4095, 4096, 4097, 9000}) {
    aligned_vector<float> some(static_cast<std::size_t>(k));
    std::int64_t expected = 0;
    for (float& value : some) {
      const std::int64_t integer = random.integer(-40, 40);
      value = static_cast<float>(integer);
      expected += integer * integer;
    }
    EXPECT_EQ(sum_of(some), static_cast<float>(expected)) << k;
  }
}

TEST(FusedContract, RmsNormIsCloseToThatOfFloat64) {
  Random random(3);
  constexpr std::int64_t kRows = 5;
  for (const std::int64_t k : {1, 7, 256, 5120}) {
    for (const bool with_gain : {false, true}) {
      GuardedBuffer x(kRows, k, 4);
      GuardedBuffer gain(1, k, 4);
      fill_gaussian(x.view(DataType::kFloat32), random, 3.0f);
      fill_gaussian(gain.view(DataType::kFloat32), random);
      Quantized q(kRows, k);
      constexpr float kEpsilon = 1e-2f;
      reference::rms_norm_quantize(
          x.view(DataType::kFloat32),
          with_gain ? ConstMatrixView(gain.view(DataType::kFloat32)) : ConstMatrixView{}, kEpsilon,
          q.view());
      for (std::int64_t m = 0; m < kRows; ++m) {
        double squares = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          squares += std::pow(static_cast<double>(x.row<float>(m)[i]), 2);
        }
        const double root = std::sqrt(squares / static_cast<double>(k) + double{kEpsilon});
        const double half_step = 0.5 * static_cast<double>(q.scales.row<float>(0)[m]);
        for (std::int64_t i = 0; i < k; ++i) {
          const double exact = static_cast<double>(x.row<float>(m)[i]) / root *
                               (with_gain ? static_cast<double>(gain.row<float>(0)[i]) : 1);
          ASSERT_NEAR(q.at(m, i), exact, half_step * 1.0001)
              << "K=" << k << " at " << m << ',' << i;
        }
      }
    }
  }
}

TEST(FusedContract, SwigluIsCloseToThatOfFloat64) {
  Random random(4);
  constexpr std::int64_t kRows = 5;
  for (const std::int64_t k : {1, 7, 256, 1000}) {
    GuardedBuffer x(kRows, 2 * k, 4);
    fill_gaussian(x.view(DataType::kFloat32), random, 4.0f);
    Quantized q(kRows, k);
    reference::swiglu_quantize(x.view(DataType::kFloat32), q.view());
    for (std::int64_t m = 0; m < kRows; ++m) {
      const double half_step = 0.5 * static_cast<double>(q.scales.row<float>(0)[m]);
      for (std::int64_t i = 0; i < k; ++i) {
        const double gate = static_cast<double>(x.row<float>(m)[i]);
        const double exact =
            gate / (1 + std::exp(-gate)) * static_cast<double>(x.row<float>(m)[k + i]);
        ASSERT_NEAR(q.at(m, i), exact, half_step * 1.0001) << "K=" << k << " at " << m << ',' << i;
      }
    }
  }
}

TEST(FusedContract, WhatIsNotFinitePoisonsItsRowAlone) {
  constexpr std::int64_t kK = 64;
  const auto poisoned = [](const Quantized& q, std::int64_t m) {
    const std::int8_t* row = q.values.row<std::int8_t>(m);
    return std::isnan(q.scales.row<float>(0)[m]) &&
           std::all_of(row, row + q.values.cols(), [](std::int8_t value) { return value == 0; });
  };
  // 1e20 is finite and its square is not.
  const float bad[] = {kNan, kInfinity, -kInfinity, 1e20f};
  GuardedBuffer x(5, kK, 4);
  for (std::int64_t m = 0; m < 5; ++m) {
    std::fill_n(x.row<float>(m), kK, 0.5f);
    if (m > 0) x.row<float>(m)[3 * m] = bad[m - 1];
  }
  Quantized q(5, kK);
  reference::rms_norm_quantize(x.view(DataType::kFloat32), {}, 1e-6f, q.view());
  EXPECT_FALSE(poisoned(q, 0));
  for (std::int64_t m = 1; m < 5; ++m) EXPECT_TRUE(poisoned(q, m)) << m;
  Quantized half(5, kK / 2);
  reference::swiglu_quantize(x.view(DataType::kFloat32), half.view());
  EXPECT_FALSE(poisoned(half, 0));
  for (std::int64_t m = 1; m < 4; ++m) EXPECT_TRUE(poisoned(half, m)) << m;
  EXPECT_FALSE(poisoned(half, 4)) << "1e20 is as good as any";

  // A gain that is not finite poisons all; so do zeros with epsilon 0, which are 0 / 0.
  aligned_vector<float> gain(kK, 1.0f);
  gain[9] = kNan;
  reference::rms_norm_quantize(x.view(DataType::kFloat32), matrix_view(gain.data(), 1, kK), 0,
                               q.view());
  EXPECT_TRUE(poisoned(q, 0));
  std::fill_n(x.row<float>(0), kK, 0.0f);
  reference::rms_norm_quantize(x.view(DataType::kFloat32), {}, 0, q.view());
  EXPECT_TRUE(poisoned(q, 0));
  reference::rms_norm_quantize(x.view(DataType::kFloat32), {}, 1e-6f, q.view());
  EXPECT_FALSE(poisoned(q, 0));
  EXPECT_EQ(q.scales.row<float>(0)[0], 0.0f);
}

TEST(FusedContract, TheResidualIsAddedBeforeTheOneRounding) {
  // One weight of 1, one activation: y = residual + q * scale.
  aligned_vector<std::uint32_t> bits(1, ~0u);
  aligned_vector<float16> scales(1, to_float16(1.0f));
  aligned_vector<std::int8_t> values(32);
  aligned_vector<float> x_scales(1);
  const auto w =
      weight_view<const std::uint32_t, const float16>(bits.data(), scales.data(), 1, 32, 32);
  const auto y_of = [&](std::int8_t q, float scale, const BiasView& bias, float residual) {
    values[0] = q;
    x_scales[0] = scale;
    aligned_vector<bfloat16> y(1, to_bfloat16(residual));
    const auto x =
        activation_view<const std::int8_t, const float>(values.data(), x_scales.data(), 1, 32);
    const MatrixView view = matrix_view(y.data(), 1, 1);
    reference::binary_gemm(x, w, {bias, view}, view);
    return to_float(y[0]);
  };
  EXPECT_EQ(y_of(3, 2.0f, {}, 10.0f), 16.0f);
  // 256 + 1.5 is halfway between bf16's 256 and 258 and a little less; 257 alone would round to
  // 256.
  EXPECT_EQ(y_of(3, 0.5f, {}, 256.0f), 258.0f);
  EXPECT_EQ(y_of(2, 0.5f, {}, 256.0f), 256.0f);
  aligned_vector<float> bias(1, 0.5f);
  EXPECT_EQ(y_of(2, 0.5f, {bias.data(), 1, 0}, 256.0f), 258.0f);
  // r is rounded to fp32 first: 2^24 + 1 is lost before the residual can add to it.
  bias[0] = 1;
  EXPECT_EQ(y_of(1, 0x1p24f, {bias.data(), 1, 0}, -0x1p24f), 0.0f);
  // Without a residual nothing is added, not even to -0.
  EXPECT_EQ(float_bits(y_of(0, -1.0f, {}, 0.0f)), float_bits(0.0f));
  aligned_vector<float> y(1);
  const auto x =
      activation_view<const std::int8_t, const float>(values.data(), x_scales.data(), 1, 32);
  reference::binary_gemm(x, w, {}, matrix_view(y.data(), 1, 1));
  EXPECT_EQ(float_bits(y[0]), float_bits(-0.0f));
}

// ---- Every path ----

template <class Body>
void for_each_path(int threads, const Body& body) {
  for (const cpu::Path path : cpu::supported_paths()) {
    SCOPED_TRACE(std::string("path ") + cpu::name(path));
    body(cpu::Execution{threads, path});
  }
}

std::vector<std::int64_t> lengths() {
  std::vector<std::int64_t> all;
  for (std::int64_t k = 0; k <= 40; ++k) all.push_back(k);
  all.insert(all.end(), {63, 64, 100, 1023, 1024, 4095, 4096, 4097, 5120, 8192, 8200, 9001});
  return all;
}

TEST(FusedCpu, RmsNormQuantizeOfEveryTypeLengthAndStride) {
  Random random(10);
  std::uint64_t index = 0;
  for (const std::int64_t k : lengths()) {
    for (const DataType type : kFloatTypes) {
      for (const std::int64_t padding : {0, 5}) {
        const std::int64_t m = k > 200 ? 9 : 20;
        GuardedBuffer x(m, k, size_of(type), padding, padding / 2);
        fill_activations(x.view(type), random);
        const std::size_t gain_kind = index++ % 4;  // none, or one of the types
        const DataType gain_type = kFloatTypes[gain_kind % 3];
        GuardedBuffer gain(1, k, size_of(gain_type), 0, padding);
        fill_gaussian(gain.view(gain_type), random);
        const ConstMatrixView gain_view =
            gain_kind == 3 ? ConstMatrixView{} : std::as_const(gain).view(gain_type);
        const float epsilon = index % 3 == 0 ? 0.0f : 1e-5f;
        Quantized expected(m, k, padding);
        reference::rms_norm_quantize(x.view(type), gain_view, epsilon, expected.view());
        for_each_path(1 + static_cast<int>(k % 3), [&](const cpu::Execution& execution) {
          Quantized q(m, k, padding);
          cpu::rms_norm_quantize(x.view(type), gain_view, epsilon, q.view(), execution);
          ASSERT_TRUE(equal(q, expected)) << name(type) << " K=" << k << " gain " << gain_kind;
        });
        ASSERT_TRUE(x.guards_intact());
        ASSERT_TRUE(gain.guards_intact());
      }
    }
  }
}

TEST(FusedCpu, SwigluQuantizeOfEveryTypeLengthAndStride) {
  Random random(20);
  for (const std::int64_t k : lengths()) {
    for (const DataType type : kFloatTypes) {
      for (const std::int64_t padding : {0, 5}) {
        const std::int64_t m = k > 200 ? 9 : 20;
        GuardedBuffer x(m, 2 * k, size_of(type), padding, padding / 2);
        fill_activations(x.view(type), random);
        if (padding > 0) fill_gaussian(x.view(type).row_range(0, m / 2), random, 30.0f);
        Quantized expected(m, k, padding);
        reference::swiglu_quantize(x.view(type), expected.view());
        for_each_path(1 + static_cast<int>(k % 3), [&](const cpu::Execution& execution) {
          Quantized q(m, k, padding);
          cpu::swiglu_quantize(x.view(type), q.view(), execution);
          ASSERT_TRUE(equal(q, expected)) << name(type) << " K=" << k;
        });
        ASSERT_TRUE(x.guards_intact());
      }
    }
  }
}

TEST(FusedCpu, SwigluOfAnyBits) {
  Random random(30);
  constexpr std::int64_t kRows = 2000;
  constexpr std::int64_t kK = 48;
  GuardedBuffer x(kRows, 2 * kK, 4);
  for (std::int64_t m = 0; m < kRows; ++m) {
    const auto limit = static_cast<std::uint32_t>(random.integer(1, 0x7f80)) << 16;
    for (std::int64_t k = 0; k < 2 * kK; ++k) {
      const auto bits = static_cast<std::uint32_t>(random.bits());
      x.row<std::uint32_t>(m)[k] = (bits & 0x80000000u) | (bits & 0x7fffffffu) % limit;
    }
  }
  Quantized expected(kRows, kK);
  reference::swiglu_quantize(x.view(DataType::kFloat32), expected.view());
  for_each_path(1, [&](const cpu::Execution& execution) {
    Quantized q(kRows, kK);
    cpu::swiglu_quantize(x.view(DataType::kFloat32), q.view(), execution);
    EXPECT_TRUE(equal(q, expected));
  });
}

TEST(FusedCpu, EveryBatchTo5) {
  Random random(40);
  constexpr std::int64_t kK = 300;
  GuardedBuffer x(5, 2 * kK, 2);
  fill_gaussian(x.view(DataType::kBFloat16), random);
  Quantized norm(5, 2 * kK);
  Quantized swiglu(5, kK);
  reference::rms_norm_quantize(x.view(DataType::kBFloat16), {}, 1e-6f, norm.view());
  reference::swiglu_quantize(x.view(DataType::kBFloat16), swiglu.view());
  for (std::int64_t m = 0; m <= 5; ++m) {
    for_each_path(2, [&](const cpu::Execution& execution) {
      const ConstMatrixView rows = std::as_const(x).view(DataType::kBFloat16).row_range(5 - m, m);
      Quantized q(m, 2 * kK);
      cpu::rms_norm_quantize(rows, {}, 1e-6f, q.view(), execution);
      EXPECT_TRUE(equal_bits(q.values.view(DataType::kInt8),
                             norm.values.view(DataType::kInt8).row_range(5 - m, m)));
      Quantized half(m, kK);
      cpu::swiglu_quantize(rows, half.view(), execution);
      EXPECT_TRUE(equal_bits(half.values.view(DataType::kInt8),
                             swiglu.values.view(DataType::kInt8).row_range(5 - m, m)));
      EXPECT_TRUE(half.values.guards_intact());
      EXPECT_TRUE(q.scales.guards_intact());
    });
  }
}

TEST(FusedCpu, ResidualOfEveryTypeBatchAndLayoutInPlaceAndNot) {
  Random random(50);
  std::uint64_t seed = 50;
  for (const DataType type : kFloatTypes) {
    for (const std::int64_t m : {1, 2, 5, 8, 13, 17, 40, 300}) {
      for (const Layout& layout : all_layouts()) {
        const bool with_bias = ++seed % 2 == 0;
        const auto patterns = all_activation_patterns();
        const Problem p = make_problem({m, m == 300 ? 5 : 35, kSliceK + 128, 128},
                                       ScalePattern::kMixed, patterns[seed % 3], layout, seed);
        GuardedBuffer residual = p.output(type);
        fill_activations(residual.view(type), random);
        const BiasView bias = with_bias ? p.bias() : BiasView{};
        GuardedBuffer expected = p.output(type);
        reference::binary_gemm(p.x(), p.w(), {bias, residual.view(type)}, expected.view(type));
        for_each_path(1 + static_cast<int>(seed % 2), [&](const cpu::Execution& execution) {
          GuardedBuffer y = p.output(type);
          cpu::binary_gemm(p.x(), p.w(), {bias, residual.view(type)}, y.view(type), execution);
          ASSERT_TRUE(equal_bits(y.view(type), expected.view(type)))
              << p.shape << ' ' << name(type) << ", layout " << layout.name;
          ASSERT_TRUE(y.guards_intact());
          // In place, by two ranges of rows.
          GuardedBuffer in_place = p.output(type);
          for (std::int64_t row = 0; row < m; ++row) {
            for (std::int64_t n = 0; n < p.shape.n; ++n) {
              reference::store(in_place.base<void>(), type,
                               in_place.offset() + row * in_place.stride() + n,
                               reference::load(residual.base<void>(), type,
                                               residual.offset() + row * residual.stride() + n));
            }
          }
          const MatrixView view = in_place.view(type);
          cpu::binary_gemm_rows(p.x(), p.w(), {bias, view}, view, 0, 3, execution.path);
          cpu::binary_gemm_rows(p.x(), p.w(), {bias, view}, view, 3, p.shape.n, execution.path);
          ASSERT_TRUE(equal_bits(in_place.view(type), expected.view(type)))
              << p.shape << ' ' << name(type) << ", in place, layout " << layout.name;
          ASSERT_TRUE(in_place.guards_intact());
          ASSERT_TRUE(residual.guards_intact());
        });
      }
    }
  }
}

TEST(FusedCpu, LinearWithAResidual) {
  Random random(60);
  const Problem p = make_problem({3, 20, 640, 128}, ScalePattern::kNarrow,
                                 ActivationPattern::kRandom, all_layouts()[0], 60);
  GuardedBuffer x(3, 640, 2);
  fill_gaussian(x.view(DataType::kBFloat16), random);
  GuardedBuffer residual = p.output(DataType::kBFloat16);
  fill_gaussian(residual.view(DataType::kBFloat16), random);
  Quantized q(3, 640);
  reference::quantize_activation(x.view(DataType::kBFloat16), q.view());
  GuardedBuffer expected = p.output(DataType::kBFloat16);
  reference::binary_gemm(q.view(), p.w(), {p.bias(), residual.view(DataType::kBFloat16)},
                         expected.view(DataType::kBFloat16));
  for_each_path(1, [&](const cpu::Execution& execution) {
    GuardedBuffer y = p.output(DataType::kBFloat16);
    cpu::binary_linear(x.view(DataType::kBFloat16), p.w(),
                       {p.bias(), residual.view(DataType::kBFloat16)}, y.view(DataType::kBFloat16),
                       execution);
    EXPECT_TRUE(equal_bits(y.view(DataType::kBFloat16), expected.view(DataType::kBFloat16)));
  });
}

TEST(FusedCpu, ProductsThatShareAnActivation) {
  // Q, K and V from one normalized activation: rows of one weight, or weights of their own.
  Random random(70);
  const Problem p = make_problem({2, 48, 512, 128}, ScalePattern::kNarrow,
                                 ActivationPattern::kRandom, all_layouts()[0], 70);
  GuardedBuffer x(2, 512, 2);
  fill_gaussian(x.view(DataType::kBFloat16), random);
  Quantized q(2, 512);
  cpu::rms_norm_quantize(x.view(DataType::kBFloat16), {}, 1e-6f, q.view());
  GuardedBuffer whole = p.output(DataType::kBFloat16);
  cpu::binary_gemm(q.view(), p.w(), {}, whole.view(DataType::kBFloat16));
  GuardedBuffer parts = p.output(DataType::kBFloat16);
  for (const auto& [begin, count] : {std::pair{0, 32}, std::pair{32, 8}, std::pair{40, 8}}) {
    cpu::binary_gemm(q.view(), p.w().row_range(begin, count), {},
                     parts.view(DataType::kBFloat16).column_range(begin, count));
  }
  EXPECT_TRUE(equal_bits(parts.view(DataType::kBFloat16), whole.view(DataType::kBFloat16)));
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
