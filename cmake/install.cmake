# Installs the libraries, the headers, the CMake package and the pkg-config files. Of the build
# machine's folders only those of CUDA and of clang's OpenMP are named in what is installed, so the
# prefix may be moved.
include(CMakePackageConfigHelpers)

set(binary_gemm_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/binary_gemm)
set(binary_gemm_components cpu)
if(TARGET binary_gemm_cuda)
  list(APPEND binary_gemm_components cuda)
endif()
list(JOIN binary_gemm_components ", " binary_gemm_component_names)

# One file of targets a component: so a consumer of the CPU alone needs no CUDA toolkit.
foreach(component IN LISTS binary_gemm_components)
  set_target_properties(binary_gemm_${component} PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    INSTALL_RPATH "$ORIGIN") # the shared CUDA library finds the CPU's beside it
  install(TARGETS binary_gemm_${component} EXPORT binary_gemm_${component}_targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(EXPORT binary_gemm_${component}_targets NAMESPACE binary_gemm::
    FILE binary_gemm-${component}-targets.cmake DESTINATION ${binary_gemm_package_dir})
endforeach()

# Without the CUDA side its headers stay out: a compiler's "no such file" is clearer than a linker's.
set(binary_gemm_excluded_headers)
if(NOT TARGET binary_gemm_cuda)
  set(binary_gemm_excluded_headers PATTERN cuda.h EXCLUDE PATTERN kernels EXCLUDE)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/binary_gemm
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh" ${binary_gemm_excluded_headers})

# What a consumer links besides. A shared library brings its own dependencies; an archive does not.
set(BINARY_GEMM_NEEDS_OPENMP OFF)
set(binary_gemm_cpu_libs "-lbinary_gemm_cpu")
get_target_property(binary_gemm_cpu_links binary_gemm_cpu LINK_LIBRARIES)
get_target_property(binary_gemm_cpu_type binary_gemm_cpu TYPE)
if(binary_gemm_cpu_type STREQUAL STATIC_LIBRARY)
  if(binary_gemm_cpu_links MATCHES "OpenMP::OpenMP_CXX")
    set(BINARY_GEMM_NEEDS_OPENMP ON)
    # gcc's runtime lies where any driver looks, clang's does not.
    foreach(library IN LISTS OpenMP_CXX_LIB_NAMES)
      if(library MATCHES "^(gomp|pthread)$")
        string(APPEND binary_gemm_cpu_libs " -l${library}")
      else()
        string(APPEND binary_gemm_cpu_libs " ${OpenMP_${library}_LIBRARY}")
      endif()
    endforeach()
  endif()
  string(APPEND binary_gemm_cpu_libs " -lm")
  # A C program's driver does not bring C++'s runtime.
  foreach(library stdc++ c++)
    if(library IN_LIST CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
      string(APPEND binary_gemm_cpu_libs " -l${library}")
    endif()
  endforeach()
endif()

configure_package_config_file(cmake/binary_gemm-config.cmake.in
  ${PROJECT_BINARY_DIR}/binary_gemm-config.cmake INSTALL_DESTINATION ${binary_gemm_package_dir}
  NO_CHECK_REQUIRED_COMPONENTS_MACRO NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/binary_gemm-config-version.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/binary_gemm-config.cmake
              ${PROJECT_BINARY_DIR}/binary_gemm-config-version.cmake
  DESTINATION ${binary_gemm_package_dir})

# pkg-config. The prefix is told from where the .pc file lies, unless a folder was given as an
# absolute path.
set(binary_gemm_pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
  set(PC_LIBDIR "${CMAKE_INSTALL_FULL_LIBDIR}")
  set(PC_INCLUDEDIR "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
  file(RELATIVE_PATH binary_gemm_up "/prefix/${binary_gemm_pc_dir}" "/prefix")
  string(REGEX REPLACE "/$" "" binary_gemm_up "${binary_gemm_up}")
  set(PC_PREFIX "\${pcfiledir}/${binary_gemm_up}")
  set(PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()

function(binary_gemm_pkg_config name description requires cflags libs)
  set(PC_NAME ${name})
  set(PC_DESCRIPTION "${description}")
  set(PC_REQUIRES "${requires}")
  set(PC_CFLAGS "${cflags}")
  set(PC_LIBS "${libs}")
  configure_file(${PROJECT_SOURCE_DIR}/cmake/binary_gemm.pc.in ${PROJECT_BINARY_DIR}/${name}.pc
                 @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${binary_gemm_pc_dir})
endfunction()

binary_gemm_pkg_config(binary_gemm-cpu "${PROJECT_DESCRIPTION}, on the CPU" ""
  "-I\${includedir}" "-L\${libdir} ${binary_gemm_cpu_libs}")
set(binary_gemm_pc_requires "binary_gemm-cpu = ${PROJECT_VERSION}")
if(TARGET binary_gemm_cuda)
  list(GET CUDAToolkit_INCLUDE_DIRS 0 binary_gemm_cuda_include)
  get_target_property(binary_gemm_cuda_type binary_gemm_cuda TYPE)
  set(binary_gemm_cuda_libs "-lbinary_gemm_cuda")
  # cuda.h has the runtime's types in it, so a consumer links the runtime in any case.
  if(binary_gemm_cuda_type STREQUAL STATIC_LIBRARY)
    string(APPEND binary_gemm_cuda_libs
      " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
  else()
    string(APPEND binary_gemm_cuda_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart")
  endif()
  binary_gemm_pkg_config(binary_gemm-cuda "${PROJECT_DESCRIPTION}, on CUDA"
    "${binary_gemm_pc_requires}" "-I\${includedir} -I${binary_gemm_cuda_include}"
    "-L\${libdir} ${binary_gemm_cuda_libs}")
  string(APPEND binary_gemm_pc_requires ", binary_gemm-cuda = ${PROJECT_VERSION}")
endif()
binary_gemm_pkg_config(binary_gemm "${PROJECT_DESCRIPTION}" "${binary_gemm_pc_requires}" "" "")
