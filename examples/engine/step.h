#pragma once

/// One step of a decode loop, as an engine would write it: once, for the CPU and for CUDA, whose
/// names and arguments are the same.
///
/// What is not here is attention itself: in its place the first `hidden` columns of QKV's output go
/// on. All else is the layer of a transformer: RMSNorm, QKV, attention's output with the residual;
/// RMSNorm, gate and up as one weight, SwiGLU, down with the residual.

#include <cstdint>
#include <vector>

#include "binary_gemm/views.h"

namespace engine {

using binary_gemm::ActivationView;
using binary_gemm::ConstMatrixView;
using binary_gemm::Epilogue;
using binary_gemm::MatrixView;
using binary_gemm::MutableActivationView;
using binary_gemm::WeightView;

inline constexpr float kEpsilon = 1e-6f;  ///< of RMSNorm

struct Sizes {
  std::int64_t layers;
  std::int64_t hidden;
  std::int64_t qkv;  ///< at least `hidden`
  std::int64_t ffn;
  std::int64_t vocab;
};

/// Weights of a layer: views, of host or of device memory.
struct Layer {
  ConstMatrixView attention_gain;  ///< [1, hidden]
  WeightView qkv;                  ///< [qkv, hidden]
  WeightView out;                  ///< [hidden, hidden]
  ConstMatrixView mlp_gain;        ///< [1, hidden]
  WeightView gate_up;              ///< [2 ffn, hidden]: the rows of gate, then those of up
  WeightView down;                 ///< [hidden, ffn]
};

struct Model {
  std::vector<Layer> layers;
  ConstMatrixView final_gain;  ///< [1, hidden]
  WeightView head;             ///< [vocab, hidden]
};

/// What a step of M tokens reads and writes; for M sequences, each with a token of its own.
struct State {
  MatrixView x;                 ///< [M, hidden], the residual stream: from the embedding
  MatrixView qkv;               ///< [M, qkv]
  MatrixView gate_up;           ///< [M, 2 ffn]
  MatrixView logits;            ///< [M, vocab]
  MutableActivationView q;      ///< [M, hidden]
  MutableActivationView q_ffn;  ///< [M, ffn]
};

/// `backend` has the library's names, as those of backends.h do.
template <class Backend>
void decode_step(const Backend& backend, const Model& model, const State& s) {
  for (const Layer& layer : model.layers) {
    // A weight with the rows of Q, K and V is cheapest; one for each would read the same s.q.
    backend.rms_norm_quantize(s.x, layer.attention_gain, kEpsilon, s.q);
    backend.binary_gemm(s.q, layer.qkv, {}, s.qkv);
    const ConstMatrixView heads = s.qkv.column_range(0, s.x.cols);  // attention would be here
    backend.binary_linear(heads, layer.out, {{}, s.x}, s.x);

    backend.rms_norm_quantize(s.x, layer.mlp_gain, kEpsilon, s.q);
    backend.binary_gemm(s.q, layer.gate_up, {}, s.gate_up);
    backend.swiglu_quantize(s.gate_up, s.q_ffn);
    backend.binary_gemm(s.q_ffn, layer.down, {{}, s.x}, s.x);
  }
  backend.rms_norm_quantize(s.x, model.final_gain, kEpsilon, s.q);
  backend.binary_gemm(s.q, model.head, {}, s.logits);
}

}  // namespace engine
