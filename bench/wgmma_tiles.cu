// Times tiles of gemm_wgmma outside the library, with a sampled check of bits: a tool for experiments.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -DHDR='"binary_gemm/kernels/gemm_wgmma.cuh"'
//     -DTILESH='"tiles.h"' -I. -Iinclude -Isrc bench/wgmma_tiles.cu
// tiles.h: X(1,3,32,true) ...: row groups, turns, tokens, cuts. Any argument: check.
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <vector>
#include <cuda.h>
#include HDR
using namespace binary_gemm; using namespace binary_gemm::kernels;
#define CK(x) do { cudaError_t e = (x); if (e) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1);} } while (0)
typedef CUresult (*Enc)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Enc enc;
template <int R> CUtensorMap tmap(CUtensorMapDataType ty, const void* d, const cuuint64_t (&sz)[R], const cuuint64_t (&st)[R-1], const cuuint32_t (&box)[R]) {
  CUtensorMap m; cuuint32_t steps[R]; for (auto& s : steps) s = 1;
  CUresult r = enc(&m, ty, R, (void*)d, sz, st, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) { printf("enc %d\n", r); exit(1); } return m;
}
__global__ void fill(uint32_t* p, size_t n, uint32_t seed) { for (size_t i = blockIdx.x*(size_t)blockDim.x+threadIdx.x; i < n; i += (size_t)gridDim.x*blockDim.x) { uint32_t h = (uint32_t)i*2654435761u+seed; h ^= h>>16; h *= 0x85ebca6b; h ^= h>>13; h *= 0xc2b2ae35; h ^= h>>16; p[i] = h; } }
__global__ void fill_scales(__half* p, size_t n, uint32_t seed) { for (size_t i = blockIdx.x*(size_t)blockDim.x+threadIdx.x; i < n; i += (size_t)gridDim.x*blockDim.x) { uint32_t h = (uint32_t)i*2654435761u+seed; h ^= h>>16; h *= 0x85ebca6b; h ^= h>>13; p[i] = __float2half(0.01f + (h & 0xffff) * (0.02f/65536)); } }
__global__ void fill_f(float* p, size_t n) { for (size_t i = blockIdx.x*(size_t)blockDim.x+threadIdx.x; i < n; i += (size_t)gridDim.x*blockDim.x) p[i] = 0.001f * (1 + i % 97); }
// x in the order of G = 128: position 32 step + 16 half + 4t + i of column 32t + 16(step/2) + 4i + 2(step%2) + half
__global__ void check(GemmParams p, unsigned long long* bad, int stride_m, int stride_n) {
  size_t idx = blockIdx.x; unsigned mm = (idx * 7919 + 13) % p.m, nn = (unsigned)((idx * 104729ull + threadIdx.x * 31) % p.n);
  float acc = 0;
  for (unsigned s = 0; s < p.slices; ++s) {
    long long sum = 0; float smax = 0; 
    unsigned k0 = s * 1024, k1 = min(k0 + 1024, p.k);
    for (unsigned g = k0/128; g < k1/128; ++g) smax = fmaxf(smax, fabsf(__half2float(p.scales[(size_t)nn*p.scales_stride+g])));
    float u = ldexpf(1.0f, ilogbf(smax) - 13);
    for (unsigned g = k0/128; g < k1/128; ++g) {
      int dot = 0;
      for (int c = 0; c < 128; ++c) {
        int t = c / 32, r = c % 32, sh = r / 16, i = r % 16 / 4, sl = r % 4 / 2, half = r % 2; int step = sh*2+sl;
        int pos = 32*step + 16*half + 4*t + i;
        int q = p.x[(size_t)mm*p.x_stride + g*128 + pos];
        int b = p.bits[(size_t)nn*p.bits_stride + g*4 + t] >> r & 1;
        dot += b ? q : -q;
      }
      sum += (long long)(int)(__half2float(p.scales[(size_t)nn*p.scales_stride+g])/u) * dot;
    }
    acc = acc + float(sum) * u;
  }
  float want = __fmul_rn(acc, p.x_scales[mm]);
  __nv_bfloat16 w = __float2bfloat16_rn(want), got = ((__nv_bfloat16*)p.y)[(size_t)mm*p.y_stride+nn];
  if (__bfloat16_as_ushort(w) != __bfloat16_as_ushort(got)) atomicAdd(bad, 1ull);
}
int sms = 132;
struct Bufs { int8_t* x; float* xs; uint32_t* bits; __half* scales; void* y; unsigned long long* bad; float* totals; uint32_t* flags; size_t bytes_bits, bytes_sc; } B;
template <int RG, int T, int TOK, bool CUTS>
float run(int m, int n, int k, int split, bool chk) {
  using Plan = GemmWgmma<RG, T, TOK, 128, CUTS>;
  auto f = gemm_wgmma<RG, T, TOK, 128, CUTS>;
  CK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, 227*1024));
  const size_t wbits = (size_t)n * k / 32, wsc = (size_t)n * k / 128;
  int copies = (int)std::min<size_t>(B.bytes_bits / (wbits*4), B.bytes_sc / (wsc*2)); if (copies > 6) copies = 6;
  long tiles = (long)((n + Plan::kRows - 1) / Plan::kRows) * ((m + TOK - 1) / TOK);
  int at_once = std::min<long>((tiles + sms - 1) / sms, Plan::kResident);
  int grid = std::min<long>(tiles, sms * at_once);
  TileShares sh{}; sh.totals = B.totals; sh.flags = B.flags; sh.whole = tiles;
  const long slices = (k + 1023) / 1024, slots = (long)sms * Plan::kResident;
  if (split) { if (tiles % slots == 0 || (T == 1 && tiles < slots)) return 0; grid = slots; long w = tiles < slots ? 0 : tiles / slots - 1; sh.whole = w * slots; long u = (tiles - sh.whole) * slices; sh.units = u / slots; sh.rest = u % slots; }
  unsigned shb = std::max<unsigned>(Plan::kSharedBytes, std::min(227*1024, 228*1024/at_once-1024)/128*128);
  std::vector<GemmParams> P; std::vector<CUtensorMap> MX, MB;
  for (int c = 0; c < copies; ++c) {
    GemmParams p{}; p.x = B.x; p.x_stride = k; p.x_scales = B.xs; p.bits = B.bits + c * wbits; p.scales = B.scales + c * wsc; p.bits_stride = k / 32; p.scales_stride = k / 128;
    p.y = B.y; p.y_stride = n; p.m = m; p.n = n; p.k = k; p.slices = (k + 1023) / 1024; p.y_type = DataType::kBFloat16; p.vectorized = true; P.push_back(p);
    MX.push_back(tmap<3>(CU_TENSOR_MAP_DATA_TYPE_UINT8, p.x, {128, (cuuint64_t)m, (cuuint64_t)k / 128}, {(cuuint64_t)k, 128}, {128, TOK, (cuuint32_t)Plan::kStageBlocks}));
    MB.push_back(tmap<2>(CU_TENSOR_MAP_DATA_TYPE_UINT32, p.bits, {(cuuint64_t)k/32, (cuuint64_t)n}, {(cuuint64_t)k/8}, {32, (cuuint32_t)Plan::kRows}));
  }
  auto go = [&](int i) { f<<<grid, Plan::kThreads, shb>>>(P[i % copies], sh, MX[i % copies], MB[i % copies]); };
  if (chk) {
    CK(cudaMemset(B.y, 0xff, (size_t)m*n*2)); CK(cudaMemset(B.bad, 0, 8)); go(0); check<<<4096, 64>>>(P[0], B.bad, 1, 1);
    unsigned long long bad; CK(cudaMemcpy(&bad, B.bad, 8, cudaMemcpyDeviceToHost)); 
    if (bad) printf("  %dx%dx%d m %d n %d k %d: %llu WRONG\n", RG, T, TOK, m, n, k, bad);
  }
  cudaStream_t st; CK(cudaStreamCreate(&st));
  cudaGraph_t g; cudaGraphExec_t ge;
  const int reps = 12;
  CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < reps; ++i) f<<<grid, Plan::kThreads, shb, st>>>(P[i % copies], sh, MX[i % copies], MB[i % copies]);
  CK(cudaStreamEndCapture(st, &g)); CK(cudaGraphInstantiate(&ge, g, 0));
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  float best = 1e9;
  for (int r = 0; r < 6; ++r) { cudaEventRecord(a, st); cudaGraphLaunch(ge, st); cudaEventRecord(b, st); cudaEventSynchronize(b); float ms; cudaEventElapsedTime(&ms, a, b); if (r && ms < best) best = ms; }
  CK(cudaGetLastError()); cudaGraphExecDestroy(ge); cudaGraphDestroy(g); cudaStreamDestroy(st);
  return best * 1000 / reps;
}

struct Shape { const char* name; int n, k, m; };
template <int RG, int T, int TOK, bool CUTS> void tile(bool chk) {
  using Plan = GemmWgmma<RG, T, TOK, 128, CUTS>;
  printf("%dx%dx%-3d%s", RG, T, TOK, CUTS ? " cut" : "    ");
  static const Shape shapes[] = {{"down", 5120, 17408, 16}, {"down", 5120, 17408, 32}, {"down", 5120, 17408, 64}, {"down", 5120, 17408, 128}, {"out", 5120, 5120, 32}, {"qkv", 8192, 5120, 32}, {"qkv", 8192, 5120, 256}, {"gate", 17408, 5120, 256}, {"down", 5120, 17408, 512}, {"odd", 5111, 4352, 777}};
  for (auto& s : shapes) { if (s.m > TOK * 16) continue; printf(" | %s %d %.2f", s.name, s.m, run<RG,T,TOK,CUTS>(s.m, s.n, s.k, CUTS, chk)); }
  printf("\n");
}
int main(int argc, char** argv) {
  bool chk = argc > 1;
  void* ep; cudaDriverEntryPointQueryResult q; CK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &ep, cudaEnableDefault, &q)); enc = (Enc)ep;
  B.bytes_bits = 400ull << 20; B.bytes_sc = 60ull << 20;
  CK(cudaMalloc(&B.x, 2304ull * 17408)); CK(cudaMalloc(&B.xs, 1 << 20)); CK(cudaMalloc(&B.bits, B.bytes_bits)); CK(cudaMalloc(&B.scales, B.bytes_sc)); CK(cudaMalloc(&B.y, 512ull << 20)); CK(cudaMalloc(&B.bad, 8)); CK(cudaMalloc(&B.totals, 16 << 20)); CK(cudaMalloc(&B.flags, 1 << 20)); CK(cudaMemset(B.flags, 0, 1 << 20));
  fill<<<1024, 256>>>((uint32_t*)B.x, 2304ull * 17408 / 4, 1); fill<<<1024, 256>>>(B.bits, B.bytes_bits / 4, 2); fill_scales<<<1024, 256>>>(B.scales, B.bytes_sc / 2, 3); fill_f<<<64, 256>>>(B.xs, (1 << 20) / 4);
  CK(cudaDeviceSynchronize());
#define X(a,b,c,d) tile<a,b,c,d>(chk);
#include TILESH
  return 0;
}
