# Finds nvcc as BINARY_GEMM_CUDA says and sets BINARY_GEMM_WITH_CUDA. AUTO never fails: without a
# usable nvcc the library serves the CPU, and the reason is printed.
set(BINARY_GEMM_WITH_CUDA OFF)
if(NOT BINARY_GEMM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "BINARY_GEMM_CUDA = ${BINARY_GEMM_CUDA} must be AUTO, ON or OFF")
endif()

# CUDA 12.0 is the first whose nvcc knows sm_90a.
set(binary_gemm_cuda_minimum 12.0)
set(binary_gemm_cuda_reason "")
if(BINARY_GEMM_CUDA STREQUAL OFF)
  set(binary_gemm_cuda_reason "BINARY_GEMM_CUDA is OFF")
else()
  # Look again at every configure, so that an nvcc installed since the last one is found.
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  unset(binary_gemm_nvcc CACHE)
  if(CMAKE_CUDA_COMPILER)
    set(binary_gemm_nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(binary_gemm_nvcc "$ENV{CUDACXX}")
  else()
    # The last is where NVIDIA's packages put it, which is often not on PATH.
    find_program(binary_gemm_nvcc nvcc PATHS ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda
                 PATH_SUFFIXES bin NO_CACHE)
  endif()
  if(binary_gemm_nvcc)
    # The version is read before CMake looks at the compiler: with one that is too old, CMake's own
    # check fails on the architectures and says nothing about the version.
    execute_process(COMMAND "${binary_gemm_nvcc}" --version
                    OUTPUT_VARIABLE binary_gemm_nvcc_output ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" unused "${binary_gemm_nvcc_output}")
    set(binary_gemm_nvcc_version "${CMAKE_MATCH_1}")
    if(NOT binary_gemm_nvcc_version)
      set(binary_gemm_cuda_reason "${binary_gemm_nvcc} --version does not name a CUDA release")
    elseif(binary_gemm_nvcc_version VERSION_LESS binary_gemm_cuda_minimum)
      set(binary_gemm_cuda_reason "${binary_gemm_nvcc} is of CUDA ${binary_gemm_nvcc_version}, and ${binary_gemm_cuda_minimum} or newer is needed")
    else()
      set(ENV{CUDACXX} "${binary_gemm_nvcc}")
      include(CheckLanguage)
      check_language(CUDA)
      if(NOT CMAKE_CUDA_COMPILER)
        set(binary_gemm_cuda_reason "${binary_gemm_nvcc} does not compile a program with this host compiler; see CMakeFiles/CMakeError.log in the build folder")
      endif()
    endif()
  else()
    set(binary_gemm_cuda_reason "no nvcc was found; put it on PATH or set CUDACXX")
  endif()
endif()

if(binary_gemm_cuda_reason STREQUAL "")
  # sm_100 and sm_120 came with CUDA 12.8.
  set(binary_gemm_default_architectures "80;86;89;90a")
  if(binary_gemm_nvcc_version VERSION_GREATER_EQUAL 12.8)
    list(APPEND binary_gemm_default_architectures 100 120)
  endif()
  set(BINARY_GEMM_CUDA_ARCHITECTURES "${binary_gemm_default_architectures}" CACHE STRING
      "CUDA architectures to compile for, as CMAKE_CUDA_ARCHITECTURES takes them")
  set(CMAKE_CUDA_ARCHITECTURES ${BINARY_GEMM_CUDA_ARCHITECTURES})
  # PTX of 90a serves no other GPU than its machine code does, and takes a quarter of the library.
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90a$" "90a-real")
  enable_language(CUDA)
  find_package(CUDAToolkit ${binary_gemm_cuda_minimum} REQUIRED)
  set(BINARY_GEMM_WITH_CUDA ON)
  message(STATUS "binary_gemm: CUDA ${binary_gemm_nvcc_version} for "
                 "${BINARY_GEMM_CUDA_ARCHITECTURES}")
elseif(BINARY_GEMM_CUDA STREQUAL ON)
  message(FATAL_ERROR "BINARY_GEMM_CUDA is ON, but ${binary_gemm_cuda_reason}. "
                      "-DBINARY_GEMM_CUDA=OFF builds for the CPU alone.")
else()
  message(STATUS "binary_gemm: CPU only (${binary_gemm_cuda_reason})")
endif()
