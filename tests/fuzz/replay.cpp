/// Runs a fuzz target on random inputs, with any compiler: keeps the targets building and holding
/// where there is no libFuzzer, which finds more.

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main() {
  constexpr int kRuns = 5000;
  constexpr std::size_t kMostBytes = 512;
  std::mt19937 random(1);
  for (int run = 0; run < kRuns; ++run) {
    std::vector<std::uint8_t> input(random() % (kMostBytes + 1));
    // Bytes of 235 and more make choices that the checks refuse: they are rare in most inputs.
    const bool any = run % 4 == 0;
    for (std::uint8_t& byte : input) {
      byte = static_cast<std::uint8_t>(any || random() % 64 == 0 ? random() : random() % 235);
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}
