"""A bar chart of attention kernels' cycles, for a README."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .attention_report import AttentionReport

FORMATS = (".png", ".svg")
OURS, OTHERS, FLOOR = "#1a73e8", "#b8bec6", "#d93025"
WIDTH = 8.5  # inches: 850 pixels, about what a README shows


def check_picture(path: Path) -> None:
    """Raise ValueError unless `path` names a format that can be drawn, and matplotlib is there."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a picture ends in {' or '.join(FORMATS)}, but {path} does not; name it so")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "a picture needs matplotlib, which is not installed; the extra `bench` has it: pip install -e"
            " '.[bench]'"
        )


def draw(reports: Sequence[AttentionReport], target: Path | BinaryIO) -> None:
    """A panel per report, a bar per contender that compiled, the fastest on top, and a line at the floor."""
    from matplotlib.figure import Figure

    bars = [sum(result.measured is not None for result in report.results) for report in reports]
    figure = Figure(figsize=(WIDTH, sum(0.34 * count + 1.0 for count in bars)), dpi=100, layout="constrained")
    panels: Any = figure.subplots(
        len(reports), squeeze=False, height_ratios=[max(1, count) for count in bars]
    )
    for report, panel in zip(reports, panels[:, 0], strict=True):
        draw_panel(report, panel)
    figure.savefig(target)


def draw_panel(report: AttentionReport, panel: Any) -> None:
    """panel: matplotlib Axes."""
    rows = [(result, result.measured) for result in report.ranked if result.measured]
    names = [
        f"{result.contender} ({result.choice})" if result.choice else result.contender for result, _ in rows
    ]
    cycles = [measured.cycles for _, measured in rows]
    container = panel.barh(names, cycles, color=[OURS if result.ours else OTHERS for result, _ in rows])
    panel.bar_label(container, labels=[f"{value:,}" for value in cycles], padding=3, fontsize=9)
    floors = [measured.floor.scheduled for _, measured in rows]
    places = range(len(rows))
    panel.vlines(
        floors, [at - 0.5 for at in places], [at + 0.5 for at in places], FLOOR, "dashed", linewidth=1
    )
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9)
    core = " on each core" if report.cores > 1 else ""
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel(
        f"scheduled cycles{core}; dashed: the matmuls alone, {report.floor.scheduled:,} in bf16",
        fontsize=9,
        loc="right",
    )
    panel.set_title(
        f"Attention on {report.generation}: {report.image_tokens}+{report.text_tokens} tokens,"
        f" {report.heads} head{'s' * (report.heads > 1)} of 128, bf16",
        fontsize=10,
        loc="left",
    )
