#pragma once

/// What the fuzzers of views and of the C ABI share: an arena that holds all operands, and choices
/// drawn from the input.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

inline constexpr std::int64_t kArenaBytes = 1 << 15;
alignas(64) inline unsigned char arena[kArenaBytes];
inline unsigned char before[kArenaBytes];
inline unsigned char result[kArenaBytes];

inline void require(bool holds) {
  if (!holds) std::abort();
}

/// Choices drawn from the input; zeros once it is used up.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::int64_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  std::int64_t word() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | static_cast<std::uint64_t>(byte());
    return static_cast<std::int64_t>(value);
  }
  bool rarely() { return byte() >= 250; }
  /// Mostly `usual`, rarely anything.
  std::int64_t mostly(std::int64_t usual) { return rarely() ? word() : usual; }

  /// A base that is mostly a multiple of 16 bytes into the arena, else null or anywhere.
  template <class T>
  T* base() {
    const std::int64_t at = place();
    const std::int64_t kind = byte();
    void* address = arena + at / 16 * 16;
    if (kind >= 235) address = nullptr;
    if (kind >= 243) address = arena + at + byte() % 16;
    if (kind >= 250) address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(word()));
    return static_cast<T*>(address);
  }
  /// Of rows of `cols`, which may be any number.
  std::int64_t stride(std::int64_t cols) {
    const std::int64_t padding = byte() % 4;
    if (rarely()) return word();
    return cols > INT64_MAX - padding ? cols : cols + padding;
  }
  std::int64_t offset() { return rarely() ? word() : byte() % 4; }
  /// A number of an enumeration of `names`, or a byte that names nothing.
  std::int64_t enumerator(std::int64_t names) { return rarely() ? byte() : byte() % names; }
  /// The same for C, where it may be any int.
  std::int32_t number(std::int32_t names) {
    return static_cast<std::int32_t>(rarely() ? word() : byte() % names);
  }
  void fill_arena() {
    std::uint32_t state = static_cast<std::uint32_t>(word()) | 1u;
    for (unsigned char& b : arena) {
      state = state * 1664525u + 1013904223u;
      b = static_cast<unsigned char>(state >> 24);
    }
  }
  /// Puts the rest of the input in the arena, a byte here and there, for special values.
  void poke_arena() {
    while (size_ > 0) {
      const std::int64_t at = place() | (byte() & (kPlace - 1));
      arena[at] = static_cast<unsigned char>(byte());
    }
  }

 private:
  static constexpr std::int64_t kPlace = kArenaBytes / 256;  ///< bytes from a place to the next
  std::int64_t place() { return byte() * kPlace; }

  const std::uint8_t* data_;
  std::size_t size_;
};
