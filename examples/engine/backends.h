#pragma once

/// The library's names on the CPU and, if ENGINE_CUDA is defined, on CUDA, for decode_step: each
/// with its last argument filled in.

#include <algorithm>
#include <cstddef>

#include "binary_gemm/cpu.h"
#include "step.h"
#ifdef ENGINE_CUDA
#include "binary_gemm/cuda.h"
#endif

namespace engine {

struct Cpu {
  binary_gemm::cpu::Execution execution = {};

  void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                         const MutableActivationView& q) const {
    binary_gemm::cpu::rms_norm_quantize(x, gain, epsilon, q, execution);
  }
  void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q) const {
    binary_gemm::cpu::swiglu_quantize(gate_up, q, execution);
  }
  void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y) const {
    binary_gemm::cpu::binary_gemm(x, w, epilogue, y, execution);
  }
  void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                     const MatrixView& y) const {
    binary_gemm::cpu::binary_linear(x, w, epilogue, y, execution);
  }
};

#ifdef ENGINE_CUDA
/// Its launch has a workspace of step_workspace_bytes.
struct Cuda {
  binary_gemm::cuda::Launch launch = {};

  void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                         const MutableActivationView& q) const {
    binary_gemm::cuda::rms_norm_quantize(x, gain, epsilon, q, launch);
  }
  void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q) const {
    binary_gemm::cuda::swiglu_quantize(gate_up, q, launch);
  }
  void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q) const {
    binary_gemm::cuda::quantize_activation(x, q, launch);
  }
  void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y) const {
    binary_gemm::cuda::binary_gemm(x, w, epilogue, y, launch);
  }
  void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                     const MatrixView& y) const {
    binary_gemm::cuda::binary_linear(x, w, epilogue, y, launch);
  }
};

/// What the calls of a step of M tokens need or are faster with.
inline std::size_t step_workspace_bytes(const Sizes& sizes, std::int64_t m) {
  return std::max(binary_gemm::cuda::linear_workspace_bytes(m, sizes.hidden),
                  binary_gemm::cuda::gemm_workspace_bytes(m, std::max(sizes.hidden, sizes.ffn)));
}
#endif

}  // namespace engine
