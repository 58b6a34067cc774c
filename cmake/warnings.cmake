# Flags that every target of this project is compiled with; none of them reach a consumer.
#
# Contraction is off, on the host and on the device, because the contract of numbers says where a
# fused multiply-add is.
function(binary_gemm_compile_options target)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;-Wshadow;-ffp-contract=off>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>"
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${BINARY_GEMM_WERROR}>>:-Werror>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${BINARY_GEMM_WERROR}>>:-Werror=all-warnings>)
endfunction()
