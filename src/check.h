#pragma once

/// The rules that arguments must keep, in one place for the CPU and for CUDA. Each function throws
/// std::invalid_argument with the values and the rule broken; none touches the operands' memory.

#include "binary_gemm/views.h"

namespace binary_gemm {
namespace check {

void weight_shape(std::int64_t n, std::int64_t k, std::int64_t g);
/// What BinaryLinear is made of; checked before it allocates.
void layer(const ConstMatrixView& dense, std::int64_t g, const BiasView& bias);
void layer(const WeightView& w, const BiasView& bias);
void row_range(std::int64_t begin, std::int64_t end, std::int64_t n);
void pack_weights(const ConstMatrixView& dense, const MutableWeightView& w);
void unpack_weights(const WeightView& w, const MatrixView& dense);
void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q);
void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                       const MutableActivationView& q);
void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q);
void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                 const MatrixView& y);
void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y);
/// What binary_linear, or binary_gemm, uses of the caller's workspace: `bytes` from `data` on.
void workspace(const void* data, std::int64_t bytes, const ConstMatrixView& x, const WeightView& w,
               const Epilogue& epilogue, const MatrixView& y);
void workspace(const void* data, std::int64_t bytes, const ActivationView& x, const WeightView& w,
               const Epilogue& epilogue, const MatrixView& y);
void q1_0(const void* blocks, std::size_t blocks_bytes, const WeightView& w);

}  // namespace check
}  // namespace binary_gemm
