/// ggml's Q1_0 blocks: an fp16 scale and 128 bits, 18 bytes.

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "support.h"

namespace binary_gemm {
namespace testing {
namespace {

std::vector<unsigned char> random_blocks(std::int64_t count, Random& random) {
  std::vector<unsigned char> blocks(static_cast<std::size_t>(count * kQ1_0BlockBytes));
  for (unsigned char& byte : blocks) byte = static_cast<unsigned char>(random.bits());
  return blocks;
}

struct Imported {
  explicit Imported(std::int64_t n, std::int64_t k, std::int64_t padding = 0,
                    std::int64_t offset = 0)
      : bits(n, k / 32, 4, padding, offset), scales(n, k / 128, 2, padding, offset) {
    w = {bits.base<std::uint32_t>(),
         scales.base<float16>(),
         n,
         k,
         128,
         bits.stride(),
         scales.stride(),
         bits.offset(),
         scales.offset()};
  }
  GuardedBuffer bits;
  GuardedBuffer scales;
  MutableWeightView w;
};

TEST(Q1Blocks, BlockByHand) {
  // Scale 1.5 = 0x3e00, little-endian. Weight j is bit j % 8 of byte j / 8.
  unsigned char block[18] = {0x00, 0x3e};
  block[2] = 0x01;       // weight 0
  block[2 + 1] = 0x80;   // weight 15
  block[2 + 4] = 0x02;   // weight 33
  block[2 + 15] = 0x80;  // weight 127
  Imported imported(1, 128);
  import_q1_0(block, sizeof block, imported.w);
  EXPECT_EQ(imported.scales.row<float16>(0)->bits, 0x3e00);
  const std::uint32_t* words = imported.bits.row<std::uint32_t>(0);
  EXPECT_EQ(words[0], 1u | 1u << 15);
  EXPECT_EQ(words[1], 2u);
  EXPECT_EQ(words[2], 0u);
  EXPECT_EQ(words[3], 1u << 31);

  GuardedBuffer dense(1, 128, 4);
  cpu::unpack_weights(imported.w, dense.view(DataType::kFloat32));
  for (int j = 0; j < 128; ++j) {
    const bool plus = j == 0 || j == 15 || j == 33 || j == 127;
    EXPECT_EQ(dense.row<float>(0)[j], plus ? 1.5f : -1.5f) << j;
  }
}

TEST(Q1Blocks, EveryWeightOfRandomBlocks) {
  Random random(1);
  constexpr std::int64_t kN = 7;
  constexpr std::int64_t kK = 5 * 128;
  const std::vector<unsigned char> blocks = random_blocks(kN * kK / 128, random);
  Imported imported(kN, kK, 3, 1);
  import_q1_0(blocks.data(), blocks.size(), imported.w);
  EXPECT_TRUE(imported.bits.guards_intact());
  EXPECT_TRUE(imported.scales.guards_intact());
  for (std::int64_t n = 0; n < kN; ++n) {
    for (std::int64_t k = 0; k < kK; ++k) {
      const unsigned char* block = blocks.data() + (n * kK + k) / 128 * 18;
      const int j = static_cast<int>(k % 128);
      const int expected = (block[2 + j / 8] >> (j % 8) & 1) != 0 ? 1 : -1;
      ASSERT_EQ(reference::sign_of(imported.w, n, k), expected) << n << ' ' << k;
      ASSERT_EQ(int{imported.scales.row<float16>(n)[k / 128].bits}, block[0] | block[1] << 8);
    }
  }
}

TEST(Q1Blocks, RoundTripsFromAnyAddress) {
  Random random(2);
  for (const std::int64_t n : {1, 2, 9}) {
    for (const std::int64_t k : {128, 384, 1152}) {
      const std::vector<unsigned char> blocks = random_blocks(n * k / 128, random);
      for (std::size_t shift = 0; shift < 5; ++shift) {
        std::vector<unsigned char> source(shift);
        source.insert(source.end(), blocks.begin(), blocks.end());
        Imported imported(n, k, static_cast<std::int64_t>(shift), static_cast<std::int64_t>(shift));
        import_q1_0(source.data() + shift, blocks.size(), imported.w);
        EXPECT_TRUE(imported.bits.guards_intact());
        EXPECT_TRUE(imported.scales.guards_intact());
        std::vector<unsigned char> back(shift + blocks.size() + 1, 0xa5);
        export_q1_0(imported.w, back.data() + shift, blocks.size());
        EXPECT_EQ(std::memcmp(back.data() + shift, blocks.data(), blocks.size()), 0);
        EXPECT_EQ(back.back(), 0xa5) << "wrote past the end";
        if (shift > 0) {
          EXPECT_EQ(back[shift - 1], 0xa5) << "wrote before the start";
        }
      }
    }
  }
}

TEST(Q1Blocks, ShardsExportAlone) {
  Random random(3);
  const std::vector<unsigned char> blocks = random_blocks(4 * 6, random);
  Imported imported(4, 6 * 128);
  import_q1_0(blocks.data(), blocks.size(), imported.w);
  std::vector<unsigned char> shard(2 * 3 * 18);
  export_q1_0(imported.w.row_range(1, 2).column_range(256, 384), shard.data(), shard.size());
  for (std::size_t row = 0; row < 2; ++row) {
    EXPECT_EQ(std::memcmp(shard.data() + row * 54, blocks.data() + ((row + 1) * 6 + 2) * 18, 54),
              0);
  }
}

TEST(Q1Blocks, RejectsWrongSizes) {
  std::vector<unsigned char> blocks(2 * 18, 0);
  Imported imported(1, 256);
  const auto expect_invalid = [&](const MutableWeightView& w, void* data, std::size_t bytes,
                                  std::initializer_list<const char*> parts) {
    for (const bool import : {true, false}) {
      try {
        if (import) {
          import_q1_0(data, bytes, w);
        } else {
          export_q1_0(w, data, bytes);
        }
        ADD_FAILURE() << "accepted";
      } catch (const std::invalid_argument& error) {
        for (const char* part : parts) {
          EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
              << "'" << part << "' is not in: " << error.what();
        }
      }
    }
    EXPECT_TRUE(imported.bits.untouched());
    EXPECT_TRUE(imported.scales.untouched());
    EXPECT_EQ(blocks, std::vector<unsigned char>(2 * 18, 0));
  };
  expect_invalid(imported.w, blocks.data(), 35, {"Q1_0", "[1, 256]", "36", "35"});
  expect_invalid(imported.w, blocks.data(), 37, {"36", "37"});
  expect_invalid(imported.w, blocks.data(), 0, {"36", "0"});
  expect_invalid(imported.w, nullptr, 36, {"Q1_0", "null", "[1, 256]"});
  for (const std::int64_t g : {32, 64, 256}) {
    MutableWeightView w = imported.w;
    w.group_size = g;
    expect_invalid(w, blocks.data(), 36, {"Q1_0", "128", std::to_string(g).c_str()});
  }
  MutableWeightView w = imported.w;
  w.k = 192;
  expect_invalid(w, blocks.data(), 36, {"192", "128"});
  w = imported.w;
  w.bits_stride = 7;
  expect_invalid(w, blocks.data(), 36, {"bits", "7", "8"});
  w = imported.w;
  w.scales = nullptr;
  expect_invalid(w, blocks.data(), 36, {"scales", "null"});
  // The blocks may not lie in the weights they are split into.
  expect_invalid(imported.w, imported.bits.base<void>(), 36, {"Q1_0 blocks", "overlap"});
}

TEST(Q1Blocks, NothingIsNothing) {
  Imported none(0, 128);
  EXPECT_NO_THROW(import_q1_0(nullptr, 0, none.w));
  EXPECT_NO_THROW(export_q1_0(none.w, nullptr, 0));
  EXPECT_NO_THROW(import_q1_0(nullptr, 0, {}));
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
