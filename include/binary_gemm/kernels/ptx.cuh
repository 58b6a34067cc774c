#pragma once

/// PTX wrappers: one instruction each, named as PTX names it. See the PTX ISA for the semantics.

#include <cstdint>

namespace binary_gemm {
namespace kernels {
namespace ptx {

/// A pointer to shared memory as the 32-bit address that PTX takes.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes from global to shared memory, past L1. Both addresses are 16-byte aligned.
__device__ inline void cp_async_16(std::uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

/// The same of the first `bytes`, 0 to 16; zeros for the rest.
__device__ inline void cp_async_16_or_zeros(std::uint32_t target, const void* source,
                                            std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

/// Copies 8 bytes from global to shared memory. Both addresses are 8-byte aligned.
__device__ inline void cp_async_8(std::uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}

/// Copies 4 bytes from global to shared memory. Both addresses are 4-byte aligned.
__device__ inline void cp_async_4(std::uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

/// The same of the first `bytes`, 0 to 4; zeros for the rest.
__device__ inline void cp_async_4_or_zeros(std::uint32_t target, const void* source,
                                           std::uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's committed groups are in flight.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Brings the line of an address to the L2 cache.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

/// Loads 4, 8 or 16 bytes of shared memory, as aligned.
__device__ inline std::uint32_t load_shared_4(std::uint32_t address) {
  std::uint32_t d;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}
__device__ inline uint2 load_shared_8(std::uint32_t address) {
  uint2 d;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(address) : "memory");
  return d;
}
__device__ inline uint4 load_shared_16(std::uint32_t address) {
  uint4 d;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(address)
               : "memory");
  return d;
}

/// Adds to an int in shared memory, as one step for all threads.
__device__ inline void add_shared(std::uint32_t address, std::int32_t value) {
  asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

/// Loads four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i
/// / 8. Lane (g, t) = (lane / 4, lane % 4) receives the 4 bytes t of row g of each.
__device__ inline void ldmatrix_x4(std::uint32_t (&d)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

/// d[m, n] = popcount(a[m, :] & b[:, n]), m16n8k128.
/// A (T32,V2) -> (M16,K4 words): lane (g, t) holds word t of rows g and g + 8. B (T32,V1) -> (N8,K4
/// words): word t of column g. D (T32,V4) -> (M16,N8): columns 2t, 2t + 1 of rows g, then g + 8.
__device__ inline void mma_and_popc_m16n8k128(std::int32_t (&d)[4], std::uint32_t a0,
                                              std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

/// c[m, n] += a[m, :] · b[:, n], m16n8k32 of int8.
/// A (T32,V4) -> (M16,K8 words): words t of rows g and g + 8, then words t + 4 of both. B (T32,V2)
/// -> (N8,K8 words): words t and t + 4 of column g. C as above.
__device__ inline void mma_s8_m16n8k32(std::int32_t (&c)[4], const std::uint32_t (&a)[4],
                                       std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four bytes of {a, b} (b's are 4 to 7), each chosen by three bits of a nibble of `selectors`; the
/// nibble's fourth bit asks for the byte's sign in all its bits. (`__byte_perm` masks that bit
/// away.)
__device__ inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b,
                                              std::uint32_t selectors) {
  std::uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selectors));
  return d;
}

/// (a & mask) | bits. The instruction has room for one immediate: `bits` is kept in a register,
/// where the compiler would rather take two instructions.
__device__ inline std::uint32_t and_or(std::uint32_t a, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

/// c + a.lo · b.byte0 + a.hi · b.byte1, where a holds two int16 and b's bytes are unsigned.
__device__ inline std::int32_t dp2a_lo(std::uint32_t a, std::uint32_t b, std::int32_t c) {
  std::int32_t d;
  asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// c + a.lo · b.byte2 + a.hi · b.byte3, where a holds two int16 and b's bytes are signed.
__device__ inline std::int32_t dp2a_hi(std::uint32_t a, std::uint32_t b, std::int32_t c) {
  std::int32_t d;
  asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// c + the dot product of the four int8 of a and of b.
__device__ inline std::int32_t dp4a(std::uint32_t a, std::uint32_t b, std::int32_t c) {
  std::int32_t d;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

#if __CUDA_ARCH__ >= 900
/// Prepares an mbarrier in shared memory for phases of `arrivals` arrivals each.
__device__ inline void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes mbarrier_init visible to the copy engine.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives once and lets the phase also wait for `bytes` of copies.
__device__ inline void mbarrier_arrive_expect_tx(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Whether the phase of this parity has completed; may wait a while for it.
__device__ inline bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// Copies `bytes` (a multiple of 16, both addresses 16-byte aligned) from global to shared memory;
/// completes on the barrier.
__device__ inline void bulk_copy(std::uint32_t target, const void* source, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Copies `bytes` from shared to global memory, as bulk_copy does; completes with its group.
__device__ inline void bulk_store(void* target, std::uint32_t source, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Copies the box of a 2-D tensor map at (x, y) from shared memory; completes with its group.
__device__ inline void tensor_store_2d(const void* map, std::uint32_t x, std::uint32_t y,
                                       std::uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(source)
      : "memory");
}

/// Waits until this thread's bulk stores have read shared memory.
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Waits for this thread's bulk stores: what they wrote can be seen.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Orders this thread's accesses to memory before those of the copy engine that follow.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// Arrives once.
__device__ inline void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Copies the box of a 2-D tensor map at (x, y) to shared memory; completes on the barrier.
__device__ inline void tensor_copy_2d(std::uint32_t target, const void* map, std::uint32_t x,
                                      std::uint32_t y, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

/// Copies the box of a 3-D tensor map at (x, y, z) to shared memory; completes on the barrier.
__device__ inline void tensor_copy_3d(std::uint32_t target, const void* map, std::uint32_t x,
                                      std::uint32_t y, std::uint32_t z, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

/// Brings a tensor map, which is a kernel's argument, near the copy engine.
__device__ inline void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Stores four 8x8 matrices of 16-bit elements, transposed: lane i gives the address of column i %
/// 8 of matrix i / 8, 16 bytes; lane (g, t) = (lane / 4, lane % 4) has columns 2t and 2t + 1 of row
/// g.
__device__ inline void stmatrix_x4_transposed(std::uint32_t address, const std::uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}
#endif

/// Waits until `threads` threads have arrived at barrier `id` (1 to 15; 0 is __syncthreads).
__device__ inline void named_barrier_sync(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at barrier `id` without waiting.
__device__ inline void named_barrier_arrive(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Loads a word that another CTA stores by store_release; what that one wrote before can be seen.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// Programmatic dependent launch: lets the next kernel of the stream start. No effect before sm_90
/// or without the launch attribute.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernels before this one have finished and their writes can be seen.
__device__ inline void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
/// The address in the shared memory of CTA `rank` of the cluster that is `address` in this one's.
__device__ inline std::uint32_t map_shared_address(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

/// Stores a word in the shared memory of a CTA of the cluster.
__device__ inline void store_cluster(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

/// Arrives at the cluster's barrier; what this thread wrote before is seen after the wait.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/// Waits until all threads of the cluster have arrived.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

}  // namespace ptx
}  // namespace kernels
}  // namespace binary_gemm
