#pragma once

/// @file
/// Storage types: what an element is in memory, and its exact value as a float.
///
/// The 16-bit types are plain bits, so that no CUDA header is needed to name them; they have the
/// layout of `__half` and `__nv_bfloat16`. All conversions round to nearest even and keep
/// subnormals.

#include <cstddef>
#include <cstdint>
#include <cstring>

/// The library: binary_gemm.h names its layers.
namespace binary_gemm {

/// IEEE binary16.
struct float16 {
  std::uint16_t bits;  ///< Sign, 5 bits of exponent, 10 of fraction.
};

/// The upper half of an IEEE binary32.
struct bfloat16 {
  std::uint16_t bits;  ///< Sign, 8 bits of exponent, 7 of fraction.
};

/// The type of a matrix's elements.
enum class DataType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt8 };

/// Bytes of one element.
constexpr std::int64_t size_of(DataType type) {
  return type == DataType::kFloat32 ? 4 : type == DataType::kInt8 ? 1 : 2;
}

/// "float32", "float16", "bfloat16" or "int8".
constexpr const char* name(DataType type) {
  return type == DataType::kFloat32    ? "float32"
         : type == DataType::kFloat16  ? "float16"
         : type == DataType::kBFloat16 ? "bfloat16"
                                       : "int8";
}

/// `data_type_of<T>`: the tag of a C++ element type.
template <class T>
constexpr DataType data_type_of = DataType::kFloat32;
/// float16's tag.
template <>
inline constexpr DataType data_type_of<float16> = DataType::kFloat16;
/// bfloat16's tag.
template <>
inline constexpr DataType data_type_of<bfloat16> = DataType::kBFloat16;
/// int8's tag.
template <>
inline constexpr DataType data_type_of<std::int8_t> = DataType::kInt8;

/// The bits of a float.
inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// The float of these bits.
inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// The exact value of an element.
inline float to_float(float value) { return value; }
/// The exact value of an element.
inline float to_float(std::int8_t value) { return value; }
/// The exact value of an element.
inline float to_float(bfloat16 value) { return float_from_bits(std::uint32_t{value.bits} << 16); }

/// The exact value of an element.
inline float to_float(float16 value) {
  const std::uint32_t sign = std::uint32_t{value.bits & 0x8000u} << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
  // Zero or subnormal: magnitude · 2^-24, exact in a float.
  const float value_of_magnitude = static_cast<float>(magnitude) * (1.0f / 16777216.0f);
  return float_from_bits(sign | float_bits(value_of_magnitude));
}

/// Rounds to nearest even; a NaN becomes a quiet one.
inline bfloat16 to_bfloat16(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

/// Rounds to nearest even; 65520 and more become infinity, and NaNs one quiet NaN of their sign.
inline float16 to_float16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  // 65520 is halfway between the largest finite value and 2^16, and rounds up to infinity.
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude >= 0x38800000u) {
    const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return {static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
  }
  // Below 2^-14: adding 0.5 aligns the value to multiples of 2^-24 and rounds once.
  const float aligned = float_from_bits(magnitude) + 0.5f;
  return {static_cast<std::uint16_t>(sign | (float_bits(aligned) - float_bits(0.5f)))};
}

}  // namespace binary_gemm
