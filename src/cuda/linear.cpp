/// BinaryLinear on CUDA: the one place in the library that allocates device memory.

#include <utility>

#include "check.h"
#include "launch.h"

namespace binary_gemm {
namespace cuda {
namespace {

template <class T>
T* allocate(std::int64_t count) {
  if (count == 0) return nullptr;
  void* data = nullptr;
  BINARY_GEMM_CUDA(cudaMalloc(&data, static_cast<std::size_t>(count) * sizeof(T)));
  return static_cast<T*>(data);
}

}  // namespace

BinaryLinear::BinaryLinear(std::int64_t n, std::int64_t k, std::int64_t group_size, bool has_bias)
    : n_(n), k_(k), group_size_(group_size) {
  check::weight_shape(n, k, group_size);
  try {
    bits_ = allocate<std::uint32_t>(n * (k / 32));
    scales_ = allocate<float16>(n * (k / group_size));
    if (has_bias) bias_ = allocate<float>(n);
    const auto zero = [](void* data, std::int64_t bytes) {
      if (data != nullptr) BINARY_GEMM_CUDA(cudaMemset(data, 0, static_cast<std::size_t>(bytes)));
    };
    zero(bits_, n * (k / 32) * 4);
    zero(scales_, n * (k / group_size) * 2);
    zero(bias_, n * 4);
    // The memset may still run when another stream's kernels use the memory.
    BINARY_GEMM_CUDA(cudaStreamSynchronize(nullptr));
  } catch (...) {
    cudaFree(bits_);
    cudaFree(scales_);
    cudaFree(bias_);
    throw;
  }
}

BinaryLinear::BinaryLinear(BinaryLinear&& other) noexcept
    : n_(std::exchange(other.n_, 0)),
      k_(std::exchange(other.k_, 0)),
      group_size_(other.group_size_),
      bits_(std::exchange(other.bits_, nullptr)),
      scales_(std::exchange(other.scales_, nullptr)),
      bias_(std::exchange(other.bias_, nullptr)) {}

BinaryLinear& BinaryLinear::operator=(BinaryLinear&& other) noexcept {
  std::swap(n_, other.n_);
  std::swap(k_, other.k_);
  std::swap(group_size_, other.group_size_);
  std::swap(bits_, other.bits_);
  std::swap(scales_, other.scales_);
  std::swap(bias_, other.bias_);
  return *this;
}

BinaryLinear::~BinaryLinear() {
  cudaFree(bits_);
  cudaFree(scales_);
  cudaFree(bias_);
}

BinaryLinear BinaryLinear::from_dense(const ConstMatrixView& dense, std::int64_t group_size,
                                      const BiasView& bias, const Launch& launch) {
  check::layer(dense, group_size, bias);
  BinaryLinear layer(dense.rows, dense.cols, group_size, bias.data != nullptr);
  pack_weights(dense, layer.weights(), launch);
  layer.copy_bias(bias, launch.stream);
  BINARY_GEMM_CUDA(cudaStreamSynchronize(launch.stream));
  return layer;
}

BinaryLinear BinaryLinear::from_packed(const WeightView& w, const BiasView& bias,
                                       const Launch& launch) {
  check::layer(w, bias);
  BinaryLinear layer(w.n, w.k, w.group_size, bias.data != nullptr);
  const auto copy = [&](void* to, std::int64_t row_bytes, const void* from, std::int64_t stride) {
    if (w.n == 0 || row_bytes == 0) return;
    const auto width = static_cast<std::size_t>(row_bytes);
    BINARY_GEMM_CUDA(cudaMemcpy2DAsync(to, width, from, static_cast<std::size_t>(stride), width,
                                       static_cast<std::size_t>(w.n), cudaMemcpyDefault,
                                       launch.stream));
  };
  copy(layer.bits_, w.k / 32 * 4, w.bits + w.bits_offset, w.bits_stride * 4);
  copy(layer.scales_, w.k / w.group_size * 2, w.scales + w.scales_offset, w.scales_stride * 2);
  layer.copy_bias(bias, launch.stream);
  BINARY_GEMM_CUDA(cudaStreamSynchronize(launch.stream));
  return layer;
}

void BinaryLinear::copy_bias(const BiasView& bias, cudaStream_t stream) {
  if (bias.data == nullptr || n_ == 0) return;
  BINARY_GEMM_CUDA(cudaMemcpyAsync(bias_, bias.data + bias.offset, static_cast<std::size_t>(n_) * 4,
                                   cudaMemcpyDefault, stream));
}

void BinaryLinear::operator()(const ConstMatrixView& x, const MatrixView& y,
                              const Launch& launch) const {
  binary_linear(x, weights(), bias(), y, launch);
}

WeightView BinaryLinear::weights() const {
  return weight_view<const std::uint32_t, const float16>(bits_, scales_, n_, k_, group_size_);
}

MutableWeightView BinaryLinear::weights() {
  return weight_view(bits_, scales_, n_, k_, group_size_);
}

BiasView BinaryLinear::bias() const {
  return bias_ == nullptr ? BiasView{} : BiasView{bias_, n_, 0};
}

}  // namespace cuda
}  // namespace binary_gemm
