#pragma once

/// Exact binary arithmetic in integers, with rounding done by hand: what the tests judge the
/// reference with. Nothing here uses a floating-point operation or anything of the library.

#include <algorithm>
#include <cstdint>

namespace binary_gemm {
namespace testing {

using Int128 = __int128;
using Unsigned128 = unsigned __int128;

/// The number `mantissa * 2^exponent`. |mantissa| < 2^126.
struct Exact {
  Int128 mantissa = 0;
  int exponent = 0;
};

inline Unsigned128 magnitude(Int128 value) {
  return value < 0 ? -static_cast<Unsigned128>(value) : static_cast<Unsigned128>(value);
}

inline int bit_length(Unsigned128 value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

/// The multiple of 2^exponent nearest to `v`, ties to even.
inline Exact round_at(Exact v, int exponent) {
  const int shift = exponent - v.exponent;
  if (shift <= 0) return v;
  if (shift >= 127) return {0, exponent};  // below half a unit
  const Unsigned128 value = magnitude(v.mantissa);
  const Unsigned128 half = Unsigned128{1} << (shift - 1);
  const Unsigned128 rest = value & (half * 2 - 1);
  Unsigned128 quotient = value >> shift;
  if (rest > half || (rest == half && (quotient & 1) != 0)) ++quotient;
  const auto rounded = static_cast<Int128>(quotient);
  return {v.mantissa < 0 ? -rounded : rounded, exponent};
}

/// `v` rounded to `precision` significant bits, ties to even, with any exponent.
inline Exact round_to_bits(Exact v, int precision) {
  return round_at(v, v.exponent + bit_length(magnitude(v.mantissa)) - precision);
}

/// The sum, exact but for a sticky bit where the smaller is too far below to change more than the
/// direction of a rounding to 24 bits. Both mantissas must have at most 48 bits.
inline Exact add(Exact a, Exact b) {
  if (a.mantissa == 0) return b;
  if (b.mantissa == 0) return a;
  if (a.exponent < b.exponent) std::swap(a, b);
  constexpr int kRoom = 78;
  if (a.exponent - b.exponent > kRoom) b = {b.mantissa < 0 ? -1 : 1, a.exponent - kRoom};
  return {a.mantissa * (Int128{1} << (a.exponent - b.exponent)) + b.mantissa, b.exponent};
}

inline Exact multiply(Exact a, Exact b) {
  return {a.mantissa * b.mantissa, a.exponent + b.exponent};
}

/// The quotient, with a sticky lowest bit. Both mantissas positive and of at most 24 bits.
inline Exact divide(Exact a, Exact b) {
  constexpr int kShift = 80;
  const Int128 shifted = a.mantissa << kShift;
  const Int128 sticky = shifted % b.mantissa != 0 ? 1 : 0;
  return {shifted / b.mantissa * 2 + sticky, a.exponent - b.exponent - kShift - 1};
}

/// An IEEE binary format: a sign bit, exponent bits, fraction bits.
struct Format {
  int exponent_bits;
  int fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int least_exponent() const { return 1 - bias() - fraction_bits; }  // of a subnormal's unit
  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1u) << fraction_bits; }
  std::uint32_t sign() const { return 1u << (exponent_bits + fraction_bits); }
  bool is_nan(std::uint32_t bits) const { return (bits & (sign() - 1u)) > infinity(); }
  bool is_infinite(std::uint32_t bits) const { return (bits & (sign() - 1u)) == infinity(); }
  bool is_finite(std::uint32_t bits) const { return (bits & (sign() - 1u)) < infinity(); }
  bool is_negative(std::uint32_t bits) const { return (bits & sign()) != 0; }
};

inline constexpr Format kFloat32Format{8, 23};
inline constexpr Format kFloat16Format{5, 10};
inline constexpr Format kBFloat16Format{8, 7};

/// The value of finite bits.
inline Exact decode(std::uint32_t bits, Format format) {
  const std::uint32_t fraction = bits & ((1u << format.fraction_bits) - 1u);
  const auto field = static_cast<int>((bits & (format.sign() - 1u)) >> format.fraction_bits);
  const Int128 mantissa =
      field == 0 ? Int128{fraction} : Int128{fraction} + (Int128{1} << format.fraction_bits);
  return {format.is_negative(bits) ? -mantissa : mantissa,
          format.least_exponent() + (field == 0 ? 0 : field - 1)};
}

/// `v` rounded once to the format, ties to even, with subnormals and overflow to infinity. A result
/// of zero has the sign of `v`, or `negative_zero` if v is 0.
inline std::uint32_t encode(Exact v, Format format, bool negative_zero = false) {
  if (v.mantissa == 0) return negative_zero ? format.sign() : 0;
  const std::uint32_t sign = v.mantissa < 0 ? format.sign() : 0;
  const int precision = format.fraction_bits + 1;
  int exponent =
      std::max(v.exponent + bit_length(magnitude(v.mantissa)) - precision, format.least_exponent());
  const Exact rounded = round_at(v, exponent);
  auto mantissa =
      static_cast<std::uint32_t>(magnitude(rounded.mantissa) << (rounded.exponent - exponent));
  if (mantissa >> precision != 0) {  // rounded up to the next power of two
    mantissa >>= 1;
    ++exponent;
  }
  const std::uint32_t one = 1u << format.fraction_bits;
  if (mantissa < one) return sign | mantissa;
  const auto field = static_cast<std::uint32_t>(exponent - format.least_exponent() + 1);
  if (field >= (1u << format.exponent_bits) - 1u) return sign | format.infinity();
  return sign | field << format.fraction_bits | (mantissa - one);
}

}  // namespace testing
}  // namespace binary_gemm
