/// The CPU's products, and the floor that memory sets: bench/results/cpu-<model>.csv.
///
///   binary_gemm_cpu_bench --csv=bench/results/cpu-xeon.csv --commit=$(git rev-parse --short HEAD)
///
/// Every measurement takes the next of several weights that fill a gigabyte together, so that none
/// is found in a cache (unless the machine has a larger one). Repetitions are interleaved at
/// random; the CSV has the median repetition's mean time, one row a measurement,
/// `layer,N,K,G,M,impl,us,tops,gbps,commit`. Google Benchmark's own flags work too.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "results.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using namespace binary_gemm;

constexpr std::int64_t kGroupSize = 128;
constexpr std::int64_t kPoolWeights = std::int64_t{1} << 33;  // 1 GiB of bits

struct Layer {
  const char* name;
  std::int64_t n;
  std::int64_t k;
};

constexpr Layer kLayers[] = {{"out", 5120, 5120}, {"gate", 17408, 5120}, {"down", 5120, 17408}};
constexpr std::int64_t kTokens[] = {1, 2, 4, 8, 16, 64, 256};

std::uint64_t next_random() {
  static std::uint64_t state = 0x9e3779b97f4a7c15u;  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// Random bits, and scales that make every slice narrow, as those of trained models nearly all are.
struct Pool {
  aligned_vector<std::uint32_t> bits;
  aligned_vector<float16> scales;

  Pool() : bits(kPoolWeights / 32), scales(kPoolWeights / kGroupSize) {
    for (std::size_t i = 0; i + 1 < bits.size(); i += 2) {
      const std::uint64_t random = next_random();
      std::memcpy(&bits[i], &random, sizeof random);
    }
    for (float16& scale : scales) {
      scale.bits = static_cast<std::uint16_t>(0x2000 + next_random() % 0x800);
    }
  }
};

const Pool& pool() {
  static const Pool instance;
  return instance;
}

WeightView weights(const Layer& layer, std::int64_t index) {
  const std::int64_t copies = kPoolWeights / (layer.n * layer.k);
  WeightView w =
      weight_view(pool().bits.data(), pool().scales.data(), layer.n, layer.k, kGroupSize);
  w.bits_offset = index % copies * layer.n * w.bits_stride;
  w.scales_offset = index % copies * layer.n * w.scales_stride;
  return w;
}

std::int64_t weight_bytes(const Layer& layer) {
  return layer.n * layer.k / 8 + layer.n * layer.k / kGroupSize * std::int64_t{sizeof(float16)};
}

void count(benchmark::State& state, const Layer& layer, std::int64_t m) {
  using benchmark::Counter;
  const auto rate = [](double amount) {
    return Counter(amount, Counter::kIsIterationInvariantRate);
  };
  state.counters["tops"] =
      rate(2e-12 * static_cast<double>(m) * static_cast<double>(layer.n * layer.k));
  state.counters["gbps"] = rate(1e-9 * static_cast<double>(weight_bytes(layer)));
}

void product(benchmark::State& state, const Layer& layer, std::int64_t m, cpu::Path path,
             int threads) {
  aligned_vector<std::int8_t> q(static_cast<std::size_t>(m * layer.k));
  aligned_vector<float> q_scales(static_cast<std::size_t>(m), 1.0f / 127);
  aligned_vector<bfloat16> y(static_cast<std::size_t>(m * layer.n));
  for (std::int8_t& value : q) value = static_cast<std::int8_t>(next_random() % 255);
  cpu::Execution execution;
  execution.path = path;
  execution.threads = threads;
  static std::int64_t index = 0;
  for (auto _ : state) {
    cpu::binary_gemm(activation_view(q.data(), q_scales.data(), m, layer.k),
                     weights(layer, index++), {}, matrix_view(y.data(), m, layer.n), execution);
  }
  count(state, layer, m);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define READ_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define READ_CLONES
#endif

// The sum of `bytes` bytes as 64-bit words: a loop that compilers vectorize.
READ_CLONES std::uint64_t read(const void* data, std::int64_t bytes) {
  const auto* words = static_cast<const std::uint64_t*>(data);
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < bytes / 8; ++i) sum += words[i];
  return sum;
}

void read_floor(benchmark::State& state, const Layer& layer, int threads) {
  static std::int64_t index = 0;
  for (auto _ : state) {
    const WeightView w = weights(layer, index++);
    std::uint64_t sum = 0;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
#endif
    for (int part = 0; part < threads; ++part) {
      const std::int64_t begin = w.n * part / threads;
      const std::int64_t rows = w.n * (part + 1) / threads - begin;
      sum += read(w.bits + w.bits_offset + begin * w.bits_stride, rows * w.bits_stride * 4);
      sum += read(w.scales + w.scales_offset + begin * w.scales_stride, rows * w.scales_stride * 2);
    }
    benchmark::DoNotOptimize(sum);
  }
  count(state, layer, 1);
}

// Rows of the CSV by benchmark name, in the order of registration.
std::vector<std::pair<std::string, std::string>> rows;

// Console output, and a row of each median.
class Reporter : public benchmark::ConsoleReporter {
 public:
  Reporter() : ConsoleReporter(OO_Tabular) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Aggregate || run.aggregate_name != "median") continue;
      for (auto& row : rows) {
        if (row.first != run.run_name.function_name) continue;
        char text[64];
        std::snprintf(text, sizeof text, "%.2f,%.3f,%.2f", run.GetAdjustedRealTime(),
                      run.counters.at("tops").value, run.counters.at("gbps").value);
        row.second = text;
      }
    }
  }
};

// Registers a benchmark whose name is the row's first six columns.
void add(const Layer& layer, std::int64_t m, const std::string& impl,
         const std::function<void(benchmark::State&)>& run) {
  const std::string name = std::string(layer.name) + "," + std::to_string(layer.n) + "," +
                           std::to_string(layer.k) + "," + std::to_string(kGroupSize) + "," +
                           std::to_string(m) + "," + impl;
  rows.emplace_back(name, "");
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(m == 1 ? 0.1 : 0.02)
      ->Repetitions(9)
      ->ReportAggregatesOnly();
}

bool write_csv(const std::string& path, const std::string& commit) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  std::fprintf(file, "layer,N,K,G,M,impl,us,tops,gbps,commit\n");
  for (const auto& row : rows) {
    if (row.second.empty()) continue;  // filtered out
    std::fprintf(file, "%s,%s,%s\n", row.first.c_str(), row.second.c_str(), commit.c_str());
  }
  return std::fclose(file) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string csv = bench::take_flag(argc, argv, "csv", "");
  const std::string commit = bench::take_flag(argc, argv, "commit", "");
  std::vector<char*> arguments(argv, argv + argc);
  std::string interleave = "--benchmark_enable_random_interleaving=true";
  arguments.insert(arguments.begin() + 1, interleave.data());
  int count_of_arguments = static_cast<int>(arguments.size());
  benchmark::Initialize(&count_of_arguments, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count_of_arguments, arguments.data())) return 1;

  std::vector<int> thread_counts = {1};
#ifdef _OPENMP
  if (omp_get_max_threads() > 1) thread_counts.push_back(omp_get_max_threads());
#endif
  for (const Layer& layer : kLayers) {
    for (const int threads : thread_counts) {
      const std::string suffix = ":t" + std::to_string(threads);
      add(layer, 1, "read_floor" + suffix,
          [layer, threads](benchmark::State& state) { read_floor(state, layer, threads); });
      for (const std::int64_t m : kTokens) {
        for (const cpu::Path path : cpu::supported_paths()) {
          // The portable path is here to be right; its large batches take seconds.
          if (path == cpu::Path::kPortable && m > 8) continue;
          add(layer, m, std::string("binary_gemm:") + cpu::name(path) + suffix,
              [layer, m, path, threads](benchmark::State& state) {
                product(state, layer, m, path, threads);
              });
        }
      }
    }
  }
  pool();
  Reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  if (!csv.empty() && !write_csv(csv, commit.empty() ? "unknown" : commit)) {
    std::fprintf(stderr, "cannot write %s\n", csv.c_str());
    return 1;
  }
  return 0;
}
