"""What `qwenimage-tpu bench attention` found: as records, as JSON and as tables."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from .attention_floor import Floor
from .kernel_details import HotRegion

# Under it the versions of a result hold the digest of our kernel's sources.
KERNEL = "qwenimage_tpu_pallas.attention"
MIB = 2**20
UNITS = {"MXU": "MXU", "VALU": "VALU", "EUP": "EUP", "XLU": "XLU", "VLOAD": "load", "VSTORE": "store"}


@dataclass(frozen=True)
class Measured:
    """One compiled call.

    floor: of its matmuls. cycles: executed, of the whole program on the core that runs longest, without
    waiting for memory.
    worst_cycles: the same, where regions that only rare data enter run every time. kernel, hot_region,
    vmem_bytes: of the kernel that takes most of them. hbm_read, hbm_written: bytes that
    the executed copies move. uncertain_copies: of these, how many depend on data. code_bytes: of the program.
    temporary_bytes: in HBM, beside inputs and outputs. tpu_seconds: the median on this machine's TPU, if any.
    """

    floor: Floor
    cycles: int
    worst_cycles: int
    kernel: str
    hot_region: HotRegion
    vmem_bytes: int
    hbm_read: int
    hbm_written: int
    uncertain_copies: int
    code_bytes: int
    temporary_bytes: int
    tpu_seconds: float | None = None


@dataclass(frozen=True)
class Result:
    """A contender with its best choice of block sizes, or why there is none.

    tried, failed: how many choices, and how many of them did not compile. error: what the last of these said.
    cycles: of each choice that did. remark: the contender's.
    """

    contender: str
    ours: bool = False
    choice: str = ""
    tried: int = 0
    failed: int = 0
    error: str = ""
    cycles: dict[str, int] = field(default_factory=dict[str, int])
    measured: Measured | None = None
    remark: str = ""


@dataclass(frozen=True)
class AttentionReport:
    """All results of one generation, and what turns them into times.

    floor: that of bf16. clock_hz: of a core. hbm_bytes_per_second: of the device. cores: that share the work.
    """

    generation: str
    image_tokens: int
    text_tokens: int
    heads: int
    cores: int
    floor: Floor
    clock_hz: float
    hbm_bytes_per_second: float
    results: tuple[Result, ...]

    @property
    def ranked(self) -> list[Result]:
        """Those that compiled, the fastest first, then the others."""
        return sorted(self.results, key=lambda result: result.measured.cycles if result.measured else 2**63)

    def cycle_seconds(self, measured: Measured) -> float:
        """What the cycles take, or the matmuls at the published peak if that is more."""
        return max(measured.cycles, measured.floor.peak) / self.clock_hz

    def memory_seconds(self, measured: Measured) -> float:
        return (measured.hbm_read + measured.hbm_written) / self.hbm_bytes_per_second


def to_json(reports: Sequence[AttentionReport], versions: Mapping[str, str]) -> str:
    """`from_json` reads it again."""
    content = {"versions": dict(versions), "reports": [dataclasses.asdict(report) for report in reports]}
    return json.dumps(content, indent=1) + "\n"


def from_json(text: str) -> tuple[list[AttentionReport], dict[str, str]]:
    """The reports and the versions of the packages."""
    content = json.loads(text)
    return [_report(fields) for fields in content["reports"]], content["versions"]


def _report(fields: dict[str, Any]) -> AttentionReport:
    fields["results"] = tuple(_result(each) for each in fields["results"])
    fields["floor"] = Floor(**fields["floor"])
    return AttentionReport(**fields)


def _result(fields: dict[str, Any]) -> Result:
    measured = fields["measured"]
    if measured is not None:
        measured["floor"] = Floor(**measured["floor"])
        measured["hot_region"] = HotRegion(**measured["hot_region"])
        fields["measured"] = Measured(**measured)
    return Result(**fields)


def print_report(report: AttentionReport, console: Console) -> None:
    """Two tables, of the calls and of their kernels, and what did not compile."""
    shape = f"{report.image_tokens}+{report.text_tokens} tokens, {report.heads} heads"
    cores = f" on each of {report.cores} cores" if report.cores > 1 else ""
    floor = report.floor
    peak = "" if floor.peak == floor.scheduled else f", {floor.peak:,} at the published peak"
    console.print(
        f"[bold]{report.generation}[/], {shape}, bf16: the matmuls take at least"
        f" {floor.scheduled:,} cycles{cores}{peak}"
    )
    rows = [(result, result.measured) for result in report.ranked if result.measured]
    console.print(_call_table(report, rows))
    console.print(_kernel_table(rows))
    for result, measured in rows:
        if measured.worst_cycles != measured.cycles:
            console.print(f"{result.contender}: up to {measured.worst_cycles:,} cycles, on rare data")
    for result in report.ranked:
        if result.remark:
            console.print(f"{result.contender}: {result.remark}")
        if result.failed or result.error:
            failed = f"{result.failed} of {result.tried} choices failed, the last: " if result.tried else ""
            console.print(f"{result.contender}: {failed}{result.error}", markup=False, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=not position)
    return table


def _call_table(report: AttentionReport, rows: Sequence[tuple[Result, Measured]]) -> Table:
    timed = any(measured.tpu_seconds for _, measured in rows)
    table = _table(
        "the whole call",
        *("contender", "blocks", "cycles", "floor", "time", "HBM MiB", "HBM time", "bound by"),
        *(["measured"] if timed else []),
    )
    for result, measured in rows:
        compute, memory = report.cycle_seconds(measured), report.memory_seconds(measured)
        moved = (measured.hbm_read + measured.hbm_written) / MIB
        cells = [
            result.choice,
            f"{measured.cycles:,}",
            f"{measured.floor.scheduled / measured.cycles:.0%}",
            _microseconds(compute),
            f"{moved:.1f}" + ("?" if measured.uncertain_copies else ""),
            _microseconds(memory),
            "memory" if memory > compute else "MXU" if measured.floor.peak > measured.cycles else "cycles",
            *([_microseconds(measured.tpu_seconds)] if timed else []),
        ]
        table.add_row(result.contender, *cells, style="bold" if result.ours else "")
    return table


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} µs"


def _kernel_table(rows: Sequence[tuple[Result, Measured]]) -> Table:
    table = _table(
        "its biggest kernel, and the use of the units in that one's hottest region",
        *("contender", "region", *UNITS.values(), "spills", "VMEM MiB", "code MiB"),
    )
    for result, measured in rows:
        region = measured.hot_region
        cells = [
            f"{region.cycles / measured.cycles:.0%}",
            *(f"{region.utilisation[unit]:.0%}" for unit in UNITS),
            f"{region.spills + region.fills:,}",
            f"{measured.vmem_bytes / MIB:.1f}",
            f"{measured.code_bytes / MIB:.1f}",
        ]
        table.add_row(result.contender, *cells, style="bold" if result.ours else "")
    return table
