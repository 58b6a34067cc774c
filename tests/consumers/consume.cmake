# One step of a consumer test; see CMakeLists.txt here. cmake -DSTEP=... -P consume.cmake

# Runs a command and stops, with its output, if it fails. Its output is left in `output`.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(NOT result EQUAL 0)
    file(REMOVE_RECURSE ${WORK})
    list(JOIN ARGN " " command)
    message("${command}\n${out}")  # as it is: FATAL_ERROR would break its lines anew
    message(FATAL_ERROR "The command above failed with ${result}")
  endif()
  set(output "${out}" PARENT_SCOPE)
endfunction()

# Configures and builds the project `source` in a folder of its own.
function(build source folder)
  run(${CMAKE_COMMAND} -S ${source} -B ${WORK}/${folder} -G ${CMAKE_GENERATOR}
      -DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
      "-DCMAKE_CXX_FLAGS=${CMAKE_CXX_FLAGS}" ${ARGN})
  run(${CMAKE_COMMAND} --build ${WORK}/${folder})
endfunction()

# Runs examples/usage.cpp as built, and looks at its answer.
function(expect_answer)
  run(${ARGN})
  if(NOT output MATCHES "y\\[0\\]\\[0\\] = 128")
    message(FATAL_ERROR "examples/usage.cpp printed: ${output}")
  endif()
endfunction()

# Compiles `source` with the flags of a module whose .pc file is in `libdir`, to ${WORK}/<module>.
function(build_by_pkg_config libdir module source)
  set(ENV{PKG_CONFIG_PATH} ${libdir}/pkgconfig)
  set(ENV{LD_LIBRARY_PATH} ${libdir}:$ENV{LD_LIBRARY_PATH})
  file(MAKE_DIRECTORY ${WORK})
  run(${PKG_CONFIG} --cflags --libs ${module})
  separate_arguments(flags UNIX_COMMAND "${output}")
  separate_arguments(cxx_flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  set(compiler ${CMAKE_CXX_COMPILER} -std=c++17)
  if(source MATCHES "\\.c$")
    set(compiler ${CMAKE_C_COMPILER} -std=c11)
  endif()
  run(${compiler} ${cxx_flags} ${source} ${flags} -o ${WORK}/${module})
endfunction()

file(REMOVE_RECURSE ${WORK})
set(here ${CMAKE_CURRENT_LIST_DIR})

if(STEP STREQUAL install)
  # Moved afterwards: what is installed must not depend on where it was installed to.
  file(REMOVE_RECURSE ${PREFIX})
  run(${CMAKE_COMMAND} --install ${LIBRARY_BUILD_DIR} --config "${CONFIG}" --prefix ${WORK}/prefix)
  file(RENAME ${WORK}/prefix ${PREFIX})

elseif(STEP STREQUAL uninstall)
  file(REMOVE_RECURSE ${PREFIX})

elseif(STEP STREQUAL find_package)
  build(${here}/find_package build -DCMAKE_PREFIX_PATH=${PREFIX} -DEXPECT_CUDA=${HAS_CUDA}
        -DUSAGE=${SOURCE_DIR}/examples/usage.cpp)
  expect_answer(${WORK}/build/usage)
  if(HAS_CUDA)
    run(${WORK}/build/usage_cuda)
  endif()

elseif(STEP STREQUAL pkg_config)
  build_by_pkg_config(${PREFIX}/${LIBDIR} binary_gemm-cpu ${SOURCE_DIR}/examples/usage.cpp)
  expect_answer(${WORK}/binary_gemm-cpu)
  if(HAS_CUDA)
    build_by_pkg_config(${PREFIX}/${LIBDIR} binary_gemm ${here}/find_package/usage_cuda.cpp)
    run(${WORK}/binary_gemm)
  endif()
  if(CMAKE_C_COMPILER)
    # By the second module the C ABI has its CUDA side, if that was built.
    build_by_pkg_config(${PREFIX}/${LIBDIR} binary_gemm-cpu ${SOURCE_DIR}/tests/c_api/c_api_test.c)
    run(${WORK}/binary_gemm-cpu 0)
    build_by_pkg_config(${PREFIX}/${LIBDIR} binary_gemm ${SOURCE_DIR}/tests/c_api/c_api_test.c)
    run(${WORK}/binary_gemm ${HAS_CUDA})
  endif()

elseif(STEP STREQUAL deb)
  # As cmake/package.cmake says to build it, but without CUDA: nvcc would take minutes. Unpacked, as
  # installing it is not a test's business.
  build(${SOURCE_DIR} build -DCMAKE_INSTALL_PREFIX=/usr -DBUILD_SHARED_LIBS=ON
        -DCMAKE_BUILD_TYPE=${CONFIG} -DBINARY_GEMM_CUDA=OFF
        -DBINARY_GEMM_BUILD_TESTS=OFF -DBINARY_GEMM_BUILD_EXAMPLES=OFF)
  run(${CMAKE_CPACK_COMMAND} --config ${WORK}/build/CPackConfig.cmake -B ${WORK}/package)
  file(GLOB package ${WORK}/package/*.deb)
  run(${DPKG_DEB} --field ${package} Package Version Depends)
  file(STRINGS ${WORK}/build/CMakeCache.txt version REGEX "^CMAKE_PROJECT_VERSION:")
  string(REGEX REPLACE ".*=" "" version "${version}")
  foreach(field "Package: binary-gemm\n" "Version: ${version}\n" "Depends:.* libstdc[+][+]6 ")
    if(NOT output MATCHES "${field}")
      message(FATAL_ERROR "${package} has no \"${field}\" in\n${output}")
    endif()
  endforeach()
  run(${DPKG_DEB} --extract ${package} ${WORK}/root)
  build(${here}/find_package found -DCMAKE_PREFIX_PATH=${WORK}/root/usr -DEXPECT_CUDA=0
        -DUSAGE=${SOURCE_DIR}/examples/usage.cpp)
  expect_answer(${WORK}/found/usage)
  if(PKG_CONFIG)
    file(GLOB_RECURSE module ${WORK}/root/*/binary_gemm-cpu.pc)
    cmake_path(GET module PARENT_PATH libdir)
    cmake_path(GET libdir PARENT_PATH libdir)
    build_by_pkg_config(${libdir} binary_gemm-cpu ${SOURCE_DIR}/examples/usage.cpp)
    expect_answer(${WORK}/binary_gemm-cpu)
  endif()

elseif(STEP STREQUAL add_subdirectory)
  # The same build makes and installs shared libraries, for find_package to find: one compilation
  # serves both. No CUDA: nvcc would take minutes.
  build(${here}/add_subdirectory build -DBINARY_GEMM_SOURCE=${SOURCE_DIR} -DBINARY_GEMM_CUDA=OFF
        -DBUILD_SHARED_LIBS=ON -DBINARY_GEMM_INSTALL=ON
        -DUSAGE=${SOURCE_DIR}/examples/usage.cpp)
  expect_answer(${WORK}/build/usage)
  run(${CMAKE_COMMAND} --install ${WORK}/build --prefix ${WORK}/prefix)
  build(${here}/find_package found -DCMAKE_PREFIX_PATH=${WORK}/prefix -DEXPECT_CUDA=0
        -DUSAGE=${SOURCE_DIR}/examples/usage.cpp)
  expect_answer(${WORK}/found/usage)

else()
  message(FATAL_ERROR "STEP = ${STEP} is no step")
endif()

file(REMOVE_RECURSE ${WORK})
