#pragma once

/// The seam between the launch layer and the kernel families: one translation unit each, so that
/// they compile in parallel.

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "binary_gemm/kernels/params.cuh"
#include "binary_gemm/kernels/tuning.h"
#include "binary_gemm/views.h"

namespace binary_gemm {
namespace cuda {

/// The product as a decode family sees it.
struct DecodeShape {
  kernels::KernelConfig config;
  std::int64_t n;
  std::int64_t k;
  std::int64_t group_size;
  bool engine;        ///< the copy engine can read the weights
  int shared_limit;   ///< bytes, a CTA
  int shared_memory;  ///< bytes, a multiprocessor
  int multiprocessors;
  bool quantizes = false;  ///< decode_b1 at M = 1: x is bf16 or fp16
};

/// How a decode kernel is launched. Its arguments are GemmParams, BitsMaps and the cut.
struct DecodeLaunch {
  const void* kernel = nullptr;  ///< null if the family has none for the shape
  std::uint32_t grid = 0;
  std::uint32_t warps = 0;  ///< of a team: block (32, warps, teams)
  std::uint32_t teams = 1;
  std::uint32_t shared_bytes = 0;
  bool engine = false;         ///< the kernel uses the copy engine, with boxes of
  std::uint32_t rows = 0;      ///< this many rows
  std::uint32_t slices = 0;    ///< by this many slices
  std::uint32_t cut[12] = {};  ///< kernels::DecodeB1Cut, DecodeB1RingCut, ...

  template <class Cut>
  void set_cut(const Cut& of_kernel) {
    static_assert(sizeof(of_kernel) <= sizeof(cut), "");
    std::memcpy(cut, &of_kernel, sizeof(of_kernel));
  }
};

/// A shape for asking what kernels there are: one block, and all the shared memory there could be.
inline DecodeShape smallest_shape(const kernels::KernelConfig& config, std::int64_t group_size,
                                  bool engine) {
  constexpr int kAnyLimit = 1 << 17;
  return {config, 1, kSliceK, group_size, engine, kAnyLimit, kAnyLimit, 1};
}

/// The fewest CTAs of which none has more blocks than if there were `most` of them. The
/// multiprocessors that are left have room for the kernel that follows: launched by programmatic
/// dependent launch, it waits there with its weights fetched.
constexpr std::int64_t even_grid(std::int64_t blocks, std::int64_t most) {
  const std::int64_t each = (blocks + most - 1) / most;
  return each == 0 ? 0 : (blocks + each - 1) / each;
}

/// Of a multiprocessor's shared memory, by the system for each CTA.
inline constexpr int kReservedSharedBytes = 1024;

inline constexpr std::int64_t kGroupSizes[] = {32, 64, 128, 256};

/// `make` of whether the last slice of K is a half, which only groups of 128 have kernels for, as a
/// std::bool_constant.
template <int kGroup, class Make>
auto with_half_slice(std::int64_t k, const Make& make) -> decltype(make(std::false_type{})) {
  if constexpr (kGroup == 128) {
    if (kernels::has_half_slice(k, kGroup)) return make(std::true_type{});
  }
  return make(std::false_type{});
}

/// `make` of the group size as a std::integral_constant; a launch without a kernel for any other.
template <class Make>
auto with_group_size(std::int64_t group_size, const Make& make)
    -> decltype(make(std::integral_constant<int, 128>{})) {
  switch (group_size) {
    case 32:
      return make(std::integral_constant<int, 32>{});
    case 64:
      return make(std::integral_constant<int, 64>{});
    case 128:
      return make(std::integral_constant<int, 128>{});
    case 256:
      return make(std::integral_constant<int, 256>{});
  }
  return {};
}

/// Null for 4 tokens unless they go by a ring.
DecodeLaunch plan_decode_b1(const DecodeShape& shape);
/// Of plan_decode_b1 what goes by a ring; else a launch without a kernel.
DecodeLaunch plan_decode_b1_ring(const DecodeShape& shape);
DecodeLaunch plan_decode_s8(const DecodeShape& shape);
/// Of plan_decode_s8 what goes by a ring; else a launch without a kernel.
DecodeLaunch plan_decode_ring(const DecodeShape& shape);

/// Rows of W in a block of the family: what the copy engine fetches at once.
inline constexpr std::uint32_t kDecodeB1Rows = 32;
inline constexpr std::uint32_t kDecodeS8Rows = 16;

/// The product as the wgmma family sees it.
struct WgmmaShape {
  kernels::KernelConfig config;
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  std::int64_t group_size;
  int shared_limit;   ///< bytes, a CTA
  int shared_memory;  ///< bytes, a multiprocessor
  int multiprocessors;
};

/// How the wgmma kernel is launched. Its arguments are GemmParams, TileShares, then the tensor maps
/// of x, as (byte, token, block of 128) in boxes of (128, tokens, blocks), and of the bits, as
/// (word, row) in boxes of (32, rows), and of y, as (row, token) in boxes of (64, tokens).
struct WgmmaLaunch {
  const void* kernel = nullptr;
  std::uint32_t grid = 0;
  std::uint32_t threads = 0;
  std::uint32_t shared_bytes = 0;
  std::uint32_t rows = 0;
  std::uint32_t tokens = 0;
  std::uint32_t blocks = 0;
  bool engine_stores = false;    ///< the copy engine writes y
  kernels::TileShares shares{};  ///< without the memory to hand tiles over
};

WgmmaLaunch plan_wgmma(const WgmmaShape& shape);

/// How the mma kernel is launched, with GemmParams alone.
struct MmaLaunch {
  const void* kernel = nullptr;
  std::uint32_t grid = 0;
  std::uint32_t threads = 0;
  std::uint32_t shared_bytes = 0;
};

MmaLaunch plan_mma(std::int64_t m, std::int64_t n, std::int64_t group_size, int multiprocessors,
                   int shared_memory);
std::vector<const void*> mma_kernels();
std::vector<const void*> wgmma_kernels();

/// Every kernel of the family, to be loaded and given its shared memory.
std::vector<const void*> decode_b1_kernels();
std::vector<const void*> decode_b1_ring_kernels();
std::vector<const void*> decode_s8_kernels();
std::vector<const void*> decode_ring_kernels();

/// The kernels that need nothing but loading.
std::vector<const void*> quantize_kernels();
std::vector<const void*> pack_kernels();
std::vector<const void*> fused_kernels();

}  // namespace cuda
}  // namespace binary_gemm
