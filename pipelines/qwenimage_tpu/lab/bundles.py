"""Read the VLIW bundles that the TPU's compiler dumps, as far as they decide the control flow."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})?: [ >]*\{", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
START = re.compile(r"Start(?:/End empty)? region (\d+)")
END = re.compile(r"End region (\d+)")
EXIT = re.compile(r"^[^{]* PF: [ >]*\{.*\} /\* exit bundle", re.DOTALL)
# A large program calls what a small one has in line.
CALL = re.compile(r"\b(?:inlined_)?call\b[^/]*/\* %?(\S+)")
DEFINITION = re.compile(r"%([sp]\d+)_\w+ = (\S+) *(.*)", re.DOTALL)
# A division gives its result later, by a pop that names it; the comment says which result.
DIVISION = re.compile(r"%(\d+) = (sdivrem\S*) *(.*?)/\* (k\w+) \*/", re.DOTALL)
BRANCH = re.compile(r"sbr\.rel \((!?)%([sp]\d+)_\w+\) target = \$region(\d+)")
JUMP = re.compile(r"sbr\.rel target = \$region(\d+)")
PREDICATE = re.compile(r"\((!?)%(p\d+)_\w+(?:, %([sp]\d+)_\w+)?\),? *")
STORE = re.compile(r"%\d+ = (sst\S*) +(.*)", re.DOTALL)
# A copy between memories, `dma.hbm_to_vmem` for example. A comment names its size.
TRANSFER = re.compile(
    r"%\d+ = (dma\.(?:\w+_to_\w+|general)) (.*?)/\*size_in_granules=\*/([^,]+)(.*)", re.DOTALL
)
# One between any two, whose addresses tell which.
SOURCE = re.compile(r"/\*src=\*/%(s\d+)_")
DESTINATION = re.compile(r"/\*dst=\*/%(s\d+)_")
MEMORY = re.compile(r"%(s\d+)_\w+ = (?:scalar_lea|int_to_ptr|inlined_call_operand)\.(\w+)")
# Where the number of the core is read from the scalar memory.
CORE = re.compile(r"%([sp]\d+)_\w+ = sld .*?/\* (?:megacore )?core id\b", re.DOTALL)
# A value, an address in an allocation, an offset, a number.
OPERAND = re.compile(
    r"%(?P<value>[sp]\d+)_\w+"
    r"|%(?P<division>\d+)"
    r"|\[#allocation(?P<allocation>\d+)(?:_spill)?(?: \+ \$0x(?P<within>[0-9a-f]+))?\]"
    r"|\$0x(?P<offset>[0-9a-f]+)"
    r"|(?<![\w.#+\[$])(?P<number>-?\d+)(?![\w.\]])"
)
# Allocations lie apart, wherever they really are: addresses are only compared within one.
ALLOCATION_SIZE = 2**20


class ScheduleError(RuntimeError):
    """A schedule cannot be counted; the message says where."""


Operand = str | int


@dataclass(frozen=True)
class Instruction:
    """A scalar instruction: it sets the value `target`, if the predicate (a value and its sense) allows;
    if not, to the value `otherwise`, where there is one.

    A store to the scalar memory has an empty target; its last operand is stored at the sum of the others.
    So has a copy between memories; its last operand is its size in granules. "core" is the core's number.
    """

    target: str
    opcode: str
    operands: tuple[Operand, ...]
    predicate: tuple[str, bool] | None
    otherwise: str | None


@dataclass(frozen=True)
class Branch:
    """A jump to the start of a region, always or if the predicate allows."""

    region: int
    predicate: tuple[str, bool] | None


@dataclass
class Bundle:
    """One cycle: its scalar instructions, in an order in which each follows what it reads, and its branch.

    exits: it is the last of a kernel, to which others skip. The dump does not name the region it starts.
    """

    instructions: list[Instruction] = field(default_factory=list[Instruction])
    branch: Branch | None = None
    calls: tuple[str, ...] = ()
    starts: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    exits: bool = False


def parse_bundles(text: str) -> list[Bundle]:
    """The bundles of a `*-final_bundles.txt`. Raises ScheduleError if there are none."""
    starts = [match.start() for match in BUNDLE.finditer(text)]
    if not starts:
        raise ScheduleError("the dump holds no bundles; its format may have changed with libtpu")
    memories = dict(MEMORY.findall(text))
    ends = [*starts[1:], len(text)]
    return [_parse_bundle(text[a:b], memories) for a, b in zip(starts, ends, strict=True)]


def _parse_bundle(text: str, memories: Mapping[str, str]) -> Bundle:
    body, _, markers = text.partition("{")[2].rpartition("}")
    bundle = Bundle(
        calls=tuple(CALL.findall(body)),
        starts=frozenset(int(number) for number in START.findall(markers)),
        ends=frozenset(int(number) for number in END.findall(markers)),
        exits=EXIT.search(text) is not None,
    )
    instructions: list[Instruction] = []
    for commented in body.split(";;"):
        part = COMMENT.sub("", commented)
        if match := DIVISION.match(commented.strip()):
            target, opcode, operands, result = match.groups()
            instructions.append(_parse_instruction(f"d{target}", f"{opcode}.{result}", operands))
        elif match := TRANSFER.match(commented.strip()):
            opcode, before, size, behind = match.groups()
            if opcode == "dma.general":
                opcode = _name_copy(before + behind, memories)
            instructions.append(_parse_instruction("", opcode, COMMENT.sub("", before) + size))
        elif match := CORE.match(commented.strip()):
            instructions.append(Instruction(match[1], "core", (), None, None))
        elif "sbr" in part:
            bundle.branch = _parse_branch(part)
        elif match := DEFINITION.match(part.strip()):
            instructions.append(_parse_instruction(*match.groups()))
        elif match := STORE.match(part.strip()):
            instructions.append(_parse_instruction("", *match.groups()))
    bundle.instructions = _in_order(instructions)
    return bundle


def _name_copy(text: str, memories: Mapping[str, str]) -> str:
    """As the copies are named that work between two memories only."""
    source, destination = (
        memories.get(match[1], "unknown") if (match := pattern.search(text)) else "unknown"
        for pattern in (SOURCE, DESTINATION)
    )
    return f"dma.{source}_to_{destination}"


def _parse_branch(text: str) -> Branch:
    if match := BRANCH.search(text):
        return Branch(int(match[3]), (match[2], not match[1]))
    if match := JUMP.search(text):
        return Branch(int(match[1]), None)
    raise ScheduleError(f"this branch is of an unknown form: {text.strip()}")


def _parse_instruction(target: str, opcode: str, rest: str) -> Instruction:
    predicate, otherwise = None, None
    if match := PREDICATE.search(rest):
        predicate, otherwise = (match[2], not match[1]), match[3]
        rest = rest[: match.start()] + rest[match.end() :]
    operands = tuple(_parse_operand(match) for match in OPERAND.finditer(rest))
    return Instruction(target, opcode, operands, predicate, otherwise)


def _parse_operand(match: re.Match[str]) -> Operand:
    parts = match.groupdict()
    if parts["value"]:
        return parts["value"]
    if parts["division"]:
        return f"d{parts['division']}"
    if parts["allocation"]:
        return (int(parts["allocation"]) + 1) * ALLOCATION_SIZE + int(parts["within"] or "0", 16)
    return int(parts["offset"], 16) if parts["offset"] else int(parts["number"])


def _in_order(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Each after those whose targets it reads; a phi reads what earlier bundles set, so phis come first."""
    ordered = [instruction for instruction in instructions if instruction.opcode == "sphi"]
    waiting = [instruction for instruction in instructions if instruction.opcode != "sphi"]
    while waiting:
        targets = {instruction.target for instruction in waiting}
        ready = [i for i in waiting if not targets.intersection(_reads(i))]
        # What reads its own target, or a ring of those, reads the value of before.
        ready = ready or waiting
        ordered += ready
        waiting = [instruction for instruction in waiting if instruction not in ready]
    return ordered


def _reads(instruction: Instruction) -> set[Operand]:
    reads = {*instruction.operands, instruction.otherwise or ""} - {instruction.target, ""}
    return reads | {instruction.predicate[0]} if instruction.predicate else reads
