#pragma once

/// What the library's fused steps replace, as an engine without them would have it: RMSNorm, SwiGLU
/// and the residual as kernels of their own, of bf16, with the quantizer behind. For the chain, to
/// measure what each fused step saves. Rounded differently, so the results are others.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "backends.h"
#include "binary_gemm/kernels/ptx.cuh"
#include "support.cuh"

namespace bench {

inline constexpr int kSplitThreads = 512;
inline constexpr int kSplitVector = 8;

struct alignas(16) SplitVector {
  __nv_bfloat16 values[kSplitVector];
};

/// A CTA a row.
__global__ void __launch_bounds__(kSplitThreads)
    split_rms_norm(const __nv_bfloat16* x, const __nv_bfloat16* gain, float epsilon,
                   __nv_bfloat16* y, int k) {
  namespace ptx = binary_gemm::kernels::ptx;
  constexpr int kKept = 2;
  constexpr int kStep = kSplitThreads * kSplitVector;
  __shared__ float sums[kSplitThreads / 32];
  ptx::launch_dependents();
  const auto columns = [&](int i) {
    return static_cast<int>(threadIdx.x) * kSplitVector + i * kStep;
  };
  SplitVector gains[kKept] = {};
  for (int i = 0; i < kKept; ++i) {
    if (columns(i) < k) gains[i] = *reinterpret_cast<const SplitVector*>(gain + columns(i));
  }
  ptx::wait_for_dependencies();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * k;
  SplitVector kept[kKept] = {};
  for (int i = 0; i < kKept; ++i) {
    if (columns(i) < k) kept[i] = *reinterpret_cast<const SplitVector*>(x + row + columns(i));
  }
  float sum = 0;
  for (int i = 0; i < kKept; ++i) {
    for (const __nv_bfloat16 value : kept[i].values) {
      sum += __bfloat162float(value) * __bfloat162float(value);
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = sums[threadIdx.x % (kSplitThreads / 32)];
  for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  const float inverse = rsqrtf(sum / static_cast<float>(k) + epsilon);
  for (int i = 0; i < kKept; ++i) {
    if (columns(i) >= k) continue;
    for (int j = 0; j < kSplitVector; ++j) {
      kept[i].values[j] = __float2bfloat16(__bfloat162float(kept[i].values[j]) * inverse *
                                           __bfloat162float(gains[i].values[j]));
    }
    *reinterpret_cast<SplitVector*>(y + row + columns(i)) = kept[i];
  }
}

/// Grid: (vectors of a row by threads, rows).
__global__ void split_swiglu(const __nv_bfloat16* gate_up, __nv_bfloat16* y, int k) {
  namespace ptx = binary_gemm::kernels::ptx;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kSplitVector;
  if (column >= k) return;
  const __nv_bfloat16* row = gate_up + static_cast<std::int64_t>(blockIdx.y) * 2 * k + column;
  SplitVector gate = *reinterpret_cast<const SplitVector*>(row);
  const SplitVector up = *reinterpret_cast<const SplitVector*>(row + k);
  for (int j = 0; j < kSplitVector; ++j) {
    const float g = __bfloat162float(gate.values[j]);
    gate.values[j] = __float2bfloat16(g / (1 + __expf(-g)) * __bfloat162float(up.values[j]));
  }
  *reinterpret_cast<SplitVector*>(y + static_cast<std::int64_t>(blockIdx.y) * k + column) = gate;
}

/// x += y.
__global__ void split_add(__nv_bfloat16* x, const __nv_bfloat16* y, std::int64_t count) {
  namespace ptx = binary_gemm::kernels::ptx;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const std::int64_t i =
      (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kSplitVector;
  if (i >= count) return;
  SplitVector sum = *reinterpret_cast<const SplitVector*>(x + i);
  const SplitVector other = *reinterpret_cast<const SplitVector*>(y + i);
  for (int j = 0; j < kSplitVector; ++j) {
    sum.values[j] =
        __float2bfloat16(__bfloat162float(sum.values[j]) + __bfloat162float(other.values[j]));
  }
  *reinterpret_cast<SplitVector*>(x + i) = sum;
}

/// For engine::decode_step: the library's calls, but for the steps that are split.
struct SplitBackend {
  engine::Cuda library;
  bool norm, swiglu, residual;  ///< what is split
  __nv_bfloat16* scratch;       ///< dense, bf16: as much as the largest of [m, hidden], [m, ffn]

  void rms_norm_quantize(const engine::ConstMatrixView& x, const engine::ConstMatrixView& gain,
                         float epsilon, const engine::MutableActivationView& q) const {
    if (!norm) return library.rms_norm_quantize(x, gain, epsilon, q);
    launch(split_rms_norm, dim3(static_cast<unsigned>(x.rows)), kSplitThreads, bf16(x.data),
           bf16(gain.data), epsilon, scratch, static_cast<int>(x.cols));
    library.quantize_activation(view(x.rows, x.cols), q);
  }
  void swiglu_quantize(const engine::ConstMatrixView& gate_up,
                       const engine::MutableActivationView& q) const {
    if (!swiglu) return library.swiglu_quantize(gate_up, q);
    constexpr unsigned kThreads = 128;
    launch(split_swiglu, dim3(blocks(q.k, kThreads), static_cast<unsigned>(q.m)), kThreads,
           bf16(gate_up.data), scratch, static_cast<int>(q.k));
    library.quantize_activation(view(q.m, q.k), q);
  }
  void binary_gemm(const engine::ActivationView& x, const engine::WeightView& w,
                   const engine::Epilogue& epilogue, const engine::MatrixView& y) const {
    if (!residual || epilogue.residual.data == nullptr) {
      return library.binary_gemm(x, w, epilogue, y);
    }
    library.binary_gemm(x, w, epilogue.bias, view(y.rows, y.cols));
    add(y);
  }
  void binary_linear(const engine::ConstMatrixView& x, const engine::WeightView& w,
                     const engine::Epilogue& epilogue, const engine::MatrixView& y) const {
    if (!residual || epilogue.residual.data == nullptr) {
      return library.binary_linear(x, w, epilogue, y);
    }
    library.binary_linear(x, w, epilogue.bias, view(y.rows, y.cols));
    add(y);
  }

 private:
  // What is in the scratch to y.
  void add(const engine::MatrixView& y) const {
    constexpr unsigned kThreads = 128;
    launch(split_add, dim3(blocks(y.rows * y.cols, kThreads)), kThreads,
           static_cast<__nv_bfloat16*>(y.data), static_cast<const __nv_bfloat16*>(scratch),
           y.rows * y.cols);
  }
  static const __nv_bfloat16* bf16(const void* data) {
    return static_cast<const __nv_bfloat16*>(data);
  }
  static unsigned blocks(std::int64_t elements, unsigned threads) {
    const std::int64_t each = static_cast<std::int64_t>(threads) * kSplitVector;
    return static_cast<unsigned>((elements + each - 1) / each);
  }
  engine::MatrixView view(std::int64_t rows, std::int64_t cols) const {
    return {scratch, binary_gemm::DataType::kBFloat16, rows, cols, cols, 0};
  }
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 grid, unsigned block,
              Arguments... arguments) const {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(block);
    config.stream = library.launch.stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = library.launch.programmatic ? 1 : 0;
    BENCH_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
  }
};

}  // namespace bench
