/// Every kernel, forced by name, gives the reference's bits: plainly and in a graph, with
/// programmatic dependent launch and without.
///
/// The program is one test of ctest: at its end it fails if a kernel was never run, and prints
/// those that were.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "binary_gemm/binary_gemm.h"
#include "binary_gemm/reference.h"
#include "device_support.h"
#include "wgmma_shapes.h"

namespace binary_gemm {
namespace testing {
namespace {

using cuda::Kernel;

std::set<Kernel>& kernels_that_ran() {
  static std::set<Kernel> kernels;
  return kernels;
}

class KernelRecord : public ::testing::Environment {
 public:
  void TearDown() override {
    if (!no_device().empty()) return;
    std::cout << "kernels that ran:";
    for (const Kernel kernel : kernels_that_ran()) std::cout << ' ' << cuda::name(kernel);
    std::cout << std::endl;
    if (::testing::GTEST_FLAG(filter) != "*") return;
    for (const Kernel kernel : cuda::supported_kernels()) {
      EXPECT_EQ(kernels_that_ran().count(kernel), 1u) << cuda::name(kernel) << " was never run";
    }
  }
};
const auto* const kKernelRecord = ::testing::AddGlobalTestEnvironment(new KernelRecord);

// A problem with its operands on the device and the whole expected output, of which tests take
// parts: a batch is a range of tokens, a shard a range of rows.
class Case {
 public:
  Case(Problem p, DataType y_type, bool bias, cudaStream_t stream)
      : problem(std::make_unique<Problem>(std::move(p))), device(*problem, stream) {
    expect(y_type, bias);
  }

  /// Sets what y is like.
  void expect(DataType y_type, bool bias) {
    type = y_type;
    with_bias = bias;
    expected_ = std::make_unique<GuardedBuffer>(problem->output(type));
    expected_gemm(problem->x(), problem->w(), with_bias ? problem->bias() : BiasView{},
                  expected_->view(type));
  }
  ConstMatrixView expected() const { return std::as_const(*expected_).view(type); }

  std::unique_ptr<Problem> problem;
  DeviceProblem device;
  DataType type{};
  bool with_bias = false;

 private:
  std::unique_ptr<GuardedBuffer> expected_;
};

// Tokens [m0, m0 + m) and rows [n0, n0 + n).
struct Part {
  std::int64_t m0, m, n0, n;
};

class CudaEquality : public ModeTest {
 protected:
  Case make_case(Shape shape, ScalePattern scales, std::uint64_t seed,
                 ActivationPattern activations = ActivationPattern::kRandom) const {
    return {make_tall_problem(shape, scales, activations, all_layouts()[seed % 3], seed),
            kFloatTypes[seed / 3 % 3], seed % 2 == 0, stream()};
  }

  // Runs every kernel that takes the part, and compares.
  void check(const Case& c, const Part& part) const {
    const Shape shape{part.m, part.n, c.problem->shape.k, c.problem->shape.g};
    const WeightView w = c.device.w().row_range(part.n0, part.n);
    for (const Kernel kernel : kernels_for(part.m, w)) {
      DeviceOutput y(c.problem->output(c.type, part.m, part.n), c.type, stream());
      run([&] {
        cuda::binary_gemm(c.device.x().row_range(part.m0, part.m), w,
                          c.device.bias_if(c.with_bias).row_range(part.n0, part.n), y.view(),
                          launch(kernel));
      });
      kernels_that_ran().insert(kernel);
      ASSERT_TRUE(equal_bits(y.fetch(),
                             c.expected().row_range(part.m0, part.m).column_range(part.n0, part.n)))
          << cuda::name(kernel) << ' ' << shape << " from m " << part.m0 << ", n " << part.n0
          << ", layout " << c.problem->layout.name << ", bias " << c.with_bias;
      ASSERT_TRUE(y.guards_intact()) << cuda::name(kernel) << ' ' << shape;
    }
  }
  void check_all(const Case& c) const { check(c, {0, c.problem->shape.m, 0, c.problem->shape.n}); }
};

// The tests that compute-sanitizer is too slow for.
class CudaEqualityFull : public CudaEquality {
 protected:
  void SetUp() override {
    CudaEquality::SetUp();
    if (!IsSkipped() && !HasFatalFailure() && reduced()) {
      GTEST_SKIP() << "not in the reduced set";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, CudaEquality, ::testing::ValuesIn(kModes), mode_name);
INSTANTIATE_TEST_SUITE_P(Modes, CudaEqualityFull, ::testing::ValuesIn(kModes), mode_name);

// ---- The reduced set: every kernel, group size, batch tile and way to fetch ----

TEST_P(CudaEquality, SmallSetOfAllPaths) {
  // All slices whole and rows aligned: the copy engine's, if dense. Else a short last slice.
  std::uint64_t seed = 1;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {2 * kSliceK, kSliceK + g}) {
      for (const Layout& layout : all_layouts()) {
        const auto patterns = all_scale_patterns();
        const ScalePattern scales = patterns[seed % patterns.size()];
        SCOPED_TRACE(name(scales));
        if (thinned(seed)) {
          ++seed;
          continue;
        }
        const Case c(
            make_problem({70, 33, k, g}, scales, all_activation_patterns()[seed % 3], layout, seed),
            kFloatTypes[seed % 3], seed % 2 == 0, stream());
        ++seed;
        for (const std::int64_t m : {1, 2, 3, 8, 13, 32, 70}) {
          check(c, {70 - m, m, 0, 33});
          if (HasFatalFailure()) return;
        }
        EXPECT_TRUE(c.device.unchanged(stream()));
      }
    }
  }
}

TEST_P(CudaEquality, SmallSetOfRounds) {
  // More slices than a CTA takes at once.
  std::uint64_t seed = 50;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {40 * kSliceK, 21 * kSliceK + g}) {
      const Case c = make_case({17, 33, k, g}, ScalePattern::kMixed, seed++);
      for (const std::int64_t m : {1, 2, 17}) {
        check(c, {0, m, 0, 33});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The copy engine reads all scales of a last block of `rows` rows at once, by 16 bytes; else it
// reads none, and there is no ring.
bool engine_reads_rows(std::int64_t n, std::int64_t k, std::int64_t g, std::int64_t rows) {
  return kernels::engine_takes(k, g) && n % rows * (k / g) * 2 % 16 == 0;
}

TEST_P(CudaEquality, SmallSetOfHalfSlices) {
  // A last slice that is a half: the copy engine's too, with groups of 128.
  std::uint64_t seed = 70;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {kSliceK + 512, 2 * kSliceK + 512, 9 * kSliceK + 512}) {
      for (const ScalePattern scales : all_scale_patterns()) {
        if (thinned(++seed)) continue;
        SCOPED_TRACE(name(scales));
        ASSERT_EQ(engine_reads_rows(40, k, g, 32), g == 128);
        const Case c(make_tall_problem({70, 40, k, g}, scales, all_activation_patterns()[seed % 3],
                                       all_layouts()[0], seed),
                     kFloatTypes[seed % 3], seed % 2 == 0, stream());
        for (const std::int64_t m : {1, 2, 3, 4, 8, 13, 32, 70}) {
          check(c, {70 - m, m, 0, 40});
          if (HasFatalFailure()) return;
        }
        EXPECT_TRUE(c.device.unchanged(stream()));
      }
    }
  }
}

TEST_P(CudaEquality, SmallSetOfRings) {
  // decode_s8 by a ring of stages: 16 tokens, or long rows, or many. Blocks of a CTA that are fewer
  // and more than the stages, with one round and several; sets of warps that share them. And
  // decode_b1, of 2 tokens where rows are long, and of 3 and 4.
  std::uint64_t seed = 90;
  const auto patterns = all_scale_patterns();
  for (const std::int64_t g : {128, 256}) {
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{4262, kSliceK},
                               {150, 5 * kSliceK},
                               {150, 6 * kSliceK},
                               {34, 11 * kSliceK},
                               {2150, 17 * kSliceK},
                               {4264, kSliceK + 512},
                               {152, 5 * kSliceK + 512},
                               {40, 11 * kSliceK + 512}}) {
      if (!kernels::engine_takes(k, g)) continue;
      const ScalePattern scales = patterns[seed % patterns.size()];
      SCOPED_TRACE(name(scales));
      ASSERT_TRUE(engine_reads_rows(n, k, g, 16));
      const Case c(make_tall_problem({16, n, k, g}, scales, all_activation_patterns()[seed % 3],
                                     all_layouts()[0], seed),
                   kFloatTypes[seed % 3], seed % 2 == 0, stream());
      ++seed;
      for (const std::int64_t m : {2, 3, 4, 8, 9, 16}) {
        check(c, {16 - m, m, 0, n});
        if (HasFatalFailure()) return;
      }
      EXPECT_TRUE(c.device.unchanged(stream()));
    }
  }
}

TEST_P(CudaEquality, SmallSetOfPacking) {
  Random random(70);
  std::uint64_t seed = 70;
  for (const std::int64_t g : kGroupSizes) {
    for (const DataType type : kFloatTypes) {
      for (const Layout& layout : all_layouts()) {
        if (thinned(++seed)) continue;
        const bool with_scales = seed % 4 != 0;
        const std::int64_t n = 5;
        const std::int64_t k = kSliceK + g;
        GuardedBuffer dense(n, k, size_of(type), layout.x_padding, layout.x_offset);
        fill_gaussian(dense.view(type), random);
        DeviceWeights expected(n, k, g, layout, stream());
        cpu::pack_weights(dense.view(type), expected.host_view(with_scales));
        GuardedBuffer unpacked(n, k, size_of(type), layout.y_padding, layout.y_offset);
        cpu::unpack_weights(expected.host_view(with_scales), unpacked.view(type));

        const DeviceBuffer source(dense, stream());
        DeviceWeights packed(n, k, g, layout, stream());
        DeviceOutput back(GuardedBuffer(n, k, size_of(type), layout.y_padding, layout.y_offset),
                          type, stream());
        run([&] {
          cuda::pack_weights(source.view(dense, type), packed.view(with_scales), launch());
          cuda::unpack_weights(packed.view(with_scales), back.view(), launch());
        });
        packed.fetch();
        ASSERT_TRUE(equal_bits(std::as_const(packed.scales.host()).view(DataType::kFloat16),
                               std::as_const(expected.scales.host()).view(DataType::kFloat16)))
            << name(type) << " G=" << g << ' ' << layout.name;
        ASSERT_TRUE(equal_bits(back.fetch(), std::as_const(unpacked).view(type)))
            << name(type) << " G=" << g << ' ' << layout.name;
        ASSERT_TRUE(packed.bits.guards_intact());
        ASSERT_TRUE(packed.scales.guards_intact());
        ASSERT_TRUE(back.guards_intact());
      }
    }
  }
}

// ---- Batches ----

TEST_P(CudaEqualityFull, EveryBatchTo40) {
  constexpr std::int64_t kMaxM = 40;
  const std::vector<std::int64_t> all_n = interesting_n();
  std::uint64_t seed = 100;
  for (const std::int64_t g : kGroupSizes) {
    std::vector<std::int64_t> all_k = interesting_k(g);
    all_k.insert(all_k.end(), {2 * kSliceK, 5 * kSliceK});  // the copy engine's
    for (const std::int64_t k : all_k) {
      for (const ScalePattern scales : all_scale_patterns()) {
        ++seed;
        if (thinned(seed)) continue;
        const std::uint64_t pick = seed / 3 + seed;
        const ActivationPattern activations = all_activation_patterns()[pick % 3];
        SCOPED_TRACE(std::string("scales ") + name(scales) + ", activations " + name(activations));
        const Case c(make_tall_problem({kMaxM, all_n.back(), k, g}, scales, activations,
                                       all_layouts()[pick / 3 % 3], seed),
                     kFloatTypes[pick / 2 % 3], pick % 2 == 0, stream());
        for (std::int64_t m = 0; m <= kMaxM; ++m) {
          const std::int64_t n = all_n[(seed + static_cast<std::uint64_t>(m)) % all_n.size()];
          check(c, {m % 2 == 0 ? 0 : kMaxM - m, m, m % 4 < 2 ? 0 : all_n.back() - n, n});
          if (HasFatalFailure()) return;
        }
        EXPECT_TRUE(c.device.unchanged(stream()));
      }
    }
  }
}

// Batches next to where the choice of kernel changes.
std::set<std::int64_t> around_switch_points(std::int64_t n, std::int64_t k, std::int64_t g,
                                            std::int64_t limit) {
  std::set<std::int64_t> batches;
  for (std::int64_t m = 2; m <= limit; ++m) {
    if (cuda::choose_kernel(m, n, k, g) == cuda::choose_kernel(m - 1, n, k, g)) continue;
    for (const std::int64_t near : {m - 2, m - 1, m, m + 1})
      batches.insert(std::max(near, std::int64_t{1}));
  }
  return batches;
}

TEST_P(CudaEqualityFull, BatchesAroundTilesAndSwitchPoints) {
  constexpr std::int64_t kMaxM = 520;
  const auto patterns = all_scale_patterns();
  std::uint64_t seed = 300;
  for (const std::int64_t g : kGroupSizes) {
    for (const auto& [n, k] :
         {std::pair{161, kSliceK + g}, {257, 2 * kSliceK}, {128, 5 * kSliceK}}) {
      const Case c = make_case({kMaxM, n, k, g}, patterns[seed % patterns.size()], seed);
      ++seed;
      std::set<std::int64_t> batches = around_switch_points(n, k, g, kMaxM - 2);
      batches.insert({41,  47,  48,  49,  63,  64,  65,  79,  80,  81,  95,  96,  97,  111,
                      127, 128, 129, 130, 161, 191, 192, 193, 255, 256, 257, 511, 512, 513});
      for (const std::int64_t m : batches) {
        check(c, {m % 2 == 0 ? 0 : kMaxM - m, m, 0, n});
        if (HasFatalFailure()) return;
      }
      EXPECT_TRUE(c.device.unchanged(stream()));
    }
  }
}

// ---- Rows and columns of W ----

TEST_P(CudaEqualityFull, EveryRowCount) {
  constexpr std::int64_t kMaxN = 513;
  std::uint64_t seed = 400;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {2 * kSliceK, kSliceK + g, 17 * g}) {
      for (int layout = 0; layout < 3; ++layout) {
        const Case c = make_case({33, kMaxN, k, g}, ScalePattern::kMixed, seed++);
        for (const std::int64_t n :
             {1,   2,   3,   5,   8,   15,  16,  17,  31,  32,  33,  47,  48,
              49,  63,  64,  65,  95,  96,  97,  127, 128, 129, 159, 160, 161,
              191, 192, 193, 255, 256, 257, 383, 384, 385, 511, 512, 513}) {
          // Each batch tile now and then; the first rows keep the base's alignment, the last not.
          const std::int64_t m = std::vector<std::int64_t>{
              1, 2, 3, 7, 8, 16, 17, 32, 33}[static_cast<std::size_t>(n) % 9];
          check(c, {0, m, 0, n});
          check(c, {33 - m, m, kMaxN - n, n});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(CudaEqualityFull, ManyRows) {
  // More rows than one wave of CTAs has, whichever rows a CTA takes.
  std::uint64_t seed = 500;
  for (const std::int64_t g : kGroupSizes) {
    for (const auto& [n, k] :
         {std::pair{8449, kSliceK}, {17408, kSliceK + g}, {4224, 2 * kSliceK}}) {
      if (thinned(++seed)) continue;
      const Case c = make_case({64, n, k, g}, ScalePattern::kNegative, seed);
      for (const std::int64_t m : {1, 2, 3, 5, 8, 16, 24, 32, 40, 64}) {
        check(c, {64 - m, m, 0, n});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaEqualityFull, ManyRowsFetchedLate) {
  // Of decode_b1's CTAs some fetch their bits after others, with programmatic launch: from two a
  // multiprocessor on up to four (of 544, if there are 132), or all (of 1032). Two tokens with
  // groups of 128 and more do so with 375; more rows go by a ring.
  std::uint64_t seed = 540;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t n : {12000, 17408, 33000}) {
      if (thinned(++seed)) continue;
      const ScalePattern scales = seed % 2 == 0 ? ScalePattern::kNarrow : ScalePattern::kMixed;
      ASSERT_TRUE(engine_reads_rows(n, 2 * kSliceK, g, 32));
      const Case c(make_tall_problem({3, n, 2 * kSliceK, g}, scales, ActivationPattern::kRandom,
                                     all_layouts()[0], seed),
                   kFloatTypes[seed % 3], seed % 2 == 0, stream());
      for (const std::int64_t m : {1, 2, 3}) {
        check(c, {3 - m, m, 0, n});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaEqualityFull, ManyRowsByARing) {
  // So many that 2 and 8 tokens go by a ring too; and some more of a CTA's than its stages.
  std::uint64_t seed = 560;
  for (const std::int64_t g : {128, 256}) {
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{40022, kSliceK},
                               {12930, 2 * kSliceK},
                               {13000, 5 * kSliceK},
                               {12936, 2 * kSliceK + 512},
                               {10574, 17 * kSliceK}}) {
      if (!kernels::engine_takes(k, g) || thinned(++seed)) continue;
      const ScalePattern scales = seed % 2 == 0 ? ScalePattern::kNarrow : ScalePattern::kMixed;
      ASSERT_TRUE(engine_reads_rows(n, k, g, 16));
      const Case c(make_tall_problem({16, n, k, g}, scales, ActivationPattern::kRandom,
                                     all_layouts()[0], seed),
                   kFloatTypes[seed % 3], seed % 2 == 0, stream());
      for (const std::int64_t m : {1, 2, 3, 4, 5, 8, 13}) {
        check(c, {16 - m, m, 0, n});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaEqualityFull, LongRows) {
  std::uint64_t seed = 600;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {std::int64_t{17408}, 17408 + g, 20 * kSliceK, 21 * kSliceK,
                                 32 * kSliceK, 32 * kSliceK + g, 33 * kSliceK, 65 * kSliceK + g}) {
      if (thinned(++seed)) continue;
      const ScalePattern scales =
          (seed + seed / 8) % 2 == 0 ? ScalePattern::kNarrow : ScalePattern::kMixed;
      const Case c = make_case({65, 161, k, g}, scales, seed);
      for (const std::int64_t m : {1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 65}) {
        const std::int64_t n = m % 2 == 0 ? 161 : 33;
        check(c, {65 - m, m, 161 - n, n});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaEqualityFull, Shards) {
  // Column shards begin on any group; of rows too, and y is a part of a wider matrix.
  std::uint64_t seed = 700;
  for (const std::int64_t g : kGroupSizes) {
    const std::int64_t k = 4 * kSliceK;
    for (const Layout& layout : all_layouts()) {
      for (const ScalePattern scales : {ScalePattern::kNarrow, ScalePattern::kMixed}) {
        Problem p =
            make_tall_problem({20, 100, k, g}, scales, ActivationPattern::kRandom, layout, seed++);
        const DeviceProblem d(p, stream());
        for (const auto& [begin, count] : {std::pair{g, g},
                                           {g, 3 * g},
                                           {g, 2 * kSliceK},
                                           {kSliceK, 2 * kSliceK},
                                           {kSliceK, kSliceK + g},
                                           {k - 3 * g, 3 * g},
                                           {3 * g, k - 3 * g},
                                           {kSliceK - g, 2 * g},
                                           {k / 2, 0 * g}}) {
          for (const std::int64_t m : {1, 3, 8, 20}) {
            const std::int64_t n0 = (begin / g + m) % 40;
            const std::int64_t n = 100 - n0 - m;
            GuardedBuffer expected = p.output(DataType::kBFloat16, m, n);
            expected_gemm(p.x().row_range(20 - m, m).column_range(begin, count),
                          p.w().row_range(n0, n).column_range(begin, count),
                          p.bias().row_range(n0, n), expected.view(DataType::kBFloat16));
            const WeightView w = d.w().row_range(n0, n).column_range(begin, count);
            for (const Kernel kernel : kernels_for(m, w)) {
              DeviceOutput y(p.output(DataType::kBFloat16, m, 100), DataType::kBFloat16, stream());
              run([&] {
                cuda::binary_gemm(d.x().row_range(20 - m, m).column_range(begin, count), w,
                                  d.bias().row_range(n0, n), y.view().column_range(n0, n),
                                  launch(kernel));
              });
              kernels_that_ran().insert(kernel);
              const ConstMatrixView result = y.fetch();
              ASSERT_TRUE(equal_bits(result.column_range(n0, n),
                                     std::as_const(expected).view(DataType::kBFloat16)))
                  << cuda::name(kernel) << ' ' << Shape{m, n, count, g} << " from column " << begin
                  << ", row " << n0 << ", layout " << layout.name;
              ASSERT_TRUE(y.guards_intact());
              for (std::int64_t i = 0; i < m; ++i) {
                for (std::int64_t j = 0; j < 100; ++j) {
                  if (j < n0 || j >= n0 + n) {
                    ASSERT_EQ(bits_at(result, i, j), 0xffffu);
                  }
                }
              }
            }
          }
        }
        EXPECT_TRUE(d.unchanged(stream()));
      }
    }
  }
}

// ---- Values ----

TEST_P(CudaEqualityFull, EveryTypeLayoutAndPattern) {
  std::uint64_t seed = 800;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {kSliceK + 3 * g, 2 * kSliceK}) {
      for (const ScalePattern scales : all_scale_patterns()) {
        for (const ActivationPattern activations : all_activation_patterns()) {
          for (const Layout& layout : all_layouts()) {
            if (thinned(++seed)) continue;
            SCOPED_TRACE(std::string("scales ") + name(scales) + ", activations " +
                         name(activations));
            Case c(make_problem({9, 5, k, g}, scales, activations, layout, seed),
                   DataType::kFloat32, false, stream());
            for (const DataType type : kFloatTypes) {
              const bool with_bias = (seed + static_cast<std::uint64_t>(type)) % 2 == 0;
              c.expect(type, with_bias);
              check_all(c);
              check(c, {static_cast<std::int64_t>(seed % 7), 1 + with_bias, 0, 5});
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST_P(CudaEqualityFull, LargestSums) {
  // |mantissa| just below 2^14 and sums of -128 over the whole slice: 2^31 - 2^20, within int32.
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t m : {1, 2, 3, 4, 17, 40}) {
      Problem p = make_problem({m, 6, 2048, g}, ScalePattern::kUnit, ActivationPattern::kExtreme,
                               all_layouts()[0], 900);
      for (std::int64_t i = 0; i < m; ++i) {
        std::fill_n(p.values.row<std::int8_t>(i), 2048, std::int8_t{-128});
        p.x_scales.row<float>(0)[i] = 1.0f;
      }
      for (std::int64_t n = 0; n < 6; ++n) {
        std::fill_n(p.bits.row<std::uint32_t>(n), 64, n % 2 == 0 ? 0u : ~0u);
        const std::uint16_t scale = n < 2 ? 0x7bff : n < 4 ? 0xfbff : 0x03ff;
        std::fill_n(p.scales.row<float16>(n), 2048 / g, float16{scale});
      }
      const Case c(std::move(p), DataType::kFloat32, false, stream());
      EXPECT_EQ(reference::load(c.expected().data, DataType::kFloat32, 0), 65504.0f * 128 * 2048);
      check_all(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaEqualityFull, TilesOfNarrowAndWideSlices) {
  // One wide slice among narrow ones, at each place of a tile of rows and slices in turn.
  std::uint64_t seed = 950;
  for (const std::int64_t g : {32, 64, 128, 256}) {
    const std::int64_t k = 3 * kSliceK;
    Problem wide = make_problem({1, 64, k, g}, ScalePattern::kWide, ActivationPattern::kRandom,
                                all_layouts()[0], seed++);
    for (std::int64_t at = 0; at < 64; at += 7) {
      Problem p = make_problem({34, 64, k, g}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                               all_layouts()[0], seed++);
      for (const std::int64_t n : {at, 63 - at}) {
        const std::int64_t slice = n % 3;
        std::copy_n(wide.scales.row<float16>(n) + slice * kSliceK / g, kSliceK / g,
                    p.scales.row<float16>(n) + slice * kSliceK / g);
      }
      const Case c(std::move(p), DataType::kFloat32, false, stream());
      for (const std::int64_t m : {1, 2, 3, 8, 16, 34}) {
        check(c, {0, m, 0, 64});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaEqualityFull, EveryWgmmaTile) {
  if (!cuda::is_supported(Kernel::kWgmma, 17, 64, 1280, 128)) GTEST_SKIP() << "no wgmma here";
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  std::uint64_t seed = 1000;
  for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
    for (const bool cuts : {false, true}) {
      if (cuts && !kernels::may_be_cut(tile.row_groups, tile.turns, tile.tokens)) continue;
      const WgmmaTileShape shape = shape_of_tile(tile, cuts, multiprocessors);
      ASSERT_GT(shape.m, 0) << int{tile.tokens} << " tokens" << (cuts ? ", cut" : "");
      for (const std::int64_t g : kGroupSizes) {
        for (const ScalePattern scales : {ScalePattern::kNarrow, ScalePattern::kMixed}) {
          if (thinned(++seed)) continue;
          // Vectors of y, and (fp32) totals.
          const bool narrow = scales == ScalePattern::kNarrow;
          const Case c(make_tall_problem({shape.m, shape.n, shape.k, g}, scales,
                                         ActivationPattern::kRandom, all_layouts()[0], seed),
                       narrow ? DataType::kBFloat16 : DataType::kFloat32, true, stream());
          check_all(c);
          if (HasFatalFailure()) return;
          if (!cuts) continue;
          // With room for x alone it is another kernel.
          const DeviceWorkspace small(cuda::gemm_workspace_bytes(shape.m, shape.k) -
                                          static_cast<std::size_t>(kernels::kHandOverBytes),
                                      stream());
          DeviceOutput y(c.problem->output(c.type), c.type, stream());
          const auto kernels = [&](const cuda::Launch& how) {
            return kernels_of(stream(), [&] {
              cuda::binary_gemm(c.device.x(), c.device.w(), {}, y.view(), how);
            });
          };
          EXPECT_NE(kernels(launch(Kernel::kWgmma)), kernels(launch(Kernel::kWgmma, small)))
              << int{tile.tokens} << " tokens were not cut, G = " << g;
        }
      }
    }
  }
}

// Tiles that are not a CTA's last, which the copy engine writes. Where rows of y begin on 16 bytes
// but end within them it would write past them, and must not.
TEST_P(CudaEqualityFull, ManyWgmmaTilesOfACta) {
  if (!cuda::is_supported(Kernel::kWgmma, 17, 64, 1280, 128)) GTEST_SKIP() << "no wgmma here";
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  std::uint64_t seed = 1050;
  for (const kernels::WgmmaTile& tile : kernels::kWgmmaTiles) {
    if (!kernels::engine_stores(tile.row_groups, tile.turns)) continue;
    const WgmmaTileShape shape = shape_of_many_tiles(tile, multiprocessors);
    ASSERT_GT(shape.m, 0) << int{tile.tokens} << " tokens";
    const DeviceWorkspace workspace(cuda::gemm_workspace_bytes(shape.m, shape.k), stream());
    for (const std::int64_t g : kGroupSizes) {
      const bool ends_within = ++seed % 2 == 0;
      Layout layout = all_layouts()[0];
      layout.y_padding = ends_within ? 3 : 0;
      const std::int64_t n = shape.n - layout.y_padding;
      const Case c(make_tall_problem({shape.m, n, shape.k, g}, ScalePattern::kNarrow,
                                     ActivationPattern::kRandom, layout, seed),
                   g < 128 ? DataType::kBFloat16 : DataType::kFloat16, true, stream());
      DeviceOutput y(c.problem->output(c.type), c.type, stream());
      run([&] {
        cuda::binary_gemm(c.device.x(), c.device.w(), c.device.bias_if(true), y.view(),
                          launch(Kernel::kWgmma, workspace));
      });
      ASSERT_TRUE(equal_bits(y.fetch(), c.expected()))
          << c.problem->shape << ", " << int{tile.tokens} << " tokens a tile";
      ASSERT_TRUE(y.guards_intact()) << c.problem->shape;
    }
  }
}

// The tile follows from the shape; its grid tells which it was.
TEST_P(CudaEqualityFull, EveryMmaTile) {
  const std::int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  constexpr std::int64_t kK = kSliceK + 256;
  const struct {
    std::int64_t rows, tokens;  // of the tile
    std::int64_t m, n;          // of a product for which it is the fastest
    std::int64_t least_group;
  } tiles[] = {{128, 64, 382, 128 * multiprocessors - 8, 128},  // six on each multiprocessor
               {128, 32, 30, 3 * 128 * multiprocessors - 8, 32},
               {64, 32, 40, 200, 32}};
  // With Hopper's shared memory. With less, fewer CTAs fit, and other tiles are the fastest there.
  constexpr int kHopperBytes = 228 * 1024;
  const bool as_expected =
      device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) >= kHopperBytes;
  std::uint64_t seed = 1100;
  for (const auto& tile : tiles) {
    for (const std::int64_t g : kGroupSizes) {
      for (const ScalePattern scales : {ScalePattern::kNarrow, ScalePattern::kMixed}) {
        ++seed;
        if (g < tile.least_group || thinned(seed)) continue;
        const Case c(make_tall_problem({tile.m, tile.n, kK, g}, scales, ActivationPattern::kRandom,
                                       all_layouts()[0], seed),
                     kFloatTypes[seed % 3], seed % 2 == 0, stream());
        check_all(c);
        if (HasFatalFailure()) return;
        if (!as_expected) continue;
        DeviceOutput y(c.problem->output(c.type), c.type, stream());
        std::set<unsigned> grids;
        for (const auto& [kernel, grid] : kernels_of(stream(), [&] {
               cuda::binary_gemm(c.device.x(), c.device.w(), {}, y.view(), launch(Kernel::kMma));
             })) {
          grids.insert(grid);
        }
        const std::int64_t row_tiles = (tile.n + tile.rows - 1) / tile.rows;
        const std::int64_t token_tiles = (tile.m + tile.tokens - 1) / tile.tokens;
        EXPECT_EQ(grids.count(static_cast<unsigned>(row_tiles * token_tiles)), 1u)
            << tile.rows << " x " << tile.tokens << " was not chosen, G = " << g;
      }
    }
  }
}

// ---- The quantizer ----

class CudaQuantize : public CudaEquality {
 protected:
  // Compares the quantization of x, which is at `x_device`, with the reference's.
  void check_quantize(GuardedBuffer& x, DataType type, std::int64_t padding) {
    const DeviceBuffer x_device(x, stream());
    const std::int64_t m = x.rows();
    const std::int64_t k = x.cols();
    GuardedBuffer values(m, k, 1);
    GuardedBuffer scales(1, m, 4);
    reference::quantize_activation(
        x.view(type), activation_view(values.base<std::int8_t>(), scales.base<float>(), m, k));
    DeviceActivation q(m, k, padding, padding > 0 ? 3 : 0, padding > 0 ? 1 : 0, stream());
    run([&] { cuda::quantize_activation(x_device.view(x, type), q.view(), launch()); });
    ASSERT_TRUE(equal_bits(q.values.fetch(), values.view(DataType::kInt8)))
        << name(type) << " M=" << m << " K=" << k;
    ASSERT_TRUE(equal_bits(q.scales.fetch(), scales.view(DataType::kFloat32)))
        << name(type) << " M=" << m << " K=" << k;
    ASSERT_TRUE(q.values.guards_intact()) << name(type) << " K=" << k;
    ASSERT_TRUE(q.scales.guards_intact()) << name(type) << " K=" << k;
    ASSERT_TRUE(x_device.equals(x, stream()));
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, CudaQuantize, ::testing::ValuesIn(kModes), mode_name);

TEST_P(CudaQuantize, EveryLength) {
  Random random(1000);
  std::vector<std::int64_t> lengths;
  for (std::int64_t k = 0; k <= (reduced() ? 40 : 130); k += reduced() ? 13 : 1) {
    lengths.push_back(k);
  }
  for (const std::int64_t k :
       {255, 256, 257, 1000, 1024, 4095, 4096, 4097, 5120, 5121, 8192, 8200, 17408, 20001, 40960}) {
    if (!reduced() || k % 7 == 0) lengths.push_back(k);
  }
  std::uint64_t index = 0;
  for (const DataType type : kFloatTypes) {
    for (const std::int64_t k : lengths) {
      for (const std::int64_t padding : {0, 5, 16}) {
        if (thinned(++index)) continue;
        GuardedBuffer x(20, k, size_of(type), padding, padding / 2);
        fill_activations(x.view(type), random);
        check_quantize(x, type, padding);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaQuantize, RandomBits) {
  Random random(1100);
  for (const DataType type : kFloatTypes) {
    GuardedBuffer x(reduced() ? 20 : 3000, 96, size_of(type));
    fill_any_bits(x, type, random);
    check_quantize(x, type, 0);
  }
}

// ---- The linear layer ----

class CudaLinear : public CudaEquality {};
INSTANTIATE_TEST_SUITE_P(Modes, CudaLinear, ::testing::ValuesIn(kModes), mode_name);

TEST_P(CudaLinear, EveryTypePair) {
  Random random(1200);
  std::uint64_t seed = 1200;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {kSliceK + g, 2 * kSliceK}) {
      for (const DataType x_type : kFloatTypes) {
        for (const DataType y_type : kFloatTypes) {
          const Layout layout = all_layouts()[(seed + seed / 3 + seed / 9) % 3];
          ++seed;
          if (thinned(seed) || (reduced() && (seed + seed / 3) % 3 != 0)) continue;
          Problem p = make_tall_problem({1, 35, k, g}, ScalePattern::kMixed,
                                        ActivationPattern::kRandom, layout, seed);
          const DeviceProblem d(p, stream());
          GuardedBuffer x(65, k, size_of(x_type), layout.x_padding, layout.x_offset);
          fill_activations(x.view(x_type), random);
          const DeviceBuffer x_device(x, stream());
          GuardedBuffer expected = p.output(y_type, 65, 35);
          expected_linear(x.view(x_type), p.w(), p.bias(), expected.view(y_type));
          std::vector<std::int64_t> batches = {1, 2, 3, 11, 20, 33, 65};
          if (reduced()) batches = {1 + static_cast<std::int64_t>(seed % 3), 33};
          for (const std::int64_t m : batches) {
            for (const Kernel kernel : kernels_for(m, d.w())) {
              DeviceWorkspace workspace(cuda::linear_workspace_bytes(m, k), stream());
              DeviceOutput y(p.output(y_type, m, 35), y_type, stream());
              run([&] {
                cuda::binary_linear(x_device.view(x, x_type).row_range(65 - m, m), d.w(), d.bias(),
                                    y.view(), launch(kernel, workspace));
              });
              kernels_that_ran().insert(kernel);
              ASSERT_TRUE(equal_bits(y.fetch(), expected.view(y_type).row_range(65 - m, m)))
                  << cuda::name(kernel) << ' ' << Shape{m, 35, k, g} << ' ' << name(x_type)
                  << " to " << name(y_type) << ", layout " << layout.name;
              ASSERT_TRUE(y.guards_intact());
              ASSERT_TRUE(workspace.guards_intact());
            }
          }
          EXPECT_TRUE(x_device.equals(x, stream()));
          EXPECT_TRUE(d.unchanged(stream()));
        }
      }
    }
  }
}

// A kernel may quantize its one token itself, of any content.
TEST_P(CudaLinear, OneTokenAtATime) {
  Random random(1240);
  constexpr std::int64_t kRows = 20;
  for (const std::int64_t g : kGroupSizes) {
    for (const std::int64_t k : {kSliceK, 5 * kSliceK, 2 * kSliceK + 512}) {
      for (const DataType type : kFloatTypes) {
        if (reduced() && (g != 128 || k > kSliceK)) continue;
        Problem p = make_tall_problem({1, 64, k, g}, ScalePattern::kMixed,
                                      ActivationPattern::kRandom, all_layouts()[0], 1240);
        const DeviceProblem d(p, stream());
        GuardedBuffer x(kRows, k, size_of(type));
        fill_activations(x.view(type), random);
        const DeviceBuffer x_device(x, stream());
        GuardedBuffer expected(kRows, 64, 4);
        expected_linear(x.view(type), p.w(), p.bias(), expected.view(DataType::kFloat32));
        for (std::int64_t row = 0; row < kRows; ++row) {
          DeviceWorkspace workspace(cuda::linear_workspace_bytes(1, k), stream());
          DeviceOutput y(GuardedBuffer(1, 64, 4), DataType::kFloat32, stream());
          run([&] {
            cuda::binary_linear(x_device.view(x, type).row_range(row, 1), d.w(), d.bias(), y.view(),
                                launch(Kernel::kAuto, workspace));
          });
          ASSERT_TRUE(equal_bits(y.fetch(), expected.view(DataType::kFloat32).row_range(row, 1)))
              << "row " << row << " of K = " << k << ", G = " << g << ", " << name(type);
          ASSERT_TRUE(workspace.guards_intact());
        }
      }
    }
  }
}

TEST_P(CudaLinear, OfAWorkspaceLargerThanNeeded) {
  Problem p = make_problem({1, 9, 320, 32}, ScalePattern::kNarrow, ActivationPattern::kRandom,
                           all_layouts()[0], 1250);
  const DeviceProblem d(p, stream());
  Random random(1250);
  GuardedBuffer x(5, 320, 4);
  fill_gaussian(x.view(DataType::kFloat32), random);
  const DeviceBuffer x_device(x, stream());
  GuardedBuffer expected(5, 9, 4);
  expected_linear(x.view(DataType::kFloat32), p.w(), {}, expected.view(DataType::kFloat32));
  DeviceWorkspace workspace(1 << 20, stream());
  DeviceOutput y(GuardedBuffer(5, 9, 4), DataType::kFloat32, stream());
  run([&] {
    cuda::binary_linear(x_device.view(x, DataType::kFloat32), d.w(), {}, y.view(),
                        launch(Kernel::kAuto, workspace));
  });
  EXPECT_TRUE(equal_bits(y.fetch(), expected.view(DataType::kFloat32)));
}

// ---- Chains: every call's y is the next one's x ----

// Three layers whose widths make a ring, so that a chain of any length keeps the same buffers.
class CudaChain : public CudaEquality {
 protected:
  static constexpr DataType kType = DataType::kBFloat16;
  static constexpr std::int64_t kWidths[] = {1024, 1280, 2048, 1024};

  void make(std::int64_t m, std::int64_t g) {
    Random random(static_cast<std::uint64_t>(1300 + m + g));
    problems_.clear();
    layers_.clear();
    outputs_.clear();
    for (std::size_t i = 0; i < 3; ++i) {
      problems_.push_back(std::make_unique<Problem>(make_tall_problem(
          {1, kWidths[i + 1], kWidths[i], g}, i == 1 ? ScalePattern::kMixed : ScalePattern::kNarrow,
          ActivationPattern::kRandom, all_layouts()[0], 1300 + i)));
      tame(*problems_.back());
      layers_.push_back(std::make_unique<DeviceProblem>(*problems_.back(), stream()));
    }
    GuardedBuffer x(m, kWidths[0], size_of(kType));
    fill_gaussian(x.view(kType), random);
    x_ = std::make_unique<GuardedBuffer>(std::move(x));
    for (std::size_t i = 0; i < 3; ++i) {
      outputs_.push_back(std::make_unique<DeviceOutput>(
          GuardedBuffer(m, kWidths[i + 1], size_of(kType)), kType, stream()));
    }
    x_device_ = std::make_unique<DeviceBuffer>(*x_, stream());
  }

  // The outputs of the last `calls` layers, on the host.
  std::vector<GuardedBuffer> expected(int calls) {
    std::vector<GuardedBuffer> results;
    for (std::size_t i = 0; i < 3; ++i) {
      results.emplace_back(x_->rows(), kWidths[i + 1], size_of(kType));
    }
    for (int call = 0; call < calls; ++call) {
      const auto layer = static_cast<std::size_t>(call % 3);
      const ConstMatrixView x = call == 0 ? std::as_const(*x_).view(kType)
                                          : std::as_const(results[(layer + 2) % 3]).view(kType);
      expected_linear(x, problems_[layer]->w(), {}, results[layer].view(kType));
    }
    return results;
  }

  ConstMatrixView input(int call) const {
    const auto layer = static_cast<std::size_t>(call % 3);
    return call == 0 ? ConstMatrixView(x_device_->view(*x_, kType))
                     : ConstMatrixView(outputs_[(layer + 2) % 3]->view());
  }
  WeightView weights(int call) const { return layers_[static_cast<std::size_t>(call % 3)]->w(); }
  MatrixView output(int call) const { return outputs_[static_cast<std::size_t>(call % 3)]->view(); }

  void compare(int calls) {
    const std::vector<GuardedBuffer> results = expected(calls);
    for (std::size_t i = 0; i < 3; ++i) {
      const float element = reference::load(results[i].base<void>(), kType, 0);
      ASSERT_TRUE(std::isfinite(element)) << "such a chain would test nothing";
      ASSERT_TRUE(equal_bits(outputs_[i]->fetch(), results[i].view(kType))) << "layer " << i;
      ASSERT_TRUE(outputs_[i]->guards_intact());
    }
  }

  // Kernels that take every layer (all are dense).
  std::vector<Kernel> kernels(std::int64_t m, std::int64_t g) const {
    std::vector<Kernel> all = kernels_for({m, kWidths[1], kWidths[0], g});
    for (std::size_t i = 1; i < 3; ++i) {
      const std::vector<Kernel> some = kernels_for({m, kWidths[i + 1], kWidths[i], g});
      all.erase(std::remove_if(all.begin(), all.end(),
                               [&](Kernel kernel) {
                                 return std::find(some.begin(), some.end(), kernel) == some.end();
                               }),
                all.end());
    }
    return all;
  }

 private:
  // Brings scales below 2^-4, so that 15 calls overflow nothing.
  static void tame(Problem& p) {
    for (std::int64_t n = 0; n < p.shape.n; ++n) {
      for (std::int64_t i = 0; i < p.shape.k / p.shape.g; ++i) {
        std::uint16_t& bits = p.scales.row<float16>(n)[i].bits;
        const int field = bits >> 10 & 31;
        if (field > 10) bits = static_cast<std::uint16_t>((bits & 0x83ff) | 10 << 10);
      }
    }
  }

  std::vector<std::unique_ptr<Problem>> problems_;
  std::vector<std::unique_ptr<DeviceProblem>> layers_;
  std::vector<std::unique_ptr<DeviceOutput>> outputs_;
  std::unique_ptr<GuardedBuffer> x_;
  std::unique_ptr<DeviceBuffer> x_device_;
};
INSTANTIATE_TEST_SUITE_P(Modes, CudaChain, ::testing::ValuesIn(kModes), mode_name);

TEST_P(CudaChain, OfLinearLayers) {
  for (const std::int64_t g : {64, 128}) {
    for (const std::int64_t m : {1, 2, 3, 8, 33, 70}) {
      if (reduced() && (g != 128 || m > 8)) continue;
      for (const Kernel kernel : kernels(m, g)) {
        for (const int calls : {3, reduced() ? 4 : 15}) {
          SCOPED_TRACE(std::string(cuda::name(kernel)) + " M=" + std::to_string(m) +
                       " G=" + std::to_string(g) + ", " + std::to_string(calls) + " calls");
          make(m, g);
          // One workspace, which each call may write only when the one before is done with it.
          DeviceWorkspace workspace(cuda::linear_workspace_bytes(m, 2048), stream());
          run([&] {
            for (int call = 0; call < calls; ++call) {
              cuda::binary_linear(input(call), weights(call), {}, output(call),
                                  launch(kernel, workspace));
            }
          });
          kernels_that_ran().insert(kernel);
          compare(calls);
          if (HasFatalFailure()) return;
          ASSERT_TRUE(workspace.guards_intact());
        }
      }
    }
  }
}

TEST_P(CudaChain, OfQuantizersAndProducts) {
  const std::int64_t g = 128;
  for (const std::int64_t m : {1, 3, 16, 40}) {
    if (reduced() && m > 3) continue;
    for (const Kernel kernel : kernels(m, g)) {
      for (const int calls : {3, reduced() ? 4 : 15}) {
        SCOPED_TRACE(std::string(cuda::name(kernel)) + " M=" + std::to_string(m) + ", " +
                     std::to_string(calls) + " calls");
        make(m, g);
        // Each width's activations have a buffer: the next quantizer of it may not be early.
        std::vector<std::unique_ptr<DeviceActivation>> quantized;
        for (std::size_t i = 0; i < 3; ++i) {
          quantized.push_back(std::make_unique<DeviceActivation>(m, kWidths[i], 0, 0, 0, stream()));
        }
        run([&] {
          for (int call = 0; call < calls; ++call) {
            const MutableActivationView q = quantized[static_cast<std::size_t>(call % 3)]->view();
            cuda::quantize_activation(input(call), q, launch());
            cuda::binary_gemm(q, weights(call), {}, output(call), launch(kernel));
          }
        });
        kernels_that_ran().insert(kernel);
        compare(calls);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace binary_gemm
