"""What `qwenimage-tpu plan` does: compile a picture for every mesh of a slice, and report."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from qwenimage_tpu.lab.attention_picture import check_picture
from qwenimage_tpu.lab.results import installed_versions, write_file
from qwenimage_tpu.options import TEXT_BUCKETS, check_size

from .estimate import estimate
from .picture import draw
from .program import PIXELS_PER_TOKEN_SIDE, DoesNotFitError, PlanCase, compile_plan
from .report import Row, print_report, to_json
from .slices import GIB, Slice


def check_cases(
    topology: str,
    meshes: Sequence[tuple[int, int]] | None,
    size: tuple[int, int],
    template: PlanCase,
    batches: Sequence[int] = (1,),
) -> list[PlanCase]:
    """A case per number of images at once and mesh. meshes: None for all that the slice and the heads allow.
    size: height and width.

    Raises ValueError for a topology, mesh, size or number that cannot be.
    """
    where = Slice.parse(topology)
    check_size(*size)
    for name, value in (("steps", template.steps), ("images", min(batches))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
    if template.text_tokens not in TEXT_BUCKETS:
        raise ValueError(f"text tokens must be one of {TEXT_BUCKETS}, but are {template.text_tokens}")
    possible = where.meshes(template.config.heads)
    unknown = [mesh for mesh in meshes or () if mesh not in possible]
    if unknown:
        allowed, asked = [f"{data},{model}" for data, model in possible], ",".join(map(str, unknown[0]))
        raise ValueError(f"{topology} allows the meshes {' '.join(allowed)}, but {asked} was asked for")
    height, width = size
    tokens = height // PIXELS_PER_TOKEN_SIDE * (width // PIXELS_PER_TOKEN_SIDE)
    return [
        dataclasses.replace(
            template, topology=topology, data=data, model=model, image_tokens=tokens, images=images
        )
        for images in batches
        for data, model in meshes or possible
    ]


def plan_rows(cases: Sequence[PlanCase], dollars_per_chip_hour: float | None) -> list[Row]:
    """Compile every case, with a progress bar on stderr."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        tracked = progress.track(cases, description=f"compiling for {cases[0].topology}")
        return [_row(case, dollars_per_chip_hour) for case in tracked]


def _row(case: PlanCase, dollars_per_chip_hour: float | None) -> Row:
    where = case.slice
    price = where.chip.dollars_per_hour if dollars_per_chip_hour is None else dollars_per_chip_hour
    row = Row(case, price * where.chips)
    if case.weight_bytes > where.hbm_bytes:
        weights, room = case.weight_bytes / GIB, where.hbm_bytes / GIB
        return dataclasses.replace(row, reason=f"its weights alone take {weights:.1f} of {room:.0f} GiB")
    try:
        plan = compile_plan(case)
    except DoesNotFitError as error:
        return dataclasses.replace(row, reason=str(error))
    return dataclasses.replace(row, plan=plan, estimate=estimate(plan))


def run(
    cases: Sequence[PlanCase],
    dollars_per_chip_hour: float | None,
    console: Console,
    *,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Plan the cases, print the report, and write the files that are asked for.

    Raises ValueError for a price that is no price, and a picture of a format that cannot be drawn.
    """
    if picture is not None:
        check_picture(picture)
    if dollars_per_chip_hour is not None and not 0 < dollars_per_chip_hour < math.inf:
        raise ValueError(f"the price must be above 0 dollars, but is {dollars_per_chip_hour}")
    rows = plan_rows(cases, dollars_per_chip_hour)
    print_report(rows, console)
    if json_file is not None:
        text = to_json(rows, installed_versions())
        write_file(json_file, lambda path: path.write_text(text))
        console.print(f"wrote {json_file}")
    if picture is not None:
        write_file(picture, lambda path: draw(rows, path))
        console.print(f"wrote {picture}")
