"""What the TPU's compiler says of one kernel: how busy its hottest region keeps the units, and its VMEM."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from .bundles import ScheduleError, parse_bundles
from .schedule import execute, find_dumps

UTILISATION = "final_hlo-static-per-bundle-utilization.txt"
ALLOCATED = "post-ra.txt"
FORMAT = re.compile(r"== CAPACTIY:\n(?P<units>.+)\n(?P<capacity>[\d ]+)\n== UTILIZATION:\n(?P<rows>[\d \n]*)")
REGION_OR_VMEM = re.compile(
    r"^( *)(?:\$region|#allocation\w+ \[.*?space=vmem, size = 0x([0-9a-f]+))", re.MULTILINE
)
FILL, SPILL = "VLOAD:FILL", "VSTORE:SPILL"


@dataclass(frozen=True)
class HotRegion:
    """The bundles in a row, all executed equally often, that take most of a kernel's cycles.

    cycles: executed, on one core, in all its rounds. utilisation: of each unit, the share of its slots that
    is used, between 0 and 1, by the compiler's names. fills, spills: executed loads and stores of vector
    registers that the compiler had to spill.
    """

    cycles: int
    utilisation: dict[str, float]
    fills: int
    spills: int


@dataclass(frozen=True)
class KernelDetails:
    """vmem_bytes: what the kernel allocates itself: windows (two of each that changes), scratch, spills."""

    name: str
    hot_region: HotRegion
    vmem_bytes: int


def read_details(folder: Path, name: str, *, enter_unknown: bool = True) -> KernelDetails:
    """The details of the kernel or fusion `name` of the program whose dumps are in `folder`.

    enter_unknown: as in `schedule.execute`.
    Raises ScheduleError if a dump is missing or of an unknown form.
    """
    dump = find_dumps(folder)[name]
    stem = re.sub(r"\d+-final_bundles\.txt", "", dump.name)
    counts = execute(parse_bundles(dump.read_text()), enter_unknown=enter_unknown).counts
    region = find_hot_region(counts, _only(folder, stem, UTILISATION).read_text())
    return KernelDetails(name, region, allocated_vmem(_only(folder, stem, ALLOCATED).read_text()))


def _only(folder: Path, stem: str, suffix: str) -> Path:
    paths = [path for path in folder.iterdir() if re.fullmatch(rf"{re.escape(stem)}\d+-{suffix}", path.name)]
    if len(paths) != 1:
        raise ScheduleError(f"{folder} should hold one {stem}<number>-{suffix}, but holds {len(paths)}")
    return paths[0]


def find_hot_region(counts: Sequence[int], text: str) -> HotRegion:
    """The hot region of a kernel whose bundles run `counts` times, and their utilisation dump.

    Raises ScheduleError if the dump is of an unknown form, or of another number of bundles.
    """
    match = FORMAT.match(text)
    if match is None:
        raise ScheduleError("the utilisation dump has another form; it may have changed with libtpu")
    units = [unit.strip() for unit in match["units"].split(",")]
    capacity = dict(zip(units, map(int, match["capacity"].split()), strict=True))
    rows = [tuple(map(int, line.split())) for line in match["rows"].splitlines()]
    if len(rows) != len(counts):
        raise ScheduleError(f"the utilisation dump has {len(rows)} bundles, the kernel {len(counts)}")
    runs = [list(run) for _, run in groupby(range(len(counts)), key=lambda index: counts[index])]
    hottest = max(runs, key=lambda run: counts[run[0]] * len(run))
    used = dict(zip(units, map(sum, zip(*(rows[index] for index in hottest), strict=True)), strict=True))
    times = counts[hottest[0]]
    return HotRegion(
        cycles=times * len(hottest),
        utilisation={unit: used[unit] / (capacity[unit] * len(hottest)) for unit in units if ":" not in unit},
        fills=times * used[FILL],
        spills=times * used[SPILL],
    )


def allocated_vmem(text: str) -> int:
    """Bytes of VMEM allocated at once, at most, by a kernel's code after register allocation.

    Regions nest by indentation; an allocation lives in its region and those inside.
    """
    largest = 0
    live: list[tuple[int, int]] = []  # indentation and bytes of the allocations of the regions around
    for match in REGION_OR_VMEM.finditer(text):
        depth = len(match[1])
        if match[2] is None:
            live = [(at, size) for at, size in live if at <= depth]
        else:
            live = [*((at, size) for at, size in live if at <= depth), (depth, int(match[2], 16))]
            largest = max(largest, sum(size for _, size in live))
    return largest
