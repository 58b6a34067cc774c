install(TARGETS binary_gemm_cpu)
