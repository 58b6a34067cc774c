#pragma once

/// @file
/// The names of cpu.h on CUDA: in the same argument order, on device memory, with a Launch at the
/// end. Layer 6 of binary_gemm.h. Bits are equal to the CPU's.
///
/// Calls are asynchronous on the stream. They check their arguments first, throwing
/// std::invalid_argument before anything is launched, and throw CudaError where CUDA fails. They
/// allocate nothing, synchronize nothing, and may be captured in a graph (call prepare first). They
/// run on the device that holds what they write, where all operands must be; the current device is
/// left as it was. M = 0 or N = 0 does nothing. M, N, K and the strides of weights must be below
/// 2^31.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "binary_gemm/views.h"

namespace binary_gemm {
/// The six names on CUDA: cuda.h.
namespace cuda {

/// A CUDA call failed.
class CudaError : public std::runtime_error {
 public:
  /// `call` is the call as written; what() has it, and CUDA's name and text for the code.
  CudaError(cudaError_t code, const std::string& call);
  /// What CUDA returned.
  cudaError_t code() const { return code_; }

 private:
  cudaError_t code_;
};

/// A kernel family of the product. All give the same bits; kAuto takes the tuning table's choice.
enum class Kernel : std::uint8_t {
  kAuto,
  kDecodeB1,  ///< binary tensor core, M up to 4 (3 with G = 64, 1 with 32); sm_80 to sm_90
  kDecodeS8,  ///< int8 tensor core with weights expanded in registers
  kMma,       ///< the same for larger M
  kWgmma,     ///< the same by warpgroups; sm_90a
};

/// "auto", "decode_b1", "decode_s8", "mma" or "wgmma".
const char* name(Kernel kernel);

/// Device memory that a call may use, 16-byte aligned. binary_linear needs linear_workspace_bytes;
/// binary_gemm is faster with gemm_workspace_bytes, from M = 17 on, and from 6 on where K >= 8192.
struct Workspace {
  void* data = nullptr;   ///< On the device of the call; overlaps no operand.
  std::size_t bytes = 0;  ///< What it holds; more than a call needs is no harm.
};

/// How a call is launched.
struct Launch {
  cudaStream_t stream = nullptr;  ///< Of the device of the call; null: its default stream.
  Workspace workspace = {};       ///< In use until the call has finished on the stream.
  /// Programmatic dependent launch: the kernels may start before those ahead of them in the stream
  /// have finished, and then read weights, their scales, the gain of rms_norm_quantize and nothing
  /// else until these have. So after weights have been written in the stream, by pack_weights too,
  /// the next call must not be programmatic. No effect below compute capability 9.0.
  bool programmatic = false;
  /// Forces a kernel, for tests and tuning; std::invalid_argument where it can't run.
  Kernel kernel = Kernel::kAuto;
};

/// Loads the kernels on a device (-1: the current one) and sets what they need. Calls do it on
/// first use; only before a capture it must have been done. Throws std::invalid_argument for a
/// device of compute capability below 8.0, and CudaError where the kernels can't be loaded, after
/// which it may be tried again. Each device is prepared on its own. Thread-safe.
void prepare(int device = -1);

/// The kernels that `device` can run with this build, for forcing them one after the other.
std::vector<Kernel> supported_kernels(int device = -1);

/// Whether `kernel` takes a product of this shape. Throws std::invalid_argument for one that no
/// call takes.
bool is_supported(Kernel kernel, std::int64_t m, std::int64_t n, std::int64_t k,
                  std::int64_t group_size, int device = -1);

/// The kernel that kAuto takes, for printing.
Kernel choose_kernel(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t group_size,
                     int device = -1);

/// The workspace with which binary_gemm is fastest for an `[m, k]` activation: the activation again
/// with up to 175 rows more, no more than twice, and from M = 65 on 9.0 MiB. Less is no error, but
/// slower. Throws std::invalid_argument where `m` or `k` is negative or above 2^31 - 1.
std::size_t gemm_workspace_bytes(std::int64_t m, std::int64_t k);

/// The same for an `[m, k]` input of binary_linear, which needs it: so many rows of int8, a float
/// for each of M, and from M = 65 on 9.0 MiB.
std::size_t linear_workspace_bytes(std::int64_t m, std::int64_t k);

/// Packs `dense` `[n, k]` as cpu::pack_weights does. Simple rather than fast.
void pack_weights(const ConstMatrixView& dense, const MutableWeightView& w,
                  const Launch& launch = {});

/// Unpacks to `dense` `[n, k]` as cpu::unpack_weights does. Simple rather than fast.
void unpack_weights(const WeightView& w, const MatrixView& dense, const Launch& launch = {});

/// Quantizes each row (token) of `x` `[m, k]` of bf16, fp16 or fp32 to int8 and a scale: see
/// reference.h.
void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q,
                         const Launch& launch = {});

/// RMSNorm, then quantize_activation, in one kernel, as cpu::rms_norm_quantize does: x `[m, k]`,
/// gain `[1, k]` or none. A programmatic launch reads the gain before the kernels ahead have
/// finished, as it does weights.
void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                       const MutableActivationView& q, const Launch& launch = {});

/// SwiGLU, then quantize_activation, in one kernel, as cpu::swiglu_quantize does: gate_up `[m,
/// 2k]`, q `[m, k]`.
void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q,
                     const Launch& launch = {});

/// `y[m, n] = sum_k x[m, k] w[n, k]` + bias + residual: see reference.h. x is `[m, k]`, w `[n, k]`,
/// y `[m, n]` of bf16, fp16 or fp32. A BiasView, or {}, will do as epilogue. y must not overlap an
/// input, but may be the residual. Any M: more tokens than a kernel takes are several launches.
void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                 const MatrixView& y, const Launch& launch = {});

/// quantize_activation, then binary_gemm. `x` is `[m, k]` of bf16, fp16 or fp32. Needs
/// linear_workspace_bytes(m, k) of workspace.
void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y, const Launch& launch = {});

/// A linear layer that owns its packed weights on one device. Construction allocates; calls do not.
class BinaryLinear {
 public:
  /// Weights of all -1 with zero scales, and a zero bias if `has_bias`, on the current device.
  /// Throws CudaError with cudaErrorMemoryAllocation if there is no room, and then keeps no memory;
  /// so do from_dense and from_packed.
  BinaryLinear(std::int64_t n, std::int64_t k, std::int64_t group_size = 128,
               bool has_bias = false);
  /// Takes the memory; `other` is left as a layer of n = k = 0.
  BinaryLinear(BinaryLinear&& other) noexcept;
  /// Exchanges the layers.
  BinaryLinear& operator=(BinaryLinear&& other) noexcept;
  BinaryLinear(const BinaryLinear&) = delete;
  BinaryLinear& operator=(const BinaryLinear&) = delete;
  /// Frees the memory; no call that uses it may still run.
  ~BinaryLinear();

  /// Binarizes `dense` `[n, k]`, which is on the current device: see cpu::BinaryLinear::from_dense.
  /// `bias` is copied, from the device or the host. Waits for the stream.
  static BinaryLinear from_dense(const ConstMatrixView& dense, std::int64_t group_size = 128,
                                 const BiasView& bias = {}, const Launch& launch = {});

  /// Copies packed weights from the device or the host. Waits for the stream.
  static BinaryLinear from_packed(const WeightView& w, const BiasView& bias = {},
                                  const Launch& launch = {});

  /// binary_linear with this layer's weights.
  void operator()(const ConstMatrixView& x, const MatrixView& y, const Launch& launch = {}) const;

  /// The layer's weights `[n, k]`, dense, on its device; the view lives as long as the layer.
  WeightView weights() const;
  /// The same, to be written.
  MutableWeightView weights();
  /// The layer's bias `[n]`, or none.
  BiasView bias() const;
  std::int64_t n() const { return n_; }                    ///< Outputs.
  std::int64_t k() const { return k_; }                    ///< Inputs.
  std::int64_t group_size() const { return group_size_; }  ///< Weights a scale.

 private:
  void copy_bias(const BiasView& bias, cudaStream_t stream);

  std::int64_t n_;
  std::int64_t k_;
  std::int64_t group_size_;
  std::uint32_t* bits_ = nullptr;
  float16* scales_ = nullptr;
  float* bias_ = nullptr;
};

}  // namespace cuda
}  // namespace binary_gemm
