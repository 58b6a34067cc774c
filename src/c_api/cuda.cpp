/// The C ABI on CUDA.

#include "binary_gemm/cuda.h"

#include <string>
#include <utility>

#include "boundary.h"

namespace bg = binary_gemm;
using bg::c_api::layer_on;
using bg::c_api::make_layer;
using bg::c_api::to_optional_view;
using bg::c_api::to_view;

namespace {

class CudaLinear final : public bg_linear {
 public:
  explicit CudaLinear(bg::cuda::BinaryLinear layer) : layer_(std::move(layer)) {}
  bg::WeightView weights() const override { return layer_.weights(); }
  bg::BiasView bias() const override { return layer_.bias(); }
  const bg::cuda::BinaryLinear& layer() const { return layer_; }

 private:
  bg::cuda::BinaryLinear layer_;
};

// The CPU's library can't name CudaError.
template <class Body>
bg_status guarded(const Body& body) noexcept {
  return bg::c_api::guarded([&] {
    try {
      body();
    } catch (const bg::cuda::CudaError& error) {
      throw bg::c_api::StatusError(
          error.code() == cudaErrorMemoryAllocation ? BG_OUT_OF_MEMORY : BG_CUDA_ERROR,
          error.what());
    }
  });
}

bg::cuda::Launch to_launch(const bg_launch* launch) {
  if (launch == nullptr) return {};
  const bg_launch& s = bg::c_api::read(launch, "launch");
  bg::cuda::Launch result;
  result.stream = static_cast<cudaStream_t>(s.stream);
  result.workspace = {s.workspace, s.workspace_bytes};
  result.programmatic = s.programmatic != 0;
  return result;
}

}  // namespace

bg_status bg_cuda_prepare(int32_t device) {
  return guarded([&] { bg::cuda::prepare(device); });
}

bg_status bg_cuda_is_supported(int64_t n, int64_t k, int64_t group_size, int32_t device) {
  return guarded([&] {
    // The library's own choice takes any shape that is_supported doesn't throw at.
    bg::cuda::is_supported(bg::cuda::Kernel::kAuto, 1, n, k, group_size, device);
  });
}

bg_status bg_cuda_linear_workspace_bytes(int64_t m, int64_t k, size_t* bytes) {
  return guarded(
      [&] { bg::c_api::require(bytes, "bytes") = bg::cuda::linear_workspace_bytes(m, k); });
}

bg_status bg_cuda_gemm_workspace_bytes(int64_t m, int64_t k, size_t* bytes) {
  return guarded(
      [&] { bg::c_api::require(bytes, "bytes") = bg::cuda::gemm_workspace_bytes(m, k); });
}

bg_status bg_cuda_pack_weights(const bg_matrix* dense, const bg_weights* w,
                               const bg_launch* launch) {
  return guarded(
      [&] { bg::cuda::pack_weights(to_view(dense, "dense"), to_view(w, "w"), to_launch(launch)); });
}

bg_status bg_cuda_unpack_weights(const bg_weights* w, const bg_matrix* dense,
                                 const bg_launch* launch) {
  return guarded([&] {
    bg::cuda::unpack_weights(to_view(w, "w"), to_view(dense, "dense"), to_launch(launch));
  });
}

bg_status bg_cuda_quantize_activation(const bg_matrix* x, const bg_activation* q,
                                      const bg_launch* launch) {
  return guarded(
      [&] { bg::cuda::quantize_activation(to_view(x, "x"), to_view(q, "q"), to_launch(launch)); });
}

bg_status bg_cuda_binary_gemm(const bg_activation* x, const bg_weights* w, const bg_bias* bias,
                              const bg_matrix* y, const bg_launch* launch) {
  return guarded([&] {
    bg::cuda::binary_gemm(to_view(x, "x"), to_view(w, "w"), to_view(bias, "bias"), to_view(y, "y"),
                          to_launch(launch));
  });
}

bg_status bg_cuda_rms_norm_quantize(const bg_matrix* x, const bg_matrix* gain, float epsilon,
                                    const bg_activation* q, const bg_launch* launch) {
  return guarded([&] {
    bg::cuda::rms_norm_quantize(to_view(x, "x"), to_optional_view(gain, "gain"), epsilon,
                                to_view(q, "q"), to_launch(launch));
  });
}

bg_status bg_cuda_swiglu_quantize(const bg_matrix* gate_up, const bg_activation* q,
                                  const bg_launch* launch) {
  return guarded([&] {
    bg::cuda::swiglu_quantize(to_view(gate_up, "gate_up"), to_view(q, "q"), to_launch(launch));
  });
}

bg_status bg_cuda_binary_gemm_residual(const bg_activation* x, const bg_weights* w,
                                       const bg_bias* bias, const bg_matrix* residual,
                                       const bg_matrix* y, const bg_launch* launch) {
  return guarded([&] {
    bg::cuda::binary_gemm(to_view(x, "x"), to_view(w, "w"),
                          {to_view(bias, "bias"), to_optional_view(residual, "residual")},
                          to_view(y, "y"), to_launch(launch));
  });
}

bg_status bg_cuda_binary_linear(const bg_matrix* x, const bg_weights* w, const bg_bias* bias,
                                const bg_matrix* y, const bg_launch* launch) {
  return guarded([&] {
    bg::cuda::binary_linear(to_view(x, "x"), to_view(w, "w"), to_view(bias, "bias"),
                            to_view(y, "y"), to_launch(launch));
  });
}

bg_status bg_cuda_linear_from_dense(const bg_matrix* dense, int64_t group_size, const bg_bias* bias,
                                    const bg_launch* launch, bg_linear** layer) {
  return guarded([&] {
    make_layer<CudaLinear>(layer, [&] {
      return bg::cuda::BinaryLinear::from_dense(to_view(dense, "dense"), group_size,
                                                to_view(bias, "bias"), to_launch(launch));
    });
  });
}

bg_status bg_cuda_linear_from_packed(const bg_weights* w, const bg_bias* bias,
                                     const bg_launch* launch, bg_linear** layer) {
  return guarded([&] {
    make_layer<CudaLinear>(layer, [&] {
      return bg::cuda::BinaryLinear::from_packed(to_view(w, "w"), to_view(bias, "bias"),
                                                 to_launch(launch));
    });
  });
}

bg_status bg_cuda_linear_from_q1_0(const void* blocks, size_t blocks_bytes, int64_t n, int64_t k,
                                   const bg_bias* bias, const bg_launch* launch,
                                   bg_linear** layer) {
  return guarded([&] {
    make_layer<CudaLinear>(layer, [&] {
      const bg::BiasView bias_view = to_view(bias, "bias");
      const bg::cuda::Launch cuda_launch = to_launch(launch);
      const bg::cpu::BinaryLinear imported = bg::c_api::import_layer(blocks, blocks_bytes, n, k);
      return bg::cuda::BinaryLinear::from_packed(imported.weights(), bias_view, cuda_launch);
    });
  });
}

bg_status bg_cuda_linear_run(const bg_linear* layer, const bg_matrix* x, const bg_matrix* y,
                             const bg_launch* launch) {
  return guarded([&] {
    const bg::cuda::BinaryLinear& linear = layer_on<CudaLinear>(layer, "a CUDA device").layer();
    linear(to_view(x, "x"), to_view(y, "y"), to_launch(launch));
  });
}
