#pragma once

/// What the tests of the C ABI share: views as C structs, and what a status should be.

#include <gtest/gtest.h>

#include <string>

#include "binary_gemm/c_api.h"
#include "binary_gemm/views.h"

namespace binary_gemm {
namespace testing {

inline bg_matrix to_c(const ConstMatrixView& v) {
  bg_matrix s = bg_matrix_of(v.data, static_cast<bg_type>(v.type), v.rows, v.cols);
  s.row_stride = v.row_stride;
  s.offset = v.offset;
  return s;
}

inline bg_weights to_c(const WeightView& v) {
  bg_weights s = bg_weights_of(v.bits, reinterpret_cast<const std::uint16_t*>(v.scales), v.n, v.k,
                               v.group_size);
  s.bits_stride = v.bits_stride;
  s.scales_stride = v.scales_stride;
  s.bits_offset = v.bits_offset;
  s.scales_offset = v.scales_offset;
  return s;
}

inline bg_activation to_c(const ActivationView& v) {
  bg_activation s = bg_activation_of(v.values, v.scales, v.m, v.k);
  s.row_stride = v.row_stride;
  s.offset = v.offset;
  s.scales_offset = v.scales_offset;
  return s;
}

inline bg_bias to_c(const BiasView& v) {
  bg_bias s = bg_bias_of(v.data, v.n);
  s.offset = v.offset;
  return s;
}

inline ::testing::AssertionResult is_ok(bg_status status) {
  if (status == BG_OK) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "status " << status << ": " << bg_last_error_message();
}

inline void expect_error(bg_status status, bg_status expected, const std::string& part) {
  EXPECT_EQ(status, expected) << bg_last_error_message();
  const std::string message = bg_last_error_message();
  EXPECT_EQ(message.find("binary_gemm: "), 0u) << message;
  EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

}  // namespace testing
}  // namespace binary_gemm
