#pragma once

/// A token of a 64-layer model, as one graph: the step of examples/engine with distinct weights.
///
/// Implementations: `engine` and `engine_pdl`, the whole step with its norms, SwiGLU and residuals;
/// `engine_pdl:split_norm`, `:split_swiglu`, `:split_residual`, the same without a fused step;
/// `binary_gemm_pdl`, its products alone, of quantized activations that are there already;
/// `cublas_bf16`, the same products dense; `read_floor`, a kernel a product that reads as many
/// bytes; `read_rate`, one kernel that reads them all.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends.h"
#include "binary_gemm/aligned_vector.h"
#include "cases.cuh"
#include "split_steps.cuh"
#include "step.h"
#include "support.cuh"

namespace bench {

inline constexpr engine::Sizes kChainSizes = {64, 5120, 8192, 17408, 248320};

struct ChainShape {
  std::int64_t n;
  std::int64_t k;
};
/// The products of a layer, in order.
inline constexpr ChainShape kChainLayer[] = {
    {kChainSizes.qkv, kChainSizes.hidden},
    {kChainSizes.hidden, kChainSizes.hidden},
    {2 * kChainSizes.ffn, kChainSizes.hidden},
    {kChainSizes.hidden, kChainSizes.ffn},
};
inline constexpr ChainShape kChainHead = {kChainSizes.vocab, kChainSizes.hidden};

/// Weights, activations and launches of the chain.
class Chain {
 public:
  Chain(std::int64_t g, std::int64_t max_m) : g_(g), max_m_(max_m) {
    for (std::int64_t i = 0; i < kChainSizes.layers; ++i) {
      shapes_.insert(shapes_.end(), std::begin(kChainLayer), std::end(kChainLayer));
    }
    shapes_.push_back(kChainHead);
    std::int64_t weights = 0;
    for (const ChainShape& shape : shapes_) weights += shape.n * shape.k;
    bytes_ = weights / 8 + weights / g * 2;
    pool_ = Buffer(bytes_);  // all bits, then all scales
    fill<RandomBits>(pool_.as<std::uint64_t>(), weights / 64, 11);
    fill<RandomWeightScale>(pool_.as<std::uint16_t>(weights / 8), weights / g, 12);
    std::int64_t begin = 0;
    for (const ChainShape& shape : shapes_) {
      weights_.push_back(binary_gemm::weight_view(
          pool_.as<const std::uint32_t>(begin / 8),
          pool_.as<const float16>(weights / 8 + begin / g * 2), shape.n, shape.k, g));
      begin += shape.n * shape.k;
    }

    const std::int64_t hidden = kChainSizes.hidden;
    const std::int64_t norms = 2 * kChainSizes.layers + 1;
    gains_ = random_buffer<RandomBFloat16>(norms * hidden, 13);
    const auto gain = [&](std::int64_t index) -> binary_gemm::ConstMatrixView {
      return binary_gemm::matrix_view(gains_.as<const bfloat16>(index * hidden * 2), 1, hidden);
    };
    for (std::int64_t i = 0; i < kChainSizes.layers; ++i) {
      const auto* w = &weights_[static_cast<std::size_t>(4 * i)];
      model_.layers.push_back({gain(2 * i), w[0], w[1], gain(2 * i + 1), w[2], w[3]});
    }
    model_.final_gain = gain(norms - 1);
    model_.head = weights_.back();

    start_ = random_buffer<RandomBFloat16>(max_m * hidden, 14);
    x_ = Buffer(max_m * hidden * 2);
    qkv_ = Buffer(max_m * kChainSizes.qkv * 2);
    gate_up_ = Buffer(max_m * 2 * kChainSizes.ffn * 2);
    logits_ = Buffer(max_m * kChainSizes.vocab * 2);
    q_ = random_buffer<RandomInt8>(max_m * hidden, 15);
    q_ffn_ = random_buffer<RandomInt8>(max_m * kChainSizes.ffn, 16);
    q_scales_ = random_buffer<RandomTokenScale>(max_m, 17);
    q_ffn_scales_ = random_buffer<RandomTokenScale>(max_m, 18);
    dense_x_ = random_buffer<RandomBFloat16>(max_m * kChainSizes.ffn, 19);
    scratch_ = Buffer(max_m * kChainSizes.ffn * 2);
    workspace_ =
        Buffer(static_cast<std::int64_t>(engine::step_workspace_bytes(kChainSizes, max_m)));
    sink_ = Buffer(16);
    restart();
  }

  std::int64_t g() const { return g_; }
  std::int64_t max_m() const { return max_m_; }

  /// Several where the best of them counts. A launch is a token of each of m sequences.
  std::vector<Case> make_cases(const Impl& impl, std::int64_t m) {
    if (impl.base == "engine" || impl.base == "binary_gemm") {
      return {
          {[this, impl, m](std::int64_t, cudaStream_t stream) { ours(impl, m, stream); }, bytes_}};
    }
    if (impl.base == "cublas_bf16") {
      make_dense();
      std::int64_t weights = 0;
      for (const ChainShape& shape : shapes_) weights += shape.n * shape.k;
      return {{[this, m](std::int64_t, cudaStream_t stream) { cublas(m, stream); }, weights * 2}};
    }
    std::vector<Case> floors;
    for (const ReadFloor& floor : kReadFloors) {
      const bool whole = impl.base == "read_rate";
      floors.push_back(
          {[this, &floor, whole](std::int64_t, cudaStream_t stream) { read(floor, whole, stream); },
           bytes_});
    }
    return floors;
  }

  /// What to say beside the figure, or "".
  std::string label(const Impl& impl) const {
    if (impl.base != "cublas_bf16" || dense_layers_ == kChainSizes.layers) return "";
    return "only " + std::to_string(dense_layers_) + " layers distinct, for want of memory";
  }

  /// Compares results where there are any, and says what is wrong, or "".
  std::string verify(const Impl& impl, std::int64_t m, cudaStream_t stream) {
    if (impl.base != "engine" && impl.base != "binary_gemm") return "";
    if (impl.base == "engine" && impl.split.empty()) {
      const std::string wrong = verify_with_cpu(impl, m, stream);
      if (!wrong.empty()) return wrong;
    }
    // All layers: without dependent launch and graph, then as they are timed.
    Impl plain = impl;
    plain.programmatic = false;
    restart();
    ours(plain, m, stream);
    const std::vector<char> expected = results(m, stream);
    restart();
    in_graph([&] { ours(impl, m, stream); }, stream);
    if (results(m, stream) != expected) return "the graph's results are not those of plain calls";
    return "";
  }

 private:
  // Runs `body` once, by a graph.
  template <class Body>
  static void in_graph(const Body& body, cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    BENCH_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    BENCH_CHECK(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
    const cudaError_t launched = cudaGraphLaunch(exec, stream);
    const cudaError_t done = cudaStreamSynchronize(stream);
    cudaGraphExecDestroy(exec);
    check(launched, "cudaGraphLaunch");
    check(done, "cudaStreamSynchronize");
  }

  engine::State state(std::int64_t m) const {
    const auto matrix = [m](const Buffer& buffer, std::int64_t cols) {
      return binary_gemm::matrix_view(buffer.as<bfloat16>(), m, cols);
    };
    return {matrix(x_, kChainSizes.hidden),
            matrix(qkv_, kChainSizes.qkv),
            matrix(gate_up_, 2 * kChainSizes.ffn),
            matrix(logits_, kChainSizes.vocab),
            binary_gemm::activation_view(q_.as<std::int8_t>(), q_scales_.as<float>(), m,
                                         kChainSizes.hidden),
            binary_gemm::activation_view(q_ffn_.as<std::int8_t>(), q_ffn_scales_.as<float>(), m,
                                         kChainSizes.ffn)};
  }

  // The residual stream of a first token; steps go on from what the one before left.
  void restart() const {
    BENCH_CHECK(cudaMemcpy(x_.as<void>(), start_.as<void>(), static_cast<std::size_t>(x_.bytes()),
                           cudaMemcpyDeviceToDevice));
    BENCH_CHECK(cudaDeviceSynchronize());
  }

  engine::Cuda make_backend(const Impl& impl, cudaStream_t stream) const {
    engine::Cuda backend;
    backend.launch.stream = stream;
    backend.launch.programmatic = impl.programmatic;
    backend.launch.workspace = {workspace_.as<void>(),
                                static_cast<std::size_t>(workspace_.bytes())};
    return backend;
  }

  void ours(const Impl& impl, std::int64_t m, cudaStream_t stream) const {
    const engine::Cuda backend = make_backend(impl, stream);
    const engine::State s = state(m);
    if (!impl.split.empty()) {
      const SplitBackend split{backend, impl.split == "norm", impl.split == "swiglu",
                               impl.split == "residual", scratch_.as<__nv_bfloat16>()};
      return engine::decode_step(split, model_, s);
    }
    if (impl.base == "engine") return engine::decode_step(backend, model_, s);
    for (const engine::Layer& layer : model_.layers) {
      backend.binary_gemm(s.q, layer.qkv, {}, s.qkv);
      backend.binary_gemm(s.q, layer.out, {}, s.x);
      backend.binary_gemm(s.q, layer.gate_up, {}, s.gate_up);
      backend.binary_gemm(s.q_ffn, layer.down, {}, s.x);
    }
    backend.binary_gemm(s.q, model_.head, {}, s.logits);
  }

  void read(const ReadFloor& floor, bool whole, cudaStream_t stream) const {
    std::int64_t begin = 0;
    for (const ChainShape& shape : shapes_) {
      const std::int64_t weights = shape.n * shape.k;
      const std::int64_t bytes = whole ? bytes_ : weights / 8 + weights / g_ * 2;
      launch_read_floor(floor, pool_.as<const void>(begin), bytes, sink_.as<std::uint32_t>(),
                        stream);
      BENCH_CHECK(cudaGetLastError());
      if (whole) break;
      begin += bytes;
    }
  }

  // As many distinct dense layers as there is memory for, with the head behind them.
  void make_dense() {
    if (dense_.bytes() > 0) return;
    constexpr std::int64_t kSpare = std::int64_t{1} << 30;
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    BENCH_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    std::int64_t layer = 0;
    for (const ChainShape& shape : kChainLayer) layer += shape.n * shape.k;
    const std::int64_t head = kChainHead.n * kChainHead.k;
    const std::int64_t room = static_cast<std::int64_t>(free_bytes) - kSpare - 2 * head;
    dense_layers_ = std::min(kChainSizes.layers, room / (2 * layer));
    if (dense_layers_ < 1) throw std::runtime_error("the dense weights do not fit the free memory");
    dense_ = random_buffer<RandomBFloat16>(dense_layers_ * layer + head, 20);
    cublas_ = std::make_unique<Cublas>();
  }

  void cublas(std::int64_t m, cudaStream_t stream) const {
    std::int64_t layer_weights = 0;
    for (const ChainShape& shape : kChainLayer) layer_weights += shape.n * shape.k;
    void* const outputs[] = {qkv_.as<void>(), x_.as<void>(), gate_up_.as<void>(), x_.as<void>()};
    for (std::int64_t i = 0; i < kChainSizes.layers; ++i) {
      std::int64_t begin = i % dense_layers_ * layer_weights;
      for (std::size_t j = 0; j < std::size(kChainLayer); ++j) {
        const ChainShape& shape = kChainLayer[j];
        cublas_->bf16(dense_x_.as<void>(), dense_.as<void>(begin * 2), outputs[j], m, shape.n,
                      shape.k, stream);
        begin += shape.n * shape.k;
      }
    }
    cublas_->bf16(dense_x_.as<void>(), dense_.as<void>(dense_layers_ * layer_weights * 2),
                  logits_.as<void>(), m, kChainHead.n, kChainHead.k, stream);
  }

  // The last layer's outputs and the logits.
  std::vector<char> results(std::int64_t m, cudaStream_t stream) const {
    BENCH_CHECK(cudaStreamSynchronize(stream));
    const engine::State s = state(m);
    std::vector<char> all;
    for (const binary_gemm::MatrixView& matrix : {s.x, s.qkv, s.gate_up, s.logits}) {
      const auto bytes = static_cast<std::size_t>(m * matrix.cols * 2);
      all.resize(all.size() + bytes);
      BENCH_CHECK(
          cudaMemcpy(all.data() + all.size() - bytes, matrix.data, bytes, cudaMemcpyDeviceToHost));
    }
    return all;
  }

  // The step of a model of the first layers and a part of the head, on both sides.
  std::string verify_with_cpu(const Impl& impl, std::int64_t m, cudaStream_t stream) {
    constexpr std::size_t kFirstLayers = 2;
    constexpr std::int64_t kVocab = 1000;
    std::vector<binary_gemm::aligned_vector<unsigned char>> memory;
    const auto download = [&](const void* data, std::int64_t bytes) -> const void* {
      memory.emplace_back(static_cast<std::size_t>(bytes));
      BENCH_CHECK(
          cudaMemcpy(memory.back().data(), data, memory.back().size(), cudaMemcpyDeviceToHost));
      return memory.back().data();
    };
    const auto weight = [&](const binary_gemm::WeightView& w) {
      return binary_gemm::weight_view(
          static_cast<const std::uint32_t*>(download(w.bits, w.n * w.k / 8)),
          static_cast<const float16*>(download(w.scales, w.n * w.k / w.group_size * 2)), w.n, w.k,
          w.group_size);
    };
    const auto gain = [&](binary_gemm::ConstMatrixView view) {
      view.data = download(view.data, view.cols * 2);
      return view;
    };
    const auto matrix = [&](std::int64_t cols) {
      memory.emplace_back(static_cast<std::size_t>(m * cols * 2));
      return binary_gemm::matrix_view(reinterpret_cast<bfloat16*>(memory.back().data()), m, cols);
    };
    const auto quantized = [&](std::int64_t k) {
      memory.emplace_back(static_cast<std::size_t>(m * k));
      auto* values = reinterpret_cast<std::int8_t*>(memory.back().data());
      memory.emplace_back(static_cast<std::size_t>(m * 4));
      return binary_gemm::activation_view(values, reinterpret_cast<float*>(memory.back().data()), m,
                                          k);
    };

    engine::Model device;
    engine::Model host;
    for (std::size_t i = 0; i < kFirstLayers; ++i) {
      const engine::Layer& layer = model_.layers[i];
      device.layers.push_back(layer);
      host.layers.push_back({gain(layer.attention_gain), weight(layer.qkv), weight(layer.out),
                             gain(layer.mlp_gain), weight(layer.gate_up), weight(layer.down)});
    }
    device.final_gain = model_.final_gain;
    device.head = model_.head.row_range(0, kVocab);
    host.final_gain = gain(device.final_gain);
    host.head = weight(device.head);

    engine::State on_device = state(m);
    on_device.logits.cols = kVocab;  // of rows as long as before
    restart();
    in_graph([&] { engine::decode_step(make_backend(impl, stream), device, on_device); }, stream);

    const engine::State on_host = {matrix(kChainSizes.hidden),    matrix(kChainSizes.qkv),
                                   matrix(2 * kChainSizes.ffn),   matrix(kVocab),
                                   quantized(kChainSizes.hidden), quantized(kChainSizes.ffn)};
    BENCH_CHECK(cudaMemcpy(on_host.x.data, start_.as<void>(),
                           static_cast<std::size_t>(m * kChainSizes.hidden * 2),
                           cudaMemcpyDeviceToHost));
    engine::decode_step(engine::Cpu{}, host, on_host);
    std::vector<char> row(static_cast<std::size_t>(kVocab * 2));
    for (std::int64_t i = 0; i < m; ++i) {
      BENCH_CHECK(cudaMemcpy(row.data(), logits_.as<void>(i * kChainSizes.vocab * 2), row.size(),
                             cudaMemcpyDeviceToHost));
      const char* expected = static_cast<const char*>(on_host.logits.data) + i * kVocab * 2;
      if (std::memcmp(row.data(), expected, row.size()) != 0) {
        return "the logits of sequence " + std::to_string(i) + " are not the CPU's";
      }
    }
    return "";
  }

  std::int64_t g_;
  std::int64_t max_m_;
  std::int64_t bytes_ = 0;  // of all weights: bits and scales
  std::int64_t dense_layers_ = 0;
  std::vector<ChainShape> shapes_;
  std::vector<binary_gemm::WeightView> weights_;
  engine::Model model_;
  Buffer pool_, gains_, start_, x_, qkv_, gate_up_, logits_, q_, q_ffn_, q_scales_, q_ffn_scales_,
      dense_, dense_x_, scratch_, workspace_, sink_;
  std::unique_ptr<Cublas> cublas_;
};

}  // namespace bench
