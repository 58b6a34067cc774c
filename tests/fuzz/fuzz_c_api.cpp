/// Fuzzes the argument checking of the C ABI: pointers to structs that are NULL, struct sizes,
/// types, shapes, strides, offsets and bases of any value.
///
/// What C alone can get wrong must be refused, with nothing written. Everything else must do what
/// the C++ API does: leave the same bytes, or refuse with the same message. Calls whose operands
/// are accepted but do not lie in the arena are not made.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/c_api.h"
#include "check.h"
#include "choices.h"

namespace bg = binary_gemm;

namespace {

// An argument: a struct, and the pointer that is passed.
template <class Struct>
struct Argument {
  Struct value;
  Struct* pointer;

  bool right() const { return pointer != nullptr && value.struct_size == sizeof(Struct); }
  bool right_or_null() const { return pointer == nullptr || right(); }
};

template <class Struct>
Argument<Struct>& passed(Choices& c, Argument<Struct>& argument) {
  argument.value.struct_size = static_cast<std::uint32_t>(c.mostly(sizeof(Struct)));
  argument.pointer = c.rarely() ? nullptr : &argument.value;
  return argument;
}

void draw(Choices& c, std::int64_t rows, std::int64_t cols, Argument<bg_matrix>& a) {
  rows = c.mostly(rows);
  cols = c.mostly(cols);
  a.value = {0, c.number(4), c.base<void>(), rows, cols, c.stride(cols), c.offset()};
  passed(c, a);
}

void draw(Choices& c, std::int64_t n, std::int64_t k, std::int64_t g, Argument<bg_weights>& a) {
  n = c.mostly(n);
  k = c.mostly(k);
  g = c.mostly(g);
  const std::int64_t groups = g != 0 && g != -1 ? k / g : 0;
  a.value = {0, c.base<std::uint32_t>(), c.base<std::uint16_t>(), n,          k,
             g, c.stride(k / 32),        c.stride(groups),        c.offset(), c.offset()};
  passed(c, a);
}

void draw(Choices& c, std::int64_t m, std::int64_t k, Argument<bg_activation>& a) {
  m = c.mostly(m);
  k = c.mostly(k);
  a.value = {0, c.base<std::int8_t>(), c.base<float>(), m, k, c.stride(k), c.offset(), c.offset()};
  passed(c, a);
}

void draw(Choices& c, std::int64_t n, Argument<bg_bias>& a) {
  a.value = {0, c.base<float>(), c.mostly(n), c.offset()};
  passed(c, a);
  if (c.byte() % 2 == 0) a.pointer = nullptr;
}

void draw(Choices& c, Argument<bg_execution>& a) {
  a.value = {0, static_cast<std::int32_t>(c.rarely() ? -c.byte() : c.byte() % 3), c.number(5)};
  passed(c, a);
}

// The views of right arguments. A number that names nothing stays one that names nothing.
template <class Enum>
Enum enumerator(std::int32_t number) {
  return number < 0 || number > 254 ? static_cast<Enum>(255) : static_cast<Enum>(number);
}
bg::MatrixView view(const bg_matrix& s) {
  return {s.data, enumerator<bg::DataType>(s.type), s.rows, s.cols, s.row_stride, s.offset};
}
bg::MutableWeightView view(const bg_weights& s) {
  return {s.bits,
          reinterpret_cast<bg::float16*>(s.scales),
          s.n,
          s.k,
          s.group_size,
          s.bits_stride,
          s.scales_stride,
          s.bits_offset,
          s.scales_offset};
}
bg::MutableActivationView view(const bg_activation& s) {
  return {s.values, s.scales, s.m, s.k, s.row_stride, s.offset, s.scales_offset};
}
bg::BiasView view(const Argument<bg_bias>& a) {
  if (a.pointer == nullptr) return {};
  return {a.value.data, a.value.n, a.value.offset};
}
bg::cpu::Execution execution_of(const Argument<bg_execution>& a) {
  if (a.pointer == nullptr) return {};
  return {a.value.threads, enumerator<bg::cpu::Path>(a.value.path)};
}

// Whether what the checks accept also lies in the arena, and is small enough to loop over.
constexpr std::int64_t kMaxLoop = 64;

bool inside(const void* base, std::int64_t rows, std::int64_t cols, std::int64_t stride,
            std::int64_t offset, std::int64_t bytes) {
  if (rows == 0 || cols == 0) return true;
  for (const std::int64_t value : {rows, cols, offset, rows == 1 ? 0 : stride}) {
    if (value < 0 || value > kArenaBytes) return false;
  }
  const std::uintptr_t start =
      reinterpret_cast<std::uintptr_t>(base) - reinterpret_cast<std::uintptr_t>(arena);
  if (start > static_cast<std::uintptr_t>(kArenaBytes)) return false;
  const std::int64_t last_row = rows == 1 ? 0 : (rows - 1) * stride;
  return static_cast<std::int64_t>(start) + (offset + last_row + cols) * bytes <= kArenaBytes;
}
bool inside(const bg::ConstMatrixView& v) {
  return v.rows <= kMaxLoop &&
         inside(v.data, v.rows, v.cols, v.row_stride, v.offset, bg::size_of(v.type));
}
bool inside(const bg::WeightView& w) {
  return w.n <= kMaxLoop && inside(w.bits, w.n, w.k / 32, w.bits_stride, w.bits_offset, 4) &&
         (w.scales == nullptr ||
          inside(w.scales, w.n, w.k / w.group_size, w.scales_stride, w.scales_offset, 2));
}
bool inside(const bg::ActivationView& x) {
  return x.m <= kMaxLoop && inside(x.values, x.m, x.k, x.row_stride, x.offset, 1) &&
         inside(x.scales, 1, x.m, x.m, x.scales_offset, 4);
}
bool inside(const bg::BiasView& b) {
  return b.data == nullptr || inside(b.data, 1, b.n, b.n, b.offset, 4);
}

// The message of the std::invalid_argument that `body` throws, if it does.
std::optional<std::string> refusal(const std::function<void()>& body) {
  try {
    body();
    return std::nullopt;
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

bool unchanged() { return std::memcmp(before, arena, kArenaBytes) == 0; }

// Makes a call in C, and then in C++ if C's own arguments are `right`. `check` is the part of the
// C++ call that tells whether its operands are touched, and `runnable` whether they may be.
void compare(bool right, const std::function<void()>& check, const std::function<bool()>& runnable,
             const std::function<bg_status()>& in_c, const std::function<void()>& in_cpp) {
  if (right && !refusal(check) && !runnable()) return;
  std::memcpy(before, arena, kArenaBytes);
  const bg_status status = in_c();
  const std::string message = bg_last_error_message();
  if (!right) {
    require(status == BG_INVALID_ARGUMENT || status == BG_NOT_SUPPORTED);
    require(!message.empty() && unchanged());
    return;
  }
  if (status != BG_OK) require(status == BG_INVALID_ARGUMENT && unchanged());
  std::memcpy(result, arena, kArenaBytes);
  std::memcpy(arena, before, kArenaBytes);
  const std::optional<std::string> refused = refusal(in_cpp);
  require(refused.has_value() == (status != BG_OK));
  if (refused) require(*refused == message);
  require(std::memcmp(result, arena, kArenaBytes) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices c(data, size);
  const std::int64_t function = c.byte() % 10;
  const std::int64_t g = std::int64_t{32} << (c.byte() % 4);
  const std::int64_t k = c.byte() % 8 * g;
  const std::int64_t m = c.mostly(c.byte() % 6);
  const std::int64_t n = c.mostly(c.byte() % 6);
  const std::uint64_t q1_0_bytes =
      static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(k / 128 * bg::kQ1_0BlockBytes);
  Argument<bg_weights> w;
  Argument<bg_bias> bias;
  Argument<bg_activation> x;
  Argument<bg_matrix> a, y;
  Argument<bg_execution> execution;
  draw(c, n, k, g, w);
  draw(c, n, bias);
  draw(c, execution);

  switch (function) {
    case 0: {
      draw(c, m, k, x);
      draw(c, m, n, y);
      c.fill_arena();
      compare(
          x.right() && w.right() && bias.right_or_null() && y.right() && execution.right_or_null(),
          [&] { bg::check::binary_gemm(view(x.value), view(w.value), view(bias), view(y.value)); },
          [&] {
            return inside(view(x.value)) && inside(view(w.value)) && inside(view(bias)) &&
                   inside(view(y.value));
          },
          [&] {
            return bg_cpu_binary_gemm(x.pointer, w.pointer, bias.pointer, y.pointer,
                                      execution.pointer);
          },
          [&] {
            bg::cpu::binary_gemm(view(x.value), view(w.value), view(bias), view(y.value),
                                 execution_of(execution));
          });
      break;
    }
    case 1: {
      draw(c, m, k, x);
      draw(c, m, n, y);
      const std::int64_t begin = c.mostly(c.byte() % 4), end = c.mostly(n);
      const std::int32_t path = c.number(5);
      c.fill_arena();
      compare(
          x.right() && w.right() && bias.right_or_null() && y.right(),
          [&] { bg::check::binary_gemm(view(x.value), view(w.value), view(bias), view(y.value)); },
          [&] {
            return inside(view(x.value)) && inside(view(w.value)) && inside(view(bias)) &&
                   inside(view(y.value));
          },
          [&] {
            return bg_cpu_binary_gemm_rows(x.pointer, w.pointer, bias.pointer, y.pointer, begin,
                                           end, path);
          },
          [&] {
            bg::cpu::binary_gemm_rows(view(x.value), view(w.value), view(bias), view(y.value),
                                      begin, end, enumerator<bg::cpu::Path>(path));
          });
      break;
    }
    case 2: {
      draw(c, m, k, a);
      draw(c, m, n, y);
      c.fill_arena();
      compare(
          a.right() && w.right() && bias.right_or_null() && y.right() && execution.right_or_null(),
          [&] {
            bg::check::binary_linear(view(a.value), view(w.value), view(bias), view(y.value));
          },
          [&] {
            return inside(view(a.value)) && inside(view(w.value)) && inside(view(bias)) &&
                   inside(view(y.value));
          },
          [&] {
            return bg_cpu_binary_linear(a.pointer, w.pointer, bias.pointer, y.pointer,
                                        execution.pointer);
          },
          [&] {
            bg::cpu::binary_linear(view(a.value), view(w.value), view(bias), view(y.value),
                                   execution_of(execution));
          });
      break;
    }
    case 3: {
      draw(c, m, k + c.byte() % 32, a);
      draw(c, a.value.rows, a.value.cols, x);
      c.fill_arena();
      compare(
          a.right() && x.right() && execution.right_or_null(),
          [&] { bg::check::quantize_activation(view(a.value), view(x.value)); },
          [&] { return inside(view(a.value)) && inside(view(x.value)); },
          [&] { return bg_cpu_quantize_activation(a.pointer, x.pointer, execution.pointer); },
          [&] {
            bg::cpu::quantize_activation(view(a.value), view(x.value), execution_of(execution));
          });
      break;
    }
    case 4: {
      draw(c, n, k, a);
      c.fill_arena();
      compare(
          a.right() && w.right() && execution.right_or_null(),
          [&] { bg::check::pack_weights(view(a.value), view(w.value)); },
          [&] { return inside(view(a.value)) && inside(view(w.value)); },
          [&] { return bg_cpu_pack_weights(a.pointer, w.pointer, execution.pointer); },
          [&] { bg::cpu::pack_weights(view(a.value), view(w.value), execution_of(execution)); });
      break;
    }
    case 5: {
      draw(c, n, k, a);
      c.fill_arena();
      compare(
          a.right() && w.right() && execution.right_or_null(),
          [&] { bg::check::unpack_weights(view(w.value), view(a.value)); },
          [&] { return inside(view(a.value)) && inside(view(w.value)); },
          [&] { return bg_cpu_unpack_weights(w.pointer, a.pointer, execution.pointer); },
          [&] { bg::cpu::unpack_weights(view(w.value), view(a.value), execution_of(execution)); });
      break;
    }
    case 6: {
      auto* blocks = c.base<unsigned char>();
      const auto bytes = static_cast<std::size_t>(c.mostly(static_cast<std::int64_t>(q1_0_bytes)));
      const bool import = c.byte() % 2 == 0;
      c.fill_arena();
      compare(
          w.right(), [&] { bg::check::q1_0(blocks, bytes, view(w.value)); },
          [&] {
            return inside(view(w.value)) &&
                   inside(blocks, 1, static_cast<std::int64_t>(bytes & (~0ull >> 1)), 0, 0, 1);
          },
          [&] {
            return import ? bg_import_q1_0(blocks, bytes, w.pointer)
                          : bg_export_q1_0(w.pointer, blocks, bytes);
          },
          [&] {
            if (import) {
              bg::import_q1_0(blocks, bytes, view(w.value));
            } else {
              bg::export_q1_0(view(w.value), blocks, bytes);
            }
          });
      break;
    }
    case 7: {
      // A layer of packed weights, its parts, and its product.
      draw(c, m, k, a);
      draw(c, m, n, y);
      c.fill_arena();
      bg_linear* layer = reinterpret_cast<bg_linear*>(arena);
      compare(
          w.right() && bias.right_or_null(), [&] { bg::check::layer(view(w.value), view(bias)); },
          [&] { return inside(view(w.value)) && inside(view(bias)); },
          [&] { return bg_cpu_linear_from_packed(w.pointer, bias.pointer, &layer); },
          [&] { bg::cpu::BinaryLinear::from_packed(view(w.value), view(bias)); });
      if (layer == reinterpret_cast<bg_linear*>(arena) || layer == nullptr) break;
      Argument<bg_weights> packed{};
      Argument<bg_bias> own_bias{};
      passed(c, packed);
      passed(c, own_bias);
      require((bg_linear_weights(layer, packed.pointer) == BG_OK) == packed.right());
      require((bg_linear_bias(layer, own_bias.pointer) == BG_OK) == own_bias.right());
      bg_weights weights{};
      weights.struct_size = sizeof weights;
      require(bg_linear_weights(layer, &weights) == BG_OK);
      require(weights.n == w.value.n && weights.k == w.value.k &&
              weights.group_size == w.value.group_size);
      bg_bias layer_bias{};
      layer_bias.struct_size = sizeof layer_bias;
      require(bg_linear_bias(layer, &layer_bias) == BG_OK);
      const bg::BiasView bias_view{layer_bias.data, layer_bias.n, layer_bias.offset};
      compare(
          a.right() && y.right() && execution.right_or_null(),
          [&] { bg::check::binary_linear(view(a.value), view(weights), bias_view, view(y.value)); },
          [&] { return inside(view(a.value)) && inside(view(y.value)); },
          [&] { return bg_cpu_linear_run(layer, a.pointer, y.pointer, execution.pointer); },
          [&] {
            bg::cpu::binary_linear(view(a.value), view(weights), bias_view, view(y.value),
                                   execution_of(execution));
          });
      require(bg_cuda_linear_run(layer, a.pointer, y.pointer, nullptr) == BG_NOT_SUPPORTED);
      bg_linear_free(layer);
      break;
    }
    case 8: {
      // A layer of Q1_0 blocks, of any sizes that its bytes do not match.
      auto* blocks = c.base<unsigned char>();
      const std::int64_t layer_n = c.mostly(n), layer_k = c.mostly(k);
      const auto bytes = static_cast<std::size_t>(c.mostly(static_cast<std::int64_t>(q1_0_bytes)));
      c.fill_arena();
      if (!inside(blocks, 1, static_cast<std::int64_t>(bytes & (~0ull >> 1)), 0, 0, 1)) break;
      if (layer_n > (1 << 20) || !inside(view(bias))) break;
      bg_linear* layer = reinterpret_cast<bg_linear*>(arena);
      const bg_status status =
          bg_cpu_linear_from_q1_0(blocks, bytes, layer_n, layer_k, bias.pointer, &layer);
      require((status == BG_OK) == (layer != nullptr));
      if (status == BG_OK) {
        require(bias.right_or_null() && layer_k % 128 == 0);
        require(static_cast<std::size_t>(layer_n * (layer_k / 128) * 18) == bytes);
        require(bg_cpu_linear_from_q1_0(blocks, bytes, layer_n, layer_k, nullptr, nullptr) ==
                BG_INVALID_ARGUMENT);
      }
      bg_linear_free(layer);
      break;
    }
    default: {
      // What needs no memory, and what this build does not have.
      const std::int64_t any_g = c.mostly(g), any_n = c.mostly(n), any_k = c.mostly(k);
      const std::int32_t path = c.number(5);
      const bg_status status = bg_cpu_is_supported(any_n, any_k, any_g, path);
      const std::string message = bg_last_error_message();
      const auto refused = refusal([&] { bg::check::weight_shape(any_n, any_k, any_g); });
      const bool has_path = bg::cpu::is_supported(enumerator<bg::cpu::Path>(path));
      require(status == (refused ? BG_INVALID_ARGUMENT : has_path ? BG_OK : BG_NOT_SUPPORTED));
      if (refused) require(message == *refused);
      bg_linear* layer = reinterpret_cast<bg_linear*>(arena);
      require(bg_cuda_linear_from_packed(w.pointer, bias.pointer, nullptr, &layer) ==
              BG_NOT_SUPPORTED);
      require(layer == nullptr);
      require(bg_cuda_binary_gemm(nullptr, w.pointer, bias.pointer, nullptr, nullptr) ==
              BG_NOT_SUPPORTED);
      require(bg_cpu_linear_run(nullptr, nullptr, nullptr, execution.pointer) != BG_OK);
    }
  }
  return 0;
}
