#pragma once

/// The baseline: a 1-bit product by table look-up and dp4a, the method that other libraries ship.
///
/// A table in shared memory expands 4 bits to 4 bytes of +1 or -1; `__dp4a` multiplies them by 4
/// int8 activations. One warp computes one output row, a lane one 32-bit word of it at a time. A
/// word's exact dot is scaled in fp32, so results depend on the order of the lanes' sums: near the
/// reference, not equal to it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace bench {

inline constexpr int kDp4aWarps = 8;  // rows a block

struct Dp4aParams {
  const std::uint32_t* bits;  // [n, words]
  const __half* scales;       // [n, words >> group_shift]
  const std::int8_t* x;       // [m, 32 * words]
  const float* x_scales;      // [m]
  __nv_bfloat16* y;           // [m, n]
  int m;
  int n;
  int words;        // 32-bit words in a weight row: K / 32
  int group_shift;  // log2 of words in a group: log2(G / 32)
};

/// Byte i is +1 where bit i of `nibble` is 1, and -1 where it is 0.
__host__ __device__ constexpr std::uint32_t expand_nibble(std::uint32_t nibble) {
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= ((nibble >> i & 1u) != 0 ? 0x01u : 0xffu) << (8 * i);
  return bytes;
}

static_assert(expand_nibble(0b0101) == 0xff01ff01u);

/// kBatch: tokens that share one expansion. Grid: (rows / kDp4aWarps, tokens / kBatch), rounded up.
template <int kBatch>
__global__ void __launch_bounds__(kDp4aWarps * 32) dp4a_table_kernel(const Dp4aParams p) {
  // 16 entries lie in 16 banks: different nibbles never conflict, equal ones are a broadcast.
  __shared__ std::uint32_t table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = expand_nibble(threadIdx.x);
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = static_cast<int>(blockIdx.x * kDp4aWarps + threadIdx.x / 32);
  const int token = static_cast<int>(blockIdx.y) * kBatch;
  if (row >= p.n) return;
  const std::uint32_t* bits = p.bits + static_cast<std::int64_t>(row) * p.words;
  const __half* scales = p.scales + static_cast<std::int64_t>(row) * (p.words >> p.group_shift);
  const int4* x[kBatch];  // 16 activations each
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    // Tokens beyond the last repeat it, and are not stored.
    const std::int64_t clamped = min(token + b, p.m - 1);
    x[b] = reinterpret_cast<const int4*>(p.x + clamped * p.words * 32);
  }

  float acc[kBatch] = {};
#pragma unroll 2
  for (int j = lane; j < p.words; j += 32) {
    const std::uint32_t word = __ldg(bits + j);
    const float scale = __half2float(scales[j >> p.group_shift]);
    int dot[kBatch] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t signs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) signs[i] = table[word >> (16 * half + 4 * i) & 15u];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int4 q = __ldg(x[b] + 2 * j + half);
        dot[b] = __dp4a(static_cast<int>(signs[0]), q.x, dot[b]);
        dot[b] = __dp4a(static_cast<int>(signs[1]), q.y, dot[b]);
        dot[b] = __dp4a(static_cast<int>(signs[2]), q.z, dot[b]);
        dot[b] = __dp4a(static_cast<int>(signs[3]), q.w, dot[b]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) acc[b] = fmaf(scale, static_cast<float>(dot[b]), acc[b]);
  }

#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      acc[b] += __shfl_xor_sync(0xffffffffu, acc[b], distance);
    }
    if (lane == 0 && token + b < p.m) {
      p.y[static_cast<std::int64_t>(token + b) * p.n + row] =
          __float2bfloat16(acc[b] * p.x_scales[token + b]);
    }
  }
}

/// Any M up to 65535 * 8; K a multiple of 32.
inline void launch_dp4a_table(const Dp4aParams& p, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int batch) {
    const dim3 grid(static_cast<unsigned>((p.n + kDp4aWarps - 1) / kDp4aWarps),
                    static_cast<unsigned>((p.m + batch - 1) / batch));
    kernel<<<grid, kDp4aWarps * 32, 0, stream>>>(p);
  };
  if (p.m == 1) {
    launch(dp4a_table_kernel<1>, 1);
  } else if (p.m == 2) {
    launch(dp4a_table_kernel<2>, 2);
  } else if (p.m <= 4) {
    launch(dp4a_table_kernel<4>, 4);
  } else {
    launch(dp4a_table_kernel<8>, 8);
  }
}

}  // namespace bench
