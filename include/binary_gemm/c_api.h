#pragma once

/// @file
/// The C ABI: what cpu.h and cuda.h do, for C11 and for anything that calls C. Needs no CUDA
/// header.
///
/// Every function that can fail returns a bg_status, and no exception leaves it. Unless it says
/// otherwise, a wrong argument - among them NULL where a pointer is not said to be optional - is
/// BG_INVALID_ARGUMENT, and then nothing has been written or launched. bg_last_error_message() has
/// the values and the rule that they break.
///
/// Shapes are in elements. x is `[m, k]` (tokens, inputs), w `[n, k]` (outputs, inputs) and y
/// `[m, n]`; the numbers are those of reference.h, on every backend. Bases are 16-byte aligned;
/// offsets and strides may be anything. M = 0 or N = 0 does nothing.
///
/// The bg_cpu_ functions and all without a prefix are in the library binary_gemm_cpu. So are stand-
/// ins of the bg_cuda_ functions, which return BG_NOT_SUPPORTED and say why; the real ones are in
/// binary_gemm_cuda, which a program links before binary_gemm_cpu.

#include <stddef.h>
#include <stdint.h>

#include "binary_gemm/version.h"

// C has no `using`.
// NOLINTBEGIN(modernize-use-using)

#ifdef __cplusplus
extern "C" {
#endif

// ---- Status and version ----

/// How a call ended.
typedef enum bg_status {
  BG_OK = 0,
  BG_INVALID_ARGUMENT = 1,  ///< And nothing was written or launched.
  BG_CUDA_ERROR = 2,        ///< A CUDA call failed; the message names the call and CUDA's error.
  BG_OUT_OF_MEMORY = 3,     ///< On the host or on the device.
  BG_NOT_SUPPORTED = 4,     ///< By this build of the library, or by this machine.
  BG_INTERNAL = 5           ///< A bug in the library.
} bg_status;

/// What the last call on this thread that failed had to say, and "" if none has. It is kept until
/// the next one fails; at most 1023 bytes.
const char* bg_last_error_message(void);

/// The version of the library that runs, where BINARY_GEMM_VERSION_MAJOR and so on are that of this
/// header. Any pointer may be NULL.
void bg_version(int* major, int* minor, int* patch);
/// The same as "major.minor.patch".
const char* bg_version_string(void);

// ---- Where the operands lie ----
//
// The structs mirror views.h. They own nothing and are read during the call only, while the memory
// that they name must outlive the work. struct_size is the struct's sizeof, by which the library
// knows the header that the caller was compiled with: a later version may append fields, and will
// take the shorter struct with their defaults. A struct longer than the library knows is
// BG_NOT_SUPPORTED. Set fields that you do not know to zero: the bg_*_of functions below do.
//
// The base of an operand is not const, as one struct serves operands that are read and ones that
// are written; only those that a function says it writes are written.

/// The type of a matrix's elements.
typedef enum bg_type { BG_FLOAT32 = 0, BG_FLOAT16 = 1, BG_BFLOAT16 = 2, BG_INT8 = 3 } bg_type;

/// A row-major matrix `[rows, cols]`.
typedef struct bg_matrix {
  uint32_t struct_size;  ///< sizeof of the struct.
  int32_t type;          ///< A bg_type.
  void* data;            ///< The base, 16-byte aligned.
  int64_t rows;          ///< Tokens, or outputs of a dense weight.
  int64_t cols;          ///< Elements of a row.
  int64_t row_stride;    ///< Elements from a row to the next, at least `cols`.
  int64_t offset;        ///< Elements from `data` to element (0, 0).
} bg_matrix;

/// 1-bit weights `[n, k]`: bits `[n, k / 32]`, where bit `i` of word `j` is weight `32j + i` and 1
/// means +scale, 0 means -scale; scales `[n, k / group_size]`, the bits of fp16.
typedef struct bg_weights {
  uint32_t struct_size;   ///< sizeof of the struct.
  uint32_t* bits;         ///< The bits' base, 16-byte aligned.
  uint16_t* scales;       ///< The scales' base, 16-byte aligned.
  int64_t n;              ///< Rows: outputs of the layer.
  int64_t k;              ///< Weights of a row, a multiple of group_size.
  int64_t group_size;     ///< Weights per scale: 32, 64, 128 or 256.
  int64_t bits_stride;    ///< Words from a row to the next, at least k / 32.
  int64_t scales_stride;  ///< Scales from a row to the next, at least k / group_size.
  int64_t bits_offset;    ///< Words from `bits` to row 0.
  int64_t scales_offset;  ///< Scales from `scales` to row 0.
} bg_weights;

/// Quantized activations: int8 `[m, k]` and one fp32 scale a token.
typedef struct bg_activation {
  uint32_t struct_size;   ///< sizeof of the struct.
  int8_t* values;         ///< The values' base, 16-byte aligned.
  float* scales;          ///< The scales' base, 16-byte aligned.
  int64_t m;              ///< Rows: tokens.
  int64_t k;              ///< Values of a row.
  int64_t row_stride;     ///< Elements from a row to the next, at least k.
  int64_t offset;         ///< Elements from `values` to element (0, 0).
  int64_t scales_offset;  ///< Elements from `scales` to token 0.
} bg_activation;

/// A bias of n elements. Where a function takes one, NULL (or one whose data is NULL) means none.
typedef struct bg_bias {
  uint32_t struct_size;  ///< sizeof of the struct.
  const float* data;     ///< The base, 16-byte aligned.
  int64_t n;             ///< Elements: rows of the weights.
  int64_t offset;        ///< Elements from `data` to the bias of row 0.
} bg_bias;

/// A dense matrix.
static inline bg_matrix bg_matrix_of(const void* data, bg_type type, int64_t rows, int64_t cols) {
  bg_matrix matrix = {sizeof(bg_matrix), (int32_t)type, (void*)data, rows, cols, cols, 0};
  return matrix;
}

/// Dense weights.
static inline bg_weights bg_weights_of(const uint32_t* bits, const uint16_t* scales, int64_t n,
                                       int64_t k, int64_t group_size) {
  bg_weights weights = {
      sizeof(bg_weights), (uint32_t*)bits, (uint16_t*)scales, n, k, group_size, k / 32, 0, 0, 0};
  weights.scales_stride = group_size > 0 ? k / group_size : 0;
  return weights;
}

/// Dense activations.
static inline bg_activation bg_activation_of(const int8_t* values, const float* scales, int64_t m,
                                             int64_t k) {
  bg_activation activation = {
      sizeof(bg_activation), (int8_t*)values, (float*)scales, m, k, k, 0, 0};
  return activation;
}

/// A bias from its base on.
static inline bg_bias bg_bias_of(const float* data, int64_t n) {
  bg_bias bias = {sizeof(bg_bias), data, n, 0};
  return bias;
}

/// Splits `[w->n, w->k / 128]` of ggml's Q1_0 blocks (18 bytes each, row-major and dense, at any
/// alignment) into w, which is written; its group size must be 128. All on the host.
bg_status bg_import_q1_0(const void* blocks, size_t blocks_bytes, const bg_weights* w);
/// The inverse: writes `w->n * w->k / 128 * 18` bytes to `blocks`, whose size must be that.
bg_status bg_export_q1_0(const bg_weights* w, void* blocks, size_t blocks_bytes);

// ---- Layers that own their weights ----

/// A linear layer with packed weights of its own, on the host or on a CUDA device. Any number of
/// threads may use a layer at once.
typedef struct bg_linear bg_linear;

/// The weights of a layer, in its memory: valid until it is freed, and not to be written. Set
/// w->struct_size before the call; the rest of *w is written.
bg_status bg_linear_weights(const bg_linear* layer, bg_weights* w);
/// The bias of a layer, in the same way. Its data is NULL if there is none.
bg_status bg_linear_bias(const bg_linear* layer, bg_bias* bias);
/// Frees a layer of either kind, which no unfinished work may be using. NULL is fine.
void bg_linear_free(bg_linear* layer);

// ---- On the CPU ----

/// A code path. All give the same bits; BG_PATH_AUTO takes the fastest that this processor has.
typedef enum bg_path {
  BG_PATH_AUTO = 0,
  BG_PATH_PORTABLE = 1,
  BG_PATH_AVX2 = 2,
  BG_PATH_AVX512_VNNI = 3,
  BG_PATH_AMX = 4
} bg_path;

/// How a call runs. Where a function takes one, NULL means the defaults, which are zeros.
typedef struct bg_execution {
  uint32_t struct_size;  ///< sizeof of the struct.
  int32_t threads;       ///< 0: as many as there is work for. 1 in a build without OpenMP.
  int32_t path;          ///< A bg_path.
} bg_execution;

/// The defaults, but for the threads.
static inline bg_execution bg_execution_of(int32_t threads) {
  bg_execution execution = {sizeof(bg_execution), threads, BG_PATH_AUTO};
  return execution;
}

/// BG_OK if weights of this shape can be multiplied by this path (a bg_path) on this machine, with
/// any M; else bg_last_error_message() is the reason.
bg_status bg_cpu_is_supported(int64_t n, int64_t k, int64_t group_size, int32_t path);

/// Packs `dense` `[n, k]` (any type) into w, which is written: the sign of each weight, 1 where it
/// is above 0, and, unless w->scales is NULL, each group's mean |value|.
bg_status bg_cpu_pack_weights(const bg_matrix* dense, const bg_weights* w,
                              const bg_execution* execution);

/// Writes +scale or -scale to `dense` `[n, k]`; or +1 or -1 if w->scales is NULL, the only form
/// that a BG_INT8 matrix takes.
bg_status bg_cpu_unpack_weights(const bg_weights* w, const bg_matrix* dense,
                                const bg_execution* execution);

/// Quantizes each token of x `[m, k]` (not BG_INT8) to int8 and a scale, and writes q.
bg_status bg_cpu_quantize_activation(const bg_matrix* x, const bg_activation* q,
                                     const bg_execution* execution);

/// RMSNorm and the quantizer in one step: each token of x `[m, k]` by `sqrt(mean of its squares +
/// epsilon)`, times gain `[1, k]` unless gain is NULL. Writes q.
bg_status bg_cpu_rms_norm_quantize(const bg_matrix* x, const bg_matrix* gain, float epsilon,
                                   const bg_activation* q, const bg_execution* execution);

/// SwiGLU and the quantizer in one step: `silu(gate) * up`, the first and the last k columns of
/// gate_up `[m, 2k]`. Writes q `[m, k]`.
bg_status bg_cpu_swiglu_quantize(const bg_matrix* gate_up, const bg_activation* q,
                                 const bg_execution* execution);

/// `y[m, n] = sum_k x[m, k] w[n, k]` + bias. Writes y (not BG_INT8), which overlaps no input.
bg_status bg_cpu_binary_gemm(const bg_activation* x, const bg_weights* w, const bg_bias* bias,
                             const bg_matrix* y, const bg_execution* execution);

/// The same + residual `[m, n]` of y's type, or NULL, before the one rounding. It may be y itself.
bg_status bg_cpu_binary_gemm_residual(const bg_activation* x, const bg_weights* w,
                                      const bg_bias* bias, const bg_matrix* residual,
                                      const bg_matrix* y, const bg_execution* execution);

/// The part of bg_cpu_binary_gemm that computes columns `[row_begin, row_end)` of y, which are rows
/// of w, on the calling thread: for callers with threads of their own. Ranges may run concurrently.
bg_status bg_cpu_binary_gemm_rows(const bg_activation* x, const bg_weights* w, const bg_bias* bias,
                                  const bg_matrix* y, int64_t row_begin, int64_t row_end,
                                  int32_t path);

/// bg_cpu_quantize_activation, then bg_cpu_binary_gemm. Takes memory for the quantized x.
bg_status bg_cpu_binary_linear(const bg_matrix* x, const bg_weights* w, const bg_bias* bias,
                               const bg_matrix* y, const bg_execution* execution);

/// Makes a layer of a dense matrix `[n, k]`, as bg_cpu_pack_weights does. The bias is copied.
/// *layer is written, and is NULL after a failure.
bg_status bg_cpu_linear_from_dense(const bg_matrix* dense, int64_t group_size, const bg_bias* bias,
                                   bg_linear** layer);
/// The same of a copy of packed weights.
bg_status bg_cpu_linear_from_packed(const bg_weights* w, const bg_bias* bias, bg_linear** layer);
/// The same of `[n, k / 128]` Q1_0 blocks of ggml: q1_0.h.
bg_status bg_cpu_linear_from_q1_0(const void* blocks, size_t blocks_bytes, int64_t n, int64_t k,
                                  const bg_bias* bias, bg_linear** layer);

/// bg_cpu_binary_linear with the weights and the bias of a layer, which must be on the host.
bg_status bg_cpu_linear_run(const bg_linear* layer, const bg_matrix* x, const bg_matrix* y,
                            const bg_execution* execution);

// ---- On CUDA ----
//
// The same names and arguments, with operands in device memory and a launch at the end. Calls are
// asynchronous on the stream, allocate nothing and synchronize nothing; they may be captured in a
// graph once the device is prepared. The device is the one that holds the operands, and the current
// one stays as it was. M, N, K and the strides of w are at most 2^31 - 1.

/// How a call is launched. Where a function takes one, NULL means the defaults, which are zeros.
typedef struct bg_launch {
  uint32_t struct_size;    ///< sizeof of the struct.
  int32_t programmatic;    ///< Not 0: programmatic dependent launch, see cuda::Launch in cuda.h.
  void* stream;            ///< A cudaStream_t.
  void* workspace;         ///< Device memory, 16-byte aligned.
  size_t workspace_bytes;  ///< What it holds.
} bg_launch;

/// A launch on a stream, with a workspace (or NULL and 0). Not programmatic.
static inline bg_launch bg_launch_of(void* stream, void* workspace, size_t workspace_bytes) {
  bg_launch launch = {sizeof(bg_launch), 0, stream, workspace, workspace_bytes};
  return launch;
}

/// Loads the kernels on a device (-1: the current one). Calls do it on first use; only before a
/// capture it must have been done.
bg_status bg_cuda_prepare(int32_t device);

/// BG_OK if weights of this shape can be multiplied on this device (-1: the current one), with any
/// M; else bg_last_error_message() is the reason. Prepares the device.
bg_status bg_cuda_is_supported(int64_t n, int64_t k, int64_t group_size, int32_t device);

/// Writes an upper bound of the workspace that bg_cuda_binary_linear and bg_cuda_linear_run need
/// for an `[m, k]` input. Needs no GPU.
bg_status bg_cuda_linear_workspace_bytes(int64_t m, int64_t k, size_t* bytes);

/// Writes the workspace with which bg_cuda_binary_gemm is fastest for an `[m, k]` activation. Less
/// is no error, but slower; 0 for small m. Needs no GPU.
bg_status bg_cuda_gemm_workspace_bytes(int64_t m, int64_t k, size_t* bytes);

/// bg_cpu_pack_weights on the device.
bg_status bg_cuda_pack_weights(const bg_matrix* dense, const bg_weights* w,
                               const bg_launch* launch);
/// bg_cpu_unpack_weights on the device.
bg_status bg_cuda_unpack_weights(const bg_weights* w, const bg_matrix* dense,
                                 const bg_launch* launch);
/// bg_cpu_quantize_activation on the device.
bg_status bg_cuda_quantize_activation(const bg_matrix* x, const bg_activation* q,
                                      const bg_launch* launch);
/// bg_cpu_rms_norm_quantize on the device. A programmatic launch reads the gain as weights: early.
bg_status bg_cuda_rms_norm_quantize(const bg_matrix* x, const bg_matrix* gain, float epsilon,
                                    const bg_activation* q, const bg_launch* launch);
/// bg_cpu_swiglu_quantize on the device.
bg_status bg_cuda_swiglu_quantize(const bg_matrix* gate_up, const bg_activation* q,
                                  const bg_launch* launch);
/// bg_cpu_binary_gemm on the device, with the same bits. Needs no workspace.
bg_status bg_cuda_binary_gemm(const bg_activation* x, const bg_weights* w, const bg_bias* bias,
                              const bg_matrix* y, const bg_launch* launch);
/// bg_cpu_binary_gemm_residual on the device.
bg_status bg_cuda_binary_gemm_residual(const bg_activation* x, const bg_weights* w,
                                       const bg_bias* bias, const bg_matrix* residual,
                                       const bg_matrix* y, const bg_launch* launch);
/// bg_cuda_quantize_activation, then bg_cuda_binary_gemm. Needs a workspace.
bg_status bg_cuda_binary_linear(const bg_matrix* x, const bg_weights* w, const bg_bias* bias,
                                const bg_matrix* y, const bg_launch* launch);

/// Makes a layer on the current device, and waits for the stream. The dense matrix is on that
/// device; the bias may be there or on the host.
bg_status bg_cuda_linear_from_dense(const bg_matrix* dense, int64_t group_size, const bg_bias* bias,
                                    const bg_launch* launch, bg_linear** layer);
/// The same of a copy of packed weights, which may be on that device or on the host.
bg_status bg_cuda_linear_from_packed(const bg_weights* w, const bg_bias* bias,
                                     const bg_launch* launch, bg_linear** layer);
/// The same of `[n, k / 128]` Q1_0 blocks on the host.
bg_status bg_cuda_linear_from_q1_0(const void* blocks, size_t blocks_bytes, int64_t n, int64_t k,
                                   const bg_bias* bias, const bg_launch* launch, bg_linear** layer);

/// bg_cuda_binary_linear with the weights and the bias of a layer, which must be on a CUDA device.
bg_status bg_cuda_linear_run(const bg_linear* layer, const bg_matrix* x, const bg_matrix* y,
                             const bg_launch* launch);

#ifdef __cplusplus
}
#endif

// NOLINTEND(modernize-use-using)
