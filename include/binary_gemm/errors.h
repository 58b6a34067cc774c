#pragma once

/// @file
/// Errors. A wrong argument throws std::invalid_argument with the values and the rule they break,
/// before anything is written or launched. CUDA failures have a type of their own (cuda.h).

#include <cstdint>
#include <stdexcept>
#include <string>

namespace binary_gemm {
namespace detail {

/// Throws unless `[begin, begin + count)` lies in `[0, size)`.
inline void check_range(const char* what, std::int64_t begin, std::int64_t count,
                        std::int64_t size) {
  if (begin < 0 || count < 0 || begin > size || count > size - begin) {
    throw std::invalid_argument(std::string("binary_gemm: ") + what + " range [" +
                                std::to_string(begin) + ", +" + std::to_string(count) +
                                ") is not inside [0, " + std::to_string(size) + ")");
  }
}

/// Throws unless `value` is a multiple of `divisor`, which must be positive.
inline void check_multiple(const char* what, std::int64_t value, const char* divisor_name,
                           std::int64_t divisor) {
  if (divisor <= 0 || value % divisor != 0) {
    throw std::invalid_argument(std::string("binary_gemm: ") + what + " = " +
                                std::to_string(value) + " must be a multiple of the " +
                                divisor_name + " = " + std::to_string(divisor));
  }
}

}  // namespace detail
}  // namespace binary_gemm
