#pragma once

/// @file
/// The version of the library. CMake reads it from these three lines; it is written nowhere else.
#define BINARY_GEMM_VERSION_MAJOR 0  ///< Of an incompatible change.
#define BINARY_GEMM_VERSION_MINOR 1  ///< Of an addition; before 1.0 of an incompatible change too.
#define BINARY_GEMM_VERSION_PATCH 0  ///< Of a repair.
