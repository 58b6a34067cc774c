/// Several GPUs of one process: each prepared on its own, shards of one weight as views, on streams
/// that run at once. Row shards give the bits of one GPU; column shards add up to the product.
///
/// All GPUs take part, and at least two must be there.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
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

int device_count() {
  int count = 0;
  BINARY_GEMM_CHECK_CUDA(cudaGetDeviceCount(&count));
  return count;
}

// The operands of a product and of a linear layer on the host, and what comes out.
struct Host {
  Host(Shape shape, std::uint64_t seed, const Layout& layout = all_layouts()[0])
      : problem(make_tall_problem(shape, ScalePattern::kMixed, ActivationPattern::kRandom, layout,
                                  seed)),
        x(shape.m, shape.k, 2),
        gemm(shape.m, shape.n, 2),
        linear(shape.m, shape.n, 2) {
    Random random(seed);
    fill_gaussian(x.view(kType), random);
    expected_gemm(problem.x(), problem.w(), problem.bias(), gemm.view(kType));
    expected_linear(std::as_const(x).view(kType), problem.w(), problem.bias(), linear.view(kType));
  }
  const Shape& shape() const { return problem.shape; }

  Problem problem;
  GuardedBuffer x, gemm, linear;
};

// A GPU with a stream and its own copy of all operands, of which shards are views.
class Rank {
 public:
  Rank(int device, Host& host)
      : device_(device),
        current_(std::in_place, device),
        operands_(host.problem, stream_),
        x_(host.x, stream_),
        workspace_(cuda::linear_workspace_bytes(host.shape().m, host.shape().k), stream_),
        host_(host) {
    stream_.synchronize();
    current_.reset();
  }

  int device() const { return device_; }
  const Stream& stream() const { return stream_; }
  ActivationView q() const { return operands_.x(); }
  WeightView w() const { return operands_.w(); }
  BiasView bias() const { return operands_.bias(); }
  ConstMatrixView x() const { return x_.view(host_.x, kType); }
  cuda::Launch launch(bool programmatic = false) const {
    return {stream_, workspace_, programmatic};
  }
  DeviceOutput output(DataType type = kType) const {
    const CurrentDevice scope(device_);
    return {GuardedBuffer(host_.shape().m, host_.shape().n, size_of(type)), type, stream_};
  }
  ::testing::AssertionResult unchanged() const { return operands_.unchanged(stream_); }

 private:
  int device_;
  std::optional<CurrentDevice> current_;  // for the members that follow
  Stream stream_;
  DeviceProblem operands_;
  DeviceBuffer x_;
  DeviceWorkspace workspace_;
  Host& host_;
};

std::vector<std::unique_ptr<Rank>> make_ranks(Host& host) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int device = 0; device < device_count(); ++device) {
    ranks.push_back(std::make_unique<Rank>(device, host));
  }
  return ranks;
}

struct Range {
  std::int64_t begin;
  std::int64_t count;
};

// The part of rank `index` of `ranks`, between multiples of `step`.
Range part_of(std::int64_t extent, std::int64_t step, std::size_t index, std::size_t ranks) {
  const auto bound = [&](std::size_t i) {
    const std::int64_t steps = extent / step * static_cast<std::int64_t>(i);
    return i == ranks ? extent : steps / static_cast<std::int64_t>(ranks) * step;
  };
  return {bound(index), bound(index + 1) - bound(index)};
}

// Rows of y that rank `index` computes. They are odd in number and in place.
Range rows_of(const Host& host, std::size_t index, std::size_t ranks) {
  return part_of(host.shape().n, 1, index, ranks);
}

void gemm_rows(const Rank& rank, const Range& rows, const DeviceOutput& y,
               const cuda::Launch& launch) {
  cuda::binary_gemm(rank.q(), rank.w().row_range(rows.begin, rows.count),
                    rank.bias().row_range(rows.begin, rows.count),
                    y.view().column_range(rows.begin, rows.count), launch);
}

void linear_rows(const Rank& rank, const Range& rows, const DeviceOutput& y,
                 const cuda::Launch& launch) {
  cuda::binary_linear(rank.x(), rank.w().row_range(rows.begin, rows.count),
                      rank.bias().row_range(rows.begin, rows.count),
                      y.view().column_range(rows.begin, rows.count), launch);
}

// Whether the columns of `rows` are those of `expected` and no other was written.
::testing::AssertionResult is_part(DeviceOutput& y, GuardedBuffer& expected, const Range& rows) {
  const ConstMatrixView actual = y.fetch();
  const ConstMatrixView wanted = std::as_const(expected).view(kType);
  ::testing::AssertionResult part = equal_bits(actual.column_range(rows.begin, rows.count),
                                               wanted.column_range(rows.begin, rows.count));
  if (!part) return part << " (a shard)";
  const GuardedBuffer untouched(expected.rows(), expected.cols(), 2);
  const std::int64_t end = rows.begin + rows.count;
  part = equal_bits(actual.column_range(0, rows.begin),
                    untouched.view(kType).column_range(0, rows.begin));
  if (part) {
    part = equal_bits(actual.column_range(end, actual.cols - end),
                      untouched.view(kType).column_range(end, actual.cols - end));
  }
  if (!part) return part << " (another GPU's columns)";
  return y.guards_intact();
}

// Makes the calls of all GPUs, `body(index)`, so that they run at once: plainly, one after the
// other without waiting; or each captured on its own GPU, and then all replayed. Device 0 is
// current in `body`.
void run_at_once(const Mode& mode, const std::vector<std::unique_ptr<Rank>>& ranks,
                 const std::function<void(std::size_t)>& body) {
  if (!mode.captured) {
    for (std::size_t i = 0; i < ranks.size(); ++i) body(i);
    return;
  }
  std::vector<cudaGraphExec_t> steps;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    cuda::prepare(ranks[i]->device());
    const CurrentDevice own(ranks[i]->device());
    const Stream& stream = ranks[i]->stream();
    BINARY_GEMM_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    {
      const CurrentDevice first(0);
      EXPECT_NO_THROW(body(i));
      EXPECT_EQ(CurrentDevice::get(), 0);
    }
    cudaGraph_t graph = nullptr;
    BINARY_GEMM_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    steps.emplace_back();
    BINARY_GEMM_CHECK_CUDA(cudaGraphInstantiate(&steps.back(), graph, 0));
    BINARY_GEMM_CHECK_CUDA(cudaGraphDestroy(graph));
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const CurrentDevice own(ranks[i]->device());
    BINARY_GEMM_CHECK_CUDA(cudaGraphLaunch(steps[i], ranks[i]->stream()));
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const CurrentDevice own(ranks[i]->device());
    ranks[i]->stream().synchronize();
    BINARY_GEMM_CHECK_CUDA(cudaGraphExecDestroy(steps[i]));
  }
}

class CudaMultiGpu : public DeviceTest {
 protected:
  CudaMultiGpu() : DeviceTest(2) {}
  void TearDown() override {
    if (!IsSkipped() && !HasFatalFailure()) {
      EXPECT_EQ(CurrentDevice::get(), 0) << "a call left another device current";
    }
    DeviceTest::TearDown();
  }
};

class CudaMultiGpuModes : public CudaMultiGpu, public ::testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(Modes, CudaMultiGpuModes, ::testing::ValuesIn(kModes), mode_name);

// ---- Devices ----

TEST_F(CudaMultiGpu, AEachIsPreparedOnItsOwn) {
  // First of all tests here: nothing of the library has run. One GPU may work before the others are
  // prepared.
  Host host({3, 70, 2048, 128}, 1);
  for (int device = device_count() - 1; device >= 0; --device) {
    cuda::prepare(device);
    EXPECT_EQ(CurrentDevice::get(), 0);
    const Rank rank(device, host);
    DeviceOutput y = rank.output();
    linear_rows(rank, {0, 70}, y, rank.launch());
    EXPECT_TRUE(equal_bits(y.fetch(), std::as_const(host.linear).view(kType))) << device;
    EXPECT_FALSE(cuda::supported_kernels(device).empty());
    EXPECT_TRUE(cuda::is_supported(Kernel::kAuto, 3, 70, 2048, 128, device));
    EXPECT_NE(cuda::choose_kernel(3, 70, 2048, 128, device), Kernel::kAuto);
    EXPECT_EQ(CurrentDevice::get(), 0);
  }
  for (int device = 0; device < device_count(); ++device) {
    const CurrentDevice scope(device);
    cuda::prepare();
    EXPECT_EQ(CurrentDevice::get(), device);
  }
}

TEST_F(CudaMultiGpu, CallsGoWhereTheOperandsAre) {
  // Whichever device is current, and it stays so.
  Host host({3, 40, 512, 128}, 2);
  const auto ranks = make_ranks(host);
  for (int current = 0; current < device_count(); ++current) {
    const CurrentDevice scope(current);
    for (const auto& rank : ranks) {
      DeviceOutput gemm = rank->output();
      DeviceOutput linear = rank->output();
      gemm_rows(*rank, {0, 40}, gemm, rank->launch());
      EXPECT_EQ(CurrentDevice::get(), current);
      linear_rows(*rank, {0, 40}, linear, rank->launch(true));
      EXPECT_EQ(CurrentDevice::get(), current);
      EXPECT_TRUE(equal_bits(gemm.fetch(), std::as_const(host.gemm).view(kType)));
      EXPECT_TRUE(equal_bits(linear.fetch(), std::as_const(host.linear).view(kType)));
      EXPECT_TRUE(rank->unchanged());
    }
  }
}

TEST_F(CudaMultiGpu, EveryKernelRunsOnEach) {
  for (const std::int64_t m : {1, 2, 8, 40}) {
    Host host({m, 75, 1280, 128}, 3);
    const auto ranks = make_ranks(host);
    for (const auto& rank : ranks) {
      for (const Kernel kernel : cuda::supported_kernels(rank->device())) {
        if (!cuda::is_supported(kernel, m, 75, 1280, 128, rank->device())) continue;
        DeviceOutput y = rank->output();
        cuda::Launch launch = rank->launch();
        launch.kernel = kernel;
        gemm_rows(*rank, {0, 75}, y, launch);
        EXPECT_TRUE(equal_bits(y.fetch(), std::as_const(host.gemm).view(kType)))
            << cuda::name(kernel) << " on device " << rank->device() << ", M=" << m;
      }
    }
  }
}

// ---- Row shards ----

TEST_P(CudaMultiGpuModes, RowShardsGiveTheBitsOfOneGpu) {
  const Mode mode = GetParam();
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t m : {1, 2, 8, 17, 300}) {
      for (const Layout& layout : all_layouts()) {
        if (layout.y_offset != 0 && m != 2 && m != 17) continue;
        Host host({m, 211, 2 * kSliceK + g, g}, static_cast<std::uint64_t>(m + g), layout);
        const auto ranks = make_ranks(host);
        DeviceOutput one = ranks[0]->output();
        gemm_rows(*ranks[0], {0, 211}, one, ranks[0]->launch());
        ASSERT_TRUE(equal_bits(one.fetch(), std::as_const(host.gemm).view(kType)));

        std::vector<DeviceOutput> gemm;
        std::vector<DeviceOutput> linear;
        for (const auto& rank : ranks) {
          gemm.push_back(rank->output());
          linear.push_back(rank->output());
        }
        run_at_once(mode, ranks, [&](std::size_t i) {
          const Range rows = rows_of(host, i, ranks.size());
          gemm_rows(*ranks[i], rows, gemm[i], ranks[i]->launch(mode.programmatic));
          linear_rows(*ranks[i], rows, linear[i], ranks[i]->launch(mode.programmatic));
        });
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          const Range rows = rows_of(host, i, ranks.size());
          ASSERT_TRUE(is_part(gemm[i], host.gemm, rows))
              << host.shape() << ' ' << layout.name << ", device " << i;
          ASSERT_TRUE(is_part(linear[i], host.linear, rows))
              << host.shape() << ' ' << layout.name << ", device " << i;
          ASSERT_TRUE(ranks[i]->unchanged());
        }
      }
    }
  }
}

TEST_F(CudaMultiGpu, RowShardsFromOneThreadManyTimes) {
  Host host({4, 1001, 5120, 128}, 4);
  const auto ranks = make_ranks(host);
  constexpr int kCalls = 40;
  std::vector<std::vector<DeviceOutput>> outputs(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    for (int call = 0; call < kCalls; ++call) outputs[i].push_back(ranks[i]->output());
  }
  for (std::size_t call = 0; call < kCalls; ++call) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const Range rows = rows_of(host, i, ranks.size());
      if (call % 2 == 0) {
        gemm_rows(*ranks[i], rows, outputs[i][call], ranks[i]->launch(call % 4 == 0));
      } else {
        linear_rows(*ranks[i], rows, outputs[i][call], ranks[i]->launch(call % 4 == 1));
      }
    }
  }
  for (std::size_t call = 0; call < kCalls; ++call) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      ASSERT_TRUE(is_part(outputs[i][call], call % 2 == 0 ? host.gemm : host.linear,
                          rows_of(host, i, ranks.size())))
          << "call " << call << ", device " << i;
    }
  }
}

TEST_F(CudaMultiGpu, RowShardsFromAThreadEach) {
  // The threads of an engine make their GPU current, or leave device 0 so.
  Host host({5, 333, 3072, 64}, 5);
  const auto ranks = make_ranks(host);
  for (const bool sets_device : {true, false}) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          const Rank& rank = *ranks[i];
          const int current = sets_device ? rank.device() : 0;
          const CurrentDevice scope(current);
          const Range rows = rows_of(host, i, ranks.size());
          for (int call = 0; call < 50; ++call) {
            DeviceOutput gemm = rank.output();
            DeviceOutput linear = rank.output();
            gemm_rows(rank, rows, gemm, rank.launch(call % 2 == 1));
            linear_rows(rank, rows, linear, rank.launch(call % 2 == 1));
            ASSERT_TRUE(is_part(gemm, host.gemm, rows)) << "device " << i << ", call " << call;
            ASSERT_TRUE(is_part(linear, host.linear, rows)) << "device " << i << ", call " << call;
            ASSERT_EQ(CurrentDevice::get(), current);
          }
        } catch (const std::exception& error) {
          ADD_FAILURE() << "device " << i << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_F(CudaMultiGpu, LayersOfAShardEach) {
  // As an engine loads a model: each GPU gets its rows alone, by views of the host's weights.
  Host host({6, 203, 2176, 128}, 6);
  const auto ranks = make_ranks(host);
  std::vector<cuda::BinaryLinear> layers;
  std::vector<DeviceOutput> outputs;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Range rows = rows_of(host, i, ranks.size());
    const CurrentDevice scope(ranks[i]->device());
    layers.push_back(cuda::BinaryLinear::from_packed(
        host.problem.w().row_range(rows.begin, rows.count),
        host.problem.bias().row_range(rows.begin, rows.count), {ranks[i]->stream()}));
    EXPECT_EQ(CurrentDevice::get(), ranks[i]->device());
    outputs.push_back(ranks[i]->output());
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Range rows = rows_of(host, i, ranks.size());
    layers[i](ranks[i]->x(), outputs[i].view().column_range(rows.begin, rows.count),
              ranks[i]->launch());
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    EXPECT_TRUE(is_part(outputs[i], host.linear, rows_of(host, i, ranks.size()))) << i;
  }
  // And freed while device 0 is current.
}

// ---- Column shards ----

// An output of the whole row in float64, and the sum of the magnitudes of its terms.
struct Exact {
  double value;
  double magnitude;
};

Exact exact_output(const Problem& p, std::int64_t m, std::int64_t n) {
  const std::int8_t* const q = p.values.row<std::int8_t>(m);
  const std::uint32_t* const bits = p.bits.row<std::uint32_t>(n);
  const double token_scale = p.x_scales.row<float>(0)[m];
  const double bias = p.bias_data.row<float>(0)[n];
  Exact exact{bias, std::abs(bias)};
  for (std::int64_t group = 0; group < p.shape.k / p.shape.g; ++group) {
    std::int64_t dot = 0;
    for (std::int64_t k = group * p.shape.g; k < (group + 1) * p.shape.g; ++k) {
      dot += (bits[k / 32] >> (k % 32) & 1u) != 0 ? q[k] : -q[k];
    }
    const double scale = to_float(p.scales.row<float16>(n)[group]);
    const double term = token_scale * (scale * static_cast<double>(dot));
    exact.value += term;
    exact.magnitude += std::abs(term);
  }
  return exact;
}

TEST_P(CudaMultiGpuModes, ColumnShardsAddUp) {
  const Mode mode = GetParam();
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t m : {1, 3, 20}) {
      for (const std::int64_t step : {g, kSliceK}) {
        const std::int64_t k = 8 * kSliceK + (step == g ? g : 0);
        Host host({m, 50, k, g}, static_cast<std::uint64_t>(m * g + step));
        const auto ranks = make_ranks(host);
        if (step == kSliceK && ranks.size() > 8) continue;  // a slice each
        // One quantized activation, made on each GPU from the same x: the same bits.
        std::vector<DeviceActivation> quantized;
        std::vector<DeviceOutput> partial;
        for (const auto& rank : ranks) {
          const CurrentDevice scope(rank->device());
          quantized.emplace_back(m, k, 0, 0, 0, rank->stream());
          partial.push_back(rank->output(DataType::kFloat32));
        }
        const auto bias_of = [](std::size_t i, const BiasView& bias) {
          return i == 0 ? bias : BiasView{};
        };
        run_at_once(mode, ranks, [&](std::size_t i) {
          const Range columns = part_of(k, step, i, ranks.size());
          const cuda::Launch launch = ranks[i]->launch(mode.programmatic);
          cuda::quantize_activation(ranks[i]->x(), quantized[i].view(), launch);
          const ActivationView q = quantized[i].view();
          cuda::binary_gemm(q.column_range(columns.begin, columns.count),
                            ranks[i]->w().column_range(columns.begin, columns.count),
                            bias_of(i, ranks[i]->bias()), partial[i].view(), launch);
        });

        // On the host: the same x quantized, each partial product by the reference, all in float64.
        const MutableActivationView q = activation_view(host.problem.values.base<std::int8_t>(),
                                                        host.problem.x_scales.base<float>(), m, k);
        reference::quantize_activation(std::as_const(host.x).view(kType), q);
        GuardedBuffer sum(m, 50, 4);
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          ASSERT_TRUE(equal_bits(quantized[i].values.fetch(),
                                 std::as_const(host.problem.values).view(DataType::kInt8)));
          ASSERT_TRUE(equal_bits(quantized[i].scales.fetch(),
                                 std::as_const(host.problem.x_scales).view(DataType::kFloat32)));
          const Range columns = part_of(k, step, i, ranks.size());
          GuardedBuffer expected(m, 50, 4);
          expected_gemm(host.problem.x().column_range(columns.begin, columns.count),
                        host.problem.w().column_range(columns.begin, columns.count),
                        bias_of(i, host.problem.bias()), expected.view(DataType::kFloat32));
          ASSERT_TRUE(
              equal_bits(partial[i].fetch(), std::as_const(expected).view(DataType::kFloat32)))
              << host.shape() << ", columns " << columns.begin << " + " << columns.count;
          for (std::int64_t row = 0; row < m; ++row) {
            for (std::int64_t n = 0; n < 50; ++n) {
              float& total = sum.row<float>(row)[n];
              const float part = expected.row<float>(row)[n];
              total = i == 0 ? part : total + part;
            }
          }
        }

        // A term is rounded at most so often: with its group (a wide slice) or its slice, with each
        // slice and each rank that is added to it, and with the token's scale. Every rounding takes
        // at most 2^-24 of what is there, which is no more than the sum of the magnitudes. One more
        // covers float64 and the product of the roundings.
        const std::int64_t slices = (k + kSliceK - 1) / kSliceK + 1;
        const double roundings =
            static_cast<double>(kSliceK / g + slices + static_cast<std::int64_t>(ranks.size()) + 2);
        for (std::int64_t row = 0; row < m; ++row) {
          for (std::int64_t n = 0; n < 50; ++n) {
            const Exact exact = exact_output(host.problem, row, n);
            ASSERT_LE(std::abs(sum.row<float>(row)[n] - exact.value),
                      roundings * 0x1p-24 * exact.magnitude)
                << host.shape() << ", token " << row << ", output " << n;
          }
        }
      }
    }
  }
}

// ---- What is refused, and what is left alone ----

TEST_F(CudaMultiGpu, OperandsOfAnotherDeviceAreRefused) {
  Host host({3, 16, 512, 128}, 7);
  const auto ranks = make_ranks(host);
  const Rank& here = *ranks[1];
  const Rank& there = *ranks[0];
  DeviceOutput y = here.output();
  const auto gemm = [&](const ActivationView& q, const WeightView& w, const BiasView& bias,
                        const Parts& parts) {
    expect_invalid([&] { cuda::binary_gemm(q, w, bias, y.view(), here.launch()); }, parts);
    EXPECT_EQ(CurrentDevice::get(), 0);
  };
  const Parts devices = {"is on device 0", "runs on device 1"};
  const auto with = [&](const char* name) { return Parts{name, devices[0], devices[1]}; };
  gemm(there.q(), here.w(), here.bias(), with("activation values"));
  gemm(here.q(), there.w(), here.bias(), with("weight bits"));
  gemm(here.q(), here.w(), there.bias(), with("bias"));
  WeightView w = here.w();
  w.scales = there.w().scales;
  gemm(here.q(), w, here.bias(), with("weight scales"));
  ActivationView q = here.q();
  q.scales = there.q().scales;
  gemm(q, here.w(), here.bias(), with("activation scales"));
  expect_invalid(
      [&] { cuda::binary_linear(there.x(), here.w(), here.bias(), y.view(), here.launch()); },
      with("x"));
  cuda::Launch launch = here.launch();
  launch.workspace = there.launch().workspace;
  expect_invalid([&] { cuda::binary_linear(here.x(), here.w(), here.bias(), y.view(), launch); },
                 with("workspace"));
  // A layer is made where the current device is.
  expect_invalid([&] { cuda::BinaryLinear::from_dense(here.x(), 128, {}, there.launch()); },
                 {"dense weights", "is on device 1", "runs on device 0"});
  y.fetch();
  EXPECT_TRUE(y.host().untouched());
  EXPECT_TRUE(here.unchanged());
  EXPECT_TRUE(there.unchanged());
}

TEST_F(CudaMultiGpu, PeerAccessIsNeitherNeededNorChanged) {
  Host host({3, 50, 1024, 128}, 9);
  const auto ranks = make_ranks(host);
  const auto run_shards = [&] {
    std::vector<DeviceOutput> outputs;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      cuda::prepare(ranks[i]->device());
      outputs.push_back(ranks[i]->output());
      linear_rows(*ranks[i], rows_of(host, i, ranks.size()), outputs[i], ranks[i]->launch());
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      EXPECT_TRUE(is_part(outputs[i], host.linear, rows_of(host, i, ranks.size()))) << i;
    }
  };
  const auto disable = [](int device, int peer) {
    const CurrentDevice scope(device);
    const cudaError_t code = cudaDeviceDisablePeerAccess(peer);
    cudaGetLastError();
    return code;
  };
  const std::pair<int, int> pairs[] = {{0, 1}, {1, 0}};
  run_shards();
  for (const auto& [device, peer] : pairs) {
    EXPECT_EQ(disable(device, peer), cudaErrorPeerAccessNotEnabled) << device << " to " << peer;
  }
  for (const auto& [device, peer] : pairs) {
    int possible = 0;
    BINARY_GEMM_CHECK_CUDA(cudaDeviceCanAccessPeer(&possible, device, peer));
    if (possible == 0) return;  // so it has been shown that nothing needs it
    const CurrentDevice scope(device);
    BINARY_GEMM_CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
  }
  run_shards();
  for (const auto& [device, peer] : pairs) {
    EXPECT_EQ(disable(device, peer), cudaSuccess) << device << " to " << peer;
  }
  run_shards();
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
