"""The whole denoising program, compiled for a slice that is not there, in a process of its own."""

import dataclasses
import json
import math
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwenimage_tpu.lab.compiled_program import DUMPS, Memory, run_compiler
from qwenimage_tpu.lab.hardware import CORES
from qwenimage_tpu.lab.schedule import ProgramSchedule, ScheduleError, read_schedule
from qwenimage_tpu.spmd.config import DiTConfig, is_modulation, parameter_shapes
from qwenimage_tpu.spmd.placement import MODEL, RuleTable, partition_specs
from qwenimage_tpu_pallas.softmax import Softmax

from .collectives import Collective, read_collectives
from .slices import Slice

CASE, RESULT, HLO = "case.json", "result.json", "program.hlo"
OUT_OF_MEMORY = re.compile(r"Ran out of memory in memory space hbm.*?Used (\S+) of (\S+) hbm", re.DOTALL)
NO_SUCH_SLICE = re.compile(r"INVALID_ARGUMENT: (Topology .*)")
BF16_BYTES = 2
PIXELS_PER_TOKEN_SIDE = 16


class DoesNotFitError(RuntimeError):
    """The compiler finds no room for the program in a chip's memory; the message has its numbers."""


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A picture's denoising on a mesh of a slice, in bf16.

    images: that are made at once. guided: true CFG, two rows of the batch per image.
    """

    topology: str
    data: int
    model: int
    image_tokens: int
    text_tokens: int
    images: int
    guided: bool
    steps: int
    table: RuleTable = "sharded"
    softmax: Softmax = "bounded"
    config: DiTConfig = field(default_factory=DiTConfig)

    @property
    def slice(self) -> Slice:
        return Slice.parse(self.topology)

    @property
    def pixels(self) -> int:
        """Of an image."""
        return self.image_tokens * PIXELS_PER_TOKEN_SIDE**2

    @property
    def rows(self) -> int:
        """Of the batch."""
        return self.images * (2 if self.guided else 1)

    @property
    def resident(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that stay on the chips: of our own placement, without the modulation's."""
        shapes = parameter_shapes(self.config)
        return {name: shape for name, shape in shapes.items() if not (self.tabled and is_modulation(name))}

    @property
    def tabled(self) -> bool:
        """Whether the modulation is a table of the schedule's steps, made beforehand."""
        return self.table == "sharded"

    @property
    def weight_bytes(self) -> int:
        """Of a device."""
        specs = partition_specs(self.resident, self.table, self.model)
        return sum(
            BF16_BYTES * math.prod(shape) // (self.model if MODEL in specs[name] else 1)
            for name, shape in self.resident.items()
        )


@dataclass(frozen=True)
class CompiledPlan:
    """What the compiler makes of a case. compile_seconds: of the compiler, writing its dumps."""

    case: PlanCase
    memory: Memory
    schedule: ProgramSchedule
    collectives: tuple[Collective, ...]
    compile_seconds: float


def compile_plan(case: PlanCase) -> CompiledPlan:
    """Compile all layers and steps of the case for its slice.

    Raises DoesNotFitError, ValueError for a slice that there is not, CompilerKilledError, RuntimeError with
    the compiler's message for anything else that it refuses, and ScheduleError if its dumps cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="qwenimage-tpu-") as name:
        folder = Path(name)
        (folder / CASE).write_text(json.dumps(dataclasses.asdict(case)))
        _run(folder, case.topology)
        result: dict[str, Any] = json.loads((folder / RESULT).read_text())
        schedule = read_schedule(folder / DUMPS, CORES[case.slice.generation], many_chips=True)
        calls = {kernel.name: kernel.calls for kernel in schedule.kernels}
        _check_calls(case, calls)
        collectives = read_collectives((folder / HLO).read_text(), calls)
        return CompiledPlan(
            case, Memory(**result["memory"]), schedule, tuple(collectives), result["compile_seconds"]
        )


def _run(folder: Path, topology: str) -> None:
    result = run_compiler("qwenimage_tpu.plan.lowering", folder)
    if result.returncode == 0:
        return
    if match := OUT_OF_MEMORY.search(result.stderr):
        raise DoesNotFitError(
            f"it needs {match[1]} of the {match[2]} of memory that a device of {topology} has"
        )
    if match := NO_SUCH_SLICE.search(result.stderr):
        raise ValueError(f"the TPU's compiler knows no slice {topology}: {match[1]}")
    raise RuntimeError(f"the program does not compile for {topology}:\n{result.stderr.strip()[-2000:]}")


def _check_calls(case: PlanCase, calls: dict[str, int]) -> None:
    """The control flow was followed rightly if attention ran once per layer and step."""
    attention = sum(count for name, count in calls.items() if name.startswith("joint_attention"))
    if attention != case.config.layers * case.steps:
        raise ScheduleError(
            f"attention must run {case.config.layers * case.steps} times, but the schedule says {attention}"
        )
