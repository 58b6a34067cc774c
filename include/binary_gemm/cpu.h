#pragma once

/// @file
/// The six names on the CPU, and the steps of an engine that end in a quantized activation. Layer 6
/// of binary_gemm.h.
///
/// Every function checks its arguments first and throws std::invalid_argument, with the values and
/// the rule, before anything is written. M = 0 or N = 0 does nothing.

#include <cstdint>
#include <string>
#include <vector>

#include "binary_gemm/aligned_vector.h"
#include "binary_gemm/views.h"

namespace binary_gemm {
/// The six names on the CPU: cpu.h.
namespace cpu {

/// A code path. All give the same bits; kAuto takes the fastest that this processor has.
enum class Path : std::uint8_t {
  kAuto,
  kPortable,
  kAvx2,        ///< AVX2, FMA, F16C.
  kAvx512Vnni,  ///< AVX-512 F, BW, DQ, VL, VNNI and GFNI: Ice Lake, Zen 4 and later.
  kAmx,         ///< The same and AMX-INT8, on Linux: Sapphire Rapids and later.
};

/// "auto", "portable", "avx2", "avx512vnni" or "amx".
const char* name(Path path);

/// Whether this build and this processor can run `path`.
bool is_supported(Path path);

/// The paths that is_supported allows, slowest first; kAuto takes the last.
std::vector<Path> supported_paths();

/// How a call runs.
struct Execution {
  int threads = 0;          ///< 0: OpenMP's default, or fewer for small work. 1 without OpenMP.
  Path path = Path::kAuto;  ///< A path this processor lacks throws std::invalid_argument.
};

/// Packs the signs of `dense` `[n, k]` (any type): 1 where the value is above 0, else 0 (-1). If
/// `w.scales` is not null, each group's scale becomes its mean |value|: summed in order in double,
/// rounded to float, then to fp16.
void pack_weights(const ConstMatrixView& dense, const MutableWeightView& w,
                  const Execution& execution = {});

/// Writes each weight of w `[n, k]` to `dense` `[n, k]`: +scale or -scale, rounded to its type; or
/// +1 or -1 if `w.scales` is null, the only form that an int8 matrix takes.
void unpack_weights(const WeightView& w, const MatrixView& dense, const Execution& execution = {});

/// Quantizes each row (token) of `x` `[m, k]` to int8 and a scale: see reference.h.
void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q,
                         const Execution& execution = {});

/// RMSNorm, then quantize_activation, in one step: each row of `x` `[m, k]` is divided by
/// `sqrt(mean of its squares + epsilon)`, multiplied by `gain` `[1, k]` and quantized without being
/// rounded to a type of x's on the way: see reference.h. x and gain are of bf16, fp16 or fp32; a
/// gain without data is left out. epsilon is finite and not negative.
void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                       const MutableActivationView& q, const Execution& execution = {});

/// SwiGLU, then quantize_activation, in one step: `silu(gate) * up` of each row of `gate_up`
/// `[m, 2k]` of bf16, fp16 or fp32, where gate is its first k columns and up the others: see
/// reference.h. q is `[m, k]`.
void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q,
                     const Execution& execution = {});

/// `y[m, n] = sum_k x[m, k] w[n, k]` + bias + residual: see reference.h. x is `[m, k]`, w `[n, k]`,
/// y `[m, n]` of bf16, fp16 or fp32. A BiasView, or {}, will do as epilogue. y must not overlap an
/// input, but may be the residual.
void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                 const MatrixView& y, const Execution& execution = {});

/// The part of binary_gemm that computes columns `[row_begin, row_end)` of y, which are rows of w,
/// on the calling thread: for callers with threads of their own. Ranges may run concurrently.
void binary_gemm_rows(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                      const MatrixView& y, std::int64_t row_begin, std::int64_t row_end,
                      Path path = Path::kAuto);

/// quantize_activation, then binary_gemm. `x` is `[m, k]` of bf16, fp16 or fp32.
void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y, const Execution& execution = {});

/// A linear layer that owns its packed weights.
class BinaryLinear {
 public:
  /// Weights of all -1 with zero scales, and a zero bias if `has_bias`.
  BinaryLinear(std::int64_t n, std::int64_t k, std::int64_t group_size = 128,
               bool has_bias = false);

  /// Binarizes `dense` `[n, k]`: signs, and each group's mean |value| as its scale. `bias` is
  /// copied.
  static BinaryLinear from_dense(const ConstMatrixView& dense, std::int64_t group_size = 128,
                                 const BiasView& bias = {});

  /// Copies packed weights.
  static BinaryLinear from_packed(const WeightView& w, const BiasView& bias = {});

  /// binary_linear with this layer's weights.
  void operator()(const ConstMatrixView& x, const MatrixView& y,
                  const Execution& execution = {}) const;

  /// The layer's weights `[n, k]`, dense; the view lives as long as the layer.
  WeightView weights() const;
  /// The same, to be written.
  MutableWeightView weights();
  /// The layer's bias `[n]`, or none.
  BiasView bias() const;
  std::int64_t n() const { return n_; }                    ///< Outputs.
  std::int64_t k() const { return k_; }                    ///< Inputs.
  std::int64_t group_size() const { return group_size_; }  ///< Weights a scale.

 private:
  void copy_bias(const BiasView& bias);

  std::int64_t n_;
  std::int64_t k_;
  std::int64_t group_size_;
  aligned_vector<std::uint32_t> bits_;
  aligned_vector<float16> scales_;
  aligned_vector<float> bias_;
};

}  // namespace cpu
}  // namespace binary_gemm
