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
  set(ENV{PKG_CONFIG_PATH} ${PREFIX}/${LIBDIR}/pkgconfig)
  set(ENV{LD_LIBRARY_PATH} ${PREFIX}/${LIBDIR}:$ENV{LD_LIBRARY_PATH})
  file(MAKE_DIRECTORY ${WORK})
  set(programs binary_gemm-cpu ${SOURCE_DIR}/examples/usage.cpp)
  if(HAS_CUDA)
    list(APPEND programs binary_gemm ${here}/find_package/usage_cuda.cpp)
  endif()
  separate_arguments(cxx_flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  while(programs)
    list(POP_FRONT programs module source)
    run(${PKG_CONFIG} --cflags --libs ${module})
    separate_arguments(flags UNIX_COMMAND "${output}")
    run(${CMAKE_CXX_COMPILER} -std=c++17 ${cxx_flags} ${source} ${flags} -o ${WORK}/${module})
    run(${WORK}/${module})
  endwhile()
  expect_answer(${WORK}/binary_gemm-cpu)

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
