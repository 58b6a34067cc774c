#pragma once

/// What both halves of the C ABI share: exceptions to status, C structs to views, and the layer
/// behind a handle. Here only what C++ makes impossible is checked (NULL, struct_size); every other
/// rule is that of check.h.

#include <stdexcept>
#include <string>

#include "binary_gemm/c_api.h"
#include "binary_gemm/cpu.h"
#include "binary_gemm/views.h"

/// The layer behind a handle.
struct bg_linear {
  virtual ~bg_linear() = default;
  virtual binary_gemm::WeightView weights() const = 0;
  virtual binary_gemm::BiasView bias() const = 0;
};

namespace binary_gemm {
namespace c_api {

/// An error whose status its type does not tell.
class StatusError : public std::runtime_error {
 public:
  StatusError(bg_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  bg_status status() const { return status_; }

 private:
  bg_status status_;
};

/// Keeps a message for this thread.
bg_status report(bg_status status, const char* message) noexcept;

/// Keeps the message of the exception being handled. Returns its status.
bg_status report_exception() noexcept;

template <class Body>
bg_status guarded(const Body& body) noexcept {
  try {
    body();
    return BG_OK;
  } catch (...) {
    return report_exception();
  }
}

template <class T>
T& require(T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw std::invalid_argument(std::string("binary_gemm: ") + name + " is NULL");
  }
  return *pointer;
}

/// The struct behind a pointer. When a struct gets its second version, the first one's size is
/// taken too, and what it lacks gets defaults here.
template <class Struct>
Struct& read(Struct* pointer, const char* name) {
  Struct& value = require(pointer, name);
  if (value.struct_size == sizeof(Struct)) return value;
  const std::string message = std::string("binary_gemm: ") + name +
                              ": struct_size = " + std::to_string(value.struct_size) +
                              " must be the struct's sizeof, " + std::to_string(sizeof(Struct));
  if (value.struct_size < sizeof(Struct)) throw std::invalid_argument(message);
  throw StatusError(BG_NOT_SUPPORTED, message + "; is the caller's header newer than the library?");
}

/// An enumeration of one byte, of its number in C: what it has no name for becomes one that the
/// checks refuse.
template <class Enum>
Enum enumerator(std::int32_t number) {
  constexpr std::int32_t kUnknown = 255;
  return static_cast<Enum>(number >= 0 && number < kUnknown ? number : kUnknown);
}

inline MatrixView to_view(const bg_matrix* matrix, const char* name) {
  const bg_matrix& s = read(matrix, name);
  return {s.data, enumerator<DataType>(s.type), s.rows, s.cols, s.row_stride, s.offset};
}

inline MutableWeightView to_view(const bg_weights* weights, const char* name) {
  const bg_weights& s = read(weights, name);
  return {s.bits,
          reinterpret_cast<float16*>(s.scales),
          s.n,
          s.k,
          s.group_size,
          s.bits_stride,
          s.scales_stride,
          s.bits_offset,
          s.scales_offset};
}

inline MutableActivationView to_view(const bg_activation* activation, const char* name) {
  const bg_activation& s = read(activation, name);
  return {s.values, s.scales, s.m, s.k, s.row_stride, s.offset, s.scales_offset};
}

inline BiasView to_view(const bg_bias* bias, const char* name) {
  if (bias == nullptr) return {};
  const bg_bias& s = read(bias, name);
  return {s.data, s.n, s.offset};
}

/// An operand that may be left out.
inline ConstMatrixView to_optional_view(const bg_matrix* matrix, const char* name) {
  return matrix == nullptr ? ConstMatrixView{} : ConstMatrixView(to_view(matrix, name));
}

inline cpu::Execution to_execution(const bg_execution* execution) {
  if (execution == nullptr) return {};
  const bg_execution& s = read(execution, "execution");
  return {s.threads, enumerator<cpu::Path>(s.path)};
}

/// Makes `*layer`, or NULL after a failure, of the layer that `make` returns.
template <class Layer, class Make>
void make_layer(bg_linear** layer, const Make& make) {
  require(layer, "layer") = nullptr;
  *layer = new Layer(make());
}

/// The layer behind a handle, if it is of the kind that is wanted.
template <class Layer>
const Layer& layer_on(const bg_linear* layer, const char* place) {
  const auto* found = dynamic_cast<const Layer*>(&require(layer, "layer"));
  if (found == nullptr) {
    throw std::invalid_argument(std::string("binary_gemm: the layer is not on ") + place);
  }
  return *found;
}

/// A layer of Q1_0 blocks, without a bias.
cpu::BinaryLinear import_layer(const void* blocks, std::size_t blocks_bytes, std::int64_t n,
                               std::int64_t k);

}  // namespace c_api
}  // namespace binary_gemm
