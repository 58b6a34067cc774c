#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <ostream>
#include <stdexcept>

#include "binary_gemm/reference.h"

#if defined(__SANITIZE_ADDRESS__)
#define BINARY_GEMM_TEST_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BINARY_GEMM_TEST_ASAN
#endif
#endif
#ifdef BINARY_GEMM_TEST_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace binary_gemm {
namespace testing {
namespace {

constexpr unsigned char kGuard = 0xff;

std::string hex(std::uint32_t value, int digits) {
  std::string text(static_cast<std::size_t>(digits), '0');
  for (int i = digits - 1; i >= 0; --i, value >>= 4) {
    text[static_cast<std::size_t>(i)] = "0123456789abcdef"[value & 15u];
  }
  return "0x" + text;
}

bool is_nan(std::uint32_t bits, DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return (bits & 0x7fffffffu) > 0x7f800000u;
    case DataType::kFloat16:
      return (bits & 0x7fffu) > 0x7c00u;
    case DataType::kBFloat16:
      return (bits & 0x7fffu) > 0x7f80u;
    case DataType::kInt8:
      break;
  }
  return false;
}

// A normal fp16 of the biased exponent `field` with `fraction` in its 10 bits.
float16 half(std::int64_t field, std::int64_t fraction, bool negative = false) {
  return {static_cast<std::uint16_t>((negative ? 0x8000 : 0) | field << 10 | fraction)};
}

float16 narrow_scale(Random& random) {
  return half(random.integer(8, 10), random.integer(0, 1023));  // 2^-7 to 2^-4
}

// Full mantissas with exponents that alternate between small and large, so any two neighbors are
// more than three binades apart.
float16 wide_scale(Random& random, std::int64_t group) {
  return half(group % 2 == 0 ? random.integer(1, 9) : random.integer(16, 28),
              random.integer(0, 511) * 2 + 1);
}

float16 edge_scale(Random& random, std::int64_t group) {
  if (group % 4 == 0) return half(20, random.integer(0, 1023));
  const std::int64_t below = random.integer(0, 13);  // binades under the largest
  // Three binades below still fit whole; each further one needs one more trailing zero.
  const std::int64_t zeros = std::max<std::int64_t>(0, below - 3);
  std::int64_t fraction = zeros >= 10 ? 0 : random.integer(0, 1023) >> zeros << zeros;
  if (random.chance(0.05)) fraction |= 1;  // one bit too many, unless it fits
  return half(20 - below, fraction, random.chance(0.5));
}

float16 scale_of(ScalePattern pattern, bool wide_slice, bool special_slice, std::int64_t group,
                 Random& random) {
  float16 scale = narrow_scale(random);
  switch (pattern) {
    case ScalePattern::kUnit:
      return half(15, 0);
    case ScalePattern::kNarrow:
      return scale;
    case ScalePattern::kWide:
      return wide_scale(random, group);
    case ScalePattern::kMixed:
      return wide_slice ? wide_scale(random, group) : scale;
    case ScalePattern::kEdge:
      return edge_scale(random, group);
    case ScalePattern::kZero:
      if (special_slice || random.chance(0.3)) {
        return {static_cast<std::uint16_t>(random.chance(0.5) ? 0x8000 : 0)};
      }
      return scale;
    case ScalePattern::kNegative:
      if (wide_slice) scale = wide_scale(random, group);
      if (random.chance(0.5)) scale.bits = static_cast<std::uint16_t>(scale.bits | 0x8000u);
      return scale;
    case ScalePattern::kSubnormal:
      return {static_cast<std::uint16_t>(random.integer(0, special_slice ? 0x1400 : 0x3ff) |
                                         (random.chance(0.5) ? 0x8000 : 0))};
    case ScalePattern::kInfinite:
      if (special_slice && random.chance(0.4)) return half(31, 0, random.chance(0.3));
      return scale;
    case ScalePattern::kNan:
      if (special_slice && random.chance(0.4)) return half(31, random.integer(1, 1023));
      return scale;
    case ScalePattern::kAnyBits:
      return {static_cast<std::uint16_t>(random.bits() & 0xffffu)};
  }
  return scale;
}

void fill_quantized_row(ActivationPattern pattern, std::int64_t m, std::int8_t* q, std::int64_t k,
                        float* scale, Random& random) {
  for (std::int64_t i = 0; i < k; ++i) q[i] = static_cast<std::int8_t>(random.integer(-128, 127));
  *scale = static_cast<float>(random.uniform() / 32);
  if (m % 3 == 2) {  // with the rows of mostly +1: dots of more bits than a float has to spare
    for (std::int64_t i = 0; i < k; ++i) q[i] = static_cast<std::int8_t>(random.integer(90, 127));
  }
  if (pattern == ActivationPattern::kPoisoned && m % 3 == 1) {
    std::fill(q, q + k, std::int8_t{0});
    *scale = m % 2 == 0 ? std::numeric_limits<float>::infinity()
                        : std::numeric_limits<float>::quiet_NaN();
  }
  if (pattern != ActivationPattern::kExtreme) return;
  switch (m % 8) {
    case 0:
      std::fill(q, q + k, std::int8_t{-128});
      break;
    case 1:
      std::fill(q, q + k, std::int8_t{127});
      *scale = 0x1p-149f;
      break;
    case 2:
      for (std::int64_t i = 0; i < k; ++i) q[i] = static_cast<std::int8_t>(i % 2 == 0 ? -128 : 127);
      break;
    case 3:
      std::fill(q, q + k, std::int8_t{0});
      break;
    case 4:
      *scale = 0;
      break;
    case 5:
      *scale = 0x1p-135f * 1.5f;
      break;
    case 6:
      *scale = std::numeric_limits<float>::max();
      break;
    default:
      *scale = -*scale;
  }
}

}  // namespace

std::uint64_t Random::bits() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::int64_t Random::integer(std::int64_t low, std::int64_t high) {
  const auto range = static_cast<std::uint64_t>(high - low) + 1;
  return low + static_cast<std::int64_t>(bits() % range);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

float Random::gaussian() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return static_cast<float>(radius * std::cos(6.283185307179586 * uniform()));
}

GuardedBuffer::GuardedBuffer(std::int64_t rows, std::int64_t cols, std::int64_t element_bytes,
                             std::int64_t padding, std::int64_t offset)
    : rows_(rows),
      cols_(cols),
      element_bytes_(element_bytes),
      stride_(cols + padding),
      offset_(offset) {
  const std::int64_t elements = offset + (rows > 0 ? (rows - 1) * stride_ + cols : 0);
  storage_.assign(kFront + static_cast<std::size_t>(elements * element_bytes) + kBack, kGuard);
  forbid_guards(true);
}

GuardedBuffer::~GuardedBuffer() {
  if (!storage_.empty()) forbid_guards(false);
}

void GuardedBuffer::forbid_guards([[maybe_unused]] bool forbid) const {
#ifdef BINARY_GEMM_TEST_ASAN
  const unsigned char* front = storage_.data();
  const unsigned char* back = front + storage_.size() - kBack;
  if (forbid) {
    ASAN_POISON_MEMORY_REGION(front, kFront);
    ASAN_POISON_MEMORY_REGION(back, kBack);
  } else {
    ASAN_UNPOISON_MEMORY_REGION(front, kFront);
    ASAN_UNPOISON_MEMORY_REGION(back, kBack);
  }
#endif
}

unsigned char* GuardedBuffer::raw() {
  forbid_guards(false);
  return storage_.data();
}

::testing::AssertionResult GuardedBuffer::check(bool elements_too) const {
  forbid_guards(false);
  std::vector<bool> element(storage_.size(), false);
  if (!elements_too) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      const auto begin = static_cast<std::ptrdiff_t>(kFront) +
                         static_cast<std::ptrdiff_t>((offset_ + r * stride_) * element_bytes_);
      std::fill_n(element.begin() + begin, cols_ * element_bytes_, true);
    }
  }
  ::testing::AssertionResult result = ::testing::AssertionSuccess();
  for (std::size_t i = 0; i < storage_.size(); ++i) {
    if (element[i] || storage_[i] == kGuard) continue;
    const auto byte = static_cast<std::int64_t>(i) - static_cast<std::int64_t>(kFront);
    const std::int64_t at = byte / element_bytes_ - offset_;
    result = ::testing::AssertionFailure()
             << "byte " << byte << " after the base was written (" << hex(storage_[i], 2)
             << "): " << rows_ << " x " << cols_ << " elements of " << element_bytes_
             << " bytes, stride " << stride_ << ", offset " << offset_ << ", so row "
             << (stride_ > 0 ? at / stride_ : 0) << ", column "
             << (stride_ > 0 ? at % stride_ : at);
    break;
  }
  forbid_guards(true);
  return result;
}

::testing::AssertionResult GuardedBuffer::guards_intact() const { return check(false); }
::testing::AssertionResult GuardedBuffer::untouched() const { return check(true); }

std::vector<ScalePattern> all_scale_patterns() {
  return {ScalePattern::kUnit,     ScalePattern::kNarrow,    ScalePattern::kWide,
          ScalePattern::kMixed,    ScalePattern::kEdge,      ScalePattern::kZero,
          ScalePattern::kNegative, ScalePattern::kSubnormal, ScalePattern::kInfinite,
          ScalePattern::kNan,      ScalePattern::kAnyBits};
}

const char* name(ScalePattern pattern) {
  static constexpr const char* kNames[] = {"unit",     "narrow", "wide",     "mixed",
                                           "edge",     "zero",   "negative", "subnormal",
                                           "infinite", "nan",    "anybits"};
  return kNames[static_cast<int>(pattern)];
}

std::vector<ActivationPattern> all_activation_patterns() {
  return {ActivationPattern::kRandom, ActivationPattern::kExtreme, ActivationPattern::kPoisoned};
}

const char* name(ActivationPattern pattern) {
  static constexpr const char* kNames[] = {"random", "extreme", "poisoned"};
  return kNames[static_cast<int>(pattern)];
}

std::vector<Layout> all_layouts() {
  return {{"dense", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
          {"padded", 32, 16, 4, 4, 8, 8, 16, 4, 8, 16},
          {"odd", 5, 3, 1, 1, 3, 3, 1, 1, 3, 1}};
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << "M=" << shape.m << " N=" << shape.n << " K=" << shape.k << " G=" << shape.g;
}

std::vector<std::int64_t> interesting_k(std::int64_t g) {
  return {g, 3 * g, kSliceK, kSliceK + g, 2 * kSliceK + 3 * g};
}

std::vector<std::int64_t> interesting_n() { return {1, 2, 7, 16, 31, 33, 64, 67}; }

ActivationView Problem::x() const {
  return {values.base<std::int8_t>(),
          x_scales.base<float>(),
          shape.m,
          shape.k,
          values.stride(),
          values.offset(),
          x_scales.offset()};
}

WeightView Problem::w() const {
  return {bits.base<std::uint32_t>(),
          scales.base<float16>(),
          shape.n,
          shape.k,
          shape.g,
          bits.stride(),
          scales.stride(),
          bits.offset(),
          scales.offset()};
}

BiasView Problem::bias() const { return {bias_data.base<float>(), shape.n, bias_data.offset()}; }

GuardedBuffer Problem::output(DataType type, std::int64_t m, std::int64_t n) const {
  return {m, n, size_of(type), layout.y_padding, layout.y_offset};
}

::testing::AssertionResult Problem::guards_intact() const {
  for (const GuardedBuffer* buffer : {&values, &x_scales, &bits, &scales, &bias_data}) {
    ::testing::AssertionResult result = buffer->guards_intact();
    if (!result) return result << " (an input)";
  }
  return ::testing::AssertionSuccess();
}

Problem make_problem(Shape shape, ScalePattern scale_pattern, ActivationPattern activations,
                     const Layout& layout, std::uint64_t seed) {
  Random random(seed);
  Problem p{shape,
            layout,
            {shape.m, shape.k, 1, layout.x_padding, layout.x_offset},
            {1, shape.m, 4, 0, layout.x_scales_offset},
            {shape.n, shape.k / 32, 4, layout.bits_padding, layout.bits_offset},
            {shape.n, shape.k / shape.g, 2, layout.scales_padding, layout.scales_offset},
            {1, shape.n, 4, 0, layout.bias_offset}};
  for (std::int64_t m = 0; m < shape.m; ++m) {
    fill_quantized_row(activations, m, p.values.row<std::int8_t>(m), shape.k,
                       p.x_scales.row<float>(0) + m, random);
  }
  const std::int64_t slice_groups = kSliceK / shape.g;
  for (std::int64_t n = 0; n < shape.n; ++n) {
    for (std::int64_t j = 0; j < shape.k / 32; ++j) {
      std::uint32_t word = 0;
      for (int i = 0; i < 32; ++i) {
        word |= static_cast<std::uint32_t>(random.gaussian() > 0) << i;
      }
      if (n % 3 == 2) {
        const std::uint64_t more = random.bits();
        word |= static_cast<std::uint32_t>(more | more >> 32);
      }
      p.bits.row<std::uint32_t>(n)[j] = word;
    }
    bool wide_slice = false;
    bool special_slice = false;
    for (std::int64_t g = 0; g < shape.k / shape.g; ++g) {
      if (g % slice_groups == 0) {
        wide_slice = random.chance(0.5);
        special_slice = random.chance(0.3);
      }
      p.scales.row<float16>(n)[g] = scale_of(scale_pattern, wide_slice, special_slice, g, random);
    }
    p.bias_data.row<float>(0)[n] = random.gaussian() * 100;
  }
  return p;
}

void fill_activations(const MatrixView& x, Random& random) {
  const float largest = x.type == DataType::kFloat16    ? 65504.0f
                        : x.type == DataType::kBFloat16 ? 0x1.fep127f
                                                        : std::numeric_limits<float>::max();
  const float smallest = x.type == DataType::kFloat16    ? 0x1p-24f
                         : x.type == DataType::kBFloat16 ? 0x1p-133f
                                                         : 0x1p-149f;
  for (std::int64_t m = 0; m < x.rows; ++m) {
    const std::int64_t row = x.offset + m * x.row_stride;
    const auto set = [&](std::int64_t k, float v) { reference::store(x.data, x.type, row + k, v); };
    const std::int64_t one = x.cols > 0 ? random.integer(0, x.cols - 1) : 0;
    for (std::int64_t k = 0; k < x.cols; ++k) {
      switch (m % 10) {
        case 1:
          set(k, random.chance(0.5) ? 0.0f : -0.0f);
          break;
        case 4:  // subnormals only
          set(k, static_cast<float>(random.integer(-100, 100)) * smallest);
          break;
        case 5:
          set(k, random.chance(0.5) ? largest : -largest * static_cast<float>(random.uniform()));
          break;
        case 7:  // halves of a step: the quantizer's ties
          set(k, static_cast<float>(random.integer(-254, 254)) * 0.5f);
          break;
        case 8:  // everything else rounds to zero
          set(k, k == one ? largest : random.gaussian() * smallest);
          break;
        case 9:  // the whole range of exponents
          set(k, std::ldexp(random.gaussian(), static_cast<int>(random.integer(-150, 60))));
          if (x.type == DataType::kFloat16) set(k, std::ldexp(1.0f, static_cast<int>(k % 40) - 24));
          break;
        default:
          set(k, random.gaussian());
      }
    }
    if (x.cols == 0) continue;
    if (m % 10 == 2) set(one, std::numeric_limits<float>::quiet_NaN());
    if (m % 10 == 3) set(one, -std::numeric_limits<float>::infinity());
    if (m % 10 == 6) set(one, 1000.0f);
    if (m % 10 == 7) set(one, 127.0f);
  }
}

void fill_any_bits(GuardedBuffer& x, DataType type, Random& random) {
  for (std::int64_t m = 0; m < x.rows(); ++m) {
    const auto limit = static_cast<std::uint32_t>(random.integer(1, 0x7f80)) << 16;
    for (std::int64_t k = 0; k < x.cols(); ++k) {
      auto bits = static_cast<std::uint32_t>(random.bits());
      if (random.chance(0.999)) bits = (bits & 0x80000000u) | (bits & 0x7fffffffu) % limit;
      if (type == DataType::kFloat32) {
        x.row<std::uint32_t>(m)[k] = bits;
      } else {
        x.row<std::uint16_t>(m)[k] = static_cast<std::uint16_t>(bits >> 16);
      }
    }
  }
}

void fill_gaussian(const MatrixView& x, Random& random, float deviation) {
  for (std::int64_t m = 0; m < x.rows; ++m) {
    for (std::int64_t k = 0; k < x.cols; ++k) {
      reference::store(x.data, x.type, x.offset + m * x.row_stride + k,
                       random.gaussian() * deviation);
    }
  }
}

std::uint32_t bits_at(const ConstMatrixView& matrix, std::int64_t m, std::int64_t n) {
  const std::int64_t bytes = size_of(matrix.type);
  const char* element =
      static_cast<const char*>(matrix.data) + (matrix.offset + m * matrix.row_stride + n) * bytes;
  std::uint32_t bits = 0;
  std::memcpy(&bits, element, static_cast<std::size_t>(bytes));
  return bits;
}

::testing::AssertionResult equal_bits(const ConstMatrixView& actual,
                                      const ConstMatrixView& expected) {
  if (actual.type != expected.type || actual.rows != expected.rows ||
      actual.cols != expected.cols) {
    return ::testing::AssertionFailure() << "the matrices differ in type or shape";
  }
  const int digits = static_cast<int>(size_of(actual.type)) * 2;
  std::int64_t differences = 0;
  std::string first;
  for (std::int64_t m = 0; m < actual.rows; ++m) {
    for (std::int64_t n = 0; n < actual.cols; ++n) {
      const std::uint32_t a = bits_at(actual, m, n);
      const std::uint32_t e = bits_at(expected, m, n);
      if (a == e || (is_nan(a, actual.type) && is_nan(e, actual.type))) continue;
      if (differences++ > 0) continue;
      const auto value = [&](const ConstMatrixView& v) {
        return std::to_string(reference::load(v.data, v.type, v.offset + m * v.row_stride + n));
      };
      first = "(m=" + std::to_string(m) + ", n=" + std::to_string(n) + ") is " + hex(a, digits) +
              " (" + value(actual) + "), expected " + hex(e, digits) + " (" + value(expected) + ")";
    }
  }
  if (differences == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << differences << " of " << actual.rows * actual.cols << " elements of "
         << name(actual.type) << " differ; the first, " << first;
}

void expect_invalid(const std::function<void()>& call, const Parts& parts) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected an error with " << ::testing::PrintToString(parts);
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find("binary_gemm: "), 0u) << message;
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
    }
  }
}

std::string hex(const void* pointer) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx",
                static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(pointer)));
  return text;
}

}  // namespace testing
}  // namespace binary_gemm
