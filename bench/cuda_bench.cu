/// The CUDA products beside their peers and the floor that memory sets: bench/results/<gpu>.csv.
///
///   binary_gemm_bench --results=bench/results         everything
///   binary_gemm_bench --m=decode --layers=qkv,down    some of it; --help lists the flags
///
/// A measurement is the median over replays of a graph that holds many launches back to back, timed
/// by events. Each launch takes the next of several weights, random ones, so that none is found in
/// L2; activations and outputs are the same ones all the time, as small as they are. Before and
/// after it is timed, an implementation's results are compared with the reference.
///
/// The CSV has one row a measurement, `layer,N,K,G,M,impl,us,tops,gbps,commit`: tops are 2MNK by
/// time, gbps the bytes of an implementation's own weights (bits and scales; int8; bf16) by time.
/// Rows of the same first six columns are replaced, others stay.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cases.cuh"
#include "chain.cuh"
#include "results.h"
#include "support.cuh"
#include "verify.cuh"

// The commit at configure time, with a + if the sources had changes.
extern const char* const binary_gemm_bench_commit;

namespace {

using namespace bench;

constexpr const char* kHelp = R"(usage: binary_gemm_bench [FLAGS]

  --layers=LIST     of qkv, out, gate, down, down_5120, gate_2560, down_9728, lm_head, chain64
                    (default: all)
  --m=LIST          tokens: numbers, ranges as 1-64, or the names decode (1 to 16, as in the README)
                    and full (all that the results hold; the default)
  --impls=LIST      of binary_gemm, binary_gemm_pdl, binary_linear, binary_linear_pdl, cublas_bf16,
                    cublaslt_int8, dp4a_table, read_floor (default: all). binary_gemm:decode_s8, and
                    the like, force a kernel. Of chain64, a token of 64 layers and the LM head, there
                    are engine, engine_pdl (the whole step), binary_gemm_pdl, cublas_bf16 (its
                    products), read_floor (a kernel a product), read_rate (one kernel); and
                    engine_pdl:split_norm, :split_swiglu, :split_residual, without a fused step.
  --groups=LIST     of 32, 64, 128, 256 (default: 128)
  --rest_ms=N       idle before each measurement, longer after a long one, so that the clock does
                    not suffer for the one before (default: 10; 0: never)
  --sustain_ms=N    then run each implementation that long before it is timed, so that clocks settle
                    at what the power limit allows (default: 0)
  --results=DIR     update DIR/<machine>.csv
  --machine=NAME    its name (default: from that of the GPU)
  --commit=NAME     for its last column (default: the commit that was built)

and Google Benchmark's own, such as --benchmark_filter and --benchmark_out.
)";

struct Options {
  std::vector<Layer> layers;
  std::vector<std::int64_t> m;
  std::vector<Impl> impls;
  std::vector<std::int64_t> groups;
  Heat heat;
  std::string results;
  std::string machine;
  std::string commit;
};

std::int64_t to_number(const std::string& text) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 1) {
    throw std::invalid_argument("'" + text + "' is not a positive number");
  }
  return value;
}

std::vector<std::int64_t> parse_tokens(const std::string& list) {
  std::vector<std::int64_t> tokens;
  for (const std::string& part : split(list, ',')) {
    if (part == "decode") {
      tokens.insert(tokens.end(), {1, 2, 3, 4, 6, 8, 12, 16});
    } else if (part == "full") {
      for (std::int64_t m = 1; m <= 64; ++m) tokens.push_back(m);
      tokens.insert(tokens.end(), {96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192});
    } else {
      const std::vector<std::string> ends = split(part, '-');
      if (ends.size() > 2) throw std::invalid_argument("'" + part + "' is not a range");
      for (std::int64_t m = to_number(ends.front()); m <= to_number(ends.back()); ++m) {
        tokens.push_back(m);
      }
    }
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

std::string join(const char* const* begin, const char* const* end) {
  std::string list;
  for (; begin != end; ++begin) list += (list.empty() ? "" : ",") + std::string(*begin);
  return list;
}

Options parse_options(int& argc, char** argv, const std::string& device_name) {
  Options options;
  std::string all_layers;
  for (const Layer& layer : kLayers) {
    all_layers += (all_layers.empty() ? "" : ",") + std::string(layer.name);
  }
  for (const std::string& name : split(take_flag(argc, argv, "layers", all_layers), ',')) {
    const auto* layer = std::find_if(std::begin(kLayers), std::end(kLayers),
                                     [&](const Layer& other) { return name == other.name; });
    if (layer == std::end(kLayers)) {
      throw std::invalid_argument("no layer is called '" + name + "'; there are " + all_layers);
    }
    options.layers.push_back(*layer);
  }
  options.m = parse_tokens(take_flag(argc, argv, "m", "full"));
  const std::string all_impls = join(std::begin(kImpls), std::end(kImpls));
  for (const std::string& name : split(take_flag(argc, argv, "impls", all_impls), ',')) {
    options.impls.push_back(Impl::parse(name));
  }
  for (const std::string& group : split(take_flag(argc, argv, "groups", "128"), ',')) {
    const std::int64_t g = to_number(group);
    if (g != 32 && g != 64 && g != 128 && g != 256) {
      throw std::invalid_argument("a group is of 32, 64, 128 or 256, not " + group);
    }
    options.groups.push_back(g);
  }
  options.heat.rest_ms = std::atof(take_flag(argc, argv, "rest_ms", "10").c_str());
  options.heat.sustain_ms = std::atof(take_flag(argc, argv, "sustain_ms", "0").c_str());
  options.results = take_flag(argc, argv, "results", "");
  options.machine = take_flag(argc, argv, "machine", machine_name(device_name));
  options.commit = take_flag(argc, argv, "commit", binary_gemm_bench_commit);
  return options;
}

// ---- Results ----

std::string key(const Problem& p, const Impl& impl) {
  return std::string(p.layer.name) + "," + std::to_string(p.n()) + "," + std::to_string(p.k()) +
         "," + std::to_string(p.g) + "," + std::to_string(p.m) + "," + impl.name;
}

double tops(const Problem& p, double us) {
  return 2e-6 * static_cast<double>(p.m) * static_cast<double>(p.weights()) / us;
}

// Prints what is measured and keeps it; writes the CSV now and then, so that a run cut short keeps
// what it has.
class Reporter : public benchmark::ConsoleReporter {
 public:
  explicit Reporter(const Options& options) : ConsoleReporter(OO_Tabular), options_(options) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      if (run.run_type == Run::RT_Aggregate) continue;
      const std::string& name = run.run_name.function_name;
      if (run.error_occurred) {
        ++errors_;
        std::fprintf(stderr, "%s: %s\n", name.c_str(), run.error_message.c_str());
        continue;
      }
      if (us_.find(name) == us_.end()) order_.push_back(name);
      us_[name].push_back(run.GetAdjustedRealTime());
      weight_bytes_[name] = run.counters.at("bytes").value;
    }
    const auto now = std::chrono::steady_clock::now();
    if (now - written_ > std::chrono::seconds(10)) {
      write();
      written_ = now;
    }
  }

  /// The median over repetitions, or 0 where nothing was measured.
  double us(const std::string& name) const {
    const auto found = us_.find(name);
    if (found == us_.end()) return 0;
    std::vector<double> sorted = found->second;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

  int errors() const { return errors_; }

  void write() const {
    if (options_.results.empty() || order_.empty()) return;
    std::vector<Row> rows;
    for (const std::string& name : order_) {
      const std::vector<std::string> columns = split(name, ',');
      const double time = us(name);
      const double macs = std::stod(columns[1]) * std::stod(columns[2]) * std::stod(columns[4]);
      char values[96];
      std::snprintf(values, sizeof values, time < 1000 ? "%.3f,%.2f,%.1f," : "%.1f,%.2f,%.1f,",
                    time, 2e-6 * macs / time, 1e-3 * weight_bytes_.at(name) / time);
      rows.push_back({name, values + options_.commit});
    }
    std::filesystem::create_directories(options_.results);
    std::vector<std::string> layers;
    for (const Layer& layer : kLayers) layers.push_back(layer.name);
    merge_results(path(), rows, RowOrder(layers, {std::begin(kImpls), std::end(kImpls)}));
  }

  std::string path() const { return options_.results + "/" + options_.machine + ".csv"; }

 private:
  const Options& options_;
  std::vector<std::string> order_;
  std::map<std::string, std::vector<double>> us_;
  std::map<std::string, double> weight_bytes_;
  int errors_ = 0;
  std::chrono::steady_clock::time_point written_ = std::chrono::steady_clock::now();
};

// A table a layer: times, and what they are against the floor and cuBLAS.
void print_table(const Reporter& results, const Layer& layer, std::int64_t g,
                 const Options& options) {
  const auto time = [&](std::int64_t m, const Impl& impl) {
    return results.us(key(Problem{layer, g, m}, impl));
  };
  std::vector<Impl> columns;  // with a row at least
  for (const Impl& impl : options.impls) {
    if (impl.base == "read_floor" || impl.base == "read_rate") continue;
    const bool any = std::any_of(options.m.begin(), options.m.end(),
                                 [&](std::int64_t m) { return time(m, impl) > 0; });
    if (any) columns.push_back(impl);
  }
  if (columns.empty()) return;
  const double floor = time(1, Impl::parse("read_floor"));
  const Impl cublas = Impl::parse("cublas_bf16");

  std::printf("\n%s: N = %lld, K = %lld, G = %lld; us", layer.name, static_cast<long long>(layer.n),
              static_cast<long long>(layer.k), static_cast<long long>(g));
  if (floor > 0) std::printf(", floor %.2f", floor);
  std::printf(" (ours: x cuBLAS bf16; M = 1: / floor)\n%6s", "M");
  for (const Impl& impl : columns) {
    std::printf("  %*s", std::max(16, static_cast<int>(impl.name.size())), impl.name.c_str());
  }
  std::printf("\n");
  for (const std::int64_t m : options.m) {
    const double peer = time(m, cublas);
    std::string line;
    bool any = false;
    for (const Impl& impl : columns) {
      const double us = time(m, impl);
      any = any || us > 0;
      char text[64] = "-";
      if (us > 0 && impl.ours() && peer > 0) {
        std::snprintf(text, sizeof text, "%.2f (%.2fx)", us, peer / us);
      } else if (us > 0) {
        std::snprintf(text, sizeof text, "%.2f", us);
      }
      std::string cell = text;
      if (us > 0 && impl.ours() && m == 1 && floor > 0) {
        std::snprintf(text, sizeof text, " /%.2f", us / floor);
        cell += text;
      }
      const std::size_t width = std::max<std::size_t>(16, impl.name.size());
      line += "  " + std::string(width > cell.size() ? width - cell.size() : 0, ' ') + cell;
    }
    if (any) std::printf("%6lld%s\n", static_cast<long long>(m), line.c_str());
  }
}

// The worst row of an implementation of ours: against cuBLAS, and against itself at a larger M.
void print_worst(const Reporter& results, const Impl& impl, const Options& options) {
  const Impl cublas = Impl::parse("cublas_bf16");
  double worst_ratio = 1e9;
  double worst_inversion = 0;
  std::string ratio_at;
  std::string inversion_at;
  for (const Layer& layer : options.layers) {
    for (const std::int64_t g : options.groups) {
      double larger_us = 0;  // the least time at any larger M
      for (auto m = options.m.rbegin(); m != options.m.rend(); ++m) {
        const Problem p{layer, g, *m};
        const double us = results.us(key(p, impl));
        if (us <= 0) continue;
        const double peer = results.us(key(p, cublas));
        const std::string at = std::string(layer.name) + ", M = " + std::to_string(*m) +
                               (options.groups.size() > 1 ? ", G = " + std::to_string(g) : "");
        if (peer > 0 && peer / us < worst_ratio) {
          worst_ratio = peer / us;
          ratio_at = at;
        }
        if (larger_us > 0 && us / larger_us > worst_inversion) {
          worst_inversion = us / larger_us;
          inversion_at = at;
        }
        larger_us = larger_us > 0 ? std::min(larger_us, us) : us;
      }
    }
  }
  if (!ratio_at.empty()) {
    std::printf("%s: at worst %.2fx cuBLAS bf16 (%s)", impl.name.c_str(), worst_ratio,
                ratio_at.c_str());
    if (worst_inversion > 1) {
      std::printf("; %.2f times the time of a larger M (%s)", worst_inversion,
                  inversion_at.c_str());
    }
    std::printf("\n");
  }
}

// ---- Measuring ----

void report(benchmark::State& state, const Problem& p, const Timing& best,
            std::int64_t weight_bytes, const std::string& label) {
  for (auto _ : state) state.SetIterationTime(1e-6 * best.us);
  state.SetLabel(label);
  state.counters["tops"] = tops(p, best.us);
  state.counters["gbps"] = 1e-3 * static_cast<double>(weight_bytes) / best.us;
  state.counters["spread%"] = 100 * (best.max_us - best.min_us) / best.us;
  state.counters["MHz"] = best.mhz;
  state.counters["bytes"] = static_cast<double>(weight_bytes);
}

void measure(benchmark::State& state, const Impl& impl, const Problem& p, Operands& operands,
             Timer& timer, const Heat& heat) {
  Timing best;
  std::string label;
  std::int64_t weight_bytes = 0;
  try {
    const std::vector<Case> cases = make_cases(impl, p, operands);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      std::string wrong = verify(impl, p, operands, cases[i], timer.stream());
      if (!wrong.empty()) throw std::runtime_error(wrong);
      // As many launches for dense weights, which are larger, as for packed ones: so all heat the
      // card alike.
      const Timing timing = timer.time(cases[i].launch, p.packed_bytes(), heat);
      // The last launch of the last replay: the graph's results are right too.
      wrong = Samples(impl, p, operands).compare(timing.launches - 1);
      if (!wrong.empty()) throw std::runtime_error("in the graph: " + wrong);
      if (i == 0 || timing.us < best.us) {
        best = timing;
        if (impl.base == "read_floor") label = kReadFloors[i].name;
      }
      weight_bytes = cases[i].weight_bytes;
    }
    if (impl.ours()) {
      label =
          binary_gemm::cuda::name(impl.kernel != binary_gemm::cuda::Kernel::kAuto
                                      ? impl.kernel
                                      : binary_gemm::cuda::choose_kernel(p.m, p.n(), p.k(), p.g));
    }
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
    return;
  }
  report(state, p, best, weight_bytes, label);
}

// The chain, made when it is first measured: its weights take three gigabytes, and dense 46.
class LazyChain {
 public:
  explicit LazyChain(std::int64_t max_m) : max_m_(max_m) {}
  Chain& get(std::int64_t g) {
    if (chain_ != nullptr && chain_->g() != g) chain_.reset();
    if (chain_ == nullptr) chain_ = std::make_unique<Chain>(g, max_m_);
    return *chain_;
  }

 private:
  std::int64_t max_m_;
  std::unique_ptr<Chain> chain_;
};

void measure_chain(benchmark::State& state, const Impl& impl, const Problem& p, LazyChain& lazy,
                   Timer& timer, const Heat& heat) {
  Timing best;
  std::string label;
  std::int64_t weight_bytes = 0;
  try {
    Chain& chain = lazy.get(p.g);
    const std::vector<Case> cases = chain.make_cases(impl, p.m);
    const std::string wrong = chain.verify(impl, p.m, timer.stream());
    if (!wrong.empty()) throw std::runtime_error(wrong);
    label = chain.label(impl);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const Timing timing = timer.time(cases[i].launch, p.packed_bytes(), heat);
      if (i == 0 || timing.us < best.us) {
        best = timing;
        if (cases.size() > 1) label = kReadFloors[i].name;
      }
      weight_bytes = cases[i].weight_bytes;
    }
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
    return;
  }
  report(state, p, best, weight_bytes, label);
}

// Tokens a second, and what is asked of the chain: its time against cuBLAS's and against that of
// its bytes at the best read rate of the run.
void print_chain(const Reporter& results, std::int64_t g, const Options& options) {
  const Layer& layer = kLayers[std::size(kLayers) - 1];
  const double floor = results.us(key(Problem{layer, g, 1}, Impl::parse("read_floor")));
  const double rate = results.us(key(Problem{layer, g, 1}, Impl::parse("read_rate")));
  for (const std::int64_t m : options.m) {
    const Problem p{layer, g, m};
    const double peer = results.us(key(p, Impl::parse("cublas_bf16")));
    for (const Impl& impl : options.impls) {
      const double us = results.us(key(p, impl));
      if (us <= 0 || !impl.ours()) continue;
      std::printf(
          "chain64, G = %lld, M = %lld, %s: %.1f us a token, %.0f tokens a second, %.2f us a layer",
          static_cast<long long>(g), static_cast<long long>(m), impl.name.c_str(), us,
          1e6 / us * static_cast<double>(m), us / static_cast<double>(kChainSizes.layers));
      if (peer > 0)
        std::printf("; %.2fx cuBLAS bf16 (%.2f us a layer)", peer / us,
                    peer / static_cast<double>(kChainSizes.layers));
      if (rate > 0) std::printf("; %.1f%% of the read rate", 100 * rate / us);
      if (floor > 0) std::printf("; %.2f of a kernel a product that only reads", us / floor);
      std::printf("\n");
    }
  }
}

int run(int argc, char** argv) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    throw std::runtime_error("no CUDA device; binary_gemm_cpu_bench measures the CPU");
  }
  int device = 0;
  cudaDeviceProp properties;
  BENCH_CHECK(cudaGetDevice(&device));
  BENCH_CHECK(cudaGetDeviceProperties(&properties, device));
  const Options options = parse_options(argc, argv, properties.name);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  binary_gemm::cuda::prepare(device);

  std::vector<std::pair<Problem, Impl>> measurements;
  std::vector<Problem> problems;
  for (const Layer& layer : options.layers) {
    for (const std::int64_t g : options.groups) {
      for (const std::int64_t m : options.m) {
        const Problem p{layer, g, m};
        for (const Impl& impl : options.impls) {
          if (impl.takes(p)) measurements.emplace_back(p, impl);
        }
        if (m <= layer.max_m && !p.chain()) problems.push_back(p);
      }
    }
  }
  if (measurements.empty()) throw std::invalid_argument("nothing to measure with these flags");
  // Small products first: after a large one the power limit holds the clock down for a while (1.44
  // GHz, not 1.97, cost gate at M = 1 a third; QKV at M = 256 took 27.4 us after an LM head of 192
  // tokens, 22.0 after smaller ones).
  std::stable_sort(measurements.begin(), measurements.end(), [](const auto& a, const auto& b) {
    return a.first.m * a.first.weights() < b.first.m * b.first.weights();
  });

  Operands operands(problems);
  Timer timer;
  LazyChain chain(kLayers[std::size(kLayers) - 1].max_m);
  for (const auto& measurement : measurements) {
    const Problem& p = measurement.first;
    const Impl& impl = measurement.second;
    benchmark::RegisterBenchmark(key(p, impl).c_str(),
                                 [&, p, impl](benchmark::State& state) {
                                   if (p.chain()) {
                                     measure_chain(state, impl, p, chain, timer, options.heat);
                                   } else {
                                     measure(state, impl, p, operands, timer, options.heat);
                                   }
                                 })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(1);  // which is the median of all replays
  }
  std::printf("%s, %d SMs, %.1f MiB L2, commit %s\n", properties.name,
              properties.multiProcessorCount, properties.l2CacheSize / 1048576.0,
              options.commit.c_str());

  Reporter reporter(options);
  benchmark::RunSpecifiedBenchmarks(&reporter);
  reporter.write();
  for (const std::int64_t g : options.groups) {
    for (const Layer& layer : options.layers) print_table(reporter, layer, g, options);
  }
  std::printf("\n");
  for (const std::int64_t g : options.groups) print_chain(reporter, g, options);
  std::printf("\n");
  for (const Impl& impl : options.impls) {
    if (impl.ours()) print_worst(reporter, impl, options);
  }
  if (!options.results.empty()) std::printf("results are in %s\n", reporter.path().c_str());
  if (reporter.errors() > 0) {
    std::fprintf(stderr, "%d measurements failed\n", reporter.errors());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--help") {
      std::fputs(kHelp, stdout);
      return 0;
    }
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "binary_gemm_bench: %s\n", error.what());
    return 2;
  }
}
