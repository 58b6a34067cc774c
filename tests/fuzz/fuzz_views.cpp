/// Fuzzes the checks and the CPU functions with views of any shape, stride, offset and pointer.
///
/// What the checks accept must keep to the bytes that the views name: where these lie in the arena,
/// the functions run on them and are judged by the reference, else only the checks run. What the
/// checks reject, the functions must reject too, and write nothing.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "check.h"
#include "choices.h"

namespace bg = binary_gemm;

namespace {

// Whether rows of elements lie in the arena, told without the library's checks.
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

// Rows or columns that hold no elements can still be too many to loop over.
constexpr std::int64_t kMaxLoop = 64;

bool inside(const bg::ConstMatrixView& v) {
  return v.rows <= kMaxLoop &&
         inside(v.data, v.rows, v.cols, v.row_stride, v.offset, bg::size_of(v.type));
}
bool inside(const bg::WeightView& w) {
  return w.group_size > 0 && w.n <= kMaxLoop &&
         inside(w.bits, w.n, w.k / 32, w.bits_stride, w.bits_offset, 4) &&
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

bool inside(const bg::Epilogue& e) {
  return inside(e.bias) && (e.residual.data == nullptr || inside(e.residual));
}

// Without K there is nothing to point at; the reference, unlike the library, wants no strides then.
bg::WeightView plain(bg::WeightView w) {
  if (w.k == 0) w.bits_stride = w.scales_stride = w.bits_offset = w.scales_offset = 0;
  return w;
}
template <class View>
View plain(View x) {
  if (x.k == 0) x.row_stride = x.offset = 0;
  return x;
}

bool accepts(const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const std::invalid_argument& error) {
    require(std::strncmp(error.what(), "binary_gemm: ", 13) == 0);
    return false;
  }
}

// The elements of a written view, so that NaNs of other bits count as equal.
struct Written {
  bg::ConstMatrixView view;
};

bool is_nan(const unsigned char* element, bg::DataType type) {
  const float value = bg::reference::load(element, type, 0);
  return type != bg::DataType::kInt8 && value != value;
}

// Compares the arena as `actual` has it with the arena as it is: equal but for NaNs in `written`.
void require_equal_arenas(const unsigned char* actual, const std::vector<Written>& written) {
  if (std::memcmp(actual, arena, kArenaBytes) == 0) return;
  std::vector<bool> excused(kArenaBytes, false);
  for (const Written& w : written) {
    const std::int64_t bytes = bg::size_of(w.view.type);
    for (std::int64_t r = 0; r < w.view.rows; ++r) {
      for (std::int64_t c = 0; c < w.view.cols; ++c) {
        const unsigned char* element = static_cast<const unsigned char*>(w.view.data) +
                                       (w.view.offset + r * w.view.row_stride + c) * bytes;
        const std::ptrdiff_t at = element - arena;
        if (!is_nan(element, w.view.type) || !is_nan(actual + at, w.view.type)) continue;
        for (std::int64_t i = 0; i < bytes; ++i) excused[static_cast<std::size_t>(at + i)] = true;
      }
    }
  }
  for (std::int64_t i = 0; i < kArenaBytes; ++i) {
    require(actual[i] == arena[i] || excused[static_cast<std::size_t>(i)]);
  }
}

// Runs `check`, and `call` where it may run. With `oracle`, both must leave the same arena; `call`
// may also reject for reasons of its own (`may_throw`).
void run(const std::function<void()>& check, bool runnable, const std::function<void()>& call,
         const std::function<void()>& oracle, const std::vector<Written>& written,
         bool may_throw = false) {
  std::memcpy(before, arena, kArenaBytes);
  if (!accepts(check)) {
    require(!accepts(call));
    require(std::memcmp(before, arena, kArenaBytes) == 0);
    return;
  }
  if (!runnable) return;
  const bool done = accepts(call);
  require(done || may_throw);
  if (!done) {
    require(std::memcmp(before, arena, kArenaBytes) == 0);
    return;
  }
  if (!oracle) return;
  std::memcpy(result, arena, kArenaBytes);
  std::memcpy(arena, before, kArenaBytes);
  oracle();
  require_equal_arenas(result, written);
}

bg::MatrixView matrix(Choices& c, std::int64_t rows, std::int64_t cols) {
  rows = c.mostly(rows);
  cols = c.mostly(cols);
  return {c.base<void>(), static_cast<bg::DataType>(c.enumerator(4)), rows, cols, c.stride(cols),
          c.offset()};
}

bg::MutableWeightView weights(Choices& c, std::int64_t n, std::int64_t k, std::int64_t g) {
  n = c.mostly(n);
  k = c.mostly(k);
  g = c.mostly(g);
  return {c.base<std::uint32_t>(),
          c.base<bg::float16>(),
          n,
          k,
          g,
          c.stride(k / 32),
          c.stride(g != 0 && g != -1 ? k / g : 0),
          c.offset(),
          c.offset()};
}

bg::MutableActivationView activation(Choices& c, std::int64_t m, std::int64_t k) {
  m = c.mostly(m);
  k = c.mostly(k);
  return {c.base<std::int8_t>(), c.base<float>(), m, k, c.stride(k), c.offset(), c.offset()};
}

bg::BiasView bias(Choices& c, std::int64_t n) {
  if (c.byte() % 2 == 0) return {};
  n = c.mostly(n);
  return {c.base<float>(), n, c.offset()};
}

// A residual is of y's shape and type, or y itself, or none.
bg::Epilogue epilogue(Choices& c, std::int64_t m, std::int64_t n, const bg::MatrixView& y) {
  bg::Epilogue all = bias(c, n);
  switch (c.byte() % 4) {
    case 0:
      all.residual = y;
      break;
    case 1:
      all.residual = matrix(c, m, n);
      if (!c.rarely()) all.residual.type = y.type;
      break;
    default:
      break;
  }
  return all;
}

// The part of rows [begin, begin + count) of the weights.
bg::Epilogue part(bg::Epilogue all, std::int64_t begin, std::int64_t count) {
  all.bias = all.bias.row_range(begin, count);
  if (all.residual.data != nullptr) all.residual = all.residual.column_range(begin, count);
  return all;
}

Written written(const bg::MatrixView& y) { return {y}; }
Written written_scales(const bg::MutableActivationView& q) {
  return {{q.scales, bg::DataType::kFloat32, 1, q.m, q.m, q.scales_offset}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices c(data, size);
  const std::int64_t function = c.byte() % 9;
  const std::int64_t g = std::int64_t{32} << (c.byte() % 4);
  const std::int64_t k = c.byte() % 12 * g;
  const std::int64_t m = c.mostly(c.byte() % 7);
  const std::int64_t n = c.mostly(c.byte() % 7);
  const bg::cpu::Execution execution{
      c.rarely() ? -1 : static_cast<int>(c.byte() % 3),
      c.rarely() ? static_cast<bg::cpu::Path>(c.byte())
                 : bg::cpu::supported_paths()[static_cast<std::size_t>(c.byte()) %
                                              bg::cpu::supported_paths().size()]};
  const bool odd = execution.threads < 0 || !bg::cpu::is_supported(execution.path);

  switch (function) {
    case 0:
    case 1: {
      const bg::WeightView w = weights(c, n, k, g);
      const bg::ActivationView x = activation(c, m, k);
      const bg::MatrixView y = matrix(c, m, n);
      const bg::Epilogue b = epilogue(c, m, n, y);
      const std::int64_t begin = c.mostly(function == 0 ? 0 : c.byte() % 4);
      const std::int64_t end = c.mostly(n);
      c.fill_arena();
      c.poke_arena();
      const auto check = [&] { bg::check::binary_gemm(x, w, b, y); };
      const bool runnable = inside(w) && inside(x) && inside(b) && inside(y);
      if (function == 0) {
        run(
            check, runnable, [&] { bg::cpu::binary_gemm(x, w, b, y, execution); },
            [&] { bg::reference::binary_gemm(plain(x), plain(w), b, y); }, {written(y)}, odd);
      } else {
        run(
            check, runnable,
            [&] { bg::cpu::binary_gemm_rows(x, w, b, y, begin, end, execution.path); },
            [&] {
              bg::reference::binary_gemm(plain(x), plain(w.row_range(begin, end - begin)),
                                         part(b, begin, end - begin),
                                         y.column_range(begin, end - begin));
            },
            {written(y)}, odd || begin < 0 || begin > end || end > w.n);
      }
      // A shard of what is valid is valid.
      if (accepts(check) && runnable && begin >= 0 && begin <= end && end <= w.n) {
        bg::check::binary_gemm(x, w.row_range(begin, end - begin), part(b, begin, end - begin),
                               y.column_range(begin, end - begin));
        const std::int64_t half = w.k / w.group_size / 2 * w.group_size;
        bg::check::binary_gemm(x.column_range(half, w.k - half), w.column_range(half, w.k - half),
                               b, y);
        bg::Epilogue lower = b;
        if (b.residual.data != nullptr) {
          lower.residual = b.residual.row_range(x.m / 2, x.m - x.m / 2);
        }
        bg::check::binary_gemm(x.row_range(x.m / 2, x.m - x.m / 2), w, lower,
                               y.row_range(x.m / 2, x.m - x.m / 2));
      }
      break;
    }
    case 2: {
      const bg::WeightView w = weights(c, n, k, g);
      const bg::ConstMatrixView x = matrix(c, m, k);
      const bg::MatrixView y = matrix(c, m, n);
      const bg::Epilogue b = epilogue(c, m, n, y);
      c.fill_arena();
      c.poke_arena();
      const bool runnable = inside(w) && inside(x) && inside(b) && inside(y);
      run([&] { bg::check::binary_linear(x, w, b, y); }, runnable,
          [&] { bg::cpu::binary_linear(x, w, b, y, execution); },
          [&] {
            std::vector<std::int8_t> q(static_cast<std::size_t>(x.rows * x.cols));
            std::vector<float> scales(static_cast<std::size_t>(x.rows));
            const auto view = bg::activation_view(q.data(), scales.data(), x.rows, x.cols);
            bg::reference::quantize_activation(x, view);
            bg::reference::binary_gemm(view, plain(w), b, y);
          },
          {written(y)}, odd);
      break;
    }
    case 3: {
      const bg::ConstMatrixView x = matrix(c, m, k + c.byte() % 32);
      const bg::MutableActivationView q = activation(c, x.rows, x.cols);
      c.fill_arena();
      c.poke_arena();
      run([&] { bg::check::quantize_activation(x, q); }, inside(x) && inside(q),
          [&] { bg::cpu::quantize_activation(x, q, execution); },
          [&] { bg::reference::quantize_activation(x, plain(q)); }, {written_scales(q)}, odd);
      break;
    }
    case 4: {
      const bg::MutableWeightView w = weights(c, n, k, g);
      const bg::ConstMatrixView dense = matrix(c, n, k);
      c.fill_arena();
      c.poke_arena();
      run([&] { bg::check::pack_weights(dense, w); }, inside(w) && inside(dense),
          [&] { bg::cpu::pack_weights(dense, w, execution); }, nullptr, {}, execution.threads < 0);
      break;
    }
    case 5: {
      const bg::WeightView w = weights(c, n, k, g);
      const bg::MatrixView dense = matrix(c, n, k);
      c.fill_arena();
      c.poke_arena();
      run([&] { bg::check::unpack_weights(w, dense); }, inside(w) && inside(dense),
          [&] { bg::cpu::unpack_weights(w, dense, execution); }, nullptr, {},
          execution.threads < 0);
      break;
    }
    case 6: {
      const bg::ConstMatrixView x = matrix(c, m, k + c.byte() % 32);
      const bg::MutableActivationView q = activation(c, x.rows, x.cols);
      bg::ConstMatrixView gain;
      if (c.byte() % 4 != 0) gain = matrix(c, 1, x.cols);
      const float epsilons[] = {0, 1e-6f, 1, -1, std::numeric_limits<float>::quiet_NaN()};
      const float epsilon = epsilons[c.rarely() ? 3 + c.byte() % 2 : c.byte() % 3];
      c.fill_arena();
      c.poke_arena();
      run([&] { bg::check::rms_norm_quantize(x, gain, epsilon, q); },
          inside(x) && inside(q) && (gain.data == nullptr || inside(gain)),
          [&] { bg::cpu::rms_norm_quantize(x, gain, epsilon, q, execution); },
          [&] { bg::reference::rms_norm_quantize(x, gain, epsilon, plain(q)); },
          {written_scales(q)}, odd);
      break;
    }
    case 7: {
      const std::int64_t cols = k + c.byte() % 32;
      const bg::ConstMatrixView x = matrix(c, m, 2 * cols);
      const bg::MutableActivationView q = activation(c, x.rows, cols);
      c.fill_arena();
      c.poke_arena();
      run([&] { bg::check::swiglu_quantize(x, q); }, inside(x) && inside(q),
          [&] { bg::cpu::swiglu_quantize(x, q, execution); },
          [&] { bg::reference::swiglu_quantize(x, plain(q)); }, {written_scales(q)}, odd);
      break;
    }
    default: {
      const bg::MutableWeightView w = weights(c, n, k, g);
      const bg::BiasView b = bias(c, n);
      auto* blocks = c.base<unsigned char>();
      const std::uint64_t right =
          static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(k / 128 * bg::kQ1_0BlockBytes);
      const auto bytes = static_cast<std::size_t>(c.mostly(static_cast<std::int64_t>(right)));
      const bool import = c.byte() % 2 == 0;
      c.fill_arena();
      c.poke_arena();
      const bool runnable =
          inside(w) && inside(blocks, 1, static_cast<std::int64_t>(bytes & (~0ull >> 1)), 0, 0, 1);
      run([&] { bg::check::q1_0(blocks, bytes, w); }, runnable,
          [&] {
            if (import) {
              bg::import_q1_0(blocks, bytes, w);
            } else {
              bg::export_q1_0(w, blocks, bytes);
            }
          },
          nullptr, {});
      if (inside(w) && inside(b)) accepts([&] { bg::cpu::BinaryLinear::from_packed(w, b); });
    }
  }
  return 0;
}
