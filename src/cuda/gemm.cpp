/// The CUDA product: checks, choice of kernel, launch.

#include <cuda.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>

#include "binary_gemm/kernels/params.cuh"
#include "check.h"
#include "families.h"
#include "launch.h"
#include "runtime.h"

namespace binary_gemm {
namespace cuda {
namespace {

using kernels::Family;
using kernels::GemmParams;
using kernels::KernelConfig;

// Row counts and strides of the kernels are 32 bits wide; offsets are 64.
constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int32_t>::max();

void check_extent(const char* name, std::int64_t value) {
  if (value > kMaxExtent) {
    throw std::invalid_argument(std::string("binary_gemm: ") + name + " = " +
                                std::to_string(value) + " must be at most " +
                                std::to_string(kMaxExtent) + " on CUDA");
  }
}

// The driver's cuTensorMapEncodeTiled, or null where it has none. Asked for at run time, so that
// the library does not link with the driver.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static decltype(&cuTensorMapEncodeTiled) encoder = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                              12000, cudaEnableDefault, &result);
#else
    const cudaError_t code =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    if (code == cudaSuccess && result == cudaDriverEntryPointSuccess) {
      encoder = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    } else {
      cudaGetLastError();
    }
  });
  return encoder;
}

// A tensor for the copy engine, in boxes with the 128-byte swizzle, zeros out of bounds. Strides
// are those of all dimensions but the first, in bytes.
template <std::size_t kRank>
CUtensorMap tensor_map(CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kRank],
                       const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                       CUtensorMapL2promotion promotion) {
  cuuint32_t steps[kRank];
  std::fill(std::begin(steps), std::end(steps), 1u);
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // The driver's codes are the runtime's, such as that of a kernel which failed before this call.
  if (result != CUDA_SUCCESS) {
    throw CudaError(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled");
  }
  return map;
}

constexpr cuuint32_t kLineWords = kSliceK / 32;

// In boxes of `rows` rows by `slices` slices, a last one that is a half among them. Kernels for
// whole slices take the first map alone.
kernels::BitsMaps<true> bits_maps(const GemmParams& params, std::uint32_t rows,
                                  std::uint32_t slices) {
  const std::uint32_t halves = params.k % kSliceK == 0 ? 0 : 1;  // engine_can_fetch knows no others
  const cuuint64_t row_bytes = cuuint64_t{params.bits_stride} * 4;
  kernels::BitsMaps<true> maps{};
  maps.slices =
      tensor_map<3>(CU_TENSOR_MAP_DATA_TYPE_UINT32, params.bits,
                    {kLineWords, params.n, params.slices - halves}, {row_bytes, kSliceK / 8},
                    {kLineWords, rows, slices - halves}, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  if (halves > 0) {
    maps.rows =
        tensor_map<2>(CU_TENSOR_MAP_DATA_TYPE_UINT32, params.bits, {params.k / 32, params.n},
                      {row_bytes}, {kLineWords, rows}, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  }
  return maps;
}

GemmParams resolve(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y) {
  const BiasView& bias = epilogue.bias;
  const ConstMatrixView& residual = epilogue.residual;
  GemmParams params{};
  params.x = x.values + x.offset;
  params.x_stride = x.row_stride;
  params.x_scales = x.scales + x.scales_offset;
  params.bits = w.bits + w.bits_offset;
  params.scales = reinterpret_cast<const __half*>(w.scales + w.scales_offset);
  params.bits_stride = static_cast<std::uint32_t>(w.bits_stride);
  params.scales_stride = static_cast<std::uint32_t>(w.scales_stride);
  params.bias = bias.data != nullptr ? bias.data + bias.offset : nullptr;
  if (residual.data != nullptr) {
    params.residual =
        static_cast<const char*>(residual.data) + residual.offset * size_of(residual.type);
  }
  params.residual_stride = residual.row_stride;
  params.y = static_cast<char*>(y.data) + y.offset * size_of(y.type);
  params.y_stride = y.row_stride;
  params.m = static_cast<std::uint32_t>(x.m);
  params.n = static_cast<std::uint32_t>(w.n);
  params.k = static_cast<std::uint32_t>(w.k);
  params.slices =
      static_cast<std::uint32_t>(std::max<std::int64_t>(1, (w.k + kSliceK - 1) / kSliceK));
  params.y_type = y.type;
  params.vectorized = is_aligned(params.x, 16) && x.row_stride % 16 == 0 &&
                      is_aligned(params.bits, 16) && w.bits_stride % 4 == 0;
  return params;
}

// Whether the copy engine can fetch tiles of `rows` rows: kernels/weight_tile.cuh says what it
// needs.
bool engine_can_fetch(const Device& device, const GemmParams& params, std::int64_t group_size,
                      std::uint32_t rows) {
  const std::int64_t row_scale_bytes = params.k / group_size * 2;
  return device.source >= 90 && params.vectorized && kernels::engine_takes(params.k, group_size) &&
         params.scales_stride == params.k / group_size && is_aligned(params.scales, 16) &&
         rows * row_scale_bytes % 16 == 0 && params.n % rows * row_scale_bytes % 16 == 0 &&
         tensor_map_encoder() != nullptr;
}

using kernels::kOrderBlock;

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::int64_t ordered_stride(std::int64_t k) { return round_up(k, kOrderBlock); }

// Rows of x in that order: M, and after them what the last tiles of the wgmma kernel read past M.
// Nothing is written there, and no output comes of it. In bounds that is read much faster than the
// copy engine fills with zeros: on an H200, us, K = 17408 at M = 97 43.0 -> 33.8, M = 150 49.6 ->
// 38.8; QKV at M = 97 16.4 -> 14.0; gate at M = 17, back to back, 14.5 -> 13.4.
std::int64_t ordered_rows(std::int64_t m) {
  return m + std::min(m, kernels::most_wgmma_tokens() - 1);
}
std::int64_t ordered_bytes(std::int64_t m, std::int64_t k) {
  return ordered_rows(m) * ordered_stride(k);
}

// Whether there is the wgmma kernel.
bool has_wgmma(const Device& device) {
#ifdef BINARY_GEMM_HAS_SM90A
  return device.architecture == 90 && tensor_map_encoder() != nullptr;
#else
  static_cast<void>(device);
  return false;
#endif
}

// Whether the kernels that want x in an order of their own, wgmma and mma, can take the weights:
// their words are read by 16 bytes.
bool takes_order(const WeightView& w) {
  return w.k > 0 && is_aligned(w.bits + w.bits_offset, 16) && w.bits_stride % 4 == 0;
}

bool wants_order(Kernel kernel) { return kernel == Kernel::kWgmma || kernel == Kernel::kMma; }
bool wants_order(Family family) { return family == Family::kWgmma || family == Family::kMma; }

// Whether the copy engine can read the weights; x has a say too, which is asked for at the launch.
bool engine_reads(const Device& device, const WeightView& w) {
  return engine_can_fetch(device, resolve({}, w, {}, {}), w.group_size, kDecodeS8Rows);
}

// `ordered`: the weights are such, and there is a workspace for x; `may_cut`: and one to hand tiles
// over.
KernelConfig configuration(const Device& device, Kernel kernel, std::int64_t m, const WeightView& w,
                           bool ordered, bool may_cut) {
  switch (kernel) {
    case Kernel::kWgmma:
      return kernels::choose_wgmma(m, w.n, w.k, may_cut, device.multiprocessors);
    case Kernel::kMma:
      return kernels::configure_mma();
    case Kernel::kDecodeB1:
      return kernels::configure(Family::kDecodeB1, m, w.group_size);
    case Kernel::kDecodeS8:
      return kernels::configure(Family::kDecodeS8, m, w.group_size);
    case Kernel::kAuto:
      break;
  }
  return kernels::choose(device.architecture, m, w.n, w.k, w.group_size,
                         {ordered, has_wgmma(device), may_cut, engine_reads(device, w)},
                         device.multiprocessors);
}

// The part of the workspace where tiles are handed over: flags, then totals.
std::int64_t hand_over_bytes(std::int64_t m) {
  return m < kernels::kWgmmaCutMinTokens ? 0 : kernels::kHandOverBytes;
}
bool can_hand_over(const Device& device, std::int64_t m) {
  return m >= kernels::kWgmmaCutMinTokens && device.multiprocessors <= kernels::kHandOverCtas;
}

bool can_run(const Device& device, Kernel kernel, std::int64_t m, std::int64_t group_size) {
  switch (kernel) {
    case Kernel::kWgmma:
      return has_wgmma(device);
    case Kernel::kMma:
    case Kernel::kAuto:
    case Kernel::kDecodeS8:
      return true;
    case Kernel::kDecodeB1:
      return kernels::has_b1(device.architecture) &&
             m <= kernels::max_tokens(Family::kDecodeB1, group_size);
  }
  return false;
}

// The product as a decode family sees it. params.input: the kernel is to quantize x itself.
DecodeShape decode_shape(const Device& device, const GemmParams& params, std::int64_t group_size,
                         const KernelConfig& config) {
  const bool b1 = config.family == Family::kDecodeB1;
  return {config,
          params.n,
          params.k,
          group_size,
          engine_can_fetch(device, params, group_size, b1 ? kDecodeB1Rows : kDecodeS8Rows),
          device.shared_limit,
          device.shared_memory,
          device.multiprocessors,
          params.input != nullptr};
}

// Launches the product of at most max_tokens tokens.
void launch_decode(const Device& device, GemmParams params, std::int64_t group_size,
                   const KernelConfig& config, const Launch& launch) {
  const DecodeShape shape = decode_shape(device, params, group_size, config);
  const bool b1 = config.family == Family::kDecodeB1;
  DecodeLaunch plan = b1 ? plan_decode_b1(shape) : plan_decode_s8(shape);
  if (plan.kernel == nullptr) {
    throw std::invalid_argument(
        std::string("binary_gemm: ") + kernels::name(config.family) + " has no kernel for " +
        std::to_string(config.tokens) + " tokens and groups of " + std::to_string(group_size) +
        " in the " + std::to_string(device.shared_limit) + " bytes of shared memory of device " +
        std::to_string(device.index));
  }
  params.dependent = launch.programmatic;
  kernels::BitsMaps<true> maps{};
  if (plan.engine) maps = bits_maps(params, plan.rows, plan.slices);
  void* arguments[] = {&params, &maps, plan.cut};
  launch_kernel(device, plan.kernel, dim3(plan.grid),
                dim3(kernels::kWarpSize, plan.warps, plan.teams), plan.shared_bytes, launch,
                arguments);
}

void check_devices(const Device& device, const ActivationView& x, const WeightView& w,
                   const Epilogue& epilogue, const MatrixView& y) {
  if (w.k > 0) {
    check_device("weight bits", w.bits, device);
    check_device("weight scales", w.scales, device);
    check_device("activation values", x.values, device);
  }
  check_device("activation scales", x.scales, device);
  check_device("y", y.data, device);
  if (epilogue.bias.data != nullptr) check_device("bias", epilogue.bias.data, device);
  if (epilogue.residual.data != nullptr) {
    check_device("residual", epilogue.residual.data, device);
  }
}

// Throws unless the kernel that the caller forces can take the product.
void check_kernel(const Device& device, Kernel kernel, std::int64_t m, std::int64_t group_size) {
  if (can_run(device, kernel, m, group_size)) return;
  throw std::invalid_argument(std::string("binary_gemm: the kernel ") + name(kernel) +
                              " can't take M = " + std::to_string(m) + " with groups of " +
                              std::to_string(group_size) + " on device " +
                              std::to_string(device.index));
}

// How the kernels of a call are launched after its first one, which waits for all before the call
// unless the caller has said that it need not: what they read before that one has finished had been
// written before it began.
Launch following(Launch launch) {
  launch.programmatic = true;
  return launch;
}

// The product by the wgmma kernel; params.x is in its order. `hand_over`: its flags are zeros, and
// the kernel leaves them so.
void launch_wgmma(const Device& device, GemmParams params, std::int64_t group_size,
                  const KernelConfig& config, char* hand_over, const Launch& launch) {
  WgmmaLaunch plan =
      plan_wgmma({config, params.m, params.n, params.k, group_size, device.shared_limit,
                  device.shared_memory, device.multiprocessors});
  if (config.cuts) {
    plan.shares.flags = reinterpret_cast<std::uint32_t*>(hand_over);
    plan.shares.totals = reinterpret_cast<float*>(hand_over + kernels::kHandOverFlagBytes);
  }
  params.dependent = launch.programmatic;
  const auto x_stride = static_cast<cuuint64_t>(params.x_stride);
  const std::int64_t whole_tiles = round_up(params.m, plan.tokens);
  const auto x_rows = static_cast<cuuint64_t>(std::min(whole_tiles, ordered_rows(params.m)));
  CUtensorMap x =
      tensor_map<3>(CU_TENSOR_MAP_DATA_TYPE_UINT8, params.x,
                    {kOrderBlock, x_rows, x_stride / kOrderBlock}, {x_stride, kOrderBlock},
                    {kOrderBlock, plan.tokens, plan.blocks}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  CUtensorMap bits = tensor_map<2>(CU_TENSOR_MAP_DATA_TYPE_UINT32, params.bits,
                                   {params.k / 32, params.n}, {cuuint64_t{params.bits_stride} * 4},
                                   {kLineWords, plan.rows}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  CUtensorMap y{};
  if (plan.engine_stores && kernels::stores_vectors(params, true)) {
    y = tensor_map<2>(CU_TENSOR_MAP_DATA_TYPE_UINT16, params.y, {params.n, params.m},
                      {static_cast<cuuint64_t>(params.y_stride) * 2}, {64, plan.tokens},
                      CU_TENSOR_MAP_L2_PROMOTION_NONE);
  }
  void* arguments[] = {&params, &plan.shares, &x, &bits, &y};
  launch_kernel(device, plan.kernel, dim3(plan.grid), dim3(plan.threads), plan.shared_bytes, launch,
                arguments);
}

// The product by the mma kernel; params.x is in its order.
void launch_mma(const Device& device, GemmParams params, std::int64_t group_size,
                const Launch& launch) {
  const MmaLaunch plan =
      plan_mma(params.m, params.n, group_size, device.multiprocessors, device.shared_memory);
  params.dependent = launch.programmatic;
  void* arguments[] = {&params};
  launch_kernel(device, plan.kernel, dim3(plan.grid), dim3(plan.threads), plan.shared_bytes, launch,
                arguments);
}

void launch_ordered(const Device& device, const GemmParams& params, std::int64_t group_size,
                    const KernelConfig& config, char* hand_over, const Launch& launch) {
  if (config.family == Family::kMma) return launch_mma(device, params, group_size, launch);
  launch_wgmma(device, params, group_size, config, hand_over, launch);
}

// The product by the decode kernels, for arguments that have been checked.
void multiply(const Device& device, const ActivationView& x, const WeightView& w,
              const Epilogue& epilogue, const MatrixView& y, const Launch& launch) {
  for (std::int64_t m = 0; m < x.m;) {
    KernelConfig config = configuration(device, launch.kernel, x.m - m, w, /*ordered=*/false,
                                        /*may_cut=*/false);
    std::int64_t tokens = std::min(x.m - m, kernels::max_tokens(config.family, w.group_size));
    const auto resolve_part = [&] {
      Epilogue part = epilogue;
      if (part.residual.data != nullptr) part.residual = part.residual.row_range(m, tokens);
      return resolve(x.row_range(m, tokens), w, part, y.row_range(m, tokens));
    };
    GemmParams params = resolve_part();
    const std::int64_t most = kernels::max_b1_tokens(w.group_size);
    if (config.family == Family::kDecodeB1 && tokens > most &&
        plan_decode_b1(decode_shape(device, params, w.group_size, config)).kernel == nullptr) {
      tokens = most;  // no ring for this shape, or for this x
      config = kernels::configure(config.family, tokens, w.group_size);
      params = resolve_part();
    }
    launch_decode(device, params, w.group_size, config, m == 0 ? launch : following(launch));
    m += tokens;
  }
}

void check_extents(std::int64_t m, std::int64_t n, std::int64_t k) {
  check_extent("M", m);
  check_extent("N", n);
  check_extent("K", k);
}

void check_extents(std::int64_t m, const WeightView& w) {
  check_extents(m, w.n, w.k);
  check_extent("the weights' bits stride", w.bits_stride);
  check_extent("the weights' scales stride", w.scales_stride);
}

// Of a product of which there are no views yet.
void check_shape(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t group_size) {
  check::weight_shape(n, k, group_size);
  check_extents(m, n, k);
}

int current_device() {
  int device = 0;
  BINARY_GEMM_CUDA(cudaGetDevice(&device));
  return device;
}

// A row of q, and the scales after them, begin on this alignment.
constexpr std::int64_t kWorkspaceAlignment = 16;

std::int64_t aligned(std::int64_t bytes) { return round_up(bytes, kWorkspaceAlignment); }

void check_workspace_shape(std::int64_t m, std::int64_t k) {
  if (m < 0 || k < 0) {
    throw std::invalid_argument("binary_gemm: no workspace for M = " + std::to_string(m) +
                                ", K = " + std::to_string(k));
  }
  check_extent("M", m);
  check_extent("K", k);
}

[[noreturn]] void fail_workspace(const std::string& call, std::int64_t m, std::int64_t k,
                                 std::size_t needed, const Workspace& workspace) {
  throw std::invalid_argument("binary_gemm: " + call + " of M = " + std::to_string(m) +
                              ", K = " + std::to_string(k) + " needs a workspace of " +
                              std::to_string(needed) + " bytes, but has " +
                              std::to_string(workspace.data == nullptr ? 0 : workspace.bytes));
}

[[noreturn]] void fail_order(Kernel kernel, const WeightView& w) {
  throw std::invalid_argument(std::string("binary_gemm: the kernel ") + name(kernel) +
                              " needs rows of bits aligned to 16 bytes and K > 0; these are " +
                              std::to_string(w.bits_stride) + " words apart from offset " +
                              std::to_string(w.bits_offset) + ", and K = " + std::to_string(w.k));
}

bool is_enough(const Workspace& workspace, std::size_t needed) {
  return workspace.data != nullptr && workspace.bytes >= needed;
}

}  // namespace

const char* name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kAuto:
      return "auto";
    case Kernel::kDecodeB1:
      return "decode_b1";
    case Kernel::kDecodeS8:
      return "decode_s8";
    case Kernel::kMma:
      return "mma";
    case Kernel::kWgmma:
      return "wgmma";
  }
  return "unknown";
}

void prepare(int device) { prepared_device(device < 0 ? current_device() : device); }

std::vector<Kernel> supported_kernels(int device) {
  const Device& prepared = prepared_device(device < 0 ? current_device() : device);
  std::vector<Kernel> all;
  for (const Kernel kernel : {Kernel::kDecodeB1, Kernel::kDecodeS8, Kernel::kMma, Kernel::kWgmma}) {
    if (can_run(prepared, kernel, 1, 128)) all.push_back(kernel);
  }
  return all;
}

bool is_supported(Kernel kernel, std::int64_t m, std::int64_t n, std::int64_t k,
                  std::int64_t group_size, int device) {
  check_shape(m, n, k, group_size);
  const Device& prepared = prepared_device(device < 0 ? current_device() : device);
  return can_run(prepared, kernel, m, group_size) && (!wants_order(kernel) || k > 0);
}

Kernel choose_kernel(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t group_size,
                     int device) {
  check_shape(m, n, k, group_size);
  const Device& prepared = prepared_device(device < 0 ? current_device() : device);
  const kernels::Allowed allowed{k > 0, has_wgmma(prepared), can_hand_over(prepared, m),
                                 prepared.source >= 90 && kernels::engine_takes(k, group_size)};
  switch (
      kernels::choose(prepared.architecture, m, n, k, group_size, allowed, prepared.multiprocessors)
          .family) {
    case Family::kDecodeB1:
      return Kernel::kDecodeB1;
    case Family::kDecodeS8:
      return Kernel::kDecodeS8;
    case Family::kMma:
      return Kernel::kMma;
    case Family::kWgmma:
      break;
  }
  return Kernel::kWgmma;
}

std::size_t gemm_workspace_bytes(std::int64_t m, std::int64_t k) {
  check_workspace_shape(m, k);
  return static_cast<std::size_t>(
      m < kernels::wgmma_min_tokens(k) ? 0 : ordered_bytes(m, k) + hand_over_bytes(m));
}

std::size_t linear_workspace_bytes(std::int64_t m, std::int64_t k) {
  check_workspace_shape(m, k);
  return static_cast<std::size_t>(ordered_bytes(m, k) + aligned(m * 4) + hand_over_bytes(m));
}

void binary_gemm(const ActivationView& x, const WeightView& w, const Epilogue& epilogue,
                 const MatrixView& y, const Launch& launch) {
  check::binary_gemm(x, w, epilogue, y);
  check_extents(x.m, w);
  if (x.m == 0 || w.n == 0) return;
  const Device& device = prepared_device(device_of("y", y.data, current_device()));
  check_devices(device, x, w, epilogue, y);
  check_kernel(device, launch.kernel, x.m, w.group_size);
  // Two kernels read x in an order of their own, which a pass writes to the workspace.
  const std::int64_t stride = ordered_stride(w.k);
  const std::int64_t x_bytes = ordered_bytes(x.m, w.k);
  const auto needed = static_cast<std::size_t>(x_bytes);
  const bool enough = is_enough(launch.workspace, needed);
  if (wants_order(launch.kernel)) {
    if (!enough) {
      fail_workspace(std::string("the kernel ") + name(launch.kernel), x.m, x.k, needed,
                     launch.workspace);
    }
    if (!takes_order(w)) fail_order(launch.kernel, w);
  }
  const bool may_cut =
      can_hand_over(device, x.m) &&
      is_enough(launch.workspace, needed + static_cast<std::size_t>(hand_over_bytes(x.m)));
  const KernelConfig config =
      configuration(device, launch.kernel, x.m, w, enough && takes_order(w), may_cut);
  const DeviceGuard guard(device.index);
  if (!wants_order(config.family)) return multiply(device, x, w, epilogue, y, launch);
  check_device("workspace", launch.workspace.data, device);
  auto* ordered = static_cast<std::int8_t*>(launch.workspace.data);
  char* hand_over = config.cuts ? reinterpret_cast<char*>(ordered) + needed : nullptr;
  check::workspace(ordered, x_bytes + (config.cuts ? hand_over_bytes(x.m) : 0), x, w, epilogue, y);
  launch_permute(device, x, ordered, stride, w.group_size,
                 reinterpret_cast<std::uint32_t*>(hand_over), launch);
  GemmParams params = resolve(x, w, epilogue, y);
  params.x = ordered;
  params.x_stride = stride;
  launch_ordered(device, params, w.group_size, config, hand_over, following(launch));
}

void binary_linear(const ConstMatrixView& x, const WeightView& w, const Epilogue& epilogue,
                   const MatrixView& y, const Launch& launch) {
  check::binary_linear(x, w, epilogue, y);
  check_extents(x.rows, w);
  if (x.rows == 0 || w.n == 0) return;
  const std::size_t needed = linear_workspace_bytes(x.rows, x.cols);
  if (!is_enough(launch.workspace, needed)) {
    fail_workspace("binary_linear", x.rows, x.cols, needed, launch.workspace);
  }
  const std::int64_t stride = ordered_stride(x.cols);
  auto* values = static_cast<std::int8_t*>(launch.workspace.data);
  auto* scales = reinterpret_cast<float*>(values + ordered_bytes(x.rows, x.cols));
  const MutableActivationView q{values, scales, x.rows, x.cols, stride, 0, 0};
  check::workspace(values, static_cast<std::int64_t>(needed), x, w, epilogue, y);
  const Device& device = prepared_device(device_of("y", y.data, current_device()));
  check_device("workspace", launch.workspace.data, device);
  check_device("x", x.cols > 0 ? x.data : y.data, device);
  check_devices(device, q, w, epilogue, y);
  check_kernel(device, launch.kernel, x.rows, w.group_size);
  if (wants_order(launch.kernel) && !takes_order(w)) fail_order(launch.kernel, w);
  const KernelConfig config = configuration(device, launch.kernel, x.rows, w, takes_order(w),
                                            can_hand_over(device, x.rows));
  const bool ordered = wants_order(config.family);
  char* hand_over = config.cuts ? reinterpret_cast<char*>(scales) + aligned(x.rows * 4) : nullptr;
  const DeviceGuard guard(device.index);
  if (config.family == Family::kDecodeB1 && x.rows == 1 && x.type != DataType::kFloat32) {
    // The kernel that multiplies with one token may quantize it too. But every CTA reads all of it,
    // at about 2.4 TB/s in sum: on an H200, back to back, us, out (1.6 MB) 3.43 -> 3.02, QKV (2.6)
    // 3.85 -> 3.52, gate (5.6) 5.58 -> 6.06, K = 17408 (5.6) 7.1 -> 9.7.
    constexpr std::int64_t kMostBytes = 4'000'000;
    const std::int64_t ctas = (w.n + kDecodeB1Rows - 1) / kDecodeB1Rows;
    GemmParams params = resolve(q, w, epilogue, y);
    params.input = static_cast<const char*>(x.data) + x.offset * size_of(x.type);
    params.input_type = x.type;
    if (ctas * w.k * size_of(x.type) <= kMostBytes && is_aligned(params.input, 16) &&
        plan_decode_b1(decode_shape(device, params, w.group_size, config)).kernel != nullptr) {
      return launch_decode(device, params, w.group_size, config, launch);
    }
  }
  launch_quantize(device, x, q, ordered ? static_cast<int>(w.group_size) : 0,
                  reinterpret_cast<std::uint32_t*>(hand_over), launch);
  if (ordered) {
    launch_ordered(device, resolve(q, w, epilogue, y), w.group_size, config, hand_over,
                   following(launch));
  } else {
    multiply(device, q, w, epilogue, y, following(launch));
  }
}

}  // namespace cuda
}  // namespace binary_gemm
