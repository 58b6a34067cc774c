#pragma once

/// What the CUDA tests share: guarded buffers mirrored on the device, ways to launch, a fixture.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <iosfwd>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "binary_gemm/cuda.h"
#include "support.h"

namespace binary_gemm {
namespace testing {

/// Throws std::runtime_error unless `code` is cudaSuccess.
void check_cuda(cudaError_t code, const char* call);
#define BINARY_GEMM_CHECK_CUDA(call) ::binary_gemm::testing::check_cuda((call), #call)

/// BINARY_GEMM_TEST_REDUCED=1: a small set for compute-sanitizer. Device buffers then are
/// allocations of their own, without the guard at the end, so that a read past it is seen.
bool reduced();

/// A stream that does not wait for the default one, so work that strays there would show.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// A GuardedBuffer's mirror on the current device: all of its bytes, guards and padding too, so the
/// base is 16-byte but not 32-byte aligned there as well.
class DeviceBuffer {
 public:
  DeviceBuffer(GuardedBuffer& host, cudaStream_t stream);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  template <class T>
  T* base() const {
    return reinterpret_cast<T*>(raw_ + GuardedBuffer::kFront);
  }
  MatrixView view(const GuardedBuffer& host, DataType type) const {
    return {base<void>(), type, host.rows(), host.cols(), host.stride(), host.offset()};
  }

  void upload(GuardedBuffer& host, cudaStream_t stream);
  /// Waits for the stream.
  void download(GuardedBuffer& host, cudaStream_t stream) const;
  /// Whether the device's bytes are still those of `host`. Waits for the stream.
  ::testing::AssertionResult equals(GuardedBuffer& host, cudaStream_t stream) const;

 private:
  friend class DeviceOutput;
  friend class DeviceWorkspace;
  DeviceBuffer(std::size_t bytes, int);

  std::size_t bytes_;
  int device_;
  unsigned char* raw_;
};

/// An output: every byte of it starts as 0xff, here and on the device.
class DeviceOutput {
 public:
  DeviceOutput(GuardedBuffer host, DataType type, cudaStream_t stream);

  MatrixView view() const { return device_.view(host_, type_); }
  /// Waits for the stream; the view is of the host.
  ConstMatrixView fetch();
  /// What fetch left on the host.
  const GuardedBuffer& host() const { return host_; }
  GuardedBuffer& host() { return host_; }
  ::testing::AssertionResult guards_intact() const { return host_.guards_intact(); }

 private:
  GuardedBuffer host_;
  DataType type_;
  cudaStream_t stream_;
  DeviceBuffer device_;
};

/// A workspace of exactly `bytes`, between guards.
class DeviceWorkspace {
 public:
  DeviceWorkspace(std::size_t bytes, cudaStream_t stream);

  operator cuda::Workspace() const { return {device_.base<void>(), bytes_}; }
  /// Waits for the stream.
  ::testing::AssertionResult guards_intact();

 private:
  GuardedBuffer host_;
  std::size_t bytes_;
  cudaStream_t stream_;
  DeviceBuffer device_;
};

/// A problem's operands on the device. `host` must outlive it.
struct DeviceProblem {
  DeviceProblem(Problem& problem, cudaStream_t stream);

  ActivationView x() const;
  WeightView w() const;
  BiasView bias() const;
  BiasView bias_if(bool with_bias) const { return with_bias ? bias() : BiasView{}; }
  /// Whether no byte of any operand has changed, guards and padding too. Waits for the stream.
  ::testing::AssertionResult unchanged(cudaStream_t stream) const;

  Problem& host;
  DeviceBuffer values, x_scales, bits, scales, bias_data;
};

/// Quantized activations on the device, as an output.
struct DeviceActivation {
  DeviceActivation(std::int64_t m, std::int64_t k, std::int64_t padding, std::int64_t offset,
                   std::int64_t scales_offset, cudaStream_t stream);
  MutableActivationView view() const;

  DeviceOutput values, scales;
};

/// Packed weights on the device, as an output.
struct DeviceWeights {
  DeviceWeights(std::int64_t n, std::int64_t k, std::int64_t g, const Layout& layout,
                cudaStream_t stream);
  /// With null scales unless `with_scales`.
  MutableWeightView view(bool with_scales = true) const;
  /// The same view of what fetch left on the host.
  MutableWeightView host_view(bool with_scales = true);
  void fetch();

  std::int64_t group_size;
  DeviceOutput bits, scales;

 private:
  MutableWeightView at(std::uint32_t* bits_base, float16* scales_base) const;
};

/// Like make_problem, for large N: made of a few of its rows, with fresh bits.
Problem make_tall_problem(Shape shape, ScalePattern scales, ActivationPattern activations,
                          const Layout& layout, std::uint64_t seed);

/// binary_gemm on the host: by the reference where that is quick, else by the CPU library, whose
/// own tests compare it with the reference.
void expected_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y);
/// binary_linear, in the same way.
void expected_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                     const MatrixView& y);

/// How a call is made.
struct Mode {
  bool captured;  ///< in a graph, which is then replayed
  bool programmatic;
};
inline constexpr Mode kModes[] = {{false, false}, {false, true}, {true, false}, {true, true}};
std::ostream& operator<<(std::ostream& out, const Mode& mode);
std::string mode_name(const ::testing::TestParamInfo<Mode>& info);

/// Calls `body` plainly; or captures it from `stream`, replays the graph once and waits.
void run(const Mode& mode, cudaStream_t stream, const std::function<void()>& body);

/// Every kernel that `body` would launch on the stream, with its gridDim.x. Launches none.
std::set<std::pair<const void*, unsigned>> kernels_of(cudaStream_t stream,
                                                      const std::function<void()>& body);

/// Makes a device current for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  /// The device that is current now.
  static int get();

 private:
  int previous_;
};

/// Takes all the memory of the current device that there is to get, for as long as it lives.
class FullMemory {
 public:
  FullMemory();
  ~FullMemory();
  FullMemory(const FullMemory&) = delete;
  FullMemory& operator=(const FullMemory&) = delete;

 private:
  std::vector<void*> blocks_;
};

/// Of the current device.
int device_attribute(cudaDeviceAttr attribute);

/// What cudaMalloc could still give on the current device, in bytes.
std::size_t free_memory();

/// Why a test that needs `count` GPUs can't run here, or "".
std::string no_device(int count = 1);

/// How many GPUs there must be, by BINARY_GEMM_REQUIRE_GPU: a number, 0 if it is not set, 1 if it
/// is set to something else. Tests that need no more than these fail where they would skip.
int required_devices();

/// Skips without as many GPUs as it needs; fails instead if so many are required. Device 0 is
/// current.
class DeviceTest : public ::testing::Test {
 protected:
  explicit DeviceTest(int devices = 1) : devices_(devices) {}
  void SetUp() override;
  void TearDown() override;
  cudaStream_t stream() const { return *stream_; }
  void synchronize() const { stream_->synchronize(); }

 private:
  int devices_;
  std::optional<Stream> stream_;
};

/// With a way to call as its parameter.
class ModeTest : public DeviceTest, public ::testing::WithParamInterface<Mode> {
 protected:
  void SetUp() override;
  void TearDown() override;
  /// With a workspace for kScratchX bytes of x, and one to hand tiles over.
  cuda::Launch launch(cuda::Kernel kernel = cuda::Kernel::kAuto) const {
    return launch(kernel, *scratch_);
  }
  cuda::Launch launch(cuda::Kernel kernel, const cuda::Workspace& workspace) const {
    return {stream(), workspace, GetParam().programmatic, kernel};
  }
  void run(const std::function<void()>& body) const { testing::run(GetParam(), stream(), body); }
  /// Whether to leave out case `index` of many: in a graph the kernels are the same as outside, so
  /// a third of the cases will do.
  static bool thinned(std::uint64_t index) {
    return GetParam().captured && Random(index).bits() % 3 != 0;
  }

 private:
  static constexpr std::size_t kScratchX = std::size_t{1} << 23;
  std::optional<DeviceWorkspace> scratch_;
};

/// The kernels of this device that take the shape, and kAuto (in a reduced run, if there are none).
/// The weights are dense, from an aligned base.
std::vector<cuda::Kernel> kernels_for(const Shape& shape);
/// The same for M tokens and these weights, which some kernels want aligned.
std::vector<cuda::Kernel> kernels_for(std::int64_t m, const WeightView& w);

}  // namespace testing
}  // namespace binary_gemm
