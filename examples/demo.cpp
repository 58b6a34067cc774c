/// binary_gemm_demo: runs the 1-bit layers of a GGUF model, checks them, and times them.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "gguf.h"
#include "weight_bytes.h"

namespace {

using binary_gemm::aligned_vector;
using binary_gemm::bfloat16;
using binary_gemm::ConstMatrixView;
using binary_gemm::float16;
using binary_gemm::MatrixView;
using Clock = std::chrono::steady_clock;

constexpr char kUsage[] =
    R"(usage: binary_gemm_demo [--tokens LIST] [--threads N] MODEL.gguf

Lists the Q1_0 tensors of a GGUF model, multiplies each distinct shape by random bf16 activations,
checks sampled outputs, and prints how long a product takes and how many bytes its weights are.

  MODEL.gguf      a model in GGUF version 2 or 3; examples/make_demo_model.py makes one
  --tokens LIST   batch sizes M, separated by commas (default 1,8)
  --threads N     threads of the CPU; 0 is OpenMP's default (default 0)
  --help          this text

The exit status is 0 if every check held, 1 if one failed or the file is bad, 2 for bad arguments.
)";

// Layers of one shape are multiplied in turn, as a model does, until their weights take this much:
// so that a layer isn't timed out of a cache that a whole model would not fit in.
constexpr std::int64_t kRotationBytes = std::int64_t{128} << 20;

constexpr std::int64_t kCheckedRows = 32;  // Rows of N whose outputs are checked, in each layer.
constexpr double kTimedSeconds = 0.3;      // About how long one case is timed.
constexpr double kErrorLimit = 1.0 / 256;  // Normwise, against float64: the step of bf16.
constexpr double kProgressAfterSeconds = 2;

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CheckError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string model;
  std::vector<std::int64_t> tokens = {1, 8};
  int threads = 0;
};

// A bar on stderr, once the work has taken a while and if someone is looking.
class Progress {
 public:
  explicit Progress(double steps) : steps_(steps), enabled_(isatty(STDERR_FILENO) == 1) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void finish_step() { at(0, ++done_); }

  // `fraction` of the current step is done.
  void at(double fraction) { at(fraction, done_); }

  // Takes the bar away, for other output.
  void clear() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
    shown_ = false;
  }

 private:
  void at(double fraction, double done) {
    const Clock::time_point now = Clock::now();
    if (!enabled_ || std::chrono::duration<double>(now - start_).count() < kProgressAfterSeconds ||
        now - drawn_ < std::chrono::milliseconds(100)) {
      return;
    }
    constexpr int kWidth = 40;
    const double share = std::min(1.0, (done + fraction) / steps_);
    const int filled = static_cast<int>(share * kWidth);
    std::fprintf(stderr, "\r[%s%s] %3.0f%%",
                 std::string(static_cast<std::size_t>(filled), '#').c_str(),
                 std::string(static_cast<std::size_t>(kWidth - filled), '.').c_str(), share * 100);
    drawn_ = now;
    shown_ = true;
  }

  double steps_;
  double done_ = 0;
  bool enabled_;
  bool shown_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_;
};

// A tensor of the file, imported.
struct Layer {
  explicit Layer(const gguf::Tensor& source)
      : tensor(&source),
        bits(static_cast<std::size_t>(source.n() * source.k() / 32)),
        scales(static_cast<std::size_t>(source.n() * source.k() / binary_gemm::kQ1_0GroupSize)) {
    binary_gemm::import_q1_0(source.data, source.bytes,
                             binary_gemm::weight_view(bits.data(), scales.data(), source.n(),
                                                      source.k(), binary_gemm::kQ1_0GroupSize));
  }

  binary_gemm::WeightView weights() const {
    return binary_gemm::weight_view(bits.data(), scales.data(), tensor->n(), tensor->k(),
                                    binary_gemm::kQ1_0GroupSize);
  }

  const gguf::Tensor* tensor;
  aligned_vector<std::uint32_t> bits;
  aligned_vector<float16> scales;
};

// What the demo asks of a processor. Operands are in host memory and bf16.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual std::string description() const = 0;

  // Takes layers of one shape, which outlive their use here.
  virtual void load(const std::vector<Layer>& layers) = 0;

  // y = x W^T for the weights of a loaded layer: binary_linear.
  virtual void multiply(std::size_t layer, const ConstMatrixView& x, const MatrixView& y) = 0;

  // The median time of that, with the loaded layers in turn.
  virtual double median_seconds(const ConstMatrixView& x, const MatrixView& y,
                                Progress& progress) = 0;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) { execution_.threads = threads; }

  const char* name() const override { return "cpu"; }

  std::string description() const override {
    const int threads = execution_.threads;
    return std::string("cpu: path ") +
           binary_gemm::cpu::name(binary_gemm::cpu::supported_paths().back()) + ", " +
           (threads == 0 ? "OpenMP's default number of" : std::to_string(threads)) +
           (threads == 1 ? " thread" : " threads");
  }

  void load(const std::vector<Layer>& layers) override { layers_ = &layers; }

  void multiply(std::size_t layer, const ConstMatrixView& x, const MatrixView& y) override {
    binary_gemm::cpu::binary_linear(x, (*layers_)[layer].weights(), {}, y, execution_);
  }

  double median_seconds(const ConstMatrixView& x, const MatrixView& y,
                        Progress& progress) override {
    constexpr std::size_t kMinRepeats = 5;
    constexpr std::size_t kMaxRepeats = 2000;
    // Warm up until every layer has been touched once and the clock had time to settle.
    const Clock::time_point start = Clock::now();
    std::size_t warm_ups = 0;
    double elapsed = 0;
    while (warm_ups < layers_->size() || elapsed < kTimedSeconds / 10) {
      multiply(warm_ups++ % layers_->size(), x, y);
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    const double estimate = elapsed / static_cast<double>(warm_ups);
    const std::size_t repeats =
        std::clamp(static_cast<std::size_t>(kTimedSeconds / estimate), kMinRepeats, kMaxRepeats);
    std::vector<double> seconds;
    for (std::size_t i = 0; i < repeats; ++i) {
      const Clock::time_point begin = Clock::now();
      multiply(i % layers_->size(), x, y);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      progress.at(static_cast<double>(i) / static_cast<double>(repeats));
    }
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
  }

 private:
  binary_gemm::cpu::Execution execution_;
  const std::vector<Layer>* layers_ = nullptr;
};

// bf16 activations [m, k]: Gaussian, the same on every run.
aligned_vector<bfloat16> random_activation(std::int64_t m, std::int64_t k) {
  std::mt19937 generator(42);
  std::normal_distribution<float> normal;
  aligned_vector<bfloat16> x(static_cast<std::size_t>(m * k));
  for (bfloat16& value : x) value = binary_gemm::to_bfloat16(normal(generator));
  return x;
}

// Activations quantized as the contract says, by the reference alone.
struct QuantizedActivation {
  QuantizedActivation(const ConstMatrixView& x)
      : values(static_cast<std::size_t>(x.rows * x.cols)),
        scales(static_cast<std::size_t>(x.rows)),
        m(x.rows),
        k(x.cols) {
    binary_gemm::reference::quantize_activation(
        x, binary_gemm::activation_view(values.data(), scales.data(), m, k));
  }

  binary_gemm::ActivationView view() const {
    return binary_gemm::activation_view(values.data(), scales.data(), m, k);
  }

  aligned_vector<std::int8_t> values;
  aligned_vector<float> scales;
  std::int64_t m;
  std::int64_t k;
};

// Row n of a Q1_0 tensor in float64, straight from the file: it shares no code with the import.
std::vector<double> dequantize_row(const gguf::Tensor& tensor, std::int64_t n) {
  constexpr std::int64_t kGroup = binary_gemm::kQ1_0GroupSize;
  const auto* block = static_cast<const unsigned char*>(tensor.data) +
                      n * (tensor.k() / kGroup) * binary_gemm::kQ1_0BlockBytes;
  std::vector<double> row;
  for (std::int64_t g = 0; g < tensor.k() / kGroup; ++g, block += binary_gemm::kQ1_0BlockBytes) {
    float16 scale;
    std::memcpy(&scale, block, sizeof scale);
    const double s = binary_gemm::to_float(scale);
    for (std::int64_t j = 0; j < kGroup; ++j) {
      row.push_back((block[2 + j / 8] >> (j % 8) & 1) != 0 ? s : -s);
    }
  }
  return row;
}

struct CheckResult {
  std::int64_t outputs = 0;
  double error = 0;  // Normwise, against float64.
};

// Checks the outputs y [m, n] of a layer on evenly spaced rows, the first and the last among them:
// bits against the reference, and the norm of the error against a float64 product of the
// dequantized weights and the quantized activations.
CheckResult check(const Layer& layer, const QuantizedActivation& x,
                  const aligned_vector<bfloat16>& y) {
  const std::int64_t n_count = layer.tensor->n();
  const std::int64_t rows = std::min(kCheckedRows, n_count);
  CheckResult result;
  double error_square = 0;
  double norm_square = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t n = rows > 1 ? i * (n_count - 1) / (rows - 1) : 0;
    const std::vector<double> row = dequantize_row(*layer.tensor, n);
    for (std::int64_t m = 0; m < x.m; ++m) {
      const float act_scale = x.scales[static_cast<std::size_t>(m)];
      const bfloat16 expected = binary_gemm::to_bfloat16(
          binary_gemm::reference::accumulate(x.view(), layer.weights(), m, n) * act_scale);
      const bfloat16 got = y[static_cast<std::size_t>(m * n_count + n)];
      const float got_value = binary_gemm::to_float(got);
      const float expected_value = binary_gemm::to_float(expected);
      if (got.bits != expected.bits && !(std::isnan(got_value) && std::isnan(expected_value))) {
        throw CheckError(gguf::printable(layer.tensor->name) + ", M = " + std::to_string(x.m) +
                         ": y[" + std::to_string(m) + ", " + std::to_string(n) +
                         "] = " + std::to_string(got_value) + ", but the reference gives " +
                         std::to_string(expected_value));
      }
      double product = 0;
      for (std::int64_t k = 0; k < x.k; ++k) {
        product +=
            row[static_cast<std::size_t>(k)] * x.values[static_cast<std::size_t>(m * x.k + k)];
      }
      product *= act_scale;
      ++result.outputs;
      // Weight scales that are infinite or NaN leave nothing to compare but the bits.
      if (!std::isfinite(product) || !std::isfinite(got_value)) continue;
      error_square += (got_value - product) * (got_value - product);
      norm_square += product * product;
    }
  }
  result.error = norm_square > 0 ? std::sqrt(error_square / norm_square) : std::sqrt(error_square);
  if (!(result.error < kErrorLimit)) {
    throw CheckError(gguf::printable(layer.tensor->name) + ", M = " + std::to_string(x.m) +
                     ": the normwise error against float64 is " + std::to_string(result.error) +
                     ", not below 2^-8 = " + std::to_string(kErrorLimit));
  }
  return result;
}

// Mebibytes in 9 columns: a tenth is enough, but for layers below one.
std::string mb(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, mebibytes(bytes) < 1 ? "%9.3f" : "%9.1f", mebibytes(bytes));
  return text;
}

std::string dims_text(const gguf::Tensor& tensor) {
  std::string text;
  // From the slowest: [N, K] for a matrix.
  for (auto dim = tensor.dims.rbegin(); dim != tensor.dims.rend(); ++dim) {
    text += (text.empty() ? "[" : ", ") + std::to_string(*dim);
  }
  return text.empty() ? "[]" : text + "]";
}

// The name with each run of digits between dots as '*': one for all of a model's layers.
std::string pattern_of(const std::string& name) {
  std::string pattern;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    pattern += (begin == 0 ? "" : ".") + (number ? "*" : part);
    begin = end + 1;
  }
  return pattern;
}

void list_tensors(const gguf::File& file) {
  std::printf("%s\n", gguf::printable(file.name().empty() ? "(no name)" : file.name()).c_str());
  std::printf("GGUF version %u, architecture %s, %zu tensors, %.1f MB\n\n", file.version(),
              gguf::printable(file.architecture().empty() ? "(none)" : file.architecture()).c_str(),
              file.tensors().size(), mebibytes(static_cast<std::int64_t>(file.bytes())));
  struct Line {
    std::string name;
    const gguf::Tensor* tensor;
    int count;
  };
  std::vector<Line> lines;
  std::map<std::tuple<std::string, std::uint32_t, std::vector<std::int64_t>>, std::size_t> index;
  std::size_t width = 6;
  for (const gguf::Tensor& tensor : file.tensors()) {
    const auto [entry, is_new] =
        index.try_emplace({pattern_of(tensor.name), tensor.type, tensor.dims}, lines.size());
    if (is_new) lines.push_back({gguf::printable(pattern_of(tensor.name)), &tensor, 0});
    ++lines[entry->second].count;
    width = std::max(width, lines[entry->second].name.size());
  }
  std::printf("%-*s  %5s  %-8s  shape\n", static_cast<int>(width), "tensor", "count", "type");
  for (const Line& line : lines) {
    std::printf("%-*s  %5d  %-8s  %s%s\n", static_cast<int>(width), line.name.c_str(), line.count,
                gguf::type_name(line.tensor->type).c_str(), dims_text(*line.tensor).c_str(),
                line.tensor->type == gguf::kTypeQ1_0 ? "" : "  (not Q1_0: skipped)");
  }
  std::printf("\n");
}

// The Q1_0 tensors of one shape.
using Shape = std::vector<const gguf::Tensor*>;

std::vector<Shape> distinct_shapes(const gguf::File& file) {
  std::vector<Shape> shapes;
  for (const gguf::Tensor& tensor : file.tensors()) {
    if (tensor.type != gguf::kTypeQ1_0) continue;
    const auto same = std::find_if(shapes.begin(), shapes.end(), [&tensor](const Shape& shape) {
      return shape[0]->n() == tensor.n() && shape[0]->k() == tensor.k();
    });
    if (same == shapes.end()) {
      shapes.push_back({&tensor});
    } else {
      same->push_back(&tensor);
    }
  }
  return shapes;
}

// "first.name", or "first.name +5" if 5 more tensors have the shape.
std::string label(const Shape& shape) {
  return gguf::printable(shape[0]->name) +
         (shape.size() > 1 ? " +" + std::to_string(shape.size() - 1) : "");
}

std::vector<Layer> import_layers(const Shape& shape) {
  std::vector<Layer> layers;
  std::int64_t bytes = 0;
  for (const gguf::Tensor* tensor : shape) {
    bytes += static_cast<std::int64_t>(tensor->bytes);
    if (!layers.empty() && bytes > kRotationBytes) break;
    layers.emplace_back(*tensor);
  }
  return layers;
}

int run(const Options& options) {
  const gguf::File file = gguf::File::open(options.model);
  list_tensors(file);
  const std::vector<Shape> shapes = distinct_shapes(file);
  if (shapes.empty()) {
    throw std::runtime_error(options.model + ": none of its " +
                             std::to_string(file.tensors().size()) +
                             " tensors has type Q1_0, so there is nothing to run");
  }

  // A CUDA backend joins here.
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<CpuBackend>(options.threads));
  for (const auto& backend : backends) std::printf("%s\n", backend->description().c_str());

  std::size_t width = 5;
  for (const Shape& shape : shapes) width = std::max(width, label(shape).size());
  std::printf("\n%-*s  %7s %6s %5s  %-4s  %11s %8s  %9s %9s %9s\n", static_cast<int>(width),
              "layer", "N", "K", "M", "on", "time", "GB/s", "bf16 MB", "2-bit MB", "1-bit MB");

  Progress progress(static_cast<double>(shapes.size() * backends.size() * options.tokens.size()));
  CheckResult total;
  for (const Shape& shape : shapes) {
    const std::int64_t n = shape[0]->n();
    const std::int64_t k = shape[0]->k();
    const std::vector<Layer> layers = import_layers(shape);
    for (const auto& backend : backends) {
      backend->load(layers);
      for (const std::int64_t m : options.tokens) {
        const aligned_vector<bfloat16> x_values = random_activation(m, k);
        const ConstMatrixView x = binary_gemm::matrix_view(x_values.data(), m, k);
        const QuantizedActivation quantized(x);
        aligned_vector<bfloat16> y_values(static_cast<std::size_t>(m * n));
        const MatrixView y = binary_gemm::matrix_view(y_values.data(), m, n);
        for (std::size_t i = 0; i < layers.size(); ++i) {
          // NaN everywhere, so that an output that isn't written shows.
          std::memset(y_values.data(), 0xff, y_values.size() * sizeof(bfloat16));
          backend->multiply(i, x, y);
          const CheckResult result = check(layers[i], quantized, y_values);
          total.outputs += result.outputs;
          total.error = std::max(total.error, result.error);
          progress.at(0);
        }
        const double seconds = backend->median_seconds(x, y, progress);
        progress.finish_step();
        progress.clear();
        std::printf("%-*s  %7lld %6lld %5lld  %-4s  %8.1f us %8.2f  %s %s %s\n",
                    static_cast<int>(width), label(shape).c_str(), static_cast<long long>(n),
                    static_cast<long long>(k), static_cast<long long>(m), backend->name(),
                    seconds * 1e6, static_cast<double>(binary_bytes(n, k)) / seconds / 1e9,
                    mb(bf16_bytes(n, k)).c_str(), mb(ternary_bytes(n, k)).c_str(),
                    mb(binary_bytes(n, k)).c_str());
        std::fflush(stdout);
      }
    }
  }

  std::int64_t bf16 = 0;
  std::int64_t ternary = 0;
  std::int64_t binary = 0;
  for (const gguf::Tensor& tensor : file.tensors()) {
    if (tensor.type != gguf::kTypeQ1_0) continue;
    bf16 += bf16_bytes(tensor.n(), tensor.k());
    ternary += ternary_bytes(tensor.n(), tensor.k());
    binary += binary_bytes(tensor.n(), tensor.k());
  }
  std::printf(R"(
All Q1_0 tensors: bf16 %.1f MB, 2-bit ternary %.1f MB, 1-bit %.1f MB (%.1f times less than bf16).
Checked %lld outputs: equal to the reference bit for bit; the largest normwise error against a
float64 product is %.5f, below 2^-8 = %.5f.

time: median of binary_linear, bf16 activations in and bf16 out, over the layers of a shape in turn.
GB/s: bytes of 1-bit weights over that time (10^9 a second). MB: 2^20 bytes; 2-bit and 1-bit weights
are counted with an fp16 scale for every 128.
)",
              mebibytes(bf16), mebibytes(ternary), mebibytes(binary),
              static_cast<double>(bf16) / static_cast<double>(binary),
              static_cast<long long>(total.outputs), total.error, kErrorLimit);
  return 0;
}

// A whole decimal number in [low, high].
std::int64_t parse_number(const std::string& option, const std::string& text, std::int64_t low,
                          std::int64_t high) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < low || value > high) {
    throw UsageError(option + " takes numbers from " + std::to_string(low) + " to " +
                     std::to_string(high) + ", not '" + text + "'");
  }
  return value;
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == argc) throw UsageError(argument + " needs a value");
      return argv[++i];
    };
    if (argument == "--tokens") {
      options.tokens.clear();
      const std::string list = value();
      for (std::size_t begin = 0; begin <= list.size();) {
        const std::size_t end = std::min(list.find(',', begin), list.size());
        options.tokens.push_back(parse_number(argument, list.substr(begin, end - begin), 1, 65536));
        begin = end + 1;
      }
    } else if (argument == "--threads") {
      options.threads = static_cast<int>(parse_number(argument, value(), 0, 4096));
    } else if (argument.size() > 1 && argument[0] == '-') {
      throw UsageError("unknown option " + argument);
    } else if (options.model.empty()) {
      options.model = argument;
    } else {
      throw UsageError("one model at a time, not " + options.model + " and " + argument);
    }
  }
  if (options.model.empty()) throw UsageError("no model was given");
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") == 0 || std::strcmp(argv[i], "-h") == 0) {
      std::fputs(kUsage, stdout);
      return 0;
    }
  }
  try {
    return run(parse_options(argc, argv));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "binary_gemm_demo: %s\n\n%s", error.what(), kUsage);
    return 2;
  } catch (const CheckError& error) {
    std::fprintf(stderr, "binary_gemm_demo: CHECK FAILED: %s\n", error.what());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "binary_gemm_demo: %s\n", error.what());
    return 1;
  }
}
