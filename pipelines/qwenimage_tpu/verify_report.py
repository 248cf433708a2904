"""The report of `qwenimage-tpu verify`, in Markdown, for an issue."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .doctor_checks import Check
from .lab.ahead_of_time import CLOCK_HZ


@dataclass(frozen=True)
class Timing:
    """One kernel or block: the compiler's cycles (None if unknown) and the measured median."""

    name: str
    generation: str
    cycles: int | None
    seconds: float

    @property
    def predicted_seconds(self) -> float | None:
        return None if self.cycles is None else self.cycles / CLOCK_HZ[self.generation]


def write_report(
    path: Path,
    checks: Sequence[Check],
    timings: Sequence[Timing],
    versions: Mapping[str, str],
    *,
    emulated: bool,
) -> None:
    """Write it complete or not at all."""
    lines = ["# qwenimage-tpu verify", "", "| check | status | found |", "| --- | --- | --- |"]
    lines += [f"| {check.name} | {check.status} | {_cell(check.found)} |" for check in checks]
    lines += ["", "## Time", ""]
    if emulated:
        lines += ["**Emulated on a CPU: the measured times mean nothing.**", ""]
    lines += ["| kernel or block | predicted cycles | predicted | measured | measured / predicted |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |", *map(_row, timings), ""]
    lines += ["Predicted: the schedule of the TPU's compiler, without waiting for memory.", ""]
    lines += ["## Versions", "", ", ".join(f"{name} {versions[name]}" for name in sorted(versions)), ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_text("\n".join(lines), encoding="utf-8")
    unfinished.replace(path)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _row(timing: Timing) -> str:
    measured, predicted = f"{timing.seconds * 1e3:.3f} ms", timing.predicted_seconds
    if predicted is None:
        return f"| {timing.name} | unknown | | {measured} | |"
    cells = f"{timing.cycles:,} | {predicted * 1e3:.3f} ms | {measured} | {timing.seconds / predicted:.2f}"
    return f"| {timing.name} | {cells} |"
