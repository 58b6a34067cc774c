#pragma once

/// CUDA for the benchmark: checked calls, owned memory and events, random data, graph replays.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace bench {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}
#define BENCH_CHECK(call) ::bench::check(call, #call)

/// Device memory.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes) : bytes_(bytes) {
    BENCH_CHECK(cudaMalloc(&data_, static_cast<std::size_t>(bytes)));
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  template <class T>
  T* as(std::int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + byte_offset);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// ---- Random data
// ---------------------------------------------------------------------------------

__host__ __device__ inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;  // splitmix64
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/// -510 to 510, nearly normal with a deviation of 148.
__device__ inline int random_normal(std::uint64_t seed, std::uint64_t index) {
  const auto bits = static_cast<std::uint32_t>(random_bits(seed, index));
  return static_cast<int>(__dp4a(bits, 0x01010101u, 0u)) - 510;
}

// What a buffer is filled with. fp16 scales lie in two binades, so that every slice is narrow, as
// nearly all those of trained models are. Values are nearly normal, because how often bits toggle
// is power, and power is speed where the tensor cores are busy.
struct RandomBits {
  using Type = std::uint64_t;
  static __device__ Type get(std::uint64_t seed, std::uint64_t i) { return random_bits(seed, i); }
};
struct RandomWeightScale {
  using Type = std::uint16_t;
  static __device__ Type get(std::uint64_t seed, std::uint64_t i) {
    return static_cast<Type>(0x2000u + random_bits(seed, i) % 0x800u);
  }
};
struct RandomTokenScale {
  using Type = float;
  static __device__ Type get(std::uint64_t seed, std::uint64_t i) {
    return static_cast<float>(random_bits(seed, i) % 1024 + 512) * 0x1p-17f;
  }
};
struct RandomInt8 {
  using Type = std::int8_t;
  static __device__ Type get(std::uint64_t seed, std::uint64_t i) {
    return static_cast<Type>(random_normal(seed, i) / 4);
  }
};
struct RandomBFloat16 {
  using Type = __nv_bfloat16;
  static __device__ Type get(std::uint64_t seed, std::uint64_t i) {
    return __float2bfloat16(static_cast<float>(random_normal(seed, i)) * 0x1p-8f);
  }
};

template <class Random>
__global__ void fill_kernel(typename Random::Type* data, std::int64_t count, std::uint64_t seed) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    data[i] = Random::get(seed, static_cast<std::uint64_t>(i));
  }
}

template <class Random>
void fill(typename Random::Type* data, std::int64_t count, std::uint64_t seed) {
  if (count == 0) return;
  fill_kernel<Random><<<4096, 256>>>(data, count, seed);
  BENCH_CHECK(cudaGetLastError());
  BENCH_CHECK(cudaDeviceSynchronize());
}

/// A buffer of `count` random elements.
template <class Random>
Buffer random_buffer(std::int64_t count, std::uint64_t seed) {
  Buffer buffer(count * static_cast<std::int64_t>(sizeof(typename Random::Type)));
  fill<Random>(buffer.as<typename Random::Type>(), count, seed);
  return buffer;
}

// ---- Timing
// --------------------------------------------------------------------------------------

/// Cycles and nanoseconds of one SM over about 50 us: the clock that it runs at.
__global__ void clock_kernel(std::uint64_t* out) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  const long long cycles = clock64();
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < 50000);
  out[0] = static_cast<std::uint64_t>(clock64() - cycles);
  out[1] = now - begin;
}

/// Launches number `index` of a row of them; where there are several weights, it takes the next.
using LaunchFunction = std::function<void(std::int64_t index, cudaStream_t stream)>;

struct Timing {
  double us = 0;  ///< Median over the replays, of one launch.
  double min_us = 0;
  double max_us = 0;
  double mhz = 0;             ///< SM clock just after the last replay.
  std::int64_t launches = 0;  ///< In the graph.
};

/// What goes before the timed replays of a measurement, ms.
struct Heat {
  double rest_ms = 0;     ///< Idle, at least, so that the clock does not suffer for the one before.
  double sustain_ms = 0;  ///< Replays, at least, so that it settles at what the power limit allows.
};

/// Times launches back to back in a graph.
class Timer {
 public:
  static constexpr int kReplays = 15;

  Timer() {
    BENCH_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) BENCH_CHECK(cudaEventCreate(&event));
    int device = 0;
    int l2_bytes = 0;
    BENCH_CHECK(cudaGetDevice(&device));
    BENCH_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
    l2_bytes_ = l2_bytes;
    clock_ = Buffer(2 * sizeof(std::uint64_t));
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }

  cudaStream_t stream() const { return stream_; }

  /// `weight_bytes`: what one launch reads of its weights, at least.
  Timing time(const LaunchFunction& launch, std::int64_t weight_bytes, const Heat& heat) {
    const double guess_us = guess(launch);
    Graph graph(launch, launches(guess_us, weight_bytes), stream_);
    // A long measurement is rested from for longer: the power limit looks back that far.
    const double rest_ms = heat.rest_ms > 0 ? std::max(heat.rest_ms, busy_ms_ / 2) : 0;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(rest_ms));
    // Long replays are few: their spread is small.
    const double replay_ms = 1e-3 * guess_us * static_cast<double>(graph.launches);
    const int replays = std::clamp(static_cast<int>(200 / replay_ms), 5, kReplays);
    const int warm_up =
        std::max(replay_ms > 20 ? 1 : 3, static_cast<int>(heat.sustain_ms / replay_ms));
    // All are enqueued before the first is done, so that no replay waits for the host.
    for (int i = 0; i < warm_up; ++i) graph.replay(stream_);
    for (int i = 0; i < replays; ++i) {
      BENCH_CHECK(cudaEventRecord(events_[2 * i], stream_));
      graph.replay(stream_);
      BENCH_CHECK(cudaEventRecord(events_[2 * i + 1], stream_));
    }
    clock_kernel<<<1, 1, 0, stream_>>>(clock_.as<std::uint64_t>());
    BENCH_CHECK(cudaGetLastError());
    BENCH_CHECK(cudaStreamSynchronize(stream_));

    std::vector<double> us;
    for (int i = 0; i < replays; ++i) {
      us.push_back(1e3 * elapsed_ms(2 * i, 2 * i + 1) / static_cast<double>(graph.launches));
    }
    busy_ms_ = elapsed_ms(0, 2 * replays - 1);
    std::sort(us.begin(), us.end());
    std::uint64_t clock[2];
    BENCH_CHECK(cudaMemcpy(clock, clock_.as<void>(), sizeof clock, cudaMemcpyDeviceToHost));
    Timing timing;
    timing.us = us[us.size() / 2];
    timing.min_us = us.front();
    timing.max_us = us.back();
    timing.mhz = 1e3 * static_cast<double>(clock[0]) / static_cast<double>(clock[1]);
    timing.launches = graph.launches;
    return timing;
  }

 private:
  struct Graph {
    std::int64_t launches;
    cudaGraphExec_t exec = nullptr;

    Graph(const LaunchFunction& launch, std::int64_t count, cudaStream_t stream) : launches(count) {
      cudaGraph_t graph = nullptr;
      BENCH_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      try {
        for (std::int64_t i = 0; i < count; ++i) launch(i, stream);
      } catch (...) {
        cudaStreamEndCapture(stream, &graph);  // so that the stream is usable for the next row
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
        throw;
      }
      BENCH_CHECK(cudaStreamEndCapture(stream, &graph));
      const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
      cudaGraphDestroy(graph);
      check(status, "cudaGraphInstantiate");
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() { cudaGraphExecDestroy(exec); }

    void replay(cudaStream_t stream) const { BENCH_CHECK(cudaGraphLaunch(exec, stream)); }
  };

  double elapsed_ms(int begin, int end) const {
    float ms = 0;
    BENCH_CHECK(cudaEventElapsedTime(&ms, events_[begin], events_[end]));
    return ms;
  }

  // About what one launch takes; no less than what launching it from the host does.
  double guess(const LaunchFunction& launch) {
    constexpr std::int64_t kLaunches = 4;
    launch(0, stream_);  // what happens at a first call happens here
    BENCH_CHECK(cudaStreamSynchronize(stream_));
    BENCH_CHECK(cudaEventRecord(events_[0], stream_));
    for (std::int64_t i = 0; i < kLaunches; ++i) launch(i, stream_);
    BENCH_CHECK(cudaEventRecord(events_[1], stream_));
    BENCH_CHECK(cudaStreamSynchronize(stream_));
    return std::max(1.0, 1e3 * elapsed_ms(0, 1) / kLaunches);
  }

  // Enough for a replay of a millisecond, and so many that no weight is found in L2: a gigabyte of
  // them if that takes not much longer, and always twice L2.
  std::int64_t launches(double guess_us, std::int64_t weight_bytes) const {
    const auto up = [](double value) { return static_cast<std::int64_t>(std::ceil(value)); };
    const double per_launch = static_cast<double>(weight_bytes);
    const std::int64_t of_a_gigabyte = up(0x1p30 / per_launch);
    const std::int64_t of_twice_l2 = up(2.0 * static_cast<double>(l2_bytes_) / per_launch);
    const bool quick = guess_us * static_cast<double>(of_a_gigabyte) < 4000;
    return std::max({up(1000 / guess_us), of_twice_l2, quick ? of_a_gigabyte : std::int64_t{2}});
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[2 * kReplays] = {};
  std::int64_t l2_bytes_ = 0;
  double busy_ms_ = 0;  // with the last measurement
  Buffer clock_;
};

}  // namespace bench
