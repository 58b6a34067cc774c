/// The CPU entry points: checks, choice of path, threads.

#include "binary_gemm/cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "check.h"
#include "kernel.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace binary_gemm {
namespace cpu {
namespace {

const PathKernels& kernels(Path path) {
  const Path chosen = path == Path::kAuto ? supported_paths().back() : path;
  if (!is_supported(chosen)) {
    throw std::invalid_argument(std::string("binary_gemm: this build or processor has no path ") +
                                name(path));
  }
#if defined(__x86_64__) && defined(__linux__)
  if (chosen == Path::kAmx) return kAmxKernels;
#endif
#ifdef __x86_64__
  if (chosen == Path::kAvx512Vnni) return kAvx512VnniKernels;
  if (chosen == Path::kAvx2) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

#ifdef _OPENMP
// Multiplications (or elements moved) that are worth a thread: some 15 us of them, where starting
// and joining one takes 5 us on idle cores and far more on busy ones.
constexpr std::int64_t kWorkPerThread = std::int64_t{1} << 20;
// More threads than this a processor are not started, whatever is asked for: OpenMP's runtime ends
// the program when the system refuses one.
constexpr int kThreadsPerProcessor = 4;
#endif

// The threads for `rows` rows of `row_work` multiplications each: what the caller asked for, or by
// default as many as there is work for.
int thread_count(const Execution& execution, [[maybe_unused]] std::int64_t rows,
                 [[maybe_unused]] std::int64_t row_work) {
  if (execution.threads < 0) {
    throw std::invalid_argument("binary_gemm: threads = " + std::to_string(execution.threads) +
                                " must not be negative");
  }
#ifdef _OPENMP
  if (execution.threads > 0) {
    return std::min(execution.threads, kThreadsPerProcessor * omp_get_num_procs());
  }
  const double work = static_cast<double>(rows) * static_cast<double>(row_work);
  const double useful = std::max(1.0, work / static_cast<double>(kWorkPerThread));
  return static_cast<int>(std::min<double>(omp_get_max_threads(), useful));
#else
  return 1;
#endif
}

// Calls body(begin, end) for contiguous parts of [0, count), one a thread, each but the last a
// multiple of `grain`. `body` must not throw.
template <class Body>
void parallel_ranges(std::int64_t count, std::int64_t grain, int threads, const Body& body) {
  const std::int64_t grains = (count + grain - 1) / grain;
  const std::int64_t parts = std::min<std::int64_t>(threads, grains);
  if (parts <= 1) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static)
#endif
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = grains * part / parts * grain;
    const std::int64_t end = std::min(count, grains * (part + 1) / parts * grain);
    body(begin, end);
  }
}

// What the packed activations of a pass may take, to stay in a core's L2: every few weight rows
// read them all. 5120x17408 with AMX at M = 256: 1.0 TOPS a thread in one pass, 1.25 in three.
constexpr std::int64_t kPassBytes = 1536 * 1024;

// Rows of weights that start on one cache line of a bf16 or fp16 y.
constexpr std::int64_t kRowGrain = 32;

GemmArguments resolve(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                      const MatrixView& y) {
  const BiasView& bias = epilogue.bias;
  const ConstMatrixView& residual = epilogue.residual;
  // With K = 0 bases may be null, to which nothing but 0 may be added.
  const std::int64_t used = w.k > 0 ? 1 : 0;
  return {x.values + used * x.offset,
          used * x.row_stride,
          x.scales + x.scales_offset,
          w.bits + used * w.bits_offset,
          used * w.bits_stride,
          w.scales + used * w.scales_offset,
          used * w.scales_stride,
          bias.data != nullptr ? bias.data + bias.offset : nullptr,
          residual.data != nullptr
              ? static_cast<const char*>(residual.data) + residual.offset * size_of(residual.type)
              : nullptr,
          residual.row_stride,
          static_cast<char*>(y.data) + y.offset * size_of(y.type),
          y.type,
          y.row_stride,
          x.m,
          w.k,
          w.group_size};
}

GemmArguments token_range(GemmArguments a, std::int64_t begin, std::int64_t count) {
  a.x += begin * a.x_stride;
  a.x_scales += begin;
  a.y = static_cast<char*>(a.y) + begin * a.y_stride * size_of(a.y_type);
  if (a.residual != nullptr) {
    a.residual =
        static_cast<const char*>(a.residual) + begin * a.residual_stride * size_of(a.y_type);
  }
  a.m = count;
  return a;
}

// Computes y[:, row_begin:row_end] in passes over the tokens.
void multiply(const PathKernels& path, const ActivationView& x, const WeightView& w,
              const Epilogue& epilogue, const MatrixView& y, std::int64_t row_begin,
              std::int64_t row_end, int threads) {
  if (x.m == 0 || row_begin == row_end) return;
  const GemmArguments all = resolve(x, w, epilogue, y);
  const std::int64_t limit =
      std::clamp(kPassBytes / std::max<std::int64_t>(all.k, 1), std::int64_t{64}, kMaxPassTokens);
  const std::int64_t passes = (all.m + limit - 1) / limit;
  const std::int64_t pass_tokens = (all.m + passes - 1) / passes;
  aligned_vector<char> packed;
  for (std::int64_t m = 0; m < all.m; m += pass_tokens) {
    const GemmArguments a = token_range(all, m, std::min(pass_tokens, all.m - m));
    const PackedShape shape = path.packed_shape(a);
    packed.resize(static_cast<std::size_t>(shape.blocks * shape.block_bytes));
    const std::int64_t blocks = shape.block_bytes > 0 ? shape.blocks : 0;  // none with K = 0
    parallel_ranges(blocks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        path.pack_block(a, block, packed.data() + block * shape.block_bytes);
      }
    });
    parallel_ranges(row_end - row_begin, kRowGrain, threads,
                    [&](std::int64_t begin, std::int64_t end) {
                      path.gemm_rows(a, packed.data(), row_begin + begin, row_begin + end);
                    });
  }
}

// Rows of fp32 values, each made by `make` and quantized: make(m, values) writes those of token m.
template <class Make>
void quantize_rows(const PathKernels& path, const MutableActivationView& q, int threads,
                   const Make& make) {
  const std::int64_t used = q.k > 0 ? 1 : 0;  // see resolve
  const std::int64_t parts = std::min<std::int64_t>(threads, q.m);
  aligned_vector<float> values(static_cast<std::size_t>(parts * q.k));  // a row for each thread
  parallel_ranges(parts, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part) {
      float* row = values.data() + part * q.k;
      for (std::int64_t m = q.m * part / parts; m < q.m * (part + 1) / parts; ++m) {
        make(m, row);
        q.scales[q.scales_offset + m] = path.quantize_row(
            row, DataType::kFloat32, q.k, q.values + used * (q.offset + m * q.row_stride));
      }
    }
  });
}

}  // namespace

const char* name(Path path) {
  switch (path) {
    case Path::kAuto:
      return "auto";
    case Path::kPortable:
      return "portable";
    case Path::kAvx2:
      return "avx2";
    case Path::kAvx512Vnni:
      return "avx512vnni";
    case Path::kAmx:
      return "amx";
  }
  return "unknown";
}

// What __builtin_cpu_supports says of AVX includes that the system saves the registers.
bool is_supported(Path path) {
  switch (path) {
    case Path::kAuto:
    case Path::kPortable:
      return true;
#ifdef __x86_64__
    case Path::kAvx2:
      // No processor has AVX2 without F16C, which clang 14 cannot ask for.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Path::kAvx512Vnni:
      return is_supported(Path::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("gfni");
#endif
#if defined(__x86_64__) && defined(__linux__)
    case Path::kAmx: {
      static const bool permitted = is_supported(Path::kAvx512Vnni) && amx_is_permitted();
      return permitted;
    }
#endif
    default:
      return false;
  }
}

std::vector<Path> supported_paths() {
  std::vector<Path> paths;
  for (const Path path : {Path::kPortable, Path::kAvx2, Path::kAvx512Vnni, Path::kAmx}) {
    if (is_supported(path)) paths.push_back(path);
  }
  return paths;
}

void pack_weights(const ConstMatrixView& dense, const MutableWeightView& w,
                  const Execution& execution) {
  check::pack_weights(dense, w);
  const std::int64_t rows = w.k > 0 ? w.n : 0;
  parallel_ranges(
      rows, 1, thread_count(execution, rows, w.k), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t n = begin; n < end; ++n) {
          const std::int64_t row = dense.offset + n * dense.row_stride;
          std::uint32_t* bits = w.bits + w.bits_offset + n * w.bits_stride;
          for (std::int64_t j = 0; j < w.k / 32; ++j) {
            std::uint32_t word = 0;
            for (int i = 0; i < 32; ++i) {
              const float value = reference::load(dense.data, dense.type, row + 32 * j + i);
              word |= static_cast<std::uint32_t>(value > 0) << i;
            }
            bits[j] = word;
          }
          if (w.scales == nullptr) continue;
          float16* scales = w.scales + w.scales_offset + n * w.scales_stride;
          for (std::int64_t g = 0; g < w.k / w.group_size; ++g) {
            double sum = 0;
            for (std::int64_t i = g * w.group_size; i < (g + 1) * w.group_size; ++i) {
              sum +=
                  std::fabs(static_cast<double>(reference::load(dense.data, dense.type, row + i)));
            }
            scales[g] = to_float16(static_cast<float>(sum / static_cast<double>(w.group_size)));
          }
        }
      });
}

void unpack_weights(const WeightView& w, const MatrixView& dense, const Execution& execution) {
  check::unpack_weights(w, dense);
  const std::int64_t rows = w.k > 0 ? w.n : 0;
  parallel_ranges(
      rows, 1, thread_count(execution, rows, w.k), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t n = begin; n < end; ++n) {
          const float16* scales =
              w.scales != nullptr ? w.scales + w.scales_offset + n * w.scales_stride : nullptr;
          for (std::int64_t k = 0; k < w.k; ++k) {
            const float magnitude = scales != nullptr ? to_float(scales[k / w.group_size]) : 1.0f;
            const float value = reference::sign_of(w, n, k) > 0 ? magnitude : -magnitude;
            reference::store(dense.data, dense.type, dense.offset + n * dense.row_stride + k,
                             value);
          }
        }
      });
}

void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q,
                         const Execution& execution) {
  check::quantize_activation(x, q);
  const PathKernels& path = kernels(execution.path);
  const std::int64_t used = x.cols > 0 ? 1 : 0;  // see resolve
  parallel_ranges(x.rows, 1, thread_count(execution, x.rows, x.cols),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t m = begin; m < end; ++m) {
                      const std::int64_t x_row = used * (x.offset + m * x.row_stride);
                      const std::int64_t q_row = used * (q.offset + m * q.row_stride);
                      q.scales[q.scales_offset + m] = path.quantize_row(
                          static_cast<const char*>(x.data) + x_row * size_of(x.type), x.type,
                          x.cols, q.values + q_row);
                    }
                  });
}

void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                       const MutableActivationView& q, const Execution& execution) {
  check::rms_norm_quantize(x, gain, epsilon, q);
  const PathKernels& path = kernels(execution.path);
  aligned_vector<float> gains;
  if (gain.data != nullptr) {
    for (std::int64_t k = 0; k < x.cols; ++k) {
      gains.push_back(reference::load(gain.data, gain.type, gain.offset + k));
    }
  }
  const std::int64_t used = x.cols > 0 ? 1 : 0;
  quantize_rows(path, q, thread_count(execution, x.rows, x.cols),
                [&](std::int64_t m, float* values) {
                  const char* row = static_cast<const char*>(x.data) +
                                    used * (x.offset + m * x.row_stride) * size_of(x.type);
                  path.normalize_row(row, x.type, x.cols, gains.empty() ? nullptr : gains.data(),
                                     epsilon, values);
                });
}

void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q,
                     const Execution& execution) {
  check::swiglu_quantize(gate_up, q);
  const PathKernels& path = kernels(execution.path);
  const std::int64_t used = q.k > 0 ? 1 : 0;
  // A value takes some 20 operations.
  quantize_rows(
      path, q, thread_count(execution, q.m, 20 * q.k), [&](std::int64_t m, float* values) {
        const char* gate = static_cast<const char*>(gate_up.data) +
                           used * (gate_up.offset + m * gate_up.row_stride) * size_of(gate_up.type);
        path.swiglu_row(gate, gate + q.k * size_of(gate_up.type), gate_up.type, q.k, values);
      });
}

void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                 const MatrixView& y, const Execution& execution) {
  check::binary_gemm(x, w, epilogue, y);
  const int threads = thread_count(execution, x.m, w.n > 0 ? w.n * w.k : 0);
  multiply(kernels(execution.path), x, w, epilogue, y, 0, w.n, threads);
}

void binary_gemm_rows(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                      const MatrixView& y, std::int64_t row_begin, std::int64_t row_end,
                      Path path) {
  check::binary_gemm(x, w, epilogue, y);
  check::row_range(row_begin, row_end, w.n);
  multiply(kernels(path), x, w, epilogue, y, row_begin, row_end, 1);
}

void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y, const Execution& execution) {
  check::binary_linear(x, w, epilogue, y);
  if (x.rows == 0 || w.n == 0) return;
  aligned_vector<std::int8_t> values(static_cast<std::size_t>(x.rows * x.cols));
  aligned_vector<float> scales(static_cast<std::size_t>(x.rows));
  const MutableActivationView q = activation_view(values.data(), scales.data(), x.rows, x.cols);
  quantize_activation(x, q, execution);
  binary_gemm(q, w, epilogue, y, execution);
}

BinaryLinear::BinaryLinear(std::int64_t n, std::int64_t k, std::int64_t group_size, bool has_bias)
    : n_(n), k_(k), group_size_(group_size) {
  check::weight_shape(n, k, group_size);
  bits_.resize(static_cast<std::size_t>(n * (k / 32)));
  scales_.resize(static_cast<std::size_t>(n * (k / group_size)));
  if (has_bias) bias_.resize(static_cast<std::size_t>(n));
}

BinaryLinear BinaryLinear::from_dense(const ConstMatrixView& dense, std::int64_t group_size,
                                      const BiasView& bias) {
  check::layer(dense, group_size, bias);
  BinaryLinear layer(dense.rows, dense.cols, group_size, bias.data != nullptr);
  pack_weights(dense, layer.weights());
  layer.copy_bias(bias);
  return layer;
}

BinaryLinear BinaryLinear::from_packed(const WeightView& w, const BiasView& bias) {
  check::layer(w, bias);
  BinaryLinear layer(w.n, w.k, w.group_size, bias.data != nullptr);
  const std::int64_t words = w.k / 32;
  const std::int64_t groups = w.k / w.group_size;
  for (std::int64_t n = 0; n < w.n && w.k > 0; ++n) {
    std::copy_n(w.bits + w.bits_offset + n * w.bits_stride, words, layer.bits_.data() + n * words);
    std::copy_n(w.scales + w.scales_offset + n * w.scales_stride, groups,
                layer.scales_.data() + n * groups);
  }
  layer.copy_bias(bias);
  return layer;
}

void BinaryLinear::copy_bias(const BiasView& bias) {
  if (bias.data == nullptr || n_ == 0) return;
  std::copy_n(bias.data + bias.offset, n_, bias_.data());
}

void BinaryLinear::operator()(const ConstMatrixView& x, const MatrixView& y,
                              const Execution& execution) const {
  binary_linear(x, weights(), bias(), y, execution);
}

WeightView BinaryLinear::weights() const {
  return weight_view(bits_.data(), scales_.data(), n_, k_, group_size_);
}

MutableWeightView BinaryLinear::weights() {
  return weight_view(bits_.data(), scales_.data(), n_, k_, group_size_);
}

BiasView BinaryLinear::bias() const {
  return bias_.empty() ? BiasView{} : BiasView{bias_.data(), n_, 0};
}

}  // namespace cpu
}  // namespace binary_gemm
