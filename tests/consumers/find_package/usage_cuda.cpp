// Links against the CUDA side: no GPU is needed to run it.
#include <binary_gemm/cuda.h>
#include <cstdio>

int main() { std::printf("%d\n", BINARY_GEMM_VERSION_MAJOR); }
