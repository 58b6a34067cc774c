#include "device_support.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <ostream>
#include <stdexcept>
#include <utility>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/kernels/tuning.h"
#include "binary_gemm/reference.h"

namespace binary_gemm {
namespace testing {
namespace {

bool flag(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "") != 0 && std::strcmp(value, "0") != 0;
}

// Allocating is slow and waits for the device, so blocks are kept by device and size. Whoever frees
// one has waited for what used it.
class Blocks {
 public:
  // On the current device, which is `device`.
  unsigned char* allocate(int device, std::size_t bytes) {
    if (keeps(bytes)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<unsigned char*>& blocks = free_[{device, rounded(bytes)}];
      if (!blocks.empty()) {
        unsigned char* block = blocks.back();
        blocks.pop_back();
        return block;
      }
    }
    void* block = nullptr;
    BINARY_GEMM_CHECK_CUDA(cudaMalloc(&block, keeps(bytes) ? rounded(bytes) : bytes));
    return static_cast<unsigned char*>(block);
  }

  void free(int device, unsigned char* block, std::size_t bytes) {
    if (block == nullptr) return;
    if (!keeps(bytes)) {
      cudaFree(block);  // in a destructor, so a failure shows in the next call
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[{device, rounded(bytes)}].push_back(block);
  }

 private:
  static bool keeps(std::size_t bytes) { return !reduced() && bytes <= std::size_t{64} << 20; }
  static std::size_t rounded(std::size_t bytes) {
    std::size_t size = 1024;
    while (size < bytes) size *= 2;
    return size;
  }

  std::mutex mutex_;
  std::map<std::pair<int, std::size_t>, std::vector<unsigned char*>> free_;
};

Blocks& blocks() {
  static Blocks all;
  return all;
}

std::size_t mirrored_bytes(const GuardedBuffer& host) {
  return host.raw_bytes() - (reduced() ? GuardedBuffer::kBack : 0);
}

}  // namespace

void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}

bool reduced() {
  static const bool value = flag("BINARY_GEMM_TEST_REDUCED");
  return value;
}

Stream::Stream() {
  BINARY_GEMM_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::synchronize() const { BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream_)); }

// ---- Buffers ----

DeviceBuffer::DeviceBuffer(std::size_t bytes, int)
    : bytes_(bytes), device_(CurrentDevice::get()), raw_(blocks().allocate(device_, bytes)) {}

DeviceBuffer::DeviceBuffer(GuardedBuffer& host, cudaStream_t stream)
    : DeviceBuffer(mirrored_bytes(host), 0) {
  upload(host, stream);
}

DeviceBuffer::~DeviceBuffer() { blocks().free(device_, raw_, bytes_); }

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : bytes_(other.bytes_), device_(other.device_), raw_(std::exchange(other.raw_, nullptr)) {}

void DeviceBuffer::upload(GuardedBuffer& host, cudaStream_t stream) {
  BINARY_GEMM_CHECK_CUDA(cudaMemcpyAsync(raw_, host.raw(), bytes_, cudaMemcpyHostToDevice, stream));
}

void DeviceBuffer::download(GuardedBuffer& host, cudaStream_t stream) const {
  BINARY_GEMM_CHECK_CUDA(cudaMemcpyAsync(host.raw(), raw_, bytes_, cudaMemcpyDeviceToHost, stream));
  BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream));
}

::testing::AssertionResult DeviceBuffer::equals(GuardedBuffer& host, cudaStream_t stream) const {
  std::vector<unsigned char> bytes(bytes_);
  BINARY_GEMM_CHECK_CUDA(
      cudaMemcpyAsync(bytes.data(), raw_, bytes_, cudaMemcpyDeviceToHost, stream));
  BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream));
  const auto [here, there] = std::mismatch(bytes.begin(), bytes.end(), host.raw());
  if (here == bytes.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "byte " << (here - bytes.begin()) - static_cast<std::ptrdiff_t>(GuardedBuffer::kFront)
         << " after the base was written: " << static_cast<int>(*here) << ", was "
         << static_cast<int>(*there);
}

DeviceOutput::DeviceOutput(GuardedBuffer host, DataType type, cudaStream_t stream)
    : host_(std::move(host)), type_(type), stream_(stream), device_(mirrored_bytes(host_), 0) {
  BINARY_GEMM_CHECK_CUDA(cudaMemsetAsync(device_.raw_, 0xff, device_.bytes_, stream));
}

ConstMatrixView DeviceOutput::fetch() {
  device_.download(host_, stream_);
  return host_.view(type_);
}

DeviceWorkspace::DeviceWorkspace(std::size_t bytes, cudaStream_t stream)
    : host_(1, static_cast<std::int64_t>(bytes), 1),
      bytes_(bytes),
      stream_(stream),
      device_(mirrored_bytes(host_), 0) {
  // For initcheck the bytes stay undefined, as a user's would be; otherwise they are NaNs.
  BINARY_GEMM_CHECK_CUDA(cudaMemsetAsync(
      device_.raw_, 0xff, reduced() ? GuardedBuffer::kFront : device_.bytes_, stream));
}

::testing::AssertionResult DeviceWorkspace::guards_intact() {
  if (reduced()) return ::testing::AssertionSuccess();  // memcheck sees more
  device_.download(host_, stream_);
  return host_.guards_intact();
}

DeviceProblem::DeviceProblem(Problem& problem, cudaStream_t stream)
    : host(problem),
      values(problem.values, stream),
      x_scales(problem.x_scales, stream),
      bits(problem.bits, stream),
      scales(problem.scales, stream),
      bias_data(problem.bias_data, stream) {}

ActivationView DeviceProblem::x() const {
  ActivationView view = host.x();
  view.values = values.base<std::int8_t>();
  view.scales = x_scales.base<float>();
  return view;
}

WeightView DeviceProblem::w() const {
  WeightView view = host.w();
  view.bits = bits.base<std::uint32_t>();
  view.scales = scales.base<float16>();
  return view;
}

BiasView DeviceProblem::bias() const {
  BiasView view = host.bias();
  view.data = bias_data.base<float>();
  return view;
}

::testing::AssertionResult DeviceProblem::unchanged(cudaStream_t stream) const {
  const std::pair<const DeviceBuffer*, GuardedBuffer*> operands[] = {{&values, &host.values},
                                                                     {&x_scales, &host.x_scales},
                                                                     {&bits, &host.bits},
                                                                     {&scales, &host.scales},
                                                                     {&bias_data, &host.bias_data}};
  for (const auto& [device, original] : operands) {
    ::testing::AssertionResult result = device->equals(*original, stream);
    if (!result) return result << " (an input)";
  }
  return ::testing::AssertionSuccess();
}

DeviceActivation::DeviceActivation(std::int64_t m, std::int64_t k, std::int64_t padding,
                                   std::int64_t offset, std::int64_t scales_offset,
                                   cudaStream_t stream)
    : values(GuardedBuffer(m, k, 1, padding, offset), DataType::kInt8, stream),
      scales(GuardedBuffer(1, m, 4, 0, scales_offset), DataType::kFloat32, stream) {}

MutableActivationView DeviceActivation::view() const {
  const GuardedBuffer& host = values.host();
  return {static_cast<std::int8_t*>(values.view().data),
          static_cast<float*>(scales.view().data),
          host.rows(),
          host.cols(),
          host.stride(),
          host.offset(),
          scales.host().offset()};
}

DeviceWeights::DeviceWeights(std::int64_t n, std::int64_t k, std::int64_t g, const Layout& layout,
                             cudaStream_t stream)
    : group_size(g),
      bits(GuardedBuffer(n, k / 32, 4, layout.bits_padding, layout.bits_offset), DataType::kFloat32,
           stream),
      scales(GuardedBuffer(n, k / g, 2, layout.scales_padding, layout.scales_offset),
             DataType::kFloat16, stream) {}

MutableWeightView DeviceWeights::view(bool with_scales) const {
  return at(static_cast<std::uint32_t*>(bits.view().data),
            with_scales ? static_cast<float16*>(scales.view().data) : nullptr);
}

MutableWeightView DeviceWeights::host_view(bool with_scales) {
  return at(bits.host().base<std::uint32_t>(),
            with_scales ? scales.host().base<float16>() : nullptr);
}

void DeviceWeights::fetch() {
  bits.fetch();
  scales.fetch();
}

MutableWeightView DeviceWeights::at(std::uint32_t* bits_base, float16* scales_base) const {
  const GuardedBuffer& words = bits.host();
  return {bits_base,
          scales_base,
          words.rows(),
          words.cols() * 32,
          group_size,
          words.stride(),
          scales.host().stride(),
          words.offset(),
          scales.host().offset()};
}

// ---- Problems and what they give ----

Problem make_tall_problem(Shape shape, ScalePattern scales, ActivationPattern activations,
                          const Layout& layout, std::uint64_t seed) {
  constexpr std::int64_t kFew = 24;
  if (shape.n <= kFew) return make_problem(shape, scales, activations, layout, seed);
  Problem few = make_problem({shape.m, kFew, shape.k, shape.g}, scales, activations, layout, seed);
  Problem p{shape,
            layout,
            std::move(few.values),
            std::move(few.x_scales),
            {shape.n, shape.k / 32, 4, layout.bits_padding, layout.bits_offset},
            {shape.n, shape.k / shape.g, 2, layout.scales_padding, layout.scales_offset},
            {1, shape.n, 4, 0, layout.bias_offset}};
  Random random(seed + 1);
  for (std::int64_t n = 0; n < shape.n; ++n) {
    const std::int64_t from = n % kFew;
    std::uint32_t* words = p.bits.row<std::uint32_t>(n);
    std::copy_n(few.bits.row<std::uint32_t>(from), shape.k / 32, words);
    if (n % 3 != 2) {  // the others stay mostly +1
      for (std::int64_t j = 0; j < shape.k / 32; ++j) {
        words[j] ^= static_cast<std::uint32_t>(random.bits() >> 32);
      }
    }
    std::copy_n(few.scales.row<float16>(from), shape.k / shape.g, p.scales.row<float16>(n));
    p.bias_data.row<float>(0)[n] = random.gaussian() * 100;
  }
  return p;
}

void expected_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y) {
  const std::int64_t products = x.m * w.n * std::max<std::int64_t>(w.k, 1);
  if (products <= std::int64_t{1} << 19) {
    reference::binary_gemm(x, w, epilogue, y);
  } else {
    // Waking threads takes longer than a small product.
    cpu::binary_gemm(x, w, epilogue, y, {products <= std::int64_t{1} << 28 ? 1 : 0});
  }
}

void expected_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                     const MatrixView& y) {
  aligned_vector<std::int8_t> values(static_cast<std::size_t>(x.rows * x.cols));
  aligned_vector<float> scales(static_cast<std::size_t>(x.rows));
  const auto q = activation_view(values.data(), scales.data(), x.rows, x.cols);
  cpu::quantize_activation(x, q, {1});
  expected_gemm(q, w, epilogue, y);
}

// ---- Launching ----

std::ostream& operator<<(std::ostream& out, const Mode& mode) {
  return out << (mode.captured ? "captured" : "plain")
             << (mode.programmatic ? ", programmatic" : "");
}

std::string mode_name(const ::testing::TestParamInfo<Mode>& info) {
  return std::string(info.param.captured ? "Captured" : "Plain") +
         (info.param.programmatic ? "Programmatic" : "");
}

namespace {

cudaGraph_t capture(cudaStream_t stream, const std::function<void()>& body) {
  // Of this thread: others may be at work. What a capture forbids, it forbids here all the same.
  BINARY_GEMM_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    body();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  BINARY_GEMM_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  return graph;
}

}  // namespace

void run(const Mode& mode, cudaStream_t stream, const std::function<void()>& body) {
  if (!mode.captured) {
    body();
    return;
  }
  const cudaGraph_t graph = capture(stream, body);
  cudaGraphExec_t executable = nullptr;
  BINARY_GEMM_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  BINARY_GEMM_CHECK_CUDA(cudaGraphLaunch(executable, stream));
  BINARY_GEMM_CHECK_CUDA(cudaStreamSynchronize(stream));
  BINARY_GEMM_CHECK_CUDA(cudaGraphExecDestroy(executable));
  BINARY_GEMM_CHECK_CUDA(cudaGraphDestroy(graph));
}

std::set<std::pair<const void*, unsigned>> kernels_of(cudaStream_t stream,
                                                      const std::function<void()>& body) {
  const cudaGraph_t graph = capture(stream, body);
  std::size_t count = 0;
  BINARY_GEMM_CHECK_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  BINARY_GEMM_CHECK_CUDA(cudaGraphGetNodes(graph, nodes.data(), &count));
  std::set<std::pair<const void*, unsigned>> kernels;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    BINARY_GEMM_CHECK_CUDA(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params{};
    BINARY_GEMM_CHECK_CUDA(cudaGraphKernelNodeGetParams(node, &params));
    kernels.emplace(params.func, params.gridDim.x);
  }
  BINARY_GEMM_CHECK_CUDA(cudaGraphDestroy(graph));
  return kernels;
}

std::vector<cuda::Kernel> kernels_for(const Shape& shape) {
  static const std::vector<cuda::Kernel> all = cuda::supported_kernels();
  std::vector<cuda::Kernel> kernels;
  for (const cuda::Kernel kernel : all) {
    if (kernel != cuda::Kernel::kAuto &&
        cuda::is_supported(kernel, shape.m, shape.n, shape.k, shape.g)) {
      kernels.push_back(kernel);
    }
  }
  // kAuto's are the same kernels.
  if (!reduced() || kernels.empty()) kernels.push_back(cuda::Kernel::kAuto);
  return kernels;
}

std::vector<cuda::Kernel> kernels_for(std::int64_t m, const WeightView& w) {
  std::vector<cuda::Kernel> kernels = kernels_for({m, w.n, w.k, w.group_size});
  const bool aligned =
      w.bits_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(w.bits + w.bits_offset) % 16 == 0;
  if (!aligned) {
    for (const cuda::Kernel kernel : {cuda::Kernel::kWgmma, cuda::Kernel::kMma}) {
      kernels.erase(std::remove(kernels.begin(), kernels.end(), kernel), kernels.end());
    }
  }
  if (kernels.empty()) kernels.push_back(cuda::Kernel::kAuto);
  return kernels;
}

// ---- Fixtures ----

CurrentDevice::CurrentDevice(int device) : previous_(get()) {
  BINARY_GEMM_CHECK_CUDA(cudaSetDevice(device));
}

CurrentDevice::~CurrentDevice() { cudaSetDevice(previous_); }

int CurrentDevice::get() {
  int device = -1;
  BINARY_GEMM_CHECK_CUDA(cudaGetDevice(&device));
  return device;
}

FullMemory::FullMemory() {
  constexpr std::size_t kSmallest = 4096;
  for (std::size_t bytes = std::size_t{1} << 36; bytes >= kSmallest; bytes /= 2) {
    void* block = nullptr;
    while (cudaMalloc(&block, bytes) == cudaSuccess) blocks_.push_back(block);
  }
  cudaGetLastError();
}

FullMemory::~FullMemory() {
  for (void* block : blocks_) cudaFree(block);
}

int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  BINARY_GEMM_CHECK_CUDA(cudaDeviceGetAttribute(&value, attribute, CurrentDevice::get()));
  return value;
}

std::size_t free_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  BINARY_GEMM_CHECK_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

std::string no_device(int wanted) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(code);
  }
  if (count < wanted) {
    return count == 0 ? "there is none"
                      : std::to_string(wanted) + " are needed, " + std::to_string(count) + " found";
  }
  for (int device = 0; device < wanted; ++device) {
    int major = 0;
    BINARY_GEMM_CHECK_CUDA(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major < 8) return "compute capability below 8.0";
  }
  return "";
}

int required_devices() {
  if (!flag("BINARY_GEMM_REQUIRE_GPU")) return 0;
  return std::max(1, std::atoi(std::getenv("BINARY_GEMM_REQUIRE_GPU")));
}

void DeviceTest::SetUp() {
  const std::string reason = no_device(devices_);
  if (!reason.empty()) {
    if (devices_ <= required_devices()) {
      FAIL() << "BINARY_GEMM_REQUIRE_GPU asks for " << required_devices()
             << ", but no GPU can be used: " << reason;
    }
    // ctest looks for these words. A program that runs on one GPU has not been skipped if a test of
    // it needs two.
    if (!no_device().empty()) GTEST_SKIP() << "no usable GPU: " << reason;
    GTEST_SKIP() << "not enough GPUs: " << reason;
  }
  stream_.emplace();
}

void DeviceTest::TearDown() {
  if (!stream_) return;
  synchronize();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

void ModeTest::SetUp() {
  DeviceTest::SetUp();
  if (!IsSkipped() && !HasFatalFailure())
    scratch_.emplace(kScratchX + std::size_t{kernels::kHandOverBytes}, stream());
}

void ModeTest::TearDown() {
  if (scratch_) {
    EXPECT_TRUE(scratch_->guards_intact());
    scratch_.reset();
  }
  DeviceTest::TearDown();
}

}  // namespace testing
}  // namespace binary_gemm
