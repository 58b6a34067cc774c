"""The C ABI by ctypes: c_api_test.py LIBRARY. Without anything but Python."""

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t
from ctypes import c_uint16, c_uint32, c_void_p, sizeof

OK, INVALID_ARGUMENT, NOT_SUPPORTED = 0, 1, 4
FLOAT32 = 0


class Struct(ctypes.Structure):
    def __init__(self, **fields):
        super().__init__(struct_size=sizeof(type(self)), **fields)


class Matrix(Struct):
    _fields_ = [("struct_size", c_uint32), ("type", c_int32), ("data", c_void_p)] + [
        (name, c_int64) for name in ("rows", "cols", "row_stride", "offset")]


class Weights(Struct):
    _fields_ = [("struct_size", c_uint32), ("bits", c_void_p), ("scales", c_void_p)] + [
        (name, c_int64) for name in ("n", "k", "group_size", "bits_stride", "scales_stride",
                                     "bits_offset", "scales_offset")]


class Activation(Struct):
    _fields_ = [("struct_size", c_uint32), ("values", c_void_p), ("scales", c_void_p)] + [
        (name, c_int64) for name in ("m", "k", "row_stride", "offset", "scales_offset")]


class Bias(Struct):
    _fields_ = [("struct_size", c_uint32), ("data", c_void_p), ("n", c_int64), ("offset", c_int64)]


class Execution(Struct):
    _fields_ = [("struct_size", c_uint32), ("threads", c_int32), ("path", c_int32)]


def aligned(element, values):
    """A 16-byte aligned array; it keeps its memory alive."""
    size = sizeof(element) * len(values)
    memory = ctypes.create_string_buffer(size + 15)
    offset = -ctypes.addressof(memory) % 16
    array = (element * len(values)).from_buffer(memory, offset)
    array[:] = values
    return array


def expect(holds, what):
    if not holds:
        sys.exit(f"{what}; last error: {library.bg_last_error_message()}")


library = ctypes.CDLL(sys.argv[1])
library.bg_last_error_message.restype = c_char_p
library.bg_version_string.restype = c_char_p
library.bg_linear_free.argtypes = [c_void_p]
library.bg_linear_free.restype = None
library.bg_cpu_binary_gemm.argtypes = [POINTER(Activation), POINTER(Weights), POINTER(Bias),
                                       POINTER(Matrix), POINTER(Execution)]
library.bg_cpu_linear_from_packed.argtypes = [POINTER(Weights), POINTER(Bias), POINTER(c_void_p)]
library.bg_cpu_linear_run.argtypes = [c_void_p, POINTER(Matrix), POINTER(Matrix),
                                      POINTER(Execution)]
library.bg_cuda_linear_workspace_bytes.argtypes = [c_int64, c_int64, POINTER(c_size_t)]

version = [c_int(-1) for _ in range(3)]
library.bg_version(*map(byref, version))
expect(".".join(str(part.value) for part in version).encode() == library.bg_version_string(),
       "the two versions differ")

# Unit scales: the exact integers.
m, n, k, g = 3, 5, 192, 64
bits = aligned(c_uint32, [(i + 1) * 0x9E3779B9 % 2**32 for i in range(n * k // 32)])
scales = aligned(c_uint16, [0x3C00] * (n * k // g))  # 1.0
values = aligned(c_int8, [i * 11 % 256 - 128 for i in range(m * k)])
token_scales = aligned(c_float, [1.0, 0.5, 2.0])
bias_data = aligned(c_float, [0.0, 1.0, 2.0, 3.0, 4.0])
y_data = aligned(c_float, [float("nan")] * (m * n))

x = Activation(values=ctypes.addressof(values), scales=ctypes.addressof(token_scales), m=m, k=k,
               row_stride=k)
w = Weights(bits=ctypes.addressof(bits), scales=ctypes.addressof(scales), n=n, k=k, group_size=g,
            bits_stride=k // 32, scales_stride=k // g)
bias = Bias(data=ctypes.addressof(bias_data), n=n)
y = Matrix(type=FLOAT32, data=ctypes.addressof(y_data), rows=m, cols=n, row_stride=n)
expect(library.bg_cpu_binary_gemm(x, w, bias, y, Execution(threads=1)) == OK, "the product failed")


def weight(row, column):
    return 1 if bits[row * (k // 32) + column // 32] >> column % 32 & 1 else -1


for i in range(m):
    for j in range(n):
        exact = sum(values[i * k + c] * weight(j, c) for c in range(k))
        expected = exact * token_scales[i] + bias_data[j]
        expect(y_data[i * n + j] == expected,
               f"y[{i}][{j}] = {y_data[i * n + j]}, not {expected}")

# A layer of the same weights, on activations that are quantized to themselves.
layer = c_void_p()
expect(library.bg_cpu_linear_from_packed(w, None, byref(layer)) == OK, "no layer")
x_data = aligned(c_float, [127.0 if c == 0 else float(c % 100 - 50) for c in range(k)] * m)
dense_x = Matrix(type=FLOAT32, data=ctypes.addressof(x_data), rows=m, cols=k, row_stride=k)
expect(library.bg_cpu_linear_run(layer, dense_x, y, None) == OK, "the layer failed")
for j in range(n):
    exact = sum(int(x_data[c]) * weight(j, c) for c in range(k))
    expect(y_data[j] == exact, f"the layer's y[0][{j}] = {y_data[j]}, not {exact}")
library.bg_linear_free(layer)
library.bg_linear_free(None)

# Errors.
x.k = k - 1
expect(library.bg_cpu_binary_gemm(x, w, None, y, None) == INVALID_ARGUMENT, "a wrong K was taken")
expect(b"activation has K = 191" in library.bg_last_error_message(), "the message lacks the K")
y.struct_size += 8
expect(library.bg_cpu_binary_gemm(x, w, None, y, None) == NOT_SUPPORTED, "a long struct was taken")
y.struct_size -= 8
expect(library.bg_cpu_binary_gemm(None, w, None, y, None) == INVALID_ARGUMENT, "NULL was taken")
expect(library.bg_cuda_linear_workspace_bytes(1, 5120, byref(c_size_t())) in (OK, NOT_SUPPORTED),
       "bg_cuda_linear_workspace_bytes failed")
print(f"binary_gemm {library.bg_version_string().decode()} by ctypes: all is well")
