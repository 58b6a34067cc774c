/// binary_gemm_engine: a small decode loop on the library, as an inference engine would have it.
///
/// Random weights in the shape of a transformer. Each token goes through all layers in one CUDA
/// graph with programmatic dependent launch; the most likely next token is the next input. The same
/// loop by the CPU's names must give the same logits, bit for bit. step.h is the model; this is
/// what lies around it: memory, the capture, the loop, the check.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends.h"
#include "binary_gemm/binary_gemm.h"
#include "step.h"

#ifdef ENGINE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

using namespace engine;
using binary_gemm::aligned_vector;
using binary_gemm::bfloat16;
using binary_gemm::float16;
using binary_gemm::matrix_view;

constexpr char kUsage[] =
    R"(usage: binary_gemm_engine [OPTIONS]

A decode loop of transformer-shaped layers with random 1-bit weights, in one CUDA graph; checked
against the same loop on the CPU. Attention itself is left out: part of QKV's output stands for it.

  --layers N   layers (default 4)
  --hidden N   width of the residual stream (default 1024)
  --qkv N      rows of the fused QKV weight, at least the width (default 1536)
  --ffn N      width of the MLP (default 2816)
  --vocab N    rows of the LM head (default 4096)
  --batch N    sequences that are decoded at once (default 1)
  --tokens N   tokens of each (default 8)
  --device D   gpu, cpu, or auto: a GPU if there is one (default auto)
  --no-check   do not run the loop on the CPU besides
  --help       this text

Widths are multiples of 128. A model of 27 billion weights: --layers 64 --hidden 5120 --qkv 8192
--ffn 17408 --vocab 248320 --no-check. The exit status is 0 if all is well, 1 if the logits differ or
a call fails, 2 for bad arguments, 77 if there is no GPU and one was asked for.
)";

constexpr int kNoGpu = 77;
constexpr std::int64_t kGroup = 128;

struct Options {
  Sizes sizes = {4, 1024, 1536, 2816, 4096};
  std::int64_t batch = 1;
  std::int64_t tokens = 8;
  std::string device = "auto";
  bool check = true;
};

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Options parse(int argc, char** argv) {
  Options options;
  Sizes& sizes = options.sizes;
  const std::pair<const char*, std::int64_t*> numbers[] = {
      {"--layers", &sizes.layers},  {"--hidden", &sizes.hidden}, {"--qkv", &sizes.qkv},
      {"--ffn", &sizes.ffn},        {"--vocab", &sizes.vocab},   {"--batch", &options.batch},
      {"--tokens", &options.tokens}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--no-check") {
      options.check = false;
      continue;
    }
    if (i + 1 == argc) throw UsageError(flag + ": no such option, or its value is missing");
    const std::string value = argv[++i];
    if (flag == "--device") {
      if (value != "auto" && value != "cpu" && value != "gpu") {
        throw UsageError("--device is auto, cpu or gpu, not " + value);
      }
      options.device = value;
      continue;
    }
    const auto* number = std::find_if(std::begin(numbers), std::end(numbers),
                                      [&](const auto& entry) { return flag == entry.first; });
    if (number == std::end(numbers)) throw UsageError("there is no option " + flag);
    char* end = nullptr;
    *number->second = std::strtoll(value.c_str(), &end, 10);
    if (*end != '\0' || *number->second < 1) throw UsageError(flag + " takes a number above 0");
  }
  for (const std::int64_t width : {sizes.hidden, sizes.ffn}) {
    if (width % kGroup != 0) {
      throw UsageError("a width of " + std::to_string(width) + " is no multiple of 128");
    }
  }
  if (sizes.qkv < sizes.hidden) throw UsageError("--qkv must be at least --hidden");
  return options;
}

// ---- The model
// -----------------------------------------------------------------------------------

// Owns what it allocates.
class HostMemory {
 public:
  template <class T>
  T* allocate(std::int64_t count) {
    blocks_.emplace_back(static_cast<std::size_t>(count) * sizeof(T));
    return reinterpret_cast<T*>(blocks_.back().data());
  }

 private:
  std::vector<aligned_vector<unsigned char>> blocks_;
};

class Random {  // splitmix64
 public:
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  /// From -1 to 1.
  float uniform() { return static_cast<float>(static_cast<std::int32_t>(bits() >> 32)) * 0x1p-31f; }

 private:
  std::uint64_t state_ = 1;
};

WeightView random_weight(HostMemory& memory, Random& random, std::int64_t n, std::int64_t k) {
  auto* bits = memory.allocate<std::uint32_t>(n * k / 32);
  auto* scales = memory.allocate<float16>(n * k / kGroup);
  for (std::int64_t i = 0; i < n * k / 32; ++i) bits[i] = static_cast<std::uint32_t>(random.bits());
  // So that a product of values of size 1 has values of about that size.
  const float size = 1.0f / std::sqrt(static_cast<float>(k));
  for (std::int64_t i = 0; i < n * k / kGroup; ++i) {
    scales[i] = binary_gemm::to_float16(size * (1 + 0.5f * random.uniform()));
  }
  return binary_gemm::weight_view(bits, scales, n, k, kGroup);
}

MatrixView random_matrix(HostMemory& memory, Random& random, std::int64_t rows, std::int64_t cols,
                         float middle) {
  auto* data = memory.allocate<bfloat16>(rows * cols);
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    data[i] = binary_gemm::to_bfloat16(middle + random.uniform());
  }
  return matrix_view(data, rows, cols);
}

struct WholeModel {
  Model model;
  ConstMatrixView embedding;  // [vocab, hidden], bf16
};

WholeModel random_model(HostMemory& memory, const Sizes& s) {
  Random random;
  WholeModel whole;
  for (std::int64_t i = 0; i < s.layers; ++i) {
    Layer layer;
    layer.attention_gain = random_matrix(memory, random, 1, s.hidden, 1);
    layer.qkv = random_weight(memory, random, s.qkv, s.hidden);
    layer.out = random_weight(memory, random, s.hidden, s.hidden);
    layer.mlp_gain = random_matrix(memory, random, 1, s.hidden, 1);
    layer.gate_up = random_weight(memory, random, 2 * s.ffn, s.hidden);
    layer.down = random_weight(memory, random, s.hidden, s.ffn);
    whole.model.layers.push_back(layer);
  }
  whole.model.final_gain = random_matrix(memory, random, 1, s.hidden, 1);
  whole.model.head = random_weight(memory, random, s.vocab, s.hidden);
  whole.embedding = random_matrix(memory, random, s.vocab, s.hidden, 0);
  return whole;
}

template <class Memory>
State allocate_state(Memory& memory, const Sizes& s, std::int64_t m) {
  const auto matrix = [&](std::int64_t cols) {
    return matrix_view(memory.template allocate<bfloat16>(m * cols), m, cols);
  };
  const auto quantized = [&](std::int64_t k) {
    return binary_gemm::activation_view(memory.template allocate<std::int8_t>(m * k),
                                        memory.template allocate<float>(m), m, k);
  };
  return {matrix(s.hidden), matrix(s.qkv),       matrix(2 * s.ffn),
          matrix(s.vocab),  quantized(s.hidden), quantized(s.ffn)};
}

// ---- The loop
// ------------------------------------------------------------------------------------

using Logits = std::vector<bfloat16>;  // [batch, vocab]

// The logits of every step. `step(tokens, logits)` embeds the tokens of the batch and runs the
// model.
template <class Step>
std::vector<Logits> decode(const Options& options, const Step& step) {
  const auto vocab = static_cast<std::size_t>(options.sizes.vocab);
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(options.batch));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int64_t>(i % vocab);
  }
  std::vector<Logits> all;
  for (std::int64_t t = 0; t < options.tokens; ++t) {
    all.emplace_back(tokens.size() * vocab);
    step(tokens, all.back());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto row = all.back().begin() + static_cast<std::ptrdiff_t>(i * vocab);
      const auto likeliest = std::max_element(
          row, row + static_cast<std::ptrdiff_t>(vocab), [](const bfloat16& a, const bfloat16& b) {
            return binary_gemm::to_float(a) < binary_gemm::to_float(b);
          });
      tokens[i] = likeliest - row;
    }
  }
  return all;
}

std::vector<Logits> decode_on_cpu(const WholeModel& whole, const Options& options) {
  HostMemory memory;
  const State state = allocate_state(memory, options.sizes, options.batch);
  const auto* embedding = static_cast<const bfloat16*>(whole.embedding.data);
  const std::int64_t hidden = options.sizes.hidden;
  const auto begin = std::chrono::steady_clock::now();
  auto all = decode(options, [&](const std::vector<std::int64_t>& tokens, Logits& logits) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::copy_n(embedding + tokens[i] * hidden, hidden,
                  static_cast<bfloat16*>(state.x.data) + static_cast<std::int64_t>(i) * hidden);
    }
    decode_step(Cpu{}, whole.model, state);
    std::copy_n(static_cast<const bfloat16*>(state.logits.data), logits.size(), logits.data());
  });
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  std::printf("cpu: %.2f ms a step\n", time.count() / static_cast<double>(options.tokens));
  return all;
}

#ifdef ENGINE_CUDA

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}
#define CHECK_CUDA(call) check((call), #call)

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* block : blocks_) cudaFree(block);
  }

  template <class T>
  T* allocate(std::int64_t count) {
    void* block = nullptr;
    CHECK_CUDA(cudaMalloc(&block, static_cast<std::size_t>(count) * sizeof(T)));
    blocks_.push_back(block);
    return static_cast<T*>(block);
  }
  template <class T>
  T* copy(const T* host, std::int64_t count) {
    T* device = allocate<T>(count);
    CHECK_CUDA(cudaMemcpy(device, host, static_cast<std::size_t>(count) * sizeof(T),
                          cudaMemcpyHostToDevice));
    return device;
  }
  WeightView copy(const WeightView& w) {
    return binary_gemm::weight_view<const std::uint32_t, const float16>(
        copy(w.bits, w.n * w.bits_stride), copy(w.scales, w.n * w.scales_stride), w.n, w.k,
        w.group_size);
  }
  ConstMatrixView copy(const ConstMatrixView& matrix) {
    ConstMatrixView device = matrix;
    device.data = copy(static_cast<const bfloat16*>(matrix.data), matrix.rows * matrix.row_stride);
    return device;
  }
  WholeModel copy(const WholeModel& whole) {
    WholeModel device;
    for (const Layer& layer : whole.model.layers) {
      device.model.layers.push_back({copy(layer.attention_gain), copy(layer.qkv), copy(layer.out),
                                     copy(layer.mlp_gain), copy(layer.gate_up), copy(layer.down)});
    }
    device.model.final_gain = copy(whole.model.final_gain);
    device.model.head = copy(whole.model.head);
    device.embedding = copy(whole.embedding);
    return device;
  }

 private:
  std::vector<void*> blocks_;
};

// A step as a graph. Every call is an ordinary launch that neither allocates nor waits, so nothing
// but the capture is special; prepare has loaded the kernels before it.
class StepGraph {
 public:
  StepGraph(const Model& model, const State& state, const binary_gemm::cuda::Workspace& workspace,
            cudaStream_t stream) {
    binary_gemm::cuda::prepare();
    Cuda backend;
    backend.launch.stream = stream;
    backend.launch.workspace = workspace;
    backend.launch.programmatic = true;  // the next kernel fetches its weights while one ends
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      decode_step(backend, model, state);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    CHECK_CUDA(status);
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  ~StepGraph() { cudaGraphExecDestroy(graph_); }

  void replay(cudaStream_t stream) const { CHECK_CUDA(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

std::int64_t weight_bytes(const Model& model) {
  const auto bytes = [](const WeightView& w) {
    return w.n * w.k / 8 + w.n * w.k / w.group_size * 2;
  };
  std::int64_t sum = bytes(model.head);
  for (const Layer& layer : model.layers) {
    sum += bytes(layer.qkv) + bytes(layer.out) + bytes(layer.gate_up) + bytes(layer.down);
  }
  return sum;
}

std::vector<Logits> decode_on_gpu(const WholeModel& host, const Options& options) {
  DeviceMemory memory;
  const Sizes& sizes = options.sizes;
  const WholeModel whole = memory.copy(host);
  const State state = allocate_state(memory, sizes, options.batch);
  const std::size_t bytes = step_workspace_bytes(sizes, options.batch);
  const binary_gemm::cuda::Workspace workspace = {
      memory.allocate<char>(static_cast<std::int64_t>(bytes)), bytes};
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const StepGraph graph(whole.model, state, workspace, stream);

  const auto* embedding = static_cast<const bfloat16*>(whole.embedding.data);
  const auto row_bytes = static_cast<std::size_t>(sizes.hidden) * sizeof(bfloat16);
  auto all = decode(options, [&](const std::vector<std::int64_t>& tokens, Logits& logits) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      CHECK_CUDA(cudaMemcpyAsync(static_cast<char*>(state.x.data) + i * row_bytes,
                                 embedding + tokens[i] * sizes.hidden, row_bytes,
                                 cudaMemcpyDeviceToDevice, stream));
    }
    graph.replay(stream);
    CHECK_CUDA(cudaMemcpyAsync(logits.data(), state.logits.data, logits.size() * sizeof(bfloat16),
                               cudaMemcpyDeviceToHost, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
  });

  // The speed of steps one after the other; the last token again and again will do for that.
  constexpr int kReplays = 20;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  CHECK_CUDA(cudaEventRecord(begin, stream));
  for (int i = 0; i < kReplays; ++i) graph.replay(stream);
  CHECK_CUDA(cudaEventRecord(end, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  const double us = 1e3 * static_cast<double>(ms) / kReplays;
  std::printf("gpu: %.1f us a step, %.0f tokens a second, %.0f GB/s of weights\n", us,
              1e6 / us * static_cast<double>(options.batch),
              1e-3 * static_cast<double>(weight_bytes(whole.model)) / us);
  return all;
}

bool gpu_is_there() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  cudaGetLastError();
  return found;
}

#else

std::vector<Logits> decode_on_gpu(const WholeModel&, const Options&) { return {}; }
bool gpu_is_there() { return false; }

#endif

int run(const Options& options) {
  const bool gpu = options.device != "cpu" && gpu_is_there();
  if (!gpu && options.device == "gpu") {
    std::printf("no usable GPU, or built without CUDA\n");
    return kNoGpu;
  }
  HostMemory memory;
  const WholeModel whole = random_model(memory, options.sizes);
  std::vector<Logits> on_gpu;
  std::vector<Logits> on_cpu;
  if (gpu) on_gpu = decode_on_gpu(whole, options);
  if (!gpu || options.check) on_cpu = decode_on_cpu(whole, options);
  for (const Logits& logits : gpu ? on_gpu : on_cpu) {
    for (const bfloat16 logit : logits) {
      if (!std::isfinite(binary_gemm::to_float(logit))) {
        std::printf("a logit is not finite\n");
        return 1;
      }
    }
  }
  if (!gpu || !options.check) return 0;
  for (std::size_t t = 0; t < on_gpu.size(); ++t) {
    const std::size_t bytes = on_gpu[t].size() * sizeof(bfloat16);
    if (std::memcmp(on_gpu[t].data(), on_cpu[t].data(), bytes) != 0) {
      std::printf("the logits of step %zu are not those of the CPU\n", t);
      return 1;
    }
  }
  std::printf("%zu steps: all logits are equal to the CPU's, bit for bit\n", on_gpu.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--help") == 0) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    return run(parse(argc, argv));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "binary_gemm_engine: %s\n\n%s", error.what(), kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "binary_gemm_engine: %s\n", error.what());
    return 1;
  }
}
