#pragma once

/// Whether what is measured computes the product: sampled outputs against the reference.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/aligned_vector.h"
#include "binary_gemm/reference.h"
#include "cases.cuh"
#include "support.cuh"

namespace bench {

template <class T>
binary_gemm::aligned_vector<T> fetch(const T* device, std::int64_t count) {
  binary_gemm::aligned_vector<T> host(static_cast<std::size_t>(count));
  BENCH_CHECK(cudaMemcpy(host.data(), device, static_cast<std::size_t>(count) * sizeof(T),
                         cudaMemcpyDeviceToHost));
  return host;
}

/// Rows `indices` of a device matrix of `cols` columns, one behind the other.
template <class T>
binary_gemm::aligned_vector<T> fetch_rows(const T* device, std::int64_t cols,
                                          const std::vector<std::int64_t>& indices) {
  binary_gemm::aligned_vector<T> rows;
  for (const std::int64_t index : indices) {
    const auto row = fetch(device + index * cols, cols);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

__global__ void count_poison_kernel(const std::uint16_t* y, std::int64_t count,
                                    unsigned long long* found) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    if (y[i] == 0xffffu) atomicAdd(found, 1ull);
  }
}

/// Outputs at sampled tokens and rows, and what they should be.
class Samples {
 public:
  Samples(const Impl& impl, const Problem& p, Operands& operands)
      : impl_(impl), p_(p), operands_(operands) {
    const std::int64_t last = p.n() - 1;
    rows_ = {0, 31, p.n() / 3, p.n() / 2 + 1, last - 32, last};
    tokens_ = {0};
    if (p.m > 2) tokens_.push_back(p.m / 2);
    if (p.m > 1) tokens_.push_back(p.m - 1);
  }

  /// Compares the outputs that lie in y, of the product with weights `index`. Returns what is
  /// wrong, or nothing.
  std::string compare(std::int64_t index) const {
    if (impl_.base == "read_floor") return {};
    if (impl_.base == "cublaslt_int8") return compare_int8(index);
    const std::vector<float> expected =
        impl_.base == "cublas_bf16" ? expected_dense(index) : expected_packed(index);
    // cuBLAS and the baseline sum in an order of their own and round to bf16 too. The library's
    // own results are the reference's, bit for bit.
    double squares = 0;
    for (const float value : expected) squares += double{value} * value;
    const double norm = std::sqrt(squares / static_cast<double>(expected.size()));
    const double tolerance = impl_.ours() ? 0 : 0x1p-7 * norm;
    for (std::size_t t = 0; t < tokens_.size(); ++t) {
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        const bfloat16 got = fetch(operands_.y<bfloat16>() + tokens_[t] * p_.n() + rows_[r], 1)[0];
        const float want = expected[t * rows_.size() + r];
        const double allowed = tolerance + (impl_.ours() ? 0 : 0x1p-8 * std::fabs(want));
        const double error = std::fabs(double{binary_gemm::to_float(got)} - want);
        if (!(error <= allowed)) return difference(t, r, binary_gemm::to_float(got), want);
      }
    }
    return {};
  }

 private:
  std::string difference(std::size_t t, std::size_t r, double got, double want) const {
    char text[160];
    std::snprintf(text, sizeof text, "wrong: y[%lld, %lld] = %.9g, expected %.9g",
                  static_cast<long long>(tokens_[t]), static_cast<long long>(rows_[r]), got, want);
    return text;
  }

  // Rows of y depend on their token and their weight row alone, so the reference gets just these.
  std::vector<float> expected_packed(std::int64_t index) const {
    const auto tokens = static_cast<std::int64_t>(tokens_.size());
    const auto rows = static_cast<std::int64_t>(rows_.size());
    const binary_gemm::WeightView device_w = operands_.packed(p_, index);
    const auto bits = fetch_rows(device_w.bits, p_.k() / 32, rows_);
    const auto scales = fetch_rows(device_w.scales, p_.k() / p_.g, rows_);
    const auto w = binary_gemm::weight_view(bits.data(), scales.data(), rows, p_.k(), p_.g);
    binary_gemm::aligned_vector<std::int8_t> q;
    binary_gemm::aligned_vector<float> q_scales;
    if (impl_.base == "binary_linear") {
      const auto x = fetch_rows(operands_.x_bf16(), p_.k(), tokens_);
      q.resize(x.size());
      q_scales.resize(tokens_.size());
      binary_gemm::reference::quantize_activation(
          binary_gemm::matrix_view(x.data(), tokens, p_.k()),
          binary_gemm::activation_view(q.data(), q_scales.data(), tokens, p_.k()));
    } else {
      q = fetch_rows(operands_.x_int8(), p_.k(), tokens_);
      q_scales = fetch_rows(operands_.x_scales(), 1, tokens_);
    }
    std::vector<bfloat16> y(static_cast<std::size_t>(tokens * rows));
    binary_gemm::reference::binary_gemm(
        binary_gemm::activation_view(q.data(), q_scales.data(), tokens, p_.k()), w, {},
        binary_gemm::matrix_view(y.data(), tokens, rows));
    std::vector<float> values;
    for (const bfloat16 value : y) values.push_back(binary_gemm::to_float(value));
    return values;
  }

  std::vector<float> expected_dense(std::int64_t index) const {
    const auto x = fetch_rows(operands_.x_bf16(), p_.k(), tokens_);
    const auto w =
        fetch_rows(static_cast<const bfloat16*>(operands_.dense_bf16(p_, index)), p_.k(), rows_);
    std::vector<float> values;
    for (std::size_t t = 0; t < tokens_.size(); ++t) {
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        double sum = 0;
        const auto k = static_cast<std::size_t>(p_.k());
        for (std::size_t i = 0; i < k; ++i) {
          sum += double{binary_gemm::to_float(x[t * k + i])} *
                 double{binary_gemm::to_float(w[r * k + i])};
        }
        values.push_back(static_cast<float>(sum));
      }
    }
    return values;
  }

  std::string compare_int8(std::int64_t index) const {
    const auto x = fetch_rows(operands_.x_int8(), p_.k(), tokens_);
    const auto w = fetch_rows(operands_.dense_int8(p_, index), p_.k(), rows_);
    for (std::size_t t = 0; t < tokens_.size(); ++t) {
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        std::int32_t want = 0;
        const auto k = static_cast<std::size_t>(p_.k());
        for (std::size_t i = 0; i < k; ++i) want += x[t * k + i] * w[r * k + i];
        const std::int32_t got =
            fetch(operands_.y<std::int32_t>() + tokens_[t] * p_.n() + rows_[r], 1)[0];
        if (got != want) return difference(t, r, got, want);
      }
    }
    return {};
  }

  Impl impl_;
  Problem p_;
  Operands& operands_;
  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> tokens_;
};

/// Launches once into poisoned outputs. Returns what is wrong, or nothing.
inline std::string verify(const Impl& impl, const Problem& p, Operands& operands, const Case& what,
                          cudaStream_t stream) {
  if (impl.base == "read_floor") return {};
  const bool int32 = impl.base == "cublaslt_int8";
  const std::int64_t bytes = int32 ? p.padded_m() * p.n() * 4 : p.m * p.n() * 2;
  BENCH_CHECK(cudaMemsetAsync(operands.y<void>(), 0xff, static_cast<std::size_t>(bytes), stream));
  constexpr std::int64_t kIndex = 1;  // not the first, so that the rotation is in it
  what.launch(kIndex, stream);
  BENCH_CHECK(cudaStreamSynchronize(stream));
  if (!int32) {
    // All bits set is a NaN that no product of finite values gives.
    Buffer found(sizeof(unsigned long long));
    BENCH_CHECK(cudaMemset(found.as<void>(), 0, sizeof(unsigned long long)));
    count_poison_kernel<<<1024, 256>>>(operands.y<const std::uint16_t>(), bytes / 2,
                                       found.as<unsigned long long>());
    BENCH_CHECK(cudaGetLastError());
    const unsigned long long left = fetch(found.as<const unsigned long long>(), 1)[0];
    if (left != 0) return "wrong: " + std::to_string(left) + " outputs were not written";
  }
  return Samples(impl, p, operands).compare(kIndex);
}

}  // namespace bench
