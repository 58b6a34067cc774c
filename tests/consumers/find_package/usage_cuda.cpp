// Links the CUDA library; needs no GPU to run.
#include <binary_gemm/cuda.h>
#include <binary_gemm/version.h>

#include <cstdio>

int main() {
  std::printf("binary_gemm %d: a workspace of %zu bytes\n", BINARY_GEMM_VERSION_MAJOR,
              binary_gemm::cuda::linear_workspace_bytes(1, 5120));
  return binary_gemm::cuda::linear_workspace_bytes(1, 5120) >= 5120 ? 0 : 1;
}
