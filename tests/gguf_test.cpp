/// The GGUF reader: good files of both versions read right, and each kind of bad file gives an
/// error that names the file, the values and the rule.

#include "gguf.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "weight_bytes.h"

namespace {

constexpr std::uint32_t kF32 = 0;
constexpr std::uint32_t kUint32 = 4;
constexpr std::uint32_t kString = 8;
constexpr std::uint32_t kArray = 9;

// Bytes of a file, appended in order.
class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    static_assert(std::is_arithmetic_v<T>);
    char raw[sizeof value];
    std::memcpy(raw, &value, sizeof value);
    bytes_.append(raw, sizeof value);
    return *this;
  }
  Bytes& u32(std::uint32_t value) { return put(value); }
  Bytes& u64(std::uint64_t value) { return put(value); }
  Bytes& raw(const std::string& value) {
    bytes_ += value;
    return *this;
  }
  Bytes& string(const std::string& value) { return u64(value.size()).raw(value); }
  Bytes& align(std::size_t alignment) {
    while (bytes_.size() % alignment != 0) bytes_ += '\0';
    return *this;
  }
  const std::string& get() const { return bytes_; }

 private:
  std::string bytes_;
};

struct TensorInfo {
  std::string name;
  std::vector<std::uint64_t> dims;
  std::uint32_t type;
  std::uint64_t offset;
};

// A file to be broken in one place. As it is, it holds Q1_0 [3, 256] at 0 and F32 [5] at 128.
struct Model {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint64_t extra_tensors = 0;   // Counted in the header, but not there.
  std::uint64_t extra_metadata = 0;  // The same.
  std::vector<std::string> metadata = {
      Bytes().string("general.architecture").u32(kString).string("test").get(),
      Bytes().string("general.name").u32(kString).string("a model").get(),
  };
  std::vector<TensorInfo> tensors = {
      {"blk.0.weight", {256, 3}, gguf::kTypeQ1_0, 0},
      {"norm", {5}, kF32, 128},
  };
  std::size_t alignment = 32;
  std::size_t data_bytes = 128 + 20;

  std::string bytes() const {
    Bytes file;
    file.raw(magic).u32(version);
    file.u64(tensors.size() + extra_tensors).u64(metadata.size() + extra_metadata);
    for (const std::string& entry : metadata) file.raw(entry);
    for (const TensorInfo& tensor : tensors) {
      file.string(tensor.name).u32(static_cast<std::uint32_t>(tensor.dims.size()));
      for (const std::uint64_t dim : tensor.dims) file.u64(dim);
      file.u32(tensor.type).u64(tensor.offset);
    }
    file.align(alignment);
    for (std::size_t i = 0; i < data_bytes; ++i) file.put(static_cast<std::uint8_t>(i));
    return file.get();
  }
};

// A heap copy of exactly the file's size, so that a sanitizer sees a read past its end.
gguf::File parse(const std::string& bytes, std::vector<char>& storage) {
  storage.assign(bytes.begin(), bytes.end());
  storage.shrink_to_fit();
  return gguf::File::parse(storage.data(), storage.size(), "model.gguf");
}

// The message of the error that reading `bytes` gives; empty if there is none.
std::string error_of(const std::string& bytes) {
  std::vector<char> storage;
  try {
    parse(bytes, storage);
  } catch (const gguf::Error& error) {
    return error.what();
  }
  return "";
}

void expect_error(const std::string& bytes, const std::vector<std::string>& parts) {
  const std::string message = error_of(bytes);
  EXPECT_EQ(message.rfind("model.gguf: ", 0), 0u) << message;
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
  }
}

std::string metadata_entry(const std::string& key, const std::function<void(Bytes&)>& value) {
  Bytes bytes;
  bytes.string(key);
  value(bytes);
  return bytes.get();
}

std::string with_metadata(const std::string& key, const std::function<void(Bytes&)>& value) {
  Model model;
  model.metadata.push_back(metadata_entry(key, value));
  return model.bytes();
}

std::string with_tensor(const TensorInfo& tensor) {
  Model model;
  model.tensors.push_back(tensor);
  return model.bytes();
}

class GgufVersion : public testing::TestWithParam<std::uint32_t> {};

TEST_P(GgufVersion, IsRead) {
  Model model;
  model.version = GetParam();
  std::vector<char> storage;
  const gguf::File file = parse(model.bytes(), storage);
  EXPECT_EQ(file.version(), GetParam());
  EXPECT_EQ(file.architecture(), "test");
  EXPECT_EQ(file.name(), "a model");
  EXPECT_EQ(file.alignment(), 32u);
  EXPECT_EQ(file.metadata_count(), 2u);
  EXPECT_EQ(file.bytes(), storage.size());
  ASSERT_EQ(file.tensors().size(), 2u);

  const gguf::Tensor& weight = file.tensors()[0];
  EXPECT_EQ(weight.name, "blk.0.weight");
  EXPECT_EQ(weight.type, gguf::kTypeQ1_0);
  EXPECT_EQ(weight.dims, (std::vector<std::int64_t>{256, 3}));
  EXPECT_EQ(weight.n(), 3);
  EXPECT_EQ(weight.k(), 256);
  EXPECT_EQ(weight.bytes, 108u);  // 3 rows of 2 blocks of 18
  const auto* data = static_cast<const char*>(weight.data);
  ASSERT_EQ(data, storage.data() + storage.size() - 148);
  EXPECT_EQ(data[1], 1);

  const gguf::Tensor& norm = file.tensors()[1];
  EXPECT_EQ(norm.type, kF32);
  EXPECT_EQ(norm.n(), 1);
  EXPECT_EQ(norm.k(), 5);
  EXPECT_EQ(norm.bytes, 20u);
  EXPECT_EQ(norm.data, data + 128);
}

TEST_P(GgufVersion, EveryTruncationIsAnError) {
  Model model;
  model.version = GetParam();
  model.metadata.push_back(metadata_entry(
      "strings", [](Bytes& b) { b.u32(kArray).u32(kString).u64(2).string("one").string("two"); }));
  const std::string whole = model.bytes();
  ASSERT_EQ(error_of(whole), "");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::string message = error_of(whole.substr(0, size));
    EXPECT_EQ(message.rfind("model.gguf: ", 0), 0u) << "size " << size << ": " << message;
  }
  expect_error("", {"truncated", "magic number", "needs 4 bytes", "only 0"});
  expect_error(whole.substr(0, 30), {"is absurd", "the file's 30"});
}

INSTANTIATE_TEST_SUITE_P(Versions, GgufVersion, testing::Values(2u, 3u));

TEST(Gguf, ImportsTheTensorWhereItLies) {
  Model model;
  std::vector<char> storage;
  const gguf::File file = parse(model.bytes(), storage);
  const gguf::Tensor& weight = file.tensors()[0];
  binary_gemm::aligned_vector<std::uint32_t> bits(3 * 256 / 32);
  binary_gemm::aligned_vector<binary_gemm::float16> scales(3 * 256 / 128);
  binary_gemm::import_q1_0(weight.data, weight.bytes,
                           binary_gemm::weight_view(bits.data(), scales.data(), 3, 256, 128));
  // The data are the bytes 0, 1, 2 ...; a block is a scale and then its bits.
  EXPECT_EQ(scales[0].bits, 0x0100);
  EXPECT_EQ(bits[0], 0x05040302u);
  EXPECT_EQ(scales[5].bits, 0x5b5a);
  EXPECT_EQ(bits[23], 0x6b6a6968u);
}

TEST(Gguf, SkipsMetadataOfEveryType) {
  Model model;
  const std::size_t bytes_of[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  for (std::uint32_t type = 0; type <= 12; ++type) {
    if (bytes_of[type] == 0) continue;
    model.metadata.push_back(metadata_entry("scalar " + std::to_string(type), [&](Bytes& b) {
      b.u32(type).raw(std::string(bytes_of[type], '\1'));
    }));
    model.metadata.push_back(metadata_entry("array " + std::to_string(type), [&](Bytes& b) {
      b.u32(kArray).u32(type).u64(3).raw(std::string(3 * bytes_of[type], '\1'));
    }));
  }
  model.metadata.push_back(metadata_entry(
      "strings", [](Bytes& b) { b.u32(kArray).u32(kString).u64(2).string("").string("two"); }));
  model.metadata.push_back(
      metadata_entry("no strings", [](Bytes& b) { b.u32(kArray).u32(kString).u64(0); }));
  std::vector<char> storage;
  const gguf::File file = parse(model.bytes(), storage);
  EXPECT_EQ(file.metadata_count(), model.metadata.size());
  EXPECT_EQ(file.tensors().size(), 2u);
}

TEST(Gguf, HonoursTheAlignment) {
  Model model;
  model.alignment = 64;
  model.metadata.push_back(
      metadata_entry("general.alignment", [](Bytes& b) { b.u32(kUint32).u32(64); }));
  std::vector<char> storage;
  const gguf::File file = parse(model.bytes(), storage);
  EXPECT_EQ(file.alignment(), 64u);
  EXPECT_EQ(file.tensors()[0].data, storage.data() + storage.size() - 148);
}

TEST(Gguf, ListsTypesThatItDoesNotKnow) {
  std::vector<char> storage;
  const gguf::File file = parse(with_tensor({"new", {7}, 99, 64}), storage);
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors()[2].bytes, 0u);
  EXPECT_EQ(gguf::type_name(file.tensors()[2].type), "type 99");
  EXPECT_EQ(gguf::type_name(gguf::kTypeQ1_0), "Q1_0");
  EXPECT_EQ(gguf::type_name(kF32), "F32");
}

TEST(Gguf, ReadsAFileWithoutTensors) {
  Model model;
  model.tensors.clear();
  model.alignment = 1;
  model.data_bytes = 0;
  std::vector<char> storage;
  EXPECT_TRUE(parse(model.bytes(), storage).tensors().empty());
}

TEST(Gguf, OpensByMapping) {
  const std::string path = testing::TempDir() + "gguf_test.gguf";
  std::ofstream(path, std::ios::binary) << Model().bytes();
  {
    gguf::File copy = gguf::File::open(path);
    {
      const gguf::File file = gguf::File::open(path);
      copy = file;
    }
    // The copy keeps the mapping, in the file's own bytes and not in a copy of them.
    EXPECT_EQ(std::memcmp(copy.tensors()[0].data, "\0\1\2\3", 4), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(copy.tensors()[0].data) % 32, 0u);
  }
  std::remove(path.c_str());
}

TEST(Gguf, OpenNamesTheFileThatItCannotRead) {
  const auto message = [](const std::string& path) {
    try {
      gguf::File::open(path);
    } catch (const gguf::Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string missing = testing::TempDir() + "gguf_test_missing.gguf";
  EXPECT_EQ(message(missing), missing + ": cannot open: No such file or directory");
  EXPECT_EQ(message(testing::TempDir()), testing::TempDir() + ": not a regular file");
  const std::string empty = testing::TempDir() + "gguf_test_empty.gguf";
  std::ofstream(empty, std::ios::binary).flush();
  EXPECT_NE(message(empty).find(empty + ": truncated"), std::string::npos) << message(empty);
  std::remove(empty.c_str());
}

TEST(GgufError, WrongMagic) {
  Model model;
  model.magic = std::string("GG\x1bX", 4);
  expect_error(model.bytes(), {"not a GGUF file", "'GG\\x1bX'", "'GGUF'"});
}

TEST(GgufError, WrongVersion) {
  Model model;
  for (const std::uint32_t version : {0u, 1u, 4u, 0xffffffffu}) {
    model.version = version;
    expect_error(model.bytes(), {"version " + std::to_string(version), "2 and 3"});
  }
}

TEST(GgufError, BigEndian) {
  Model model;
  model.version = 0x03000000;
  expect_error(model.bytes(), {"big-endian", "byte-swapped 3"});
}

TEST(GgufError, AbsurdCounts) {
  for (const std::uint64_t count : {std::uint64_t{1} << 20, ~std::uint64_t{0} - 2}) {
    Model model;
    model.extra_tensors = count;
    expect_error(model.bytes(), {"tensor count = " + std::to_string(count + 2), "absurd", "24"});
    model.extra_tensors = 0;
    model.extra_metadata = count;
    expect_error(model.bytes(), {"metadata count = " + std::to_string(count + 2), "absurd", "13"});
  }
}

TEST(GgufError, AbsurdStringLengths) {
  const std::uint64_t absurd = ~std::uint64_t{0} - 7;
  const std::string number = std::to_string(absurd);
  expect_error(with_metadata("key", [&](Bytes& b) { b.u32(kString).u64(absurd); }),
               {"metadata 'key'", number});
  expect_error(with_metadata("key", [&](Bytes& b) { b.u32(kString).u64(1000); }),
               {"metadata 'key'", "1000"});
  expect_error(with_metadata("general.name2",
                             [&](Bytes& b) { b.u32(kArray).u32(kString).u64(1).u64(absurd); }),
               {"metadata 'general.name2'", number});
  Model model;
  model.metadata.push_back(Bytes().u64(absurd).get());
  expect_error(model.bytes(), {"a metadata key", number, "65535"});
  model = Model();
  model.metadata = {};
  model.tensors = {};
  model.extra_tensors = 1;
  std::string bytes = model.bytes();
  bytes.resize(24);
  expect_error(bytes + Bytes().u64(absurd).raw(std::string(64, 'x')).get(),
               {"a tensor name", number, "65535"});
}

TEST(GgufError, Arrays) {
  expect_error(with_metadata("a", [](Bytes& b) { b.u32(kArray).u32(kArray).u64(1); }),
               {"metadata 'a'", "array of arrays"});
  for (const std::uint64_t count : {std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    for (const std::uint32_t type : {0u, kUint32, kString, 12u}) {
      expect_error(with_metadata("a", [&](Bytes& b) { b.u32(kArray).u32(type).u64(count); }),
                   {"metadata 'a'", std::to_string(count)});
    }
  }
  expect_error(with_metadata("a", [](Bytes& b) { b.u32(kArray).u32(13).u64(1); }),
               {"metadata 'a'", "value type 13"});
}

TEST(GgufError, UnknownValueType) {
  expect_error(with_metadata("a", [](Bytes& b) { b.u32(13).u64(1); }),
               {"metadata 'a'", "value type 13", "0 to 12"});
}

TEST(GgufError, DuplicateNames) {
  Model model;
  model.metadata.push_back(model.metadata[0]);
  expect_error(model.bytes(), {"key 'general.architecture' appears twice"});
  expect_error(with_tensor({"norm", {5}, kF32, 32}), {"tensor 'norm' appears twice"});
}

TEST(GgufError, Alignment) {
  for (const std::uint32_t alignment : {0u, 3u, 12u, 0xffffffffu}) {
    expect_error(
        with_metadata("general.alignment", [&](Bytes& b) { b.u32(kUint32).u32(alignment); }),
        {"general.alignment' = " + std::to_string(alignment), "power of two"});
  }
  expect_error(with_metadata("general.alignment", [](Bytes& b) { b.u32(10).u64(32); }),
               {"general.alignment' has value type 10", "uint32"});
  expect_error(
      with_metadata("general.alignment", [](Bytes& b) { b.u32(kUint32).u32(0x80000000u); }),
      {"truncated", "padding"});
  expect_error(with_metadata("general.name2", [](Bytes& b) { b.u32(kString).u64(1 << 20); }),
               {"general.name2"});
}

TEST(GgufError, TextThatIsNoString) {
  Model model;
  model.metadata = {Bytes().string("general.architecture").u32(kUint32).u32(1).get()};
  expect_error(model.bytes(), {"general.architecture' has value type 4", "string"});
}

TEST(GgufError, Dimensions) {
  expect_error(with_tensor({"t", {128, 1, 1, 1, 1}, kF32, 0}), {"tensor 't'", "5 dimensions", "4"});
  expect_error(with_tensor({"t", {128, 0}, kF32, 0}), {"tensor 't'", "dimension 1 is 0"});
  expect_error(with_tensor({"t", {128, std::uint64_t{1} << 57}, kF32, 0}),
               {"tensor 't'", "dimension 1 = 144115188075855872", "overflow"});
  expect_error(with_tensor({"t", {std::uint64_t{1} << 63}, kF32, 0}), {"tensor 't'", "overflow"});
  expect_error(with_tensor({"t", {std::uint64_t{1} << 62}, kF32, 0}),
               {"tensor 't'", "4611686018427387904 blocks of 4 bytes overflow"});
}

TEST(GgufError, RowsThatAreNotWholeBlocks) {
  for (const std::uint64_t k : {1u, 64u, 127u, 129u, 192u}) {
    expect_error(with_tensor({"t", {k, 4}, gguf::kTypeQ1_0, 0}),
                 {"tensor 't'", "K = " + std::to_string(k), "multiple of 128", "Q1_0"});
  }
  expect_error(with_tensor({"t", {}, gguf::kTypeQ1_0, 0}), {"K = 1 must be a multiple of 128"});
}

TEST(GgufError, TensorsOutsideTheFile) {
  // The data are 148 bytes: the first three start outside, or as if the sum wrapped around.
  for (const std::uint64_t offset :
       {std::uint64_t{160}, std::uint64_t{1} << 40, ~std::uint64_t{31}}) {
    for (const std::uint32_t type : {kF32, gguf::kTypeQ1_0, 99u}) {
      expect_error(with_tensor({"t", {128}, type, offset}),
                   {"tensor 't'", "offset " + std::to_string(offset), "outside the 148 bytes"});
    }
  }
  expect_error(with_tensor({"t", {38}, kF32, 0}), {"offset 0 and size 152", "148"});
  expect_error(with_tensor({"t", {128, 8}, gguf::kTypeQ1_0, 32}),
               {"offset 32 and size 144", "148"});
  std::vector<char> storage;
  EXPECT_NO_THROW(parse(with_tensor({"t", {37}, kF32, 0}), storage));
}

TEST(GgufError, OffsetOffTheAlignment) {
  expect_error(with_tensor({"t", {1}, kF32, 4}),
               {"tensor 't'", "offset 4 must be a multiple of the alignment 32"});
}

TEST(GgufError, NamesAreMadeFitToPrint) {
  EXPECT_EQ(gguf::printable(std::string("a\0\x1b[2J\xff", 7)), "a\\x00\\x1b[2J\\xff");
  EXPECT_EQ(gguf::printable(std::string(1000, 'x')), std::string(80, 'x') + "...");
}

// The published numbers, in MB (2^20 bytes): bf16, 2-bit ternary, 1-bit.
TEST(WeightBytes, ReproduceThePublishedTable) {
  const auto table = [](std::int64_t n, std::int64_t k) {
    char text[64];
    std::snprintf(text, sizeof text, "%.1f / %.1f / %.1f", mebibytes(bf16_bytes(n, k)),
                  mebibytes(ternary_bytes(n, k)), mebibytes(binary_bytes(n, k)));
    return std::string(text);
  };
  EXPECT_EQ(table(8192, 5120), "80.0 / 10.6 / 5.6");
  EXPECT_EQ(table(5120, 5120), "50.0 / 6.6 / 3.5");
  EXPECT_EQ(table(248320, 5120), "2425.0 / 322.1 / 170.5");
  EXPECT_EQ(binary_bytes(3, 256), 6 * binary_gemm::kQ1_0BlockBytes);
}

}  // namespace
