/// Sizes that 32 bits do not hold: many tokens, many outputs, rows far apart.
///
/// A test whose memory the device does not have skips.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
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

constexpr DataType kType = DataType::kBFloat16;

// Device memory without a copy on the host.
class Block {
 public:
  explicit Block(std::size_t bytes) { BINARY_GEMM_CHECK_CUDA(cudaMalloc(&data_, bytes)); }
  ~Block() { cudaFree(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

bool fits(std::size_t bytes) { return bytes + (std::size_t{1} << 29) <= free_memory(); }

class CudaLarge : public ModeTest {
 protected:
  void copy(void* to, const void* from, std::int64_t bytes) const {
    BINARY_GEMM_CHECK_CUDA(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream()));
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, CudaLarge, ::testing::Values(Mode{false, false}, Mode{true, true}),
                         mode_name);

TEST_P(CudaLarge, SeventyThousandTokens) {
  constexpr std::int64_t kM = 70000;
  constexpr std::int64_t kN = 40;
  for (const auto& [k, g] : {std::pair{std::int64_t{1024}, std::int64_t{128}}, {288, 32}}) {
    Problem p = make_problem({kM, kN, k, g}, ScalePattern::kMixed, ActivationPattern::kPoisoned,
                             all_layouts()[g == 32 ? 2 : 0], 1);
    const DeviceProblem d(p, stream());
    GuardedBuffer expected = p.output(kType);
    cpu::binary_gemm(p.x(), p.w(), p.bias(), expected.view(kType));
    DeviceWorkspace workspace(cuda::linear_workspace_bytes(kM, k), stream());
    for (const Kernel kernel : kernels_for(kM, d.w())) {
      DeviceOutput y(p.output(kType), kType, stream());
      run([&] { cuda::binary_gemm(d.x(), d.w(), d.bias(), y.view(), launch(kernel, workspace)); });
      EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType))) << cuda::name(kernel);
      EXPECT_TRUE(y.guards_intact());
      EXPECT_TRUE(workspace.guards_intact());
    }

    GuardedBuffer x(kM, k, 2);
    Random random(2);
    for (std::int64_t m = 0; m < kM; ++m) {
      for (std::int64_t i = 0; i < k; ++i) {  // finite, of any exponent but the largest
        x.row<std::uint16_t>(m)[i] = static_cast<std::uint16_t>(random.bits() & 0xbfffu);
      }
    }
    GuardedBuffer linear_expected = p.output(kType);
    cpu::binary_linear(x.view(kType), p.w(), {}, linear_expected.view(kType));
    const DeviceBuffer x_device(x, stream());
    DeviceOutput y(p.output(kType), kType, stream());
    run([&] {
      cuda::binary_linear(x_device.view(x, kType), d.w(), {}, y.view(),
                          launch(Kernel::kAuto, workspace));
    });
    EXPECT_TRUE(equal_bits(y.fetch(), linear_expected.view(kType)));
    EXPECT_TRUE(y.guards_intact());
    EXPECT_TRUE(workspace.guards_intact());
  }
}

TEST_P(CudaLarge, MoreThan2To31Outputs) {
  // Only sampled rows come back. They are all different, by their bits.
  constexpr std::int64_t kM = 54001;
  constexpr std::int64_t kN = 40003;
  constexpr std::int64_t kK = 256;
  constexpr std::int64_t kG = 128;
  static_assert(kM * kN > std::int64_t{1} << 31, "");
  const auto y_bytes = static_cast<std::size_t>(kM * kN * 2);
  if (!fits(y_bytes + (std::size_t{1} << 28))) GTEST_SKIP() << "not enough memory";
  Problem p = make_tall_problem({kM, kN, kK, kG}, ScalePattern::kMixed, ActivationPattern::kRandom,
                                all_layouts()[0], 3);
  const DeviceProblem d(p, stream());
  const Block y(y_bytes);
  DeviceWorkspace workspace(cuda::gemm_workspace_bytes(kM, kK), stream());
  BINARY_GEMM_CHECK_CUDA(cudaMemsetAsync(y.as<void>(), 0xff, y_bytes, stream()));
  run([&] {
    cuda::binary_gemm(d.x(), d.w(), d.bias(), matrix_view(y.as<bfloat16>(), kM, kN),
                      launch(Kernel::kAuto, workspace));
  });
  EXPECT_TRUE(workspace.guards_intact());
  constexpr std::int64_t kCrossing = (std::int64_t{1} << 31) / kN;
  std::set<std::int64_t> rows = {
      0,      1,     kCrossing / 2, kCrossing / 2 + 1, kCrossing - 1, kCrossing, kCrossing + 1,
      kM - 2, kM - 1};
  Random random(4);
  while (rows.size() < 40) rows.insert(random.integer(0, kM - 1));
  GuardedBuffer actual(1, kN, 2);
  GuardedBuffer expected(1, kN, 2);
  for (const std::int64_t m : rows) {
    copy(actual.row<bfloat16>(0), y.as<bfloat16>() + m * kN, kN * 2);
    synchronize();
    cpu::binary_gemm(p.x().row_range(m, 1), p.w(), p.bias(), expected.view(kType));
    ASSERT_TRUE(equal_bits(std::as_const(actual).view(kType), std::as_const(expected).view(kType)))
        << "token " << m;
  }
}

TEST_P(CudaLarge, RowsOfXAndYFarApart) {
  // Three tokens, each more than 2^30 elements from the next.
  constexpr std::int64_t kStride = (std::int64_t{1} << 30) + 48;
  const auto x_bytes = static_cast<std::size_t>(2 * kStride + 4096);
  const auto y_bytes = static_cast<std::size_t>(4 * (2 * kStride + 4096));
  if (!fits(x_bytes * 2 + y_bytes)) GTEST_SKIP() << "not enough memory";
  Problem p = make_problem({3, 100, 2048, 64}, ScalePattern::kMixed, ActivationPattern::kRandom,
                           all_layouts()[0], 5);
  const DeviceProblem d(p, stream());
  GuardedBuffer expected(3, 100, 4);
  expected_gemm(p.x(), p.w(), p.bias(), expected.view(DataType::kFloat32));
  const Block x(x_bytes);
  const Block y(y_bytes);
  for (std::int64_t m = 0; m < 3; ++m) {
    copy(x.as<std::int8_t>() + m * kStride, p.values.row<std::int8_t>(m), 2048);
  }
  ActivationView x_view = d.x();
  x_view.values = x.as<std::int8_t>();
  x_view.row_stride = kStride;
  const MatrixView y_view = matrix_view(y.as<float>(), 3, 100, kStride);
  for (const Kernel kernel : kernels_for(3, d.w())) {
    GuardedBuffer actual(3, 100, 4);
    for (std::int64_t m = 0; m < 3; ++m) {
      BINARY_GEMM_CHECK_CUDA(cudaMemsetAsync(y.as<float>() + m * kStride, 0xff, 400, stream()));
    }
    run([&] { cuda::binary_gemm(x_view, d.w(), d.bias(), y_view, launch(kernel)); });
    for (std::int64_t m = 0; m < 3; ++m) {
      copy(actual.row<float>(m), y.as<float>() + m * kStride, 400);
    }
    synchronize();
    EXPECT_TRUE(equal_bits(std::as_const(actual).view(DataType::kFloat32),
                           std::as_const(expected).view(DataType::kFloat32)))
        << cuda::name(kernel);
  }

  // And of what is quantized: bf16, so its bytes are twice as far apart.
  const Block dense(x_bytes * 2);
  GuardedBuffer dense_host(3, 2048, 2);
  Random random(6);
  fill_gaussian(dense_host.view(kType), random);
  for (std::int64_t m = 0; m < 3; ++m) {
    copy(dense.as<bfloat16>() + m * kStride, dense_host.row<bfloat16>(m), 2048 * 2);
  }
  const ConstMatrixView dense_view =
      matrix_view(static_cast<const bfloat16*>(dense.as<bfloat16>()), 3, 2048, kStride);
  expected_linear(dense_host.view(kType), p.w(), {}, expected.view(DataType::kFloat32));
  const DeviceWorkspace workspace(cuda::linear_workspace_bytes(3, 2048), stream());
  DeviceOutput linear(GuardedBuffer(3, 100, 4), DataType::kFloat32, stream());
  run([&] {
    cuda::binary_linear(dense_view, d.w(), {}, linear.view(), launch(Kernel::kAuto, workspace));
  });
  EXPECT_TRUE(equal_bits(linear.fetch(), std::as_const(expected).view(DataType::kFloat32)));

  const Block q(x_bytes);
  DeviceOutput q_scales(GuardedBuffer(1, 3, 4), DataType::kFloat32, stream());
  run([&] {
    cuda::quantize_activation(
        dense_view,
        {q.as<std::int8_t>(), static_cast<float*>(q_scales.view().data), 3, 2048, kStride, 0, 0},
        launch());
  });
  GuardedBuffer values(3, 2048, 1);
  GuardedBuffer expected_values(3, 2048, 1);
  GuardedBuffer expected_scales(1, 3, 4);
  for (std::int64_t m = 0; m < 3; ++m) {
    copy(values.row<std::int8_t>(m), q.as<std::int8_t>() + m * kStride, 2048);
  }
  synchronize();
  reference::quantize_activation(
      dense_host.view(kType),
      activation_view(expected_values.base<std::int8_t>(), expected_scales.base<float>(), 3, 2048));
  EXPECT_TRUE(equal_bits(std::as_const(values).view(DataType::kInt8),
                         std::as_const(expected_values).view(DataType::kInt8)));
  EXPECT_TRUE(
      equal_bits(q_scales.fetch(), std::as_const(expected_scales).view(DataType::kFloat32)));
}

TEST_P(CudaLarge, RowsOfWFarApart) {
  // Rows 2 GiB apart in bits, and in scales: the third begins past 2^32 bytes, the fifth past 2^31
  // words.
  constexpr std::int64_t kN = 5;
  constexpr std::int64_t kBitsStride = (std::int64_t{1} << 29) + 4;
  constexpr std::int64_t kScalesStride = (std::int64_t{1} << 30) + 8;
  const auto bytes = static_cast<std::size_t>(4 * kBitsStride * 4 + 4096);
  if (!fits(2 * bytes + 8192)) GTEST_SKIP() << "not enough memory";
  for (const std::int64_t k : {std::int64_t{2048}, std::int64_t{1088}}) {
    Problem p = make_problem({33, kN, k, 64}, ScalePattern::kMixed, ActivationPattern::kRandom,
                             all_layouts()[0], 7);
    const DeviceProblem d(p, stream());
    GuardedBuffer expected = p.output(kType);
    expected_gemm(p.x(), p.w(), p.bias(), expected.view(kType));
    const Block bits(bytes);
    const Block scales(bytes + 4096);
    for (std::int64_t n = 0; n < kN; ++n) {
      copy(bits.as<std::uint32_t>() + n * kBitsStride, p.bits.row<std::uint32_t>(n), k / 8);
      copy(scales.as<float16>() + n * kScalesStride, p.scales.row<float16>(n), k / 64 * 2);
    }
    const WeightView far = {bits.as<std::uint32_t>(),
                            scales.as<float16>(),
                            kN,
                            k,
                            64,
                            kBitsStride,
                            kScalesStride,
                            0,
                            0};
    WeightView far_bits = far;  // dense scales: the copy engine's
    far_bits.scales = d.w().scales;
    far_bits.scales_stride = d.w().scales_stride;
    for (const WeightView& w : {far, far_bits}) {
      for (const std::int64_t m : {1, 3, 8, 33}) {
        for (const Kernel kernel : kernels_for(m, w)) {
          DeviceOutput y(p.output(kType, m, kN), kType, stream());
          run([&] {
            cuda::binary_gemm(d.x().row_range(0, m), w, d.bias(), y.view(), launch(kernel));
          });
          EXPECT_TRUE(equal_bits(y.fetch(), std::as_const(expected).view(kType).row_range(0, m)))
              << cuda::name(kernel) << " M=" << m << " K=" << k;
        }
      }
    }
    DeviceOutput dense(GuardedBuffer(kN, k, 4), DataType::kFloat32, stream());
    GuardedBuffer expected_dense(kN, k, 4);
    cpu::unpack_weights(p.w(), expected_dense.view(DataType::kFloat32));
    run([&] { cuda::unpack_weights(far, dense.view(), launch()); });
    EXPECT_TRUE(equal_bits(dense.fetch(), std::as_const(expected_dense).view(DataType::kFloat32)));
  }
}

TEST_P(CudaLarge, FarIntoABuffer) {
  // A shard that begins past 2^31 elements of each operand's base.
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;
  const std::size_t bytes = (static_cast<std::size_t>(kFar) + (1 << 16)) * 4;
  if (!fits(2 * bytes)) GTEST_SKIP() << "not enough memory";
  Problem p = make_problem({9, 40, 1024, 128}, ScalePattern::kMixed, ActivationPattern::kRandom,
                           all_layouts()[0], 9);
  const DeviceProblem d(p, stream());
  GuardedBuffer expected(9, 40, 4);
  expected_gemm(p.x(), p.w(), p.bias(), expected.view(DataType::kFloat32));
  const Block memory(bytes);  // of all inputs in turn
  const Block output(bytes);
  const MatrixView y = {output.as<void>(), DataType::kFloat32, 9, 40, 40, kFar};
  const auto check = [&](const ActivationView& x, const WeightView& w, const BiasView& bias,
                         const char* what) {
    GuardedBuffer actual(9, 40, 4);
    BINARY_GEMM_CHECK_CUDA(cudaMemsetAsync(output.as<float>() + kFar, 0xff, 9 * 40 * 4, stream()));
    run([&] { cuda::binary_gemm(x, w, bias, y, launch()); });
    copy(actual.row<float>(0), output.as<float>() + kFar, 9 * 40 * 4);
    synchronize();
    EXPECT_TRUE(equal_bits(std::as_const(actual).view(DataType::kFloat32),
                           std::as_const(expected).view(DataType::kFloat32)))
        << what;
  };
  check(d.x(), d.w(), d.bias(), "y");
  ActivationView x = d.x();
  copy(memory.as<std::int8_t>() + kFar, p.values.row<std::int8_t>(0), 9 * 1024);
  x.values = memory.as<std::int8_t>();
  x.offset = kFar;
  check(x, d.w(), d.bias(), "activation values");
  x = d.x();
  copy(memory.as<float>() + kFar, p.x_scales.row<float>(0), 9 * 4);
  x.scales = memory.as<float>();
  x.scales_offset = kFar;
  check(x, d.w(), d.bias(), "activation scales");
  WeightView w = d.w();
  copy(memory.as<std::uint32_t>() + kFar, p.bits.row<std::uint32_t>(0), 40 * 128);
  w.bits = memory.as<std::uint32_t>();
  w.bits_offset = kFar;
  check(d.x(), w, d.bias(), "weight bits");
  w = d.w();
  copy(memory.as<float16>() + kFar, p.scales.row<float16>(0), 40 * 8 * 2);
  w.scales = memory.as<float16>();
  w.scales_offset = kFar;
  check(d.x(), w, d.bias(), "weight scales");
  copy(memory.as<float>() + kFar, p.bias_data.row<float>(0), 40 * 4);
  check(d.x(), d.w(), {memory.as<float>(), 40, kFar}, "bias");
}

TEST_P(CudaLarge, AStrideOfOneRowMayBeAnything) {
  // Nothing lies a stride further, so nothing is out of bounds.
  constexpr std::int64_t kAny = std::int64_t{1} << 40;
  Problem p = make_problem({1, 1, 2048, 128}, ScalePattern::kMixed, ActivationPattern::kRandom,
                           all_layouts()[0], 11);
  const DeviceProblem d(p, stream());
  GuardedBuffer expected = p.output(kType);
  expected_gemm(p.x(), p.w(), p.bias(), expected.view(kType));
  for (const Kernel kernel : kernels_for(1, d.w())) {
    DeviceOutput output(p.output(kType), kType, stream());
    ActivationView x = d.x();
    x.row_stride = kAny;
    MatrixView y = output.view();
    y.row_stride = kAny;
    run([&] { cuda::binary_gemm(x, d.w(), d.bias(), y, launch(kernel)); });
    EXPECT_TRUE(equal_bits(output.fetch(), std::as_const(expected).view(kType)))
        << cuda::name(kernel);
  }
}

TEST_P(CudaLarge, ManyRowsOfW) {
  // A language model's head, and more rows than 16 bits of blocks.
  for (const auto& [n, k] : {std::pair{std::int64_t{248320}, std::int64_t{512}},
                             {std::int64_t{2200003}, std::int64_t{128}}}) {
    Problem p = make_tall_problem({9, n, k, 128}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                                  all_layouts()[0], 13);
    const DeviceProblem d(p, stream());
    for (const std::int64_t m : {1, 9}) {
      GuardedBuffer expected = p.output(kType, m, n);
      cpu::binary_gemm(p.x().row_range(0, m), p.w(), p.bias(), expected.view(kType));
      for (const Kernel kernel : kernels_for(m, d.w())) {
        DeviceOutput y(p.output(kType, m, n), kType, stream());
        run([&] {
          cuda::binary_gemm(d.x().row_range(0, m), d.w(), d.bias(), y.view(), launch(kernel));
        });
        EXPECT_TRUE(equal_bits(y.fetch(), std::as_const(expected).view(kType)))
            << cuda::name(kernel) << " M=" << m << " N=" << n;
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
