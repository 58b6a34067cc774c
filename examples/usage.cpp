#include <binary_gemm/binary_gemm.h>
#include <cstdio>

int main() {
  using namespace binary_gemm;
  constexpr std::int64_t M = 2, N = 8, K = 256;  // tokens, outputs, inputs
  aligned_vector<float> dense(N * K, 0.5f), x(M * K, 1.0f), y(M * N);
  const auto layer = cpu::BinaryLinear::from_dense(matrix_view(dense.data(), N, K));
  layer(matrix_view(x.data(), M, K), matrix_view(y.data(), M, N));
  std::printf("y[0][0] = %g\n", y[0]);  // 256 * 0.5 * 1 = 128
}
