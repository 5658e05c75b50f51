"""Draws docs/layers.svg, the picture in the README, from the table of docs/performance.md.

    python docs/layers.py

The layers of a ResNet-50 at batch 32, in PyTorch's default form (float32, NCHW) and in the fast one
(float16, NHWC). Each bar is a layer's GPU time over the limit that memory speed sets.
"""

from pathlib import Path

HERE = Path(__file__).parent
SHAPES = [
    (32, 64, 112, 112),
    (32, 256, 56, 56),
    (32, 512, 28, 28),
    (32, 1024, 14, 14),
    (32, 2048, 7, 7),
]
PANELS = [("float32", "NCHW"), ("float16", "NHWC")]
LAYERS = ["syncbn", "nn.BatchNorm2d", "nn.SyncBatchNorm", "apex"]
NAMES = ["syncbn", "nn.BatchNorm2d (not synchronized)", "torch.nn.SyncBatchNorm", "apex"]

WIDTH, HEIGHT = 920, 386
LEFT, TOP, BOTTOM = 46, 78, 318  # of the axes
PANEL, GAP = 414, 32
HIGHEST = 9
BAR, SPACE = 17, 2

STYLE = """
  text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 11px }
  .paper { fill: #ffffff } .grid { stroke: #d8dee4 } .limit { stroke: #1f2328; stroke-width: 1.5 }
  .bar0 { fill: #1a7f37 } .bar1 { fill: #8c959f } .bar2 { fill: #d4720b } .bar3 { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .paper { fill: #0d1117 } .grid { stroke: #30363d } .limit { stroke: #e6edf3 }
    .bar0 { fill: #3fb950 } .bar1 { fill: #7d8590 } .bar2 { fill: #db8a3b } .bar3 { fill: #a371f7 }
  }
"""


def rows() -> dict[tuple[str, str, str], dict[str, float]]:
    """The table of one layer on a GPU: (shape, dtype, layout) to microseconds by column."""
    lines = (HERE / "performance.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| shape | dtype | layout"))
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start : lines.index("", start)]
    ]
    columns = cells[0][3:]
    return {
        (shape, dtype, layout): {c: float(t) for c, t in zip(columns, times, strict=True) if t}
        for shape, dtype, layout, *times in cells[2:]
    }


def height(ratio: float) -> float:
    return ratio / HIGHEST * (BOTTOM - TOP)


def panel(x: float, dtype: str, layout: str) -> list[str]:
    table = rows()
    middle = f'x="{x + PANEL / 2}" text-anchor="middle"'
    out = [f'<text {middle} y="{TOP - 12}">{dtype}, {layout}</text>']
    for tick in range(0, HIGHEST, 2):
        y = BOTTOM - height(tick)
        out.append(f'<line class="grid" x1="{x}" x2="{x + PANEL}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    group = PANEL / len(SHAPES)
    for i, shape in enumerate(SHAPES):
        row = table[str(shape), dtype, layout]
        start = x + i * group + (group - len(LAYERS) * (BAR + SPACE)) / 2
        for j, layer in enumerate(LAYERS):
            ratio = row[layer] / row["limit"]
            left, h = start + j * (BAR + SPACE), height(ratio)
            out.append(
                f'<rect class="bar{j}" x="{left:.1f}" y="{BOTTOM - h:.1f}" width="{BAR}" '
                f'height="{h:.1f}"/>'
                f'<text class="small" x="{left + BAR / 2:.1f}" y="{BOTTOM - h - 3:.1f}" '
                f'text-anchor="middle">{ratio:.1f}</text>'
            )
        _, channels, size, _ = shape
        middle = f'x="{x + (i + 0.5) * group:.1f}" text-anchor="middle"'
        out.append(f'<text {middle} y="{BOTTOM + 16}">{channels} ch.</text>')
        out.append(f'<text {middle} y="{BOTTOM + 31}">{size} &#215; {size}</text>')
    y = BOTTOM - height(1)
    out.append(f'<line class="limit" x1="{x}" x2="{x + PANEL}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return out


def picture() -> str:
    title = "Forward + backward of one layer: GPU time over what memory speed allows"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="16" y="26">{title}</text>',
    ]
    x = 16
    for j, name in enumerate(NAMES):
        out.append(f'<rect class="bar{j}" x="{x}" y="38" width="11" height="11"/>')
        out.append(f'<text x="{x + 16}" y="48">{name}</text>')
        x += 44 + round(6.4 * len(name))
    for i, (dtype, layout) in enumerate(PANELS):
        out += panel(LEFT + i * (PANEL + GAP), dtype, layout)
    note = (
        "One NVIDIA H200, PyTorch 2.11, the layers of ResNet-50 at batch 32. "
        "Lower is better; the line at 1 is the limit. apex: an earlier run."
    )
    out.append(f'<text class="small" x="16" y="{HEIGHT - 10}">{note}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "layers.svg").write_text(picture())
