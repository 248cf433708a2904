"""Search the block sizes of our attention with the fewest executed cycles, and write the kernel's table.

Every candidate is compiled for the TPU, without one. What was measured is appended to a file at once, so that
an interrupted search goes on where it stopped.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu_pallas.attention_layout import AttentionConfig, AttentionLayout
from qwenimage_tpu_pallas.attention_table import ROWS, Row
from qwenimage_tpu_pallas.layouts import LANES, round_up
from qwenimage_tpu_pallas.shapes import HEADS_PER_CHIP, QWENIMAGE_SHAPES, JointShape
from qwenimage_tpu_pallas.softmax import Softmax
from qwenimage_tpu_pallas.vmem import VMEM_LIMIT_BYTES

from .ahead_of_time import TOPOLOGIES, lower_program
from .attention_contenders import AttentionCase
from .compiled_program import CompilerKilledError, examine_program

TABLE = Path("kernels_src/qwenimage_tpu_pallas/attention_table.py")
# Keys times queries of one step, at least and at most: its code is proportional to them. 21 million are
# 2.1 MB on v6e, and take the compiler half a minute.
LOGITS_PER_STEP = (5_000_000, 21_500_000)
COMPUTE, KEYS = (512, 640, 768, 896, 1024, 1152), (256, 512)
# Rows computed for nothing: at most 5%. Of the query blocks that are left, the largest two are tried.
WASTE, QUERY_BLOCKS = 1.05, 2
GROUPS: dict[Softmax, tuple[int, ...]] = {
    "bounded": (512,),
    "exact": (512,),
    "online": (512, 1024),
    "int8": (512,),
}
# int8 keys and bf16 weights take their matrix units in turns: a tile of 256 queries occupies one of them.
INT8_COMPUTE, INT8_KEYS = (256,), (512, 640, 768, 1024)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One choice of block sizes for one shape on one TPU generation."""

    generation: str
    softmax: Softmax
    shape: JointShape
    blocks: tuple[int, int, int, int]

    @property
    def key(self) -> str:
        """What it is in the file of results, the compiler included: another one counts anew."""
        return " ".join(map(str, (self.generation, self.softmax, self.shape, *self.blocks, compiler())))


def compiler() -> str:
    """The version that decides the cycles."""
    return f"libtpu {importlib.metadata.version('libtpu')}"


def trials(generation: str, softmax: Softmax, shape: JointShape) -> list[Trial]:
    """Candidates that fit VMEM, of few steps whose code is neither small nor huge."""
    tokens = shape.image_tokens + shape.text_tokens
    found: list[Trial] = []
    for block_q in _query_blocks(tokens):
        sizes, key_tiles = (INT8_COMPUTE, INT8_KEYS) if softmax == "int8" else (COMPUTE, KEYS)
        tiles = [size for size in sizes if block_q % size == 0]
        for compute, keys, group in itertools.product(tiles, key_tiles, GROUPS[softmax]):
            config = AttentionConfig(block_q, compute, group, keys)
            layout = AttentionLayout(shape.image_tokens, shape.text_tokens, softmax, config)
            little_waste = layout.blocks * block_q <= tokens * WASTE
            if little_waste and layout.vmem_bytes(2) <= VMEM_LIMIT_BYTES:
                found.append(Trial(generation, softmax, shape, dataclasses.astuple(config)))
    largest = list(dict.fromkeys(trial.blocks[0] for trial in found))[:QUERY_BLOCKS]
    return [trial for trial in found if trial.blocks[0] in largest]


def _query_blocks(tokens: int) -> list[int]:
    """All, the largest first, that spread the queries evenly over steps of allowed size."""
    smallest, largest = LOGITS_PER_STEP
    sizes = [round_up(-(-tokens // steps), LANES) for steps in range(1, tokens // LANES + 1)]
    return list(dict.fromkeys(size for size in sizes if smallest <= size * tokens <= largest))


def measure(trial: Trial) -> int | str:
    """Executed cycles for six heads, or why there are none."""
    case = AttentionCase(trial.generation, trial.shape, HEADS_PER_CHIP)
    function = functools.partial(
        kernels.joint_attention,
        softmax=trial.softmax,
        scale=math.log(2),
        config=AttentionConfig(*trial.blocks),
    )
    try:
        program = lower_program(trial.generation, function, case.arguments)
        examined = examine_program(program, TOPOLOGIES[trial.generation], enter_unknown=False)
        return examined.compiled.schedule.cycles
    except CompilerKilledError:
        raise
    except Exception as error:  # whatever the compiler raises is the finding
        return f"{type(error).__name__}: {error}"[-500:]


def search(candidates: Sequence[Trial], results: Path, console: Console) -> dict[Trial, int | str]:
    """Measure what the file of results does not have yet, two at a time on two cores, with progress."""
    known = _read(results)
    missing = [trial for trial in candidates if trial.key not in known]
    results.parent.mkdir(parents=True, exist_ok=True)
    # Processes, because tracing is Python, too, and half of the time.
    context = multiprocessing.get_context("spawn")
    with (
        results.open("a") as file,
        Progress(console=console) as progress,
        concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context, _prepare_worker) as pool,
    ):
        running = {pool.submit(_measure, trial): trial for trial in missing}
        try:
            finished = concurrent.futures.as_completed(running)
            for future in progress.track(finished, total=len(running), description="compiling"):
                known[running[future].key] = future.result()
                file.write(json.dumps({running[future].key: future.result()}) + "\n")
                file.flush()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
    return {trial: known[trial.key] for trial in candidates}


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and end a worker so that it ends its compiler and removes its files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _measure(trial: Trial) -> int | str:
    """In a worker, which would take its next trial whatever this one raises."""
    try:
        return measure(trial)
    except SystemExit as end:
        os._exit(int(end.code or 0))


def _read(results: Path) -> dict[str, int | str]:
    """What was measured; a last line that an interruption cut off is removed.

    Raises ValueError for a file that holds anything else.
    """
    if not results.exists():
        return {}
    text = results.read_text(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        results.write_text(whole)
    known: dict[str, int | str] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            known.update(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} of {results} is no result of this search: {line[:60]!r}; remove it, or name"
                " another file"
            ) from error
    return known


def best_rows(measured: dict[Trial, int | str]) -> list[Row]:
    """The fewest cycles of each generation, softmax and shape."""
    best: dict[tuple[str, str, int], Row] = {}
    for trial, cycles in measured.items():
        tokens = trial.shape.image_tokens + trial.shape.text_tokens
        key = (trial.generation, trial.softmax, tokens)
        if isinstance(cycles, int) and (key not in best or cycles < best[key].cycles):
            best[key] = Row(trial.generation, trial.softmax, tokens, trial.blocks, cycles, compiler())
    return sorted(best.values(), key=lambda row: (row.generation, row.softmax, row.tokens))


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Replace the rows of the table's module, which stays as it is otherwise."""
    head, _, _ = path.read_text().partition("ROWS: tuple[Row, ...] = (")
    lines = "".join(
        f'    Row("{r.generation}", "{r.softmax}", {r.tokens}, {r.blocks}, {r.cycles}, "{r.compiler}"),\n'
        for r in rows
    )
    new = path.with_suffix(".new")
    new.write_text(f"{head}ROWS: tuple[Row, ...] = (\n{lines})\n")
    new.replace(path)


def run(generations: Sequence[str], results: Path, table: Path, console: Console) -> None:
    """Tune every softmax at QwenImage's shapes for these generations; other rows stay.

    Raises ValueError for an unknown generation, or without the sources of a clone.
    """
    if not table.exists():
        raise ValueError(f"the table lies in a clone, but there is no {table}; tune in a clone")
    unknown = sorted(set(generations) - set(TOPOLOGIES))
    if unknown:
        raise ValueError(f"TPU generations must be of {sorted(TOPOLOGIES)}, but are {unknown}; name those")
    candidates = [
        trial
        for generation, softmax, shape in itertools.product(generations, GROUPS, QWENIMAGE_SHAPES)
        for trial in trials(generation, softmax, shape)
    ]
    rows = best_rows(search(candidates, results, console))
    replaced = {row[:3] for row in rows}
    kept = [row for row in ROWS if row[:3] not in replaced]
    write_table(sorted([*kept, *rows]), table)
    console.print(f"wrote {len(rows)} rows to {table}")
