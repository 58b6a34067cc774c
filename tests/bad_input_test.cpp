/// Every wrong argument throws std::invalid_argument, whose message has the values and the rule,
/// and nothing is written. Empty products are not wrong.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "support.h"

namespace binary_gemm {
namespace testing {
namespace {

constexpr DataType kType = DataType::kBFloat16;

// Good arguments for every function, which each test spoils in one way.
class BadInput : public ::testing::Test {
 protected:
  static constexpr std::int64_t kM = 3;
  static constexpr std::int64_t kN = 4;
  static constexpr std::int64_t kK = 256;
  static constexpr std::int64_t kG = 64;

  BadInput() {
    Random random(1);
    fill_gaussian(dense_x.view(kType), random);
    fill_gaussian(dense_w.view(kType), random);
  }

  void TearDown() override {
    // Every call here was wrong, so no output may have changed.
    EXPECT_TRUE(y_buffer.untouched());
    EXPECT_TRUE(q_values.untouched());
    EXPECT_TRUE(q_scales.untouched());
    EXPECT_TRUE(packed_bits.untouched());
    EXPECT_TRUE(packed_scales.untouched());
    EXPECT_TRUE(unpacked.untouched());
    EXPECT_TRUE(p.guards_intact());
  }

  // The product and the linear layer share the rules of w, bias and y.
  void gemm_and_linear(const WeightView& w, const BiasView& bias, const MatrixView& y,
                       const Parts& parts) {
    expect_invalid([&] { cpu::binary_gemm(p.x(), w, bias, y); }, parts);
    expect_invalid([&] { cpu::binary_gemm_rows(p.x(), w, bias, y, 0, 1); }, parts);
    expect_invalid([&] { cpu::binary_linear(dense_x.view(kType), w, bias, y); }, parts);
  }
  void gemm(const ActivationView& x, const Parts& parts) {
    expect_invalid([&] { cpu::binary_gemm(x, p.w(), p.bias(), y()); }, parts);
    expect_invalid([&] { cpu::binary_gemm_rows(x, p.w(), p.bias(), y(), 0, 1); }, parts);
  }
  void linear(const ConstMatrixView& x, const Parts& parts) {
    expect_invalid([&] { cpu::binary_linear(x, p.w(), p.bias(), y()); }, parts);
  }
  void quantize(const ConstMatrixView& x, const MutableActivationView& q, const Parts& parts) {
    expect_invalid([&] { cpu::quantize_activation(x, q); }, parts);
  }
  void pack(const ConstMatrixView& dense, const MutableWeightView& w, const Parts& parts) {
    expect_invalid([&] { cpu::pack_weights(dense, w); }, parts);
  }
  void unpack(const WeightView& w, const MatrixView& dense, const Parts& parts) {
    expect_invalid([&] { cpu::unpack_weights(w, dense); }, parts);
  }
  // A weight view that no function may take, whatever the other operands are.
  void weights(const WeightView& w, const Parts& parts) {
    gemm_and_linear(w, {}, y(), parts);
    unpack(w, unpacked.view(kType), parts);
    expect_invalid([&] { cpu::BinaryLinear::from_packed(w); }, parts);
    MutableWeightView target = packed();
    target.n = w.n;
    target.k = w.k;
    target.group_size = w.group_size;
    target.bits_stride = w.bits_stride;
    target.scales_stride = w.scales_stride;
    target.bits_offset = w.bits_offset;
    target.scales_offset = w.scales_offset;
    if (w.bits == nullptr) target.bits = nullptr;
    if (w.scales == nullptr) return;  // pack takes weights without scales
    pack(dense_w.view(kType), target, parts);
  }

  MatrixView y() { return y_buffer.view(kType); }
  MutableActivationView q() {
    return activation_view(q_values.base<std::int8_t>(), q_scales.base<float>(), kM, kK);
  }
  MutableWeightView packed() {
    return weight_view(packed_bits.base<std::uint32_t>(), packed_scales.base<float16>(), kN, kK,
                       kG);
  }

  Problem p = make_problem({kM, kN, kK, kG}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts()[0], 1);
  GuardedBuffer dense_x{kM, kK, 2};
  GuardedBuffer dense_w{kN, kK, 2};
  GuardedBuffer y_buffer{kM, kN, 2};
  GuardedBuffer q_values{kM, kK, 1};
  GuardedBuffer q_scales{1, kM, 4};
  GuardedBuffer packed_bits{kN, kK / 32, 4};
  GuardedBuffer packed_scales{kN, kK / kG, 2};
  GuardedBuffer unpacked{kN, kK, 2};
};

// ---- Weights ----

TEST_F(BadInput, KMustBeAMultipleOf32AndOfG) {
  WeightView w = p.w();
  for (const std::int64_t k : {1, 16, 31, 33, 255}) {
    w.k = k;
    weights(w, {"K = " + std::to_string(k), "multiple of 32"});
    expect_invalid([&] { cpu::BinaryLinear(4, k); }, {"K = " + std::to_string(k), "multiple of"});
  }
  for (const std::int64_t k : {32, 96, 160, 224}) {
    w.k = k;
    weights(w, {"K = " + std::to_string(k), "multiple of the group size 64"});
    expect_invalid([&] { cpu::BinaryLinear(4, k); },
                   {"K = " + std::to_string(k), "multiple of the group size 128"});
  }
  expect_invalid(
      [&] { cpu::BinaryLinear::from_dense(dense_w.view(kType).column_range(0, 160), 64); },
      {"K = 160", "multiple of the group size 64"});
}

TEST_F(BadInput, GroupSizeMustBeKnown) {
  WeightView w = p.w();
  for (const std::int64_t g :
       {std::int64_t{0}, std::int64_t{-128}, std::int64_t{1}, std::int64_t{16}, std::int64_t{48},
        std::int64_t{96}, std::int64_t{512}, kHuge, -kHuge - 1}) {
    w.group_size = g;
    const Parts parts = {"group size = " + std::to_string(g), "32, 64, 128 or 256"};
    weights(w, parts);
    expect_invalid([&] { cpu::BinaryLinear(4, 256, g); }, parts);
    expect_invalid([&] { cpu::BinaryLinear::from_dense(dense_w.view(kType), g); }, parts);
  }
}

TEST_F(BadInput, WeightPointers) {
  WeightView w = p.w();
  w.bits = nullptr;
  weights(w, {"weight bits", "null", "[4, 8]"});
  w = p.w();
  w.scales = nullptr;
  const Parts no_scales = {"weight scales", "null", "[4, 4]"};
  gemm_and_linear(w, {}, y(), no_scales);
  expect_invalid([&] { cpu::BinaryLinear::from_packed(w); }, no_scales);
  w = p.w();
  w.bits = misaligned(w.bits);
  gemm_and_linear(w, {}, y(), {"weight bits", hex(w.bits), "16-byte aligned"});
  unpack(w, unpacked.view(kType), {"weight bits", hex(w.bits), "16-byte aligned"});
  w = p.w();
  w.scales = misaligned(w.scales);
  gemm_and_linear(w, {}, y(), {"weight scales", hex(w.scales), "16-byte aligned"});
  unpack(w, unpacked.view(kType), {"weight scales", hex(w.scales), "16-byte aligned"});
  // Odd addresses, one element from an aligned one.
  w = p.w();
  w.bits += 1;
  gemm_and_linear(w, {}, y(), {"weight bits", "16-byte aligned"});

  MutableWeightView target = packed();
  target.bits = misaligned(target.bits);
  pack(dense_w.view(kType), target, {"weight bits", hex(target.bits), "16-byte aligned"});
  target = packed();
  target.scales = misaligned(target.scales);
  pack(dense_w.view(kType), target, {"weight scales", hex(target.scales), "16-byte aligned"});
}

TEST_F(BadInput, WeightStrides) {
  for (const std::int64_t stride : {std::int64_t{7}, std::int64_t{0}, std::int64_t{-8}, -kHuge}) {
    WeightView w = p.w();
    w.bits_stride = stride;
    weights(w, {"weight bits", "stride = " + std::to_string(stride), "8"});
  }
  for (const std::int64_t stride : {std::int64_t{3}, std::int64_t{0}, std::int64_t{-1}}) {
    WeightView w = p.w();
    w.scales_stride = stride;
    weights(w, {"weight scales", "stride = " + std::to_string(stride), "4"});
  }
}

TEST_F(BadInput, WeightShapesAndOffsets) {
  WeightView w = p.w();
  w.n = -1;
  weights(w, {"[-1, 256]", "negative"});
  expect_invalid([&] { cpu::BinaryLinear(-1, 256); }, {"[-1, 256]", "negative"});
  w = p.w();
  w.k = -256;
  weights(w, {"[4, -256]", "negative"});
  expect_invalid([&] { cpu::BinaryLinear(4, -256); }, {"[4, -256]", "negative"});
  w = p.w();
  w.bits_offset = -1;
  weights(w, {"weight bits", "offset = -1", "negative"});
  w = p.w();
  w.scales_offset = -5;
  weights(w, {"weight scales", "offset = -5", "negative"});
}

TEST_F(BadInput, WeightSizesThatOverflow) {
  WeightView w = p.w();
  w.n = kHuge;
  weights(w, {std::to_string(kHuge), "256", "overflow"});
  expect_invalid([&] { cpu::BinaryLinear(kHuge, 256); }, {std::to_string(kHuge), "overflow"});
  w = p.w();
  w.n = std::int64_t{1} << 33;
  w.k = std::int64_t{1} << 33;
  weights(w, {std::to_string(w.n), "overflow"});
  w = p.w();
  w.bits_stride = kHuge;
  weights(w, {"weight bits", std::to_string(kHuge), "overflow"});
  w = p.w();
  w.bits_stride = kHuge / 4;  // rows * stride just fits int64; its bytes do not
  weights(w, {"weight bits", std::to_string(kHuge / 4), "overflow"});
  w = p.w();
  w.scales_stride = kHuge / 2;
  weights(w, {"weight scales", std::to_string(kHuge / 2), "overflow"});
  w = p.w();
  w.bits_offset = kHuge;
  weights(w, {"weight bits", std::to_string(kHuge), "overflow"});
  w = p.w();
  w.scales_offset = kHuge - 3;
  weights(w, {"weight scales", std::to_string(kHuge - 3), "overflow"});
}

// ---- Activations ----

TEST_F(BadInput, ActivationPointers) {
  ActivationView x = p.x();
  x.values = nullptr;
  gemm(x, {"activation values", "null", "[3, 256]"});
  x = p.x();
  x.scales = nullptr;
  gemm(x, {"activation scales", "null"});
  x = p.x();
  x.values = misaligned(x.values);
  gemm(x, {"activation values", hex(x.values), "16-byte aligned"});
  x = p.x();
  x.values += 1;
  gemm(x, {"activation values", hex(x.values), "16-byte aligned"});
  x = p.x();
  x.scales = misaligned(x.scales);
  gemm(x, {"activation scales", hex(x.scales), "16-byte aligned"});

  ConstMatrixView dense = dense_x.view(kType);
  dense.data = nullptr;
  linear(dense, {"x", "null", "[3, 256]"});
  quantize(dense, q(), {"x", "null", "[3, 256]"});
  dense.data = misaligned(dense_x.base<char>());
  linear(dense, {"x", hex(dense.data), "16-byte aligned"});
  quantize(dense, q(), {"x", hex(dense.data), "16-byte aligned"});

  MutableActivationView target = q();
  target.values = nullptr;
  quantize(dense_x.view(kType), target, {"activation values", "null"});
  target = q();
  target.scales = nullptr;
  quantize(dense_x.view(kType), target, {"activation scales", "null"});
  target = q();
  target.values = misaligned(target.values);
  quantize(dense_x.view(kType), target, {"activation values", "16-byte aligned"});
  target = q();
  target.scales = misaligned(target.scales);
  quantize(dense_x.view(kType), target, {"activation scales", "16-byte aligned"});
}

TEST_F(BadInput, ActivationStridesShapesAndOffsets) {
  for (const std::int64_t stride : {std::int64_t{255}, std::int64_t{0}, std::int64_t{-256}}) {
    const Parts parts = {"stride = " + std::to_string(stride), "256"};
    ActivationView x = p.x();
    x.row_stride = stride;
    gemm(x, parts);
    ConstMatrixView dense = dense_x.view(kType);
    dense.row_stride = stride;
    linear(dense, parts);
    quantize(dense, q(), parts);
    MutableActivationView target = q();
    target.row_stride = stride;
    quantize(dense_x.view(kType), target, parts);
  }
  ActivationView x = p.x();
  x.m = -3;
  gemm(x, {"-3", "negative"});
  x = p.x();
  x.k = -256;
  gemm(x, {"-256", "negative"});
  x = p.x();
  x.offset = -1;
  gemm(x, {"activation values", "offset = -1"});
  x = p.x();
  x.scales_offset = -2;
  gemm(x, {"activation scales", "offset = -2"});
  x = p.x();
  x.row_stride = kHuge;
  gemm(x, {"activation values", std::to_string(kHuge), "overflow"});
  x = p.x();
  x.offset = kHuge;
  gemm(x, {"activation values", std::to_string(kHuge), "overflow"});
  x = p.x();
  x.scales_offset = kHuge;
  gemm(x, {"activation scales", std::to_string(kHuge), "overflow"});

  ConstMatrixView dense = dense_x.view(kType);
  dense.row_stride = kHuge / 2;
  linear(dense, {"x", std::to_string(kHuge / 2), "overflow"});
  quantize(dense, q(), {"x", std::to_string(kHuge / 2), "overflow"});
  dense = dense_x.view(kType);
  dense.offset = -4;
  linear(dense, {"x", "offset = -4"});
  quantize(dense, q(), {"x", "offset = -4"});
  dense = dense_x.view(kType);
  dense.rows = -3;
  linear(dense, {"-3"});
  quantize(dense, q(), {"-3"});
  dense.rows = kM;
  dense.cols = -256;
  linear(dense, {"-256"});
  quantize(dense, q(), {"-256"});
}

TEST_F(BadInput, ShapesThatDisagree) {
  ActivationView x = p.x();
  x.k = 192;
  gemm(x, {"K = 192", "K = 256"});
  x = p.x();
  x.m = 2;
  gemm(x, {"[3, 4]", "[2, 4]"});
  linear(dense_x.view(kType).column_range(0, 128), {"K = 128", "K = 256"});
  linear(dense_x.view(kType).row_range(1, 1), {"[3, 4]", "[1, 4]"});
  quantize(dense_x.view(kType).row_range(0, 2), q(), {"[2, 256]", "[3, 256]"});
  quantize(dense_x.view(kType).column_range(0, 255), q(), {"[3, 255]", "[3, 256]"});

  gemm_and_linear(p.w().row_range(0, 3), {}, y(), {"[3, 4]", "[3, 3]"});
  gemm_and_linear(p.w().column_range(0, 128), {}, y(), {"K = 256", "K = 128"});
  gemm_and_linear(p.w(), {}, y().row_range(0, 2), {"[2, 4]", "[3, 4]"});
  gemm_and_linear(p.w(), {}, y().column_range(0, 3), {"[3, 3]", "[3, 4]"});
  MatrixView transposed = y();
  std::swap(transposed.rows, transposed.cols);
  transposed.row_stride = 4;
  gemm_and_linear(p.w(), {}, transposed, {"[4, 3]", "[3, 4]"});

  pack(dense_w.view(kType).row_range(0, 3), packed(), {"[3, 256]", "[4, 256]"});
  pack(dense_w.view(kType).column_range(0, 192), packed(), {"[4, 192]", "[4, 256]"});
  unpack(p.w(), unpacked.view(kType).row_range(0, 3), {"[3, 256]", "[4, 256]"});
  unpack(p.w(), unpacked.view(kType).column_range(0, 192), {"[4, 192]", "[4, 256]"});
}

// ---- Bias ----

TEST_F(BadInput, Bias) {
  for (const std::int64_t n :
       {std::int64_t{3}, std::int64_t{5}, std::int64_t{0}, std::int64_t{-4}, kHuge}) {
    BiasView bias = p.bias();
    bias.n = n;
    const Parts parts = {"bias has " + std::to_string(n), "N = 4"};
    gemm_and_linear(p.w(), bias, y(), parts);
    expect_invalid([&] { cpu::BinaryLinear::from_packed(p.w(), bias); }, parts);
    expect_invalid([&] { cpu::BinaryLinear::from_dense(dense_w.view(kType), 64, bias); }, parts);
  }
  BiasView bias = p.bias();
  bias.data = misaligned(bias.data);
  gemm_and_linear(p.w(), bias, y(), {"bias", hex(bias.data), "16-byte aligned"});
  expect_invalid([&] { cpu::BinaryLinear::from_packed(p.w(), bias); }, {"bias", "16-byte aligned"});
  bias = p.bias();
  bias.offset = -1;
  gemm_and_linear(p.w(), bias, y(), {"bias", "offset = -1"});
  bias.offset = kHuge;
  gemm_and_linear(p.w(), bias, y(), {"bias", std::to_string(kHuge), "overflow"});
}

// ---- y ----

TEST_F(BadInput, OutputPointersStridesAndShapes) {
  MatrixView bad = y();
  bad.data = nullptr;
  gemm_and_linear(p.w(), {}, bad, {"y", "null", "[3, 4]"});
  bad.data = misaligned(y_buffer.base<char>());
  gemm_and_linear(p.w(), {}, bad, {"y", hex(bad.data), "16-byte aligned"});
  for (const std::int64_t stride : {std::int64_t{3}, std::int64_t{0}, std::int64_t{-4}}) {
    bad = y();
    bad.row_stride = stride;
    gemm_and_linear(p.w(), {}, bad, {"y", "stride = " + std::to_string(stride), "4"});
  }
  bad = y();
  bad.offset = -1;
  gemm_and_linear(p.w(), {}, bad, {"y", "offset = -1"});
  bad.offset = kHuge / 4;
  gemm_and_linear(p.w(), {}, bad, {"y", std::to_string(kHuge / 4), "overflow"});
  bad = y();
  bad.row_stride = kHuge;
  gemm_and_linear(p.w(), {}, bad, {"y", std::to_string(kHuge), "overflow"});
  bad = y();
  bad.rows = -3;
  gemm_and_linear(p.w(), {}, bad, {"[-3, 4]"});

  MatrixView dense = unpacked.view(kType);
  dense.data = nullptr;
  unpack(p.w(), dense, {"dense weights", "null"});
  dense.data = misaligned(unpacked.base<char>());
  unpack(p.w(), dense, {"dense weights", hex(dense.data), "16-byte aligned"});
  dense = unpacked.view(kType);
  dense.row_stride = 255;
  unpack(p.w(), dense, {"dense weights", "stride = 255", "256"});
  dense = unpacked.view(kType);
  dense.offset = -7;
  unpack(p.w(), dense, {"dense weights", "offset = -7"});
  ConstMatrixView source = dense_w.view(kType);
  source.data = misaligned(dense_w.base<char>());
  pack(source, packed(), {"dense weights", hex(source.data), "16-byte aligned"});
  source.data = nullptr;
  pack(source, packed(), {"dense weights", "null"});
  source = dense_w.view(kType);
  source.row_stride = 100;
  pack(source, packed(), {"dense weights", "stride = 100", "256"});
}

TEST_F(BadInput, ExtentsThatWrapTheAddressSpace) {
  // Passes the 64-bit count of elements, but the last byte would lie beyond the address space.
  MatrixView bad = y();
  bad.type = DataType::kFloat32;
  bad.data = reinterpret_cast<void*>(~std::uintptr_t{0} - 15);
  gemm_and_linear(p.w(), {}, bad, {"y", "wraps the address space"});
  WeightView w = p.w();
  w.bits = reinterpret_cast<const std::uint32_t*>(~std::uintptr_t{0} - 31);
  gemm_and_linear(w, {}, y(), {"weight bits", "wraps the address space"});
}

// ---- Types ----

TEST_F(BadInput, Types) {
  MatrixView bad = y();
  bad.type = DataType::kInt8;
  gemm_and_linear(p.w(), {}, bad, {"y", "type", "float32, float16 or bfloat16", "int8"});
  bad.type = kUnknownType;
  gemm_and_linear(p.w(), {}, bad, {"y", "type", "unknown"});

  ConstMatrixView x = dense_x.view(kType);
  x.type = DataType::kInt8;
  linear(x, {"x", "type", "float32, float16 or bfloat16", "int8"});
  quantize(x, q(), {"x", "type", "int8"});
  x.type = kUnknownType;
  linear(x, {"x", "type", "unknown"});
  quantize(x, q(), {"x", "type", "unknown"});

  ConstMatrixView dense = dense_w.view(kType);
  dense.type = kUnknownType;
  pack(dense, packed(), {"dense weights", "type", "unknown"});
  MatrixView target = unpacked.view(kType);
  target.type = kUnknownType;
  unpack(p.w(), target, {"dense weights", "type", "unknown"});
  target.type = DataType::kInt8;
  unpack(p.w(), target, {"int8", "scales"});
}

// ---- Overlap ----

TEST_F(BadInput, OutputOverlapsAnInput) {
  // y of [3, 4] bf16 is laid over a part of each input in turn.
  const auto over = [&](const void* base, std::int64_t offset = 0) {
    MatrixView bad = y();
    bad.data = const_cast<void*>(base);
    bad.offset = offset;
    return bad;
  };
  const std::vector<std::pair<const void*, std::string>> inputs = {
      {p.values.base<void>(), "activation values"},
      {p.x_scales.base<void>(), "activation scales"},
      {p.bits.base<void>(), "weight bits"},
      {p.scales.base<void>(), "weight scales"},
      {p.bias_data.base<void>(), "bias"}};
  for (const auto& [base, input] : inputs) {
    for (const std::int64_t offset : {0, 1, 5}) {
      expect_invalid([&, b = base] { cpu::binary_gemm(p.x(), p.w(), p.bias(), over(b, offset)); },
                     {"y overlaps " + input});
    }
    if (input.find("activation") == 0) continue;
    expect_invalid(
        [&, b = base] { cpu::binary_linear(dense_x.view(kType), p.w(), p.bias(), over(b)); },
        {"y overlaps " + input});
  }
  // In place is not possible, nor is the last element over the first.
  for (const std::int64_t offset : {std::int64_t{0}, kM * kK - 1}) {
    expect_invalid(
        [&] {
          cpu::binary_linear(dense_x.view(kType), p.w(), {}, over(dense_x.base<void>(), offset));
        },
        {"y overlaps x"});
  }
  EXPECT_TRUE(p.guards_intact());
}

TEST_F(BadInput, OtherOutputsOverlapInputs) {
  MutableActivationView target = q();
  target.values = dense_x.base<std::int8_t>();
  quantize(dense_x.view(kType), target, {"activation values overlaps x"});
  target = q();
  target.scales = dense_x.base<float>();
  quantize(dense_x.view(kType), target, {"activation scales overlaps x"});
  target = q();
  target.scales = q_values.base<float>();
  quantize(dense_x.view(kType), target, {"activation values overlaps activation scales"});

  MutableWeightView w = packed();
  w.bits = dense_w.base<std::uint32_t>();
  pack(dense_w.view(kType), w, {"weight bits overlaps dense weights"});
  w = packed();
  w.scales = dense_w.base<float16>();
  pack(dense_w.view(kType), w, {"weight scales overlaps dense weights"});
  w = packed();
  w.scales = packed_bits.base<float16>();
  pack(dense_w.view(kType), w, {"weight bits overlaps weight scales"});

  MatrixView dense = unpacked.view(kType);
  dense.data = p.bits.base<void>();
  unpack(p.w(), dense, {"dense weights overlaps weight bits"});
  // Small enough to overlap this buffer and no other: its guards are 64 bytes and more.
  const MatrixView small = {p.scales.base<char>() - 64, kType, 1, 64, 64, 0};
  unpack(p.w().row_range(0, 1).column_range(0, 64), small,
         {"dense weights overlaps weight scales"});
}

// ---- The residual ----

TEST_F(BadInput, Residual) {
  GuardedBuffer buffer(kM, kN, 2);
  const ConstMatrixView good = std::as_const(buffer).view(kType);
  const auto residual = [&](const ConstMatrixView& r, const Parts& parts) {
    expect_invalid([&] { cpu::binary_gemm(p.x(), p.w(), {p.bias(), r}, y()); }, parts);
    expect_invalid([&] { cpu::binary_gemm_rows(p.x(), p.w(), {{}, r}, y(), 0, 1); }, parts);
    expect_invalid([&] { cpu::binary_linear(dense_x.view(kType), p.w(), {{}, r}, y()); }, parts);
  };
  residual(good.row_range(0, 2), {"residual is [2, 4]", "y is [3, 4]"});
  residual(good.column_range(0, 3), {"residual is [3, 3]", "y is [3, 4]"});
  ConstMatrixView bad = good;
  bad.type = DataType::kFloat32;
  residual(bad, {"residual", "float32", "y", "bfloat16"});
  bad.type = DataType::kInt8;
  residual(bad, {"residual", "int8"});
  bad = good;
  bad.data = misaligned(buffer.base<char>());
  residual(bad, {"residual", hex(bad.data), "16-byte aligned"});
  bad = good;
  bad.row_stride = 3;
  residual(bad, {"residual", "stride = 3"});
  bad = good;
  bad.offset = -2;
  residual(bad, {"residual", "offset = -2"});
  bad.offset = kHuge;
  residual(bad, {"residual", "overflow"});
  // y itself will do, but nothing else that overlaps it.
  bad = y();
  bad.offset = 1;
  residual(bad, {"y overlaps residual"});
  bad = y();
  bad.row_stride = 5;
  residual(bad, {"y overlaps residual"});
}

TEST_F(BadInput, ResidualsThatShareMemoryWithoutHarm) {
  // One buffer of 3 rows of 12: y is 4 columns, the residual the same or others.
  GuardedBuffer buffer(kM, 12, 2);
  Random random(5);
  fill_gaussian(buffer.view(kType), random);
  const MatrixView all = buffer.view(kType);
  for (const std::int64_t column : {0, 4, 8}) {
    EXPECT_NO_THROW(
        cpu::binary_gemm(p.x(), p.w(), {{}, all.column_range(column, 4)}, all.column_range(4, 4)));
  }
  for (const std::int64_t column : {1, 3, 5, 7}) {
    expect_invalid(
        [&] {
          cpu::binary_gemm(p.x(), p.w(), {{}, all.column_range(column, 4)}, all.column_range(4, 4));
        },
        {"y overlaps residual"});
  }
  // Of one row the stride is nothing.
  MatrixView row = all.row_range(0, 1).column_range(0, 4);
  MatrixView same = row;
  same.row_stride = 100;
  EXPECT_NO_THROW(cpu::binary_gemm(p.x().row_range(0, 1), p.w(), {{}, same}, row));
  // A residual may be an input too, here x.
  GuardedBuffer square(kM, kK, 2);
  fill_gaussian(square.view(kType), random);
  EXPECT_NO_THROW(cpu::binary_linear(square.view(kType), p.w(),
                                     {{}, square.view(kType).column_range(0, kN)},
                                     all.column_range(0, kN)));
  EXPECT_TRUE(buffer.guards_intact());
}

// ---- The fused steps ----

TEST_F(BadInput, RmsNormQuantize) {
  GuardedBuffer gain_buffer(1, kK, 4);
  Random random(6);
  fill_gaussian(gain_buffer.view(DataType::kFloat32), random);
  const ConstMatrixView x = dense_x.view(kType);
  const ConstMatrixView gain = std::as_const(gain_buffer).view(DataType::kFloat32);
  const auto norm = [&](const ConstMatrixView& a, const ConstMatrixView& b, float epsilon,
                        const MutableActivationView& target, const Parts& parts) {
    expect_invalid([&] { cpu::rms_norm_quantize(a, b, epsilon, target); }, parts);
  };
  const float infinity = std::numeric_limits<float>::infinity();
  norm(x, gain, -0.5f, q(), {"epsilon = -0.5", "not negative"});
  norm(x, gain, infinity, q(), {"epsilon = inf", "finite"});
  norm(x, gain, std::numeric_limits<float>::quiet_NaN(), q(), {"epsilon = nan"});
  norm(x, gain.column_range(0, 255), 1e-6f, q(), {"gain is [1, 255]", "[1, 256]"});
  norm(x, dense_w.view(kType), 1e-6f, q(), {"gain is [4, 256]", "[1, 256]"});
  ConstMatrixView bad = gain;
  bad.type = DataType::kInt8;
  norm(x, bad, 1e-6f, q(), {"gain", "int8"});
  bad = gain;
  bad.data = misaligned(gain_buffer.base<char>());
  norm(x, bad, 1e-6f, q(), {"gain", hex(bad.data), "16-byte aligned"});
  bad = gain;
  bad.offset = -1;
  norm(x, bad, 1e-6f, q(), {"gain", "offset = -1"});
  norm(x.column_range(0, 128), gain, 1e-6f, q(), {"x is [3, 128]", "[3, 256]"});
  norm(x.row_range(0, 2), gain, 1e-6f, q(), {"x is [2, 256]", "[3, 256]"});
  bad = x;
  bad.type = kUnknownType;
  norm(bad, gain, 1e-6f, q(), {"x", "unknown"});
  MutableActivationView target = q();
  target.values = gain_buffer.base<std::int8_t>();
  norm(x, gain, 1e-6f, target, {"activation values overlaps gain"});
  target = q();
  target.scales = gain_buffer.base<float>();
  norm(x, gain, 1e-6f, target, {"activation scales overlaps gain"});
  target.scales = dense_x.base<float>();
  norm(x, gain, 1e-6f, target, {"activation scales overlaps x"});
}

TEST_F(BadInput, SwigluQuantize) {
  GuardedBuffer buffer(kM, 2 * kK, 2);
  Random random(7);
  fill_gaussian(buffer.view(kType), random);
  const ConstMatrixView x = std::as_const(buffer).view(kType);
  const auto swiglu = [&](const ConstMatrixView& a, const MutableActivationView& target,
                          const Parts& parts) {
    expect_invalid([&] { cpu::swiglu_quantize(a, target); }, parts);
  };
  swiglu(x.column_range(0, kK), q(), {"gate_up is [3, 256]", "[3, 512]"});
  swiglu(x.column_range(0, 511), q(), {"gate_up is [3, 511]", "[3, 512]"});
  swiglu(x.row_range(1, 2), q(), {"gate_up is [2, 512]", "[3, 512]"});
  ConstMatrixView bad = x;
  bad.type = DataType::kInt8;
  swiglu(bad, q(), {"gate_up", "int8"});
  bad = x;
  bad.data = nullptr;
  swiglu(bad, q(), {"gate_up", "null"});
  bad = x;
  bad.row_stride = 500;
  swiglu(bad, q(), {"gate_up", "stride = 500", "512"});
  MutableActivationView target = q();
  target.values = buffer.base<std::int8_t>();
  swiglu(x, target, {"activation values overlaps gate_up"});
  target = q();
  target.scales = buffer.base<float>();
  swiglu(x, target, {"activation scales overlaps gate_up"});
  target = q();
  target.k = kHuge / 16;
  target.row_stride = target.k;
  swiglu(x, target, {"overflow"});
}

TEST_F(BadInput, InterleavedShardsOverlapOnlyWhereTheyTouch) {
  // One bf16 buffer of 3 rows of 516: x is 256 columns of it and y 4 others.
  GuardedBuffer buffer(3, 516, 2);
  Random random(3);
  fill_gaussian(buffer.view(kType), random);
  const auto run = [&](std::int64_t x_column, std::int64_t y_column) {
    cpu::binary_linear(buffer.view(kType).column_range(x_column, 256), p.w(), {},
                       buffer.view(kType).column_range(y_column, 4));
  };
  for (const std::int64_t column : {0, 4, 100, 251, 255, 256}) {
    SCOPED_TRACE(column);
    expect_invalid([&] { run(column, column); }, {"y overlaps x"});
    expect_invalid([&] { run(column, column + 255); }, {"y overlaps x"});
    EXPECT_NO_THROW(run(column, column + 256));
    if (column < 4) continue;
    EXPECT_NO_THROW(run(column, column - 4));
    expect_invalid([&] { run(column, column - 3); }, {"y overlaps x"});
  }
  EXPECT_TRUE(buffer.guards_intact());
  // Shards of rows of one buffer, next to each other.
  GuardedBuffer rows(6, 256, 2);
  fill_gaussian(rows.view(kType).row_range(0, 3), random);
  EXPECT_NO_THROW(cpu::binary_linear(rows.view(kType).row_range(0, 3), p.w(), {},
                                     rows.view(kType).row_range(3, 3).column_range(0, 4)));
  expect_invalid(
      [&] {
        cpu::binary_linear(rows.view(kType).row_range(0, 3), p.w(), {},
                           rows.view(kType).row_range(2, 3).column_range(0, 4));
      },
      {"y overlaps x"});
}

// ---- Execution ----

TEST_F(BadInput, PathsAndThreads) {
  const auto all = [&](const cpu::Execution& execution, const Parts& parts) {
    expect_invalid([&] { cpu::binary_gemm(p.x(), p.w(), p.bias(), y(), execution); }, parts);
    expect_invalid(
        [&] { cpu::binary_linear(dense_x.view(kType), p.w(), p.bias(), y(), execution); }, parts);
    expect_invalid([&] { cpu::quantize_activation(dense_x.view(kType), q(), execution); }, parts);
    const cpu::BinaryLinear layer = cpu::BinaryLinear::from_packed(p.w());
    expect_invalid([&] { layer(dense_x.view(kType), y(), execution); }, parts);
  };
  for (const int threads : {-1, std::numeric_limits<int>::min()}) {
    const Parts parts = {"threads = " + std::to_string(threads), "negative"};
    all({threads}, parts);
    expect_invalid([&] { cpu::pack_weights(dense_w.view(kType), packed(), {threads}); }, parts);
    expect_invalid([&] { cpu::unpack_weights(p.w(), unpacked.view(kType), {threads}); }, parts);
  }
  for (int value = 0; value < 256; ++value) {  // unknown ones too
    const auto path = static_cast<cpu::Path>(value);
    if (cpu::is_supported(path)) continue;
    const Parts parts = {"path", cpu::name(path)};
    all({1, path}, parts);
    expect_invalid([&] { cpu::binary_gemm_rows(p.x(), p.w(), p.bias(), y(), 0, kN, path); }, parts);
  }
  EXPECT_FALSE(cpu::is_supported(static_cast<cpu::Path>(99)));
}

TEST_F(BadInput, RowRangesOfTheProduct) {
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    expect_invalid([&] { cpu::binary_gemm_rows(p.x(), p.w(), {}, y(), begin, end); },
                   {"weight row", std::to_string(begin)});
  };
  rows(-1, 2);
  rows(0, 5);
  rows(3, 2);
  rows(5, 5);
  rows(4, 5);
  rows(0, kHuge);
  rows(-kHuge - 1, kHuge);
  rows(kHuge, -kHuge - 1);
}

// ---- Ranges of views ----

TEST_F(BadInput, RangesOfViews) {
  const auto all = [&](std::int64_t begin, std::int64_t count) {
    const Parts parts = {"range [" + std::to_string(begin) + ", +" + std::to_string(count) + ")"};
    const auto with = [&](const char* what, const char* size) {
      Parts all_parts = parts;
      all_parts.insert(all_parts.end(), {what, size});
      return all_parts;
    };
    expect_invalid([&] { y().row_range(begin, count); }, with("row", "3)"));
    expect_invalid([&] { y().column_range(begin, count); }, with("column", "4)"));
    expect_invalid([&] { p.w().row_range(begin, count); }, with("weight row", "4)"));
    expect_invalid([&] { p.x().row_range(begin, count); }, with("activation row", "3)"));
    expect_invalid([&] { p.bias().row_range(begin, count); }, with("bias", "4)"));
  };
  all(-1, 1);
  all(0, -1);
  all(0, 5);
  all(5, 0);
  all(4, 1);
  all(1, kHuge);
  all(kHuge, kHuge);
  all(-kHuge - 1, kHuge);

  const auto columns = [&](std::int64_t begin, std::int64_t count, const Parts& parts) {
    expect_invalid([&] { p.w().column_range(begin, count); }, parts);
  };
  columns(0, 320, {"weight column", "320", "256"});
  columns(-64, 64, {"weight column", "-64"});
  columns(256, 64, {"weight column", "256", "64"});
  columns(32, 64, {"begin = 32", "multiple of the group size = 64"});
  columns(64, 96, {"count = 96", "multiple of the group size = 64"});
  columns(1, 64, {"begin = 1", "64"});
  expect_invalid([&] { p.x().column_range(0, 257); }, {"activation column", "257", "256"});
  WeightView no_group = p.w();
  no_group.group_size = 0;
  expect_invalid([&] { no_group.column_range(0, 64); }, {"group size = 0"});
}

// ---- What is not wrong ----

TEST(EmptyInput, NoRowsOrColumns) {
  // Null pointers throughout: nothing may be read or written.
  const WeightView w = weight_view(static_cast<const std::uint32_t*>(nullptr),
                                   static_cast<const float16*>(nullptr), 0, 256, 64);
  const ActivationView x = activation_view(static_cast<const std::int8_t*>(nullptr),
                                           static_cast<const float*>(nullptr), 0, 256);
  const Problem p = make_problem({3, 4, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                                 all_layouts()[0], 1);
  const auto empty = [](std::int64_t m, std::int64_t n) {
    return matrix_view(static_cast<bfloat16*>(nullptr), m, n);
  };
  const auto dense = [](std::int64_t m, std::int64_t n) {
    return matrix_view(static_cast<const bfloat16*>(nullptr), m, n);
  };
  std::vector<cpu::Path> paths = cpu::supported_paths();
  paths.push_back(cpu::Path::kAuto);
  for (const cpu::Path path : paths) {
    const cpu::Execution execution{2, path};
    EXPECT_NO_THROW(cpu::binary_gemm(x, p.w(), p.bias(), empty(0, 4), execution));
    EXPECT_NO_THROW(cpu::binary_gemm(p.x(), w, {}, empty(3, 0), execution));
    EXPECT_NO_THROW(cpu::binary_gemm(x, w, {}, empty(0, 0), execution));
    EXPECT_NO_THROW(cpu::binary_gemm_rows(x, p.w(), p.bias(), empty(0, 4), 1, 3, path));
    EXPECT_NO_THROW(cpu::binary_gemm_rows(p.x(), w, {}, empty(3, 0), 0, 0, path));
    EXPECT_NO_THROW(cpu::binary_linear(dense(0, 256), p.w(), p.bias(), empty(0, 4), execution));
    EXPECT_NO_THROW(cpu::binary_linear(dense(0, 256), w, {}, empty(0, 0), execution));
    EXPECT_NO_THROW(cpu::quantize_activation(
        dense(0, 256),
        activation_view(static_cast<std::int8_t*>(nullptr), static_cast<float*>(nullptr), 0, 256),
        execution));
  }
  EXPECT_NO_THROW(
      cpu::pack_weights(dense(0, 256), weight_view(static_cast<std::uint32_t*>(nullptr),
                                                   static_cast<float16*>(nullptr), 0, 256, 64)));
  EXPECT_NO_THROW(cpu::unpack_weights(w, empty(0, 256)));
  EXPECT_NO_THROW(cpu::binary_gemm({}, {}, {}, {}));
  EXPECT_NO_THROW(cpu::binary_linear({}, {}, {}, {}));
  EXPECT_NO_THROW(cpu::pack_weights({}, {}));
  EXPECT_NO_THROW(cpu::unpack_weights({}, {}));
  EXPECT_NO_THROW(cpu::quantize_activation({}, {}));
  EXPECT_NO_THROW(cpu::BinaryLinear(0, 0));
  EXPECT_NO_THROW(cpu::BinaryLinear::from_packed({}));
  const cpu::BinaryLinear none = cpu::BinaryLinear::from_dense(dense(0, 256), 64);
  EXPECT_NO_THROW(none(dense(0, 256), empty(0, 0)));
}

TEST(EmptyInput, RowsButNoK) {
  // The sum over nothing is 0, so y is 0 * scale, plus the bias.
  constexpr DataType kFloat = DataType::kFloat32;
  Problem p = make_problem({3, 4, 0, 64}, ScalePattern::kUnit, ActivationPattern::kRandom,
                           all_layouts()[0], 1);
  const WeightView w = weight_view(static_cast<const std::uint32_t*>(nullptr),
                                   static_cast<const float16*>(nullptr), 4, 0, 64);
  ActivationView x = p.x();
  x.values = nullptr;
  float* scales = p.x_scales.row<float>(0);
  scales[0] = 2;
  scales[1] = -2;
  scales[2] = std::numeric_limits<float>::quiet_NaN();
  std::vector<cpu::Path> paths = cpu::supported_paths();
  paths.push_back(cpu::Path::kAuto);
  for (const cpu::Path path : paths) {
    SCOPED_TRACE(cpu::name(path));
    const cpu::Execution execution{2, path};
    GuardedBuffer y = p.output(kFloat);
    cpu::binary_gemm(x, w, {}, y.view(kFloat), execution);
    GuardedBuffer biased = p.output(kFloat);
    cpu::binary_gemm(x, w, p.bias(), biased.view(kFloat), execution);
    for (std::int64_t n = 0; n < 4; ++n) {
      EXPECT_EQ(bits_at(y.view(kFloat), 0, n), 0u);
      EXPECT_EQ(bits_at(y.view(kFloat), 1, n), 0x80000000u) << "0 * -2";
      EXPECT_TRUE(std::isnan(y.row<float>(2)[n]));
      EXPECT_EQ(biased.row<float>(0)[n], p.bias_data.row<float>(0)[n]);
      EXPECT_EQ(biased.row<float>(1)[n], p.bias_data.row<float>(0)[n]);
      EXPECT_TRUE(std::isnan(biased.row<float>(2)[n]));
    }
    EXPECT_TRUE(y.guards_intact());
    EXPECT_TRUE(biased.guards_intact());

    // Quantizing nothing gives scale 0.
    GuardedBuffer q_scales(1, 3, 4);
    cpu::quantize_activation(
        matrix_view(static_cast<const float*>(nullptr), 3, 0),
        activation_view(static_cast<std::int8_t*>(nullptr), q_scales.base<float>(), 3, 0),
        execution);
    for (std::int64_t m = 0; m < 3; ++m) EXPECT_EQ(float_bits(q_scales.row<float>(0)[m]), 0u);
    GuardedBuffer linear = p.output(kFloat);
    cpu::binary_linear(matrix_view(static_cast<const float*>(nullptr), 3, 0), w, p.bias(),
                       linear.view(kFloat), execution);
    for (std::int64_t m = 0; m < 3; ++m) {
      for (std::int64_t n = 0; n < 4; ++n) {
        EXPECT_EQ(linear.row<float>(m)[n], p.bias_data.row<float>(0)[n]);
      }
    }
  }
  const cpu::BinaryLinear layer = cpu::BinaryLinear::from_packed(w, p.bias());
  GuardedBuffer y = p.output(kFloat);
  layer(matrix_view(static_cast<const float*>(nullptr), 3, 0), y.view(kFloat));
  EXPECT_EQ(y.row<float>(2)[3], p.bias_data.row<float>(0)[3]);
}

TEST(EmptyInput, EmptyRangesOfViews) {
  const Problem p = make_problem({3, 4, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                                 all_layouts()[2], 1);
  GuardedBuffer y = p.output(kType, 3, 4);
  EXPECT_NO_THROW(
      cpu::binary_gemm(p.x().row_range(3, 0), p.w(), p.bias(), y.view(kType).row_range(3, 0)));
  EXPECT_NO_THROW(cpu::binary_gemm(p.x(), p.w().row_range(4, 0), p.bias().row_range(4, 0),
                                   y.view(kType).column_range(4, 0)));
  EXPECT_TRUE(y.untouched());
  EXPECT_NO_THROW(
      cpu::binary_gemm(p.x().column_range(256, 0), p.w().column_range(256, 0), {}, y.view(kType)));
  for (std::int64_t m = 0; m < 3; ++m) {
    for (std::int64_t n = 0; n < 4; ++n) EXPECT_EQ(bits_at(y.view(kType), m, n), 0u);
  }
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
