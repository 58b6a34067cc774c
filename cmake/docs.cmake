# The target binary_gemm_docs, where Doxygen is found: pages of the public API, in docs/html of the
# build folder. It fails if something public has no comment, and so does its test. No part of `all`.
find_program(BINARY_GEMM_DOXYGEN doxygen)
if(NOT BINARY_GEMM_DOXYGEN)
  return()
endif()
configure_file(${PROJECT_SOURCE_DIR}/docs/Doxyfile.in ${PROJECT_BINARY_DIR}/docs/Doxyfile @ONLY)
set(binary_gemm_docs_command ${BINARY_GEMM_DOXYGEN} ${PROJECT_BINARY_DIR}/docs/Doxyfile)
add_custom_target(binary_gemm_docs COMMAND ${binary_gemm_docs_command} VERBATIM)
if(BINARY_GEMM_BUILD_TESTS)
  add_test(NAME docs.api COMMAND ${binary_gemm_docs_command})
  set_tests_properties(docs.api PROPERTIES LABELS "cpu;package")
endif()
