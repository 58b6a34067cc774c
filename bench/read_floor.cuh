#pragma once

/// The floor: a kernel that reads that many bytes once and does nothing else. What it takes depends
/// on how the bytes are dealt out to threads, so the benchmark takes the best of kReadFloors.

#include <cuda_runtime.h>

#include <cstdint>

namespace bench {

__device__ inline uint4 load_once(const uint4* data) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(data));
  return value;
}

/// kBlock: threads a block. kLoads: 16-byte loads a thread, in flight together.
template <int kBlock, int kLoads>
__global__ void __launch_bounds__(kBlock)
    read_floor_kernel(const uint4* data, std::int64_t count, std::uint32_t* sink) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kBlock * kLoads + threadIdx.x;
  std::uint32_t ones = 0;
  const auto add = [&](const uint4& value) { ones |= value.x | value.y | value.z | value.w; };
  // Loads that each have a condition would be interleaved with their uses.
  if (begin + (kLoads - 1) * kBlock < count) {
    uint4 value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) value[i] = load_once(data + begin + i * kBlock);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) add(value[i]);
  } else {  // the last block
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (begin + i * kBlock < count) add(load_once(data + begin + i * kBlock));
    }
  }
  // Of random data this is never true: 19 bits would be 0 in each of 8 words or more. But the
  // compiler can't know it, so every load is waited for.
  if (ones == 0x12345678u) *sink = ones;
}

struct ReadFloor {
  const char* name;
  int bytes_per_block;
  void (*launch)(const uint4* data, std::int64_t count, unsigned grid, std::uint32_t* sink,
                 cudaStream_t stream);
};

template <int kBlock, int kLoads>
constexpr ReadFloor read_floor(const char* name) {
  return {name, kBlock * kLoads * 16,
          [](const uint4* data, std::int64_t count, unsigned grid, std::uint32_t* sink,
             cudaStream_t stream) {
            read_floor_kernel<kBlock, kLoads><<<grid, kBlock, 0, stream>>>(data, count, sink);
          }};
}

inline constexpr ReadFloor kReadFloors[] = {
    read_floor<128, 2>("128x2"), read_floor<128, 4>("128x4"), read_floor<128, 8>("128x8"),
    read_floor<256, 2>("256x2"), read_floor<256, 4>("256x4"), read_floor<256, 8>("256x8")};

/// `bytes` is a multiple of 16.
inline void launch_read_floor(const ReadFloor& floor, const void* data, std::int64_t bytes,
                              std::uint32_t* sink, cudaStream_t stream) {
  const std::int64_t grid = (bytes + floor.bytes_per_block - 1) / floor.bytes_per_block;
  floor.launch(static_cast<const uint4*>(data), bytes / 16, static_cast<unsigned>(grid), sink,
               stream);
}

}  // namespace bench
