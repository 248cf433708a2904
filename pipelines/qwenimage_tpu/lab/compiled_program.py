"""Compile a program with the TPU's own compiler, and read its memory and its schedule."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenimage_tpu.environment import WITHOUT_TPU

from .bundles import ScheduleError
from .hardware import CORES
from .kernel_details import KernelDetails, read_details
from .program import Program
from .schedule import ProgramSchedule, read_schedule

# Of its passes only those that are read here: all of them are gigabytes for a large program.
DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
    " --xla_jf_emit_annotations=true"
    " --xla_jf_dump_llo_pass_label_regex="
    "^(final_bundles|final_hlo-static-per-bundle-utilization|post-ra|deduplication-map)$"
)
CODE, OPTIONS, MEMORY, DUMPS = "program.mlir", "program.options", "memory.json", "dumps"


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip: of the inputs (weights too), the outputs, what lives in between, and the code."""

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code

    @classmethod
    def of(cls, stats: Any) -> "Memory":
        """From XLA's own record of a compiled program."""
        return cls(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
        )


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of a program on one chip of a topology."""

    topology: str
    memory: Memory
    schedule: ProgramSchedule


@dataclass(frozen=True)
class ExaminedProgram:
    """biggest: the kernel that takes most cycles.

    worst_cycles: of the program, if every region runs whose predicate depends on data.
    """

    compiled: CompiledProgram
    biggest: KernelDetails
    worst_cycles: int


class CompilerKilledError(RuntimeError):
    """The compiler's process was killed from outside; the program may be fine."""


def compile_program(program: Program, topology: str, *, many_chips: bool = False) -> CompiledProgram:
    """Compile for one chip of a topology such as "v6e:2x2", in a process of its own.

    many_chips: as in `schedule.execute`.
    Raises RuntimeError with the compiler's message, ScheduleError if its dumps cannot be read.
    """
    with _compiled(program, topology) as folder:
        return _read(folder, topology, enter_unknown=True, many_chips=many_chips)


def examine_program(program: Program, topology: str, *, enter_unknown: bool = True) -> ExaminedProgram:
    """As `compile_program`, and more. enter_unknown: as in `schedule.execute`."""
    with _compiled(program, topology) as folder:
        compiled = _read(folder, topology, enter_unknown=enter_unknown)
        kernels = compiled.schedule.kernels
        if not kernels:
            raise ScheduleError("the program calls no kernel, so there is none to examine")
        biggest = max(kernels, key=lambda kernel: kernel.calls * kernel.cycles)
        details = read_details(folder / DUMPS, biggest.name, enter_unknown=enter_unknown)
        worst = compiled if enter_unknown else _read(folder, topology, enter_unknown=True)
        return ExaminedProgram(compiled, details, worst.schedule.cycles)


def _read(folder: Path, topology: str, *, enter_unknown: bool, many_chips: bool = False) -> CompiledProgram:
    memory = Memory(**json.loads((folder / MEMORY).read_text()))
    cores = CORES[topology.partition(":")[0]]
    schedule = read_schedule(folder / DUMPS, cores, enter_unknown=enter_unknown, many_chips=many_chips)
    return CompiledProgram(topology, memory, schedule)


def run_compiler(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, in which the compiler's dumps go to the folder's `DUMPS`.

    module: gets the folder, and then the arguments.
    Raises CompilerKilledError if something else ends it; what it raises itself is in the result.
    """
    flags = DUMP_FLAGS.format(folder=folder / DUMPS)
    # Without the emulated device, whose library would be taken for the compiler's.
    inherited = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    environment = inherited | WITHOUT_TPU
    environment["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    command = [sys.executable, "-m", module, str(folder), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode < 0:
        raise CompilerKilledError(
            f"the compiler was killed by signal {-result.returncode}, so nothing is known of this"
            " program; it takes 2 GB of memory, more for a large one: free some, and try again"
        )
    return result


@contextmanager
def _compiled(program: Program, topology: str) -> Generator[Path]:
    """A temporary folder with what the compiler wrote: hundreds of megabytes for a large program."""
    with tempfile.TemporaryDirectory(prefix="qwenimage-tpu-") as name:
        folder = Path(name)
        (folder / CODE).write_bytes(program.code)
        (folder / OPTIONS).write_bytes(program.options)
        result = run_compiler(__name__, folder, topology)
        if result.returncode:
            raise RuntimeError(
                f"the program does not compile for {topology}:\n{result.stderr.strip()[-2000:]}"
            )
        yield folder


def _compile(folder: Path, topology: str) -> None:
    """In the process of its own: compile, and write what the compiler says of the memory."""
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo
    from jax.experimental import topologies

    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device: Any = description.devices[0]
    options = xla_client.CompileOptions.ParseFromString((folder / OPTIONS).read_bytes())
    with ir.Context() as context:
        hlo.register_dialect(context)
        module = hlo.deserialize_portable_artifact(context, (folder / CODE).read_bytes())
        executable = device.client.compile(module, xla_client.DeviceList((device,)), options)
    memory = Memory.of(executable.get_compiled_memory_stats())
    (folder / MEMORY).write_text(json.dumps(dataclasses.asdict(memory)))


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2])
