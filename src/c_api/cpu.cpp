/// The C ABI: status, version, layers' handles, and the CPU.

#include <cstdio>
#include <new>
#include <utility>

#include "binary_gemm/q1_0.h"
#include "boundary.h"
#include "check.h"

#define BINARY_GEMM_TEXT_OF(x) #x
#define BINARY_GEMM_TEXT(x) BINARY_GEMM_TEXT_OF(x)

namespace bg = binary_gemm;
using bg::c_api::guarded;
using bg::c_api::to_execution;
using bg::c_api::to_optional_view;
using bg::c_api::to_view;

namespace binary_gemm {
namespace c_api {
namespace {

// No std::string: keeping a message must not fail.
thread_local char last_message[1024] = "";

class CpuLinear final : public bg_linear {
 public:
  explicit CpuLinear(cpu::BinaryLinear layer) : layer_(std::move(layer)) {}
  WeightView weights() const override { return layer_.weights(); }
  BiasView bias() const override { return layer_.bias(); }
  const cpu::BinaryLinear& layer() const { return layer_; }

 private:
  cpu::BinaryLinear layer_;
};

}  // namespace

bg_status report(bg_status status, const char* message) noexcept {
  std::snprintf(last_message, sizeof last_message, "%s", message);
  return status;
}

bg_status report_exception() noexcept {
  try {
    throw;
  } catch (const StatusError& error) {
    return report(error.status(), error.what());
  } catch (const std::invalid_argument& error) {
    return report(BG_INVALID_ARGUMENT, error.what());
  } catch (const std::bad_alloc&) {
    return report(BG_OUT_OF_MEMORY, "binary_gemm: the host is out of memory");
  } catch (const std::length_error&) {  // a container's way to say the same
    return report(BG_OUT_OF_MEMORY, "binary_gemm: no host has memory for this");
  } catch (const std::exception& error) {
    return report(BG_INTERNAL, error.what());
  } catch (...) {
    return report(BG_INTERNAL, "binary_gemm: an exception of no known type");
  }
}

cpu::BinaryLinear import_layer(const void* blocks, std::size_t blocks_bytes, std::int64_t n,
                               std::int64_t k) {
  // The sizes must agree before memory is taken for them.
  check::weight_shape(n, k, kQ1_0GroupSize);
  const auto expected = static_cast<std::size_t>(n * (k / kQ1_0GroupSize) * kQ1_0BlockBytes);
  if (blocks_bytes != expected) {
    throw std::invalid_argument("binary_gemm: Q1_0 weights [" + std::to_string(n) + ", " +
                                std::to_string(k) + "] take " + std::to_string(expected) +
                                " bytes, but " + std::to_string(blocks_bytes) + " were given");
  }
  if (expected > 0) require(static_cast<const char*>(blocks), "blocks");
  cpu::BinaryLinear layer(n, k, kQ1_0GroupSize);
  import_q1_0(blocks, blocks_bytes, layer.weights());
  return layer;
}

}  // namespace c_api
}  // namespace binary_gemm

using bg::c_api::CpuLinear;
using bg::c_api::layer_on;
using bg::c_api::make_layer;
using bg::c_api::read;
using bg::c_api::require;

const char* bg_last_error_message() { return bg::c_api::last_message; }

void bg_version(int* major, int* minor, int* patch) {
  if (major != nullptr) *major = BINARY_GEMM_VERSION_MAJOR;
  if (minor != nullptr) *minor = BINARY_GEMM_VERSION_MINOR;
  if (patch != nullptr) *patch = BINARY_GEMM_VERSION_PATCH;
}

const char* bg_version_string() {
  return BINARY_GEMM_TEXT(BINARY_GEMM_VERSION_MAJOR) "." BINARY_GEMM_TEXT(
      BINARY_GEMM_VERSION_MINOR) "." BINARY_GEMM_TEXT(BINARY_GEMM_VERSION_PATCH);
}

bg_status bg_import_q1_0(const void* blocks, size_t blocks_bytes, const bg_weights* w) {
  return guarded([&] { bg::import_q1_0(blocks, blocks_bytes, to_view(w, "w")); });
}

bg_status bg_export_q1_0(const bg_weights* w, void* blocks, size_t blocks_bytes) {
  return guarded([&] { bg::export_q1_0(to_view(w, "w"), blocks, blocks_bytes); });
}

bg_status bg_linear_weights(const bg_linear* layer, bg_weights* w) {
  return guarded([&] {
    const bg::WeightView view = require(layer, "layer").weights();
    read(w, "w") = bg_weights_of(view.bits, reinterpret_cast<const std::uint16_t*>(view.scales),
                                 view.n, view.k, view.group_size);
  });
}

bg_status bg_linear_bias(const bg_linear* layer, bg_bias* bias) {
  return guarded([&] {
    const bg::BiasView view = require(layer, "layer").bias();
    read(bias, "bias") = bg_bias_of(view.data, view.n);
  });
}

void bg_linear_free(bg_linear* layer) { delete layer; }

bg_status bg_cpu_is_supported(int64_t n, int64_t k, int64_t group_size, int32_t path) {
  return guarded([&] {
    bg::check::weight_shape(n, k, group_size);
    const auto chosen = bg::c_api::enumerator<bg::cpu::Path>(path);
    if (bg::cpu::is_supported(chosen)) return;
    throw bg::c_api::StatusError(
        BG_NOT_SUPPORTED,
        std::string("binary_gemm: this build or processor has no path ") + bg::cpu::name(chosen));
  });
}

bg_status bg_cpu_pack_weights(const bg_matrix* dense, const bg_weights* w,
                              const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::pack_weights(to_view(dense, "dense"), to_view(w, "w"), to_execution(execution));
  });
}

bg_status bg_cpu_unpack_weights(const bg_weights* w, const bg_matrix* dense,
                                const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::unpack_weights(to_view(w, "w"), to_view(dense, "dense"), to_execution(execution));
  });
}

bg_status bg_cpu_quantize_activation(const bg_matrix* x, const bg_activation* q,
                                     const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::quantize_activation(to_view(x, "x"), to_view(q, "q"), to_execution(execution));
  });
}

bg_status bg_cpu_binary_gemm(const bg_activation* x, const bg_weights* w, const bg_bias* bias,
                             const bg_matrix* y, const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::binary_gemm(to_view(x, "x"), to_view(w, "w"), to_view(bias, "bias"), to_view(y, "y"),
                         to_execution(execution));
  });
}

bg_status bg_cpu_binary_gemm_rows(const bg_activation* x, const bg_weights* w, const bg_bias* bias,
                                  const bg_matrix* y, int64_t row_begin, int64_t row_end,
                                  int32_t path) {
  return guarded([&] {
    bg::cpu::binary_gemm_rows(to_view(x, "x"), to_view(w, "w"), to_view(bias, "bias"),
                              to_view(y, "y"), row_begin, row_end,
                              bg::c_api::enumerator<bg::cpu::Path>(path));
  });
}

bg_status bg_cpu_rms_norm_quantize(const bg_matrix* x, const bg_matrix* gain, float epsilon,
                                   const bg_activation* q, const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::rms_norm_quantize(to_view(x, "x"), to_optional_view(gain, "gain"), epsilon,
                               to_view(q, "q"), to_execution(execution));
  });
}

bg_status bg_cpu_swiglu_quantize(const bg_matrix* gate_up, const bg_activation* q,
                                 const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::swiglu_quantize(to_view(gate_up, "gate_up"), to_view(q, "q"), to_execution(execution));
  });
}

bg_status bg_cpu_binary_gemm_residual(const bg_activation* x, const bg_weights* w,
                                      const bg_bias* bias, const bg_matrix* residual,
                                      const bg_matrix* y, const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::binary_gemm(to_view(x, "x"), to_view(w, "w"),
                         {to_view(bias, "bias"), to_optional_view(residual, "residual")},
                         to_view(y, "y"), to_execution(execution));
  });
}

bg_status bg_cpu_binary_linear(const bg_matrix* x, const bg_weights* w, const bg_bias* bias,
                               const bg_matrix* y, const bg_execution* execution) {
  return guarded([&] {
    bg::cpu::binary_linear(to_view(x, "x"), to_view(w, "w"), to_view(bias, "bias"), to_view(y, "y"),
                           to_execution(execution));
  });
}

bg_status bg_cpu_linear_from_dense(const bg_matrix* dense, int64_t group_size, const bg_bias* bias,
                                   bg_linear** layer) {
  return guarded([&] {
    make_layer<CpuLinear>(layer, [&] {
      return bg::cpu::BinaryLinear::from_dense(to_view(dense, "dense"), group_size,
                                               to_view(bias, "bias"));
    });
  });
}

bg_status bg_cpu_linear_from_packed(const bg_weights* w, const bg_bias* bias, bg_linear** layer) {
  return guarded([&] {
    make_layer<CpuLinear>(layer, [&] {
      return bg::cpu::BinaryLinear::from_packed(to_view(w, "w"), to_view(bias, "bias"));
    });
  });
}

bg_status bg_cpu_linear_from_q1_0(const void* blocks, size_t blocks_bytes, int64_t n, int64_t k,
                                  const bg_bias* bias, bg_linear** layer) {
  return guarded([&] {
    make_layer<CpuLinear>(layer, [&] {
      const bg::BiasView bias_view = to_view(bias, "bias");
      bg::cpu::BinaryLinear imported = bg::c_api::import_layer(blocks, blocks_bytes, n, k);
      if (bias_view.data == nullptr) return imported;
      return bg::cpu::BinaryLinear::from_packed(imported.weights(), bias_view);
    });
  });
}

bg_status bg_cpu_linear_run(const bg_linear* layer, const bg_matrix* x, const bg_matrix* y,
                            const bg_execution* execution) {
  return guarded([&] {
    const bg::cpu::BinaryLinear& linear = layer_on<CpuLinear>(layer, "the CPU").layer();
    linear(to_view(x, "x"), to_view(y, "y"), to_execution(execution));
  });
}
