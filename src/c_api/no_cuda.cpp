/// Stand-ins for the C ABI on CUDA, in the CPU's library, so that a program that calls it always
/// links and gets an answer. They are weak: those of binary_gemm_cuda, linked before this library,
/// take their place.

#include "boundary.h"

namespace {

bg_status refuse() noexcept {
  return binary_gemm::c_api::report(
      BG_NOT_SUPPORTED,
#ifdef BINARY_GEMM_WITH_CUDA
      "binary_gemm: this program does not link binary_gemm_cuda, or links it after binary_gemm_cpu"
#else
      "binary_gemm: this library was built without CUDA: there is no binary_gemm_cuda; "
      "build with -DBINARY_GEMM_CUDA=ON"
#endif
  );
}

bg_status refuse_layer(bg_linear** layer) noexcept {
  if (layer != nullptr) *layer = nullptr;
  return refuse();
}

}  // namespace

#define BINARY_GEMM_WEAK __attribute__((weak))

BINARY_GEMM_WEAK bg_status bg_cuda_prepare(int32_t) { return refuse(); }
BINARY_GEMM_WEAK bg_status bg_cuda_is_supported(int64_t, int64_t, int64_t, int32_t) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_linear_workspace_bytes(int64_t, int64_t, size_t*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_gemm_workspace_bytes(int64_t, int64_t, size_t*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_pack_weights(const bg_matrix*, const bg_weights*,
                                                const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_unpack_weights(const bg_weights*, const bg_matrix*,
                                                  const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_quantize_activation(const bg_matrix*, const bg_activation*,
                                                       const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_binary_gemm(const bg_activation*, const bg_weights*,
                                               const bg_bias*, const bg_matrix*, const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_rms_norm_quantize(const bg_matrix*, const bg_matrix*, float,
                                                     const bg_activation*, const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_swiglu_quantize(const bg_matrix*, const bg_activation*,
                                                   const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_binary_gemm_residual(const bg_activation*, const bg_weights*,
                                                        const bg_bias*, const bg_matrix*,
                                                        const bg_matrix*, const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_binary_linear(const bg_matrix*, const bg_weights*,
                                                 const bg_bias*, const bg_matrix*,
                                                 const bg_launch*) {
  return refuse();
}
BINARY_GEMM_WEAK bg_status bg_cuda_linear_from_dense(const bg_matrix*, int64_t, const bg_bias*,
                                                     const bg_launch*, bg_linear** layer) {
  return refuse_layer(layer);
}
BINARY_GEMM_WEAK bg_status bg_cuda_linear_from_packed(const bg_weights*, const bg_bias*,
                                                      const bg_launch*, bg_linear** layer) {
  return refuse_layer(layer);
}
BINARY_GEMM_WEAK bg_status bg_cuda_linear_from_q1_0(const void*, size_t, int64_t, int64_t,
                                                    const bg_bias*, const bg_launch*,
                                                    bg_linear** layer) {
  return refuse_layer(layer);
}
BINARY_GEMM_WEAK bg_status bg_cuda_linear_run(const bg_linear*, const bg_matrix*, const bg_matrix*,
                                              const bg_launch*) {
  return refuse();
}
