#pragma once

/// The dense peers: y = x * W^T by cuBLAS in bf16, and by cuBLASLt in int8 with int32 results.
///
/// Both take what the library's own heuristics choose, given a workspace; row-major operands are
/// its column-major ones transposed, so W is `op(A) = A^T` and x is B.

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "support.cuh"

namespace bench {

inline void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + ": " + cublasGetStatusString(status));
}

class Cublas {
 public:
  /// What NVIDIA recommends for Hopper, for its largest.
  static constexpr std::int64_t kWorkspaceBytes = std::int64_t{64} << 20;

  Cublas() : workspace_(kWorkspaceBytes) {
    BENCH_CHECK(cublasCreate(&handle_));
    BENCH_CHECK(cublasLtCreate(&lt_));
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() {
    cublasLtDestroy(lt_);
    cublasDestroy(handle_);
  }

  /// bf16 in and out, fp32 sums.
  void bf16(const void* x, const void* w, void* y, std::int64_t m, std::int64_t n, std::int64_t k,
            cudaStream_t stream) {
    const float one = 1;
    const float zero = 0;
    // Setting the stream resets the workspace to a pool that a capture would have to allocate from.
    BENCH_CHECK(cublasSetStream(handle_, stream));
    BENCH_CHECK(cublasSetWorkspace(handle_, workspace_.as<void>(), kWorkspaceBytes));
    BENCH_CHECK(cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n),
                             static_cast<int>(m), static_cast<int>(k), &one, w, CUDA_R_16BF,
                             static_cast<int>(k), x, CUDA_R_16BF, static_cast<int>(k), &zero, y,
                             CUDA_R_16BF, static_cast<int>(n), CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT));
  }

  /// An int8 product of one shape, with the algorithm chosen; m, n, k multiples of 16.
  class Int8 {
   public:
    Int8(Cublas& cublas, std::int64_t m, std::int64_t n, std::int64_t k) : cublas_(cublas) {
      BENCH_CHECK(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32I, CUDA_R_32I));
      const cublasOperation_t transposed = CUBLAS_OP_T;
      BENCH_CHECK(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                 sizeof transposed));
      const auto rows = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
      BENCH_CHECK(cublasLtMatrixLayoutCreate(&w_, CUDA_R_8I, rows(k), rows(n), k));
      BENCH_CHECK(cublasLtMatrixLayoutCreate(&x_, CUDA_R_8I, rows(k), rows(m), k));
      BENCH_CHECK(cublasLtMatrixLayoutCreate(&y_, CUDA_R_32I, rows(n), rows(m), n));
      cublasLtMatmulPreference_t preference = nullptr;
      BENCH_CHECK(cublasLtMatmulPreferenceCreate(&preference));
      const std::size_t bytes = kWorkspaceBytes;
      cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
          preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
      int found = 0;
      if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulAlgoGetHeuristic(cublas.lt_, product_, w_, x_, y_, y_, preference, 1,
                                                &choice_, &found);
      }
      cublasLtMatmulPreferenceDestroy(preference);
      check(status, "cublasLtMatmulAlgoGetHeuristic");
      if (found == 0) throw std::runtime_error("cuBLASLt has no int8 algorithm for this shape");
    }
    Int8(const Int8&) = delete;
    Int8& operator=(const Int8&) = delete;
    ~Int8() {
      if (y_ != nullptr) cublasLtMatrixLayoutDestroy(y_);
      if (x_ != nullptr) cublasLtMatrixLayoutDestroy(x_);
      if (w_ != nullptr) cublasLtMatrixLayoutDestroy(w_);
      if (product_ != nullptr) cublasLtMatmulDescDestroy(product_);
    }

    void operator()(const void* x, const void* w, void* y, cudaStream_t stream) const {
      const std::int32_t one = 1;
      const std::int32_t zero = 0;
      BENCH_CHECK(cublasLtMatmul(cublas_.lt_, product_, &one, w, w_, x, x_, &zero, y, y_, y, y_,
                                 &choice_.algo, cublas_.workspace_.as<void>(), kWorkspaceBytes,
                                 stream));
    }

   private:
    Cublas& cublas_;
    cublasLtMatmulDesc_t product_ = nullptr;
    cublasLtMatrixLayout_t w_ = nullptr;
    cublasLtMatrixLayout_t x_ = nullptr;
    cublasLtMatrixLayout_t y_ = nullptr;
    cublasLtMatmulHeuristicResult_t choice_ = {};
  };

 private:
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_ = nullptr;
  Buffer workspace_;
};

}  // namespace bench
