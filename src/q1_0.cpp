#include "binary_gemm/q1_0.h"

#include <cstring>

#include "check.h"

namespace binary_gemm {
namespace {

constexpr std::int64_t kScaleBytes = 2;
constexpr std::int64_t kWordsPerBlock = kQ1_0GroupSize / 32;

}  // namespace

// A block's 16 bytes of bits are four little-endian words of the canonical layout; the hosts that
// the library supports are little-endian.
void import_q1_0(const void* blocks, std::size_t blocks_bytes, const MutableWeightView& w) {
  check::q1_0(blocks, blocks_bytes, w);
  if (w.k == 0) return;
  const char* block = static_cast<const char*>(blocks);
  for (std::int64_t n = 0; n < w.n; ++n) {
    std::uint32_t* bits = w.bits + w.bits_offset + n * w.bits_stride;
    float16* scales = w.scales + w.scales_offset + n * w.scales_stride;
    for (std::int64_t g = 0; g < w.k / kQ1_0GroupSize; ++g, block += kQ1_0BlockBytes) {
      std::memcpy(&scales[g], block, kScaleBytes);
      std::memcpy(&bits[g * kWordsPerBlock], block + kScaleBytes, kQ1_0BlockBytes - kScaleBytes);
    }
  }
}

void export_q1_0(const WeightView& w, void* blocks, std::size_t blocks_bytes) {
  check::q1_0(blocks, blocks_bytes, w);
  if (w.k == 0) return;
  char* block = static_cast<char*>(blocks);
  for (std::int64_t n = 0; n < w.n; ++n) {
    const std::uint32_t* bits = w.bits + w.bits_offset + n * w.bits_stride;
    const float16* scales = w.scales + w.scales_offset + n * w.scales_stride;
    for (std::int64_t g = 0; g < w.k / kQ1_0GroupSize; ++g, block += kQ1_0BlockBytes) {
      std::memcpy(block, &scales[g], kScaleBytes);
      std::memcpy(block + kScaleBytes, &bits[g * kWordsPerBlock], kQ1_0BlockBytes - kScaleBytes);
    }
  }
}

}  // namespace binary_gemm
