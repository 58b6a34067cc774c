# Cross-compiles for 64-bit Arm on Debian and runs what it built under qemu-user:
#
#   apt-get install g++-aarch64-linux-gnu qemu-user libgtest-dev
#   cmake -S /usr/src/googletest -B build/aarch64-gtest -G Ninja -DCMAKE_BUILD_TYPE=Release \
#         -DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64-linux-gnu.cmake \
#         -DCMAKE_INSTALL_PREFIX=$PWD/build/aarch64-root
#   cmake --build build/aarch64-gtest --target install
#   cmake -S . -B build/aarch64 -G Ninja -DBINARY_GEMM_CUDA=OFF \
#         -DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64-linux-gnu.cmake \
#         -DCMAKE_PREFIX_PATH=$PWD/build/aarch64-root
#   cmake --build build/aarch64
#   ctest --test-dir build/aarch64 -L cpu -E '^(consumer\.|demo_bad_file|gguf_dequantize_real)'
#
# Two minutes on two cores: half of it builds, half of it runs. The tests left out start programs or
# configure projects themselves, without the emulator and this file.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
