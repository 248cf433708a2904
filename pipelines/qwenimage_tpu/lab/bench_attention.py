"""Attention kernels compared without a TPU: ours and others', as the TPU's compiler schedules them.

Each contender is compiled ahead of time with each of its block sizes, and the choice with the fewest executed
cycles counts. The call starts from and ends at row-major `[1, tokens, heads * 128]` arrays in HBM.
"""

import dataclasses
import functools
import hashlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

from qwenimage_tpu.environment import has_tpu
from qwenimage_tpu_pallas import attention
from qwenimage_tpu_pallas.shapes import JointShape

from .ahead_of_time import CLOCK_HZ, TOPOLOGIES
from .attention_contenders import AttentionCase, Candidate, Contender, all_contenders
from .attention_floor import matmul_floor
from .attention_picture import check_picture, draw
from .attention_report import KERNEL, AttentionReport, Measured, Result, print_report, to_json
from .compiled_program import examine_program
from .hardware import CORES, DEVICE_KINDS, HBM_BYTES_PER_SECOND
from .program import Program
from .results import installed_versions, sources_digest, write_file

REPEATS = 20
NAMES_ERROR = re.compile(r"^[\w.]*Error\b|[A-Z]{4,}_[A-Z]{4,}|INTERNAL|UNIMPLEMENTED")


def check_cases(
    heads: int, image_tokens: int, text_tokens: int, generations: Sequence[str]
) -> list[AttentionCase]:
    """A case per generation, each once. Raises ValueError for an unknown generation, and an empty shape."""
    if min(heads, image_tokens, text_tokens) < 1:
        raise ValueError(
            f"heads, image tokens and text tokens must be at least 1, but are {heads}, {image_tokens} and"
            f" {text_tokens}; give positive numbers"
        )
    unknown = [name for name in generations if name not in TOPOLOGIES]
    if unknown:
        raise ValueError(
            f"TPU generations must be of {sorted(TOPOLOGIES)}, but are {unknown}; name one of these"
        )
    shape = JointShape(image_tokens, text_tokens)
    return [AttentionCase(generation, shape, heads) for generation in dict.fromkeys(generations)]


def bench_attention(
    cases: Sequence[AttentionCase], console: Console, contenders: Sequence[Contender] | None = None
) -> list[AttentionReport]:
    """Compile every contender for every case, with a progress bar on stderr, and print a report of each.

    contenders: None for all. A contender that does not compile has the reason in its result.
    """
    chosen = all_contenders() if contenders is None else contenders
    reports: list[AttentionReport] = []
    for case in cases:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            reports.append(_report(case, _compete_all(chosen, case, progress)))
        print_report(reports[-1], console)
    return reports


def run(
    cases: Sequence[AttentionCase], console: Console, *, json_file: Path | None, picture: Path | None
) -> None:
    """Compare all contenders, print the reports, and write the files that are asked for.

    Raises ValueError for a picture of a format that cannot be drawn, before anything is compiled.
    """
    if picture is not None:
        check_picture(picture)
    reports = bench_attention(cases, console)
    if json_file is not None:
        kernel = {KERNEL: sources_digest(Path(attention.__file__))}
        text = to_json(reports, kernel | installed_versions())
        write_file(json_file, lambda path: path.write_text(text))
        console.print(f"wrote {json_file}")
    if picture is not None:
        write_file(picture, lambda path: draw(reports, path))
        console.print(f"wrote {picture}")


class _Compiler:
    """Compiles for one case; a program that it has seen before is not compiled again."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        self._known: dict[tuple[str, bool], Measured] = {}

    def measure(self, contender: Contender, candidate: Candidate) -> Measured:
        program = candidate.program(self.case)
        key = hashlib.sha256(program.code).hexdigest(), contender.rare_regions
        if key not in self._known:
            self._known[key] = _measure(program, self.case, contender)
        return self._known[key]


def _measure(program: Program, case: AttentionCase, contender: Contender) -> Measured:
    topology = TOPOLOGIES[case.generation]
    examined = examine_program(program, topology, enter_unknown=not contender.rare_regions)
    compiled, details = examined.compiled, examined.biggest
    traffic = compiled.schedule.traffic
    return Measured(
        floor=matmul_floor(case.generation, case.shape, case.heads, int8_logits=contender.int8_logits),
        cycles=compiled.schedule.cycles,
        worst_cycles=examined.worst_cycles,
        kernel=details.name,
        hot_region=details.hot_region,
        vmem_bytes=details.vmem_bytes,
        hbm_read=traffic.read,
        hbm_written=traffic.written,
        uncertain_copies=traffic.uncertain,
        code_bytes=compiled.memory.code,
        temporary_bytes=compiled.memory.temporaries,
    )


def _compete_all(contenders: Sequence[Contender], case: AttentionCase, progress: Progress) -> list[Result]:
    compiler = _Compiler(case)
    total = sum(len(contender.candidates) for contender in contenders)
    task = progress.add_task(case.generation, total=total)
    results: list[Result] = []
    for contender in contenders:
        progress.update(task, description=f"{case.generation}: {contender.name}")
        results.append(_compete(contender, compiler, functools.partial(progress.advance, task)))
    return results


def _compete(contender: Contender, compiler: _Compiler, advance: Callable[[], object]) -> Result:
    """The candidate with the fewest cycles; one that does not compile is passed over and counted."""
    if contender.missing:
        return Result(contender.name, contender.ours, error=contender.missing)
    measured: list[tuple[Candidate, Measured]] = []
    error = ""
    for candidate in contender.candidates:
        try:
            measured.append((candidate, compiler.measure(contender, candidate)))
        except Exception as exception:  # whatever the kernel or the compiler raises is the finding
            error = f"{candidate.choice} {_reason(exception)}".strip()
        advance()
    tried = len(contender.candidates)
    failed = tried - len(measured)
    result = Result(
        contender.name, contender.ours, tried=tried, failed=failed, error=error, remark=contender.remark
    )
    if not measured:
        return result
    cycles = {candidate.choice: found.cycles for candidate, found in measured}
    best, found = min(measured, key=lambda pair: pair[1].cycles)
    found = dataclasses.replace(found, tpu_seconds=_time_on_tpu(best, compiler.case))
    return dataclasses.replace(result, choice=best.choice, cycles=cycles, measured=found)


def _reason(error: Exception, length: int = 240) -> str:
    """The last line of its message that names an error, or else the last: that is the compiler's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    lines = [line for line in lines if NAMES_ERROR.search(line)] or lines
    return f"{type(error).__name__}: {lines[-1][:length]}"


def _time_on_tpu(candidate: Candidate, case: AttentionCase) -> float | None:
    """Median seconds of a call on this machine's TPU; None without one of the case's generation."""
    if (
        candidate.function is None
        or not has_tpu()
        or jax.devices()[0].device_kind != DEVICE_KINDS[case.generation]
    ):
        return None
    call = jax.jit(candidate.function)
    arguments = [jnp.ones(each.shape, each.dtype) for each in case.arguments]
    jax.block_until_ready(call(*arguments))
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _report(case: AttentionCase, results: Sequence[Result]) -> AttentionReport:
    return AttentionReport(
        generation=case.generation,
        image_tokens=case.shape.image_tokens,
        text_tokens=case.shape.text_tokens,
        heads=case.heads,
        cores=CORES[case.generation],
        floor=matmul_floor(case.generation, case.shape, case.heads),
        clock_hz=CLOCK_HZ[case.generation],
        hbm_bytes_per_second=HBM_BYTES_PER_SECOND[case.generation],
        results=tuple(results),
    )
