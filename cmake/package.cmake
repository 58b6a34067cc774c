# `cpack` in the build folder makes a .deb of what `cmake --install` installs. It is one package,
# runtime and development files together: before version 1.0 the ABI changes with every release, so
# a runtime package of its own would serve nobody. Built with
#
#   cmake -S . -B build/deb -G Ninja -DCMAKE_INSTALL_PREFIX=/usr -DBUILD_SHARED_LIBS=ON \
#         -DBINARY_GEMM_BUILD_TESTS=OFF -DBINARY_GEMM_BUILD_EXAMPLES=OFF
#   cmake --build build/deb
#   cd build/deb && cpack
#
# it holds shared libraries, in Debian's folder for them, and its dependencies are computed by
# dpkg-shlibdeps. The runtime of CUDA is in the CUDA library, so that needs only the driver, and
# that only when it is used. Archives (BUILD_SHARED_LIBS=OFF) depend on nothing to be installed.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME binary-gemm)
set(CPACK_PACKAGE_VENDOR "binary_gemm")
set(CPACK_PACKAGE_CONTACT "The binary_gemm authors <binary-gemm@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_DESCRIPTION
    "A C++17 library for engines that run language models of one bit a weight.\nIt has the libraries, the headers, a CMake package and pkg-config files.")
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT) # binary-gemm_<version>_<architecture>.deb
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
# Folders are 755 whatever the umask of who builds.
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
if(BUILD_SHARED_LIBS)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  # One of our libraries links the other, which no package has.
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/src)
  # So that others' packages may be linked to it, and the linker's cache is kept.
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE RENAME copyright
  DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${CPACK_PACKAGE_NAME})
include(CPack)
