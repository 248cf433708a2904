"""Does every kernel compile for every supported TPU at QwenImage's shapes?

Interpret mode skips the TPU compiler's checks of layouts, alignment and VMEM, so a kernel that is right
on a CPU may still be refused by a TPU. This asks the compiler itself, without a TPU.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from qwenimage_tpu_pallas.shapes import QWENIMAGE_SHAPES, JointShape

from .ahead_of_time import TOPOLOGIES, lower_for
from .kernel_cases import KernelCase, kernel_cases

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """Outcome of one compilation; `error` is empty when the compiler took the kernel."""

    kernel: str
    shape: JointShape
    dtype: str
    generation: str
    seconds: float
    error: str


def compile_case(case: KernelCase, shape: JointShape, dtype: str, generation: str) -> CompileResult:
    """Compile one kernel at one shape for one TPU generation."""
    start = time.perf_counter()
    error = ""
    try:
        lower_for(TOPOLOGIES[generation], case.function, case.arguments(shape, dtype)).compile()
    except Exception as exception:  # whatever the compiler raises is the finding
        error = f"{type(exception).__name__}: {exception}"
    return CompileResult(case.name, shape, dtype, generation, time.perf_counter() - start, error)


def report(shapes: Sequence[JointShape] = QWENIMAGE_SHAPES) -> bool:
    """Compile every kernel at every shape, dtype and generation with a progress bar, and print the outcome.

    Returns:
        Whether the compiler took everything.
    """
    cases = list(itertools.product(kernel_cases(), shapes, DTYPES, TOPOLOGIES))
    with Progress(console=Console(stderr=True)) as progress:
        results = [compile_case(*case) for case in progress.track(cases, description="compiling for TPU")]
    console = Console(width=120)
    console.print(_summary(results, shapes))
    failures = [result for result in results if result.error]
    for r in failures:
        console.print(f"{r.kernel} {r.shape} {r.dtype} {r.generation}: {r.error}", markup=False)
    console.print(f"{len(results) - len(failures)} of {len(results)} compiled")
    return not failures


def _summary(results: Sequence[CompileResult], shapes: Sequence[JointShape]) -> Table:
    """A row per kernel and dtype, a column per generation: how many of the shapes compiled."""
    table = Table(title=f"shapes compiled, of image + text tokens {', '.join(map(str, shapes))}")
    table.add_column("kernel", no_wrap=True)
    for column in ("dtype", *TOPOLOGIES, "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for (kernel, dtype), group in itertools.groupby(
        sorted(results, key=lambda r: (r.kernel, r.dtype)), key=lambda r: (r.kernel, r.dtype)
    ):
        row = list(group)
        counts = [
            f"{sum(not r.error for r in row if r.generation == name)} of {len(shapes)}" for name in TOPOLOGIES
        ]
        table.add_row(kernel, dtype, *counts, f"{sum(r.seconds for r in row):.0f}")
    return table
