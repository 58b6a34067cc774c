#pragma once

/// Which kernel takes a product: a table from (architecture of the compiled code, M, G), and for
/// wgmma a tile from (M, N, K). Grids and the cut of a CTA are chosen in src/cuda/.
///
/// No CUDA is needed to read or print it. What was tried for decode_b1 and lost, us on an H200 at
/// M = 1, G = 128, plain graph replay of the layers in bench/results:
///   fetching by cp.async, all issued at once: out 2.52, gate 4.76, down 5.17, LM head 46.2 for the
///     fetch alone; the copy engine 2.36, 4.30, 4.33, 42.9
///   persistent CTAs with a ring of stages: gate 6.7 against 5.5 (back to back 4.46)
///   16 rows a CTA: gate 7.5
///   quantizing the one row in every CTA, binary_linear back to back: out 3.77, gate 6.42, LM head
///     55; a kernel of its own before it: about 3.7, 6.0, 44
///   bringing the weights of the product after the next to the L2 cache meanwhile
///     (cp.async.bulk.prefetch.L2): a token of 64 layers 1298, without it 1236; with the steps
///     between products 1768 and 1686
///   x by the copy engine, back to back: out 3.06, by multicast to clusters of 2 or 4 2.57 and
///     2.58, gate 5.5; by the threads' own loads 2.28, 4.57 (decode_s8 likewise: out, M = 8, 5.2 ->
///     6.5)
///   two or four CTAs of decode_s8, or of its ring, that share the loads of x by way of distributed
///     shared memory: QKV at M = 8, back to back, 6.35 and 11.5, each for itself 5.24; gate 9.0 and
///     14.4, 7.8; M = 16: 11.0 and 21.9, 9.7
///   decode_s8's scales of x loaded with x, not when sums are there: out at M = 8, back to back,
///     4.61, without it 4.27
///   the scales of its first rows converted while x is on its way: M = 8 plain 8% slower, back to
///     back 1 to 7%, as bits come later than x; behind a quantizer 1% faster. All its loads of x at
///     once, where a team has three or four tokens: within 1%
///   its CTAs with 10 warps, or with 15 of 64 registers, so that the next kernel's fit beside them:
///     those gather two a multiprocessor: QKV at M = 8, back to back, 8.5 and 8.7, now 5.2
///   decode_ring without divisions at its start: plain M = 16 3% faster, back to back within 2%
///     either way; LM head 2% slower
///   prefetch.tensormap before all else: gate plain 5.7 -> 6.3, QKV 4.2 -> 4.1, the others the same
///   what kernels read first in the first lines of GemmParams: 1 to 5% slower
///   x's alignment known where the copy engine reads W, a quarter less code: M = 1 plain QKV -2%,
///     K = 17408 -4%, gate 3% slower, back to back 1% either way; decode_s8 at M = 8 1 to 3% slower
///   rows of 17 slices in two boxes, the second asked for when the first is there: a token of 64
///     layers 1603, without it 1585; two tokens 2146 and 2048
///   all products of a decode step in one persistent kernel, weights fetched past the ends of
///     products, x quantized in every CTA again: a layer of 64 (5120, 17408) 35.7 with a counter
///     that all CTAs meet at, 43.5 with outputs that carry a tag and are polled; kernels 26.5. All
///     multiprocessors read the same x at about 2.4 TB/s in sum, and 16 rows by a slice take 240
///     instructions beside what a kernel of its own has
///
/// And for wgmma, G = 128, us, other things equal where two are compared:
///   three warpgroups of 64 rows x 128 tokens spill: out at M = 2048 158, two of them 102
///   a warpgroup of 128 rows x 64 tokens, one half added up while the other is multiplied: 109, and
///     4 to 15% slower than 64 x 128 in most rows (K = 17408 at M = 6144: 7% faster)
///   warpgroups that multiply in turn (named barriers), the next one let in when the first has
///     issued its products, or when half or three quarters of them are done: 302 (K = 17408 at
///     M = 2048, 128 x 128), 316, 319, 328
///   two dots, one added up while the other is multiplied, with two warpgroups: K = 17408 at
///     M = 96 49.5 in tiles of 128 x 96, with one dot 49.3; by turns 33.6, with one 31.2. One
///     warpgroup alone has them: 64 x 64 at M = 64 25.2, with one dot 28.1
///   the next slice's words copied before the last of this one's x: 1 to 2% slower
///   no copies of x at all (to see what they cost): 1.5% less; M = 16 to 256 within 3%
///   a copy of x for each block of 128: with 16 or 32 tokens all wait for the one thread that
///     issues them: out at M = 16 8.2, with copies of several blocks 6.8
///   three warps that convert scales and none that writes tiles: out at M = 2048 116, now 102
///   decode_s8 with 32 tokens: out 16.5 at M = 32, twice 16 tokens 13.4
///   the next block's words expanded while one multiplies, in other registers: a block of 128 x 128
///     454 ns, after it 434; of 64 x 64 157 both
///   the next slice's mantissas fetched before a slice is added: 455, after it 441; integers turned
///     to floats in a loop of their own, with no select for wide slices: 452, with it 438
///   a tile's totals handed over by the threads that multiply: 72 to 216 bytes spill; by way of
///     shared memory out at M = 512 34.4, moved by the copy engine 32.3
///   a second launch, of smaller tiles, for the last rows, and the choice of tiles of then: K =
///     17408 at M = 512 97.2, tiles cut 91.7; LM head at M = 256 606, 573; out at M = 1024, back to
///     back, 56.3, 58.0
///   barriers initialized by 32 lanes at once, 64 clocks each: 8448 x 5120 at M = 16 8.8; by one
///     thread, 4 clocks each, 6.6
///   the first x copied, or the first scales converted, before anything else: no gain; scales of x
///     brought to L1 a slice before the epilogue copies them: none either (9.85, 9.84)
///   K split over a cluster, slice sums added in order through distributed shared memory: out at
///     M = 32 10.5, without 9.7; K = 17408 27.7, without 25.7
///   tiles cut too where there are fewer than multiprocessors, sums of a tile's second part kept in
///     shared memory until the totals of the first come: K = 17408 at M = 16 13.9, whole 13.8; M =
///     32 16.7, 16.1; M = 64 24.7, 23.8. A tile of 17 slices is cut twice, and hands over twice
///   a slice split among the warpgroups of a tile of 64 rows, their integers left in shared memory
///     for a warpgroup that only adds and writes: K = 17408 at M = 32 22.0 by four, slices by turns
///     17.1; at M = 64 27.4 by two, 24.5. The warps issue as well as before, about half the cycles;
///     but a slice costs a warpgroup some 400 clocks of waiting, and now each has all slices
///   the second of two warpgroups begins 600 to 3000 clocks after the first, so that they finish
///     slices at different times: within 1%. Of 1600 clocks 30 were left after one slice
///   x in its own order, each lane expanding the nibbles that go with it, to save the kernel that
///     permutes x. In a loop of products and sums alone a block of 128 x 128 takes 750 clocks so,
///     in the order of expand_signs 614; three times 64 x 32 470 and 315
///   {3, 1, 96}: a block 515 to 540 ns. Its totals are in shared memory, 147 KB a slice in and out
///   {1, 5, 32}, a turn for each slice of K = 5120: at M = 32 out 8.10, by three turns 7.83; QKV
///     8.73, by three 8.22
///   the first scales of x fetched with the first x: M = 17 and 32 1% faster, 48 and 64 1% slower
///   the next slice's scales waited for before a slice is added, all unrolled: within 1%
///   128 x 128 in halves of 64 tokens, one multiplied while the other is added up: gate at M = 512
///     84 -> 87, QKV at M = 1024 77.6 -> 81.2, while a loop of products and sums alone is 5% faster
///   x of 8 blocks ahead, not 4: 1%, for which totals and outputs would not fit in shared memory
///   where tiles are fewer than multiprocessors, a part of their slices given to CTAs without a
///     tile, their sums by way of the L2 cache to the CTA that adds them in order: K = 17408 at
///     M = 64 24.0 -> 26.2, M = 128 34.3 -> 40.1, M = 256 53.4 -> 56.3. A slice of 128 x 128 takes
///     3.6 where it is added, 4.8 where its sums are stored, and 0.9 more where those are added
///   88 tokens, for M = 256: wgmma has no such N for int8

#include <cstdint>
#include <initializer_list>

#include "binary_gemm/views.h"  // kSliceK

namespace binary_gemm {
namespace kernels {

enum class Family : std::uint8_t { kDecodeB1, kDecodeS8, kMma, kWgmma };

/// A kernel family and its template and launch parameters.
struct KernelConfig {
  Family family;
  std::uint8_t tokens;      ///< batch tile: tokens of a CTA
  std::uint8_t row_groups;  ///< wgmma: of 64 rows, a CTA
  std::uint8_t turns;       ///< wgmma: warpgroups that take the slices of the same rows by turns
  bool cuts = false;        ///< wgmma: a CTA may begin a tile and the next one finish it
};

constexpr const char* name(Family family) {
  return family == Family::kDecodeB1   ? "decode_b1"
         : family == Family::kDecodeS8 ? "decode_s8"
         : family == Family::kMma      ? "mma"
                                       : "wgmma";
}

/// The binary tensor core is native from sm_80 to sm_90 and emulated after.
constexpr bool has_b1(int compiled_architecture) {
  return compiled_architecture >= 80 && compiled_architecture < 100;
}

/// Of decode_b1, where it does not go by a ring: see takes_b1_ring. With groups of 32 it needs more
/// registers than there are for a second token.
constexpr std::int64_t max_b1_tokens(std::int64_t group_size) { return group_size == 32 ? 1 : 3; }
inline constexpr std::int64_t kMaxB1RingTokens = 4;

/// The most tokens a family's kernels take at once; larger M is cut.
constexpr std::int64_t max_tokens(Family family, std::int64_t group_size) {
  return family == Family::kWgmma || family == Family::kMma ? std::int64_t{1} << 31
         : family == Family::kDecodeS8                      ? 16
         : group_size >= 128                                ? kMaxB1RingTokens
                                                            : max_b1_tokens(group_size);
}

/// A tile of the wgmma kernel: 64 · row_groups rows by `tokens`; the time that a block of 128 of K
/// takes where a multiprocessor has one, two or three such tiles at once (0: no room for so many);
/// and what a launch takes beside its blocks more than the quickest one. ns, H200, G = 128, fitted
/// to 376 products, each tile by QKV, out, gate and K = 17408 at up to eight M of 32 to 512. Where
/// the tile that is chosen was among those measured it was the fastest, at every M.
///
/// A tile is four kernels, about 250 KiB. Left out, as they gain least: {2, 1, 160} 553, {2, 2, 48}
/// 197, {1, 2, 128} 239, {1, 2, 96} 198, {1, 3, 64} 151, {3, 1, 32} 274, {1, 1, 96} 259 and 382 ns.
struct WgmmaTile {
  std::uint8_t row_groups;
  std::uint8_t turns;
  std::uint8_t tokens;
  std::uint16_t block_ns[3];
  std::uint16_t launch_ns;
};
inline constexpr WgmmaTile kWgmmaTiles[] = {
    {2, 1, 176, {628, 0, 0}, 700},  {2, 1, 128, {447, 0, 0}, 600},
    {2, 1, 112, {379, 0, 0}, 1500}, {2, 1, 96, {349, 0, 0}, 1400},
    {3, 1, 64, {352, 0, 0}, 1600},  {3, 1, 48, {313, 0, 0}, 700},
    {2, 2, 32, {164, 0, 0}, 1300},  {1, 1, 64, {159, 254, 0}, 200},
    {1, 1, 48, {141, 217, 0}, 200}, {1, 1, 32, {137, 197, 268}, 100},
    {1, 2, 64, {138, 0, 0}, 1400},  {1, 3, 32, {90, 0, 0}, 600},
    {1, 4, 16, {71, 0, 0}, 900},
};
/// The most tokens of a tile.
constexpr std::int64_t most_wgmma_tokens() {
  std::int64_t most = 0;
  for (const WgmmaTile& tile : kWgmmaTiles) most = tile.tokens > most ? tile.tokens : most;
  return most;
}

/// What a tile takes beside its blocks, ns.
inline constexpr std::int64_t kWgmmaTileNs = 1200;

/// CTAs with the tile that a multiprocessor holds.
constexpr int resident(const WgmmaTile& tile) {
  return tile.block_ns[2] != 0 ? 3 : tile.block_ns[1] != 0 ? 2 : 1;
}

/// Tiles of a product.
constexpr std::int64_t wgmma_tiles(const WgmmaTile& tile, std::int64_t m, std::int64_t n) {
  const std::int64_t rows = 64 * tile.row_groups;
  return (n + rows - 1) / rows * ((m + tile.tokens - 1) / tile.tokens);
}

/// How long the tiles of a product take: full multiprocessors, then what is left for the last turn.
constexpr std::int64_t wgmma_ns(const WgmmaTile& tile, std::int64_t m, std::int64_t n,
                                std::int64_t k, int multiprocessors) {
  const std::int64_t tiles = wgmma_tiles(tile, m, n);
  const std::int64_t blocks = (k + 127) / 128;
  const std::int64_t most = resident(tile);
  const std::int64_t full = tiles / (multiprocessors * most);
  const std::int64_t left = tiles % (multiprocessors * most);
  std::int64_t ns = tile.launch_ns + full * (blocks * tile.block_ns[most - 1] + kWgmmaTileNs);
  if (left > 0) {
    const std::int64_t at_once = (left + multiprocessors - 1) / multiprocessors;
    ns += blocks * tile.block_ns[at_once - 1] + kWgmmaTileNs;
  }
  return ns;
}

/// Tiles that may be cut, by kernels of their own, as the code for it costs 2 to 4% where it is not
/// used: those of one CTA a multiprocessor that large products need most.
constexpr bool may_be_cut(int row_groups, int turns, int tokens) {
  return row_groups == 2 && turns == 1 && (tokens == 128 || tokens == 96);
}

/// Tiles whose outputs the copy engine writes, as a CTA has several of them.
constexpr bool engine_stores(int row_groups, int turns) { return row_groups == 2 && turns == 1; }

/// How many tiles are taken whole, tile i by CTA i % multiprocessors, where the others are cut:
/// less than two are left for a multiprocessor, but one at least, so that what a CTA hands over is
/// ready before the next one wants it. All of them: none is cut.
constexpr std::int64_t whole_tiles(std::int64_t tiles, std::int64_t multiprocessors) {
  return tiles < multiprocessors || tiles % multiprocessors == 0
             ? tiles
             : (tiles / multiprocessors - 1) * multiprocessors;
}

/// What it costs to hand a tile over, ns: products of 136 to 512 tiles of 128 x 128, K = 5120 and
/// 17408, took 0.8 to 2.8 us more than by their blocks.
inline constexpr std::int64_t kWgmmaCutNs = 2300;

/// The same as wgmma_ns if tiles are cut, or a longer time if they can't be: slices of what is left
/// are shared out evenly.
constexpr std::int64_t cut_wgmma_ns(const WgmmaTile& tile, std::int64_t m, std::int64_t n,
                                    std::int64_t k, int multiprocessors) {
  const std::int64_t tiles = wgmma_tiles(tile, m, n);
  const std::int64_t whole = whole_tiles(tiles, multiprocessors);
  if (!may_be_cut(tile.row_groups, tile.turns, tile.tokens) || whole == tiles) {
    return wgmma_ns(tile, m, n, k, multiprocessors) + kWgmmaCutNs;
  }
  constexpr std::int64_t kSliceBlocks = 8;
  const std::int64_t slices = (k + 128 * kSliceBlocks - 1) / (128 * kSliceBlocks);
  const std::int64_t most = ((tiles - whole) * slices + multiprocessors - 1) / multiprocessors;
  const std::int64_t turns = whole / multiprocessors;
  return tile.launch_ns + (turns * slices + most) * kSliceBlocks * tile.block_ns[0] +
         (turns + 1) * kWgmmaTileNs + kWgmmaCutNs;
}

/// The configuration that takes the least time. `may_cut`: there is memory to hand tiles over.
constexpr KernelConfig choose_wgmma(std::int64_t m, std::int64_t n, std::int64_t k, bool may_cut,
                                    int multiprocessors) {
  KernelConfig best{};
  std::int64_t best_ns = -1;
  for (const WgmmaTile& tile : kWgmmaTiles) {
    for (const bool cuts : {false, true}) {
      if (cuts && !may_cut) continue;
      const std::int64_t ns = cuts ? cut_wgmma_ns(tile, m, n, k, multiprocessors)
                                   : wgmma_ns(tile, m, n, k, multiprocessors);
      if (best_ns >= 0 && ns >= best_ns) continue;
      best = {Family::kWgmma, tile.tokens, tile.row_groups, tile.turns, cuts};
      best_ns = ns;
    }
  }
  return best;
}

/// From this M on tiles may be cut: those for less tokens are not.
inline constexpr std::int64_t kWgmmaCutMinTokens = 65;

/// Multiprocessors for which there is memory to hand tiles over: as many as the largest GPU of
/// compute capability 9.0 could have.
inline constexpr std::int64_t kHandOverCtas = 144;
/// A tile's totals, of 128 x 128 at most, and a flag for each; the flags come first.
inline constexpr std::int64_t kHandOverTileBytes = 128 * 128 * 4;
inline constexpr std::int64_t kHandOverFlagBytes = kHandOverCtas * 4;
inline constexpr std::int64_t kHandOverBytes =
    kHandOverFlagBytes + kHandOverCtas * kHandOverTileBytes;

/// Up to so many tokens, rows longer than this are decode_s8's, by a ring.
inline constexpr std::int64_t kRingTokens = 8;
inline constexpr std::int64_t kRingLongRow = 10240;

/// Whether the last slice of K is a half, and there are kernels of the copy engine for that: K =
/// 2560 or 9728, say. Others of a short last slice go without the copy engine.
constexpr bool has_half_slice(std::int64_t k, std::int64_t group_size) {
  return group_size == 128 && k > kSliceK && k % kSliceK == kSliceK / 2;
}
/// Whether the copy engine's decode kernels take rows of K at all.
constexpr bool engine_takes(std::int64_t k, std::int64_t group_size) {
  return k > 0 && (k % kSliceK == 0 || has_half_slice(k, group_size));
}

/// From so many rows a multiprocessor on there are many: between QKV (62) and gate (132).
inline constexpr std::int64_t kManyRows = 96;

/// Whether decode_s8 goes by the ring of stages of decode_ring.cuh, where the copy engine can read
/// W; `tokens`: the batch tile. That is faster with 16 tokens, for long rows, and where a
/// multiprocessor has many blocks of 16 rows; else its start takes longer. On an H200, us, plain
/// and back to back, without and with it:
///   M = 8:  gate (8 blocks) 11.5, 9.2 -> 9.1, 7.8; LM head (118) 80.8, 78.7 -> 71.5, 70.3;
///     K = 17408 14.4, 13.1 -> 12.0, 9.8; but out (2) 5.4, 4.3 -> 5.8, 4.4
///   M = 16: out 6.8, 5.9 -> 6.6, 5.2; gate 14.1, 12.4 -> 11.3, 9.8; LM head 106, 103 -> 90, 88
/// Groups of 32 and 64 would spill registers there.
constexpr bool takes_ring(int tokens, std::int64_t n, std::int64_t k, std::int64_t group_size,
                          int multiprocessors) {
  return group_size >= 128 && engine_takes(k, group_size) &&
         (tokens > kRingTokens || k > kRingLongRow || n > kManyRows * multiprocessors);
}

/// Whether decode_b1 goes by the ring of stages of decode_b1_ring.cuh, where the copy engine can
/// read W. On an H200, us, back to back, without and with it:
///   M = 2: gate 5.9, 5.3; K = 17408 8.7, 6.1; LM head 51, 45; but QKV 3.3, 3.6; out 2.8, 3.1
///   M = 3: QKV 4.9, 4.1; out 3.8, 3.4; gate 7.8, 6.0; LM head 70, 48; K = 17408 9.5, 7.6
///   M = 4: QKV 5.0, 4.7; out 4.1, 3.9; gate 7.5, 7.1; LM head 71, 64; K = 17408 9.6, 9.2; but
///     binary_linear of QKV 5.7, 5.9; of out 5.1, 5.4
/// where without it M = 4, and K = 17408 at M = 3, are decode_s8's.
/// A step of 64 layers: M = 2 2048 -> 1870, M = 4 2671 -> 2447. What lost, us:
///   M = 1: gate 4.2, with it 4.6; K = 17408 4.3, 5.3; LM head 41.7, 43.1; QKV 2.53, 2.42 but plain
///     4.2, 4.5
///   M = 5: QKV 5.0, 5.3; gate 7.6, 8.2; LM head 71, 72
///   two CTAs a multiprocessor, or registers for two: gate, M = 2 7.2, 5.8; one 5.4
///   all converters on each block, and two warps that add: LM head at M = 3 60 and 58
constexpr bool takes_b1_ring(std::int64_t tokens, std::int64_t n, std::int64_t k,
                             std::int64_t group_size, int multiprocessors) {
  constexpr std::int64_t kLongestRow = 24 * kSliceK;  // x and some stages fit in shared memory
  return group_size >= 128 && engine_takes(k, group_size) && k <= kLongestRow && tokens > 1 &&
         tokens <= kMaxB1RingTokens &&
         (tokens > 2 || k > kRingLongRow || n > kManyRows * multiprocessors);
}

/// From this M on the wgmma kernel is faster than decode_s8. Long rows are its strength: it takes
/// slices by turns, where decode_s8 takes rounds: K = 17408 on an H200, us, M = 6 and 8 by
/// decode_s8 14.3 and 14.6, up to 16 tokens by wgmma 13.8. By a ring decode_s8 keeps M <= 8.
constexpr std::int64_t wgmma_min_tokens(std::int64_t k) { return k >= 8192 ? 6 : 17; }

/// From this M on the mma kernel is faster than decode_s8 in chunks of 16. On an H200, forced, us:
/// at M = 64 by the times in src/cuda/gemm_mma.cu 20 (QKV, out), 41 (gate), 69 (K = 17408) against
/// 30, 26, 55, 84; measured at M = 128 30, 26, 62, 76. At M = 4096 it has 525 to 590 TOPS, 0.67 to
/// 0.75 of cuBLAS bf16. What lost, QKV at M = 4096, us: totals in registers, 128 x 64, 8 warps a
/// multiprocessor 652, now 614; 256 x 64, a CTA 709; 192 x 64 of 12 warps 769; x fetched after the
/// first products of a block 642; before that a loop of 12 instructions a product, 330 TOPS.
inline constexpr std::int64_t kMmaMinTokens = 49;

/// The mma kernel's tokens; how many rows a tile has is chosen in src/cuda/gemm_mma.cu.
constexpr KernelConfig configure_mma() { return {Family::kMma, 64, 0, 0}; }

/// The configuration of a decode family for M tokens.
constexpr KernelConfig configure(Family family, std::int64_t m, std::int64_t group_size) {
  const std::int64_t most = max_tokens(family, group_size);
  const std::int64_t tokens = m < most ? m : most;
  if (family == Family::kDecodeB1) return {family, static_cast<std::uint8_t>(tokens), 0, 0};
  return {family, static_cast<std::uint8_t>(tokens <= 8 ? 8 : 16), 0, 0};
}

/// What a call's views, its workspace and the compiled code allow.
struct Allowed {
  bool ordered;  ///< x can be put in the order of the wgmma and mma kernels
  bool wgmma;    ///< there is that kernel
  bool may_cut;  ///< and memory to hand tiles over
  bool engine;   ///< the copy engine can read W
};

/// The table's choice. At M = 4 or 5 the decode families meet: see bench/results. Without a ring of
/// its own decode_b1 leaves long rows to decode_s8's from M = 3 on.
constexpr KernelConfig choose(int compiled_architecture, std::int64_t m, std::int64_t n,
                              std::int64_t k, std::int64_t group_size, const Allowed& allowed,
                              int multiprocessors) {
  // decode_s8 by a ring, for long rows.
  const bool s8_ring = allowed.engine && m <= kRingTokens && k > kRingLongRow &&
                       takes_ring(kRingTokens, n, k, group_size, multiprocessors);
  if (has_b1(compiled_architecture)) {
    const bool b1_ring = allowed.engine && takes_b1_ring(m, n, k, group_size, multiprocessors);
    const bool b1 = m <= max_b1_tokens(group_size) && !(s8_ring && m > 2);
    if (b1_ring || b1) return configure(Family::kDecodeB1, m, group_size);
  }
  if (allowed.ordered && allowed.wgmma && m >= wgmma_min_tokens(k) && !s8_ring) {
    return choose_wgmma(m, n, k, allowed.may_cut, multiprocessors);
  }
  if (allowed.ordered && !allowed.wgmma && m >= kMmaMinTokens) return configure_mma();
  return configure(Family::kDecodeS8, m, group_size);
}

}  // namespace kernels
}  // namespace binary_gemm
