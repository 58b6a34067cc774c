#pragma once

/// What `[n, k]` weights take in memory, by format: the numbers that a 1-bit model is judged by.

#include <cstdint>

/// bf16: 16 bits a weight.
constexpr std::int64_t bf16_bytes(std::int64_t n, std::int64_t k) { return n * k * 2; }

/// Ternary weights in 2 bits each, and an fp16 scale for every 128: 2.125 bits a weight.
constexpr std::int64_t ternary_bytes(std::int64_t n, std::int64_t k) {
  return n * (k / 4 + k / 128 * 2);
}

/// Binary weights in 1 bit each, and an fp16 scale for every 128: 1.125 bits a weight.
constexpr std::int64_t binary_bytes(std::int64_t n, std::int64_t k) {
  return n * (k / 8 + k / 128 * 2);
}

/// The unit of the tables, 2^20 bytes.
constexpr double mebibytes(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }
