#!/usr/bin/env python3
"""Makes the README's tables, and the pictures beside the results, from bench/results/*.csv.

  python3 bench/make_tables.py           rewrite them
  python3 bench/make_tables.py --check   change nothing; exit 1 if one of them is stale

Everything between the README's bench markers is made here, and no number is typed by hand.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import sys
import textwrap
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
GROUP = 128  # of the main tables and the pictures
LAYERS = {
    "qkv": "attention QKV",
    "out": "attention out",
    "gate": "MLP gate",
    "down": "MLP down",
    "down_5120": "MLP down, square",
    "gate_2560": "MLP gate, 4B",
    "down_9728": "MLP down, 4B",
    "lm_head": "LM head",
}
COPIED_LAYER = "down_5120"  # as large as another: there for its row at M = 1
NOT_DRAWN = {COPIED_LAYER, "gate_2560", "down_9728"}
BATCHES = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
TOPS_FROM = 512  # tokens from which a product is limited by arithmetic
PICTURE_POINTS = 20  # at least, of ours, for a picture
# Dense int8 TOPS of the tensor cores by machine: half of the figure with sparsity in NVIDIA's data
# sheet (H200 SXM: 3,958).
INT8_TOPS = {"h200": 1979}
ROOFLINE_IMPLS = ("cublas_bf16", "binary_gemm")
COLUMNS = ["layer", "N", "K", "G", "M", "impl", "us", "tops", "gbps", "commit"]


@dataclasses.dataclass(frozen=True)
class Key:
    layer: str
    g: int
    m: int
    impl: str


@dataclasses.dataclass(frozen=True)
class Row:
    n: int
    k: int
    us: float
    tops: float
    gbps: float
    commit: str


class Results:
    """One file: rows by key, in its order."""

    def __init__(self, path):
        self.path = path
        self.machine = path.stem
        self.rows = {}
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != COLUMNS:
                sys.exit(f"{path}: the first line must be {','.join(COLUMNS)}")
            for line in reader:
                key = Key(line["layer"], int(line["G"]), int(line["M"]), line["impl"])
                if key in self.rows:
                    sys.exit(f"{path}:{reader.line_num}: {key} is there twice")
                self.rows[key] = Row(int(line["N"]), int(line["K"]), float(line["us"]),
                                     float(line["tops"]), float(line["gbps"]), line["commit"])

    def get(self, layer, m, impl, g=GROUP):
        return self.rows.get(Key(layer, g, m, impl))

    def us(self, layer, m, impl, g=GROUP):
        row = self.get(layer, m, impl, g)
        return row.us if row else None

    def values(self, field):
        """Distinct values of a key's field, in the file's order."""
        return list(dict.fromkeys(getattr(key, field) for key in self.rows))

    def shape(self, layer):
        row = next(row for key, row in self.rows.items() if key.layer == layer)
        return f"{row.n} × {row.k}"

    def commits(self):
        return ", ".join(f"`{commit}`" for commit in dict.fromkeys(
            row.commit for row in self.rows.values()))


def number(value):
    """Three digits, and no more than are worth reading: 2.75, 44.7, 1,034."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ratio(numerator, denominator, unit="×"):
    if numerator is None or denominator is None:
        return ""
    return f"{number(numerator / denominator)}{unit}"


def prose(*sentences):
    return textwrap.fill(" ".join(sentences), 100, break_long_words=False, break_on_hyphens=False)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def gpu_layers(results):
    present = results.values("layer")
    return [layer for layer in LAYERS if layer in present]


def single_token(results):
    header = ["M = 1, µs", "N × K", "plain", "back to back", "floor", "cuBLAS bf16",
              "dp4a and table", "plain / floor", "back to back / floor", "plain vs. cuBLAS",
              "back to back vs. cuBLAS"]
    rows = []
    for layer in gpu_layers(results):
        plain, pdl, floor, cublas, dp4a = (
            results.us(layer, 1, impl) for impl in
            ("binary_gemm", "binary_gemm_pdl", "read_floor", "cublas_bf16", "dp4a_table"))
        if plain is None and pdl is None:
            continue
        rows.append([LAYERS[layer], results.shape(layer),
                     *map(number, (plain, pdl, floor, cublas, dp4a)),
                     ratio(plain, floor, ""), ratio(pdl, floor, ""),
                     ratio(cublas, plain), ratio(cublas, pdl)])
    return table(header, rows) if rows else []


def linear(results):
    """binary_linear, which quantizes too."""
    header = ["`binary_linear`, µs", "M = 1, plain", "over `binary_gemm`", "M = 1, back to back",
              "over `binary_gemm`"]
    rows = []
    for layer in gpu_layers(results):
        times = [results.us(layer, 1, impl) for impl in
                 ("binary_linear", "binary_gemm", "binary_linear_pdl", "binary_gemm_pdl")]
        if None in times:
            continue
        plain, plain_gemm, pdl, pdl_gemm = times
        rows.append([LAYERS[layer], number(plain), f"{plain - plain_gemm:+.2f}", number(pdl),
                     f"{pdl - pdl_gemm:+.2f}"])
    return table(header, rows) if rows else []


def batches(results):
    layers = [layer for layer in gpu_layers(results) if layer != COPIED_LAYER
              and any(results.get(layer, m, "binary_gemm") for m in BATCHES)]
    rows = []
    for m in BATCHES:
        cells = []
        for layer in layers:
            row = results.get(layer, m, "binary_gemm")
            if row is None:
                cells.append("")
                continue
            cell = number(row.us)
            details = [ratio(results.us(layer, m, "cublas_bf16"), row.us)]
            if m >= TOPS_FROM:
                details.append(f"{row.tops:,.0f} TOPS")
            details = ", ".join(filter(None, details))
            cells.append(f"{cell} ({details})" if details else cell)
        if any(cells):
            rows.append([str(m), *cells])
    if not rows:
        return []
    return table(["M", *(LAYERS[layer] for layer in layers)], rows)


CHAIN = [  # impl, what it is
    ("engine_pdl", "the whole step, back to back"),
    ("engine_pdl:split_norm", "the same with RMSNorm apart"),
    ("engine_pdl:split_swiglu", "the same with SwiGLU apart"),
    ("engine_pdl:split_residual", "the same with the residual apart"),
    ("engine", "the whole step, plain"),
    ("binary_gemm_pdl", "its products alone, back to back"),
    ("cublas_bf16", "the products by cuBLAS bf16"),
    ("read_floor", "a kernel a product that only reads"),
    ("read_rate", "one kernel that reads all"),
]
CHAIN_LAYERS = 64


def chain(results):
    """A token of 64 layers and the LM head."""
    header = ["M", "64 layers and the LM head", "µs a token", "tokens/s", "µs a layer",
              "vs. cuBLAS bf16", "of the read rate"]
    rate = results.us("chain64", 1, "read_rate")
    rows = []
    for m in sorted(results.values("m")):
        peer = results.us("chain64", m, "cublas_bf16")
        for impl, name in CHAIN:
            us = results.us("chain64", m, impl)
            if us is None:
                continue
            ours = impl.startswith(("engine", "binary_gemm"))
            reads = impl.startswith("read_")
            rows.append([str(m), name, f"{us:,.0f}", "" if reads else f"{1e6 * m / us:,.0f}",
                         number(us / CHAIN_LAYERS), ratio(peer, us) if ours else "",
                         f"{100 * rate / us:.0f}%" if rate and (ours or reads) else ""])
    return table(header, rows) if rows else []


def worst(results, impl):
    """The least of cuBLAS's time by ours over all rows, as a sentence."""
    found = []
    for key, row in results.rows.items():
        peer = results.us(key.layer, key.m, "cublas_bf16", key.g)
        if key.impl == impl and peer is not None:
            found.append((peer / row.us, key))
    if not found:
        return ""
    least, key = min(found, key=lambda item: item[0])
    where = f"{LAYERS.get(key.layer, key.layer)}, M = {key.m}"
    if key.g != GROUP:
        where += f", G = {key.g}"
    return (f"Of {len(found)} sizes measured against cuBLAS bf16, the least favourable is "
            f"{number(least)}× ({where}).")


def groups(results):
    """GB/s of the weights' bits and scales at one token, for every group size."""
    sizes = sorted(results.values("g"))
    if sizes == [GROUP]:
        return []
    rows = []
    for layer in gpu_layers(results):
        cells = [results.get(layer, 1, "binary_gemm", g) for g in sizes]
        if any(cells):
            rows.append([LAYERS[layer], *(number(cell.gbps) if cell else "" for cell in cells)])
    if not rows:
        return []
    return table(["M = 1, plain, GB/s", *(f"G = {g}" for g in sizes)], rows)


# ---- Pictures ------------------------------------------------------------------------------------

WIDTH, HEIGHT = 480, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 34, 44
INK, FAINT_INK, GRID, FAINT_GRID = "#1f2328", "#57606a", "#d8dee4", "#eaeef2"


@dataclasses.dataclass(frozen=True)
class Style:
    name: str
    colour: str
    dashes: str = ""


CURVES = {  # impl: how it is drawn, the last on top
    "cublaslt_int8": Style("cuBLASLt int8", "#8c959f"),
    "cublas_bf16": Style("cuBLAS bf16", "#bc4c00"),
    "binary_gemm": Style("binary_gemm", "#0969da"),
}
FLOOR = Style("read floor", FAINT_INK, "4 3")
ROOFS = Style("roofs", FAINT_INK, "4 3")


def decades(low, high):
    """1, 2, 5 of every power of ten from below `low` to above `high`."""
    steps = [digit * 10.0**power for power in range(math.floor(math.log10(low)),
                                                    math.ceil(math.log10(high)) + 1)
             for digit in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low)
    last = min((i for i, step in enumerate(steps) if step >= high), default=len(steps) - 1)
    return steps[first:last + 1]


class Chart:
    """Curves over two log axes, as SVG. The y axis is from the first to the last of its ticks."""

    def __init__(self, title, x_range, x_ticks, y_ticks):
        self.x_range = x_range
        self.y_range = y_ticks[0], y_ticks[-1]
        self.legend = []
        self.svg = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="20" font-size="12" font-weight="bold" fill="{INK}">'
            + escape(title) + "</text>",
        ]
        for tick in y_ticks:
            y = self.y(tick)
            self.svg.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
            self.svg.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" '
                            f'fill="{FAINT_INK}">{tick:g}</text>')
        for tick in x_ticks:
            x = self.x(tick)
            self.svg.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{FAINT_GRID}"/>')
            self.svg.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle" '
                            f'fill="{FAINT_INK}">{tick:g}</text>')

    def x(self, value):
        low, high = self.x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    def y(self, value):
        low, high = self.y_range
        share = math.log(value / low) / math.log(high / low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def curve(self, style, points, width=2.0, dots=False):
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
        self.svg.append(f'<path d="M{path}" fill="none" stroke="{style.colour}" '
                        f'stroke-width="{width:g}" stroke-linejoin="round"{dashes}/>')
        if dots:
            self.svg += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="2" '
                         f'fill="{style.colour}"/>' for x, y in points]
        if style not in self.legend:
            self.legend.append(style)

    def note(self, x, y, text, below=False):
        """A remark whose end is just above, or below, a point."""
        line = self.y(y) + (14 if below else -5)
        self.svg.append(f'<text x="{self.x(x) - 4:.1f}" y="{line:.1f}" text-anchor="end" '
                        f'fill="{FAINT_INK}">{escape(text)}</text>')

    def finish(self):
        left, line = LEFT, HEIGHT - 12
        for style in self.legend:
            dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
            self.svg.append(f'<path d="M{left} {line - 4}h16" stroke="{style.colour}" '
                            f'stroke-width="2"{dashes}/>')
            self.svg.append(f'<text x="{left + 20}" y="{line}" fill="{INK}">'
                            f"{escape(style.name)}</text>")
            left += 30 + 6 * len(style.name)
        return "\n".join([*self.svg, "</svg>"]) + "\n"


def time_picture(results, layer):
    """Time against M on log axes, or None where there is too little."""
    curves = []
    for impl, style in CURVES.items():
        points = sorted((m, results.us(layer, m, impl)) for m in results.values("m")
                        if results.us(layer, m, impl))
        if points:
            curves.append((style, points))
        if impl == "binary_gemm" and len(points) < PICTURE_POINTS:
            return None
    m_low = min(points[0][0] for _, points in curves)
    m_high = max(points[-1][0] for _, points in curves)
    floor = results.us(layer, 1, "read_floor")
    if floor:
        curves.insert(0, (FLOOR, [(m_low, floor), (m_high, floor)]))
    times = [us for _, points in curves for _, us in points]
    powers = [2**i for i in range(m_high.bit_length()) if 2**i >= m_low]
    chart = Chart(f"{LAYERS[layer]}, {results.shape(layer)}: µs against tokens (M), "
                  f"{results.machine.upper()}",
                  (m_low, m_high), powers, decades(min(times), max(times)))
    for style, points in curves:
        chart.curve(style, points)
    return chart.finish()


def product_bytes(n, k, g, m):
    """Of bits, fp16 scales, int8 activations with their fp32 scales, and y in bf16."""
    return n * k / 8 + n * k / g * 2 + m * (k + 4) + m * n * 2


def roofline(results):
    """TOPS against operations a byte, for every layer and M, or None where there is too little.

    A product has its place on the x axis by the bytes that it needs, whoever computes it: so above
    each other are times of the same product. The memory's roof is the best rate of the read floor in
    the file; the arithmetic's is INT8_TOPS, or where that is not known, the best measured.
    """
    curves = []
    for impl, style in CURVES.items():
        if impl not in ROOFLINE_IMPLS:
            continue
        for layer in gpu_layers(results):
            if layer == COPIED_LAYER:
                continue
            rows = sorted((m, results.get(layer, m, impl)) for m in results.values("m")
                          if results.get(layer, m, impl))
            points = [(2 * row.n * row.k * m / product_bytes(row.n, row.k, GROUP, m), row.tops)
                      for m, row in rows]
            if points:
                curves.append((impl, style, rows[-1][0], points))
    ours = [(m, points) for impl, _, m, points in curves if impl == "binary_gemm"]
    rates = [row.gbps for key, row in results.rows.items()
             if key.impl == "read_floor" and key.layer in LAYERS]
    # Of decode alone the picture would have one roof.
    if (not rates or max((m for m, _ in ours), default=0) < TOPS_FROM
            or sum(len(points) for _, points in ours) < PICTURE_POINTS):
        return None
    rate = max(rates)
    everything = [point for *_, points in curves for point in points]
    best = max(tops for _, tops in everything)
    peak = INT8_TOPS.get(results.machine, best)
    x_ticks = decades(min(x for x, _ in everything), max(x for x, _ in everything))
    low, high = x_ticks[0], x_ticks[-1]
    y_ticks = decades(min(tops for _, tops in everything), max(peak, best))
    ridge = peak * 1000 / rate  # operations a byte
    chart = Chart(f"TOPS against operations a byte, all layers and M, {results.machine.upper()}",
                  (low, high), x_ticks, y_ticks)
    roofs = [(max(low, y_ticks[0] * 1000 / rate), max(y_ticks[0], low * rate / 1000)),
             (ridge, peak), (high, peak)]
    chart.curve(ROOFS, [point for point in roofs if low <= point[0] <= high])
    middle = math.sqrt(low * ridge)
    chart.note(middle, middle * rate / 1000, f"{rate:,.0f} GB/s")
    chart.note(high, peak, f"{peak:,.0f} TOPS", below=True)
    for _, style, _, points in curves:
        chart.curve(style, points, width=0.7, dots=True)
    return chart.finish()


# ---- The README ----------------------------------------------------------------------------------

def gpu_section(results, pictures):
    name = results.machine.upper()
    blocks = [prose(
        f"**{name}**, G = {GROUP}; medians, all from "
        f"[one file](bench/results/{results.path.name}), commit {results.commits()}.",
        "Each time is that of one call in a graph of many, over weights that rotate through more "
        "than L2 holds. *Back to back* is with programmatic dependent launch, where a call's "
        "weights are fetched while the one before it ends; *floor* is a kernel that only reads the "
        "same bytes; *dp4a and table* is the method that others ship. A factor with × says how "
        "many times faster than cuBLAS bf16 we are.",
    )]
    for lines in (single_token(results), linear(results)):
        if lines:
            blocks.append("\n".join(lines))
    lines = chain(results)
    if lines:
        blocks.append(prose(
            "A decode step of a whole model, [the engine example](examples/engine) as one graph: "
            "RMSNorm, QKV, attention out, gate and up, SwiGLU, down and the residuals of 64 layers, "
            "then the LM head, all weights distinct. *µs a layer* is a token's time by 64, with the "
            "head in it; cuBLAS has the products alone."))
        blocks.append("\n".join(lines))
    lines = batches(results)
    if lines:
        blocks.append("`binary_gemm` at larger batches, plain: µs (against cuBLAS bf16).")
        blocks.append("\n".join(lines))
    sentence = worst(results, "binary_gemm")
    if sentence:
        blocks.append(prose(sentence))
    lines = groups(results)
    if lines:
        blocks.append("\n".join(lines))
    drawn = [(layer, LAYERS[layer] + ": time against M", time_picture(results, layer))
             for layer in gpu_layers(results) if layer not in NOT_DRAWN]
    drawn.append(("roofline", "TOPS against operations a byte", roofline(results)))
    images = []
    for name, text, svg in drawn:
        if svg is not None:
            path = results.path.with_name(f"{results.machine}-{name}.svg")
            pictures[path] = svg
            images.append(f'<img src="{path.relative_to(ROOT).as_posix()}" width="49%" '
                          f'alt="{escape(text)}">')
    if drawn[-1][2] is not None:
        peak = ("the int8 tensor cores' of the data sheet" if results.machine in INT8_TOPS
                else "the best TOPS measured")
        blocks.append(prose(
            "The last picture has all layers and batches, by the operations for each byte that a "
            "product needs: bits, scales, int8 activations and y. Its roofs are the read floor's "
            f"best rate and {peak}."))
    if images:
        blocks.append("\n".join(images))
    return blocks


def cpu_section(results):
    """Every path with as many threads as there are."""
    threads = max(int(impl.rsplit(":t", 1)[1]) for impl in results.values("impl"))
    suffix = f":t{threads}"
    batch_sizes = sorted(results.values("m"))
    paths = list(dict.fromkeys(
        impl[len("binary_gemm:"):-len(suffix)] for impl in results.values("impl")
        if impl.startswith("binary_gemm:") and impl.endswith(suffix)))
    rows = []
    for layer in results.values("layer"):
        for path in paths:
            cells = [results.us(layer, m, f"binary_gemm:{path}{suffix}") for m in batch_sizes]
            rows.append([LAYERS.get(layer, layer), results.shape(layer), path,
                         *(number(us / 1000) if us else "" for us in cells)])
        floor = results.us(layer, 1, f"read_floor{suffix}")
        if floor:
            rows.append([LAYERS.get(layer, layer), results.shape(layer), "*read floor*",
                         number(floor / 1000), *[""] * (len(batch_sizes) - 1)])
    return [
        prose(f"**{results.machine}**, {threads} threads, G = {GROUP}: `binary_gemm`, ms "
              f"([all](bench/results/{results.path.name}), commit {results.commits()})."),
        "\n".join(table(["ms", "N × K", "path", *(f"M = {m}" for m in batch_sizes)], rows)),
    ]


def generate():
    """The text between the markers, and the pictures by path."""
    pictures = {}
    blocks = []
    files = sorted((ROOT / "bench" / "results").glob("*.csv"))
    everything = [results for results in map(Results, files) if results.rows]
    for results in everything:
        if not results.machine.startswith("cpu-"):
            blocks += gpu_section(results, pictures)
    for results in everything:
        if results.machine.startswith("cpu-"):
            blocks += cpu_section(results)
    if not blocks:
        blocks = ["No results yet: `./run bench` writes them to `bench/results`."]
    return "\n\n".join(blocks), pictures


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    arguments = parser.parse_args()

    readme = ROOT / "README.md"
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        sys.exit(f"README.md must have {BEGIN} and {END}, once each and in this order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    section, pictures = generate()
    wanted = {readme: f"{before}{BEGIN}\n{section}\n{END}{after}", **pictures}

    stale = [path for path, content in wanted.items()
             if not path.exists() or path.read_text() != content]
    # A picture whose results are gone is stale too.
    gone = [path for path in (ROOT / "bench" / "results").glob("*.svg") if path not in pictures]
    if arguments.check:
        for path in stale + gone:
            print(f"{path.relative_to(ROOT)} is stale: run python3 bench/make_tables.py")
        return 1 if stale or gone else 0
    for path in stale:
        path.write_text(wanted[path])
        print(f"wrote {path.relative_to(ROOT)}")
    for path in gone:
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
