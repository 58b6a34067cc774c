/// Usage: test_gguf_dequantize MODEL.gguf FLOATS
///
/// FLOATS holds what ggml's own dequantize gives for the Q1_0 tensors of the model: raw float32, in
/// the order of the file. Our import, unpacked to float32, must have the same bits.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <ios>
#include <string>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "gguf.h"

namespace {

// Returns the number of weights that were compared; throws at the first that differs.
std::size_t compare(const gguf::File& model, std::ifstream& floats) {
  std::size_t compared = 0;
  for (const gguf::Tensor& tensor : model.tensors()) {
    if (tensor.type != gguf::kTypeQ1_0) continue;
    const std::int64_t n = tensor.n();
    const std::int64_t k = tensor.k();
    const auto count = static_cast<std::size_t>(n * k);
    binary_gemm::aligned_vector<std::uint32_t> bits(count / 32);
    binary_gemm::aligned_vector<binary_gemm::float16> scales(count / 128);
    const auto weights = binary_gemm::weight_view(bits.data(), scales.data(), n, k, 128);
    binary_gemm::import_q1_0(tensor.data, tensor.bytes, weights);
    binary_gemm::aligned_vector<float> ours(count);
    binary_gemm::cpu::unpack_weights(weights, binary_gemm::matrix_view(ours.data(), n, k));

    std::vector<float> expected(count);
    floats.read(reinterpret_cast<char*>(expected.data()),
                static_cast<std::streamsize>(count * sizeof(float)));
    if (!floats) throw std::runtime_error("the floats end before tensor " + tensor.name);
    for (std::size_t i = 0; i < count; ++i) {
      if (binary_gemm::float_bits(ours[i]) != binary_gemm::float_bits(expected[i])) {
        char values[64];
        std::snprintf(values, sizeof values, "%.9g, but ggml gives %.9g",
                      static_cast<double>(ours[i]), static_cast<double>(expected[i]));
        throw std::runtime_error(tensor.name + ", element " + std::to_string(i) + ": " + values);
      }
    }

    // And back: the file's own bytes.
    std::vector<char> blocks(tensor.bytes);
    binary_gemm::export_q1_0(weights, blocks.data(), blocks.size());
    if (std::memcmp(blocks.data(), tensor.data, tensor.bytes) != 0) {
      throw std::runtime_error(tensor.name + ": export_q1_0 does not give the file's bytes");
    }
    compared += count;
  }
  if (floats.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error("more floats than the tensors have weights");
  }
  if (compared == 0) throw std::runtime_error("no Q1_0 tensor: nothing was compared");
  return compared;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: test_gguf_dequantize MODEL.gguf FLOATS\n");
    return 2;
  }
  try {
    const gguf::File model = gguf::File::open(argv[1]);
    std::ifstream floats(argv[2], std::ios::binary);
    if (!floats) throw std::runtime_error(std::string("cannot open ") + argv[2]);
    std::printf("%zu weights equal ggml's dequantize exactly\n", compare(model, floats));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "test_gguf_dequantize: %s\n", error.what());
    return 1;
  }
}
