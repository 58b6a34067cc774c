#!/usr/bin/env python3
"""Tests of make_tables.py, on results that are made up by formulas."""

import contextlib
import csv
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock
from xml.etree import ElementTree

import make_tables

SHAPES = {
    "qkv": (8192, 5120),
    "out": (5120, 5120),
    "down": (5120, 17408),
    "down_5120": (5120, 5120),
    "lm_head": (248320, 5120),
}
MEMORY_GBPS = 4500
PEAK_TOPS = 1000
DECODE = [1, 2, 3, 4, 8, 16]
FULL = [*range(1, 33), 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def made_up(batches):
    """Rows of a file: each time is that of the slower of memory and arithmetic."""
    for layer, (n, k) in SHAPES.items():
        for m in batches:
            operations = 2 * n * k * m
            for impl, weight_bytes, tops in (("binary_gemm", n * k * 1.125 / 8, PEAK_TOPS),
                                             ("binary_gemm_pdl", n * k * 1.125 / 8, PEAK_TOPS),
                                             ("cublas_bf16", n * k * 2, 800),
                                             ("read_floor", n * k * 1.125 / 8, None)):
                us = weight_bytes / MEMORY_GBPS / 1000
                if tops is None:
                    if m > 1:
                        continue
                else:
                    us = max(us, operations / tops * 1e-6)
                yield [layer, n, k, 128, m, impl, us, operations / us * 1e-6,
                       weight_bytes / us * 1e-3, "made-up"]


class MakeTables(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.results = self.root / "bench" / "results"
        self.results.mkdir(parents=True)
        (self.root / "README.md").write_text(
            f"before\n{make_tables.BEGIN}\n{make_tables.END}\nafter\n")
        patch = mock.patch.object(make_tables, "ROOT", self.root)
        patch.start()
        self.addCleanup(patch.stop)

    def write(self, machine, batches):
        with (self.results / f"{machine}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(make_tables.COLUMNS)
            writer.writerows(made_up(batches))

    def run_main(self, *arguments):
        with mock.patch.object(sys, "argv", ["make_tables.py", *arguments]), \
                contextlib.redirect_stdout(io.StringIO()):
            return make_tables.main()

    def readme(self):
        return (self.root / "README.md").read_text()

    def pictures(self):
        return {path.name for path in self.results.glob("*.svg")}

    def roofline(self, machine):
        return (self.results / f"{machine}-roofline.svg").read_text()

    def test_nothing_yet(self):
        self.assertEqual(self.run_main(), 0)
        self.assertIn("No results yet", self.readme())
        self.assertEqual(self.pictures(), set())

    def test_decode_alone_has_no_pictures(self):
        self.write("h200", DECODE)
        self.assertEqual(self.run_main(), 0)
        self.assertIn("| attention QKV | 8192 × 5120 |", self.readme())
        self.assertNotIn("<img", self.readme())
        self.assertEqual(self.pictures(), set())

    def test_a_full_table_has_pictures(self):
        self.write("h200", FULL)
        self.assertEqual(self.run_main("--check"), 1)
        self.assertEqual(self.run_main(), 0)
        self.assertEqual(self.run_main("--check"), 0)
        self.assertTrue(self.readme().startswith("before\n"))
        self.assertTrue(self.readme().endswith("after\n"))
        # All but the copy of another layer.
        self.assertEqual(self.pictures(), {"h200-qkv.svg", "h200-out.svg", "h200-down.svg",
                                           "h200-lm_head.svg", "h200-roofline.svg"})
        for name in self.pictures():
            self.assertIn(f'src="bench/results/{name}"', self.readme())
            svg = ElementTree.parse(self.results / name).getroot()
            self.assertEqual(svg.get("width"), str(make_tables.WIDTH))
            # Nothing is drawn outside of the axes.
            for circle in svg.iter("{http://www.w3.org/2000/svg}circle"):
                self.assertTrue(make_tables.LEFT <= float(circle.get("cx"))
                                <= make_tables.WIDTH - make_tables.RIGHT)
                self.assertTrue(make_tables.TOP <= float(circle.get("cy"))
                                <= make_tables.HEIGHT - make_tables.BOTTOM)
        # A changed picture and one whose results are gone are stale.
        (self.results / "h200-qkv.svg").write_text("")
        self.assertEqual(self.run_main("--check"), 1)
        self.assertEqual(self.run_main(), 0)
        self.write("h200", DECODE)
        self.assertEqual(self.run_main("--check"), 1)
        self.assertEqual(self.run_main(), 0)
        self.assertEqual(self.pictures(), set())

    def test_the_roofs(self):
        self.write("h200", FULL)
        self.write("another", FULL)
        self.run_main()
        self.assertIn("4,500 GB/s", self.roofline("h200"))
        self.assertIn(f"{make_tables.INT8_TOPS['h200']:,} TOPS", self.roofline("h200"))
        # Of a machine without a data sheet here: the best measured.
        self.assertIn(f"{PEAK_TOPS:,} TOPS", self.roofline("another"))
        # Two implementations of four layers.
        self.assertEqual(self.roofline("h200").count("<circle"), 2 * 4 * len(FULL))

    def test_bytes_of_a_product(self):
        # 8 x 256 weights in groups of 128: 256 bytes of bits and 16 scales; 3 tokens of 256 int8 and
        # a scale; 3 x 8 outputs of bf16.
        self.assertEqual(make_tables.product_bytes(8, 256, 128, 3),
                         256 + 16 * 2 + 3 * (256 + 4) + 3 * 8 * 2)


if __name__ == "__main__":
    unittest.main()
