/// How the library behaves inside an engine: graphs, streams, threads, devices, memory.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "device_support.h"
#include "wgmma_shapes.h"

namespace binary_gemm {
namespace testing {
namespace {

using cuda::Kernel;

constexpr DataType kType = DataType::kBFloat16;

// A product and a linear layer with all of their operands and expected outputs.
class Work {
 public:
  Work(Shape shape, cudaStream_t stream, std::uint64_t seed = 1,
       ScalePattern scales = ScalePattern::kMixed)
      : shape_(shape),
        problem_(
            make_tall_problem(shape, scales, ActivationPattern::kRandom, all_layouts()[0], seed)),
        x_host_(gaussian(shape, seed)),
        gemm_expected_(shape.m, shape.n, 2),
        linear_expected_(shape.m, shape.n, 2),
        device_(problem_, stream),
        x_device_(x_host_, stream),
        workspace_(cuda::linear_workspace_bytes(shape.m, shape.k), stream) {
    expected_gemm(problem_.x(), problem_.w(), problem_.bias(), gemm_expected_.view(kType));
    expected_linear(x_host_.view(kType), problem_.w(), problem_.bias(),
                    linear_expected_.view(kType));
    BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream));
  }

  DeviceOutput output(cudaStream_t stream) const {
    return {GuardedBuffer(shape_.m, shape_.n, 2), kType, stream};
  }
  /// Without a workspace unless the launch forces a kernel.
  void gemm(const DeviceOutput& y, cuda::Launch launch) const {
    if (launch.kernel != Kernel::kAuto) launch.workspace = workspace_;
    cuda::binary_gemm(device_.x(), device_.w(), device_.bias(), y.view(), launch);
  }
  void linear(const DeviceOutput& y, cuda::Launch launch) const {
    launch.workspace = workspace_;
    cuda::binary_linear(x(), device_.w(), device_.bias(), y.view(), launch);
  }
  ConstMatrixView x() const { return x_device_.view(x_host_, kType); }
  const DeviceProblem& device() const { return device_; }
  const Shape& shape() const { return shape_; }
  ::testing::AssertionResult is_gemm(DeviceOutput& y) const {
    return equal_bits(y.fetch(), gemm_expected_.view(kType));
  }
  ::testing::AssertionResult is_linear(DeviceOutput& y) const {
    return equal_bits(y.fetch(), linear_expected_.view(kType));
  }

 private:
  static GuardedBuffer gaussian(const Shape& shape, std::uint64_t seed) {
    Random random(seed);
    GuardedBuffer x(shape.m, shape.k, 2);
    fill_gaussian(x.view(kType), random);
    return x;
  }

  Shape shape_;
  Problem problem_;
  GuardedBuffer x_host_, gemm_expected_, linear_expected_;
  DeviceProblem device_;
  DeviceBuffer x_device_;
  DeviceWorkspace workspace_;
};

// ---- The first calls of the process: keep these tests first ----

class CudaAFirstCall : public DeviceTest {};

TEST_F(CudaAFirstCall, IsCapturedAfterPrepare) {
  // Buffers are ready before anything of the library has run.
  std::vector<std::unique_ptr<Work>> works;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {2 * kSliceK, kSliceK + g}) {
      for (const std::int64_t m : {1, 2, 3, 8, 16, 32, 70}) {
        works.push_back(std::make_unique<Work>(Shape{m, 40, k, g}, stream()));
      }
    }
  }
  GuardedBuffer dense(8, 256, 2);
  Random random(1);
  fill_gaussian(dense.view(kType), random);
  const DeviceBuffer dense_device(dense, stream());
  DeviceOutput bits(GuardedBuffer(8, 8, 4), DataType::kFloat32, stream());
  DeviceOutput scales(GuardedBuffer(8, 2, 2), DataType::kFloat16, stream());
  DeviceOutput unpacked(GuardedBuffer(8, 256, 2), kType, stream());
  const MutableWeightView packed =
      weight_view(static_cast<std::uint32_t*>(bits.view().data),
                  static_cast<float16*>(scales.view().data), 8, 256, 128);
  std::vector<DeviceOutput> linear;
  for (const auto& work : works) linear.push_back(work->output(stream()));
  DeviceActivation q(1, 2 * kSliceK, 0, 0, 0, stream());
  DeviceActivation half(1, kSliceK, 0, 0, 0, stream());

  // Threads of an engine may prepare at once.
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      try {
        cuda::prepare(0);
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(failures, 0);

  // The strictest mode: nothing unsafe in any thread.
  BINARY_GEMM_CHECK_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
  for (std::size_t i = 0; i < works.size(); ++i) {
    EXPECT_NO_THROW(works[i]->linear(linear[i], {stream(), {}, i % 2 == 1}));
  }
  EXPECT_NO_THROW(cuda::rms_norm_quantize(works[0]->x(), {}, 1e-6f, q.view(), {stream()}));
  EXPECT_NO_THROW(cuda::swiglu_quantize(works[0]->x(), half.view(), {stream()}));
  EXPECT_NO_THROW(cuda::pack_weights(dense_device.view(dense, kType), packed, {stream()}));
  EXPECT_NO_THROW(cuda::unpack_weights(packed, unpacked.view(), {stream()}));
  cudaGraph_t graph = nullptr;
  BINARY_GEMM_CHECK_CUDA(cudaStreamEndCapture(stream(), &graph));
  cudaGraphExec_t executable = nullptr;
  BINARY_GEMM_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  BINARY_GEMM_CHECK_CUDA(cudaGraphLaunch(executable, stream()));
  for (std::size_t i = 0; i < works.size(); ++i) {
    EXPECT_TRUE(works[i]->is_linear(linear[i])) << works[i]->shape();
  }
  aligned_vector<std::uint32_t> expected_bits(64);
  aligned_vector<float16> expected_scales(16);
  cpu::pack_weights(dense.view(kType),
                    weight_view(expected_bits.data(), expected_scales.data(), 8, 256, 128));
  GuardedBuffer expected(8, 256, 2);
  cpu::unpack_weights(weight_view(expected_bits.data(), expected_scales.data(), 8, 256, 128),
                      expected.view(kType));
  EXPECT_TRUE(equal_bits(unpacked.fetch(), expected.view(kType)));
  BINARY_GEMM_CHECK_CUDA(cudaGraphExecDestroy(executable));
  BINARY_GEMM_CHECK_CUDA(cudaGraphDestroy(graph));
}

// ---- Graphs ----

class CudaGraphs : public DeviceTest {};

TEST_F(CudaGraphs, CaptureWithoutASynchronizationBefore) {
  for (const bool programmatic : {false, true}) {
    const Work work({3, 200, 5120, 128}, stream());
    DeviceOutput before = work.output(stream());
    DeviceOutput inside = work.output(stream());
    DeviceOutput after = work.output(stream());
    for (int i = 0; i < 20; ++i) work.gemm(before, {stream(), {}, programmatic});
    run({true, programmatic}, stream(), [&] {
      work.gemm(inside, {stream(), {}, programmatic});
      work.linear(inside, {stream(), {}, programmatic});
    });
    work.linear(after, {stream(), {}, programmatic});
    EXPECT_TRUE(work.is_gemm(before));
    EXPECT_TRUE(work.is_linear(inside));
    EXPECT_TRUE(work.is_linear(after));
  }
}

TEST_F(CudaGraphs, ReplayedManyTimesWithNewInputs) {
  // A graph reads what its buffers hold at each replay.
  for (const std::int64_t m : {1, 8, 40}) {
    const std::int64_t k = 2048;
    const Work work({m, 161, k, 128}, stream());
    DeviceOutput y = work.output(stream());
    GuardedBuffer x(m, k, 2);
    DeviceBuffer x_device(x, stream());
    const DeviceWorkspace workspace(cuda::linear_workspace_bytes(m, k), stream());
    BINARY_GEMM_CHECK_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
    EXPECT_NO_THROW(cuda::binary_linear(x_device.view(x, kType), work.device().w(), {}, y.view(),
                                        {stream(), workspace, true}));
    cudaGraph_t graph = nullptr;
    BINARY_GEMM_CHECK_CUDA(cudaStreamEndCapture(stream(), &graph));
    cudaGraphExec_t executable = nullptr;
    BINARY_GEMM_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    Random random(5);
    for (int replay = 0; replay < 20; ++replay) {
      fill_activations(x.view(kType), random);
      x_device.upload(x, stream());
      BINARY_GEMM_CHECK_CUDA(cudaGraphLaunch(executable, stream()));
      GuardedBuffer expected(m, 161, 2);
      expected_linear(x.view(kType), work.device().host.w(), {}, expected.view(kType));
      ASSERT_TRUE(equal_bits(y.fetch(), expected.view(kType))) << "replay " << replay;
    }
    BINARY_GEMM_CHECK_CUDA(cudaGraphExecDestroy(executable));
    BINARY_GEMM_CHECK_CUDA(cudaGraphDestroy(graph));
  }
}

// ---- Streams ----

class CudaStreams : public DeviceTest {};

TEST_F(CudaStreams, TwoAtOnce) {
  const Stream other;
  const Work a({3, 1000, 5120, 128}, stream(), 1);
  const Work b({17, 333, 2048, 64}, stream(), 2);
  std::vector<DeviceOutput> a_outputs;
  std::vector<DeviceOutput> b_outputs;
  for (int i = 0; i < 50; ++i) {
    a_outputs.push_back(a.output(stream()));
    b_outputs.push_back(b.output(other));
  }
  for (std::size_t i = 0; i < 50; ++i) {
    if (i % 2 == 0) {
      a.gemm(a_outputs[i], {stream(), {}, i % 4 == 0});
      b.linear(b_outputs[i], {other, {}, i % 4 == 0});
    } else {
      a.linear(a_outputs[i], {stream(), {}, i % 4 == 1});
      b.gemm(b_outputs[i], {other, {}, i % 4 == 1});
    }
  }
  for (std::size_t i = 0; i < 50; ++i) {
    EXPECT_TRUE(i % 2 == 0 ? a.is_gemm(a_outputs[i]) : a.is_linear(a_outputs[i])) << i;
    EXPECT_TRUE(i % 2 == 0 ? b.is_linear(b_outputs[i]) : b.is_gemm(b_outputs[i])) << i;
  }
  other.synchronize();
}

TEST_F(CudaStreams, TheDefaultOnes) {
  const Work work({5, 100, 1024, 128}, stream());
  for (const cudaStream_t one : {cudaStream_t{nullptr}, cudaStreamLegacy, cudaStreamPerThread}) {
    DeviceOutput gemm = work.output(one);
    DeviceOutput linear = work.output(one);
    work.gemm(gemm, {one});
    work.linear(linear, {one, {}, true});
    EXPECT_TRUE(work.is_gemm(gemm));
    EXPECT_TRUE(work.is_linear(linear));
  }
}

TEST_F(CudaStreams, CallsDoNotWait) {
  // The stream is blocked while the calls are made: one that waited for it would take the limit.
  struct Gate {
    std::atomic<bool> open{false};
    std::atomic<bool> gave_up{false};
  };
  static Gate gate;  // outlives this test if it throws
  const auto wait = [](void* data) {
    auto* const g = static_cast<Gate*>(data);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!g->open) {
      if (std::chrono::steady_clock::now() > limit) {
        g->gave_up = true;
        return;
      }
      std::this_thread::yield();
    }
  };
  const Work work({3, 100, 2048, 128}, stream());
  DeviceOutput gemm = work.output(stream());
  DeviceOutput linear = work.output(stream());
  DeviceOutput dense(GuardedBuffer(100, 2048, 2), kType, stream());
  work.gemm(gemm, {stream()});
  work.linear(linear, {stream()});
  cuda::unpack_weights(work.device().w(), dense.view(), {stream()});
  synchronize();  // what is loaded on first use has been
  BINARY_GEMM_CHECK_CUDA(cudaLaunchHostFunc(stream(), wait, &gate));
  for (int i = 0; i < 10; ++i) {
    work.gemm(gemm, {stream(), {}, i % 2 == 1});
    work.linear(linear, {stream(), {}, i % 2 == 1});
    cuda::unpack_weights(work.device().w(), dense.view(), {stream()});
  }
  EXPECT_EQ(cudaStreamQuery(stream()), cudaErrorNotReady);
  gate.open = true;
  synchronize();
  EXPECT_FALSE(gate.gave_up) << "a call waited for the stream";
  EXPECT_TRUE(work.is_gemm(gemm));
  EXPECT_TRUE(work.is_linear(linear));
  cudaGetLastError();
}

// ---- Threads ----

class CudaThreads : public DeviceTest {
 protected:
  // Runs `body(index)` in threads of their own; a throw is a failure.
  static void in_threads(int count, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&body, i] {
        try {
          body(i);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "thread " << i << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_F(CudaThreads, FourOnTheirOwnStreams) {
  in_threads(4, [](int index) {
    const Stream own;
    const Work work({1 + 5 * index, 150 + 33 * index, 1024 * (1 + index), 64 << index % 3}, own,
                    static_cast<std::uint64_t>(index));
    for (int i = 0; i < 50; ++i) {
      const Mode mode{i % 5 == 4, i % 2 == 1};
      DeviceOutput gemm = work.output(own);
      DeviceOutput linear = work.output(own);
      run(mode, own, [&] {
        work.gemm(gemm, {own, {}, mode.programmatic});
        work.linear(linear, {own, {}, mode.programmatic});
      });
      ASSERT_TRUE(work.is_gemm(gemm)) << "thread " << index << ", call " << i;
      ASSERT_TRUE(work.is_linear(linear)) << "thread " << index << ", call " << i;
    }
  });
}

TEST_F(CudaThreads, SmallAndLargeLaunchesOfOneKernel) {
  // The same function with much and with little shared memory: an attribute set for one launch
  // must not be missing in the other's.
  for (const Kernel kernel : kernels_for({1, 33, 256, 128})) {
    for (const std::int64_t m : {1, 2, 3, 8, 16, 32}) {
      if (kernel != Kernel::kAuto && !cuda::is_supported(kernel, m, 33, 256, 128)) continue;
      in_threads(2, [&](int index) {
        const Stream own;
        const Work work({m, index == 0 ? 33 : 161, index == 0 ? 256 : 17408, 128}, own, 3,
                        ScalePattern::kNarrow);
        std::vector<DeviceOutput> outputs;
        for (int i = 0; i < 60; ++i) outputs.push_back(work.output(own));
        for (const DeviceOutput& y : outputs) work.gemm(y, {own, {}, false, kernel});
        for (DeviceOutput& y : outputs) {
          ASSERT_TRUE(work.is_gemm(y)) << cuda::name(kernel) << ' ' << work.shape();
        }
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaThreads, TilesThatAreCut) {
  // CTAs wait for one another's totals while two streams compete for the multiprocessors.
  if (!cuda::is_supported(Kernel::kWgmma, 128, 64, 1280, 128)) GTEST_SKIP() << "no wgmma here";
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  WgmmaTileShape shape;
  for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
    if (!kernels::may_be_cut(tile.row_groups, tile.turns, tile.tokens)) continue;
    shape = shape_of_tile(tile, /*cuts=*/true, multiprocessors);
  }
  ASSERT_GT(shape.m, 0);
  in_threads(2, [&](int index) {
    const Stream own;
    const Work work({shape.m, shape.n, shape.k, 128}, own, 5, ScalePattern::kNarrow);
    // Room for x alone, so that no tile is cut.
    const DeviceWorkspace small(static_cast<std::size_t>(shape.m * shape.k), own);
    std::vector<DeviceOutput> outputs;
    for (int i = 0; i < 21; ++i) outputs.push_back(work.output(own));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const bool programmatic = index == 1;
      if (i % 3 == 0) {
        work.gemm(outputs[i], {own, {}, programmatic, Kernel::kWgmma});
      } else if (i % 3 == 1) {
        work.linear(outputs[i], {own, {}, programmatic});
      } else {
        cuda::binary_gemm(work.device().x(), work.device().w(), work.device().bias(),
                          outputs[i].view(), {own, small, programmatic});
      }
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      ASSERT_TRUE(i % 3 == 1 ? work.is_linear(outputs[i]) : work.is_gemm(outputs[i]))
          << "call " << i << ' ' << work.shape();
    }
  });
}

TEST_F(CudaThreads, OneLayerInMany) {
  const Work work({4, 90, 1280, 128}, stream());
  in_threads(4, [&](int index) {
    const Stream own;
    for (int i = 0; i < 25; ++i) {
      DeviceOutput y = work.output(own);
      work.gemm(y, {own, {}, index % 2 == 1});  // the workspace is not shared, the operands are
      ASSERT_TRUE(work.is_gemm(y)) << "thread " << index << ", call " << i;
    }
  });
}

TEST_F(CudaThreads, ManyOnSharedWeights) {
  // More threads than cores or than launches that a GPU runs at once; some capture, some prepare.
  const Work small({1, 90, 1280, 128}, stream(), 1);
  const Work large({40, 90, 1280, 128}, stream(), 2);
  in_threads(48, [&](int index) {
    const Stream own;
    const DeviceWorkspace workspace(cuda::linear_workspace_bytes(40, 1280), own);
    for (int i = 0; i < 20; ++i) {
      const Work& work = (index + i) % 2 == 0 ? small : large;
      const Mode mode{(index + i) % 7 == 0, (index + i) % 3 == 0};
      const cuda::Launch launch{own, workspace, mode.programmatic};
      DeviceOutput gemm = work.output(own);
      DeviceOutput linear = work.output(own);
      if (i % 5 == 4) cuda::prepare();
      run(mode, own, [&] {
        cuda::binary_gemm(work.device().x(), work.device().w(), work.device().bias(), gemm.view(),
                          launch);
        cuda::binary_linear(work.x(), work.device().w(), work.device().bias(), linear.view(),
                            launch);
      });
      ASSERT_TRUE(work.is_gemm(gemm)) << "thread " << index << ", call " << i;
      ASSERT_TRUE(work.is_linear(linear)) << "thread " << index << ", call " << i;
    }
  });
}

// ---- Devices and memory ----

class CudaDevice : public DeviceTest {};

TEST_F(CudaDevice, TheCurrentOneIsUnchanged) {
  const Work work({3, 40, 512, 128}, stream());
  const auto current = [] {
    int device = -1;
    BINARY_GEMM_CHECK_CUDA(cudaGetDevice(&device));
    return device;
  };
  DeviceOutput y = work.output(stream());
  cuda::prepare();
  EXPECT_EQ(current(), 0);
  work.gemm(y, {stream()});
  EXPECT_EQ(current(), 0);
  work.linear(y, {stream()});
  EXPECT_EQ(current(), 0);
  EXPECT_TRUE(work.is_linear(y));
}

TEST_F(CudaDevice, CallsAllocateNothing) {
  std::vector<std::unique_ptr<Work>> works;
  for (const std::int64_t m : {1, 3, 8, 40, 300}) {
    works.push_back(std::make_unique<Work>(Shape{m, 161, 5120, 128}, stream()));
    works.push_back(std::make_unique<Work>(Shape{m, 161, 1088, 64}, stream()));
  }
  DeviceOutput dense(GuardedBuffer(161, 5120, 2), kType, stream());
  DeviceActivation q(300, 5120, 0, 0, 0, stream());
  DeviceActivation half(300, 2560, 0, 0, 0, stream());
  DeviceOutput bits(GuardedBuffer(161, 160, 4), DataType::kFloat32, stream());
  DeviceOutput scales(GuardedBuffer(161, 40, 2), DataType::kFloat16, stream());
  std::vector<DeviceOutput> outputs;
  for (const auto& work : works) outputs.push_back(work->output(stream()));
  const auto call_all = [&](bool programmatic) {
    const cuda::Launch launch{stream(), {}, programmatic};
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->gemm(outputs[i], launch);
      works[i]->linear(outputs[i], launch);
    }
    cuda::quantize_activation(works[8]->x(), q.view(), launch);
    cuda::rms_norm_quantize(works[8]->x(), {}, 1e-6f, q.view(), launch);
    cuda::swiglu_quantize(works[8]->x(), half.view(), launch);
    cuda::unpack_weights(works[8]->device().w(), dense.view(), launch);
    cuda::pack_weights(dense.view(),
                       weight_view(static_cast<std::uint32_t*>(bits.view().data),
                                   static_cast<float16*>(scales.view().data), 161, 5120, 128),
                       launch);
  };
  call_all(false);  // what is loaded on first use
  call_all(true);
  synchronize();
  const std::size_t before = free_memory();
  for (int i = 0; i < 100; ++i) call_all(i % 2 == 1);
  synchronize();
  EXPECT_EQ(free_memory(), before);
  for (std::size_t i = 0; i < works.size(); ++i) {
    EXPECT_TRUE(works[i]->is_linear(outputs[i])) << works[i]->shape();
  }
}

TEST_F(CudaDevice, AnothersErrorIsNotTheLibrarys) {
  // A caller's own failed call, not yet asked for, must not surface in ours, nor be lost.
  const Work work({2, 40, 512, 128}, stream());
  DeviceOutput y = work.output(stream());
  ASSERT_NE(cudaSetDevice(9999), cudaSuccess);
  EXPECT_NO_THROW(work.linear(y, {stream()}));
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_TRUE(work.is_linear(y));
}

TEST_F(CudaDevice, LayersAreFreed) {
  { const cuda::BinaryLinear warm(1024, 1024); }
  const std::size_t free_before = free_memory();
  for (int i = 0; i < 20; ++i) {
    cuda::BinaryLinear layer(8192, 32768, 128, true);
    cuda::BinaryLinear moved = std::move(layer);
    layer = cuda::BinaryLinear(16, 128);
    moved = std::move(layer);
  }
  EXPECT_GE(free_memory() + (std::size_t{16} << 20), free_before);
}

// Whether `call` throws CudaError for want of memory.
void expect_out_of_memory(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "there was memory";
  } catch (const cuda::CudaError& error) {
    EXPECT_EQ(error.code(), cudaErrorMemoryAllocation);
    EXPECT_NE(std::string(error.what()).find("cudaErrorMemoryAllocation"), std::string::npos)
        << error.what();
  }
  cudaGetLastError();
}

TEST_F(CudaDevice, MemoryExhaustedElsewhere) {
  std::vector<std::unique_ptr<Work>> works;
  std::vector<DeviceOutput> gemm;
  std::vector<DeviceOutput> linear;
  for (const std::int64_t m : {1, 3, 8, 40, 300}) {
    works.push_back(std::make_unique<Work>(Shape{m, 161, 5120, 128}, stream()));
    gemm.push_back(works.back()->output(stream()));
    linear.push_back(works.back()->output(stream()));
  }
  cuda::prepare();
  const Work& one = *works[0];
  GuardedBuffer dense_host(64, 5120, 2);
  Random random(1);
  fill_gaussian(dense_host.view(kType), random);
  const DeviceBuffer dense(dense_host, stream());
  synchronize();

  const FullMemory full;
  const std::size_t before = free_memory();
  for (const bool programmatic : {false, true}) {
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->gemm(gemm[i], {stream(), {}, programmatic});
      works[i]->linear(linear[i], {stream(), {}, programmatic});
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
      EXPECT_TRUE(works[i]->is_gemm(gemm[i])) << works[i]->shape();
      EXPECT_TRUE(works[i]->is_linear(linear[i])) << works[i]->shape();
    }
    // What allocates says so.
    expect_out_of_memory([] { const cuda::BinaryLinear layer(8192, 8192); });
    expect_out_of_memory([] { const cuda::BinaryLinear layer(8192, 8192, 32, true); });
    expect_out_of_memory([&] {
      cuda::BinaryLinear::from_dense(dense.view(dense_host, kType), 128, {}, {stream()});
    });
    expect_out_of_memory([&] {
      cuda::BinaryLinear::from_packed(one.device().w(), one.device().bias(), {stream()});
    });
  }
  EXPECT_EQ(free_memory(), before);
}

TEST_F(CudaDevice, ALayerThatDoesNotFitLeavesNothing) {
  // There is room for its bits and not for its scales.
  constexpr std::size_t kRoom = std::size_t{64} << 20;
  constexpr std::int64_t kK = 8192;
  constexpr std::int64_t kBitsBytes = std::int64_t{48} << 20;
  constexpr std::int64_t kN = kBitsBytes / (kK / 8);
  void* room = nullptr;
  BINARY_GEMM_CHECK_CUDA(cudaMalloc(&room, kRoom));
  const FullMemory full;
  BINARY_GEMM_CHECK_CUDA(cudaFree(room));
  const std::size_t before = free_memory();
  ASSERT_GE(before, kRoom);
  for (int i = 0; i < 5; ++i) {
    expect_out_of_memory([] { const cuda::BinaryLinear layer(kN, kK, 32); });
    EXPECT_EQ(free_memory(), before);
  }
  EXPECT_NO_THROW(const cuda::BinaryLinear layer(kN / 2, kK, 32));
  EXPECT_EQ(free_memory(), before);
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
