"""A bar per mesh: where the predicted time of an image goes."""

from collections.abc import Sequence
from pathlib import Path

from .estimate import COLLECTIVES, DECODING, REST, TEXT
from .report import Row

COLOURS = {
    "attention": "#1a73e8",
    "QK norm and RoPE": "#34a1eb",
    "norms and modulation": "#7cc4f0",
    REST: "#b8bec6",
    COLLECTIVES: "#d93025",
    TEXT: "#34a853",
    DECODING: "#f9ab00",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Stacked bars of the parts' seconds, and a line where perfect overlap would end.

    Raises ValueError if no mesh fits.
    """
    from matplotlib.figure import Figure

    fitting = [(row, row.estimate) for row in rows if row.estimate is not None]
    case = rows[0].case
    if not fitting:
        raise ValueError(f"no mesh of {case.topology} fits, so there is nothing to draw; take a larger slice")
    figure = Figure(figsize=(8.5, 0.5 * len(fitting) + 1.8), dpi=100, layout="constrained")
    panel = figure.subplots()
    several = len({row.case.images for row in rows}) > 1
    names = [
        f"{row.case.data} x {row.case.model}" + f", {row.case.images} at once" * several for row, _ in fitting
    ]
    left = [0.0] * len(fitting)
    for part, colour in COLOURS.items():
        seconds = [found.parts.get(part, 0.0) for _, found in fitting]
        panel.barh(names, seconds, left=left, color=colour, label=part)
        left = [start + length for start, length in zip(left, seconds, strict=True)]
    for at, (_, found) in enumerate(fitting):
        panel.text(found.seconds, at, f" {found.seconds:.2f} s", va="center", fontsize=9)
        panel.vlines(found.overlapped_seconds, at - 0.4, at + 0.4, "black", "dashed")
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9)
    panel.set_ylabel("data x model", fontsize=9)
    panel.set_xlabel("predicted seconds; dashed: with perfect overlap", fontsize=9, loc="right")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    panel.set_title(
        f"{case.topology}: {case.image_tokens} + {case.text_tokens} tokens, {case.steps} steps,"
        f" {'true CFG' if case.guided else 'no CFG'}",
        fontsize=10,
        loc="left",
    )
    figure.savefig(path)
