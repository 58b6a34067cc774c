/// binary_gemm_tensor_parallel: two layers over all GPUs of this machine, with NCCL.
///
/// The first layer is sharded by rows (outputs): each GPU computes its part of h, and nothing is
/// exchanged. The second is sharded by columns (inputs): each GPU multiplies its part of h by its
/// columns, and one all-reduce adds up the partial sums. This is how an MLP, or the attention with
/// its output, is cut; what lies between, left out here, works on each part by itself.
///
/// Every shard is a view of the host's weights, and what each GPU computed is compared with the
/// CPU: bit for bit, and the sums within the rounding of fp32.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/cuda.h"

namespace {

using binary_gemm::aligned_vector;
using binary_gemm::bfloat16;
using binary_gemm::BiasView;
using binary_gemm::float16;
using binary_gemm::matrix_view;
using binary_gemm::WeightView;
namespace cpu = binary_gemm::cpu;
namespace cuda = binary_gemm::cuda;

constexpr std::int64_t kTokens = 4;
constexpr std::int64_t kModel = 2048;   // inputs of the first layer, outputs of the second
constexpr std::int64_t kHidden = 8192;  // what lies between
constexpr std::int64_t kGroup = 128;
constexpr int kSkipped = 77;  // the exit status where there is no GPU

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
  }
}

void check(ncclResult_t code, const char* call) {
  if (code != ncclSuccess) {
    throw std::runtime_error(std::string(call) + ": " + ncclGetErrorString(code));
  }
}
#define CHECK(call) check((call), #call)

// Elements as a size.
std::size_t count_of(std::int64_t elements) { return static_cast<std::size_t>(elements); }

// ---- The host ----

struct Weights {
  Weights(std::int64_t outputs, std::int64_t inputs, std::mt19937& random)
      : n(outputs), k(inputs), bits(count_of(n * k / 32)), scales(count_of(n * k / kGroup)) {
    std::uniform_real_distribution<float> scale(0.01f, 0.02f);
    for (std::uint32_t& word : bits) word = static_cast<std::uint32_t>(random());
    for (float16& s : scales) s = binary_gemm::to_float16(scale(random));
  }
  WeightView view() const {
    return binary_gemm::weight_view(bits.data(), scales.data(), n, k, kGroup);
  }

  std::int64_t n;
  std::int64_t k;
  aligned_vector<std::uint32_t> bits;
  aligned_vector<float16> scales;
};

struct Range {
  std::int64_t begin;
  std::int64_t count;
};

// The hidden units of a GPU: a multiple of the group size, and where it divides, of 1024, which
// leaves the slices of the sum as they are without shards.
Range hidden_of(int rank, int ranks) {
  const std::int64_t step =
      kHidden % (ranks * binary_gemm::kSliceK) == 0 ? binary_gemm::kSliceK : kGroup;
  const std::int64_t steps = kHidden / step;
  const std::int64_t begin = steps * rank / ranks * step;
  return {begin, steps * (rank + 1) / ranks * step - begin};
}

// ---- The GPUs ----

// `T data[count]` on the current device.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::int64_t count) : bytes_(count_of(count) * sizeof(T)) {
    CHECK(cudaMalloc(&data_, bytes_));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  std::size_t bytes() const { return bytes_; }
  aligned_vector<T> fetch() const {
    aligned_vector<T> host(bytes_ / sizeof(T));
    CHECK(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// What one GPU has: its shards, as layers of their own, and its memory. Made while it is current.
struct Rank {
  Rank(const Weights& first, const Weights& second, const Range& part)
      : hidden(part),
        up(cuda::BinaryLinear::from_packed(first.view().row_range(part.begin, part.count))),
        down(cuda::BinaryLinear::from_packed(second.view().column_range(part.begin, part.count))),
        x(kTokens * kModel),
        h(kTokens * part.count),
        partial(kTokens * kModel),
        sum(kTokens * kModel),
        workspace(static_cast<std::int64_t>(
            cuda::linear_workspace_bytes(kTokens, std::max(kModel, part.count)))) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda::prepare();
  }
  ~Rank() { cudaStreamDestroy(stream); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Queues both layers. The output of the second is fp32, as it is to be added to others.
  void run() const {
    const cuda::Launch launch{stream, {workspace.data(), workspace.bytes()}};
    const auto h_view = matrix_view(h.data(), kTokens, hidden.count);
    up(matrix_view(x.data(), kTokens, kModel), h_view, launch);
    down(h_view, matrix_view(partial.data(), kTokens, kModel), launch);
  }

  Range hidden;
  cudaStream_t stream = nullptr;
  cuda::BinaryLinear up;
  cuda::BinaryLinear down;
  DeviceArray<bfloat16> x, h;
  DeviceArray<float> partial, sum;
  DeviceArray<unsigned char> workspace;
};

// One communicator a GPU.
class Communicators {
 public:
  explicit Communicators(int ranks) : all_(static_cast<std::size_t>(ranks)) {
    CHECK(ncclCommInitAll(all_.data(), ranks, nullptr));  // devices 0, 1, ...
  }
  ~Communicators() {
    for (ncclComm_t communicator : all_) ncclCommDestroy(communicator);
  }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;
  ncclComm_t operator[](std::size_t rank) const { return all_[rank]; }

 private:
  std::vector<ncclComm_t> all_;
};

template <class T>
bool equal_bits(const aligned_vector<T>& a, const aligned_vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Runs the layers over `ranks` GPUs and prints what came out; whether all of it is right.
bool run(int ranks) {
  std::mt19937 random(1);
  const Weights first(kHidden, kModel, random);
  const Weights second(kModel, kHidden, random);
  std::normal_distribution<float> gaussian;
  aligned_vector<bfloat16> x(count_of(kTokens * kModel));
  for (bfloat16& value : x) value = binary_gemm::to_bfloat16(gaussian(random));

  std::vector<std::unique_ptr<Rank>> all;
  for (int device = 0; device < ranks; ++device) {
    CHECK(cudaSetDevice(device));
    all.push_back(std::make_unique<Rank>(first, second, hidden_of(device, ranks)));
    const Rank& rank = *all.back();
    CHECK(cudaMemcpyAsync(rank.x.data(), x.data(), rank.x.bytes(), cudaMemcpyHostToDevice,
                          rank.stream));
  }
  const Communicators communicators(ranks);

  // One thread queues the work of all GPUs. A call of the library goes where its operands are.
  for (const auto& rank : all) rank->run();
  CHECK(ncclGroupStart());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Rank& rank = *all[i];
    CHECK(ncclAllReduce(rank.partial.data(), rank.sum.data(), count_of(kTokens * kModel), ncclFloat,
                        ncclSum, communicators[i], rank.stream));
  }
  CHECK(ncclGroupEnd());
  for (const auto& rank : all) CHECK(cudaStreamSynchronize(rank->stream));

  // The same on the CPU. The second layer quantizes the part of h that a GPU has, so its partial
  // sum is that of the part, and not a part of the whole's.
  bool good = true;
  std::vector<double> exact(count_of(kTokens * kModel), 0);
  std::vector<double> magnitude(exact.size(), 0);
  const auto x_view = matrix_view(x.data(), kTokens, kModel);
  aligned_vector<bfloat16> h(count_of(kTokens * kHidden));
  const auto h_view = matrix_view(h.data(), kTokens, kHidden);
  cpu::binary_linear(x_view, first.view(), BiasView{}, h_view);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Rank& rank = *all[i];
    const Range& part = rank.hidden;
    aligned_vector<bfloat16> own(count_of(kTokens * part.count));
    for (std::int64_t m = 0; m < kTokens; ++m) {
      std::copy_n(h.data() + m * kHidden + part.begin, part.count, own.data() + m * part.count);
    }
    aligned_vector<float> partial(count_of(kTokens * kModel));
    cpu::binary_linear(h_view.column_range(part.begin, part.count),
                       second.view().column_range(part.begin, part.count), BiasView{},
                       matrix_view(partial.data(), kTokens, kModel));
    for (std::size_t j = 0; j < partial.size(); ++j) {
      exact[j] += partial[j];
      magnitude[j] += std::abs(partial[j]);
    }
    const bool rows = equal_bits(rank.h.fetch(), own);
    const bool columns = equal_bits(rank.partial.fetch(), partial);
    const long long begin = part.begin, end = part.begin + part.count;
    std::printf("GPU %zu: hidden units %lld to %lld, rows %s, columns %s\n", i, begin, end,
                rows ? "equal" : "DIFFER", columns ? "equal" : "DIFFER");
    good = good && rows && columns;
  }

  // In whatever order it adds, each of the additions rounds by at most 2^-24 of the magnitudes; one
  // more covers the product of the roundings.
  const double limit = std::ldexp(static_cast<double>(ranks), -24);
  double worst = 0;
  const aligned_vector<float> sum = all[0]->sum.fetch();
  for (std::size_t j = 0; j < sum.size(); ++j) {
    const double error = std::abs(sum[j] - exact[j]);
    const bool within = error <= limit * magnitude[j];  // false for a NaN
    good = good && within;
    if (magnitude[j] > 0) worst = std::max(worst, error / magnitude[j]);
  }
  bool same = true;
  for (const auto& rank : all) same = same && equal_bits(rank->sum.fetch(), sum);
  std::printf("all-reduce: error %.2g of the magnitudes, at most %.2g allowed; %s on all GPUs\n",
              worst, limit, same ? "equal" : "DIFFERENT");
  return good && same;
}

}  // namespace

int main() {
  try {
    int ranks = 0;
    if (cudaGetDeviceCount(&ranks) != cudaSuccess || ranks == 0) {
      std::puts("no usable GPU");
      return kSkipped;
    }
    std::printf("%d GPU%s, %lld tokens, %lld -> %lld -> %lld\n", ranks, ranks == 1 ? "" : "s",
                static_cast<long long>(kTokens), static_cast<long long>(kModel),
                static_cast<long long>(kHidden), static_cast<long long>(kModel));
    const bool good = run(ranks);
    std::puts(good ? "all is well" : "WRONG");
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
