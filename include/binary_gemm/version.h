#pragma once

/// The version of the library. CMake reads it from these three lines; it is written nowhere else.
#define BINARY_GEMM_VERSION_MAJOR 0
#define BINARY_GEMM_VERSION_MINOR 1
#define BINARY_GEMM_VERSION_PATCH 0
