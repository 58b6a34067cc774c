#pragma once

/// What is measured: problems, the operands that they share, and each implementation as a launch.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/cuda.h"
#include "binary_gemm/types.h"
#include "binary_gemm/views.h"
#include "cublas.cuh"
#include "dp4a_table.cuh"
#include "read_floor.cuh"
#include "support.cuh"

namespace bench {

using binary_gemm::bfloat16;
using binary_gemm::float16;

struct Layer {
  const char* name;
  std::int64_t n;
  std::int64_t k;
  std::int64_t max_m;  // more tokens than that never reach such a layer, or are measured elsewhere
};

inline constexpr Layer kLayers[] = {
    {"qkv", 8192, 5120, 1 << 20},
    {"out", 5120, 5120, 1 << 20},
    {"gate", 17408, 5120, 1 << 20},
    {"down", 5120, 17408, 1 << 20},
    {"down_5120", 5120, 5120, 16},
    {"gate_2560", 9728, 2560, 2048},  // a last slice of K that is a half
    {"down_9728", 2560, 9728, 2048},
    {"lm_head", 248320, 5120, 512},
    // 64 layers of qkv, out, gate and up, down, and the LM head (chain.cuh): as many weights as
    // this.
    {"chain64", 64 * 65536 + 248320, 5120, 16},
};

struct Problem {
  Layer layer;
  std::int64_t g;
  std::int64_t m;

  bool chain() const { return layer.name == std::string("chain64"); }
  std::int64_t n() const { return layer.n; }
  std::int64_t k() const { return layer.k; }
  std::int64_t weights() const { return layer.n * layer.k; }
  std::int64_t bits_bytes() const { return weights() / 8; }
  std::int64_t scales_bytes() const { return weights() / g * 2; }
  std::int64_t packed_bytes() const { return bits_bytes() + scales_bytes(); }
  /// cuBLASLt's int8 products want multiples of 16.
  std::int64_t padded_m() const { return (m + 15) / 16 * 16; }
};

/// The names of implementations, in the order of the CSV. `binary_gemm` and `binary_linear` may
/// carry a forced kernel, as in `binary_gemm_pdl:decode_s8`. `engine` and `read_rate` are of the
/// chain alone.
inline constexpr const char* kImpls[] = {"engine",
                                         "engine_pdl",
                                         "engine_pdl:split_norm",
                                         "engine_pdl:split_swiglu",
                                         "engine_pdl:split_residual",
                                         "binary_gemm",
                                         "binary_gemm_pdl",
                                         "binary_linear",
                                         "binary_linear_pdl",
                                         "cublas_bf16",
                                         "cublaslt_int8",
                                         "dp4a_table",
                                         "read_floor",
                                         "read_rate"};

struct Impl {
  std::string name;
  std::string base;  // `name` without kernel and `_pdl`
  bool programmatic = false;
  std::string split;  // the fused step that `engine` does without: norm, swiglu or residual
  binary_gemm::cuda::Kernel kernel = binary_gemm::cuda::Kernel::kAuto;

  /// Throws std::invalid_argument for a name that is none.
  static Impl parse(const std::string& name) {
    Impl impl;
    impl.name = name;
    const std::size_t colon = name.find(':');
    impl.base = name.substr(0, colon);
    const bool known =
        std::find(std::begin(kImpls), std::end(kImpls), impl.base) != std::end(kImpls);
    if (!known) throw std::invalid_argument("no implementation is called " + name);
    const std::size_t pdl = impl.base.rfind("_pdl");
    if (pdl != std::string::npos) {
      impl.programmatic = true;
      impl.base.resize(pdl);
    }
    if (colon == std::string::npos) return impl;
    const std::string split_from = ":split_";
    if (impl.base == "engine" && name.compare(colon, split_from.size(), split_from) == 0) {
      impl.split = name.substr(colon + split_from.size());
      if (impl.split == "norm" || impl.split == "swiglu" || impl.split == "residual") return impl;
      throw std::invalid_argument("no fused step is called " + impl.split);
    }
    if (!impl.ours() || impl.base == "engine") {
      throw std::invalid_argument(impl.base + " has no kernels to choose from");
    }
    for (const auto kernel : binary_gemm::cuda::supported_kernels()) {
      if (name.substr(colon + 1) == binary_gemm::cuda::name(kernel)) impl.kernel = kernel;
    }
    if (impl.kernel == binary_gemm::cuda::Kernel::kAuto) {
      throw std::invalid_argument("this device has no kernel called " + name.substr(colon + 1));
    }
    return impl;
  }

  bool ours() const { return base == "binary_gemm" || base == "binary_linear" || base == "engine"; }

  /// Whether a row of the results has this implementation at this size.
  bool takes(const Problem& p) const {
    if (p.m > p.layer.max_m) return false;
    if (p.chain()) {
      const bool sampled = p.m == 1 || p.m == 2 || p.m == 4 || p.m == 8 || p.m == 16;
      if (base == "read_floor" || base == "read_rate" || !split.empty()) return p.m == 1;
      return sampled && (base == "engine" || name == "binary_gemm_pdl" || base == "cublas_bf16");
    }
    if (base == "engine" || base == "read_rate") return false;
    // The floor is of the weights alone, whatever the batch.
    if (base == "read_floor") return p.m == 1;
    // Far behind from a few tokens on, so that a large batch would only cost time.
    if (base == "dp4a_table") return p.m <= 16 || (p.m <= 64 && p.m % 8 == 0);
    if (kernel == binary_gemm::cuda::Kernel::kAuto) return true;
    return binary_gemm::cuda::is_supported(kernel, p.m, p.n(), p.k(), p.g);
  }
};

/// Device memory for all problems of a run, filled as it is first asked for.
///
/// Weights are a pool of random ones, and a layer's copies lie in it one behind the other.
class Operands {
 public:
  /// `problems`: all that will be asked for.
  explicit Operands(const std::vector<Problem>& problems) {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    BENCH_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    const auto free_share = [&](double share) {
      return static_cast<std::int64_t>(share * static_cast<double>(free_bytes)) / 4096 * 4096;
    };
    std::int64_t largest = 0;
    for (const Problem& p : problems) {
      smallest_g_ = std::min(smallest_g_, p.g);
      largest = std::max(largest, p.weights());
      x_count_ = std::max(x_count_, p.padded_m() * p.k());
      y_bytes_ = std::max({y_bytes_, p.m * p.n() * 2, p.padded_m() * p.n() * 4});
      m_ = std::max(m_, p.padded_m());
      workspace_bytes_ =
          std::max(workspace_bytes_, binary_gemm::cuda::linear_workspace_bytes(p.m, p.k()));
    }
    // A gigabyte of bits; dense weights of a gigabyte, or of two of the largest layer.
    pool_weights_ = std::min(std::int64_t{1} << 33, free_share(0.2) * 4);
    dense_weights_ = std::min(std::max(std::int64_t{1} << 29, 2 * largest), free_share(0.2));
    dense_weights_ = dense_weights_ / 16 * 16;
  }

  /// How many copies of the layer's weights there are: 0 where not even one fits.
  std::int64_t packed_copies(const Problem& p) const { return pool_weights_ / p.weights(); }
  std::int64_t dense_copies(const Problem& p) const { return dense_weights_ / p.weights(); }

  binary_gemm::WeightView packed(const Problem& p, std::int64_t index) {
    const std::int64_t copy = index % packed_copies(p);
    return binary_gemm::weight_view(
        packed_pool().as<const std::uint32_t>(copy * p.bits_bytes()),
        packed_pool().as<const float16>(pool_weights_ / 8 + copy * p.scales_bytes()), p.n(), p.k(),
        p.g);
  }

  /// As many bytes as packed weights are, in one piece.
  const void* packed_bytes(const Problem& p, std::int64_t index) {
    return packed_pool().as<const void>(index % packed_copies(p) * p.packed_bytes());
  }

  const void* dense_bf16(const Problem& p, std::int64_t index) {
    return lazy<RandomBFloat16>(dense_bf16_, dense_weights_, 3)
        .template as<const void>(index % dense_copies(p) * p.weights() * 2);
  }

  const std::int8_t* dense_int8(const Problem& p, std::int64_t index) {
    return lazy<RandomInt8>(dense_int8_, dense_weights_, 4)
        .template as<const std::int8_t>(index % dense_copies(p) * p.weights());
  }

  const bfloat16* x_bf16() {
    return lazy<RandomBFloat16>(x_bf16_, x_count_, 5).template as<const bfloat16>();
  }
  const std::int8_t* x_int8() {
    return lazy<RandomInt8>(x_int8_, x_count_, 6).template as<const std::int8_t>();
  }
  const float* x_scales() {
    return lazy<RandomTokenScale>(x_scales_, m_, 7).template as<const float>();
  }

  binary_gemm::ActivationView x_quantized(const Problem& p) {
    return binary_gemm::activation_view(x_int8(), x_scales(), p.m, p.k());
  }

  template <class T>
  T* y() {
    if (y_.bytes() == 0) y_ = Buffer(y_bytes_);
    return y_.as<T>();
  }

  binary_gemm::MatrixView y_view(const Problem& p) {
    return binary_gemm::matrix_view(y<bfloat16>(), p.m, p.n());
  }

  binary_gemm::cuda::Workspace workspace() {
    if (workspace_.bytes() == 0 && workspace_bytes_ > 0) {
      workspace_ = Buffer(static_cast<std::int64_t>(workspace_bytes_));
    }
    return {workspace_.as<void>(), workspace_bytes_};
  }

  std::uint32_t* sink() {
    if (sink_.bytes() == 0) sink_ = Buffer(16);
    return sink_.as<std::uint32_t>();
  }

  Cublas& cublas() {
    if (cublas_ == nullptr) cublas_ = std::make_unique<Cublas>();
    return *cublas_;
  }

 private:
  template <class Random>
  static const Buffer& lazy(Buffer& buffer, std::int64_t count, std::uint64_t seed) {
    if (buffer.bytes() == 0) buffer = random_buffer<Random>(count, seed);
    return buffer;
  }

  // Bits, and behind them scales enough for the smallest group.
  const Buffer& packed_pool() {
    if (packed_pool_.bytes() == 0) {
      const std::int64_t scales = pool_weights_ / smallest_g_;
      packed_pool_ = Buffer(pool_weights_ / 8 + scales * 2);
      fill<RandomBits>(packed_pool_.as<std::uint64_t>(), pool_weights_ / 64, 1);
      fill<RandomWeightScale>(packed_pool_.as<std::uint16_t>(pool_weights_ / 8), scales, 2);
    }
    return packed_pool_;
  }

  std::int64_t smallest_g_ = 256;
  std::int64_t pool_weights_ = 0;
  std::int64_t dense_weights_ = 0;
  std::int64_t x_count_ = 0;
  std::int64_t y_bytes_ = 0;
  std::int64_t m_ = 0;
  std::size_t workspace_bytes_ = 0;
  Buffer packed_pool_, dense_bf16_, dense_int8_, x_bf16_, x_int8_, x_scales_, y_, workspace_, sink_;
  std::unique_ptr<Cublas> cublas_;
};

/// One implementation of one problem.
struct Case {
  LaunchFunction launch;
  std::int64_t weight_bytes = 0;  // what a launch reads of its weights
};

/// Several where the best of them counts.
inline std::vector<Case> make_cases(const Impl& impl, const Problem& p, Operands& operands) {
  const bool dense = impl.base == "cublas_bf16" || impl.base == "cublaslt_int8";
  if ((dense ? operands.dense_copies(p) : operands.packed_copies(p)) == 0) {
    throw std::runtime_error("the weights do not fit this device's free memory");
  }
  if (impl.ours()) {
    binary_gemm::cuda::Launch how;
    how.programmatic = impl.programmatic;
    how.kernel = impl.kernel;
    how.workspace = operands.workspace();
    if (impl.base == "binary_gemm") {
      return {{[&operands, p, how](std::int64_t index, cudaStream_t stream) mutable {
                 how.stream = stream;
                 binary_gemm::cuda::binary_gemm(operands.x_quantized(p), operands.packed(p, index),
                                                {}, operands.y_view(p), how);
               },
               p.packed_bytes()}};
    }
    return {{[&operands, p, how](std::int64_t index, cudaStream_t stream) mutable {
               how.stream = stream;
               binary_gemm::cuda::binary_linear(
                   binary_gemm::matrix_view(operands.x_bf16(), p.m, p.k()),
                   operands.packed(p, index), {}, operands.y_view(p), how);
             },
             p.packed_bytes()}};
  }
  if (impl.base == "cublas_bf16") {
    return {{[&operands, p](std::int64_t index, cudaStream_t stream) {
               operands.cublas().bf16(operands.x_bf16(), operands.dense_bf16(p, index),
                                      operands.y<void>(), p.m, p.n(), p.k(), stream);
             },
             p.weights() * 2}};
  }
  if (impl.base == "cublaslt_int8") {
    const auto product =
        std::make_shared<Cublas::Int8>(operands.cublas(), p.padded_m(), p.n(), p.k());
    return {{[&operands, p, product](std::int64_t index, cudaStream_t stream) {
               (*product)(operands.x_int8(), operands.dense_int8(p, index), operands.y<void>(),
                          stream);
             },
             p.weights()}};
  }
  if (impl.base == "dp4a_table") {
    return {{[&operands, p](std::int64_t index, cudaStream_t stream) {
               const binary_gemm::WeightView w = operands.packed(p, index);
               Dp4aParams params;
               params.bits = w.bits;
               params.scales = reinterpret_cast<const __half*>(w.scales);
               params.x = operands.x_int8();
               params.x_scales = operands.x_scales();
               params.y = operands.y<__nv_bfloat16>();
               params.m = static_cast<int>(p.m);
               params.n = static_cast<int>(p.n());
               params.words = static_cast<int>(p.k() / 32);
               params.group_shift = p.g == 32 ? 0 : p.g == 64 ? 1 : p.g == 128 ? 2 : 3;
               launch_dp4a_table(params, stream);
               BENCH_CHECK(cudaGetLastError());
             },
             p.packed_bytes()}};
  }
  std::vector<Case> floors;
  for (const ReadFloor& floor : kReadFloors) {
    floors.push_back({[&operands, p, &floor](std::int64_t index, cudaStream_t stream) {
                        launch_read_floor(floor, operands.packed_bytes(p, index), p.packed_bytes(),
                                          operands.sink(), stream);
                        BENCH_CHECK(cudaGetLastError());
                      },
                      p.packed_bytes()});
  }
  return floors;
}

}  // namespace bench
