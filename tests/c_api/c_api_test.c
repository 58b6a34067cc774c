/// The C ABI from C: a layer, a product by hand, and errors. tests/consumers also builds it,
/// against the installed library. Its argument is 1 if the CUDA side is linked.

#include <binary_gemm/c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

static void expect(int holds, const char* what, int line) {
  if (holds) return;
  printf("line %d: %s\n  last error: %s\n", line, what, bg_last_error_message());
  ++failures;
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)

static int message_has(const char* part) { return strstr(bg_last_error_message(), part) != NULL; }

// 16-byte aligned memory, of zeros.
static void* zeros(size_t bytes) {
  void* data = aligned_alloc(16, (bytes + 15) / 16 * 16);
  if (data == NULL) abort();
  memset(data, 0, bytes);
  return data;
}

enum { kM = 2, kN = 3, kK = 256 };

static void versions(void) {
  int major = -1, minor = -1, patch = -1;
  char text[64];
  bg_version(&major, &minor, &patch);
  bg_version(NULL, NULL, NULL);
  snprintf(text, sizeof text, "%d.%d.%d", major, minor, patch);
  EXPECT(strcmp(text, bg_version_string()) == 0);
  EXPECT(major == BINARY_GEMM_VERSION_MAJOR && minor == BINARY_GEMM_VERSION_MINOR &&
         patch == BINARY_GEMM_VERSION_PATCH);
  EXPECT(strcmp(bg_last_error_message(), "") == 0);
}

// As the README has it.
static void layer(void) {
  float* dense = zeros(sizeof(float) * kN * kK);
  float* x_data = zeros(sizeof(float) * kM * kK);
  float* y_data = zeros(sizeof(float) * kM * kN);
  for (int i = 0; i < kN * kK; ++i) dense[i] = i / kK == 1 ? -0.25f : 0.5f;
  for (int i = 0; i < kM * kK; ++i) x_data[i] = 1.0f;

  const bg_matrix w = bg_matrix_of(dense, BG_FLOAT32, kN, kK);
  const bg_matrix x = bg_matrix_of(x_data, BG_FLOAT32, kM, kK);
  const bg_matrix y = bg_matrix_of(y_data, BG_FLOAT32, kM, kN);
  bg_linear* linear = NULL;
  EXPECT(bg_cpu_linear_from_dense(&w, 128, NULL, &linear) == BG_OK);
  EXPECT(bg_cpu_linear_run(linear, &x, &y, NULL) == BG_OK);
  EXPECT(y_data[0] == 128.0f && y_data[1] == -64.0f && y_data[kN] == 128.0f);
  printf("y[0][0] = %g\n", (double)y_data[0]);

  // A layer on the CPU does not run on CUDA.
  EXPECT(bg_cuda_linear_run(linear, &x, &y, NULL) != BG_OK);

  bg_weights packed = bg_weights_of(NULL, NULL, 0, 0, 128);
  bg_bias bias = bg_bias_of(dense, 1);
  EXPECT(bg_linear_weights(linear, &packed) == BG_OK);
  EXPECT(packed.n == kN && packed.k == kK && packed.group_size == 128);
  EXPECT(packed.bits[0] == 0xffffffffu && packed.bits[kK / 32] == 0u);
  EXPECT(bg_linear_bias(linear, &bias) == BG_OK);
  EXPECT(bias.data == NULL);

  bg_linear_free(linear);
  bg_linear_free(NULL);
  free(dense);
  free(x_data);
  free(y_data);
}

// Unit scales: the exact integers.
static void product(void) {
  uint32_t* bits = zeros(sizeof(uint32_t) * kN * (kK / 32));
  uint16_t* scales = zeros(sizeof(uint16_t) * kN * (kK / 64));
  int8_t* values = zeros(kM * kK);
  float* token_scales = zeros(sizeof(float) * kM);
  float* y_data = zeros(sizeof(float) * kM * kN);
  for (int i = 0; i < kN * (kK / 32); ++i) bits[i] = 0x9e3779b9u * (uint32_t)(i + 1);
  for (int i = 0; i < kN * (kK / 64); ++i) scales[i] = 0x3c00;  // 1.0
  for (int i = 0; i < kM * kK; ++i) values[i] = (int8_t)(i * 7 % 255 - 127);
  for (int i = 0; i < kM; ++i) token_scales[i] = 1.0f;

  const bg_activation x = bg_activation_of(values, token_scales, kM, kK);
  const bg_weights w = bg_weights_of(bits, scales, kN, kK, 64);
  const bg_matrix y = bg_matrix_of(y_data, BG_FLOAT32, kM, kN);
  const bg_execution one_thread = bg_execution_of(1);
  EXPECT(bg_cpu_binary_gemm(&x, &w, NULL, &y, &one_thread) == BG_OK);
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      int sum = 0;
      for (int k = 0; k < kK; ++k) {
        const int sign = (bits[n * (kK / 32) + k / 32] >> (k % 32) & 1u) != 0 ? 1 : -1;
        sum += sign * values[m * kK + k];
      }
      EXPECT(y_data[m * kN + n] == (float)sum);
    }
  }

  // Errors have a status and the values; nothing is written.
  y_data[0] = 42.0f;
  bg_matrix wrong = y;
  wrong.cols = kN + 1;
  wrong.row_stride = kN + 1;
  EXPECT(bg_cpu_binary_gemm(&x, &w, NULL, &wrong, NULL) == BG_INVALID_ARGUMENT);
  EXPECT(message_has("y is [2, 4]"));
  EXPECT(bg_cpu_binary_gemm(&x, NULL, NULL, &y, NULL) == BG_INVALID_ARGUMENT);
  EXPECT(message_has("w is NULL"));
  wrong = y;
  wrong.struct_size = 0;
  EXPECT(bg_cpu_binary_gemm(&x, &w, NULL, &wrong, NULL) == BG_INVALID_ARGUMENT);
  EXPECT(message_has("y: struct_size = 0"));
  EXPECT(y_data[0] == 42.0f);

  free(bits);
  free(scales);
  free(values);
  free(token_scales);
  free(y_data);
}

static void support(int cuda_is_linked) {
  size_t bytes = 0;
  EXPECT(bg_cpu_is_supported(5120, 5120, 128, BG_PATH_AUTO) == BG_OK);
  EXPECT(bg_cpu_is_supported(5120, 5120, 100, BG_PATH_AUTO) == BG_INVALID_ARGUMENT);
  EXPECT(message_has("group size = 100"));
  if (cuda_is_linked) {
    EXPECT(bg_cuda_linear_workspace_bytes(1, 5120, &bytes) == BG_OK);
    EXPECT(bytes >= 5120);
    EXPECT(bg_cuda_gemm_workspace_bytes(1, 5120, &bytes) == BG_OK);
    EXPECT(bytes == 0);
    EXPECT(bg_cuda_gemm_workspace_bytes(100, 5120, &bytes) == BG_OK);
    EXPECT(bytes >= 512000);
  } else {
    EXPECT(bg_cuda_linear_workspace_bytes(1, 5120, &bytes) == BG_NOT_SUPPORTED);
    EXPECT(bg_cuda_gemm_workspace_bytes(1, 5120, &bytes) == BG_NOT_SUPPORTED);
    EXPECT(bg_cuda_prepare(-1) == BG_NOT_SUPPORTED);
    EXPECT(message_has("binary_gemm_cuda"));
  }
}

int main(int argc, char** argv) {
  versions();
  layer();
  product();
  support(argc > 1 && strcmp(argv[1], "1") == 0);
  printf("binary_gemm %s from C: %d failures\n", bg_version_string(), failures);
  return failures == 0 ? 0 : 1;
}
