#include "binary_gemm/kernels/pack.cuh"

#include <stdexcept>
#include <string>

#include "check.h"
#include "families.h"
#include "launch.h"

namespace binary_gemm {
namespace cuda {
namespace {

constexpr unsigned kThreads = 256;

template <class Word, class Scale, class Void>
kernels::PackParams resolve(const BasicWeightView<Word, Scale>& w,
                            const BasicMatrixView<Void>& dense) {
  kernels::PackParams params{};
  params.type = dense.type;
  params.dense_stride = dense.row_stride;
  params.bits = const_cast<std::uint32_t*>(w.bits) + w.bits_offset;
  params.bits_stride = w.bits_stride;
  params.scales_stride = w.scales_stride;
  if (w.scales != nullptr) {
    params.scales = reinterpret_cast<__half*>(const_cast<float16*>(w.scales) + w.scales_offset);
  }
  params.k = w.k;
  params.group_size = static_cast<int>(w.group_size);
  return params;
}

const Device& device_for(const WeightView& w, const void* dense) {
  if (w.n > INT32_MAX) {
    throw std::invalid_argument("binary_gemm: N = " + std::to_string(w.n) + " must be at most " +
                                std::to_string(INT32_MAX) + " on CUDA");
  }
  int current = 0;
  BINARY_GEMM_CUDA(cudaGetDevice(&current));
  const Device& device = prepared_device(device_of("weight bits", w.bits, current));
  check_device("dense weights", dense, device);
  if (w.scales != nullptr) check_device("weight scales", w.scales, device);
  return device;
}

void launch_rows(const Device& device, const void* kernel, kernels::PackParams& params,
                 std::int64_t rows, const Launch& launch) {
  const DeviceGuard guard(device.index);
  Launch plain = launch;
  plain.programmatic = false;  // these kernels do not wait
  void* arguments[] = {&params};
  launch_kernel(device, kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, plain,
                arguments);
}

}  // namespace

std::vector<const void*> pack_kernels() {
  return {reinterpret_cast<const void*>(&kernels::pack_rows),
          reinterpret_cast<const void*>(&kernels::unpack_rows)};
}

void pack_weights(const ConstMatrixView& dense, const MutableWeightView& w, const Launch& launch) {
  check::pack_weights(dense, w);
  if (w.n == 0 || w.k == 0) return;
  const Device& device = device_for(w, dense.data);
  kernels::PackParams params = resolve(w, dense);
  params.dense = static_cast<const char*>(dense.data) + dense.offset * size_of(dense.type);
  launch_rows(device, reinterpret_cast<const void*>(&kernels::pack_rows), params, w.n, launch);
}

void unpack_weights(const WeightView& w, const MatrixView& dense, const Launch& launch) {
  check::unpack_weights(w, dense);
  if (w.n == 0 || w.k == 0) return;
  const Device& device = device_for(w, dense.data);
  kernels::PackParams params = resolve(w, dense);
  params.unpacked = static_cast<char*>(dense.data) + dense.offset * size_of(dense.type);
  launch_rows(device, reinterpret_cast<const void*>(&kernels::unpack_rows), params, w.n, launch);
}

}  // namespace cuda
}  // namespace binary_gemm
