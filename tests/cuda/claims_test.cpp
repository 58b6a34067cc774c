/// The claims that any user would check, on the GPU; and that packing gives the CPU's bits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/reference.h"
#include "device_support.h"

namespace binary_gemm {
namespace testing {
namespace {

using cuda::Kernel;

constexpr DataType kAllTypes[] = {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                  DataType::kInt8};

void fill_dense(GuardedBuffer& dense, DataType type, Random& random) {
  if (type != DataType::kInt8) {
    fill_gaussian(dense.view(type), random, 0.02f);
    return;
  }
  for (std::int64_t r = 0; r < dense.rows(); ++r) {
    for (std::int64_t c = 0; c < dense.cols(); ++c) {
      dense.row<std::int8_t>(r)[c] = static_cast<std::int8_t>(random.integer(-128, 127));
    }
  }
}

class CudaClaims : public ModeTest {
 protected:
  // binary_linear into a new output.
  DeviceOutput linear(GuardedBuffer& x, DataType x_type, const WeightView& w, const BiasView& bias,
                      DataType y_type) const {
    const DeviceBuffer x_device(x, stream());
    const DeviceWorkspace workspace(cuda::linear_workspace_bytes(x.rows(), x.cols()), stream());
    DeviceOutput y(GuardedBuffer(x.rows(), w.n, size_of(y_type)), y_type, stream());
    run([&] {
      cuda::binary_linear(x_device.view(x, x_type), w, bias, y.view(),
                          launch(Kernel::kAuto, workspace));
    });
    synchronize();
    return y;
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, CudaClaims, ::testing::ValuesIn(kModes), mode_name);

// ---- Packing ----

TEST_P(CudaClaims, UnpackOfPackIsTheWeights) {
  Random random(1);
  for (const DataType type : kAllTypes) {
    for (const std::int64_t g : kGroupSizes) {
      for (const std::int64_t k : {g, 3 * g, 1024 + g}) {
        for (const std::int64_t n : {1, 5, 64}) {
          for (const Layout& layout : all_layouts()) {
            const bool with_scales = type != DataType::kInt8;
            GuardedBuffer dense(n, k, size_of(type), layout.y_padding, layout.y_offset);
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
            const DeviceBuffer source(dense, stream());
            DeviceWeights packed(n, k, g, layout, stream());
            DeviceOutput back(GuardedBuffer(n, k, size_of(type), layout.y_padding, layout.y_offset),
                              type, stream());
            run([&] {
              cuda::pack_weights(source.view(dense, type), packed.view(with_scales), launch());
              cuda::unpack_weights(packed.view(with_scales), back.view(), launch());
            });
            packed.fetch();
            ASSERT_TRUE(equal_bits(back.fetch(), dense.view(type)))
                << name(type) << " N=" << n << " K=" << k << " G=" << g << ' ' << layout.name;
            for (const DeviceOutput* buffer : {&packed.bits, &packed.scales, &back}) {
              ASSERT_TRUE(buffer->guards_intact());
            }
            ASSERT_TRUE(source.equals(dense, stream()));
            if (!with_scales) {
              ASSERT_TRUE(packed.scales.host().untouched());
            }
          }
        }
      }
    }
  }
}

TEST_P(CudaClaims, PackIsTheCpus) {
  Random random(2);
  for (const DataType type : kAllTypes) {
    for (const std::int64_t g : kGroupSizes) {
      for (const std::int64_t k : {g, 5 * g, 2048 + g, std::int64_t{5120}}) {
        for (const Layout& layout : all_layouts()) {
          for (const bool with_scales : {true, false}) {
            const std::int64_t n = 1 + random.integer(0, 30);
            GuardedBuffer dense(n, k, size_of(type), layout.x_padding, layout.x_offset);
            fill_dense(dense, type, random);
            if (type != DataType::kInt8) {
              // Zeros of both signs, subnormals, and groups whose mean is none.
              const auto set = [&](std::int64_t c, float value) {
                reference::store(dense.base<void>(), type, dense.offset() + c, value);
              };
              set(0, 0.0f);
              set(1, -0.0f);
              set(2, 0x1p-24f);
              set(3, -0x1p-24f);
              if (k > g) set(g, std::numeric_limits<float>::infinity());
              if (k > 2 * g) set(2 * g, std::numeric_limits<float>::quiet_NaN());
              if (k > 3 * g) set(3 * g + 1, -65504.0f);
            }
            const DeviceBuffer source(dense, stream());
            DeviceWeights packed(n, k, g, layout, stream());
            DeviceWeights expected(n, k, g, layout, stream());
            cpu::pack_weights(dense.view(type), expected.host_view(with_scales));
            run([&] {
              cuda::pack_weights(source.view(dense, type), packed.view(with_scales), launch());
            });
            packed.fetch();
            const auto same = [&](DeviceOutput& actual, DeviceOutput& wanted, DataType as) {
              return equal_bits(actual.host().view(as), wanted.host().view(as));
            };
            // As bytes, where no value is a NaN.
            for (std::int64_t r = 0; r < n; ++r) {
              ASSERT_TRUE(std::equal(packed.bits.host().row<std::uint32_t>(r),
                                     packed.bits.host().row<std::uint32_t>(r) + k / 32,
                                     expected.bits.host().row<std::uint32_t>(r)))
                  << name(type) << " N=" << n << " K=" << k << " G=" << g << " row " << r;
            }
            ASSERT_TRUE(same(packed.scales, expected.scales, DataType::kFloat16))
                << name(type) << " N=" << n << " K=" << k << " G=" << g << ' ' << layout.name;
            ASSERT_TRUE(packed.bits.guards_intact());
            ASSERT_TRUE(packed.scales.guards_intact());
            if (!with_scales) {
              ASSERT_TRUE(packed.scales.host().untouched());
            }
          }
        }
      }
    }
  }
}

TEST_P(CudaClaims, UnpackIsTheCpus) {
  for (const std::int64_t g : kGroupSizes) {
    for (const Layout& layout : all_layouts()) {
      Problem p = make_problem({1, 9, 1024 + g, g}, ScalePattern::kAnyBits,
                               ActivationPattern::kRandom, layout, 3);
      const DeviceProblem d(p, stream());
      for (const DataType type : kAllTypes) {
        for (const bool with_scales : {true, false}) {
          if (with_scales && type == DataType::kInt8) continue;
          const auto output = [&] {
            return GuardedBuffer(9, 1024 + g, size_of(type), layout.x_padding, layout.x_offset);
          };
          WeightView w = p.w();
          WeightView device_w = d.w();
          if (!with_scales) w.scales = device_w.scales = nullptr;
          GuardedBuffer expected = output();
          cpu::unpack_weights(w, expected.view(type));
          DeviceOutput dense(output(), type, stream());
          run([&] { cuda::unpack_weights(device_w, dense.view(), launch()); });
          ASSERT_TRUE(equal_bits(dense.fetch(), expected.view(type)))
              << name(type) << " G=" << g << ' ' << layout.name;
          ASSERT_TRUE(dense.guards_intact());
        }
      }
      EXPECT_TRUE(d.unchanged(stream()));
    }
  }
}

// ---- Products ----

TEST_P(CudaClaims, UnitScalesGiveTheExactIntegerProduct) {
  for (const DataType type : kFloatTypes) {
    std::int64_t held = 0;
    for (const std::int64_t g : kGroupSizes) {
      std::vector<std::int64_t> all_k = interesting_k(g);
      all_k.push_back(2048);
      for (const std::int64_t k : all_k) {
        Problem p = make_problem({5, 9, k, g}, ScalePattern::kUnit, ActivationPattern::kRandom,
                                 all_layouts()[0], static_cast<std::uint64_t>(k));
        std::fill_n(p.x_scales.row<float>(0), 5, 1.0f);
        const DeviceProblem d(p, stream());
        for (const std::int64_t m : {1, 5}) {
          for (const Kernel kernel : kernels_for(m, d.w())) {
            DeviceOutput y(p.output(type, m, 9), type, stream());
            run([&] {
              cuda::binary_gemm(d.x().row_range(0, m), d.w(), {}, y.view(), launch(kernel));
            });
            const ConstMatrixView result = y.fetch();
            for (std::int64_t i = 0; i < m; ++i) {
              for (std::int64_t n = 0; n < 9; ++n) {
                std::int32_t product = 0;
                for (std::int64_t j = 0; j < k; ++j) {
                  const bool bit = (p.bits.row<std::uint32_t>(n)[j / 32] >> (j % 32) & 1u) != 0;
                  product += (bit ? 1 : -1) * p.values.row<std::int8_t>(i)[j];
                }
                const auto exact = static_cast<float>(product);
                const bool holds =
                    type == DataType::kFloat32 ||
                    (type == DataType::kFloat16 ? to_float(to_float16(exact))
                                                : to_float(to_bfloat16(exact))) == exact;
                if (!holds) continue;
                ++held;
                ASSERT_EQ(
                    reference::load(result.data, type, result.offset + i * result.row_stride + n),
                    exact)
                    << cuda::name(kernel) << ' ' << p.shape << " m=" << i << " n=" << n;
              }
            }
          }
        }
      }
    }
    EXPECT_GT(held, 100) << name(type);
  }
}

TEST_P(CudaClaims, CloseToTheFloat64Product) {
  // Row by row, so that no bad row hides in the norm of the whole.
  for (const std::int64_t g : kGroupSizes) {
    for (const ScalePattern scales :
         {ScalePattern::kNarrow, ScalePattern::kMixed, ScalePattern::kNegative}) {
      const std::int64_t k = 2048 + g;
      Problem p = make_problem({7, 67, k, g}, scales, ActivationPattern::kRandom, all_layouts()[1],
                               static_cast<std::uint64_t>(k));
      const DeviceProblem d(p, stream());
      GuardedBuffer w(67, k, 4);
      cpu::unpack_weights(p.w(), w.view(DataType::kFloat32));
      DeviceOutput y(p.output(DataType::kBFloat16), DataType::kBFloat16, stream());
      run([&] { cuda::binary_gemm(d.x(), d.w(), d.bias(), y.view(), launch()); });
      const ConstMatrixView result = y.fetch();
      for (std::int64_t m = 0; m < 7; ++m) {
        double error = 0;
        double norm = 0;
        for (std::int64_t n = 0; n < 67; ++n) {
          double exact = p.bias_data.row<float>(0)[n];
          for (std::int64_t i = 0; i < k; ++i) {
            exact += static_cast<double>(p.x_scales.row<float>(0)[m]) *
                     p.values.row<std::int8_t>(m)[i] * static_cast<double>(w.row<float>(n)[i]);
          }
          const double got =
              reference::load(result.data, result.type, result.offset + m * result.row_stride + n);
          error += (got - exact) * (got - exact);
          norm += exact * exact;
        }
        EXPECT_LT(std::sqrt(error / norm), 0x1p-8) << p.shape << " m=" << m << ' ' << name(scales);
      }
    }
  }
}

TEST_P(CudaClaims, RepeatedRunsAreEqual) {
  for (const std::int64_t k : {std::int64_t{2240}, std::int64_t{5120}}) {
    Problem p = make_problem({40, 131, k, 64}, ScalePattern::kMixed, ActivationPattern::kRandom,
                             all_layouts()[k == 2240 ? 2 : 0], 5);
    const DeviceProblem d(p, stream());
    for (const std::int64_t m : {1, 3, 8, 17, 40}) {
      for (const Kernel kernel : kernels_for(m, d.w())) {
        GuardedBuffer first = p.output(DataType::kFloat32, m, 131);
        for (int i = 0; i < 20; ++i) {
          DeviceOutput y(p.output(DataType::kFloat32, m, 131), DataType::kFloat32, stream());
          run([&] {
            cuda::binary_gemm(d.x().row_range(0, m), d.w(), d.bias(), y.view(), launch(kernel));
          });
          const ConstMatrixView result = y.fetch();
          if (i == 0) {
            std::copy_n(y.host().raw(), y.host().raw_bytes(), first.raw());
          } else {
            ASSERT_TRUE(equal_bits(result, first.view(DataType::kFloat32)))
                << cuda::name(kernel) << " M=" << m << " K=" << k << ", run " << i;
          }
        }
      }
    }
  }
}

TEST_P(CudaClaims, ATokenDoesNotDependOnItsBatch) {
  constexpr DataType kType = DataType::kBFloat16;
  for (const std::int64_t k : {std::int64_t{1344}, std::int64_t{2048}}) {
    Problem p = make_problem({130, 33, k, 64}, ScalePattern::kMixed, ActivationPattern::kPoisoned,
                             all_layouts()[k == 1344 ? 2 : 0], 6);
    const DeviceProblem d(p, stream());
    DeviceOutput whole(p.output(kType), kType, stream());
    run([&] { cuda::binary_gemm(d.x(), d.w(), d.bias(), whole.view(), launch()); });
    const ConstMatrixView expected = whole.fetch();
    for (const std::int64_t batch : {1, 2, 3, 4, 7, 13, 32, 65}) {
      for (std::int64_t m = 0; m + batch <= 130; m += batch) {
        DeviceOutput part(p.output(kType, batch, 33), kType, stream());
        run([&] {
          cuda::binary_gemm(d.x().row_range(m, batch), d.w(), d.bias(), part.view(), launch());
        });
        ASSERT_TRUE(equal_bits(part.fetch(), expected.row_range(m, batch)))
            << "tokens from " << m << ", a batch of " << batch;
      }
    }
  }
}

TEST_P(CudaClaims, APoisonedTokenSpoilsNoOther) {
  constexpr DataType kType = DataType::kFloat32;
  for (const std::int64_t m : {3, 11, 35}) {
    Problem p = make_problem({1, 33, 1024, 128}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                             all_layouts()[0], 7);
    const DeviceProblem d(p, stream());
    Random random(7);
    GuardedBuffer x(m, 1024, 4);
    fill_gaussian(x.view(kType), random);
    DeviceOutput clean = linear(x, kType, d.w(), {}, kType);
    const ConstMatrixView expected = clean.fetch();
    for (const float poison :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
      x.row<float>(1)[777] = poison;
      DeviceOutput y = linear(x, kType, d.w(), {}, kType);
      const ConstMatrixView result = y.fetch();
      EXPECT_TRUE(equal_bits(result.row_range(0, 1), expected.row_range(0, 1)));
      EXPECT_TRUE(equal_bits(result.row_range(2, m - 2), expected.row_range(2, m - 2)));
      for (std::int64_t n = 0; n < 33; ++n) {
        EXPECT_TRUE(std::isnan(y.host().row<float>(1)[n]));
      }
    }
  }
}

TEST_P(CudaClaims, ActivationsComeBackWithinHalfAStep) {
  Random random(4);
  for (const DataType type : kFloatTypes) {
    GuardedBuffer x(64, 515, size_of(type));
    fill_gaussian(x.view(type), random, 3.0f);
    const DeviceBuffer source(x, stream());
    DeviceActivation q(64, 515, 0, 0, 0, stream());
    run([&] { cuda::quantize_activation(source.view(x, type), q.view(), launch()); });
    q.values.fetch();
    q.scales.fetch();
    for (std::int64_t m = 0; m < 64; ++m) {
      const auto value = [&](std::int64_t k) {
        return static_cast<double>(reference::load(x.base<void>(), type, m * 515 + k));
      };
      double largest = 0;
      for (std::int64_t k = 0; k < 515; ++k) largest = std::max(largest, std::abs(value(k)));
      for (std::int64_t k = 0; k < 515; ++k) {
        const double back = static_cast<double>(q.scales.host().row<float>(0)[m]) *
                            q.values.host().row<std::int8_t>(m)[k];
        // Beside half a step, the three fp32 roundings of 127 / a, x (127 / a) and a / 127.
        const double bound = (0.5 + 3 * 127 * 0x1p-24) / 127 * largest;
        ASSERT_LE(std::abs(back - value(k)), bound);
      }
    }
  }
}

TEST_P(CudaClaims, AFusedOutputMayInterleaveWithItsInput) {
  // x in the left columns of one buffer and y in the right ones.
  constexpr DataType kType = DataType::kBFloat16;
  for (const std::int64_t m : {1, 6, 40}) {
    Problem p = make_problem({1, 24, 128, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                             all_layouts()[0], 11);
    const DeviceProblem d(p, stream());
    Random random(11);
    GuardedBuffer buffer(m, 128 + 24, 2);
    fill_gaussian(buffer.view(kType).column_range(0, 128), random);
    GuardedBuffer expected(m, 128 + 24, 2);
    std::copy_n(buffer.raw(), buffer.raw_bytes(), expected.raw());
    expected_linear(buffer.view(kType).column_range(0, 128), p.w(), {},
                    expected.view(kType).column_range(128, 24));
    const DeviceBuffer on_device(buffer, stream());
    const MatrixView view = on_device.view(buffer, kType);
    const DeviceWorkspace workspace(cuda::linear_workspace_bytes(m, 128), stream());
    run([&] {
      cuda::binary_linear(view.column_range(0, 128), d.w(), {}, view.column_range(128, 24),
                          launch(Kernel::kAuto, workspace));
    });
    EXPECT_TRUE(on_device.equals(expected, stream()));
  }
}

// ---- BinaryLinear ----

TEST_P(CudaClaims, LinearFromDense) {
  Random random(14);
  for (const std::int64_t g : kGroupSizes) {
    for (const DataType type : kFloatTypes) {
      for (const char* const bias_at : {"none", "host", "device"}) {
        SCOPED_TRACE(std::string("bias: ") + bias_at);
        GuardedBuffer dense(19, 9 * g, size_of(type), 3, 1);
        fill_gaussian(dense.view(type), random, 0.05f);
        GuardedBuffer bias(1, 19, 4, 0, 2);
        fill_gaussian(bias.view(DataType::kFloat32), random);
        const bool with_bias = std::string(bias_at) != "none";
        const BiasView host_bias =
            with_bias ? BiasView{bias.base<float>(), 19, bias.offset()} : BiasView{};
        const DeviceBuffer dense_device(dense, stream());
        const DeviceBuffer bias_device(bias, stream());
        BiasView device_bias = host_bias;
        if (std::string(bias_at) == "device") device_bias.data = bias_device.base<float>();
        const cuda::BinaryLinear layer = cuda::BinaryLinear::from_dense(
            dense_device.view(dense, type), g, device_bias, launch());
        EXPECT_EQ(layer.n(), 19);
        EXPECT_EQ(layer.k(), 9 * g);
        EXPECT_EQ(layer.group_size(), g);
        EXPECT_EQ(layer.bias().data != nullptr, with_bias);

        const cpu::BinaryLinear expected_layer =
            cpu::BinaryLinear::from_dense(dense.view(type), g, host_bias);
        GuardedBuffer x(4, 9 * g, 4);
        fill_gaussian(x.view(DataType::kFloat32), random);
        GuardedBuffer expected(4, 19, 4);
        expected_layer(x.view(DataType::kFloat32), expected.view(DataType::kFloat32));
        const DeviceBuffer x_device(x, stream());
        const DeviceWorkspace workspace(cuda::linear_workspace_bytes(4, 9 * g), stream());
        DeviceOutput y(GuardedBuffer(4, 19, 4), DataType::kFloat32, stream());
        run([&] {
          layer(x_device.view(x, DataType::kFloat32), y.view(), launch(Kernel::kAuto, workspace));
        });
        EXPECT_TRUE(equal_bits(y.fetch(), expected.view(DataType::kFloat32)));
        EXPECT_TRUE(y.guards_intact());
      }
    }
  }
}

TEST_P(CudaClaims, LinearFromPackedOwnsACopy) {
  constexpr DataType kType = DataType::kFloat32;
  for (const bool from_device : {false, true}) {
    SCOPED_TRACE(from_device ? "from the device" : "from the host");
    Problem p = make_problem({1, 19, 1344, 64}, ScalePattern::kMixed, ActivationPattern::kRandom,
                             all_layouts()[2], 15);
    DeviceProblem d(p, stream());
    Random random(15);
    GuardedBuffer x(4, 1344, 4);
    fill_gaussian(x.view(kType), random);
    GuardedBuffer expected(4, 19, 4);
    expected_linear(x.view(kType), p.w(), p.bias(), expected.view(kType));
    cuda::BinaryLinear layer = from_device
                                   ? cuda::BinaryLinear::from_packed(d.w(), d.bias(), launch())
                                   : cuda::BinaryLinear::from_packed(p.w(), p.bias(), launch());
    for (std::int64_t n = 0; n < 19; ++n) {  // the layer must not look at these again
      std::fill_n(p.bits.row<std::uint32_t>(n), 42, 0u);
      std::fill_n(p.scales.row<float16>(n), 21, float16{0x7e00});
      p.bias_data.row<float>(0)[n] = 1e30f;
    }
    d.bits.upload(p.bits, stream());
    d.scales.upload(p.scales, stream());
    d.bias_data.upload(p.bias_data, stream());

    const DeviceBuffer x_device(x, stream());
    const DeviceWorkspace workspace(cuda::linear_workspace_bytes(4, 1344), stream());
    const auto expect_good = [&](const cuda::BinaryLinear& one) {
      DeviceOutput y(GuardedBuffer(4, 19, 4), kType, stream());
      run([&] { one(x_device.view(x, kType), y.view(), launch(Kernel::kAuto, workspace)); });
      EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));
    };
    expect_good(layer);
    cuda::BinaryLinear moved = std::move(layer);
    expect_good(moved);
    cuda::BinaryLinear assigned(5, 64, 32, true);
    assigned = std::move(moved);
    EXPECT_EQ(assigned.n(), 19);
    EXPECT_EQ(assigned.k(), 1344);
    EXPECT_EQ(assigned.group_size(), 64);
    expect_good(assigned);
  }
}

TEST_P(CudaClaims, LinearStartsAtZeroAndCanBeFilled) {
  cuda::BinaryLinear layer(5, 256, 128, /*has_bias=*/true);
  ASSERT_NE(layer.bias().data, nullptr);
  EXPECT_EQ(layer.bias().n, 5);
  EXPECT_EQ(cuda::BinaryLinear(5, 256).bias().data, nullptr);
  GuardedBuffer x(1, 256, 4);
  std::fill_n(x.row<float>(0), 256, 2.0f);
  DeviceOutput zeros = linear(x, DataType::kFloat32, std::as_const(layer).weights(), layer.bias(),
                              DataType::kFloat32);
  zeros.fetch();
  for (std::int64_t n = 0; n < 5; ++n) EXPECT_EQ(zeros.host().row<float>(0)[n], 0.0f);

  // Row 2 becomes +1 throughout.
  GuardedBuffer ones(1, 256, 4);
  std::fill_n(ones.row<float>(0), 256, 1.0f);
  const DeviceBuffer ones_device(ones, stream());
  cuda::pack_weights(ones_device.view(ones, DataType::kFloat32), layer.weights().row_range(2, 1),
                     {stream()});
  synchronize();
  DeviceOutput y = linear(x, DataType::kFloat32, std::as_const(layer).weights(), layer.bias(),
                          DataType::kFloat32);
  y.fetch();
  for (std::int64_t n = 0; n < 5; ++n) {
    EXPECT_FLOAT_EQ(y.host().row<float>(0)[n], n == 2 ? 512.0f : 0.0f);
  }
}

// ---- Choice ----

class CudaChoice : public DeviceTest {};

TEST_F(CudaChoice, IsOfAKernelThatTakesTheShape) {
  const std::vector<Kernel> kernels = cuda::supported_kernels();
  EXPECT_FALSE(kernels.empty());
  for (const Kernel kernel : kernels) {
    EXPECT_NE(kernel, Kernel::kAuto);
    EXPECT_STRNE(cuda::name(kernel), "auto");
  }
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {g, 4096 + g, std::int64_t{17408}}) {
      for (const std::int64_t n : {1, 5120, 248320}) {
        for (std::int64_t m = 1; m <= 70000; m = m < 300 ? m + 1 : m * 2) {
          const Kernel choice = cuda::choose_kernel(m, n, k, g);
          ASSERT_NE(choice, Kernel::kAuto) << Shape{m, n, k, g};
          ASSERT_TRUE(cuda::is_supported(choice, m, n, k, g)) << Shape{m, n, k, g};
          ASSERT_EQ(std::count(kernels.begin(), kernels.end(), choice), 1) << Shape{m, n, k, g};
        }
      }
    }
  }
}

TEST_F(CudaChoice, NamesAreKnown) {
  EXPECT_STREQ(cuda::name(Kernel::kAuto), "auto");
  EXPECT_STREQ(cuda::name(Kernel::kDecodeB1), "decode_b1");
  EXPECT_STREQ(cuda::name(Kernel::kDecodeS8), "decode_s8");
  EXPECT_STREQ(cuda::name(Kernel::kMma), "mma");
  EXPECT_STREQ(cuda::name(Kernel::kWgmma), "wgmma");
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
