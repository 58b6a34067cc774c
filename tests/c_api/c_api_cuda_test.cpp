/// The C ABI on CUDA gives the bits of the CPU, and its errors have a status.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/c_api.h"
#include "device_support.h"
#include "to_c.h"

namespace binary_gemm {
namespace testing {
namespace {

constexpr DataType kType = DataType::kBFloat16;

class CApiCuda : public DeviceTest {
 protected:
  static constexpr Shape kShape{5, 37, 1152, 128};

  // The operands on the host; strided, with offsets.
  Problem p = make_problem(kShape, ScalePattern::kMixed, ActivationPattern::kRandom,
                           all_layouts().back(), 7);
  GuardedBuffer x_data{kShape.m, kShape.k, size_of(kType), 5, 3};
  GuardedBuffer expected = p.output(kType);

  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped()) return;
    Random random(3);
    fill_gaussian(x_data.view(kType), random);
    ASSERT_TRUE(is_ok(bg_cuda_prepare(-1)));
    ASSERT_TRUE(is_ok(bg_cuda_is_supported(kShape.n, kShape.k, kShape.g, -1)));
    ASSERT_TRUE(is_ok(bg_cuda_linear_workspace_bytes(kShape.m, kShape.k, &workspace_bytes)));
  }

  // Runs a layer, frees it and compares its output with `expected`.
  void run_and_free(bg_linear* layer) {
    const DeviceBuffer x(x_data, stream());
    const DeviceWorkspace workspace(workspace_bytes, stream());
    DeviceOutput y(p.output(kType), kType, stream());
    const bg_matrix x_matrix = to_c(x.view(x_data, kType)), y_matrix = to_c(y.view());
    const bg_launch launch =
        bg_launch_of(stream(), cuda::Workspace(workspace).data, workspace_bytes);
    EXPECT_TRUE(is_ok(bg_cuda_linear_run(layer, &x_matrix, &y_matrix, &launch)));
    EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));
    EXPECT_TRUE(y.guards_intact());
    expect_error(bg_cpu_linear_run(layer, &x_matrix, &y_matrix, nullptr), BG_INVALID_ARGUMENT,
                 "the layer is not on the CPU");
    bg_linear_free(layer);
  }

  size_t workspace_bytes = 0;
};

TEST_F(CApiCuda, GemmAndLinear) {
  const DeviceProblem device(p, stream());
  const bg_activation x = to_c(device.x());
  const bg_weights w = to_c(device.w());
  const bg_bias bias = to_c(device.bias());
  DeviceOutput y(p.output(kType), kType, stream());
  const bg_matrix y_matrix = to_c(y.view());
  bg_launch launch = bg_launch_of(stream(), nullptr, 0);
  for (const int programmatic : {0, 1}) {
    launch.programmatic = programmatic;
    ASSERT_TRUE(is_ok(bg_cuda_binary_gemm(&x, &w, &bias, &y_matrix, &launch)));
    cpu::binary_gemm(p.x(), p.w(), p.bias(), expected.view(kType));
    EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));
  }
  ASSERT_TRUE(is_ok(bg_cuda_binary_gemm(&x, &w, nullptr, &y_matrix, &launch)));
  cpu::binary_gemm(p.x(), p.w(), {}, expected.view(kType));
  EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));

  const DeviceBuffer dense(x_data, stream());
  const bg_matrix x_matrix = to_c(dense.view(x_data, kType));
  expect_error(bg_cuda_binary_linear(&x_matrix, &w, &bias, &y_matrix, &launch), BG_INVALID_ARGUMENT,
               "needs a workspace of");
  const DeviceWorkspace workspace(workspace_bytes, stream());
  launch = bg_launch_of(stream(), cuda::Workspace(workspace).data, workspace_bytes);
  ASSERT_TRUE(is_ok(bg_cuda_binary_linear(&x_matrix, &w, &bias, &y_matrix, &launch)));
  cpu::binary_linear(x_data.view(kType), p.w(), p.bias(), expected.view(kType));
  EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));
  EXPECT_TRUE(y.guards_intact());
}

TEST_F(CApiCuda, PackUnpackQuantize) {
  const Layout layout = all_layouts().back();
  GuardedBuffer dense(kShape.n, kShape.k, size_of(kType), 1, 2);
  Random random(4);
  fill_gaussian(dense.view(kType), random);
  const DeviceBuffer source(dense, stream());
  DeviceWeights packed(kShape.n, kShape.k, kShape.g, layout, stream());
  const bg_matrix dense_matrix = to_c(source.view(dense, kType));
  const bg_weights w = to_c(packed.view());
  const bg_launch launch = bg_launch_of(stream(), nullptr, 0);
  ASSERT_TRUE(is_ok(bg_cuda_pack_weights(&dense_matrix, &w, &launch)));
  packed.fetch();
  GuardedBuffer there(kShape.n, kShape.k, size_of(kType)), here(kShape.n, kShape.k, size_of(kType));
  cpu::unpack_weights(packed.host_view(), there.view(kType));
  const auto layer = cpu::BinaryLinear::from_dense(dense.view(kType), kShape.g);
  cpu::unpack_weights(layer.weights(), here.view(kType));
  EXPECT_TRUE(equal_bits(there.view(kType), here.view(kType)));

  DeviceOutput back(GuardedBuffer(kShape.n, kShape.k, size_of(kType), 3, 1), kType, stream());
  const bg_matrix back_matrix = to_c(back.view());
  ASSERT_TRUE(is_ok(bg_cuda_unpack_weights(&w, &back_matrix, &launch)));
  EXPECT_TRUE(equal_bits(back.fetch(), here.view(kType)));

  DeviceActivation q(kShape.n, kShape.k, 7, 5, 1, stream());
  const bg_activation q_struct = to_c(q.view());
  ASSERT_TRUE(is_ok(bg_cuda_quantize_activation(&dense_matrix, &q_struct, &launch)));
  GuardedBuffer values(kShape.n, kShape.k, 1), scales(1, kShape.n, 4);
  cpu::quantize_activation(
      dense.view(kType),
      activation_view(values.base<std::int8_t>(), scales.base<float>(), kShape.n, kShape.k));
  EXPECT_TRUE(equal_bits(q.values.fetch(), values.view(DataType::kInt8)));
  EXPECT_TRUE(equal_bits(q.scales.fetch(), scales.view(DataType::kFloat32)));
}

TEST_F(CApiCuda, FusedSteps) {
  GuardedBuffer gate_up(2, 2 * kShape.k, size_of(kType));
  GuardedBuffer residual(kShape.m, kShape.n, size_of(kType));
  Random random(5);
  fill_gaussian(gate_up.view(kType), random);
  fill_gaussian(residual.view(kType), random);
  const DeviceBuffer source(gate_up, stream());
  const DeviceBuffer residual_device(residual, stream());
  const DeviceProblem device(p, stream());
  const bg_launch launch = bg_launch_of(stream(), nullptr, 0);
  DeviceActivation q(2, kShape.k, 0, 0, 0, stream());
  const bg_activation q_struct = to_c(q.view());
  GuardedBuffer values(2, kShape.k, 1), scales(1, 2, 4);
  const auto expected_q =
      activation_view(values.base<std::int8_t>(), scales.base<float>(), 2, kShape.k);
  const auto compare = [&] {
    EXPECT_TRUE(equal_bits(q.values.fetch(), values.view(DataType::kInt8)));
    EXPECT_TRUE(equal_bits(q.scales.fetch(), scales.view(DataType::kFloat32)));
  };
  const bg_matrix both = to_c(source.view(gate_up, kType));
  ASSERT_TRUE(is_ok(bg_cuda_swiglu_quantize(&both, &q_struct, &launch)));
  cpu::swiglu_quantize(gate_up.view(kType), expected_q);
  compare();
  const bg_matrix half = to_c(source.view(gate_up, kType).column_range(0, kShape.k));
  ASSERT_TRUE(is_ok(bg_cuda_rms_norm_quantize(&half, nullptr, 1e-6f, &q_struct, &launch)));
  cpu::rms_norm_quantize(gate_up.view(kType).column_range(0, kShape.k), {}, 1e-6f, expected_q);
  compare();

  const bg_activation x = to_c(device.x());
  const bg_weights w = to_c(device.w());
  const bg_bias bias = to_c(device.bias());
  const bg_matrix residual_matrix = to_c(residual_device.view(residual, kType));
  DeviceOutput y(p.output(kType), kType, stream());
  const bg_matrix y_matrix = to_c(y.view());
  ASSERT_TRUE(
      is_ok(bg_cuda_binary_gemm_residual(&x, &w, &bias, &residual_matrix, &y_matrix, &launch)));
  cpu::binary_gemm(p.x(), p.w(), {p.bias(), residual.view(kType)}, expected.view(kType));
  EXPECT_TRUE(equal_bits(y.fetch(), expected.view(kType)));
}

TEST_F(CApiCuda, Layers) {
  const bg_weights w = to_c(p.w());  // on the host
  const bg_bias bias = to_c(p.bias());
  const bg_launch launch = bg_launch_of(stream(), nullptr, 0);
  bg_linear* layer = nullptr;
  cpu::binary_linear(x_data.view(kType), p.w(), p.bias(), expected.view(kType));
  ASSERT_TRUE(is_ok(bg_cuda_linear_from_packed(&w, &bias, &launch, &layer)));
  run_and_free(layer);

  std::vector<unsigned char> blocks(static_cast<std::size_t>(kShape.n * (kShape.k / 128) * 18));
  export_q1_0(p.w(), blocks.data(), blocks.size());
  ASSERT_TRUE(is_ok(bg_cuda_linear_from_q1_0(blocks.data(), blocks.size(), kShape.n, kShape.k,
                                             &bias, &launch, &layer)));
  run_and_free(layer);

  GuardedBuffer dense(kShape.n, kShape.k, size_of(kType), 1, 2);
  Random random(4);
  fill_gaussian(dense.view(kType), random);
  const DeviceBuffer source(dense, stream());
  const bg_matrix dense_matrix = to_c(source.view(dense, kType));
  cpu::BinaryLinear::from_dense(dense.view(kType), 64)(x_data.view(kType), expected.view(kType));
  ASSERT_TRUE(is_ok(bg_cuda_linear_from_dense(&dense_matrix, 64, nullptr, &launch, &layer)));
  bg_weights packed = bg_weights_of(nullptr, nullptr, 0, 0, 32);
  EXPECT_TRUE(is_ok(bg_linear_weights(layer, &packed)));
  EXPECT_EQ(packed.n, kShape.n);
  EXPECT_EQ(packed.group_size, 64);
  run_and_free(layer);
}

TEST_F(CApiCuda, Errors) {
  const DeviceProblem device(p, stream());
  const bg_activation x = to_c(device.x());
  const bg_weights w = to_c(device.w());
  DeviceOutput y(p.output(kType), kType, stream());
  const bg_matrix y_matrix = to_c(y.view());
  bg_launch launch = bg_launch_of(stream(), nullptr, 0);
  const auto gemm = [&](const bg_activation* a, const bg_weights* b, const bg_matrix* c) {
    return bg_cuda_binary_gemm(a, b, nullptr, c, &launch);
  };
  expect_error(gemm(nullptr, &w, &y_matrix), BG_INVALID_ARGUMENT, "x is NULL");
  expect_error(gemm(&x, nullptr, &y_matrix), BG_INVALID_ARGUMENT, "w is NULL");
  expect_error(gemm(&x, &w, nullptr), BG_INVALID_ARGUMENT, "y is NULL");
  launch.struct_size += 1;
  expect_error(gemm(&x, &w, &y_matrix), BG_NOT_SUPPORTED, "launch: struct_size = 33");
  launch.struct_size -= 1;

  const bg_weights on_the_host = to_c(p.w());
  expect_error(gemm(&x, &on_the_host, &y_matrix), BG_INVALID_ARGUMENT, "is not device memory");
  EXPECT_TRUE(y.fetch().data != nullptr);
  EXPECT_TRUE(y.host().untouched());

  expect_error(bg_cuda_prepare(63), BG_CUDA_ERROR, "cudaErrorInvalidDevice");
  expect_error(bg_cuda_prepare(64), BG_INVALID_ARGUMENT, "device 64");
  expect_error(bg_cuda_is_supported(1, 100, 128, -1), BG_INVALID_ARGUMENT, "K = 100");
  expect_error(bg_cuda_gemm_workspace_bytes(1, 128, nullptr), BG_INVALID_ARGUMENT, "bytes is NULL");
  expect_error(bg_cuda_linear_workspace_bytes(1, 128, nullptr), BG_INVALID_ARGUMENT,
               "bytes is NULL");
  expect_error(bg_cuda_linear_workspace_bytes(-1, 128, &workspace_bytes), BG_INVALID_ARGUMENT,
               "M = -1");

  // A layer of 2^40 groups: more than a device has.
  bg_matrix dense = y_matrix;
  dense.rows = std::int64_t{1} << 35;
  dense.cols = dense.row_stride = 4096;
  bg_linear* layer = reinterpret_cast<bg_linear*>(&dense);
  expect_error(bg_cuda_linear_from_dense(&dense, 128, nullptr, &launch, &layer), BG_OUT_OF_MEMORY,
               "cudaErrorMemoryAllocation");
  EXPECT_EQ(layer, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);  // reported, and left to be seen

  // On the CPU.
  ASSERT_TRUE(is_ok(bg_cpu_linear_from_packed(&on_the_host, nullptr, &layer)));
  expect_error(bg_cuda_linear_run(layer, &y_matrix, &y_matrix, &launch), BG_INVALID_ARGUMENT,
               "the layer is not on a CUDA device");
  bg_linear_free(layer);
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
