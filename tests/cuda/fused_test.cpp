/// The fused steps and the residual on CUDA give the reference's bits: every kernel, plainly and in
/// a graph, with programmatic dependent launch and without; and wrong arguments are refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends.h"
#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/reference.h"
#include "device_support.h"
#include "wgmma_shapes.h"

namespace binary_gemm {
namespace testing {
namespace {

using cuda::Kernel;

// Quantized activations on the host.
struct Quantized {
  Quantized(std::int64_t m, std::int64_t k) : values(m, k, 1), scales(1, m, 4) {}
  MutableActivationView view() {
    return activation_view(values.base<std::int8_t>(), scales.base<float>(), values.rows(),
                           values.cols());
  }
  GuardedBuffer values, scales;
};

::testing::AssertionResult equal(DeviceActivation& actual, const Quantized& expected) {
  const auto values = equal_bits(actual.values.fetch(), expected.values.view(DataType::kInt8));
  if (!values) return values;
  const auto scales = equal_bits(actual.scales.fetch(), expected.scales.view(DataType::kFloat32));
  if (!scales) return scales;
  const auto guards = actual.values.guards_intact();
  return guards ? actual.scales.guards_intact() : guards;
}

class CudaFused : public ModeTest {
 protected:
  DeviceActivation output(std::int64_t m, std::int64_t k, std::int64_t padding) const {
    return {m, k, padding, padding > 0 ? 3 : 0, padding > 0 ? 1 : 0, stream()};
  }

  // Lengths around a thread's vector, a CTA's share, and what is kept in registers.
  static std::vector<std::int64_t> lengths() {
    std::vector<std::int64_t> all;
    for (std::int64_t k = 0; k <= (reduced() ? 40 : 70); k += reduced() ? 13 : 1) all.push_back(k);
    for (const std::int64_t k :
         {255,   256,   257,   1024,  2047,  2048,  2049,  2056,  2304,  4088,
          4095,  4096,  4097,  4104,  5120,  8184,  8192,  8193,  8200,  11008,
          12000, 14336, 16384, 17408, 17416, 20001, 32768, 65536, 65544, 70000}) {
      if (!reduced() || k % 7 == 0) all.push_back(k);
    }
    return all;
  }

  void check_rms_norm(GuardedBuffer& x, DataType type, int gain_kind, float epsilon,
                      std::int64_t padding, Random& random) {
    const std::int64_t m = x.rows();
    const std::int64_t k = x.cols();
    const DataType gain_type = kFloatTypes[gain_kind % 3];
    GuardedBuffer gain(1, k, size_of(gain_type), 0, padding);
    fill_gaussian(gain.view(gain_type), random);
    const bool with_gain = gain_kind < 3;
    const DeviceBuffer x_device(x, stream());
    const DeviceBuffer gain_device(gain, stream());
    synchronize();
    Quantized expected(m, k);
    reference::rms_norm_quantize(
        x.view(type), with_gain ? ConstMatrixView(gain.view(gain_type)) : ConstMatrixView{},
        epsilon, expected.view());
    DeviceActivation q = output(m, k, padding);
    run([&] {
      cuda::rms_norm_quantize(
          x_device.view(x, type),
          with_gain ? ConstMatrixView(gain_device.view(gain, gain_type)) : ConstMatrixView{},
          epsilon, q.view(), launch());
    });
    ASSERT_TRUE(equal(q, expected)) << name(type) << " M=" << m << " K=" << k << " gain "
                                    << gain_kind << " padding " << padding;
    ASSERT_TRUE(x_device.equals(x, stream()));
    ASSERT_TRUE(gain_device.equals(gain, stream()));
  }

  void check_swiglu(GuardedBuffer& x, DataType type, std::int64_t padding) {
    const std::int64_t m = x.rows();
    const std::int64_t k = x.cols() / 2;
    const DeviceBuffer x_device(x, stream());
    Quantized expected(m, k);
    reference::swiglu_quantize(x.view(type), expected.view());
    DeviceActivation q = output(m, k, padding);
    run([&] { cuda::swiglu_quantize(x_device.view(x, type), q.view(), launch()); });
    ASSERT_TRUE(equal(q, expected))
        << name(type) << " M=" << m << " K=" << k << " padding " << padding;
    ASSERT_TRUE(x_device.equals(x, stream()));
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, CudaFused, ::testing::ValuesIn(kModes), mode_name);

// ---- The fused steps ----

TEST_P(CudaFused, RmsNormQuantizeOfEveryTypeLengthAndStride) {
  Random random(10);
  std::uint64_t index = 0;
  for (const std::int64_t k : lengths()) {
    for (const DataType type : kFloatTypes) {
      for (const std::int64_t padding : {0, 5, 16}) {
        if (thinned(++index)) continue;
        const std::int64_t m = k > 200 ? 1 + static_cast<std::int64_t>(index % 9) : 20;
        GuardedBuffer x(m, k, size_of(type), padding, padding / 2);
        fill_activations(x.view(type), random);
        if (m < 3) fill_gaussian(x.view(type), random);
        check_rms_norm(x, type, static_cast<int>(index / 2 % 4), index % 3 == 0 ? 0.0f : 1e-5f,
                       padding, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaFused, SwigluQuantizeOfEveryTypeLengthAndStride) {
  Random random(20);
  std::uint64_t index = 0;
  for (const std::int64_t k : lengths()) {
    for (const DataType type : kFloatTypes) {
      for (const std::int64_t padding : {0, 5, 16}) {
        if (thinned(++index)) continue;
        const std::int64_t m = k > 200 ? 1 + static_cast<std::int64_t>(index % 9) : 20;
        GuardedBuffer x(m, 2 * k, size_of(type), padding, padding / 2);
        fill_activations(x.view(type), random);
        if (m < 3) fill_gaussian(x.view(type), random, 10.0f);
        check_swiglu(x, type, padding);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaFused, EveryBatchTo5AndManyRows) {
  // With few rows a cluster shares one, with many a CTA has it.
  Random random(30);
  for (const std::int64_t m : {0, 1, 2, 3, 4, 5, 66, 67, 300}) {
    if (reduced() && m > 5) continue;
    GuardedBuffer x(m, 2 * 2560, 2);
    fill_gaussian(x.view(DataType::kBFloat16), random, 4.0f);
    if (m > 2) x.row<bfloat16>(1)[77] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
    check_swiglu(x, DataType::kBFloat16, 0);
    check_rms_norm(x, DataType::kBFloat16, 0, 1e-6f, 0, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaFused, SeventyThousandRows) {
  if (reduced()) GTEST_SKIP() << "not in the reduced set";
  Random random(35);
  GuardedBuffer x(70000, 64, 2);
  fill_activations(x.view(DataType::kBFloat16), random);
  check_swiglu(x, DataType::kBFloat16, 5);
  check_rms_norm(x, DataType::kBFloat16, 2, 1e-6f, 5, random);
}

TEST_P(CudaFused, SwigluOfAnyBits) {
  Random random(40);
  for (const DataType type : kFloatTypes) {
    GuardedBuffer x(reduced() ? 20 : 2000, 96, size_of(type));
    fill_any_bits(x, type, random);
    check_swiglu(x, type, 0);
    check_rms_norm(x, type, 1, 0.0f, 0, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaFused, OneRowManyTimes) {
  // A cluster's CTAs that exchange maxima too early or too late would show now and then.
  Random random(50);
  constexpr std::int64_t kK = 17408;
  constexpr int kTimes = 200;
  GuardedBuffer x(1, 2 * kK, 2);
  fill_gaussian(x.view(DataType::kBFloat16), random);
  x.row<bfloat16>(0)[kK - 1] = to_bfloat16(50.0f);  // the maximum is the last CTA's
  x.row<bfloat16>(0)[2 * kK - 1] = to_bfloat16(50.0f);
  Quantized expected(1, kK);
  reference::swiglu_quantize(x.view(DataType::kBFloat16), expected.view());
  const DeviceBuffer x_device(x, stream());
  std::vector<std::unique_ptr<DeviceActivation>> all;
  for (int i = 0; i < (reduced() ? 3 : kTimes); ++i) {
    all.push_back(std::make_unique<DeviceActivation>(1, kK, 0, 0, 0, stream()));
  }
  run([&] {
    for (const auto& q : all) {
      cuda::swiglu_quantize(x_device.view(x, DataType::kBFloat16), q->view(), launch());
    }
  });
  for (const auto& q : all) ASSERT_TRUE(equal(*q, expected));
}

// ---- The residual ----

TEST_P(CudaFused, ResidualByEveryKernelInPlaceAndNot) {
  Random random(60);
  std::uint64_t seed = 60;
  for (const std::int64_t g : {32, 128, 256}) {
    for (const std::int64_t k : {2 * kSliceK, kSliceK + g, 21 * kSliceK}) {
      for (const DataType type : kFloatTypes) {
        ++seed;
        if (thinned(seed) || (reduced() && (seed % 3 != 0 || k > 2 * kSliceK))) continue;
        const Layout layout = all_layouts()[seed % 3];
        const bool with_bias = seed / 2 % 2 == 0;
        Problem p = make_tall_problem({70, 35, k, g}, ScalePattern::kMixed,
                                      all_activation_patterns()[seed % 3], layout, seed);
        const DeviceProblem d(p, stream());
        // Strides that are not those of y.
        GuardedBuffer residual(70, 35, size_of(type), 3, 5);
        fill_activations(residual.view(type), random);
        const DeviceBuffer residual_device(residual, stream());
        GuardedBuffer expected = p.output(type);
        expected_gemm(p.x(), p.w(), {with_bias ? p.bias() : BiasView{}, residual.view(type)},
                      expected.view(type));
        for (const std::int64_t m : {1, 2, 3, 8, 13, 33, 70}) {
          const ConstMatrixView part = std::as_const(expected).view(type).row_range(70 - m, m);
          const MatrixView from = residual_device.view(residual, type).row_range(70 - m, m);
          for (const Kernel kernel : kernels_for(m, d.w())) {
            DeviceOutput y(p.output(type, m, 35), type, stream());
            run([&] {
              cuda::binary_gemm(d.x().row_range(70 - m, m), d.w(), {d.bias_if(with_bias), from},
                                y.view(), launch(kernel));
            });
            ASSERT_TRUE(equal_bits(y.fetch(), part))
                << cuda::name(kernel) << ' ' << Shape{m, 35, k, g} << ' ' << name(type) << ", bias "
                << with_bias << ", layout " << layout.name;
            ASSERT_TRUE(y.guards_intact());

            GuardedBuffer in_place(m, 35, size_of(type), layout.y_padding, layout.y_offset);
            for (std::int64_t row = 0; row < m; ++row) {
              for (std::int64_t n = 0; n < 35; ++n) {
                reference::store(
                    in_place.base<void>(), type, in_place.offset() + row * in_place.stride() + n,
                    reference::load(residual.base<void>(), type,
                                    residual.offset() + (70 - m + row) * residual.stride() + n));
              }
            }
            const DeviceBuffer on_device(in_place, stream());
            const MatrixView view = on_device.view(in_place, type);
            synchronize();
            run([&] {
              cuda::binary_gemm(d.x().row_range(70 - m, m), d.w(), {d.bias_if(with_bias), view},
                                view, launch(kernel));
            });
            on_device.download(in_place, stream());
            ASSERT_TRUE(equal_bits(in_place.view(type), part))
                << cuda::name(kernel) << ' ' << Shape{m, 35, k, g} << ' ' << name(type)
                << " in place, bias " << with_bias << ", layout " << layout.name;
            ASSERT_TRUE(in_place.guards_intact());
          }
        }
        ASSERT_TRUE(residual_device.equals(residual, stream()));
        ASSERT_TRUE(d.unchanged(stream()));
      }
    }
  }
}

// One CTA begins a tile, another adds the bias and the residual.
TEST_P(CudaFused, TilesThatAreCut) {
  if (!cuda::is_supported(Kernel::kWgmma, 17, 64, 1280, 128)) GTEST_SKIP() << "no wgmma here";
  if (reduced()) GTEST_SKIP() << "not in the reduced set";
  WgmmaTileShape shape;
  for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
    if (!kernels::may_be_cut(tile.row_groups, tile.turns, tile.tokens)) continue;
    shape = shape_of_tile(tile, true, device_attribute(cudaDevAttrMultiProcessorCount));
  }
  ASSERT_GT(shape.m, 0);
  Random random(65);
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat32}) {
    const Layout layout = all_layouts()[type == DataType::kFloat32 ? 1 : 0];
    Problem p = make_tall_problem({shape.m, shape.n, shape.k, 128}, ScalePattern::kMixed,
                                  ActivationPattern::kRandom, layout, 65);
    const DeviceProblem d(p, stream());
    GuardedBuffer residual(shape.m, shape.n, size_of(type), 3, 5);
    fill_gaussian(residual.view(type), random, 30.0f);
    const DeviceBuffer residual_device(residual, stream());
    for (const bool with_residual : {false, true}) {
      GuardedBuffer expected = p.output(type);
      expected_gemm(p.x(), p.w(),
                    {p.bias(), with_residual ? residual.view(type) : ConstMatrixView{}},
                    expected.view(type));
      DeviceOutput y(p.output(type), type, stream());
      run([&] {
        cuda::binary_gemm(
            d.x(), d.w(),
            {d.bias(), with_residual ? residual_device.view(residual, type) : ConstMatrixView{}},
            y.view(), launch(Kernel::kWgmma));
      });
      ASSERT_TRUE(equal_bits(y.fetch(), std::as_const(expected).view(type)))
          << Shape{shape.m, shape.n, shape.k, 128} << ' ' << name(type) << ", residual "
          << with_residual;
      ASSERT_TRUE(y.guards_intact());
    }
  }
}

// Rows that are read and written by four elements: whole parts of 64 rows of W, and one that is
// not.
TEST_P(CudaFused, ResidualByFoursOfEveryWgmmaTile) {
  if (!cuda::is_supported(Kernel::kWgmma, 17, 64, 1280, 128)) GTEST_SKIP() << "no wgmma here";
  if (reduced()) GTEST_SKIP() << "not in the reduced set";
  Random random(66);
  std::uint64_t seed = 660;
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
    const WgmmaTileShape shape = shape_of_tile(tile, false, multiprocessors);
    ASSERT_GT(shape.m, 0);
    for (const DataType type : kFloatTypes) {
      if (++seed % 2 == 0) continue;
      const bool with_bias = seed / 2 % 2 == 0;
      Layout layout = all_layouts()[0];
      layout.y_padding = (4 - shape.n % 4) % 4 + 4;
      Problem p = make_tall_problem({shape.m, shape.n, shape.k, 128}, ScalePattern::kMixed,
                                    ActivationPattern::kRandom, layout, seed);
      const DeviceProblem d(p, stream());
      GuardedBuffer residual(shape.m, shape.n, size_of(type), layout.y_padding + 8, 16);
      fill_gaussian(residual.view(type), random, 30.0f);
      DeviceBuffer residual_device(residual, stream());
      GuardedBuffer expected = p.output(type);
      expected_gemm(p.x(), p.w(), {with_bias ? p.bias() : BiasView{}, residual.view(type)},
                    expected.view(type));
      DeviceOutput y(p.output(type), type, stream());
      const MatrixView from = residual_device.view(residual, type);
      run([&] {
        cuda::binary_gemm(d.x(), d.w(), {d.bias_if(with_bias), from}, y.view(),
                          launch(Kernel::kWgmma));
      });
      ASSERT_TRUE(equal_bits(y.fetch(), std::as_const(expected).view(type)))
          << Shape{shape.m, shape.n, shape.k, 128} << ' ' << name(type) << ", bias " << with_bias;
      ASSERT_TRUE(y.guards_intact());
      ASSERT_TRUE(residual_device.equals(residual, stream()));
      run([&] {
        cuda::binary_gemm(d.x(), d.w(), {d.bias_if(with_bias), from}, from, launch(Kernel::kWgmma));
      });
      residual_device.download(residual, stream());
      ASSERT_TRUE(equal_bits(residual.view(type), std::as_const(expected).view(type)))
          << Shape{shape.m, shape.n, shape.k, 128} << ' ' << name(type) << " in place, bias "
          << with_bias;
      ASSERT_TRUE(residual.guards_intact());
    }
  }
}

TEST_P(CudaFused, LinearWithAResidual) {
  Random random(70);
  for (const DataType type : kFloatTypes) {
    Problem p = make_tall_problem({1, 40, 2 * kSliceK, 128}, ScalePattern::kNarrow,
                                  ActivationPattern::kRandom, all_layouts()[0], 70);
    const DeviceProblem d(p, stream());
    GuardedBuffer x(40, 2 * kSliceK, size_of(type));
    GuardedBuffer residual(40, 40, size_of(type));
    fill_gaussian(x.view(type), random);
    fill_gaussian(residual.view(type), random, 30.0f);
    const DeviceBuffer x_device(x, stream());
    const DeviceBuffer residual_device(residual, stream());
    GuardedBuffer expected(40, 40, size_of(type));
    expected_linear(x.view(type), p.w(), {p.bias(), residual.view(type)}, expected.view(type));
    for (const std::int64_t m : {1, 2, 7, 40}) {
      for (const Kernel kernel : kernels_for(m, d.w())) {
        DeviceWorkspace workspace(cuda::linear_workspace_bytes(m, 2 * kSliceK), stream());
        DeviceOutput y(GuardedBuffer(m, 40, size_of(type)), type, stream());
        run([&] {
          cuda::binary_linear(x_device.view(x, type).row_range(0, m), d.w(),
                              {d.bias(), residual_device.view(residual, type).row_range(0, m)},
                              y.view(), launch(kernel, workspace));
        });
        ASSERT_TRUE(equal_bits(y.fetch(), expected.view(type).row_range(0, m)))
            << cuda::name(kernel) << " M=" << m << ' ' << name(type);
        ASSERT_TRUE(workspace.guards_intact());
      }
    }
  }
}

// ---- A chain ----

// The example's step, of a few small layers, on both sides.
class CudaEngineStep : public CudaFused {
 protected:
  static constexpr engine::Sizes kSizes = {3, 512, 768, 2304, 1000};
  static constexpr DataType kType = DataType::kBFloat16;

  void add_weight(std::int64_t n, std::int64_t k, WeightView& host, WeightView& device) {
    problems_.push_back(std::make_unique<Problem>(
        make_problem({1, n, k, 128}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                     all_layouts()[0], 100 + problems_.size())));
    Problem& p = *problems_.back();
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t i = 0; i < k / 128; ++i) {
        // Of a size that keeps the residual stream finite.
        p.scales.row<float16>(row)[i] =
            to_float16(0.02f + 0.001f * static_cast<float>((row + i) % 7));
      }
    }
    on_device_.push_back(std::make_unique<DeviceProblem>(p, stream()));
    host = p.w();
    device = on_device_.back()->w();
  }
  void add_gain(ConstMatrixView& host, ConstMatrixView& device) {
    gains_.push_back(std::make_unique<GuardedBuffer>(1, kSizes.hidden, 2));
    GuardedBuffer& gain = *gains_.back();
    fill_gaussian(gain.view(kType), random_);
    gains_on_device_.push_back(std::make_unique<DeviceBuffer>(gain, stream()));
    host = gain.view(kType);
    device = gains_on_device_.back()->view(gain, kType);
  }
  void make_model() {
    for (std::int64_t i = 0; i < kSizes.layers; ++i) {
      engine::Layer host, device;
      add_gain(host.attention_gain, device.attention_gain);
      add_gain(host.mlp_gain, device.mlp_gain);
      add_weight(kSizes.qkv, kSizes.hidden, host.qkv, device.qkv);
      add_weight(kSizes.hidden, kSizes.hidden, host.out, device.out);
      add_weight(2 * kSizes.ffn, kSizes.hidden, host.gate_up, device.gate_up);
      add_weight(kSizes.hidden, kSizes.ffn, host.down, device.down);
      host_.layers.push_back(host);
      device_.layers.push_back(device);
    }
    add_gain(host_.final_gain, device_.final_gain);
    add_weight(kSizes.vocab, kSizes.hidden, host_.head, device_.head);
  }

  Random random_{90};
  engine::Model host_, device_;

 private:
  std::vector<std::unique_ptr<Problem>> problems_;
  std::vector<std::unique_ptr<DeviceProblem>> on_device_;
  std::vector<std::unique_ptr<GuardedBuffer>> gains_;
  std::vector<std::unique_ptr<DeviceBuffer>> gains_on_device_;
};
INSTANTIATE_TEST_SUITE_P(Modes, CudaEngineStep, ::testing::ValuesIn(kModes), mode_name);

TEST_P(CudaEngineStep, IsThatOfTheCpu) {
  make_model();
  for (const std::int64_t m : {1, 2, 5, 40}) {
    if (reduced() && m > 2) continue;
    GuardedBuffer x(m, kSizes.hidden, 2);
    fill_gaussian(x.view(kType), random_);
    const DeviceBuffer x_device(x, stream());
    GuardedBuffer qkv(m, kSizes.qkv, 2), gate_up(m, 2 * kSizes.ffn, 2), logits(m, kSizes.vocab, 4);
    Quantized q(m, kSizes.hidden), q_ffn(m, kSizes.ffn);
    DeviceOutput qkv_device(GuardedBuffer(m, kSizes.qkv, 2), kType, stream());
    DeviceOutput gate_up_device(GuardedBuffer(m, 2 * kSizes.ffn, 2), kType, stream());
    DeviceOutput logits_device(GuardedBuffer(m, kSizes.vocab, 4), DataType::kFloat32, stream());
    DeviceActivation q_device = output(m, kSizes.hidden, 0);
    DeviceActivation q_ffn_device = output(m, kSizes.ffn, 0);
    const engine::State on_device{x_device.view(x, kType), qkv_device.view(), gate_up_device.view(),
                                  logits_device.view(),    q_device.view(),   q_ffn_device.view()};
    synchronize();
    run([&] { engine::decode_step(engine::Cuda{launch()}, device_, on_device); });
    // After the upload of x: this writes it.
    engine::decode_step(engine::Cpu{{1}}, host_,
                        {x.view(kType), qkv.view(kType), gate_up.view(kType),
                         logits.view(DataType::kFloat32), q.view(), q_ffn.view()});
    ASSERT_TRUE(std::isfinite(logits.row<float>(0)[0])) << "such a chain would test nothing";
    EXPECT_TRUE(equal_bits(logits_device.fetch(), logits.view(DataType::kFloat32))) << "M=" << m;
    EXPECT_TRUE(x_device.equals(x, stream())) << "M=" << m;
    EXPECT_TRUE(logits_device.guards_intact());
  }
}

TEST_P(CudaFused, ProductsThatShareAnActivation) {
  Random random(80);
  Problem p = make_problem({3, 48, 1024, 128}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts()[0], 80);
  const DeviceProblem d(p, stream());
  GuardedBuffer x(3, 1024, 2);
  fill_gaussian(x.view(DataType::kBFloat16), random);
  const DeviceBuffer x_device(x, stream());
  for (const std::int64_t m : {1, 3}) {
    Quantized q(m, 1024);
    cpu::rms_norm_quantize(x.view(DataType::kBFloat16).row_range(0, m), {}, 1e-6f, q.view());
    GuardedBuffer expected(m, 48, 2);
    cpu::binary_gemm(q.view(), p.w(), {}, expected.view(DataType::kBFloat16));
    DeviceActivation q_device = output(m, 1024, 0);
    DeviceOutput y(GuardedBuffer(m, 48, 2), DataType::kBFloat16, stream());
    run([&] {
      cuda::rms_norm_quantize(x_device.view(x, DataType::kBFloat16).row_range(0, m), {}, 1e-6f,
                              q_device.view(), launch());
      for (const auto& [begin, count] : {std::pair{0, 32}, std::pair{32, 8}, std::pair{40, 8}}) {
        cuda::binary_gemm(q_device.view(), d.w().row_range(begin, count), {},
                          y.view().column_range(begin, count), launch());
      }
    });
    EXPECT_TRUE(equal_bits(y.fetch(), expected.view(DataType::kBFloat16)));
  }
}

// ---- Wrong arguments ----

class CudaFusedBadInput : public DeviceTest {};

TEST_F(CudaFusedBadInput, IsRefusedAndNothingWritten) {
  constexpr std::int64_t kM = 3, kN = 4, kK = 256;
  constexpr DataType kType = DataType::kBFloat16;
  Random random(1);
  Problem p = make_problem({kM, kN, kK, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts()[0], 1);
  const DeviceProblem d(p, stream());
  GuardedBuffer x_host(kM, 2 * kK, 2), gain_host(1, kK, 2), residual_host(kM, kN, 2);
  for (GuardedBuffer* buffer : {&x_host, &gain_host, &residual_host}) {
    fill_gaussian(buffer->view(kType), random);
  }
  const DeviceBuffer x_buffer(x_host, stream());
  const DeviceBuffer gain_buffer(gain_host, stream());
  const DeviceBuffer residual_buffer(residual_host, stream());
  const ConstMatrixView gate_up = x_buffer.view(x_host, kType);
  const ConstMatrixView x = gate_up.column_range(0, kK);
  const ConstMatrixView gain = gain_buffer.view(gain_host, kType);
  const ConstMatrixView residual = residual_buffer.view(residual_host, kType);
  DeviceActivation q(kM, kK, 0, 0, 0, stream());
  DeviceOutput y(GuardedBuffer(kM, kN, 2), kType, stream());
  synchronize();
  const cuda::Launch launch{stream()};
  const auto refused = [](const std::function<void()>& call, const Parts& parts) {
    expect_invalid(call, parts);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  };
  const auto norm = [&](const ConstMatrixView& a, const ConstMatrixView& b, float epsilon,
                        const Parts& parts) {
    refused([&] { cuda::rms_norm_quantize(a, b, epsilon, q.view(), launch); }, parts);
  };
  norm(x, gain, -1.0f, {"epsilon = -1"});
  norm(x, gain, std::numeric_limits<float>::quiet_NaN(), {"epsilon = nan"});
  norm(x, gain.column_range(0, 100), 1e-6f, {"gain is [1, 100]", "[1, 256]"});
  norm(gate_up, gain, 1e-6f, {"x is [3, 512]", "[3, 256]"});
  norm(x_host.view(kType).column_range(0, kK), gain, 1e-6f, {"x", "host"});
  norm(x, gain_host.view(kType), 1e-6f, {"gain", "host"});
  const auto swiglu = [&](const ConstMatrixView& a, const Parts& parts) {
    refused([&] { cuda::swiglu_quantize(a, q.view(), launch); }, parts);
  };
  swiglu(x, {"gate_up is [3, 256]", "[3, 512]"});
  swiglu(x_host.view(kType), {"gate_up", "host"});
  const auto product = [&](const ConstMatrixView& r, const Parts& parts) {
    refused([&] { cuda::binary_gemm(d.x(), d.w(), {d.bias(), r}, y.view(), launch); }, parts);
  };
  product(residual_host.view(kType), {"residual", "host"});
  product(residual.row_range(0, 2), {"residual is [2, 4]", "[3, 4]"});
  ConstMatrixView bad = residual;
  bad.type = DataType::kFloat16;
  product(bad, {"residual", "float16", "bfloat16"});
  bad = y.view();
  bad.offset += 1;
  bad.row_stride += 1;
  product(bad, {"y overlaps residual"});
  cuda::Launch overlapping = launch;
  overlapping.workspace = {const_cast<void*>(residual.data), std::size_t{1} << 20};
  refused(
      [&] {
        cuda::binary_linear(x, d.w(), {d.bias(), residual}, y.view(), overlapping);
      },
      {"the workspace overlaps"});

  EXPECT_TRUE(x_buffer.equals(x_host, stream()));
  EXPECT_TRUE(residual_buffer.equals(residual_host, stream()));
  EXPECT_TRUE(d.unchanged(stream()));
  q.values.fetch();
  q.scales.fetch();
  y.fetch();
  EXPECT_TRUE(q.values.host().untouched());
  EXPECT_TRUE(q.scales.host().untouched());
  EXPECT_TRUE(y.host().untouched());
}

TEST_F(CudaFusedBadInput, RowsButNoColumns) {
  DeviceOutput scales(GuardedBuffer(1, 5, 4), DataType::kFloat32, stream());
  const auto q = activation_view(static_cast<std::int8_t*>(nullptr),
                                 static_cast<float*>(scales.view().data), 5, 0);
  const cuda::Launch launch{stream()};
  const auto nothing = matrix_view(static_cast<const float*>(nullptr), 5, 0);
  cuda::rms_norm_quantize(nothing, {}, 0, q, launch);
  scales.fetch();
  for (int m = 0; m < 5; ++m) EXPECT_EQ(float_bits(scales.host().row<float>(0)[m]), 0u);
  DeviceOutput others(GuardedBuffer(1, 5, 4), DataType::kFloat32, stream());
  cuda::swiglu_quantize(nothing,
                        activation_view(static_cast<std::int8_t*>(nullptr),
                                        static_cast<float*>(others.view().data), 5, 0),
                        launch);
  others.fetch();
  for (int m = 0; m < 5; ++m) EXPECT_EQ(float_bits(others.host().row<float>(0)[m]), 0u);
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
