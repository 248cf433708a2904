"""The search for block sizes: what it tries, what it keeps, and the table that it writes."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

import qwenimage_tpu_pallas.attention_table as shipped
from qwenimage_tpu.lab import tune
from qwenimage_tpu.lab.tune import Trial, best_rows, compiler, search, trials, write_table
from qwenimage_tpu_pallas.attention_layout import AttentionConfig, AttentionLayout, default_config
from qwenimage_tpu_pallas.attention_table import Row
from qwenimage_tpu_pallas.shapes import QWENIMAGE_SHAPES, JointShape
from qwenimage_tpu_pallas.softmax import ALL_SOFTMAXES, Softmax
from qwenimage_tpu_pallas.vmem import VMEM_LIMIT_BYTES

SHAPE = JointShape(4096, 512)
BLOCKS = [(2304, 768, 512, 256), (2304, 1152, 512, 512), (4608, 768, 512, 256)]


@pytest.mark.parametrize("shape", QWENIMAGE_SHAPES, ids=str)
@pytest.mark.parametrize("softmax", ALL_SOFTMAXES)
def test_every_shape_has_candidates_that_fit_vmem_and_waste_little(shape: JointShape, softmax: Softmax):
    found = trials("v6e", softmax, shape)
    assert len(found) > 3
    for trial in found:
        layout = AttentionLayout(
            shape.image_tokens, shape.text_tokens, softmax, AttentionConfig(*trial.blocks)
        )
        assert layout.vmem_bytes(2) <= VMEM_LIMIT_BYTES
        assert layout.blocks * trial.blocks[0] <= 1.05 * (shape.image_tokens + shape.text_tokens)


def results_of(cycles: list[int | str]) -> dict[Trial, int | str]:
    return {Trial("v6e", "bounded", SHAPE, blocks): each for blocks, each in zip(BLOCKS, cycles, strict=True)}


def test_the_fewest_cycles_win_and_failures_do_not():
    assert best_rows(results_of([300, 200, "no VMEM"])) == [
        Row("v6e", "bounded", 4608, (2304, 1152, 512, 512), 200, compiler())
    ]
    assert best_rows(results_of(["a", "b", "c"])) == []


def test_what_was_measured_is_not_measured_again(tmp_path: Path):
    measured = results_of([300, 200, "no VMEM"])
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps({trial.key: cycles}) + "\n" for trial, cycles in measured.items()))
    before = path.read_text()
    assert search(list(measured), path, Console(quiet=True)) == measured
    assert path.read_text() == before


def test_a_result_cut_off_by_an_interruption_is_measured_again(tmp_path: Path):
    trial = Trial("v6e", "bounded", JointShape(128, 16), (256, 256, 256, 128))
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({trial.key: 5})[:-3])
    measured = search([trial], path, Console(quiet=True))[trial]
    assert isinstance(measured, int)
    assert measured > 1000
    assert search([trial], path, Console(quiet=True)) == {trial: measured}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("written_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_written_table_is_a_module_with_the_rows(tmp_path: Path):
    path = tmp_path / "attention_table.py"
    path.write_text(Path(str(shipped.__file__)).read_text())
    rows = best_rows(results_of([300, 200, 100]))
    write_table(rows, path)
    assert [tuple(row) for row in load(path).ROWS] == [tuple(row) for row in rows]
    write_table(shipped.ROWS, path)
    assert path.read_text() == Path(str(shipped.__file__)).read_text()


def test_every_generation_has_a_row_for_every_shape():
    rows = {(row.generation, row.softmax, row.tokens) for row in shipped.ROWS}
    for generation in tune.TOPOLOGIES:
        for shape in QWENIMAGE_SHAPES:
            assert (generation, "bounded", shape.image_tokens + shape.text_tokens) in rows


def test_a_row_serves_its_shape_and_smaller_ones():
    row = next(row for row in shipped.ROWS if row.softmax == "bounded" and row.tokens == 4608)
    assert default_config(4096, 512, "bounded", "bfloat16", row.generation) == AttentionConfig(*row.blocks)
    small = default_config(500, 12, "bounded", "bfloat16", row.generation)
    assert small.block_q == 512
    assert small.block_kv_compute == min(row.blocks[3], 512)
