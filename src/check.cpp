#include "check.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "binary_gemm/q1_0.h"

namespace binary_gemm {
namespace check {
namespace {

constexpr std::uintptr_t kBaseAlignment = 16;

// Strides and offsets stay so small that no byte address or extent in the library overflows.
constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 16;

template <class... Parts>
[[noreturn]] void fail(Parts&&... parts) {
  std::string message = "binary_gemm: ";
  const auto append = [&message](auto&& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      message += std::to_string(part);
    } else {
      message += part;
    }
  };
  (append(std::forward<Parts>(parts)), ...);
  throw std::invalid_argument(message);
}

std::string hex(const void* pointer) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (auto value = reinterpret_cast<std::uintptr_t>(pointer); value != 0; value >>= 4) {
    text.insert(text.begin(), digits[value & 15]);
  }
  return "0x" + (text.empty() ? "0" : text);
}

std::string shape(std::int64_t rows, std::int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// The bytes of a strided buffer, for the overlap check.
struct Region {
  const char* name;
  std::uintptr_t begin;
  std::uintptr_t row_bytes;
  std::uintptr_t stride_bytes;
  std::uintptr_t rows;

  std::uintptr_t end() const { return begin + (rows - 1) * stride_bytes + row_bytes; }
};

// Checks one buffer of `rows` rows of `cols` elements and returns the bytes it covers.
Region buffer(const char* name, const void* data, std::int64_t rows, std::int64_t cols,
              std::int64_t stride, std::int64_t offset, std::int64_t element_bytes) {
  if (rows < 0 || cols < 0) fail(name, ": shape ", shape(rows, cols), " must not be negative");
  if (offset < 0) fail(name, ": offset = ", offset, " must not be negative");
  if (stride < cols) {
    fail(name, ": row stride = ", stride, " elements must be at least the row's ", cols);
  }
  if ((rows > 0 && stride > kMaxElements / rows) || offset > kMaxElements - rows * stride) {
    fail(name, ": ", rows, " rows of stride ", stride, " from offset ", offset,
         " overflow a 64-bit byte count");
  }
  if (rows == 0 || cols == 0) return {name, 0, 0, 0, 0};
  if (data == nullptr) fail(name, ": base is null, but the shape is ", shape(rows, cols));
  const auto base = reinterpret_cast<std::uintptr_t>(data);
  if (base % kBaseAlignment != 0) {
    fail(name, ": base ", hex(data), " must be 16-byte aligned; start a shard by an offset");
  }
  const auto bytes = static_cast<std::uintptr_t>(element_bytes);
  const std::uintptr_t begin = base + static_cast<std::uintptr_t>(offset) * bytes;
  const Region region{name, begin, static_cast<std::uintptr_t>(cols) * bytes,
                      static_cast<std::uintptr_t>(stride) * bytes,
                      static_cast<std::uintptr_t>(rows)};
  if (region.end() < base)
    fail(name, ": base ", hex(data), " plus its extent wraps the address space");
  return region;
}

// Regions with one stride may interleave without touching (two column shards of one matrix);
// otherwise the spans decide.
bool overlap(const Region& a, const Region& b) {
  if (a.rows == 0 || b.rows == 0 || a.end() <= b.begin || b.end() <= a.begin) return false;
  if (a.stride_bytes != b.stride_bytes) return true;
  const std::uintptr_t stride = a.stride_bytes;
  const std::uintptr_t distance = b.begin >= a.begin
                                      ? (b.begin - a.begin) % stride
                                      : (stride - (a.begin - b.begin) % stride) % stride;
  return distance < a.row_bytes || distance + b.row_bytes > stride;
}

void disjoint(const Region& written, const Region& read) {
  if (overlap(written, read)) {
    fail(written.name, " overlaps ", read.name, ": they share bytes from ",
         hex(reinterpret_cast<const void*>(written.begin > read.begin ? written.begin
                                                                      : read.begin)));
  }
}

const char* name_of(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat16:
      return "float16";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kInt8:
      return "int8";
  }
  return "an unknown DataType";
}

void float_type(const char* name, DataType type) {
  switch (type) {
    case DataType::kFloat32:
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return;
    case DataType::kInt8:
      break;
  }
  fail(name, ": type must be float32, float16 or bfloat16, not ", name_of(type));
}

void known_type(const char* name, DataType type) {
  if (type != DataType::kInt8) float_type(name, type);
}

template <class Void>
Region matrix(const char* name, const BasicMatrixView<Void>& view) {
  return buffer(name, view.data, view.rows, view.cols, view.row_stride, view.offset,
                size_of(view.type));
}

struct WeightRegions {
  Region bits;
  Region scales;
};

template <class Word, class Scale>
WeightRegions weight_regions(const BasicWeightView<Word, Scale>& w, bool scales_optional = false) {
  weight_shape(w.n, w.k, w.group_size);
  const Region bits = buffer("weight bits", w.bits, w.n, w.k / 32, w.bits_stride, w.bits_offset,
                             sizeof(std::uint32_t));
  if (scales_optional && w.scales == nullptr) return {bits, {"weight scales", 0, 0, 0, 0}};
  return {bits, buffer("weight scales", w.scales, w.n, w.k / w.group_size, w.scales_stride,
                       w.scales_offset, sizeof(float16))};
}

struct ActivationRegions {
  Region values;
  Region scales;
};

template <class Value, class Scale>
ActivationRegions activation(const BasicActivationView<Value, Scale>& x) {
  const Region values =
      buffer("activation values", x.values, x.m, x.k, x.row_stride, x.offset, sizeof(std::int8_t));
  return {values,
          buffer("activation scales", x.scales, 1, x.m, x.m, x.scales_offset, sizeof(float))};
}

Region bias_region(const BiasView& bias, std::int64_t n) {
  if (bias.data == nullptr) return {"bias", 0, 0, 0, 0};
  if (bias.n != n) fail("bias has ", bias.n, " elements, but the weights have N = ", n, " rows");
  return buffer("bias", bias.data, 1, bias.n, bias.n, bias.offset, sizeof(float));
}

void same_shape(const char* a_name, std::int64_t a_rows, std::int64_t a_cols, const char* b_name,
                std::int64_t b_rows, std::int64_t b_cols) {
  if (a_rows != b_rows || a_cols != b_cols) {
    fail(a_name, " is ", shape(a_rows, a_cols), ", but ", b_name, " is ", shape(b_rows, b_cols));
  }
}

Region residual_region(const ConstMatrixView& residual) {
  if (residual.data == nullptr) return {"residual", 0, 0, 0, 0};
  return matrix("residual", residual);
}

// The residual of a product whose y is at `target`.
void check_residual(const ConstMatrixView& residual, const MatrixView& y, const Region& target) {
  if (residual.data == nullptr) return;
  if (residual.type != y.type) {
    fail("residual: type ", name_of(residual.type), " must be that of y, ", name_of(y.type));
  }
  same_shape("residual", residual.rows, residual.cols, "y", y.rows, y.cols);
  const Region source = residual_region(residual);
  // In place every element is read, then written, by one thread; a shift would mix them.
  const bool same_rows = y.rows <= 1 || source.stride_bytes == target.stride_bytes;
  if (source.begin == target.begin && same_rows) return;
  disjoint(target, source);
}

// That `bytes` of a workspace from `data` on are apart from x, whose regions are given, and the
// rest.
void workspace(const void* data, std::int64_t bytes, std::initializer_list<Region> x,
               const WeightView& w, const Epilogue& epilogue, const MatrixView& y) {
  const Region written = buffer("the workspace", data, 1, bytes, bytes, 0, 1);
  for (const Region& read : x) disjoint(written, read);
  const WeightRegions packed = weight_regions(w);
  for (const Region& other : {packed.bits, packed.scales, bias_region(epilogue.bias, w.n),
                              residual_region(epilogue.residual), matrix("y", y)}) {
    disjoint(written, other);
  }
}

}  // namespace

void weight_shape(std::int64_t n, std::int64_t k, std::int64_t g) {
  if (g != 32 && g != 64 && g != 128 && g != 256) {
    fail("weights: group size = ", g, " must be 32, 64, 128 or 256");
  }
  if (n < 0 || k < 0) fail("weights: shape ", shape(n, k), " must not be negative");
  if (k % 32 != 0) fail("weights: K = ", k, " must be a multiple of 32 (one word of bits)");
  if (k % g != 0) fail("weights: K = ", k, " must be a multiple of the group size ", g);
  if (k > 0 && n > kMaxElements / k)
    fail("weights: shape ", shape(n, k), " overflows a 64-bit count");
}

void layer(const ConstMatrixView& dense, std::int64_t g, const BiasView& bias) {
  weight_shape(dense.rows, dense.cols, g);
  known_type("dense weights", dense.type);
  matrix("dense weights", dense);
  bias_region(bias, dense.rows);
}

void layer(const WeightView& w, const BiasView& bias) {
  weight_regions(w);
  bias_region(bias, w.n);
}

void row_range(std::int64_t begin, std::int64_t end, std::int64_t n) {
  if (begin < 0 || end < begin || end > n) {
    fail("weight rows [", begin, ", ", end, ") are not a range in [0, ", n, ")");
  }
}

void pack_weights(const ConstMatrixView& dense, const MutableWeightView& w) {
  known_type("dense weights", dense.type);
  const WeightRegions packed = weight_regions(w, /*scales_optional=*/true);
  same_shape("dense weights", dense.rows, dense.cols, "packed weights", w.n, w.k);
  const Region source = matrix("dense weights", dense);
  disjoint(packed.bits, source);
  disjoint(packed.scales, source);
  disjoint(packed.bits, packed.scales);
}

void unpack_weights(const WeightView& w, const MatrixView& dense) {
  known_type("dense weights", dense.type);
  const WeightRegions packed = weight_regions(w, /*scales_optional=*/true);
  if (dense.type == DataType::kInt8 && w.scales != nullptr) {
    fail(
        "dense weights: an int8 matrix holds only signs; give weights without scales or a float type");
  }
  same_shape("dense weights", dense.rows, dense.cols, "packed weights", w.n, w.k);
  const Region target = matrix("dense weights", dense);
  disjoint(target, packed.bits);
  disjoint(target, packed.scales);
}

void quantize_activation(const ConstMatrixView& x, const MutableActivationView& q) {
  float_type("x", x.type);
  same_shape("x", x.rows, x.cols, "the quantized activation", q.m, q.k);
  const Region source = matrix("x", x);
  const ActivationRegions target = activation(q);
  disjoint(target.values, source);
  disjoint(target.scales, source);
  disjoint(target.values, target.scales);
}

void rms_norm_quantize(const ConstMatrixView& x, const ConstMatrixView& gain, float epsilon,
                       const MutableActivationView& q) {
  quantize_activation(x, q);
  if (!(epsilon >= 0) || !std::isfinite(epsilon)) {
    fail("epsilon = ", epsilon, " must be finite and not negative");
  }
  if (gain.data == nullptr) return;
  float_type("gain", gain.type);
  same_shape("gain", gain.rows, gain.cols, "a row of x", 1, x.cols);
  const Region source = matrix("gain", gain);
  const ActivationRegions target = activation(q);
  disjoint(target.values, source);
  disjoint(target.scales, source);
}

void swiglu_quantize(const ConstMatrixView& gate_up, const MutableActivationView& q) {
  float_type("gate_up", gate_up.type);
  const ActivationRegions target = activation(q);
  if (q.k > kMaxElements / 2) fail("the quantized activation: K = ", q.k, " is too large");
  same_shape("gate_up", gate_up.rows, gate_up.cols, "twice the quantized activation", q.m, 2 * q.k);
  const Region source = matrix("gate_up", gate_up);
  disjoint(target.values, source);
  disjoint(target.scales, source);
  disjoint(target.values, target.scales);
}

void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                 const MatrixView& y) {
  float_type("y", y.type);
  const WeightRegions packed = weight_regions(w);
  const ActivationRegions source = activation(x);
  if (x.k != w.k) fail("activation has K = ", x.k, ", but the weights have K = ", w.k);
  same_shape("y", y.rows, y.cols, "x times the transposed weights", x.m, w.n);
  const Region target = matrix("y", y);
  const Region bias_bytes = bias_region(epilogue.bias, w.n);
  for (const Region& read :
       {source.values, source.scales, packed.bits, packed.scales, bias_bytes}) {
    disjoint(target, read);
  }
  check_residual(epilogue.residual, y, target);
}

void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y) {
  float_type("x", x.type);
  float_type("y", y.type);
  const WeightRegions packed = weight_regions(w);
  const Region source = matrix("x", x);
  if (x.cols != w.k) fail("x has K = ", x.cols, ", but the weights have K = ", w.k);
  same_shape("y", y.rows, y.cols, "x times the transposed weights", x.rows, w.n);
  const Region target = matrix("y", y);
  const Region bias_bytes = bias_region(epilogue.bias, w.n);
  for (const Region& read : {source, packed.bits, packed.scales, bias_bytes})
    disjoint(target, read);
  check_residual(epilogue.residual, y, target);
}

void workspace(const void* data, std::int64_t bytes, const ConstMatrixView& x, const WeightView& w,
               const Epilogue& epilogue, const MatrixView& y) {
  workspace(data, bytes, {matrix("x", x)}, w, epilogue, y);
}

void workspace(const void* data, std::int64_t bytes, const ActivationView& x, const WeightView& w,
               const Epilogue& epilogue, const MatrixView& y) {
  const ActivationRegions source = activation(x);
  workspace(data, bytes, {source.values, source.scales}, w, epilogue, y);
}

void q1_0(const void* blocks, std::size_t blocks_bytes, const WeightView& w) {
  if (w.group_size != kQ1_0GroupSize) {
    fail("Q1_0 has groups of ", kQ1_0GroupSize, " weights, not ", w.group_size);
  }
  const WeightRegions packed = weight_regions(w);
  const std::int64_t expected = w.n * (w.k / kQ1_0GroupSize) * kQ1_0BlockBytes;
  if (blocks_bytes != static_cast<std::size_t>(expected)) {
    fail("Q1_0 weights ", shape(w.n, w.k), " take ", expected, " bytes, but ", blocks_bytes,
         " were given");
  }
  if (expected == 0) return;
  if (blocks == nullptr) fail("Q1_0 blocks are null, but the shape is ", shape(w.n, w.k));
  const auto bytes = static_cast<std::uintptr_t>(expected);
  const Region source{"Q1_0 blocks", reinterpret_cast<std::uintptr_t>(blocks), bytes, bytes, 1};
  disjoint(packed.bits, source);
  disjoint(packed.scales, source);
}

}  // namespace check
}  // namespace binary_gemm
