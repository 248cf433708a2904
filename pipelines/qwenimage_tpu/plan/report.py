"""What `qwenimage-tpu plan` found: every mesh of a slice beside the others, as a table and as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .collectives import Collective
from .estimate import OURS, REST, Estimate
from .program import CompiledPlan, PlanCase
from .slices import GIB
from .stages import TEXT_ENCODER

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Row:
    """One mesh. reason: why it does not fit; then nothing else is known.

    dollars_per_hour: of the whole slice.
    """

    case: PlanCase
    dollars_per_hour: float
    reason: str = ""
    plan: CompiledPlan | None = None
    estimate: Estimate | None = None

    @property
    def images_per_hour(self) -> float:
        assert self.estimate is not None
        return self.case.images * SECONDS_PER_HOUR / self.estimate.seconds

    @property
    def images_per_dollar(self) -> float:
        return self.images_per_hour / self.dollars_per_hour

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: of the slice's peak, what the model's own operations use."""
        assert self.estimate is not None
        return self.estimate.flops / (self.estimate.seconds * self.case.slice.flops)

    @property
    def hbm_bytes(self) -> int:
        """Of a device: all that the denoising program holds at once."""
        assert self.plan is not None
        return self.plan.memory.total


def recommend(rows: Sequence[Row]) -> Row | None:
    """The mesh with the shortest time, of those that fit."""
    fitting = [(row.estimate.seconds, at) for at, row in enumerate(rows) if row.estimate]
    return rows[min(fitting)[1]] if fitting else None


def link_bytes(collectives: Sequence[Collective]) -> int:
    """What each device sends in one run of the program."""
    return sum(collective.calls * collective.link_bytes for collective in collectives)


def print_report(rows: Sequence[Row], console: Console) -> None:
    """Each number of images at once by itself; then, if there are several, the best of each."""
    batches = {
        row.case.images: [other for other in rows if other.case.images == row.case.images] for row in rows
    }
    for of_batch in batches.values():
        _print_batch(of_batch, console)
    best = [row for row in map(recommend, batches.values()) if row is not None]
    if len(batches) > 1 and best:
        console.print(_throughput_table(best))


def _print_batch(rows: Sequence[Row], console: Console) -> None:
    case = rows[0].case
    guided = "true CFG" if case.guided else "no CFG"
    console.print(
        f"[bold]{case.topology}[/], {case.slice.chips} chips: {case.image_tokens}+{case.text_tokens} tokens,"
        f" {case.images} image(s) at once, {case.steps} steps, {guided}, {case.softmax} softmax. Times are"
        " predictions, from the compiler's schedule; see docs/plan.md for the model behind them."
    )
    if recommend(rows):
        console.print(_mesh_table(rows))
    for row in rows:
        if row.reason:
            console.print(f"{row.case.data} x {row.case.model}: does not fit, {row.reason}", highlight=False)
    best = recommend(rows)
    if best is None:
        console.print("no mesh fits; take a larger slice")
        return
    console.print(f"recommended: --mesh {best.case.data},{best.case.model}; where its time goes:")
    console.print(_part_table(best))
    console.print(_memory_line(best), highlight=False)
    console.print(_text_line(best), highlight=False)
    console.print(_collective_table(best))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    return table


def _mesh_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "meshes",
        *(
            "mesh",
            "weights GiB",
            "in use GiB",
            "sent MB/step",
            "step ms",
            "all s",
            "overlapped s",
        ),
        *("MFU", "images/h", "images/$", "compiled s"),
    )
    for row in rows:
        if row.plan is None or row.estimate is None:
            continue
        case, plan, found = row.case, row.plan, row.estimate
        table.add_row(
            f"{case.data} x {case.model}",
            f"{case.weight_bytes / GIB:.2f}",
            f"{row.hbm_bytes / GIB:.2f}",
            f"{link_bytes(plan.collectives) / case.steps / 1e6:,.0f}",
            f"{found.denoising_seconds / case.steps * 1e3:.1f}",
            f"{found.seconds:.2f}",
            f"{found.overlapped_seconds:.2f}",
            f"{row.utilisation:.0%}",
            f"{row.images_per_hour:,.0f}",
            f"{row.images_per_dollar:,.0f}",
            f"{plan.compile_seconds:.0f}",
        )
    return table


def _throughput_table(best: Sequence[Row]) -> Table:
    """In the form in which JAX's SDXL was published."""
    table = _table("throughput, each with its best mesh", "hardware", "batch", "data x model", "latency s")
    table.add_column("images/h", justify="right")
    table.add_column("images/$", justify="right")
    for row in best:
        assert row.estimate is not None
        table.add_row(
            f"{row.case.topology}, {row.case.slice.chips} chip{'s' * (row.case.slice.chips > 1)}",
            str(row.case.images),
            f"{row.case.data} x {row.case.model}",
            f"{row.estimate.seconds:.2f}",
            f"{row.images_per_hour:,.0f}",
            f"{row.images_per_dollar:,.0f}",
        )
    return table


def _part_table(row: Row) -> Table:
    found, case = row.estimate, row.case
    assert found is not None
    blocks = case.steps * case.config.layers
    table = _table("one run, without overlap", "part", "seconds", "share", "cycles per block")
    for part, seconds in found.parts.items():
        table.add_row(
            part,
            f"{seconds:.3f}",
            f"{seconds / found.seconds:.1%}",
            f"{found.cycles[part] / blocks:,.0f}" if part in (*OURS, REST) else "",
        )
    table.add_row("sum", f"{found.seconds:.3f}")
    return table


def _memory_line(row: Row) -> str:
    assert row.plan is not None
    assert row.estimate is not None
    memory, weights = row.plan.memory, row.case.weight_bytes
    kinds = {
        "weights": weights,
        "tables, text and latents": memory.arguments - weights,
        "activations and other temporaries": memory.temporaries,
        "results": memory.outputs,
        "code": memory.code,
    }
    parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds.items())
    return (
        f"GiB on a device: {parts}; sum {memory.total / GIB:.2f} of {row.case.slice.hbm_bytes / GIB:.0f}. The"
        f" image{'s take' if row.case.images > 1 else ' takes'} {row.estimate.flops / 1e12:,.0f} TFLOP."
    )


def _text_line(row: Row) -> str:
    assert row.estimate is not None
    ways = row.estimate.text_ways
    if ways is None:
        return (
            "The text encoder does not fit beside the transformer, or its heads do not divide over the model"
            " axis: it stays on the host's CPU, whose time is not in this plan."
        )
    size = TEXT_ENCODER.weight_bytes(ways) / GIB
    return (
        f"The text encoder fits beside the transformer, {size:.1f} GiB on each device of a model axis: launch"
        " ... generate --text-encoder-device tpu. With --engine jax it stays on the host's CPU."
    )


def _collective_table(row: Row) -> Table:
    assert row.plan is not None
    table = _table("collectives", "kind", "devices", "calls", "MB each", "sent by a device, MB")
    alike: dict[tuple[str, int, int], list[Collective]] = {}
    for each in row.plan.collectives:
        alike.setdefault((each.kind, each.chips, each.bytes), []).append(each)
    for (kind, chips, size), group in alike.items():
        calls = sum(each.calls for each in group)
        table.add_row(kind, str(chips), f"{calls:,}", f"{size / 1e6:,.2f}", f"{link_bytes(group) / 1e6:,.0f}")
    return table


def to_json(rows: Sequence[Row], versions: dict[str, str]) -> str:
    """Everything, and what follows from it."""
    return json.dumps({"versions": versions, "meshes": [_record(row) for row in rows]}, indent=1) + "\n"


def _record(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"case": dataclasses.asdict(row.case), "does_not_fit": row.reason}
    if row.plan is None or row.estimate is None:
        return record
    return record | {
        "memory": dataclasses.asdict(row.plan.memory) | {"weights": row.case.weight_bytes},
        "estimate": dataclasses.asdict(row.estimate),
        "predicted_seconds": row.estimate.seconds,
        "predicted_overlapped_seconds": row.estimate.overlapped_seconds,
        "images_per_hour": row.images_per_hour,
        "images_per_dollar": row.images_per_dollar,
        "dollars_per_hour": row.dollars_per_hour,
        "model_flops_utilisation": row.utilisation,
        "compile_seconds": row.plan.compile_seconds,
        "collectives": [dataclasses.asdict(each) for each in row.plan.collectives],
        "kernels": [dataclasses.asdict(each) for each in row.plan.schedule.kernels],
    }
