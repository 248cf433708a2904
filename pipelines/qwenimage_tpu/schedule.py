"""Count the cycles of a compiled TPU program from the schedule that the compiler dumps.

The compiler's last dump of a fusion or kernel, `*-final_bundles.txt`, is its VLIW code: one bundle is one
cycle. How often a bundle runs follows from the scalar unit's instructions alone, so these are executed here:
loop counters, grid indices and the predicates of `pl.when`, however nested. Waiting for memory is not in it.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .bundles import Bundle, Instruction, Operand, ScheduleError, parse_bundles

DUMP = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
TOP_LEVEL = "TLP"
EQUIVALENT = re.compile(r"^key:(\S+)\n(?:.*\n)*?equivalent_hlos\[size=\d+\]:\n((?:  .*\n)*)", re.MULTILINE)
WORD = 2**32
MAX_BRANCHES = 20_000_000


def _signed(value: int) -> int:
    value %= WORD
    return value - WORD if value >= WORD // 2 else value


# Values are kept as unsigned words; predicates as 0 and 1.
BINARY: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smulhi": lambda a, b: a * b >> 32,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << b if b < 32 else 0,
    "sshrl": lambda a, b: a >> b,
    "sshra": lambda a, b: _signed(a) >> min(b, 31),
    "smin": lambda a, b: min(_signed(a), _signed(b)),
    "smax": lambda a, b: max(_signed(a), _signed(b)),
    "pand": operator.and_,
    "por": operator.or_,
    "pxor": operator.xor,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
COPIES = ("smov", "pmov", "int_to_ptr", "sphi", "spop")


def _evaluate(opcode: str, values: Sequence[int | None]) -> int | None:
    """The result as an unsigned word; None if it is unknown (memory, floats, addresses)."""
    name, _, kind = opcode.partition(".")
    if name == "scalar_select" and len(values) == 3:
        return values[2] if values[0] == 0 else values[1] if values[0] == 1 else None
    if name in ("pand", "pnand", "por", "pnor") and len(values) == 2:
        decides = 0 if name in ("pand", "pnand") else 1
        if decides in values:
            return decides if name in ("pand", "por") else 1 - decides
    if not values or None in values:
        return None
    known = [value for value in values if value is not None]
    if name == "scalar_lea":
        return sum(known) % WORD
    if name in COPIES and len(known) == 1:
        return known[0]
    if name == "pneg":
        return 1 - known[0]
    if len(known) != 2:
        return None
    if name == "sdivrem" and known[1]:
        return known[0] % known[1] if opcode.endswith("kRem") else known[0] // known[1]
    if name in BINARY and ("f32" not in kind):
        return BINARY[name](*known) % WORD
    if name == "scmp" and (".s32" in opcode or ".u32" in opcode):
        compare = COMPARE[kind.partition(".")[0]]
        a, b = map(_signed, known) if ".s32" in opcode else known
        return int(compare(a, b))
    return None


class _Machine:
    """The scalar unit: the values that are known, and when each was set, and its memory (for spills)."""

    def __init__(self) -> None:
        self._values: dict[str, int | None] = {}
        self._set_at: dict[str, int] = {}
        self._memory: dict[int | None, int | None] = {}
        self._clock = 0

    def run(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            allowed = self.holds(instruction.predicate)
            if allowed is False and instruction.otherwise is None:
                continue
            self._clock += 1
            if instruction.opcode.startswith("sst"):
                *address, value = map(self._read, instruction.operands)
                self._memory[_sum(address)] = value if allowed else None
                continue
            self._values[instruction.target] = self._choose(instruction, allowed)
            self._set_at[instruction.target] = self._clock

    def _choose(self, instruction: Instruction, allowed: bool | None) -> int | None:
        if allowed is False and instruction.otherwise is not None:
            return self._read(instruction.otherwise)
        return self._result(instruction) if allowed else None

    def _result(self, instruction: Instruction) -> int | None:
        operands = instruction.operands
        if instruction.opcode == "sphi":
            # A phi takes the value of the edge it is entered by: the one that was set last.
            operands = (max(operands, key=lambda name: self._set_at.get(str(name), 0)),)
        if instruction.opcode.startswith("sld"):
            address = _sum([self._read(operand) for operand in operands])
            return None if address is None else self._memory.get(address)
        return _evaluate(instruction.opcode, [self._read(operand) for operand in operands])

    def _read(self, operand: Operand) -> int | None:
        return operand % WORD if isinstance(operand, int) else self._values.get(operand)

    def holds(self, predicate: tuple[str, bool] | None) -> bool | None:
        if predicate is None:
            return True
        value = self._values.get(predicate[0])
        return None if value is None else (value != 0) == predicate[1]


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) % WORD if len(known) == len(values) else None


@dataclass(frozen=True)
class Execution:
    """How often each bundle runs. unknown: branches that depend on data; their regions were entered."""

    counts: list[int]
    unknown: frozenset[int]

    @property
    def cycles(self) -> int:
        return sum(self.counts)


def execute(bundles: Sequence[Bundle]) -> Execution:
    """Follow the control flow from the first bundle to behind the last.

    A forward branch whose predicate depends on data is not taken, so that the region it would skip counts.
    Raises ScheduleError for a loop that depends on data.
    """
    starts = {region: index for index, bundle in enumerate(bundles) for region in bundle.starts}
    machine, unknown = _Machine(), set[int]()
    passes = [0] * (len(bundles) + 1)  # differences: +1 where a run of bundles begins, -1 behind its end
    at, branches = 0, 0
    while at < len(bundles):
        begin = at
        while at < len(bundles) and bundles[at].branch is None:
            machine.run(bundles[at].instructions)
            at += 1
        if at == len(bundles):
            passes[begin] += 1
            passes[at] -= 1
            break
        taken, target = _decide(bundles, at, machine, starts)
        if taken is None:
            unknown.add(at)
        behind = _behind_delay(bundles, at)
        for bundle in bundles[at:behind]:
            machine.run(bundle.instructions)
        passes[begin] += 1
        passes[behind] -= 1
        at = target if taken else behind
        branches += 1
        if branches > MAX_BRANCHES:
            raise ScheduleError(f"more than {MAX_BRANCHES} branches were taken; is there an endless loop?")
    counts: list[int] = []
    running = 0
    for change in passes[:-1]:
        running += change
        counts.append(running)
    return Execution(counts, frozenset(unknown))


def _decide(
    bundles: Sequence[Bundle], at: int, machine: _Machine, starts: Mapping[int, int]
) -> tuple[bool | None, int]:
    branch = bundles[at].branch
    assert branch is not None
    if branch.region not in starts:
        raise ScheduleError(f"bundle {at:#x} branches to region {branch.region}, which starts nowhere")
    target = starts[branch.region]
    # Its own bundle cannot set what it reads, but pseudo instructions may stand beside it.
    taken = machine.holds(branch.predicate)
    if taken is None and target <= at:
        raise ScheduleError(f"the loop that ends in bundle {at:#x} depends on data, so its length is unknown")
    return taken, target


def _behind_delay(bundles: Sequence[Bundle], at: int) -> int:
    """The bundle behind a branch's delay slots: these end where the region of the branch ends."""
    for index in range(at + 1, min(at + 12, len(bundles))):
        if bundles[index].ends:
            return index + 1
    return min(at + 1, len(bundles))


@dataclass(frozen=True)
class Kernel:
    """A fusion, kernel or copy of a program: how often it is called, and the cycles of one call."""

    name: str
    calls: int
    cycles: int


@dataclass(frozen=True)
class ProgramSchedule:
    """kernels: in the order of their first call. top_level: the cycles of what calls them."""

    kernels: tuple[Kernel, ...]
    top_level: int

    @property
    def cycles(self) -> int:
        return self.top_level + sum(kernel.calls * kernel.cycles for kernel in self.kernels)


def read_schedule(folder: Path) -> ProgramSchedule:
    """The schedule of the one program whose dumps are in `folder`.

    Raises ScheduleError if a dump is missing or cannot be counted.
    """
    dumps = {match[1]: path for path in folder.iterdir() if (match := DUMP.fullmatch(path.name))}
    if TOP_LEVEL not in dumps:
        raise ScheduleError(f"{folder} holds no dump of a program; its format may have changed with libtpu")
    bundles = parse_bundles(dumps[TOP_LEVEL].read_text())
    execution = execute(bundles)
    calls: dict[str, int] = {}
    for bundle, count in zip(bundles, execution.counts, strict=True):
        for name in bundle.calls:
            calls[name] = calls.get(name, 0) + count
    same = _equivalents(folder)
    missing = sorted(name for name in calls if same.get(name, name) not in dumps)
    if missing:
        raise ScheduleError(f"{folder} has no dump of {missing}, which the program calls")

    @functools.cache
    def cycles(name: str) -> int:
        return execute(parse_bundles(dumps[name].read_text())).cycles

    kernels = (Kernel(name, count, cycles(same.get(name, name))) for name, count in calls.items())
    return ProgramSchedule(tuple(kernels), execution.cycles)


def _equivalents(folder: Path) -> dict[str, str]:
    """Which other fusion's code a fusion shares: the compiler keeps one of several equal ones."""
    same: dict[str, str] = {}
    for path in folder.glob(f"*-{TOP_LEVEL}-*-deduplication-map.txt"):
        for key, names in EQUIVALENT.findall(path.read_text()):
            same |= dict.fromkeys(names.split(), key)
    return same
