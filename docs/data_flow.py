"""Draws docs/data-flow.svg, the figure of docs/how-it-works.md: what goes where, on two ranks.

python docs/data_flow.py
"""

from pathlib import Path

WIDTH, HEIGHT = 920, 640
# Columns: the tensor that comes in, the reduction, the exchange, the element-wise op, the result.
COLUMNS = [(24, 92), (172, 150), (418, 110), (640, 150), (832, 64)]  # left edge, width
LANES = [0, 124]  # from the first rank's middle
BOX = 46

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328;
    text-anchor: middle }
  .title { font-size: 16px; font-weight: 600; text-anchor: start }
  .left { text-anchor: start }
  .op { font: 600 13px ui-monospace, Menlo, "DejaVu Sans Mono", monospace }
  .small { font-size: 11.5px }
  .paper { fill: #ffffff }
  .tensor { fill: #ddf4ff; stroke: #0969da }
  .kernel { fill: #dafbe1; stroke: #1a7f37 }
  .exchange { fill: #fff8c5; stroke: #9a6700 }
  .wide { stroke: #0969da; stroke-width: 4; fill: none }
  .thin { stroke: #9a6700; stroke-width: 1.6; fill: none }
  .wide-head { fill: #0969da } .thin-head { fill: #9a6700 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .paper { fill: #0d1117 }
    .tensor { fill: #0c2d6b; stroke: #58a6ff }
    .kernel { fill: #033a16; stroke: #3fb950 }
    .exchange { fill: #4b2900; stroke: #d29922 }
    .wide { stroke: #58a6ff } .thin { stroke: #d29922 }
    .wide-head { fill: #58a6ff } .thin-head { fill: #d29922 }
  }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def box(column: int, y: float, height: float, kind: str, *lines: str) -> list[str]:
    x, width = COLUMNS[column]
    out = [
        f'<rect class="{kind}" x="{x}" y="{y - height / 2}" width="{width}" height="{height}" '
        'rx="6"/>'
    ]
    for i, line in enumerate(lines):
        style = "op" if i == 0 and kind != "tensor" else "small" if i else ""
        at = y + 4.5 + (i - (len(lines) - 1) / 2) * 17
        out.append(text(x + width / 2, at, line, style))
    return out


def arrow(kind: str, *points: tuple[float, float]) -> list[str]:
    """A line through the points with a head at the last one, which comes from the left, from above
    or from below."""
    (x0, y0), (x, y) = points[-2:]
    size = 9 if kind == "wide" else 7
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    *before, _ = points
    line = [*before, (x - size * dx, y - size * dy)]
    path = " ".join(f"{px},{py}" for px, py in line)
    base_x, base_y = x - (size + 3) * dx, y - (size + 3) * dy
    head = [
        (x, y),
        (base_x - size * 0.7 * dy, base_y - size * 0.7 * dx),
        (base_x + size * 0.7 * dy, base_y + size * 0.7 * dx),
    ]
    corners = " ".join(f"{px:.1f},{py:.1f}" for px, py in head)
    return [
        f'<polyline class="{kind}" points="{path}"/>',
        f'<polygon class="{kind}-head" points="{corners}"/>',
    ]


def right(column: int) -> float:
    return sum(COLUMNS[column])


def half(
    top: float,
    title: str,
    tensors: tuple[str, str],
    saved: str,
    ops: tuple[tuple[str, ...], tuple[str, ...]],
    payload: str,
    exchange: tuple[str, ...],
    local: str,
    stays: str,
) -> list[str]:
    out = [text(24, top, title, "title")]
    first = top + 92
    out += box(2, first + LANES[1] / 2, LANES[1] + BOX, "exchange", *exchange)
    for rank, lane in enumerate(LANES):
        y = first + lane
        away = -1 if rank == 0 else 1  # the side of the lane that is not towards the other rank
        out += box(0, y, BOX, "tensor", tensors[0], f"rank {rank}")
        out += box(1, y, BOX, "kernel", *ops[0])
        out += box(3, y, BOX, "kernel", *ops[1])
        out += box(4, y, BOX, "tensor", tensors[1])
        out += arrow("wide", (right(0), y), (COLUMNS[1][0], y))
        out += arrow("thin", (right(1), y), (COLUMNS[2][0], y))
        out += arrow("thin", (right(2), y), (COLUMNS[3][0], y))
        out += arrow("wide", (right(3), y), (COLUMNS[4][0], y))
        middle, into = COLUMNS[0][0] + COLUMNS[0][1] / 2, COLUMNS[3][0] + COLUMNS[3][1] / 2
        around = y + away * 46
        edge = y + away * BOX / 2
        out += arrow("wide", (middle, edge), (middle, around), (into, around), (into, edge))
        out.append(text((right(1) + COLUMNS[2][0]) / 2, y - 8, payload, "small"))
        out.append(text((right(2) + COLUMNS[3][0]) / 2, y - 8, "of all ranks", "small"))
        out.append(text(middle + 10, around - 7, saved, "small left"))
        side = y - away * 39 + 4
        if local:
            out.append(text(COLUMNS[1][0] + COLUMNS[1][1] / 2, side, local, "small"))
        if stays:
            out.append(text(into, side, stays, "small"))
    return out


def picture() -> str:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img">',
        "<title>The data flow of one layer on two ranks</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
    ]
    out += half(
        30,
        "Forward",
        ("x", "y"),
        "x once more",
        (("statistics", "reads x"), ("normalize", "reads x, writes y")),
        "Σx, Σx², n",
        ("all_reduce", "2C + 1 values", "float64"),
        "",
        "moves running statistics",
    )
    out += half(
        326,
        "Backward",
        ("dy", "dx"),
        "dy once more, and the x that was kept",
        (("backward_reduce", "reads dy, x"), ("backward_input", "reads dy, x, writes dx")),
        "Σdy, Σdy·x̂",
        ("all_reduce", "2C values", "float32"),
        "gives dweight, dbias",
        "",
    )
    y = HEIGHT - 18
    out += arrow("wide", (24, y - 4), (64, y - 4))
    out.append(text(74, y, "a whole tensor, which stays on its rank", "small left"))
    out += arrow("thin", (340, y - 4), (380, y - 4))
    out.append(text(390, y, "two values per channel, which cross ranks", "small left"))
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "data-flow.svg").write_text(picture())
