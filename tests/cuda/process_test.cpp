/// What needs a process of its own: an error that CUDA can't recover from, and first calls.
///
/// Each test runs its body in a child, which is this program started anew ("threadsafe" death
/// tests), so that CUDA is never shared with it by a fork. A child that hangs is ended by an alarm,
/// and then its test fails.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/c_api.h"
#include "c_api/to_c.h"
#include "device_support.h"
#include "trap.h"

namespace binary_gemm {
namespace testing {
namespace {

constexpr DataType kType = DataType::kBFloat16;
constexpr unsigned kSecondsToLive = 120;

// ---- In the child ----

// What a death test looks for at the end of a child's output.
constexpr char kGood[] = "all is well";

// Ends the child at once, with no destructor: after a sticky error there is nothing left to free.
[[noreturn]] void end_child(bool good) {
  std::fputs(good ? kGood : "not well", stderr);
  std::fflush(stderr);
  std::_Exit(good ? 0 : 1);
}

// Runs `body`, which returns whether all was well, and ends the child.
[[noreturn]] void live(const std::function<bool()>& body) {
  alarm(kSecondsToLive);
  try {
    end_child(body());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "a throw: %s\n", error.what());
    end_child(false);
  }
}

// Whether `condition` holds; says so if not.
bool check(bool condition, const std::string& what) {
  if (!condition) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  return condition;
}

// Operands on the device, for every call.
struct Operands {
  static constexpr Shape kShape{2, 48, 2048, 128};

  explicit Operands(cudaStream_t s, Shape shape = kShape)
      : stream(s),
        p(make_problem(shape, ScalePattern::kMixed, ActivationPattern::kRandom, all_layouts()[0],
                       1)),
        x_host(shape.m, shape.k, 2),
        dense_host(shape.n, shape.k, 2),
        d(p, s),
        x_buffer(filled(x_host), s),
        dense_buffer(filled(dense_host), s),
        workspace(cuda::linear_workspace_bytes(shape.m, shape.k), s),
        gemm(GuardedBuffer(shape.m, shape.n, 2), kType, s),
        linear(GuardedBuffer(shape.m, shape.n, 2), kType, s),
        unpacked(GuardedBuffer(shape.n, shape.k, 2), kType, s),
        q(shape.m, shape.k, 0, 0, 0, s),
        packed(shape.n, shape.k, shape.g, all_layouts()[0], s),
        gemm_expected(shape.m, shape.n, 2),
        linear_expected(shape.m, shape.n, 2) {
    expected_gemm(p.x(), p.w(), p.bias(), gemm_expected.view(kType));
    expected_linear(std::as_const(x_host).view(kType), p.w(), p.bias(),
                    linear_expected.view(kType));
    BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream));
  }

  static GuardedBuffer& filled(GuardedBuffer& buffer) {
    Random random(7);
    fill_gaussian(buffer.view(kType), random);
    return buffer;
  }

  cuda::Launch launch(bool programmatic = false) const { return {stream, workspace, programmatic}; }
  ConstMatrixView x() const { return x_buffer.view(x_host, kType); }
  ConstMatrixView dense() const { return dense_buffer.view(dense_host, kType); }
  void call_gemm(bool programmatic = false) const {
    cuda::binary_gemm(d.x(), d.w(), d.bias(), gemm.view(), launch(programmatic));
  }
  void call_linear(bool programmatic = false) const {
    cuda::binary_linear(x(), d.w(), d.bias(), linear.view(), launch(programmatic));
  }
  bool is_right() {
    const ::testing::AssertionResult gemm_equal =
        equal_bits(gemm.fetch(), std::as_const(gemm_expected).view(kType));
    const ::testing::AssertionResult linear_equal =
        equal_bits(linear.fetch(), std::as_const(linear_expected).view(kType));
    return check(gemm_equal, std::string("binary_gemm: ") + gemm_equal.message()) &&
           check(linear_equal, std::string("binary_linear: ") + linear_equal.message());
  }

  cudaStream_t stream;
  Problem p;
  GuardedBuffer x_host, dense_host;
  DeviceProblem d;
  DeviceBuffer x_buffer, dense_buffer;
  DeviceWorkspace workspace;
  DeviceOutput gemm, linear, unpacked;
  DeviceActivation q;
  DeviceWeights packed;
  GuardedBuffer gemm_expected, linear_expected;
};

// Whether `call` throws CudaError with `code`.
bool reports(const char* name, cudaError_t code, const std::function<void()>& call) {
  try {
    call();
  } catch (const cuda::CudaError& error) {
    const std::string message = error.what();
    return check(error.code() == code, std::string(name) + " reports another error: " + message) &&
           check(message.find(cudaGetErrorName(code)) != std::string::npos,
                 std::string(name) + " does not name the error: " + message);
  } catch (const std::exception& error) {
    return check(false, std::string(name) + " throws something else: " + error.what());
  }
  return check(false, std::string(name) + " swallows the error");
}

// Whether every call of the library reports the sticky error `code`.
bool all_report(Operands& o, const cuda::BinaryLinear& layer, cudaError_t code) {
  bool good = true;
  const auto expect = [&](const char* name, const std::function<void()>& call) {
    good = reports(name, code, call) && good;
  };
  // Twice: the first report must not clear it.
  for (int i = 0; i < 2; ++i) {
    const cuda::Launch launch = o.launch(i == 1);
    expect("binary_gemm", [&] { o.call_gemm(i == 1); });
    expect("binary_linear", [&] { o.call_linear(i == 1); });
    expect("quantize_activation", [&] { cuda::quantize_activation(o.x(), o.q.view(), launch); });
    expect("pack_weights", [&] { cuda::pack_weights(o.dense(), o.packed.view(), launch); });
    expect("unpack_weights", [&] { cuda::unpack_weights(o.d.w(), o.unpacked.view(), launch); });
    expect("BinaryLinear", [&] { const cuda::BinaryLinear another(64, 256); });
    expect("from_dense", [&] { cuda::BinaryLinear::from_dense(o.dense(), 128, {}, launch); });
    expect("from_packed", [&] { cuda::BinaryLinear::from_packed(o.d.w(), {}, launch); });
    expect("from_packed of host memory",
           [&] { cuda::BinaryLinear::from_packed(o.p.w(), o.p.bias(), launch); });
    expect("a layer", [&] { layer(o.x(), o.linear.view(), launch); });
  }
  // Through the C ABI a status, with the message.
  bg_linear* made = nullptr;
  const bg_weights w = to_c(o.d.w());
  const bg_launch launch = bg_launch_of(o.stream, nullptr, 0);
  good = check(bg_cuda_linear_from_packed(&w, nullptr, &launch, &made) == BG_CUDA_ERROR,
               "the C ABI has another status") &&
         good;
  good =
      check(std::string(bg_last_error_message()).find(cudaGetErrorName(code)) != std::string::npos,
            std::string("the C ABI's message: ") + bg_last_error_message()) &&
      good;
  // What needs no device goes on.
  cuda::linear_workspace_bytes(3, 1024);
  return good;
}

// ---- In the parent ----

class CudaProcessDeathTest : public DeviceTest {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    DeviceTest::SetUp();
  }
};

#define EXPECT_WELL(...) EXPECT_EXIT(live(__VA_ARGS__), ::testing::ExitedWithCode(0), kGood)

TEST_F(CudaProcessDeathTest, AForeignTrapIsReportedByEveryCall) {
  EXPECT_WELL([&] {
    Operands o(stream());
    const cuda::BinaryLinear layer = cuda::BinaryLinear::from_packed(o.d.w(), {}, o.launch());
    o.call_gemm();
    o.call_linear();
    if (!o.is_right()) return false;
    launch_trap(stream());
    const cudaError_t code = cudaStreamSynchronize(stream());
    std::fprintf(stderr, "the trap gave %s\n", cudaGetErrorName(code));
    return check(code != cudaSuccess, "the trap gave no error") && all_report(o, layer, code);
  });
}

TEST_F(CudaProcessDeathTest, ATrapIsReportedWithoutAWaitBetween) {
  // Whoever synchronizes first gets the error, whatever was queued behind the trap.
  EXPECT_WELL([&] {
    Operands o(stream());
    const cuda::BinaryLinear layer = cuda::BinaryLinear::from_packed(o.d.w(), {}, o.launch());
    launch_trap(stream());
    try {
      for (int i = 0; i < 20; ++i) {
        o.call_gemm(i % 2 == 1);
        o.call_linear(i % 2 == 1);
      }
    } catch (const cuda::CudaError& error) {  // the trap was that quick
      std::fprintf(stderr, "a call reports %s\n", cudaGetErrorName(error.code()));
    }
    const cudaError_t code = cudaStreamSynchronize(stream());
    return check(code != cudaSuccess, "the error was swallowed") && all_report(o, layer, code);
  });
}

TEST_F(CudaProcessDeathTest, AViewPastItsMemoryIsReported) {
  // The one wrong argument that can't be checked: the memory is smaller than the view says.
  EXPECT_WELL([&] {
    Operands o(stream());
    const cuda::BinaryLinear layer = cuda::BinaryLinear::from_packed(o.d.w(), {}, o.launch());
    // Memory that has been freed, behind some that has not.
    constexpr std::size_t kBytes = std::size_t{64} << 20;
    void* kept = nullptr;
    void* freed = nullptr;
    BINARY_GEMM_CHECK_CUDA(cudaMalloc(&kept, kBytes));
    BINARY_GEMM_CHECK_CUDA(cudaMalloc(&freed, kBytes));
    if (std::less<void*>{}(freed, kept)) std::swap(kept, freed);
    BINARY_GEMM_CHECK_CUDA(cudaFree(freed));
    MatrixView y = matrix_view(static_cast<bfloat16*>(kept), o.p.shape.m, o.p.shape.n);
    y.offset = static_cast<bfloat16*>(freed) - static_cast<bfloat16*>(kept);
    cudaError_t code = cudaSuccess;
    try {
      cuda::binary_gemm(o.d.x(), o.d.w(), {}, y, o.launch());
      code = cudaStreamSynchronize(stream());
    } catch (const cuda::CudaError& error) {
      code = error.code();
    }
    std::fprintf(stderr, "the call gave %s\n", cudaGetErrorName(code));
    return check(code != cudaSuccess, "a write past the memory gave no error") &&
           all_report(o, layer, code);
  });
}

TEST_F(CudaProcessDeathTest, ATrapBeforeTheFirstCall) {
  // Preparing fails with the error, each time.
  EXPECT_WELL([&] {
    Operands o(stream());
    launch_trap(stream());
    const cudaError_t code = cudaStreamSynchronize(stream());
    bool good = check(code != cudaSuccess, "the trap gave no error");
    for (int i = 0; i < 2; ++i) {
      good = reports("prepare", code, [] { cuda::prepare(0); }) && good;
      good = reports("binary_gemm", code, [&] { o.call_gemm(); }) && good;
      good = reports("supported_kernels", code, [] { cuda::supported_kernels(); }) && good;
    }
    return good;
  });
}

TEST_F(CudaProcessDeathTest, FirstCallsOfManyThreadsAtOnce) {
  // Nothing has been prepared, and all call at the same time.
  EXPECT_WELL([&] {
    constexpr int kThreads = 32;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Operands>> operands;
    for (int i = 0; i < kThreads; ++i) {
      streams.push_back(std::make_unique<Stream>());
      operands.push_back(std::make_unique<Operands>(
          *streams.back(), Shape{1 + i, 40 + 3 * i, 1024 + 128 * i, i % 2 == 0 ? 128 : 64}));
    }
    std::atomic<int> waiting{kThreads};
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        --waiting;
        while (waiting > 0) std::this_thread::yield();
        try {
          if (i % 2 == 0) {
            operands[static_cast<std::size_t>(i)]->call_gemm(i % 4 == 0);
            operands[static_cast<std::size_t>(i)]->call_linear(i % 4 == 0);
          } else {
            operands[static_cast<std::size_t>(i)]->call_linear(i % 4 == 1);
            operands[static_cast<std::size_t>(i)]->call_gemm(i % 4 == 1);
          }
        } catch (const std::exception& error) {
          std::fprintf(stderr, "thread %d: %s\n", i, error.what());
          ++failures;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    bool good = check(failures == 0, "a thread's first call");
    for (const auto& o : operands) good = o->is_right() && good;
    return good;
  });
}

TEST_F(CudaProcessDeathTest, PreparingWithoutMemory) {
  // It may find all that it needs or say what it lacks; with memory again it works.
  EXPECT_WELL([&] {
    Operands o(stream());
    {
      const FullMemory full;
      try {
        cuda::prepare(0);
        std::fputs("prepared in spite of it\n", stderr);
      } catch (const cuda::CudaError& error) {
        std::fprintf(stderr, "%s\n", error.what());
        cudaGetLastError();
      }
    }
    cuda::prepare(0);
    o.call_gemm();
    o.call_linear();
    return o.is_right();
  });
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
