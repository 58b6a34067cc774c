#pragma once

/// @file
/// binary_gemm: matrix products with 1-bit weights and int8 activations.
///
/// The layers, each knowing only those before it, and the types each may touch:
///
/// 1. Storage: version.h, types.h (float16, bfloat16, DataType), errors.h, views.h (MatrixView,
///    WeightView, ActivationView, BiasView, Epilogue), aligned_vector.h. No CUDA needed.
/// 2. Import and contract: q1_0.h (blocks of ggml's Q1_0 <-> WeightView), reference.h (views; the
///    numbers that everything else must reproduce).
/// 3. Kernels: kernels/*.cuh (registers, shared memory, raw pointers; one header per family).
/// 4. Tuning: kernels/tuning.h (architecture, M, N, K, G -> KernelConfig; no pointers).
/// 5. The compiled core in src/: checks, choice, launch (views in, raw pointers out).
/// 6. The six names - pack_weights, unpack_weights, quantize_activation, binary_gemm,
///    binary_linear, BinaryLinear - and the steps that an engine has between two products,
///    rms_norm_quantize and swiglu_quantize, in cpu.h and, where the library was built with CUDA,
///    cuda.h.
/// 7. The same from C: c_api.h (plain structs in, views out).
///
/// This header brings in all of C++ but cuda.h, which needs the CUDA headers.

#include "binary_gemm/aligned_vector.h"
#include "binary_gemm/cpu.h"
#include "binary_gemm/errors.h"
#include "binary_gemm/q1_0.h"
#include "binary_gemm/reference.h"
#include "binary_gemm/types.h"
#include "binary_gemm/version.h"
#include "binary_gemm/views.h"
