"""Draw the figures of the concept pages: `python scripts/drawings.py [--check]`.

Writes SVG to `docs/concepts`. Lines and letters have the colour of the text around them, so a drawing is
legible on light and dark pages; fills are translucent. `--check` writes nothing and fails if a file is out of
date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "docs/concepts"

STYLE = """
svg.kintsugi {color: #24292f; font: 13px system-ui, sans-serif}
@media (prefers-color-scheme: dark) {svg.kintsugi {color: #d7dae0}}
svg.kintsugi text {fill: currentColor}
svg.kintsugi .small {font-size: 11px}
svg.kintsugi .quiet {opacity: .7}
svg.kintsugi .strong {font-weight: 600}
svg.kintsugi .line {stroke: currentColor; fill: none; stroke-width: 1.2}
svg.kintsugi .dashed {stroke-dasharray: 4 3}
svg.kintsugi .box {stroke: currentColor; stroke-opacity: .55; fill: currentColor; fill-opacity: .05}
svg.kintsugi .stored {fill: #4a86c5; fill-opacity: .35; stroke: #4a86c5}
svg.kintsugi .computed {fill: #d99a1c; fill-opacity: .75; stroke: #d99a1c}
svg.kintsugi .compared {fill: #d99a1c; fill-opacity: .2; stroke: #d99a1c; stroke-dasharray: 3 2}
svg.kintsugi .exact {fill: #3d9a6b; fill-opacity: .45; stroke: #3d9a6b}
svg.kintsugi .bad {fill: #c9534f; fill-opacity: .4; stroke: #c9534f}
""".strip()


class Drawing:
    """An SVG that is put together from top to bottom. Coordinates are in pixels."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._head = (
            f'<svg class="kintsugi" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'role="img" width="{width}">\n<title>{escape(title)}</title>\n'
            f"<desc>{escape(description)}</desc>\n"
            f"<style>{STYLE}</style>\n"
        )
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "box", round_px: int = 3
    ) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{round_px}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        styled = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{styled} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def labelled(
        self, x: float, y: float, width: float, height: float, lines: Iterable[str], kind: str = "box"
    ) -> None:
        """A box with centred lines; the first one stands out."""
        lines = list(lines)
        self.box(x, y, width, height, kind)
        top = y + height / 2 - (len(lines) - 1) * 8 + 4
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + index * 16, line, "strong" if index == 0 else "small")

    def arrow(self, *points: tuple[float, float], label: str = "", kind: str = "") -> None:
        """A line through the points with a head at the end; its label stands above its middle."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="line {kind}" d="M{path}"/>')
        (x_from, y_from), (x, y) = points[-2:]
        length = max(1.0, ((x - x_from) ** 2 + (y - y_from) ** 2) ** 0.5)
        along = ((x - x_from) / length, (y - y_from) / length)
        wings = [
            (x - 7 * along[0] - side * 4 * along[1], y - 7 * along[1] + side * 4 * along[0])
            for side in (1, -1)
        ]
        tip = " L".join(f"{wing_x:.1f} {wing_y:.1f}" for wing_x, wing_y in (wings[0], (x, y), wings[1]))
        self._parts.append(f'<path class="line" d="M{tip}"/>')
        if label:
            (x_0, y_0), (x_1, y_1) = points[0], points[1]
            self.text((x_0 + x_1) / 2, (y_0 + y_1) / 2 - 6, label, "small")

    def legend(self, x: float, y: float, *entries: tuple[str, str]) -> None:
        for kind, text in entries:
            self.box(x, y - 10, 14, 12, kind, 2)
            self.text(x + 20, y, text, "small", "start")
            x += 36 + 6.6 * len(text)

    def svg(self) -> str:
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


def blend() -> Drawing:
    """A grid of layers and tokens."""
    drawing = Drawing(
        720,
        400,
        "A blend, layer by layer",
        "A grid of tokens and layers. The first chunk is used as it was stored. Of the other chunks every "
        "token is computed below the check layer and compared there; a few are computed in the layers above. "
        "The question is computed in every layer. While one is computed, the next one is loaded.",
    )
    groups = [("prefix", 2), ("chunk A", 9), ("chunk B", 9), ("chunk C", 9), ("question", 4)]
    chosen = {3: {1, 2, 6}, 2: {0, 1, 5}}
    left, top, cell, gap = 104, 84, 14, 8
    layers = 6
    x = left
    for index, (name, count) in enumerate(groups):
        drawing.text(x + count * cell / 2, top - 12, name, "strong" if count > 2 else "small")
        for layer in range(layers):
            y = top + (layers - 1 - layer) * 36
            for token in range(count):
                kind = "exact" if index < 2 else "computed" if index == 4 else "stored"
                if index in chosen and (layer == 0 or token in chosen[index]):
                    kind = "computed"
                elif index in chosen and layer == 1:
                    kind = "compared"
                drawing.box(x + token * cell, y, cell - 2, 26, kind, 2)
        x += count * cell + gap
    for layer in range(layers):
        y = top + (layers - 1 - layer) * 36 + 17
        drawing.text(left - 12, y, f"layer {layer}", "small", "end")
    drawing.text(x + 4, top + 5 * 36 + 6, "every token", "small", "start")
    drawing.text(x + 4, top + 5 * 36 + 20, "is computed", "small", "start")
    drawing.text(x + 4, top + 4 * 36 + 6, "check layer:", "small strong", "start")
    drawing.text(x + 4, top + 4 * 36 + 20, "compare, choose", "small", "start")
    drawing.text(x + 4, top + 2 * 36 + 2, "only the chosen", "small", "start")
    drawing.text(x + 4, top + 2 * 36 + 16, "tokens go on", "small", "start")
    drawing.arrow((left - 84, top + 5 * 36 + 20), (left - 84, top + 8))
    drawing.text(left - 84, top - 4, "time", "small quiet")
    drawing.text(left, 30, "Tokens of the prompt, left to right", "quiet", "start")
    y = top + layers * 36 + 24
    drawing.legend(
        left,
        y,
        ("exact", "exact as loaded"),
        ("stored", "loaded, keys rotated"),
        ("computed", "computed now"),
        ("compared", "K and V compared"),
    )
    drawing.text(
        left,
        y + 28,
        "While layer n is computed, layer n + 1 is fetched, decoded and rotated.",
        "small",
        "start",
    )
    return drawing


def processes() -> Drawing:
    drawing = Drawing(
        720,
        430,
        "The processes of a service",
        "Clients talk to the gateway. The gateway sends requests to engines through Ray. Engines read and "
        "write chunk KV in the shards directly. Shards report to the directory, which tells engines where "
        "they are.",
    )
    drawing.labelled(20, 30, 150, 64, ["Your application", "SDK or OpenAI client"])
    drawing.labelled(20, 130, 150, 64, ["Precompute job", "reads your documents"])
    drawing.labelled(280, 30, 160, 64, ["Gateway", "gRPC 7500, HTTP 8000"])
    drawing.labelled(545, 20, 155, 56, ["Engine", "vLLM and the plugin"])
    drawing.labelled(545, 92, 155, 56, ["Engine", "vLLM and the plugin"])
    drawing.labelled(280, 290, 160, 84, ["Shard", "RAM, SSD tiers, catalog"], "stored")
    drawing.labelled(545, 290, 155, 84, ["Shard", "RAM, SSD tiers, catalog"], "stored")
    drawing.labelled(20, 290, 150, 84, ["Directory", "which shards there are"])
    drawing.arrow((170, 62), (280, 62), label="questions")
    drawing.arrow((440, 52), (545, 48), label="requests")
    drawing.arrow((440, 74), (545, 116))
    drawing.arrow((605, 148), (605, 290), kind="bulk")
    drawing.text(612, 216, "chunk KV", "small", "start")
    drawing.text(612, 231, "never through Ray", "small quiet", "start")
    drawing.arrow((560, 148), (410, 290))
    drawing.arrow((350, 94), (350, 290), kind="dashed")
    drawing.text(344, 240, "which chunks are there?", "small", "end")
    drawing.arrow((95, 194), (95, 250), (262, 250), (300, 290))
    drawing.text(102, 226, "chunk KV", "small", "start")
    drawing.arrow((280, 336), (170, 336), kind="dashed", label="I am here")
    drawing.text(20, 410, "Nothing about models or engines restarts a shard.", "small quiet", "start")
    return drawing


def chunk() -> Drawing:
    drawing = Drawing(
        720,
        330,
        "The life of a chunk",
        "A text is tokenised and gets a key. An engine prefills it and sends it to a shard's RAM. It is "
        "written to SSD in the background, moves between tiers as it is used, and leaves by eviction, expiry "
        "or erasure.",
    )
    drawing.labelled(16, 40, 120, 62, ["Text", "tokenised: a key"])
    drawing.labelled(180, 40, 140, 62, ["Prefilled alone", "K before RoPE, V"], "computed")
    drawing.labelled(366, 40, 140, 62, ["Visible", "all frames in RAM"], "stored")
    drawing.labelled(552, 40, 150, 62, ["Durable", "on SSD, in the catalog"], "stored")
    drawing.arrow((136, 71), (180, 71))
    drawing.text(158, 62, "put", "small")
    drawing.arrow((320, 71), (366, 71))
    drawing.arrow((506, 71), (552, 71))
    drawing.labelled(366, 160, 140, 56, ["Loaded", "by a blend"], "exact")
    drawing.arrow((436, 102), (436, 160))
    drawing.text(444, 135, "hit", "small", "start")
    drawing.arrow((560, 102), (560, 188), (506, 188), kind="dashed")
    drawing.text(568, 150, "hit: read back into RAM", "small", "start")
    drawing.labelled(16, 160, 120, 56, ["Miss", "full prefill"], "computed")
    drawing.arrow((76, 160), (76, 102), kind="dashed")
    drawing.text(84, 135, "filled in the background", "small", "start")
    drawing.labelled(180, 256, 140, 50, ["Evicted", "room was needed"])
    drawing.labelled(366, 256, 140, 50, ["Expired", "its time was over"])
    drawing.labelled(552, 256, 150, 50, ["Erased", "no byte remains"], "bad")
    drawing.arrow((250, 256), (250, 188), (136, 188), kind="dashed")
    drawing.text(258, 236, "the next request", "small", "start")
    drawing.text(16, 286, "How it ends", "strong", "start")
    return drawing


def gate() -> Drawing:
    drawing = Drawing(
        720,
        350,
        "The gate",
        "A request is blended only if a calibration report of this model allows its selector, ratio and "
        "shape of prompt. Otherwise it is prefilled in full and the answer says why. Shadowing compares some "
        "blends with full prefill and closes the gate when they drift.",
    )
    drawing.labelled(16, 120, 120, 60, ["Request", "chunks, question"])
    drawing.labelled(190, 30, 190, 56, ["Calibration report", "selector, ratio, layers, domain"], "stored")
    drawing.labelled(216, 120, 138, 60, ["Gate", "does it allow this?"])
    drawing.labelled(440, 96, 130, 50, ["Blend"], "exact")
    drawing.labelled(440, 190, 130, 54, ["Full prefill", "with the reason"], "computed")
    drawing.labelled(610, 96, 94, 50, ["Answer"])
    drawing.labelled(440, 280, 264, 50, ["Shadow", "a few blends again, by full prefill"])
    drawing.arrow((136, 150), (216, 150))
    drawing.arrow((285, 86), (285, 120))
    drawing.arrow((354, 140), (440, 121), label="yes")
    drawing.arrow((354, 162), (440, 212), label="no")
    drawing.arrow((570, 121), (610, 121))
    drawing.arrow((570, 217), (657, 217), (657, 146))
    drawing.arrow((680, 146), (680, 280), kind="dashed")
    drawing.arrow((440, 305), (160, 305), (160, 58), (190, 58), kind="dashed")
    drawing.text(172, 298, "drift: the report is tripped, all engines stop", "small", "start")
    drawing.labelled(16, 30, 120, 56, ["kintsugi", "calibrate"])
    drawing.arrow((136, 50), (190, 50))
    return drawing


def prefix_caching() -> Drawing:
    drawing = Drawing(
        720,
        300,
        "Prefix caching and blending",
        "Two prompts with the same chunks in another order. Prefix caching reuses what both begin with. "
        "Blending reuses every chunk wherever it stands and computes a few of its tokens again.",
    )
    first = [("system", "exact"), ("A", "box"), ("B", "box"), ("C", "box"), ("question 1", "box")]
    cached = [("system", "exact"), ("C", "box"), ("A", "box"), ("B", "box"), ("question 2", "box")]
    blended = [("system", "exact"), ("C", "stored"), ("A", "stored"), ("B", "stored"), ("question 2", "box")]
    rows = [
        ("earlier prompt", [(name, "box") for name, _ in first]),
        ("prefix caching", cached),
        ("blending", blended),
    ]
    for index, (title, row) in enumerate(rows):
        x, y = 130.0, 30 + index * 78
        drawing.text(118, y + 28, title, "strong", "end")
        for name, kind in row:
            width = 120 if name in "ABC" else 84
            drawing.box(x, y, width, 46, kind)
            if kind == "stored":
                for offset in (6, 20, 78):
                    drawing.box(x + offset, y, 8, 46, "computed", 1)
            drawing.text(x + width / 2, y + 28, name)
            x += width + 6
    drawing.legend(
        130, 278, ("exact", "found in the prefix cache"), ("stored", "loaded"), ("computed", "computed again")
    )
    drawing.legend(560, 278, ("box", "computed in full"))
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "blend.svg": blend,
    "processes.svg": processes,
    "chunk.svg": chunk,
    "gate.svg": gate,
    "prefix-caching.svg": prefix_caching,
}


def main() -> int:
    files = {FOLDER / name: draw().svg() for name, draw in DRAWINGS.items()}
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is out of date: run python scripts/drawings.py")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(files[path])
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
