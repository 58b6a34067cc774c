/// The claims that any user would check, without a word about how the library works.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "support.h"

namespace binary_gemm {
namespace testing {
namespace {

constexpr DataType kAllTypes[] = {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                  DataType::kInt8};

// Weights that own guarded buffers.
struct Weights {
  Weights(std::int64_t n, std::int64_t k, std::int64_t g, std::int64_t padding = 0,
          std::int64_t offset = 0)
      : shape{0, n, k, g},
        bits(n, k / 32, 4, padding, offset),
        scales(n, k / g, 2, padding, offset) {}

  MutableWeightView view(bool with_scales = true) {
    return {bits.base<std::uint32_t>(),
            with_scales ? scales.base<float16>() : nullptr,
            shape.n,
            shape.k,
            shape.g,
            bits.stride(),
            scales.stride(),
            bits.offset(),
            scales.offset()};
  }

  Shape shape;
  GuardedBuffer bits;
  GuardedBuffer scales;
};

float at(GuardedBuffer& buffer, DataType type, std::int64_t r, std::int64_t c) {
  return reference::load(buffer.base<void>(), type, buffer.offset() + r * buffer.stride() + c);
}

// ---- Packing ----

TEST(Claims, UnpackOfPackIsTheWeights) {
  Random random(1);
  for (const DataType type : kAllTypes) {
    for (const std::int64_t g : kGroupSizes) {
      for (const std::int64_t k : {g, 3 * g, 1024 + g}) {
        for (const std::int64_t n : {1, 5, 64}) {
          for (const std::int64_t padding : {0, 3}) {
            const bool with_scales = type != DataType::kInt8;
            GuardedBuffer dense(n, k, size_of(type), padding, padding);
            for (std::int64_t r = 0; r < n; ++r) {
              float scale = 1;
              for (std::int64_t c = 0; c < k; ++c) {
                // Seven bits of mantissa and exponents that all of the types have.
                if (with_scales && c % g == 0) {
                  scale = std::ldexp(static_cast<float>(random.integer(64, 127)),
                                     static_cast<int>(random.integer(-16, 4)));
                }
                reference::store(dense.base<void>(), type, dense.offset() + r * dense.stride() + c,
                                 random.chance(0.5) ? scale : -scale);
              }
            }
            Weights packed(n, k, g, padding, padding);
            GuardedBuffer back(n, k, size_of(type), padding, padding);
            cpu::pack_weights(dense.view(type), packed.view(with_scales));
            cpu::unpack_weights(packed.view(with_scales), back.view(type));
            EXPECT_TRUE(equal_bits(back.view(type), dense.view(type)))
                << name(type) << " N=" << n << " K=" << k << " G=" << g;
            for (const GuardedBuffer* buffer : {&dense, &packed.bits, &packed.scales, &back}) {
              EXPECT_TRUE(buffer->guards_intact());
            }
            if (!with_scales) {
              EXPECT_TRUE(packed.scales.untouched());
            }
          }
        }
      }
    }
  }
}

TEST(Claims, PackTakesSignsAndMeans) {
  Random random(2);
  for (const DataType type : kAllTypes) {
    for (const std::int64_t g : kGroupSizes) {
      GuardedBuffer dense(7, 3 * g, size_of(type));
      if (type == DataType::kInt8) {
        for (std::int64_t i = 0; i < 7 * 3 * g; ++i) {
          dense.base<std::int8_t>()[i] = static_cast<std::int8_t>(random.integer(-128, 127));
        }
      } else {
        fill_gaussian(dense.view(type), random, 0.02f);
      }
      Weights packed(7, 3 * g, g);
      cpu::pack_weights(dense.view(type), packed.view(), {2});
      for (std::int64_t r = 0; r < 7; ++r) {
        for (std::int64_t group = 0; group < 3; ++group) {
          double sum = 0;  // in order, as documented
          for (std::int64_t c = group * g; c < (group + 1) * g; ++c) {
            const float value = at(dense, type, r, c);
            sum += std::abs(static_cast<double>(value));
            const bool bit = (packed.bits.row<std::uint32_t>(r)[c / 32] >> (c % 32) & 1u) != 0;
            ASSERT_EQ(bit, value > 0);
          }
          const auto mean = static_cast<float>(sum / static_cast<double>(g));
          EXPECT_EQ(packed.scales.row<float16>(r)[group].bits, to_float16(mean).bits);
        }
      }
    }
  }
}

TEST(Claims, PackTakesZerosAndNegativesAsMinusOne) {
  alignas(16) float dense[32] = {};
  dense[1] = -0.0f;
  dense[2] = -1.0f;
  dense[3] = 1.0f;
  dense[4] = std::numeric_limits<float>::denorm_min();
  dense[5] = -std::numeric_limits<float>::denorm_min();
  dense[6] = std::numeric_limits<float>::infinity();
  dense[31] = 5.0f;
  alignas(16) std::uint32_t bits = 0;
  cpu::pack_weights(matrix_view(dense, 1, 32),
                    weight_view(&bits, static_cast<float16*>(nullptr), 1, 32, 32));
  EXPECT_EQ(bits, 1u << 3 | 1u << 4 | 1u << 6 | 1u << 31);
}

TEST(Claims, UnpackWritesScales) {
  // Negative, zero and non-finite scales come out as they are, signed.
  const Problem p = make_problem({1, 9, 512, 32}, ScalePattern::kAnyBits,
                                 ActivationPattern::kRandom, all_layouts()[2], 3);
  for (const DataType type : kFloatTypes) {
    GuardedBuffer dense(9, 512, size_of(type), 3, 1);
    cpu::unpack_weights(p.w(), dense.view(type), {3});
    GuardedBuffer expected(9, 512, size_of(type), 3, 1);
    for (std::int64_t r = 0; r < 9; ++r) {
      for (std::int64_t c = 0; c < 512; ++c) {
        const float scale = to_float(p.scales.row<float16>(r)[c / 32]);
        const bool bit = (p.bits.row<std::uint32_t>(r)[c / 32] >> (c % 32) & 1u) != 0;
        reference::store(expected.base<void>(), type, expected.offset() + r * expected.stride() + c,
                         bit ? scale : -scale);
      }
    }
    EXPECT_TRUE(equal_bits(dense.view(type), expected.view(type)));
    EXPECT_TRUE(dense.guards_intact());
  }
}

// ---- Products ----

TEST(Claims, UnitScalesGiveTheExactIntegerProduct) {
  for (const DataType type : kFloatTypes) {
    std::int64_t held = 0;
    for (const std::int64_t g : kGroupSizes) {
      for (const std::int64_t k : interesting_k(g)) {
        Problem p = make_problem({5, 9, k, g}, ScalePattern::kUnit, ActivationPattern::kRandom,
                                 all_layouts()[0], static_cast<std::uint64_t>(k));
        std::fill_n(p.x_scales.row<float>(0), 5, 1.0f);
        GuardedBuffer y = p.output(type);
        cpu::binary_gemm(p.x(), p.w(), {}, y.view(type));
        for (std::int64_t m = 0; m < 5; ++m) {
          for (std::int64_t n = 0; n < 9; ++n) {
            std::int32_t product = 0;
            for (std::int64_t i = 0; i < k; ++i) {
              const bool bit = (p.bits.row<std::uint32_t>(n)[i / 32] >> (i % 32) & 1u) != 0;
              product += (bit ? 1 : -1) * p.values.row<std::int8_t>(m)[i];
            }
            const auto exact = static_cast<float>(product);
            const bool holds = type == DataType::kFloat32 ||
                               (type == DataType::kFloat16 ? to_float(to_float16(exact))
                                                           : to_float(to_bfloat16(exact))) == exact;
            if (!holds) continue;
            ++held;
            ASSERT_EQ(at(y, type, m, n), exact) << p.shape << " m=" << m << " n=" << n;
          }
        }
      }
    }
    EXPECT_GT(held, type == DataType::kFloat32 ? 899 : 100) << name(type);
  }
}

TEST(Claims, CloseToTheFloat64Product) {
  // Row by row, so that no bad row hides in the norm of the whole.
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : interesting_k(g)) {
      for (const ScalePattern scales :
           {ScalePattern::kNarrow, ScalePattern::kMixed, ScalePattern::kNegative}) {
        const Problem p = make_problem({7, 67, k, g}, scales, ActivationPattern::kRandom,
                                       all_layouts()[1], static_cast<std::uint64_t>(k));
        GuardedBuffer w(67, k, 4);
        cpu::unpack_weights(p.w(), w.view(DataType::kFloat32));
        GuardedBuffer y = p.output(DataType::kBFloat16);
        cpu::binary_gemm(p.x(), p.w(), p.bias(), y.view(DataType::kBFloat16));
        for (std::int64_t m = 0; m < 7; ++m) {
          double error = 0;
          double norm = 0;
          for (std::int64_t n = 0; n < 67; ++n) {
            double exact = p.bias_data.row<float>(0)[n];
            for (std::int64_t i = 0; i < k; ++i) {
              exact += static_cast<double>(p.x_scales.row<float>(0)[m]) *
                       p.values.row<std::int8_t>(m)[i] * static_cast<double>(w.row<float>(n)[i]);
            }
            const double difference = at(y, DataType::kBFloat16, m, n) - exact;
            error += difference * difference;
            norm += exact * exact;
          }
          EXPECT_LT(std::sqrt(error / norm), 0x1p-8)
              << p.shape << " m=" << m << ' ' << name(scales);
        }
      }
    }
  }
}

TEST(Claims, ActivationsComeBackWithinHalfAStep) {
  Random random(4);
  for (const DataType type : kFloatTypes) {
    GuardedBuffer x(64, 515, size_of(type));
    fill_gaussian(x.view(type), random, 3.0f);
    GuardedBuffer q(64, 515, 1);
    GuardedBuffer scales(1, 64, 4);
    cpu::quantize_activation(x.view(type),
                             activation_view(q.base<std::int8_t>(), scales.base<float>(), 64, 515));
    for (std::int64_t m = 0; m < 64; ++m) {
      double largest = 0;
      for (std::int64_t k = 0; k < 515; ++k) {
        largest = std::max(largest, std::abs(static_cast<double>(at(x, type, m, k))));
      }
      for (std::int64_t k = 0; k < 515; ++k) {
        const double back = static_cast<double>(scales.row<float>(0)[m]) * q.row<std::int8_t>(m)[k];
        // Beside half a step, the three fp32 roundings of 127 / a, x (127 / a) and a / 127.
        const double bound = (0.5 + 3 * 127 * 0x1p-24) / 127 * largest;
        ASSERT_LE(std::abs(back - static_cast<double>(at(x, type, m, k))), bound);
      }
    }
  }
}

TEST(Claims, RepeatedRunsAreEqual) {
  const Problem p = make_problem({17, 67, 2240, 64}, ScalePattern::kMixed,
                                 ActivationPattern::kRandom, all_layouts()[2], 5);
  GuardedBuffer first = p.output(DataType::kFloat32);
  cpu::binary_gemm(p.x(), p.w(), p.bias(), first.view(DataType::kFloat32));
  for (int run = 0; run < 10; ++run) {
    for (const int threads : {1, 2, 3}) {
      GuardedBuffer again = p.output(DataType::kFloat32);
      cpu::binary_gemm(p.x(), p.w(), p.bias(), again.view(DataType::kFloat32), {threads});
      EXPECT_TRUE(equal_bits(again.view(DataType::kFloat32), first.view(DataType::kFloat32)));
    }
  }
}

TEST(Claims, ATokenDoesNotDependOnItsBatch) {
  const Problem p = make_problem({70, 33, 1344, 64}, ScalePattern::kMixed,
                                 ActivationPattern::kPoisoned, all_layouts()[2], 6);
  GuardedBuffer whole = p.output(DataType::kBFloat16);
  cpu::binary_gemm(p.x(), p.w(), p.bias(), whole.view(DataType::kBFloat16));
  for (std::int64_t m = 0; m < 70; ++m) {
    GuardedBuffer alone = p.output(DataType::kBFloat16, 1, 33);
    cpu::binary_gemm(p.x().row_range(m, 1), p.w(), p.bias(), alone.view(DataType::kBFloat16));
    EXPECT_TRUE(equal_bits(alone.view(DataType::kBFloat16),
                           whole.view(DataType::kBFloat16).row_range(m, 1)));
  }
}

TEST(Claims, APoisonedTokenSpoilsNoOther) {
  constexpr DataType kType = DataType::kFloat32;
  const Problem p = make_problem({3, 33, 1024, 128}, ScalePattern::kNarrow,
                                 ActivationPattern::kRandom, all_layouts()[0], 7);
  Random random(7);
  GuardedBuffer x(3, 1024, 4);
  fill_gaussian(x.view(kType), random);
  GuardedBuffer clean = p.output(kType);
  cpu::binary_linear(x.view(kType), p.w(), {}, clean.view(kType));
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    x.row<float>(1)[777] = poison;
    GuardedBuffer y = p.output(kType);
    cpu::binary_linear(x.view(kType), p.w(), {}, y.view(kType));
    EXPECT_TRUE(equal_bits(y.view(kType).row_range(0, 1), clean.view(kType).row_range(0, 1)));
    EXPECT_TRUE(equal_bits(y.view(kType).row_range(2, 1), clean.view(kType).row_range(2, 1)));
    for (std::int64_t n = 0; n < 33; ++n) EXPECT_TRUE(std::isnan(y.row<float>(1)[n]));
  }
}

// ---- Shards ----

TEST(Claims, RowShardsAreSlicesOfTheWhole) {
  constexpr DataType kType = DataType::kBFloat16;
  const Problem p = make_problem({5, 60, 1152, 128}, ScalePattern::kMixed,
                                 ActivationPattern::kRandom, all_layouts()[1], 8);
  GuardedBuffer whole = p.output(kType);
  cpu::binary_gemm(p.x(), p.w(), p.bias(), whole.view(kType));
  for (const std::int64_t shards : {2, 3, 4, 60}) {
    GuardedBuffer y = p.output(kType);
    for (std::int64_t s = 0; s < shards; ++s) {
      const std::int64_t count = 60 / shards;
      cpu::binary_gemm(p.x(), p.w().row_range(s * count, count),
                       p.bias().row_range(s * count, count),
                       y.view(kType).column_range(s * count, count));
    }
    EXPECT_TRUE(equal_bits(y.view(kType), whole.view(kType)));
    EXPECT_TRUE(y.guards_intact());
  }
}

TEST(Claims, ColumnShardsAreTheSubmatrix) {
  constexpr DataType kType = DataType::kFloat32;
  for (const std::int64_t g : kGroupSizes) {
    const Problem p = make_problem({3, 9, 12 * g, g}, ScalePattern::kMixed,
                                   ActivationPattern::kRandom, all_layouts()[2], 9);
    for (const auto& [begin, count] :
         {std::pair{g, g}, {0 * g, 5 * g}, {5 * g, 7 * g}, {11 * g, g}, {3 * g, 0 * g}}) {
      // The sub-matrix, copied out by hand.
      Problem part = make_problem({3, 9, count, g}, ScalePattern::kUnit, ActivationPattern::kRandom,
                                  all_layouts()[0], 0);
      for (std::int64_t m = 0; m < 3; ++m) {
        std::copy_n(p.values.row<std::int8_t>(m) + begin, count, part.values.row<std::int8_t>(m));
        part.x_scales.row<float>(0)[m] = p.x_scales.row<float>(0)[m];
      }
      for (std::int64_t n = 0; n < 9; ++n) {
        std::copy_n(p.bits.row<std::uint32_t>(n) + begin / 32, count / 32,
                    part.bits.row<std::uint32_t>(n));
        std::copy_n(p.scales.row<float16>(n) + begin / g, count / g, part.scales.row<float16>(n));
      }
      GuardedBuffer expected = p.output(kType);
      reference::binary_gemm(part.x(), part.w(), p.bias(), expected.view(kType));
      GuardedBuffer y = p.output(kType);
      cpu::binary_gemm(p.x().column_range(begin, count), p.w().column_range(begin, count), p.bias(),
                       y.view(kType));
      EXPECT_TRUE(equal_bits(y.view(kType), expected.view(kType)))
          << "G=" << g << " columns " << begin << " +" << count;
    }
  }
}

TEST(Claims, ShardsOfShardsCompose) {
  const Problem p = make_problem({8, 20, 1024, 64}, ScalePattern::kNarrow,
                                 ActivationPattern::kRandom, all_layouts()[2], 10);
  const WeightView once = p.w().row_range(5, 3).column_range(256, 128);
  const WeightView twice =
      p.w().column_range(128, 512).row_range(2, 10).column_range(128, 128).row_range(3, 3);
  EXPECT_EQ(once.bits + once.bits_offset, twice.bits + twice.bits_offset);
  EXPECT_EQ(once.scales + once.scales_offset, twice.scales + twice.scales_offset);
  EXPECT_EQ(once.n, twice.n);
  EXPECT_EQ(once.k, twice.k);
  EXPECT_EQ(once.bits + once.bits_offset, p.bits.row<std::uint32_t>(5) + 8);
  EXPECT_EQ(once.scales + once.scales_offset, p.scales.row<float16>(5) + 4);
  const ActivationView x = p.x().row_range(1, 6).column_range(32, 64).row_range(2, 1);
  EXPECT_EQ(x.values + x.offset, p.values.row<std::int8_t>(3) + 32);
  EXPECT_EQ(x.scales + x.scales_offset, p.x_scales.row<float>(0) + 3);
  EXPECT_EQ(BiasView{}.row_range(3, 5).data, nullptr);
  const BiasView bias = p.bias().row_range(4, 10).row_range(1, 2);
  EXPECT_EQ(bias.data + bias.offset, p.bias_data.row<float>(0) + 5);
  EXPECT_EQ(bias.n, 2);
}

TEST(Claims, AFusedOutputMayInterleaveWithItsInput) {
  // x in the left columns of one buffer and y in the right ones.
  constexpr DataType kType = DataType::kBFloat16;
  const Problem p = make_problem({6, 24, 128, 64}, ScalePattern::kNarrow,
                                 ActivationPattern::kRandom, all_layouts()[0], 11);
  Random random(11);
  GuardedBuffer buffer(6, 128 + 24, 2);
  fill_gaussian(buffer.view(kType).column_range(0, 128), random);
  GuardedBuffer x(6, 128, 2);
  for (std::int64_t m = 0; m < 6; ++m) {
    std::copy_n(buffer.row<bfloat16>(m), 128, x.row<bfloat16>(m));
  }
  GuardedBuffer expected = p.output(kType);
  cpu::binary_linear(x.view(kType), p.w(), {}, expected.view(kType));
  cpu::binary_linear(buffer.view(kType).column_range(0, 128), p.w(), {},
                     buffer.view(kType).column_range(128, 24));
  EXPECT_TRUE(equal_bits(buffer.view(kType).column_range(128, 24), expected.view(kType)));
  EXPECT_TRUE(equal_bits(buffer.view(kType).column_range(0, 128), x.view(kType)));
}

// ---- Threads ----

TEST(Claims, RowRangesOfOtherThreadsMakeTheWhole) {
  constexpr DataType kType = DataType::kFloat16;
  const Problem p = make_problem({4, 101, 1280, 128}, ScalePattern::kMixed,
                                 ActivationPattern::kRandom, all_layouts()[2], 12);
  GuardedBuffer whole = p.output(kType);
  cpu::binary_gemm(p.x(), p.w(), p.bias(), whole.view(kType), {1});
  for (const std::int64_t count : {2, 3, 7}) {
    GuardedBuffer y = p.output(kType);
    std::vector<std::thread> threads;
    for (std::int64_t t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        cpu::binary_gemm_rows(p.x(), p.w(), p.bias(), y.view(kType), 101 * t / count,
                              101 * (t + 1) / count);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(equal_bits(y.view(kType), whole.view(kType))) << count << " threads";
    EXPECT_TRUE(y.guards_intact());
  }
}

TEST(Claims, ThreadCountsGiveEqualBits) {
  Random random(13);
  GuardedBuffer dense(131, 640, 4);
  GuardedBuffer x(9, 640, 2);
  fill_gaussian(dense.view(DataType::kFloat32), random);
  fill_activations(x.view(DataType::kFloat16), random);
  const cpu::BinaryLinear layer = cpu::BinaryLinear::from_dense(dense.view(DataType::kFloat32), 64);
  GuardedBuffer one(9, 131, 2);
  layer(x.view(DataType::kFloat16), one.view(DataType::kBFloat16), {1});
  Weights packed_by_one(131, 640, 64);
  cpu::pack_weights(dense.view(DataType::kFloat32), packed_by_one.view(), {1});
  GuardedBuffer unpacked_by_one(131, 640, 4);
  cpu::unpack_weights(packed_by_one.view(), unpacked_by_one.view(DataType::kFloat32), {1});
  for (const int threads : {0, 2, 3}) {
    GuardedBuffer y(9, 131, 2);
    layer(x.view(DataType::kFloat16), y.view(DataType::kBFloat16), {threads});
    EXPECT_TRUE(equal_bits(y.view(DataType::kBFloat16), one.view(DataType::kBFloat16)));
    Weights packed(131, 640, 64);
    cpu::pack_weights(dense.view(DataType::kFloat32), packed.view(), {threads});
    EXPECT_TRUE(equal_bits(packed.bits.view(DataType::kFloat32),
                           packed_by_one.bits.view(DataType::kFloat32)));
    EXPECT_TRUE(equal_bits(packed.scales.view(DataType::kFloat16),
                           packed_by_one.scales.view(DataType::kFloat16)));
    GuardedBuffer unpacked(131, 640, 4);
    cpu::unpack_weights(packed.view(), unpacked.view(DataType::kFloat32), {threads});
    EXPECT_TRUE(
        equal_bits(unpacked.view(DataType::kFloat32), unpacked_by_one.view(DataType::kFloat32)));
  }
}

// ---- BinaryLinear ----

TEST(Claims, LinearFromDense) {
  Random random(14);
  for (const std::int64_t g : kGroupSizes) {
    for (const bool with_bias : {false, true}) {
      GuardedBuffer dense(19, 5 * g, 2, 3, 1);
      fill_gaussian(dense.view(DataType::kBFloat16), random, 0.05f);
      GuardedBuffer bias(1, 19, 4, 0, 2);
      fill_gaussian(bias.view(DataType::kFloat32), random);
      const BiasView bias_view =
          with_bias ? BiasView{bias.base<float>(), 19, bias.offset()} : BiasView{};
      const cpu::BinaryLinear layer =
          cpu::BinaryLinear::from_dense(dense.view(DataType::kBFloat16), g, bias_view);
      EXPECT_EQ(layer.n(), 19);
      EXPECT_EQ(layer.k(), 5 * g);
      EXPECT_EQ(layer.group_size(), g);
      EXPECT_EQ(layer.bias().data != nullptr, with_bias);

      Weights packed(19, 5 * g, g);
      cpu::pack_weights(dense.view(DataType::kBFloat16), packed.view());
      GuardedBuffer x(4, 5 * g, 4);
      fill_gaussian(x.view(DataType::kFloat32), random);
      GuardedBuffer expected(4, 19, 4);
      cpu::binary_linear(x.view(DataType::kFloat32), packed.view(), bias_view,
                         expected.view(DataType::kFloat32));
      GuardedBuffer y(4, 19, 4);
      layer(x.view(DataType::kFloat32), y.view(DataType::kFloat32));
      EXPECT_TRUE(equal_bits(y.view(DataType::kFloat32), expected.view(DataType::kFloat32)));
    }
  }
}

TEST(Claims, LinearFromPackedOwnsACopy) {
  constexpr DataType kType = DataType::kFloat32;
  Problem p = make_problem({4, 19, 1344, 64}, ScalePattern::kMixed, ActivationPattern::kRandom,
                           all_layouts()[2], 15);
  Random random(15);
  GuardedBuffer x(4, 1344, 4);
  fill_gaussian(x.view(kType), random);
  GuardedBuffer expected(4, 19, 4);
  cpu::binary_linear(x.view(kType), p.w(), p.bias(), expected.view(kType));
  cpu::BinaryLinear layer = cpu::BinaryLinear::from_packed(p.w(), p.bias());
  for (std::int64_t n = 0; n < 19; ++n) {  // the layer must not look at these again
    std::fill_n(p.bits.row<std::uint32_t>(n), 42, 0u);
    std::fill_n(p.scales.row<float16>(n), 21, float16{0x7e00});
    p.bias_data.row<float>(0)[n] = 1e30f;
  }
  GuardedBuffer y(4, 19, 4);
  layer(x.view(kType), y.view(kType));
  EXPECT_TRUE(equal_bits(y.view(kType), expected.view(kType)));

  // Copies and moves are layers of their own.
  const cpu::BinaryLinear copy = layer;
  EXPECT_NE(copy.weights().bits, static_cast<const cpu::BinaryLinear&>(layer).weights().bits);
  const cpu::BinaryLinear moved = std::move(layer);
  for (const cpu::BinaryLinear* one : {&copy, &moved}) {
    GuardedBuffer again(4, 19, 4);
    (*one)(x.view(kType), again.view(kType));
    EXPECT_TRUE(equal_bits(again.view(kType), expected.view(kType)));
  }
}

TEST(Claims, LinearStartsAtZeroAndCanBeFilled) {
  cpu::BinaryLinear layer(5, 256, 128, /*has_bias=*/true);
  const WeightView w = static_cast<const cpu::BinaryLinear&>(layer).weights();
  for (std::int64_t i = 0; i < 5 * 8; ++i) EXPECT_EQ(w.bits[i], 0u);
  for (std::int64_t i = 0; i < 5 * 2; ++i) EXPECT_EQ(w.scales[i].bits, 0u);
  ASSERT_NE(layer.bias().data, nullptr);
  EXPECT_EQ(layer.bias().n, 5);
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(layer.bias().data[i], 0.0f);
  EXPECT_EQ(cpu::BinaryLinear(5, 256).bias().data, nullptr);

  // Row 2 becomes +1 throughout.
  const MutableWeightView row = layer.weights().row_range(2, 1);
  std::fill_n(row.bits + row.bits_offset, 8, ~0u);
  std::fill_n(row.scales + row.scales_offset, 2, to_float16(1.0f));
  aligned_vector<float> x(256, 2.0f);
  aligned_vector<float> y(5, -1.0f);
  layer(matrix_view(x.data(), 1, 256), matrix_view(y.data(), 1, 5));
  for (std::size_t n = 0; n < 5; ++n) EXPECT_FLOAT_EQ(y[n], n == 2 ? 512.0f : 0.0f);
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
