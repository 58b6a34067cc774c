/// Every path that this processor has, forced by name, gives the reference's bits.
///
/// The program is one test of ctest: at its end it fails if a path was never run, and prints those
/// that were.

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "support.h"

namespace binary_gemm {
namespace testing {
namespace {

std::set<cpu::Path>& paths_that_ran() {
  static std::set<cpu::Path> paths;
  return paths;
}

class PathRecord : public ::testing::Environment {
 public:
  void TearDown() override {
    std::cout << "paths that ran:";
    for (const cpu::Path path : paths_that_ran()) std::cout << ' ' << cpu::name(path);
    std::cout << std::endl;
    if (::testing::GTEST_FLAG(filter) != "*") return;
    for (const cpu::Path path : cpu::supported_paths()) {
      EXPECT_EQ(paths_that_ran().count(path), 1u) << cpu::name(path) << " was never run";
    }
  }
};
const auto* const kPathRecord = ::testing::AddGlobalTestEnvironment(new PathRecord);

// Calls body(execution) for every path, with a trace of its name.
template <class Body>
void for_each_path(int threads, const Body& body) {
  std::vector<cpu::Path> paths = cpu::supported_paths();
  paths.push_back(cpu::Path::kAuto);
  for (const cpu::Path path : paths) {
    SCOPED_TRACE(std::string("path ") + cpu::name(path));
    body(cpu::Execution{threads, path});
    paths_that_ran().insert(path);
  }
}

BiasView bias_if(bool with_bias, const Problem& p) { return with_bias ? p.bias() : BiasView{}; }

// Runs every path on all of `p` and compares with the reference.
void expect_equal(const Problem& p, DataType type, bool with_bias, int threads = 1) {
  GuardedBuffer expected = p.output(type);
  reference::binary_gemm(p.x(), p.w(), bias_if(with_bias, p), expected.view(type));
  for_each_path(threads, [&](const cpu::Execution& execution) {
    GuardedBuffer y = p.output(type);
    cpu::binary_gemm(p.x(), p.w(), bias_if(with_bias, p), y.view(type), execution);
    EXPECT_TRUE(equal_bits(y.view(type), expected.view(type)))
        << p.shape << " layout " << p.layout.name << " bias " << with_bias << " threads "
        << threads;
    EXPECT_TRUE(y.guards_intact());
    EXPECT_TRUE(p.guards_intact());
  });
}

TEST(CpuEquality, EveryBatchTo40) {
  constexpr std::int64_t kMaxM = 40;
  const std::vector<std::int64_t> all_n = interesting_n();
  const std::vector<Layout> layouts = all_layouts();
  const std::vector<ActivationPattern> activations = all_activation_patterns();
  std::uint64_t seed = 100;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : interesting_k(g)) {
      for (const ScalePattern scales : all_scale_patterns()) {
        const Problem p = make_problem({kMaxM, all_n.back(), k, g}, scales, activations[seed % 3],
                                       layouts[seed / 3 % 3], seed);
        const bool with_bias = seed % 2 == 0;
        const DataType type = kFloatTypes[seed / 2 % 3];
        SCOPED_TRACE(std::string("scales ") + name(scales) + ", activations " +
                     name(activations[seed % 3]) + ", layout " + p.layout.name + ", type " +
                     name(type));
        ++seed;
        // The reference of the whole; each batch below is a shard of it.
        GuardedBuffer expected = p.output(type);
        reference::binary_gemm(p.x(), p.w(), bias_if(with_bias, p), expected.view(type));
        for_each_path(1, [&](const cpu::Execution& execution) {
          for (std::int64_t m = 0; m <= kMaxM; ++m) {
            const std::int64_t n = all_n[(seed + static_cast<std::uint64_t>(m)) % all_n.size()];
            const std::int64_t m0 = m % 2 == 0 ? 0 : kMaxM - m;
            const std::int64_t n0 = m % 4 < 2 ? 0 : all_n.back() - n;
            GuardedBuffer y = p.output(type, m, n);
            cpu::binary_gemm(p.x().row_range(m0, m), p.w().row_range(n0, n),
                             bias_if(with_bias, p).row_range(n0, n), y.view(type), execution);
            ASSERT_TRUE(
                equal_bits(y.view(type), expected.view(type).row_range(m0, m).column_range(n0, n)))
                << Shape{m, n, k, g} << " bias " << with_bias;
            ASSERT_TRUE(y.guards_intact()) << Shape{m, n, k, g};
          }
        });
        EXPECT_TRUE(p.guards_intact());
      }
    }
  }
}

TEST(CpuEquality, EveryTypeLayoutAndActivation) {
  std::uint64_t seed = 200;
  for (const std::int64_t g : kGroupSizes) {
    for (const ScalePattern scales : all_scale_patterns()) {
      for (const ActivationPattern activations : all_activation_patterns()) {
        for (const Layout& layout : all_layouts()) {
          SCOPED_TRACE(std::string("scales ") + name(scales) + ", activations " +
                       name(activations));
          const Problem p =
              make_problem({9, 5, kSliceK + 3 * g, g}, scales, activations, layout, seed++);
          for (const DataType type : kFloatTypes) {
            expect_equal(p, type, false);
            expect_equal(p, type, true);
          }
        }
      }
    }
  }
}

TEST(CpuEquality, BatchesAroundTokenBlocks) {
  const auto patterns = all_scale_patterns();
  std::uint64_t seed = 300;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t m :
         {41, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 192, 255, 256, 257, 513}) {
      const Problem p = make_problem({m, 5, kSliceK + g, g}, patterns[seed % patterns.size()],
                                     ActivationPattern::kRandom, all_layouts()[seed % 3], seed);
      expect_equal(p, kFloatTypes[seed % 3], seed % 2 == 0);
      ++seed;
    }
  }
}

TEST(CpuEquality, EveryThreadCount) {
  for (const std::int64_t n : {1, 31, 32, 33, 64, 65, 200}) {
    const Problem p = make_problem({3, n, 1280, 128}, ScalePattern::kMixed,
                                   ActivationPattern::kRandom, all_layouts()[2], 400);
    for (const int threads : {0, 1, 2, 3, 7}) {
      expect_equal(p, DataType::kBFloat16, true, threads);
    }
  }
}

TEST(CpuEquality, LongRows) {
  for (const std::int64_t g : kGroupSizes) {
    for (const ScalePattern scales : {ScalePattern::kNarrow, ScalePattern::kMixed}) {
      expect_equal(make_problem({5, 9, 17408 + g, g}, scales, ActivationPattern::kRandom,
                                all_layouts()[0], 500),
                   DataType::kFloat32, false);
    }
  }
}

TEST(CpuEquality, LargestSums) {
  // |mantissa| just below 2^14 and sums of -128 over the whole slice: 2^31 - 2^20, within int32.
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t m : {1, 4, 17}) {
      Problem p = make_problem({m, 6, 2048, g}, ScalePattern::kUnit, ActivationPattern::kExtreme,
                               all_layouts()[0], 600);
      for (std::int64_t i = 0; i < m; ++i) {
        std::fill_n(p.values.row<std::int8_t>(i), 2048, std::int8_t{-128});
        p.x_scales.row<float>(0)[i] = 1.0f;
      }
      for (std::int64_t n = 0; n < 6; ++n) {
        std::fill_n(p.bits.row<std::uint32_t>(n), 64, n % 2 == 0 ? 0u : ~0u);
        const std::uint16_t scale = n < 2 ? 0x7bff : n < 4 ? 0xfbff : 0x03ff;
        std::fill_n(p.scales.row<float16>(n), 2048 / g, float16{scale});
      }
      expect_equal(p, DataType::kFloat32, false);
      GuardedBuffer y = p.output(DataType::kFloat32);
      cpu::binary_gemm(p.x(), p.w(), {}, y.view(DataType::kFloat32));
      EXPECT_EQ(y.row<float>(0)[0], 65504.0f * 128 * 2048);
      EXPECT_EQ(y.row<float>(0)[1], -65504.0f * 128 * 2048);
    }
  }
}

TEST(CpuEquality, RowRanges) {
  const Problem p = make_problem({6, 67, 1152, 64}, ScalePattern::kMixed,
                                 ActivationPattern::kPoisoned, all_layouts()[2], 700);
  GuardedBuffer expected = p.output(DataType::kBFloat16);
  reference::binary_gemm(p.x(), p.w(), p.bias(), expected.view(DataType::kBFloat16));
  for_each_path(1, [&](const cpu::Execution& execution) {
    GuardedBuffer y = p.output(DataType::kBFloat16);
    const std::int64_t cuts[] = {0, 1, 3, 3, 8, 31, 33, 64, 67};
    for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
      cpu::binary_gemm_rows(p.x(), p.w(), p.bias(), y.view(DataType::kBFloat16), cuts[i],
                            cuts[i + 1], execution.path);
      // No column beyond the range was written.
      const MatrixView rest =
          y.view(DataType::kBFloat16).column_range(cuts[i + 1], 67 - cuts[i + 1]);
      for (std::int64_t m = 0; m < rest.rows; ++m) {
        for (std::int64_t n = 0; n < rest.cols; ++n) ASSERT_EQ(bits_at(rest, m, n), 0xffffu);
      }
    }
    EXPECT_TRUE(equal_bits(y.view(DataType::kBFloat16), expected.view(DataType::kBFloat16)));
    EXPECT_TRUE(y.guards_intact());
  });
}

TEST(CpuEquality, QuantizeEveryLength) {
  Random random(800);
  std::vector<std::int64_t> lengths;
  for (std::int64_t k = 0; k <= 130; ++k) lengths.push_back(k);
  for (const std::int64_t k : {255, 256, 257, 1000, 1024, 5121}) lengths.push_back(k);
  for (const DataType type : kFloatTypes) {
    for (const std::int64_t k : lengths) {
      for (const std::int64_t padding : {0, 5}) {
        GuardedBuffer x(20, k, size_of(type), padding, padding / 2);
        fill_activations(x.view(type), random);
        const auto view_of = [&](GuardedBuffer& values, GuardedBuffer& scales) {
          return MutableActivationView{values.base<std::int8_t>(),
                                       scales.base<float>(),
                                       20,
                                       k,
                                       values.stride(),
                                       values.offset(),
                                       scales.offset()};
        };
        GuardedBuffer expected(20, k, 1, padding, 3);
        GuardedBuffer expected_scales(1, 20, 4, 0, 1);
        reference::quantize_activation(x.view(type), view_of(expected, expected_scales));
        for_each_path(1 + static_cast<int>(k % 3), [&](const cpu::Execution& execution) {
          GuardedBuffer values(20, k, 1, padding, 3);
          GuardedBuffer scales(1, 20, 4, 0, 1);
          cpu::quantize_activation(x.view(type), view_of(values, scales), execution);
          ASSERT_TRUE(equal_bits(values.view(DataType::kInt8), expected.view(DataType::kInt8)))
              << name(type) << " K=" << k;
          ASSERT_TRUE(
              equal_bits(scales.view(DataType::kFloat32), expected_scales.view(DataType::kFloat32)))
              << name(type) << " K=" << k;
          ASSERT_TRUE(values.guards_intact());
          ASSERT_TRUE(scales.guards_intact());
        });
        EXPECT_TRUE(x.guards_intact());
      }
    }
  }
}

TEST(CpuEquality, QuantizeRandomBits) {
  Random random(900);
  constexpr std::int64_t kRows = 600;
  constexpr std::int64_t kCols = 96;
  for (const DataType type : kFloatTypes) {
    GuardedBuffer x(kRows, kCols, size_of(type));
    fill_any_bits(x, type, random);
    GuardedBuffer expected(kRows, kCols, 1);
    GuardedBuffer expected_scales(1, kRows, 4);
    reference::quantize_activation(
        x.view(type),
        activation_view(expected.base<std::int8_t>(), expected_scales.base<float>(), kRows, kCols));
    for_each_path(1, [&](const cpu::Execution& execution) {
      GuardedBuffer values(kRows, kCols, 1);
      GuardedBuffer scales(1, kRows, 4);
      cpu::quantize_activation(
          x.view(type),
          activation_view(values.base<std::int8_t>(), scales.base<float>(), kRows, kCols),
          execution);
      EXPECT_TRUE(equal_bits(values.view(DataType::kInt8), expected.view(DataType::kInt8)));
      EXPECT_TRUE(
          equal_bits(scales.view(DataType::kFloat32), expected_scales.view(DataType::kFloat32)));
    });
  }
}

TEST(CpuEquality, LinearOfEveryTypePair) {
  Random random(1000);
  for (const std::int64_t g : kGroupSizes) {
    for (const DataType x_type : kFloatTypes) {
      for (const DataType y_type : kFloatTypes) {
        for (const std::int64_t m : {1, 2, 11, 20}) {
          const Problem p = make_problem({m, 7, kSliceK + g, g}, ScalePattern::kMixed,
                                         ActivationPattern::kRandom, all_layouts()[2], 1000);
          GuardedBuffer x(m, p.shape.k, size_of(x_type), 3, 1);
          fill_activations(x.view(x_type), random);
          aligned_vector<std::int8_t> q(static_cast<std::size_t>(m * p.shape.k));
          aligned_vector<float> scales(static_cast<std::size_t>(m));
          const auto quantized = activation_view(q.data(), scales.data(), m, p.shape.k);
          reference::quantize_activation(x.view(x_type), quantized);
          GuardedBuffer expected = p.output(y_type);
          reference::binary_gemm(quantized, p.w(), p.bias(), expected.view(y_type));
          for_each_path(1 + static_cast<int>(m % 2), [&](const cpu::Execution& execution) {
            GuardedBuffer y = p.output(y_type);
            cpu::binary_linear(x.view(x_type), p.w(), p.bias(), y.view(y_type), execution);
            EXPECT_TRUE(equal_bits(y.view(y_type), expected.view(y_type)))
                << p.shape << ' ' << name(x_type) << " to " << name(y_type);
            EXPECT_TRUE(y.guards_intact());
            EXPECT_TRUE(x.guards_intact());
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
