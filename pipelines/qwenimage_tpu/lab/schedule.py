"""Count the cycles of a compiled TPU program from the schedule that the compiler dumps.

The compiler's last dump of a fusion or kernel, `*-final_bundles.txt`, is its VLIW code: one bundle is one
cycle. How often a bundle runs follows from the scalar unit's instructions alone, so these are executed here:
loop counters, grid indices and the predicates of `pl.when`, however nested. Waiting for memory is not in it,
but the bytes that the executed copies move between HBM and the core's memories are counted.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .bundles import Branch, Bundle, Instruction, Operand, ScheduleError, parse_bundles

DUMP = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
TOP_LEVEL = "TLP"
EQUIVALENT = re.compile(r"^key:(\S+)\n(?:.*\n)*?equivalent_hlos\[size=\d+\]:\n((?:  .*\n)*)", re.MULTILINE)
WORD = 2**32
MAX_BRANCHES = 20_000_000
# What the size of a copy is counted in: a Pallas kernel's block of 512 KiB is 16384 of them, on every
# generation.
GRANULE_BYTES = 32


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


@dataclass
class Traffic:
    """Bytes copied from and to HBM.

    uncertain: copies that were not counted, because their size or memories are unknown, and those that were
    though their predicate depends on data.
    """

    read: int = 0
    written: int = 0
    uncertain: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written, self.uncertain + other.uncertain)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.read * times, self.written * times, self.uncertain * times)

    @property
    def total(self) -> int:
        return self.read + self.written

    def add_copy(self, opcode: str, granules: int | None, certain: bool) -> None:
        """A copy `dma.<source>_to_<destination>`; one between two other memories is none of HBM's."""
        source, _, destination = opcode.removeprefix("dma.").partition("_to_")
        if "unknown" in (source, destination):
            self.uncertain += 1
            return
        if "hbm" not in (source, destination):
            return
        self.uncertain += not certain or granules is None
        self.read += GRANULE_BYTES * (granules or 0) * (source == "hbm")
        self.written += GRANULE_BYTES * (granules or 0) * (destination == "hbm")


class _Pending(NamedTuple):
    """What a target gets if the unknown predicate of the instruction that set it turns out to allow it."""

    target: str
    clock: int
    sense: bool
    value: int | None


class _Machine:
    """The scalar unit: the values that are known, and when each was set, and its memory (for spills)."""

    def __init__(self, core: int) -> None:
        self.traffic = Traffic()
        self._core = core
        self._values: dict[str, int | None] = {}
        self._set_at: dict[str, int] = {}
        self._memory: dict[int | None, int | None] = {}
        self._pending: dict[str, list[_Pending]] = {}
        self._clock = 0

    def run(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            allowed = self.holds(instruction.predicate)
            if allowed is False and instruction.otherwise is None:
                continue
            self._clock += 1
            if instruction.opcode.startswith("dma."):
                size = self._read(instruction.operands[-1])
                self.traffic.add_copy(instruction.opcode, size, certain=allowed is not None)
                continue
            if instruction.opcode.startswith("sst"):
                *address, value = map(self._read, instruction.operands)
                self._memory[_sum(address)] = value if allowed else None
                continue
            self._values[instruction.target] = self._choose(instruction, allowed)
            self._set_at[instruction.target] = self._clock
            self._pending.pop(instruction.target, None)
            if allowed is None and instruction.predicate is not None:
                name, sense = instruction.predicate
                pending = _Pending(instruction.target, self._clock, sense, self._result(instruction))
                self._pending.setdefault(name, []).append(pending)

    def _choose(self, instruction: Instruction, allowed: bool | None) -> int | None:
        if allowed is False and instruction.otherwise is not None:
            return self._read(instruction.otherwise)
        return self._result(instruction) if allowed else None

    def _result(self, instruction: Instruction) -> int | None:
        operands = instruction.operands
        if instruction.opcode == "core":
            return self._core
        if instruction.opcode == "sphi":
            # A phi takes the value of the edge it is entered by: the one that was set last.
            operands = (max(operands, key=lambda name: self._set_at.get(str(name), 0)),)
        if instruction.opcode.startswith("sld"):
            address = _sum([self._read(operand) for operand in operands])
            return None if address is None else self._memory.get(address)
        return _evaluate(instruction.opcode, [self._read(operand) for operand in operands])

    def _read(self, operand: Operand) -> int | None:
        return operand % WORD if isinstance(operand, int) else self._values.get(operand)

    def assume(self, branch: Branch | None, taken: bool) -> None:
        """Let the branch's predicate be what its having been taken, or not, makes it, and what it allowed."""
        if branch is None or branch.predicate is None:
            return
        name, sense = branch.predicate
        self._values[name] = int(sense == taken)
        for pending in self._pending.pop(name, ()):
            latest = self._set_at[pending.target] == pending.clock
            if latest and pending.sense == (sense == taken):
                self._values[pending.target] = pending.value

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
    """How often each bundle runs, and what it copies from and to HBM.

    unknown: branches that depend on data; their regions were entered, or all were skipped.
    """

    counts: list[int]
    unknown: frozenset[int]
    traffic: Traffic

    @property
    def cycles(self) -> int:
        return sum(self.counts)


def execute(
    bundles: Sequence[Bundle], core: int = 0, *, enter_unknown: bool = True, many_chips: bool = False
) -> Execution:
    """Follow the control flow of one core from the first bundle to behind the last.

    A forward branch whose predicate depends on data is not taken, so that the region it would skip counts.
    Without enter_unknown it is taken: that suits a kernel whose only such regions are for rare data.
    many_chips: a loop that depends on data waits for another chip, and counts once.
    Raises ScheduleError for such a loop elsewhere.
    """
    starts = _starts(bundles)
    machine, unknown = _Machine(core), set[int]()
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
            backwards = target <= at
            if backwards and not many_chips:
                raise ScheduleError(
                    f"the loop that ends in bundle {at:#x} depends on data, so its length is unknown"
                )
            taken = not (enter_unknown or backwards)
            machine.assume(bundles[at].branch, taken)
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
    return Execution(counts, frozenset(unknown), machine.traffic)


def _starts(bundles: Sequence[Bundle]) -> dict[int, int]:
    """Where each region starts; one that is branched to, but not named, is the kernel's exit."""
    starts = {region: index for index, bundle in enumerate(bundles) for region in bundle.starts}
    if bundles and bundles[-1].exits:
        for branch in (bundle.branch for bundle in bundles if bundle.branch):
            starts.setdefault(branch.region, len(bundles) - 1)
    return starts


def _decide(
    bundles: Sequence[Bundle], at: int, machine: _Machine, starts: Mapping[int, int]
) -> tuple[bool | None, int]:
    branch = bundles[at].branch
    assert branch is not None
    if branch.region not in starts:
        raise ScheduleError(f"bundle {at:#x} branches to region {branch.region}, which starts nowhere")
    target = starts[branch.region]
    # Its own bundle cannot set what it reads, but pseudo instructions may stand beside it.
    return machine.holds(branch.predicate), target


def _behind_delay(bundles: Sequence[Bundle], at: int) -> int:
    """The bundle behind a branch's delay slots: these end where the region of the branch ends."""
    for index in range(at + 1, min(at + 12, len(bundles))):
        if bundles[index].ends:
            return index + 1
    return min(at + 1, len(bundles))


@dataclass(frozen=True)
class Kernel:
    """A fusion, kernel or copy of a program: how often it is called, and what one call takes.

    cycles: of the core that runs longest. traffic: of all cores.
    """

    name: str
    calls: int
    cycles: int
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class ProgramSchedule:
    """kernels: in the order of their first call. top_level, top_level_traffic: of what calls them."""

    kernels: tuple[Kernel, ...]
    top_level: int
    top_level_traffic: Traffic = field(default_factory=Traffic)

    @property
    def cycles(self) -> int:
        return self.top_level + sum(kernel.calls * kernel.cycles for kernel in self.kernels)

    @property
    def traffic(self) -> Traffic:
        return sum((kernel.traffic * kernel.calls for kernel in self.kernels), self.top_level_traffic)


def read_schedule(
    folder: Path, cores: int = 1, *, enter_unknown: bool = True, many_chips: bool = False
) -> ProgramSchedule:
    """The schedule of the one program whose dumps are in `folder`, and which `cores` cores run.

    enter_unknown: of the kernels, as in `execute`. many_chips: as there.

    Raises ScheduleError if a dump is missing or cannot be counted.
    """
    dumps = find_dumps(folder)
    if TOP_LEVEL not in dumps:
        raise ScheduleError(f"{folder} holds no dump of a program; its format may have changed with libtpu")
    bundles = parse_bundles(dumps[TOP_LEVEL].read_text())
    executions = [execute(bundles, core, many_chips=many_chips) for core in range(cores)]
    calls: dict[str, int] = {}
    for bundle, count in zip(bundles, executions[0].counts, strict=True):
        for name in bundle.calls:
            calls[name] = calls.get(name, 0) + count
    missing = sorted(name for name in calls if name not in dumps)
    if missing:
        raise ScheduleError(f"{folder} has no dump of {missing}, which the program calls")

    @functools.cache
    def run(path: Path) -> tuple[int, Traffic]:
        parsed = parse_bundles(path.read_text())
        run_on = functools.partial(execute, parsed, enter_unknown=enter_unknown, many_chips=many_chips)
        return _together([run_on(core) for core in range(cores)])

    kernels = (Kernel(name, count, *run(dumps[name])) for name, count in calls.items())
    return ProgramSchedule(tuple(kernels), *_together(executions))


def _together(executions: Sequence[Execution]) -> tuple[int, Traffic]:
    """The cycles of the core that runs longest, and the traffic of all."""
    traffic = sum((execution.traffic for execution in executions), Traffic())
    return max(execution.cycles for execution in executions), traffic


def find_dumps(folder: Path) -> dict[str, Path]:
    """The final bundles of the program and of each kernel by its name; several may share one file."""
    dumps = {match[1]: path for path in folder.iterdir() if (match := DUMP.fullmatch(path.name))}
    same = _equivalents(folder).items()
    return dumps | {name: dumps[other] for name, other in same if other in dumps}


def _equivalents(folder: Path) -> dict[str, str]:
    """Which other fusion's code a fusion shares: the compiler keeps one of several equal ones."""
    same: dict[str, str] = {}
    for path in folder.glob(f"*-{TOP_LEVEL}-*-deduplication-map.txt"):
        for key, names in EQUIVALENT.findall(path.read_text()):
            same |= dict.fromkeys(names.split(), key)
    return same
