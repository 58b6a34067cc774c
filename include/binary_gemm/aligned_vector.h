#pragma once

/// @file
/// `aligned_vector<T>`: a std::vector whose buffer starts on a cache line, as views require 16
/// bytes.

#include <cstddef>
#include <new>
#include <vector>

namespace binary_gemm {

template <class T>
struct CacheLineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};

  CacheLineAllocator() = default;
  template <class U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}

  T* allocate(std::size_t count) {
    if (count > static_cast<std::size_t>(-1) / sizeof(T)) throw std::bad_array_new_length();
    return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
  }
  void deallocate(T* data, std::size_t) { ::operator delete(data, kAlignment); }

  friend bool operator==(const CacheLineAllocator&, const CacheLineAllocator&) { return true; }
  friend bool operator!=(const CacheLineAllocator&, const CacheLineAllocator&) { return false; }
};

/// Owns host memory that a view may name as its base.
template <class T>
using aligned_vector = std::vector<T, CacheLineAllocator<T>>;

}  // namespace binary_gemm
