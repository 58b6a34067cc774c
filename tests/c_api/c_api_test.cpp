/// The C ABI gives the bits and the messages of the C++ API; what only C can get wrong (NULL,
/// struct_size, numbers that are no enumerator) is refused, and then nothing is written.

#include "binary_gemm/c_api.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "support.h"
#include "to_c.h"

// AddressSanitizer ends the program where an allocation fails.
#ifdef __has_feature
#if !__has_feature(address_sanitizer)
#define BINARY_GEMM_TEST_CAN_RUN_OUT
#endif
#elif !defined(__SANITIZE_ADDRESS__)
#define BINARY_GEMM_TEST_CAN_RUN_OUT
#endif

namespace binary_gemm {
namespace testing {
namespace {

// The layout is the ABI: a change here breaks programs that are compiled.
static_assert(sizeof(bg_matrix) == 48 && offsetof(bg_matrix, data) == 8);
static_assert(sizeof(bg_weights) == 80 && offsetof(bg_weights, n) == 24);
static_assert(sizeof(bg_activation) == 64 && offsetof(bg_activation, m) == 24);
static_assert(sizeof(bg_bias) == 32 && offsetof(bg_bias, n) == 16);
static_assert(sizeof(bg_execution) == 12);
static_assert(sizeof(bg_launch) == 32 && offsetof(bg_launch, stream) == 8);

// The numbers of the enumerators too.
static_assert(BG_FLOAT32 == static_cast<int>(DataType::kFloat32));
static_assert(BG_FLOAT16 == static_cast<int>(DataType::kFloat16));
static_assert(BG_BFLOAT16 == static_cast<int>(DataType::kBFloat16));
static_assert(BG_INT8 == static_cast<int>(DataType::kInt8));
static_assert(BG_PATH_AUTO == static_cast<int>(cpu::Path::kAuto));
static_assert(BG_PATH_PORTABLE == static_cast<int>(cpu::Path::kPortable));
static_assert(BG_PATH_AVX2 == static_cast<int>(cpu::Path::kAvx2));
static_assert(BG_PATH_AVX512_VNNI == static_cast<int>(cpu::Path::kAvx512Vnni));
static_assert(BG_PATH_AMX == static_cast<int>(cpu::Path::kAmx));

// ---- Equal bits ----

struct Case {
  Shape shape;
  DataType type;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.shape << " " << name(c.type);
}

// Strided operands with offsets, so that a field that is mixed up shows.
class CApiEquality : public ::testing::TestWithParam<Case> {
 protected:
  const Shape shape = GetParam().shape;
  const DataType type = GetParam().type;
  Problem p = make_problem(shape, ScalePattern::kMixed, ActivationPattern::kRandom,
                           all_layouts().back(), 7);
  GuardedBuffer expected = p.output(type);
  GuardedBuffer actual = p.output(type);
  const bg_weights w = to_c(p.w());
  const bg_activation x = to_c(p.x());
  const bg_bias bias = to_c(p.bias());
  const bg_matrix y = to_c(actual.view(type));

  void expect_equal_y() {
    EXPECT_TRUE(equal_bits(actual.view(type), expected.view(type)));
    EXPECT_TRUE(actual.guards_intact());
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, CApiEquality,
                         ::testing::Values(Case{{1, 5, 1024, 128}, DataType::kFloat32},
                                           Case{{3, 7, 1184, 32}, DataType::kBFloat16},
                                           Case{{9, 33, 2304, 256}, DataType::kFloat16}),
                         [](const auto& parameter) {
                           return std::string(name(parameter.param.type));
                         });

TEST_P(CApiEquality, Gemm) {
  cpu::binary_gemm(p.x(), p.w(), p.bias(), expected.view(type));
  ASSERT_TRUE(is_ok(bg_cpu_binary_gemm(&x, &w, &bias, &y, nullptr)));
  expect_equal_y();
  cpu::binary_gemm(p.x(), p.w(), {}, expected.view(type));
  ASSERT_TRUE(is_ok(bg_cpu_binary_gemm(&x, &w, nullptr, &y, nullptr)));
  expect_equal_y();
}

TEST_P(CApiEquality, GemmOfRows) {
  const std::int64_t half = shape.n / 2;
  for (const cpu::Path path : cpu::supported_paths()) {
    cpu::binary_gemm_rows(p.x(), p.w(), p.bias(), expected.view(type), half, shape.n, path);
    ASSERT_TRUE(is_ok(bg_cpu_binary_gemm_rows(&x, &w, &bias, &y, half, shape.n,
                                              static_cast<std::int32_t>(path))));
    expect_equal_y();
  }
}

TEST_P(CApiEquality, LinearAndLayers) {
  Random random(3);
  GuardedBuffer dense_x(shape.m, shape.k, size_of(type), 5, 3);
  fill_gaussian(dense_x.view(type), random);
  const bg_matrix x_matrix = to_c(dense_x.view(type));
  const bg_execution execution = bg_execution_of(2);
  cpu::binary_linear(dense_x.view(type), p.w(), p.bias(), expected.view(type));
  ASSERT_TRUE(is_ok(bg_cpu_binary_linear(&x_matrix, &w, &bias, &y, &execution)));
  expect_equal_y();

  bg_linear* layer = nullptr;
  const auto run_and_free = [&] {
    GuardedBuffer fresh = p.output(type);
    const bg_matrix fresh_y = to_c(fresh.view(type));
    EXPECT_TRUE(is_ok(bg_cpu_linear_run(layer, &x_matrix, &fresh_y, &execution)));
    EXPECT_TRUE(equal_bits(fresh.view(type), expected.view(type)));
    EXPECT_TRUE(fresh.guards_intact());
    bg_linear_free(layer);
  };
  ASSERT_TRUE(is_ok(bg_cpu_linear_from_packed(&w, &bias, &layer)));
  run_and_free();

  GuardedBuffer dense_w(shape.n, shape.k, size_of(type), 1, 2);
  fill_gaussian(dense_w.view(type), random);
  const bg_matrix w_matrix = to_c(dense_w.view(type));
  cpu::BinaryLinear::from_dense(dense_w.view(type), shape.g, p.bias())(dense_x.view(type),
                                                                       expected.view(type));
  ASSERT_TRUE(is_ok(bg_cpu_linear_from_dense(&w_matrix, shape.g, &bias, &layer)));
  run_and_free();
}

TEST_P(CApiEquality, PackUnpackQuantize) {
  Random random(4);
  GuardedBuffer dense(shape.n, shape.k, size_of(type), 1, 2);
  fill_gaussian(dense.view(type), random);
  const bg_matrix dense_matrix = to_c(dense.view(type));
  const std::int64_t words = shape.k / 32, groups = shape.k / shape.g;
  GuardedBuffer bits[2] = {{shape.n, words, 4, 1, 3}, {shape.n, words, 4, 1, 3}};
  GuardedBuffer scales[2] = {{shape.n, groups, 2, 2, 1}, {shape.n, groups, 2, 2, 1}};
  const auto packed = [&](int i) {
    return MutableWeightView{bits[i].base<std::uint32_t>(),
                             scales[i].base<float16>(),
                             shape.n,
                             shape.k,
                             shape.g,
                             bits[i].stride(),
                             scales[i].stride(),
                             bits[i].offset(),
                             scales[i].offset()};
  };
  cpu::pack_weights(dense.view(type), packed(0));
  const bg_weights target = to_c(packed(1));
  ASSERT_TRUE(is_ok(bg_cpu_pack_weights(&dense_matrix, &target, nullptr)));
  for (GuardedBuffer* const pair : {bits, scales}) {
    EXPECT_EQ(std::memcmp(pair[0].raw(), pair[1].raw(), pair[0].raw_bytes()), 0);
  }

  GuardedBuffer unpacked[2] = {{shape.n, shape.k, size_of(type), 3, 1},
                               {shape.n, shape.k, size_of(type), 3, 1}};
  cpu::unpack_weights(packed(0), unpacked[0].view(type));
  const bg_matrix unpacked_matrix = to_c(unpacked[1].view(type));
  ASSERT_TRUE(is_ok(bg_cpu_unpack_weights(&target, &unpacked_matrix, nullptr)));
  EXPECT_EQ(std::memcmp(unpacked[0].raw(), unpacked[1].raw(), unpacked[0].raw_bytes()), 0);

  GuardedBuffer values[2] = {{shape.n, shape.k, 1, 7, 5}, {shape.n, shape.k, 1, 7, 5}};
  GuardedBuffer token_scales[2] = {{1, shape.n, 4, 0, 1}, {1, shape.n, 4, 0, 1}};
  const auto quantized = [&](int i) {
    return MutableActivationView{values[i].base<std::int8_t>(),
                                 token_scales[i].base<float>(),
                                 shape.n,
                                 shape.k,
                                 values[i].stride(),
                                 values[i].offset(),
                                 token_scales[i].offset()};
  };
  cpu::quantize_activation(dense.view(type), quantized(0));
  const bg_activation q = to_c(quantized(1));
  ASSERT_TRUE(is_ok(bg_cpu_quantize_activation(&dense_matrix, &q, nullptr)));
  for (GuardedBuffer* const pair : {values, token_scales}) {
    EXPECT_EQ(std::memcmp(pair[0].raw(), pair[1].raw(), pair[0].raw_bytes()), 0);
  }
}

TEST(CApi, FusedSteps) {
  constexpr DataType kType = DataType::kBFloat16;
  Problem p = make_problem({2, 5, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts().back(), 6);
  GuardedBuffer dense(2, 512, 2, 3, 1), gain(1, 256, 4), residual = p.output(kType);
  Random random(6);
  fill_gaussian(dense.view(kType), random);
  fill_gaussian(gain.view(DataType::kFloat32), random);
  fill_gaussian(residual.view(kType), random);
  GuardedBuffer values[2] = {{2, 256, 1}, {2, 256, 1}}, scales[2] = {{1, 2, 4}, {1, 2, 4}};
  const auto quantized = [&](int i) {
    return activation_view(values[i].base<std::int8_t>(), scales[i].base<float>(), 2, 256);
  };
  const auto compare = [&] {
    EXPECT_TRUE(equal_bits(values[1].view(DataType::kInt8), values[0].view(DataType::kInt8)));
    EXPECT_TRUE(equal_bits(scales[1].view(DataType::kFloat32), scales[0].view(DataType::kFloat32)));
  };
  const ConstMatrixView x = std::as_const(dense).view(kType).column_range(100, 256);
  const bg_matrix x_matrix = to_c(x);
  const bg_matrix gain_matrix = to_c(gain.view(DataType::kFloat32));
  const bg_activation q = to_c(quantized(1));
  cpu::rms_norm_quantize(x, gain.view(DataType::kFloat32), 1e-5f, quantized(0));
  ASSERT_TRUE(is_ok(bg_cpu_rms_norm_quantize(&x_matrix, &gain_matrix, 1e-5f, &q, nullptr)));
  compare();
  cpu::rms_norm_quantize(x, {}, 1e-5f, quantized(0));
  ASSERT_TRUE(is_ok(bg_cpu_rms_norm_quantize(&x_matrix, nullptr, 1e-5f, &q, nullptr)));
  compare();
  const bg_matrix gate_up = to_c(dense.view(kType));
  cpu::swiglu_quantize(dense.view(kType), quantized(0));
  ASSERT_TRUE(is_ok(bg_cpu_swiglu_quantize(&gate_up, &q, nullptr)));
  compare();
  expect_error(bg_cpu_rms_norm_quantize(&x_matrix, nullptr, -1, &q, nullptr), BG_INVALID_ARGUMENT,
               "epsilon = -1");
  expect_error(bg_cpu_swiglu_quantize(&x_matrix, &q, nullptr), BG_INVALID_ARGUMENT,
               "gate_up is [2, 256]");

  const bg_activation products = to_c(p.x());
  const bg_weights w = to_c(p.w());
  const bg_bias bias = to_c(p.bias());
  const bg_matrix residual_matrix = to_c(residual.view(kType));
  GuardedBuffer y = p.output(kType), expected = p.output(kType);
  const bg_matrix y_matrix = to_c(y.view(kType));
  cpu::binary_gemm(p.x(), p.w(), {p.bias(), residual.view(kType)}, expected.view(kType));
  ASSERT_TRUE(is_ok(
      bg_cpu_binary_gemm_residual(&products, &w, &bias, &residual_matrix, &y_matrix, nullptr)));
  EXPECT_TRUE(equal_bits(y.view(kType), expected.view(kType)));
  cpu::binary_gemm(p.x(), p.w(), {}, expected.view(kType));
  ASSERT_TRUE(
      is_ok(bg_cpu_binary_gemm_residual(&products, &w, nullptr, nullptr, &y_matrix, nullptr)));
  EXPECT_TRUE(equal_bits(y.view(kType), expected.view(kType)));
  bg_matrix bad = residual_matrix;
  bad.rows = 1;
  expect_error(bg_cpu_binary_gemm_residual(&products, &w, nullptr, &bad, &y_matrix, nullptr),
               BG_INVALID_ARGUMENT, "residual is [1, 5]");
}

TEST(CApi, Q1_0) {
  const Shape shape{2, 5, 384, 128};
  Problem p = make_problem(shape, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts().front(), 8);
  const bg_weights w = to_c(p.w());
  std::vector<unsigned char> blocks(5 * 3 * 18);
  ASSERT_TRUE(is_ok(bg_export_q1_0(&w, blocks.data(), blocks.size())));
  std::vector<unsigned char> expected(blocks.size());
  export_q1_0(p.w(), expected.data(), expected.size());
  EXPECT_EQ(blocks, expected);

  GuardedBuffer bits(5, 12, 4), scales(5, 3, 2);
  const bg_weights again =
      bg_weights_of(bits.base<std::uint32_t>(), scales.base<std::uint16_t>(), 5, 384, 128);
  ASSERT_TRUE(is_ok(bg_import_q1_0(blocks.data(), blocks.size(), &again)));
  EXPECT_EQ(std::memcmp(bits.row<char>(0), p.bits.row<char>(0), 5 * 12 * 4), 0);

  GuardedBuffer x_data(2, 384, 4), y_data = p.output(DataType::kFloat32),
                                   y_expected = p.output(DataType::kFloat32);
  Random random(5);
  fill_gaussian(x_data.view(DataType::kFloat32), random);
  const bg_matrix x = to_c(x_data.view(DataType::kFloat32));
  const bg_matrix y = to_c(y_data.view(DataType::kFloat32));
  const bg_bias bias = to_c(p.bias());
  for (const bool with_bias : {false, true}) {
    bg_linear* layer = nullptr;
    ASSERT_TRUE(is_ok(bg_cpu_linear_from_q1_0(blocks.data(), blocks.size(), 5, 384,
                                              with_bias ? &bias : nullptr, &layer)));
    EXPECT_TRUE(is_ok(bg_cpu_linear_run(layer, &x, &y, nullptr)));
    bg_linear_free(layer);
    cpu::binary_linear(x_data.view(DataType::kFloat32), p.w(), with_bias ? p.bias() : BiasView{},
                       y_expected.view(DataType::kFloat32));
    EXPECT_TRUE(equal_bits(y_data.view(DataType::kFloat32), y_expected.view(DataType::kFloat32)));
  }

  bg_linear* layer = reinterpret_cast<bg_linear*>(&bits);
  expect_error(bg_cpu_linear_from_q1_0(blocks.data(), 100, 5, 384, nullptr, &layer),
               BG_INVALID_ARGUMENT, "take 270 bytes, but 100 were given");
  EXPECT_EQ(layer, nullptr);
  expect_error(bg_cpu_linear_from_q1_0(nullptr, blocks.size(), 5, 384, nullptr, &layer),
               BG_INVALID_ARGUMENT, "blocks is NULL");
  expect_error(
      bg_cpu_linear_from_q1_0(blocks.data(), 18, std::int64_t{1} << 45, 128, nullptr, &layer),
      BG_INVALID_ARGUMENT, "but 18 were given");
}

// ---- Wrong arguments ----

// Good arguments, which each test spoils in one way.
class CApiBadInput : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_TRUE(y_buffer.untouched());
    EXPECT_TRUE(q_values.untouched());
    EXPECT_TRUE(q_scales.untouched());
    EXPECT_TRUE(packed_bits.untouched());
    EXPECT_TRUE(packed_scales.untouched());
    EXPECT_EQ(layer, nullptr);
    EXPECT_TRUE(p.guards_intact());
  }

  static constexpr DataType kType = DataType::kBFloat16;
  Problem p = make_problem({3, 4, 256, 64}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts().front(), 1);
  GuardedBuffer y_buffer = p.output(kType), q_values{3, 256, 1}, q_scales{1, 3, 4},
                packed_bits{4, 8, 4}, packed_scales{4, 4, 2}, dense_data{4, 256, 2},
                x_data{3, 256, 2};
  bg_activation x = to_c(p.x());
  bg_weights w = to_c(p.w());
  bg_bias bias = to_c(p.bias());
  bg_matrix y = to_c(y_buffer.view(kType));
  bg_matrix dense = to_c(dense_data.view(kType));
  bg_matrix x_matrix = to_c(x_data.view(kType));
  bg_activation q = bg_activation_of(q_values.base<std::int8_t>(), q_scales.base<float>(), 3, 256);
  bg_weights packed = bg_weights_of(packed_bits.base<std::uint32_t>(),
                                    packed_scales.base<std::uint16_t>(), 4, 256, 64);
  bg_execution execution = bg_execution_of(1);
  bg_linear* layer = nullptr;
};

// Every function with every required pointer NULL.
TEST_F(CApiBadInput, Null) {
  const auto null = [](bg_status status, const char* name) {
    expect_error(status, BG_INVALID_ARGUMENT, std::string(name) + " is NULL");
  };
  null(bg_cpu_pack_weights(nullptr, &packed, nullptr), "dense");
  null(bg_cpu_pack_weights(&dense, nullptr, nullptr), "w");
  null(bg_cpu_unpack_weights(nullptr, &dense, nullptr), "w");
  null(bg_cpu_unpack_weights(&w, nullptr, nullptr), "dense");
  null(bg_cpu_quantize_activation(nullptr, &q, nullptr), "x");
  null(bg_cpu_quantize_activation(&x_matrix, nullptr, nullptr), "q");
  null(bg_cpu_rms_norm_quantize(nullptr, nullptr, 0, &q, nullptr), "x");
  null(bg_cpu_rms_norm_quantize(&x_matrix, nullptr, 0, nullptr, nullptr), "q");
  null(bg_cpu_swiglu_quantize(nullptr, &q, nullptr), "gate_up");
  null(bg_cpu_swiglu_quantize(&x_matrix, nullptr, nullptr), "q");
  null(bg_cpu_binary_gemm_residual(nullptr, &w, nullptr, nullptr, &y, nullptr), "x");
  null(bg_cpu_binary_gemm_residual(&x, nullptr, nullptr, nullptr, &y, nullptr), "w");
  null(bg_cpu_binary_gemm_residual(&x, &w, nullptr, nullptr, nullptr, nullptr), "y");
  null(bg_cpu_binary_gemm(nullptr, &w, nullptr, &y, nullptr), "x");
  null(bg_cpu_binary_gemm(&x, nullptr, nullptr, &y, nullptr), "w");
  null(bg_cpu_binary_gemm(&x, &w, nullptr, nullptr, nullptr), "y");
  null(bg_cpu_binary_gemm_rows(nullptr, &w, nullptr, &y, 0, 4, 0), "x");
  null(bg_cpu_binary_gemm_rows(&x, nullptr, nullptr, &y, 0, 4, 0), "w");
  null(bg_cpu_binary_gemm_rows(&x, &w, nullptr, nullptr, 0, 4, 0), "y");
  null(bg_cpu_binary_linear(nullptr, &w, nullptr, &y, nullptr), "x");
  null(bg_cpu_binary_linear(&x_matrix, nullptr, nullptr, &y, nullptr), "w");
  null(bg_cpu_binary_linear(&x_matrix, &w, nullptr, nullptr, nullptr), "y");
  null(bg_cpu_linear_from_dense(nullptr, 64, nullptr, &layer), "dense");
  null(bg_cpu_linear_from_dense(&dense, 64, nullptr, nullptr), "layer");
  null(bg_cpu_linear_from_packed(nullptr, nullptr, &layer), "w");
  null(bg_cpu_linear_from_packed(&w, nullptr, nullptr), "layer");
  null(bg_cpu_linear_from_q1_0(nullptr, 18, 1, 128, nullptr, &layer), "blocks");
  null(bg_cpu_linear_from_q1_0("", 0, 0, 128, nullptr, nullptr), "layer");
  null(bg_cpu_linear_run(nullptr, &x_matrix, &y, nullptr), "layer");
  null(bg_linear_weights(nullptr, &packed), "layer");
  null(bg_linear_bias(nullptr, &bias), "layer");
  null(bg_import_q1_0("", 0, nullptr), "w");
  null(bg_export_q1_0(nullptr, nullptr, 0), "w");

  bg_linear* good = nullptr;
  ASSERT_TRUE(is_ok(bg_cpu_linear_from_packed(&w, &bias, &good)));
  null(bg_cpu_linear_run(good, nullptr, &y, nullptr), "x");
  null(bg_cpu_linear_run(good, &x_matrix, nullptr, nullptr), "y");
  null(bg_linear_weights(good, nullptr), "w");
  null(bg_linear_bias(good, nullptr), "bias");
  bg_linear_free(good);
  bg_linear_free(nullptr);
}

TEST_F(CApiBadInput, StructSize) {
  const auto spoil = [](std::uint32_t& size, const char* name,
                        const std::function<bg_status()>& call) {
    const std::uint32_t right = size;
    for (const std::uint32_t wrong : {0u, right - 1, right + 1, 0xffffffffu}) {
      size = wrong;
      expect_error(call(), wrong < right ? BG_INVALID_ARGUMENT : BG_NOT_SUPPORTED,
                   std::string(name) + ": struct_size = " + std::to_string(wrong));
    }
    size = right;
  };
  const auto gemm = [&] { return bg_cpu_binary_gemm(&x, &w, &bias, &y, &execution); };
  spoil(x.struct_size, "x", gemm);
  spoil(w.struct_size, "w", gemm);
  spoil(bias.struct_size, "bias", gemm);
  spoil(y.struct_size, "y", gemm);
  spoil(execution.struct_size, "execution", gemm);

  // Structs that are written must be known to be long enough.
  bg_linear* good = nullptr;
  ASSERT_TRUE(is_ok(bg_cpu_linear_from_packed(&w, &bias, &good)));
  spoil(packed.struct_size, "w", [&] { return bg_linear_weights(good, &packed); });
  spoil(bias.struct_size, "bias", [&] { return bg_linear_bias(good, &bias); });
  bg_linear_free(good);
}

TEST_F(CApiBadInput, NumbersThatAreNoEnumerator) {
  for (const std::int32_t type : {-1, 4, 255, 256, 257, std::numeric_limits<std::int32_t>::min()}) {
    y.type = dense.type = type;
    expect_error(bg_cpu_binary_gemm(&x, &w, nullptr, &y, nullptr), BG_INVALID_ARGUMENT,
                 "an unknown DataType");
    expect_error(bg_cpu_pack_weights(&dense, &packed, nullptr), BG_INVALID_ARGUMENT,
                 "an unknown DataType");
    expect_error(bg_cpu_linear_from_dense(&dense, 64, nullptr, &layer), BG_INVALID_ARGUMENT,
                 "an unknown DataType");
  }
  y = to_c(y_buffer.view(kType));
  for (const std::int32_t path : {-1, 5, 255, 256, 257}) {
    execution.path = path;
    expect_error(bg_cpu_binary_gemm(&x, &w, nullptr, &y, &execution), BG_INVALID_ARGUMENT,
                 "no path unknown");
    expect_error(bg_cpu_is_supported(4, 256, 64, path), BG_NOT_SUPPORTED, "no path unknown");
  }
}

// The rules of check.h hold, in its words; bad_input_test.cpp has them all.
TEST_F(CApiBadInput, TheMessagesOfTheLibrary) {
  const std::function<void()> spoil[] = {
      [&] { y.rows = -1; },
      [&] { y.row_stride = 3; },
      [&] { y.offset = std::numeric_limits<std::int64_t>::max(); },
      [&] { y.data = nullptr; },
      [&] { y.data = static_cast<char*>(y.data) + 8; },
      [&] { y.type = BG_INT8; },
      [&] { y.data = w.bits; },
      [&] { w.k = 255; },
      [&] { w.group_size = 0; },
      [&] { w.group_size = -128; },
      [&] { w.n = std::numeric_limits<std::int64_t>::max(); },
      [&] { w.scales = nullptr; },
      [&] { w.bits_stride = 7; },
      [&] { x.k = 128; },
      [&] { x.m = std::numeric_limits<std::int64_t>::min(); },
      [&] { x.scales = nullptr; },
      [&] { bias.n = 5; },
      [&] { execution.threads = -1; },
  };
  const bg_activation good_x = x;
  const bg_weights good_w = w;
  const bg_bias good_bias = bias;
  const bg_matrix good_y = y;
  const bg_execution good_execution = execution;
  for (const std::function<void()>& one : spoil) {
    x = good_x, w = good_w, bias = good_bias, y = good_y, execution = good_execution;
    one();
    std::string message;
    try {
      cpu::binary_gemm(
          ActivationView{x.values, x.scales, x.m, x.k, x.row_stride, x.offset, x.scales_offset},
          WeightView{w.bits, reinterpret_cast<float16*>(w.scales), w.n, w.k, w.group_size,
                     w.bits_stride, w.scales_stride, w.bits_offset, w.scales_offset},
          BiasView{bias.data, bias.n, bias.offset},
          MatrixView{y.data, static_cast<DataType>(y.type), y.rows, y.cols, y.row_stride, y.offset},
          {execution.threads});
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    ASSERT_FALSE(message.empty());
    EXPECT_EQ(bg_cpu_binary_gemm(&x, &w, &bias, &y, &execution), BG_INVALID_ARGUMENT);
    EXPECT_EQ(message, bg_last_error_message());
  }
}

#ifdef BINARY_GEMM_TEST_CAN_RUN_OUT
TEST_F(CApiBadInput, OutOfMemory) {
  // A bias of more bytes than an address space has: its size is told from the matrix.
  dense.rows = bias.n = std::int64_t{1} << 50;
  dense.cols = 0;
  expect_error(bg_cpu_linear_from_dense(&dense, 64, &bias, &layer), BG_OUT_OF_MEMORY, "memory");
}
#endif

TEST(CApi, MessagesAreOfTheirThread) {
  expect_error(bg_cpu_is_supported(-1, 128, 128, 0), BG_INVALID_ARGUMENT, "[-1, 128]");
  std::thread([] {
    EXPECT_STREQ(bg_last_error_message(), "");
    expect_error(bg_cpu_is_supported(1, 128, 77, 0), BG_INVALID_ARGUMENT, "77");
  }).join();
  EXPECT_NE(std::string(bg_last_error_message()).find("[-1, 128]"), std::string::npos);
  // A success keeps it.
  EXPECT_TRUE(is_ok(bg_cpu_is_supported(1, 128, 128, 0)));
  EXPECT_NE(std::string(bg_last_error_message()).find("[-1, 128]"), std::string::npos);
}

TEST(CApi, PathsThatAreSupported) {
  for (std::int32_t path = 0; path <= BG_PATH_AMX; ++path) {
    const bool supported = cpu::is_supported(static_cast<cpu::Path>(path));
    EXPECT_EQ(bg_cpu_is_supported(1, 128, 128, path), supported ? BG_OK : BG_NOT_SUPPORTED);
  }
}

// This program links the CPU's library alone.
TEST(CApi, WithoutCuda) {
  size_t bytes = 0;
  const auto expect_refused = [](bg_status status) {
    expect_error(status, BG_NOT_SUPPORTED, "binary_gemm_cuda");
  };
  bg_linear* layer = reinterpret_cast<bg_linear*>(&bytes);
  expect_refused(bg_cuda_prepare(0));
  expect_refused(bg_cuda_is_supported(1, 128, 128, -1));
  expect_refused(bg_cuda_linear_workspace_bytes(1, 128, &bytes));
  expect_refused(bg_cuda_gemm_workspace_bytes(1, 128, &bytes));
  expect_refused(bg_cuda_pack_weights(nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_unpack_weights(nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_quantize_activation(nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_rms_norm_quantize(nullptr, nullptr, 0, nullptr, nullptr));
  expect_refused(bg_cuda_swiglu_quantize(nullptr, nullptr, nullptr));
  expect_refused(
      bg_cuda_binary_gemm_residual(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_binary_gemm(nullptr, nullptr, nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_binary_linear(nullptr, nullptr, nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_linear_from_dense(nullptr, 128, nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_linear_from_packed(nullptr, nullptr, nullptr, nullptr));
  expect_refused(bg_cuda_linear_from_q1_0(nullptr, 0, 0, 0, nullptr, nullptr, &layer));
  EXPECT_EQ(layer, nullptr);
  expect_refused(bg_cuda_linear_run(nullptr, nullptr, nullptr, nullptr));
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
