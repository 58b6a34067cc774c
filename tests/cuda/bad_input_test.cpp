/// Every wrong argument throws std::invalid_argument, whose message has the values and the rule,
/// before anything is launched: nothing is written, the stream and the device stay usable, and no
/// CUDA error is left behind. Empty products are not wrong.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "device_support.h"

namespace binary_gemm {
namespace testing {
namespace {

using cuda::Kernel;

constexpr DataType kType = DataType::kBFloat16;

// And no CUDA error is left.
void expect_refused(const std::function<void()>& call, const Parts& parts) {
  expect_invalid(call, parts);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

constexpr std::int64_t kM = 3;
constexpr std::int64_t kN = 4;
constexpr std::int64_t kK = 256;
constexpr std::int64_t kG = 64;

// Good arguments on the device for every function.
struct Operands {
  explicit Operands(cudaStream_t s)
      : stream(s),
        p(make_problem({kM, kN, kK, kG}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                       all_layouts()[0], 1)),
        dense_x_host(filled(kM)),
        dense_w_host(filled(kN)),
        d(p, s),
        dense_x_buffer(dense_x_host, s),
        dense_w_buffer(dense_w_host, s),
        workspace(cuda::linear_workspace_bytes(kM, kK), s),
        y_buffer(GuardedBuffer(kM, kN, 2), kType, s),
        q_buffer(kM, kK, 0, 0, 0, s),
        packed_bits(GuardedBuffer(kN, kK / 32, 4), DataType::kFloat32, s),
        packed_scales(GuardedBuffer(kN, kK / kG, 2), DataType::kFloat16, s),
        unpacked_buffer(GuardedBuffer(kN, kK, 2), kType, s) {
    BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream));
  }

  static GuardedBuffer filled(std::int64_t rows) {
    Random random(static_cast<std::uint64_t>(rows));
    GuardedBuffer dense(rows, kK, 2);
    fill_gaussian(dense.view(kType), random);
    return dense;
  }

  cuda::Launch launch() const { return {stream, workspace}; }
  MatrixView y() const { return y_buffer.view(); }
  MutableActivationView q() const { return q_buffer.view(); }
  MutableWeightView packed() const {
    return weight_view(static_cast<std::uint32_t*>(packed_bits.view().data),
                       static_cast<float16*>(packed_scales.view().data), kN, kK, kG);
  }
  ConstMatrixView dense_x() const { return dense_x_buffer.view(dense_x_host, kType); }
  ConstMatrixView dense_w() const { return dense_w_buffer.view(dense_w_host, kType); }
  MatrixView unpacked() const { return unpacked_buffer.view(); }

  // Nothing may have been written.
  void expect_untouched() {
    for (DeviceOutput* output : {&y_buffer, &q_buffer.values, &q_buffer.scales, &packed_bits,
                                 &packed_scales, &unpacked_buffer}) {
      output->fetch();
      EXPECT_TRUE(output->host().untouched());
    }
    EXPECT_TRUE(d.unchanged(stream));
    EXPECT_TRUE(dense_x_buffer.equals(dense_x_host, stream));
    EXPECT_TRUE(dense_w_buffer.equals(dense_w_host, stream));
  }

  // The stream and the operands still serve.
  void expect_usable() {
    GuardedBuffer expected(kM, kN, 2);
    expected_gemm(p.x(), p.w(), p.bias(), expected.view(kType));
    cuda::binary_gemm(d.x(), d.w(), d.bias(), y(), launch());
    EXPECT_TRUE(equal_bits(y_buffer.fetch(), expected.view(kType)));
    GuardedBuffer linear(kM, kN, 2);
    expected_linear(dense_x_host.view(kType), p.w(), {}, linear.view(kType));
    cuda::binary_linear(dense_x(), d.w(), {}, y(), launch());
    EXPECT_TRUE(equal_bits(y_buffer.fetch(), linear.view(kType)));
  }

  cudaStream_t stream;
  Problem p;
  GuardedBuffer dense_x_host, dense_w_host;
  DeviceProblem d;
  DeviceBuffer dense_x_buffer, dense_w_buffer;
  DeviceWorkspace workspace;
  DeviceOutput y_buffer;
  DeviceActivation q_buffer;
  DeviceOutput packed_bits, packed_scales, unpacked_buffer;
};

class CudaBadInput : public DeviceTest {
 protected:
  explicit CudaBadInput(int devices = 1) : DeviceTest(devices) {}

  void SetUp() override {
    DeviceTest::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) operands_ = std::make_unique<Operands>(stream());
  }

  void TearDown() override {
    if (operands_) {
      operands_->expect_untouched();
      operands_->expect_usable();
      operands_.reset();
    }
    DeviceTest::TearDown();
  }

  Operands& o() { return *operands_; }

  // The product and the linear layer share the rules of w, bias and y.
  void gemm_and_linear(const WeightView& w, const BiasView& bias, const MatrixView& y,
                       const Parts& parts) {
    expect_refused([&] { cuda::binary_gemm(o().d.x(), w, bias, y, o().launch()); }, parts);
    expect_refused([&] { cuda::binary_linear(o().dense_x(), w, bias, y, o().launch()); }, parts);
  }
  void gemm(const ActivationView& x, const Parts& parts) {
    expect_refused([&] { cuda::binary_gemm(x, o().d.w(), o().d.bias(), o().y(), o().launch()); },
                   parts);
  }
  void linear(const ConstMatrixView& x, const Parts& parts) {
    expect_refused([&] { cuda::binary_linear(x, o().d.w(), o().d.bias(), o().y(), o().launch()); },
                   parts);
  }
  void quantize(const ConstMatrixView& x, const MutableActivationView& q, const Parts& parts) {
    expect_refused([&] { cuda::quantize_activation(x, q, o().launch()); }, parts);
  }
  void pack(const ConstMatrixView& dense, const MutableWeightView& w, const Parts& parts) {
    expect_refused([&] { cuda::pack_weights(dense, w, o().launch()); }, parts);
  }
  void unpack(const WeightView& w, const MatrixView& dense, const Parts& parts) {
    expect_refused([&] { cuda::unpack_weights(w, dense, o().launch()); }, parts);
  }
  void from_packed(const WeightView& w, const BiasView& bias, const Parts& parts) {
    expect_refused([&] { cuda::BinaryLinear::from_packed(w, bias, o().launch()); }, parts);
  }
  void from_dense(const ConstMatrixView& dense, std::int64_t g, const BiasView& bias,
                  const Parts& parts) {
    expect_refused([&] { cuda::BinaryLinear::from_dense(dense, g, bias, o().launch()); }, parts);
  }
  // A weight view that no function may take, whatever the other operands are.
  void weights(const WeightView& w, const Parts& parts) {
    gemm_and_linear(w, {}, o().y(), parts);
    unpack(w, o().unpacked(), parts);
    from_packed(w, {}, parts);
    MutableWeightView target = o().packed();
    target.n = w.n;
    target.k = w.k;
    target.group_size = w.group_size;
    target.bits_stride = w.bits_stride;
    target.scales_stride = w.scales_stride;
    target.bits_offset = w.bits_offset;
    target.scales_offset = w.scales_offset;
    if (w.bits == nullptr) target.bits = nullptr;
    pack(o().dense_w(), target, parts);
  }

 private:
  std::unique_ptr<Operands> operands_;
};

// ---- Weights ----

TEST_F(CudaBadInput, KMustBeAMultipleOf32AndOfG) {
  WeightView w = o().d.w();
  for (const std::int64_t k : {1, 16, 31, 33, 255}) {
    w.k = k;
    weights(w, {"K = " + std::to_string(k), "multiple of 32"});
    expect_refused([&] { cuda::BinaryLinear(4, k); }, {"K = " + std::to_string(k), "multiple of"});
  }
  for (const std::int64_t k : {32, 96, 160, 224}) {
    w.k = k;
    weights(w, {"K = " + std::to_string(k), "multiple of the group size 64"});
    expect_refused([&] { cuda::BinaryLinear(4, k); },
                   {"K = " + std::to_string(k), "multiple of the group size 128"});
  }
  from_dense(o().dense_w().column_range(0, 160), 64, {}, {"K = 160", "multiple of the group size"});
}

TEST_F(CudaBadInput, GroupSizeMustBeKnown) {
  WeightView w = o().d.w();
  for (const std::int64_t g :
       {std::int64_t{0}, std::int64_t{-128}, std::int64_t{1}, std::int64_t{16}, std::int64_t{48},
        std::int64_t{96}, std::int64_t{512}, kHuge, -kHuge - 1}) {
    w.group_size = g;
    const Parts parts = {"group size = " + std::to_string(g), "32, 64, 128 or 256"};
    weights(w, parts);
    expect_refused([&] { cuda::BinaryLinear(4, 256, g); }, parts);
    from_dense(o().dense_w(), g, {}, parts);
  }
}

TEST_F(CudaBadInput, WeightPointers) {
  const MatrixView y = o().y();
  WeightView w = o().d.w();
  w.bits = nullptr;
  weights(w, {"weight bits", "null", "[4, 8]"});
  w = o().d.w();
  w.scales = nullptr;
  gemm_and_linear(w, {}, y, {"weight scales", "null", "[4, 4]"});
  from_packed(w, {}, {"weight scales", "null", "[4, 4]"});
  w = o().d.w();
  w.bits = misaligned(w.bits);
  gemm_and_linear(w, {}, y, {"weight bits", hex(w.bits), "16-byte aligned"});
  unpack(w, o().unpacked(), {"weight bits", hex(w.bits), "16-byte aligned"});
  w = o().d.w();
  w.scales = misaligned(w.scales);
  gemm_and_linear(w, {}, y, {"weight scales", hex(w.scales), "16-byte aligned"});
  unpack(w, o().unpacked(), {"weight scales", hex(w.scales), "16-byte aligned"});
  // One element from an aligned address.
  w = o().d.w();
  w.bits += 1;
  gemm_and_linear(w, {}, y, {"weight bits", "16-byte aligned"});
  w = o().d.w();
  w.scales += 1;
  gemm_and_linear(w, {}, y, {"weight scales", "16-byte aligned"});

  MutableWeightView target = o().packed();
  target.bits = misaligned(target.bits);
  pack(o().dense_w(), target, {"weight bits", hex(target.bits), "16-byte aligned"});
  target = o().packed();
  target.scales = misaligned(target.scales);
  pack(o().dense_w(), target, {"weight scales", hex(target.scales), "16-byte aligned"});
}

TEST_F(CudaBadInput, WeightStrides) {
  for (const std::int64_t stride : {std::int64_t{7}, std::int64_t{0}, std::int64_t{-8}, -kHuge}) {
    WeightView w = o().d.w();
    w.bits_stride = stride;
    weights(w, {"weight bits", "stride = " + std::to_string(stride), "8"});
  }
  for (const std::int64_t stride : {std::int64_t{3}, std::int64_t{0}, std::int64_t{-1}}) {
    WeightView w = o().d.w();
    w.scales_stride = stride;
    weights(w, {"weight scales", "stride = " + std::to_string(stride), "4"});
  }
}

TEST_F(CudaBadInput, WeightShapesOffsetsAndSizes) {
  const auto spoiled = [&](const std::function<void(WeightView&)>& spoil, const Parts& parts) {
    WeightView w = o().d.w();
    spoil(w);
    weights(w, parts);
  };
  spoiled([](WeightView& w) { w.n = -1; }, {"[-1, 256]", "negative"});
  spoiled([](WeightView& w) { w.k = -256; }, {"[4, -256]", "negative"});
  expect_refused([&] { cuda::BinaryLinear(-1, 256); }, {"[-1, 256]", "negative"});
  expect_refused([&] { cuda::BinaryLinear(4, -256); }, {"[4, -256]", "negative"});
  spoiled([](WeightView& w) { w.bits_offset = -1; }, {"weight bits", "offset = -1", "negative"});
  spoiled([](WeightView& w) { w.scales_offset = -5; },
          {"weight scales", "offset = -5", "negative"});

  spoiled([](WeightView& w) { w.n = kHuge; }, {std::to_string(kHuge), "256", "overflow"});
  expect_refused([&] { cuda::BinaryLinear(kHuge, 256); }, {std::to_string(kHuge), "overflow"});
  spoiled([](WeightView& w) { w.n = w.k = std::int64_t{1} << 33; },
          {std::to_string(std::int64_t{1} << 33), "overflow"});
  for (const std::int64_t stride : {kHuge, kHuge / 4}) {
    spoiled([&](WeightView& w) { w.bits_stride = stride; },
            {"weight bits", std::to_string(stride), "overflow"});
  }
  spoiled([](WeightView& w) { w.scales_stride = kHuge / 2; },
          {"weight scales", std::to_string(kHuge / 2), "overflow"});
  spoiled([](WeightView& w) { w.bits_offset = kHuge; },
          {"weight bits", std::to_string(kHuge), "overflow"});
  spoiled([](WeightView& w) { w.scales_offset = kHuge - 3; },
          {"weight scales", std::to_string(kHuge - 3), "overflow"});
}

TEST_F(CudaBadInput, ALayerTooLargeForTheDevice) {
  // 32 TiB of bits: CUDA's own error, of its own type.
  try {
    const cuda::BinaryLinear layer(std::int64_t{1} << 40, 256);
    ADD_FAILURE() << "accepted";
  } catch (const cuda::CudaError& error) {
    EXPECT_EQ(error.code(), cudaErrorMemoryAllocation);
    EXPECT_NE(std::string(error.what()).find("cudaMalloc"), std::string::npos) << error.what();
  }
  cudaGetLastError();
}

// ---- Activations ----

TEST_F(CudaBadInput, ActivationPointers) {
  ActivationView x = o().d.x();
  x.values = nullptr;
  gemm(x, {"activation values", "null", "[3, 256]"});
  x = o().d.x();
  x.scales = nullptr;
  gemm(x, {"activation scales", "null"});
  x = o().d.x();
  x.values = misaligned(x.values);
  gemm(x, {"activation values", hex(x.values), "16-byte aligned"});
  x = o().d.x();
  x.values += 1;
  gemm(x, {"activation values", hex(x.values), "16-byte aligned"});
  x = o().d.x();
  x.scales = misaligned(x.scales);
  gemm(x, {"activation scales", hex(x.scales), "16-byte aligned"});

  ConstMatrixView dense = o().dense_x();
  dense.data = nullptr;
  linear(dense, {"x", "null", "[3, 256]"});
  quantize(dense, o().q(), {"x", "null", "[3, 256]"});
  dense.data = misaligned(static_cast<const char*>(o().dense_x().data));
  linear(dense, {"x", hex(dense.data), "16-byte aligned"});
  quantize(dense, o().q(), {"x", hex(dense.data), "16-byte aligned"});

  MutableActivationView target = o().q();
  target.values = nullptr;
  quantize(o().dense_x(), target, {"activation values", "null"});
  target = o().q();
  target.scales = nullptr;
  quantize(o().dense_x(), target, {"activation scales", "null"});
  target = o().q();
  target.values = misaligned(target.values);
  quantize(o().dense_x(), target, {"activation values", "16-byte aligned"});
  target = o().q();
  target.scales = misaligned(target.scales);
  quantize(o().dense_x(), target, {"activation scales", "16-byte aligned"});
}

TEST_F(CudaBadInput, ActivationStridesShapesAndOffsets) {
  for (const std::int64_t stride : {std::int64_t{255}, std::int64_t{0}, std::int64_t{-256}}) {
    const Parts parts = {"stride = " + std::to_string(stride), "256"};
    ActivationView x = o().d.x();
    x.row_stride = stride;
    gemm(x, parts);
    ConstMatrixView dense = o().dense_x();
    dense.row_stride = stride;
    linear(dense, parts);
    quantize(dense, o().q(), parts);
    MutableActivationView target = o().q();
    target.row_stride = stride;
    quantize(o().dense_x(), target, parts);
  }
  const auto spoiled = [&](const std::function<void(ActivationView&)>& spoil, const Parts& parts) {
    ActivationView x = o().d.x();
    spoil(x);
    gemm(x, parts);
  };
  spoiled([](ActivationView& x) { x.m = -3; }, {"-3", "negative"});
  spoiled([](ActivationView& x) { x.k = -256; }, {"-256", "negative"});
  spoiled([](ActivationView& x) { x.offset = -1; }, {"activation values", "offset = -1"});
  spoiled([](ActivationView& x) { x.scales_offset = -2; }, {"activation scales", "offset = -2"});
  spoiled([](ActivationView& x) { x.row_stride = kHuge; },
          {"activation values", std::to_string(kHuge), "overflow"});
  spoiled([](ActivationView& x) { x.offset = kHuge; },
          {"activation values", std::to_string(kHuge), "overflow"});
  spoiled([](ActivationView& x) { x.scales_offset = kHuge; },
          {"activation scales", std::to_string(kHuge), "overflow"});

  const auto dense = [&](const std::function<void(ConstMatrixView&)>& spoil, const Parts& parts) {
    ConstMatrixView x = o().dense_x();
    spoil(x);
    linear(x, parts);
    quantize(x, o().q(), parts);
  };
  dense([](ConstMatrixView& x) { x.row_stride = kHuge / 2; },
        {"x", std::to_string(kHuge / 2), "overflow"});
  dense([](ConstMatrixView& x) { x.offset = -4; }, {"x", "offset = -4"});
  dense([](ConstMatrixView& x) { x.rows = -3; }, {"-3"});
  dense([](ConstMatrixView& x) { x.cols = -256; }, {"-256"});
}

TEST_F(CudaBadInput, ShapesThatDisagree) {
  ActivationView x = o().d.x();
  x.k = 192;
  gemm(x, {"K = 192", "K = 256"});
  x = o().d.x();
  x.m = 2;
  gemm(x, {"[3, 4]", "[2, 4]"});
  linear(o().dense_x().column_range(0, 128), {"K = 128", "K = 256"});
  linear(o().dense_x().row_range(1, 1), {"[3, 4]", "[1, 4]"});
  quantize(o().dense_x().row_range(0, 2), o().q(), {"[2, 256]", "[3, 256]"});
  quantize(o().dense_x().column_range(0, 255), o().q(), {"[3, 255]", "[3, 256]"});

  gemm_and_linear(o().d.w().row_range(0, 3), {}, o().y(), {"[3, 4]", "[3, 3]"});
  gemm_and_linear(o().d.w().column_range(0, 128), {}, o().y(), {"K = 256", "K = 128"});
  gemm_and_linear(o().d.w(), {}, o().y().row_range(0, 2), {"[2, 4]", "[3, 4]"});
  gemm_and_linear(o().d.w(), {}, o().y().column_range(0, 3), {"[3, 3]", "[3, 4]"});
  MatrixView transposed = o().y();
  std::swap(transposed.rows, transposed.cols);
  transposed.row_stride = 4;
  gemm_and_linear(o().d.w(), {}, transposed, {"[4, 3]", "[3, 4]"});

  pack(o().dense_w().row_range(0, 3), o().packed(), {"[3, 256]", "[4, 256]"});
  pack(o().dense_w().column_range(0, 192), o().packed(), {"[4, 192]", "[4, 256]"});
  unpack(o().d.w(), o().unpacked().row_range(0, 3), {"[3, 256]", "[4, 256]"});
  unpack(o().d.w(), o().unpacked().column_range(0, 192), {"[4, 192]", "[4, 256]"});
}

// ---- Bias ----

TEST_F(CudaBadInput, Bias) {
  for (const std::int64_t n :
       {std::int64_t{3}, std::int64_t{5}, std::int64_t{0}, std::int64_t{-4}, kHuge}) {
    BiasView bias = o().d.bias();
    bias.n = n;
    const Parts parts = {"bias has " + std::to_string(n), "N = 4"};
    gemm_and_linear(o().d.w(), bias, o().y(), parts);
    from_packed(o().d.w(), bias, parts);
    from_dense(o().dense_w(), 64, bias, parts);
  }
  BiasView bias = o().d.bias();
  bias.data = misaligned(bias.data);
  gemm_and_linear(o().d.w(), bias, o().y(), {"bias", hex(bias.data), "16-byte aligned"});
  from_packed(o().d.w(), bias, {"bias", "16-byte aligned"});
  bias = o().d.bias();
  bias.offset = -1;
  gemm_and_linear(o().d.w(), bias, o().y(), {"bias", "offset = -1"});
  bias.offset = kHuge;
  gemm_and_linear(o().d.w(), bias, o().y(), {"bias", std::to_string(kHuge), "overflow"});
}

// ---- y ----

TEST_F(CudaBadInput, OutputPointersStridesAndShapes) {
  const auto spoiled = [&](const std::function<void(MatrixView&)>& spoil, const Parts& parts) {
    MatrixView bad = o().y();
    spoil(bad);
    gemm_and_linear(o().d.w(), {}, bad, parts);
  };
  char* const middle = misaligned(static_cast<char*>(o().y().data));
  spoiled([](MatrixView& y) { y.data = nullptr; }, {"y", "null", "[3, 4]"});
  spoiled([&](MatrixView& y) { y.data = middle; }, {"y", hex(middle), "16-byte aligned"});
  for (const std::int64_t stride : {std::int64_t{3}, std::int64_t{0}, std::int64_t{-4}}) {
    spoiled([&](MatrixView& y) { y.row_stride = stride; },
            {"y", "stride = " + std::to_string(stride), "4"});
  }
  spoiled([](MatrixView& y) { y.offset = -1; }, {"y", "offset = -1"});
  spoiled([](MatrixView& y) { y.offset = kHuge / 4; },
          {"y", std::to_string(kHuge / 4), "overflow"});
  spoiled([](MatrixView& y) { y.row_stride = kHuge; }, {"y", std::to_string(kHuge), "overflow"});
  spoiled([](MatrixView& y) { y.rows = -3; }, {"[-3, 4]"});

  MatrixView dense = o().unpacked();
  dense.data = nullptr;
  unpack(o().d.w(), dense, {"dense weights", "null"});
  dense.data = misaligned(static_cast<char*>(o().unpacked().data));
  unpack(o().d.w(), dense, {"dense weights", hex(dense.data), "16-byte aligned"});
  dense = o().unpacked();
  dense.row_stride = 255;
  unpack(o().d.w(), dense, {"dense weights", "stride = 255", "256"});
  dense = o().unpacked();
  dense.offset = -7;
  unpack(o().d.w(), dense, {"dense weights", "offset = -7"});
  ConstMatrixView source = o().dense_w();
  source.data = misaligned(static_cast<const char*>(o().dense_w().data));
  pack(source, o().packed(), {"dense weights", hex(source.data), "16-byte aligned"});
  source.data = nullptr;
  pack(source, o().packed(), {"dense weights", "null"});
  source = o().dense_w();
  source.row_stride = 100;
  pack(source, o().packed(), {"dense weights", "stride = 100", "256"});
}

TEST_F(CudaBadInput, ExtentsThatWrapTheAddressSpace) {
  MatrixView bad = o().y();
  bad.type = DataType::kFloat32;
  bad.data = reinterpret_cast<void*>(~std::uintptr_t{0} - 15);
  gemm_and_linear(o().d.w(), {}, bad, {"y", "wraps the address space"});
  WeightView w = o().d.w();
  w.bits = reinterpret_cast<const std::uint32_t*>(~std::uintptr_t{0} - 31);
  gemm_and_linear(w, {}, o().y(), {"weight bits", "wraps the address space"});
}

// ---- Types ----

TEST_F(CudaBadInput, Types) {
  MatrixView bad = o().y();
  bad.type = DataType::kInt8;
  gemm_and_linear(o().d.w(), {}, bad, {"y", "type", "float32, float16 or bfloat16", "int8"});
  bad.type = kUnknownType;
  gemm_and_linear(o().d.w(), {}, bad, {"y", "type", "unknown"});

  ConstMatrixView x = o().dense_x();
  x.type = DataType::kInt8;
  linear(x, {"x", "type", "float32, float16 or bfloat16", "int8"});
  quantize(x, o().q(), {"x", "type", "int8"});
  x.type = kUnknownType;
  linear(x, {"x", "type", "unknown"});
  quantize(x, o().q(), {"x", "type", "unknown"});

  ConstMatrixView dense = o().dense_w();
  dense.type = kUnknownType;
  pack(dense, o().packed(), {"dense weights", "type", "unknown"});
  MatrixView target = o().unpacked();
  target.type = kUnknownType;
  unpack(o().d.w(), target, {"dense weights", "type", "unknown"});
  target.type = DataType::kInt8;
  unpack(o().d.w(), target, {"int8", "scales"});
}

// ---- Overlap ----

TEST_F(CudaBadInput, OutputOverlapsAnInput) {
  // y of [3, 4] bf16 is laid over a part of each input in turn.
  const auto over = [&](const void* base, std::int64_t offset = 0) {
    MatrixView bad = o().y();
    bad.data = const_cast<void*>(base);
    bad.offset = offset;
    return bad;
  };
  const ActivationView x = o().d.x();
  const WeightView w = o().d.w();
  const BiasView bias = o().d.bias();
  const std::vector<std::pair<const void*, std::string>> inputs = {{x.values, "activation values"},
                                                                   {x.scales, "activation scales"},
                                                                   {w.bits, "weight bits"},
                                                                   {w.scales, "weight scales"},
                                                                   {bias.data, "bias"}};
  for (const auto& [base, input] : inputs) {
    for (const std::int64_t offset : {0, 1, 5}) {
      expect_refused(
          [&, b = base] { cuda::binary_gemm(x, w, bias, over(b, offset), o().launch()); },
          {"y overlaps " + input});
    }
    if (input.find("activation") == 0) continue;
    expect_refused(
        [&, b = base] { cuda::binary_linear(o().dense_x(), w, bias, over(b), o().launch()); },
        {"y overlaps " + input});
  }
  // In place is not possible, nor is the last element over the first.
  for (const std::int64_t offset : {std::int64_t{0}, kM * kK - 1}) {
    expect_refused(
        [&] {
          cuda::binary_linear(o().dense_x(), w, {}, over(o().dense_x().data, offset), o().launch());
        },
        {"y overlaps x"});
  }
}

TEST_F(CudaBadInput, OtherOutputsOverlapInputs) {
  void* const dense_x = const_cast<void*>(o().dense_x().data);
  void* const dense_w = const_cast<void*>(o().dense_w().data);
  MutableActivationView target = o().q();
  target.values = static_cast<std::int8_t*>(dense_x);
  quantize(o().dense_x(), target, {"activation values overlaps x"});
  target = o().q();
  target.scales = static_cast<float*>(dense_x);
  quantize(o().dense_x(), target, {"activation scales overlaps x"});
  target = o().q();
  target.scales = reinterpret_cast<float*>(o().q().values);
  quantize(o().dense_x(), target, {"activation values overlaps activation scales"});

  MutableWeightView w = o().packed();
  w.bits = static_cast<std::uint32_t*>(dense_w);
  pack(o().dense_w(), w, {"weight bits overlaps dense weights"});
  w = o().packed();
  w.scales = static_cast<float16*>(dense_w);
  pack(o().dense_w(), w, {"weight scales overlaps dense weights"});
  w = o().packed();
  w.scales = reinterpret_cast<float16*>(o().packed().bits);
  pack(o().dense_w(), w, {"weight bits overlaps weight scales"});

  MatrixView dense = o().unpacked();
  dense.data = const_cast<std::uint32_t*>(o().d.w().bits);
  unpack(o().d.w(), dense, {"dense weights overlaps weight bits"});
}

TEST_F(CudaBadInput, TheWorkspaceOverlapsAnOperand) {
  // It is written while the operands are read, and read while y is written.
  const auto with_workspace = [&](const void* base) {
    cuda::Launch launch = o().launch();
    launch.workspace = {const_cast<void*>(base), std::size_t{1} << 20};
    expect_refused(
        [&] { cuda::binary_linear(o().dense_x(), o().d.w(), o().d.bias(), o().y(), launch); },
        {"overlaps"});
  };
  with_workspace(o().dense_x().data);
  with_workspace(o().y().data);
  with_workspace(o().d.w().bits);
  with_workspace(o().d.w().scales);
  with_workspace(o().d.bias().data);
}

TEST_F(CudaBadInput, InterleavedShardsOverlapOnlyWhereTheyTouch) {
  // One bf16 buffer of 3 rows of 516: x is 256 columns of it and y 4 others.
  GuardedBuffer buffer(3, 516, 2);
  Random random(3);
  fill_gaussian(buffer.view(kType), random);
  const DeviceBuffer on_device(buffer, stream());
  const MatrixView view = on_device.view(buffer, kType);
  const auto run = [&](std::int64_t x_column, std::int64_t y_column) {
    cuda::binary_linear(view.column_range(x_column, 256), o().d.w(), {},
                        view.column_range(y_column, 4), o().launch());
  };
  for (const std::int64_t column : {0, 4, 100, 251, 255, 256}) {
    SCOPED_TRACE(column);
    expect_refused([&] { run(column, column); }, {"y overlaps x"});
    expect_refused([&] { run(column, column + 255); }, {"y overlaps x"});
    EXPECT_NO_THROW(run(column, column + 256));
    if (column < 4) continue;
    EXPECT_NO_THROW(run(column, column - 4));
    expect_refused([&] { run(column, column - 3); }, {"y overlaps x"});
  }
  on_device.download(buffer, stream());
  EXPECT_TRUE(buffer.guards_intact());
}

// ---- The launch ----

TEST_F(CudaBadInput, WorkspaceOfTheLinearLayer) {
  const std::size_t needed = cuda::linear_workspace_bytes(kM, kK);
  ASSERT_GE(needed, static_cast<std::size_t>(kM * kK + kM * 4));
  const cuda::BinaryLinear layer =
      cuda::BinaryLinear::from_packed(o().d.w(), o().d.bias(), o().launch());
  const auto bad = [&](void* data, std::size_t bytes, const Parts& parts) {
    cuda::Launch launch = o().launch();
    launch.workspace = {data, bytes};
    for (const bool programmatic : {false, true}) {
      launch.programmatic = programmatic;
      expect_refused(
          [&] { cuda::binary_linear(o().dense_x(), o().d.w(), o().d.bias(), o().y(), launch); },
          parts);
      expect_refused([&] { layer(o().dense_x(), o().y(), launch); }, parts);
    }
  };
  void* const data = cuda::Workspace(o().workspace).data;
  bad(nullptr, 0, {"workspace", std::to_string(needed)});
  bad(nullptr, needed, {"workspace"});
  bad(data, 0, {"workspace", std::to_string(needed)});
  bad(data, 15, {"workspace", "15", std::to_string(needed)});
  bad(data, needed - 1, {"workspace", std::to_string(needed - 1), std::to_string(needed)});
  bad(static_cast<char*>(data) + 8, needed, {"16-byte aligned"});
  bad(static_cast<char*>(data) + 1, needed, {"16-byte aligned"});
  aligned_vector<char> on_host(needed);
  bad(on_host.data(), needed, {"workspace", "host"});
}

TEST_F(CudaBadInput, AKernelThatCannotTakeTheShape) {
  const auto forced = [&](const DeviceProblem& d, Kernel kernel, const Parts& parts) {
    DeviceOutput y(d.host.output(kType), kType, stream());
    cuda::Launch launch = o().launch();
    launch.kernel = kernel;
    expect_refused([&] { cuda::binary_gemm(d.x(), d.w(), {}, y.view(), launch); }, parts);
    const Shape& shape = d.host.shape;
    GuardedBuffer x(shape.m, shape.k, 2);
    const DeviceBuffer x_device(x, stream());
    const DeviceWorkspace workspace(cuda::linear_workspace_bytes(shape.m, shape.k), stream());
    launch.workspace = workspace;
    expect_refused(
        [&] { cuda::binary_linear(x_device.view(x, kType), d.w(), {}, y.view(), launch); }, parts);
    y.fetch();
    EXPECT_TRUE(y.host().untouched());
  };
  for (int value = 1; value < 256; ++value) {  // unknown ones too
    const auto kernel = static_cast<Kernel>(value);
    for (const std::int64_t m : {1, 4, 9}) {
      if (cuda::is_supported(kernel, m, 33, 256, 64)) continue;
      Problem p = make_problem({m, 33, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                               all_layouts()[0], 5);
      const DeviceProblem d(p, stream());
      forced(d, kernel, {"kernel", cuda::name(kernel)});
      if (HasFailure()) return;
    }
  }
  EXPECT_FALSE(cuda::is_supported(Kernel::kDecodeB1, 9, 33, 256, 64));
  EXPECT_FALSE(cuda::is_supported(static_cast<Kernel>(99), 1, 33, 256, 64));
  constexpr std::int64_t kTooMany = std::int64_t{1} << 31;
  expect_invalid([&] { cuda::is_supported(Kernel::kAuto, kTooMany, 33, 256, 64); },
                 {"M = 2147483648", "at most 2147483647"});
  expect_invalid([&] { cuda::is_supported(Kernel::kAuto, 1, kTooMany, 256, 64); },
                 {"N = 2147483648"});
  expect_invalid([&] { cuda::choose_kernel(1, 33, kTooMany, 64); }, {"K = 2147483648"});
  Problem nine = make_problem({9, 33, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                              all_layouts()[0], 5);
  const DeviceProblem d(nine, stream());
  forced(d, Kernel::kDecodeB1, {"decode_b1", "M = 9"});
}

TEST_F(CudaBadInput, AKernelThatWantsAnOrderForced) {
  for (const Kernel kernel : {Kernel::kMma, Kernel::kWgmma}) {
    if (!cuda::is_supported(kernel, kM, kN, kK, kG)) continue;
    const std::string called = cuda::name(kernel);
    SCOPED_TRACE(called);
    EXPECT_FALSE(cuda::is_supported(kernel, kM, kN, 0, kG));
    const std::size_t needed = cuda::linear_workspace_bytes(kM, kK);
    const auto bad = [&](const WeightView& w, const cuda::Workspace& workspace,
                         const Parts& parts) {
      const cuda::Launch launch = {stream(), workspace, false, kernel};
      expect_invalid([&] { cuda::binary_gemm(o().d.x(), w, {}, o().y(), launch); }, parts);
    };
    void* const data = cuda::Workspace(o().workspace).data;
    bad(o().d.w(), {}, {called, "workspace", "has 0"});
    bad(o().d.w(), {data, 100}, {called, "workspace", "has 100"});
    bad(o().d.w(), {static_cast<char*>(data) + 8, needed}, {"workspace", "16-byte aligned"});
    bad(o().d.w(), {o().y().data, needed}, {"workspace overlaps"});
    bad(o().d.w(), {const_cast<std::int8_t*>(o().d.x().values), needed}, {"workspace overlaps"});
    aligned_vector<char> on_host(needed);
    bad(o().d.w(), {on_host.data(), needed}, {"workspace", "host"});

    // Rows of bits that the copy engine can't address, of a view that is otherwise good.
    Problem odd = make_problem({kM, kN, kK, kG}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                               all_layouts()[2], 5);
    const DeviceProblem d(odd, stream());
    ASSERT_NE(d.w().bits_stride % 4, 0);
    bad(d.w(), o().workspace, {called, "16 bytes", std::to_string(d.w().bits_stride)});
    const cuda::Launch launch = {stream(), o().workspace, false, kernel};
    expect_invalid([&] { cuda::binary_linear(o().dense_x(), d.w(), {}, o().y(), launch); },
                   {called, "16 bytes"});
  }
}

TEST_F(CudaBadInput, Devices) {
  int count = 0;
  BINARY_GEMM_CHECK_CUDA(cudaGetDeviceCount(&count));
  for (const int device : {count, 63, 64, 9999, std::numeric_limits<int>::max()}) {
    EXPECT_ANY_THROW(cuda::prepare(device)) << device;
    EXPECT_ANY_THROW(cuda::supported_kernels(device)) << device;
    EXPECT_ANY_THROW(cuda::is_supported(Kernel::kAuto, 1, 1, 256, 64, device)) << device;
    EXPECT_ANY_THROW(cuda::choose_kernel(1, 1, 256, 64, device)) << device;
    cudaGetLastError();  // where it was CUDA that refused
  }
  int current = -1;
  BINARY_GEMM_CHECK_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

// ---- Where the memory is ----

TEST_F(CudaBadInput, HostPointers) {
  Problem& p = o().p;
  aligned_vector<bfloat16> y_host(kM * kN);
  MatrixView y = o().y();
  y.data = y_host.data();
  gemm_and_linear(o().d.w(), {}, y, {"y", "host"});

  WeightView w = o().d.w();
  w.bits = p.w().bits;
  gemm_and_linear(w, {}, o().y(), {"weight bits", "host"});
  unpack(w, o().unpacked(), {"weight bits", "host"});
  w = o().d.w();
  w.scales = p.w().scales;
  gemm_and_linear(w, {}, o().y(), {"weight scales", "host"});
  unpack(w, o().unpacked(), {"weight scales", "host"});
  gemm_and_linear(o().d.w(), p.bias(), o().y(), {"bias", "host"});

  ActivationView x = o().d.x();
  x.values = p.x().values;
  gemm(x, {"activation values", "host"});
  x = o().d.x();
  x.scales = p.x().scales;
  gemm(x, {"activation scales", "host"});
  linear(std::as_const(o().dense_x_host).view(kType), {"x", "host"});
  quantize(std::as_const(o().dense_x_host).view(kType), o().q(), {"x", "host"});
  MutableActivationView q = o().q();
  aligned_vector<std::int8_t> values(kM * kK);
  q.values = values.data();
  quantize(o().dense_x(), q, {"activation values", "host"});
  q = o().q();
  aligned_vector<float> scales(kM);
  q.scales = scales.data();
  quantize(o().dense_x(), q, {"activation scales", "host"});

  pack(std::as_const(o().dense_w_host).view(kType), o().packed(), {"dense weights", "host"});
  MutableWeightView target = o().packed();
  aligned_vector<std::uint32_t> bits(kN * kK / 32);
  target.bits = bits.data();
  pack(o().dense_w(), target, {"weight bits", "host"});
  target = o().packed();
  aligned_vector<float16> packed_scales(kN * kK / kG);
  target.scales = packed_scales.data();
  pack(o().dense_w(), target, {"weight scales", "host"});
  MatrixView dense = o().unpacked();
  aligned_vector<bfloat16> dense_host(kN * kK);
  dense.data = dense_host.data();
  unpack(o().d.w(), dense, {"dense weights", "host"});
  from_dense(std::as_const(o().dense_w_host).view(kType), kG, {}, {"dense weights", "host"});
}

class CudaBadInputOfTwoDevices : public CudaBadInput {
 protected:
  CudaBadInputOfTwoDevices() : CudaBadInput(2) {}
};

TEST_F(CudaBadInputOfTwoDevices, PointersOfAnotherDevice) {
  void* other = nullptr;
  {
    const CurrentDevice second(1);
    BINARY_GEMM_CHECK_CUDA(cudaMalloc(&other, 1 << 20));
  }
  const auto move = [other](auto& pointer) {
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(other);
  };

  MatrixView y = o().y();
  move(y.data);
  gemm_and_linear(o().d.w(), {}, y, {"device 0", "device 1"});
  WeightView w = o().d.w();
  move(w.bits);
  gemm_and_linear(w, {}, o().y(), {"weight", "device 0", "device 1"});
  w = o().d.w();
  move(w.scales);
  gemm_and_linear(w, {}, o().y(), {"weight scales", "device 0", "device 1"});
  BiasView bias = o().d.bias();
  move(bias.data);
  gemm_and_linear(o().d.w(), bias, o().y(), {"bias", "device 0", "device 1"});
  ActivationView x = o().d.x();
  move(x.values);
  gemm(x, {"activation values", "device 0", "device 1"});
  x = o().d.x();
  move(x.scales);
  gemm(x, {"activation scales", "device 0", "device 1"});
  ConstMatrixView dense = o().dense_x();
  move(dense.data);
  linear(dense, {"x", "device 0", "device 1"});
  quantize(dense, o().q(), {"device 0", "device 1"});
  dense = o().dense_w();
  move(dense.data);
  pack(dense, o().packed(), {"device 0", "device 1"});
  MatrixView unpacked = o().unpacked();
  move(unpacked.data);
  unpack(o().d.w(), unpacked, {"device 0", "device 1"});
  cuda::Launch launch = o().launch();
  move(launch.workspace.data);
  expect_refused([&] { cuda::binary_linear(o().dense_x(), o().d.w(), {}, o().y(), launch); },
                 {"workspace", "device 0", "device 1"});
  BINARY_GEMM_CHECK_CUDA(cudaFree(other));
}

// ---- Inside a capture ----

TEST_F(CudaBadInput, ACaptureSurvives) {
  cuda::prepare();
  GuardedBuffer expected(kM, kN, 2);
  expected_gemm(o().p.x(), o().p.w(), {}, expected.view(kType));
  DeviceOutput y(GuardedBuffer(kM, kN, 2), kType, stream());
  ActivationView x = o().d.x();
  x.k = 192;
  WeightView w = o().d.w();
  w.bits = o().p.w().bits;
  run({true, false}, stream(), [&] {
    gemm(x, {"K = 192", "K = 256"});
    gemm_and_linear(w, {}, o().y(), {"host"});
    cuda::binary_gemm(o().d.x(), o().d.w(), {}, y.view(), o().launch());
  });
  EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));
}

// ---- What is not wrong ----

class CudaEmptyInput : public DeviceTest {};

TEST_F(CudaEmptyInput, NoRowsOrColumns) {
  // Null pointers throughout: nothing may be read or written.
  const WeightView w = weight_view(static_cast<const std::uint32_t*>(nullptr),
                                   static_cast<const float16*>(nullptr), 0, 256, 64);
  const ActivationView x = activation_view(static_cast<const std::int8_t*>(nullptr),
                                           static_cast<const float*>(nullptr), 0, 256);
  Problem p = make_problem({3, 4, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts()[0], 1);
  const DeviceProblem d(p, stream());
  const auto empty = [](std::int64_t m, std::int64_t n) {
    return matrix_view(static_cast<bfloat16*>(nullptr), m, n);
  };
  const auto dense = [](std::int64_t m, std::int64_t n) {
    return matrix_view(static_cast<const bfloat16*>(nullptr), m, n);
  };
  for (const bool programmatic : {false, true}) {
    for (const bool captured : {false, true}) {
      const cuda::Launch launch{stream(), {}, programmatic};
      run({captured, programmatic}, stream(), [&] {
        EXPECT_NO_THROW(cuda::binary_gemm(x, d.w(), d.bias(), empty(0, 4), launch));
        EXPECT_NO_THROW(cuda::binary_gemm(d.x(), w, {}, empty(3, 0), launch));
        EXPECT_NO_THROW(cuda::binary_gemm(x, w, {}, empty(0, 0), launch));
        EXPECT_NO_THROW(cuda::binary_linear(dense(0, 256), d.w(), d.bias(), empty(0, 4), launch));
        EXPECT_NO_THROW(cuda::binary_linear(dense(0, 256), w, {}, empty(0, 0), launch));
        EXPECT_NO_THROW(
            cuda::quantize_activation(dense(0, 256),
                                      activation_view(static_cast<std::int8_t*>(nullptr),
                                                      static_cast<float*>(nullptr), 0, 256),
                                      launch));
        EXPECT_NO_THROW(cuda::pack_weights(dense(0, 256),
                                           weight_view(static_cast<std::uint32_t*>(nullptr),
                                                       static_cast<float16*>(nullptr), 0, 256, 64),
                                           launch));
        EXPECT_NO_THROW(cuda::unpack_weights(w, empty(0, 256), launch));
        EXPECT_NO_THROW(cuda::binary_gemm({}, {}, {}, {}, launch));
        EXPECT_NO_THROW(cuda::binary_linear({}, {}, {}, {}, launch));
        EXPECT_NO_THROW(cuda::pack_weights({}, {}, launch));
        EXPECT_NO_THROW(cuda::unpack_weights({}, {}, launch));
        EXPECT_NO_THROW(cuda::quantize_activation({}, {}, launch));
      });
    }
  }
  EXPECT_EQ(cuda::linear_workspace_bytes(0, 256), 0u);
  EXPECT_NO_THROW(cuda::BinaryLinear(0, 0));
  EXPECT_NO_THROW(cuda::BinaryLinear::from_packed({}));
  const cuda::BinaryLinear none = cuda::BinaryLinear::from_dense(dense(0, 256), 64);
  EXPECT_NO_THROW(none(dense(0, 256), empty(0, 0), {stream()}));
}

TEST_F(CudaEmptyInput, RowsButNoK) {
  // The sum over nothing is 0, so y is 0 * scale, plus the bias.
  constexpr DataType kFloat = DataType::kFloat32;
  for (const std::int64_t m : {3, 9, 40}) {
    Problem p = make_problem({m, 4, 0, 64}, ScalePattern::kUnit, ActivationPattern::kRandom,
                             all_layouts()[0], 1);
    float* scales = p.x_scales.row<float>(0);
    scales[0] = 2;
    scales[1] = -2;
    scales[2] = std::numeric_limits<float>::quiet_NaN();
    const DeviceProblem d(p, stream());
    const WeightView w = weight_view(static_cast<const std::uint32_t*>(nullptr),
                                     static_cast<const float16*>(nullptr), 4, 0, 64);
    ActivationView x = d.x();
    x.values = nullptr;
    for (const Kernel kernel : kernels_for({m, 4, 0, 64})) {
      SCOPED_TRACE(cuda::name(kernel));
      const DeviceWorkspace workspace(cuda::linear_workspace_bytes(m, 0), stream());
      const cuda::Launch launch{stream(), workspace, false, kernel};
      DeviceOutput y(p.output(kFloat), kFloat, stream());
      cuda::binary_gemm(x, w, {}, y.view(), launch);
      DeviceOutput biased(p.output(kFloat), kFloat, stream());
      cuda::binary_gemm(x, w, d.bias(), biased.view(), launch);
      y.fetch();
      biased.fetch();
      for (std::int64_t n = 0; n < 4; ++n) {
        EXPECT_EQ(float_bits(y.host().row<float>(0)[n]), 0u);
        EXPECT_EQ(float_bits(y.host().row<float>(1)[n]), 0x80000000u) << "0 * -2";
        EXPECT_TRUE(std::isnan(y.host().row<float>(2)[n]));
        EXPECT_EQ(biased.host().row<float>(0)[n], p.bias_data.row<float>(0)[n]);
        EXPECT_EQ(biased.host().row<float>(m == 3 ? 1 : m - 1)[n], p.bias_data.row<float>(0)[n]);
        EXPECT_TRUE(std::isnan(biased.host().row<float>(2)[n]));
      }
      EXPECT_TRUE(y.guards_intact());
      EXPECT_TRUE(biased.guards_intact());

      // Quantizing nothing gives scale 0.
      DeviceOutput q_scales(GuardedBuffer(1, m, 4), kFloat, stream());
      cuda::quantize_activation(matrix_view(static_cast<const float*>(nullptr), m, 0),
                                activation_view(static_cast<std::int8_t*>(nullptr),
                                                static_cast<float*>(q_scales.view().data), m, 0),
                                launch);
      q_scales.fetch();
      for (std::int64_t i = 0; i < m; ++i) {
        EXPECT_EQ(float_bits(q_scales.host().row<float>(0)[i]), 0u);
      }
      DeviceOutput linear(p.output(kFloat), kFloat, stream());
      cuda::binary_linear(matrix_view(static_cast<const float*>(nullptr), m, 0), w, d.bias(),
                          linear.view(), launch);
      linear.fetch();
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t n = 0; n < 4; ++n) {
          EXPECT_EQ(linear.host().row<float>(i)[n], p.bias_data.row<float>(0)[n]);
        }
      }
    }
  }
}

TEST_F(CudaEmptyInput, EmptyRangesOfViews) {
  Problem p = make_problem({3, 4, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts()[2], 1);
  const DeviceProblem d(p, stream());
  DeviceOutput y(p.output(kType, 3, 4), kType, stream());
  const cuda::Launch launch{stream()};
  EXPECT_NO_THROW(
      cuda::binary_gemm(d.x().row_range(3, 0), d.w(), d.bias(), y.view().row_range(3, 0), launch));
  EXPECT_NO_THROW(cuda::binary_gemm(d.x(), d.w().row_range(4, 0), d.bias().row_range(4, 0),
                                    y.view().column_range(4, 0), launch));
  y.fetch();
  EXPECT_TRUE(y.host().untouched());
  EXPECT_NO_THROW(cuda::binary_gemm(d.x().column_range(256, 0), d.w().column_range(256, 0), {},
                                    y.view(), launch));
  y.fetch();
  for (std::int64_t m = 0; m < 3; ++m) {
    for (std::int64_t n = 0; n < 4; ++n) EXPECT_EQ(y.host().row<bfloat16>(m)[n].bits & 0x7fffu, 0);
  }
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
