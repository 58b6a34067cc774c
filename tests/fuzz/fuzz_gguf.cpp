/// Fuzzes the GGUF reader: any bytes give a File or a gguf::Error, and a File's tensors lie in
/// them.
///
/// Start from good files: fuzz_gguf CORPUS_DIR tests/data

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "gguf.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check_tensor(const gguf::Tensor& tensor, const std::uint8_t* begin, std::size_t size) {
  const auto* data = static_cast<const std::uint8_t*>(tensor.data);
  require(data >= begin && data <= begin + size);
  require(tensor.bytes <= static_cast<std::size_t>(begin + size - data));
  require(tensor.dims.size() <= gguf::kMaxDims);
  require(tensor.n() > 0 && tensor.k() > 0);
  require(!gguf::type_name(tensor.type).empty());
  gguf::printable(tensor.name);
  if (tensor.type != gguf::kTypeQ1_0) return;
  // What the reader accepts, the import takes, and gives back.
  const auto weights = static_cast<std::size_t>(tensor.n() * tensor.k());
  binary_gemm::aligned_vector<std::uint32_t> bits(weights / 32);
  binary_gemm::aligned_vector<binary_gemm::float16> scales(weights / 128);
  const auto view =
      binary_gemm::weight_view(bits.data(), scales.data(), tensor.n(), tensor.k(), 128);
  binary_gemm::import_q1_0(tensor.data, tensor.bytes, view);
  std::vector<std::uint8_t> blocks(tensor.bytes);
  binary_gemm::export_q1_0(view, blocks.data(), blocks.size());
  require(std::memcmp(blocks.data(), tensor.data, tensor.bytes) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const gguf::File file = gguf::File::parse(data, size, "fuzz");
    require(file.version() == 2 || file.version() == 3);
    for (const gguf::Tensor& tensor : file.tensors()) check_tensor(tensor, data, size);
  } catch (const gguf::Error& error) {
    require(std::strncmp(error.what(), "fuzz: ", 6) == 0);
  }
  return 0;
}
