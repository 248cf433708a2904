"""Collectives of a compiled program, read from its HLO: their bytes, and the time that the links imply."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<result>\(.*?\)|\S+)"
    rf" (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(",
)
NAME = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = ", re.MULTILINE)
HEADER = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$", re.MULTILINE)
SHAPE = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<dimensions>[\d,]*)\]")
IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[(?P<axes>[^\]]*)\] \{(?P<used>[^}]*)\}")
AXIS = re.compile(r"'(\w+)'=(\d+)")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    chips: that take part together. bytes: of the result on each of them, or of the operand where that is
    larger (reduce-scatter). calls: how often the program runs it.
    """

    name: str
    kind: str
    chips: int
    bytes: int
    calls: int

    @property
    def link_bytes(self) -> int:
        """What one call makes each chip send, around a ring of the chips: as little as any algorithm can."""
        share = (self.chips - 1) / self.chips
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return round(factor * self.bytes)

    def seconds(self, bytes_per_second: float) -> float:
        """Of one call; bytes_per_second: that a chip can send around the ring."""
        return self.link_bytes / bytes_per_second


def read_collectives(hlo: str, calls: Mapping[str, int]) -> list[Collective]:
    """All that the program runs.

    calls: how often it runs an instruction, by name. A collective that is no call itself runs as often as the
    calls around it, in the same computation, or as what calls that computation.
    Raises ValueError for one of which nothing says how often it runs, or with groups of an unknown form.
    """
    computations = re.split(r"^\}", hlo, flags=re.MULTILINE)
    found: list[Collective] = []
    for computation in computations:
        for line in computation.splitlines():
            if match := INSTRUCTION.match(line):
                count = calls.get(match["name"]) or _count(computation, computations, calls)
                if count is None:
                    raise ValueError(f"the schedule does not say how often {match['name']} runs")
                found.append(_collective(match, line, count))
    return found


def _count(computation: str, computations: Sequence[str], calls: Mapping[str, int]) -> int | None:
    """How often a computation runs: as its calls, or else as the first computation that refers to it."""
    counts = [calls[name] for name in NAME.findall(computation) if name in calls]
    if counts:
        return max(counts)
    header = HEADER.search(computation)
    if header is None:
        return None
    reference = re.compile(rf"=%{re.escape(header[1])}\b(?![.\w-])")
    callers = (other for other in computations if other is not computation and reference.search(other))
    return next((count for caller in callers if (count := _count(caller, computations, calls))), None)


def _collective(match: re.Match[str], line: str, calls: int) -> Collective:
    kind, sizes = match["kind"], _sizes(match["result"])
    chips = 2 if kind == "collective-permute" else _group_size(line)
    whole = sum(sizes) * (chips if kind == "reduce-scatter" else 1)
    # The result of a start holds the operands, the results and the synchronisation.
    return Collective(match["name"], kind, chips, max(sizes) if match["start"] else whole, calls)


def _sizes(text: str) -> list[int]:
    return [
        math.prod(int(n) for n in match["dimensions"].split(",") if n) * _itemsize(match["dtype"])
        for match in SHAPE.finditer(text)
    ]


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _group_size(line: str) -> int:
    if match := IOTA_GROUPS.search(line):
        return int(match[1])
    if match := LISTED_GROUPS.search(line):
        return len(match[1].split(","))
    if match := MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in AXIS.findall(match["axes"])}
        return math.prod(sizes[name.strip(" '")] for name in match["used"].split(","))
    raise ValueError(f"unknown replica groups: {line.strip()[:200]}")
