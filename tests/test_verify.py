"""What `qwenimage-tpu verify` does and writes."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from emulated_process import EmulatedProcess
from qwenimage_tpu import environment, verify, verify_cases
from qwenimage_tpu.doctor_checks import Check
from qwenimage_tpu.kernel_loader import load_kernels
from qwenimage_tpu.lab.ahead_of_time import TOPOLOGIES
from qwenimage_tpu.lab.bench_block import BlockCase, block_floor, build_block, check_block
from qwenimage_tpu.request import check_report_path
from qwenimage_tpu.verify_report import Timing, write_report
from qwenimage_tpu_pallas.devices import TARGETS
from qwenimage_tpu_pallas.shapes import JointShape

pytestmark = pytest.mark.xdist_group("emulated TPU")


def run_checks() -> list[Check]:
    return [*verify.check_kernels(verify_cases.SMALL_SIZE, "interpret", None), *verify.check_pictures(None)]


def test_all_checks_pass_on_the_emulated_device(emulated_tpu: EmulatedProcess):
    checks = emulated_tpu.run(run_checks)
    assert len(checks) == 2 * len(verify_cases.KERNELS) + 2
    assert {check.status for check in checks} == {"ok"}, checks


def run_a_wrong_kernel() -> list[Check]:
    right = verify.kernel_function

    def wrong(kernels: ModuleType, name: str, implementation: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        function = right(kernels, name, implementation)
        if implementation == "reference":
            return function
        return lambda *inputs: tuple(1.05 * result for result in function(*inputs))

    verify.kernel_function = wrong
    try:
        return list(verify.check_kernels(verify_cases.SMALL_SIZE, "interpret", None))
    finally:
        verify.kernel_function = right


def test_a_kernel_that_is_wrong_is_a_problem(emulated_tpu: EmulatedProcess):
    assert {check.status for check in emulated_tpu.run(run_a_wrong_kernel)} == {"problem"}


def time_the_kernels() -> list[tuple[str, float]]:
    names, size = ("rms_norm", *verify_cases.BLOCKS), verify_cases.SMALL_SIZE
    cases = [verify_cases.timed_case(name, size, "interpret", None) for name in names]
    return [(name, verify.median_seconds(*case)) for name, case in zip(names, cases, strict=True)]


def test_kernels_and_blocks_can_be_timed(emulated_tpu: EmulatedProcess):
    timings = emulated_tpu.run(time_the_kernels)
    assert [name for name, _ in timings] == ["rms_norm", *verify_cases.BLOCKS]
    assert all(seconds > 0 for _, seconds in timings)


@pytest.mark.parametrize("emulated", [True, False])
def test_the_report_says_what_was_found(tmp_path: Path, emulated: bool):
    checks = [Check("a kernel", "ok", "off by 1e-6 | at most 1e-4"), Check("b", "problem", "NaN", "look")]
    timings = [Timing("attention", "v6e", 1_750_000, 0.002), Timing("norm", "v6e", None, 0.001)]
    path = tmp_path / "new" / "report.md"
    write_report(path, checks, timings, {"torch": "2.15.0", "jax": "0.12"}, emulated=emulated)
    text = path.read_text()
    assert "| a kernel | ok | off by 1e-6 \\| at most 1e-4 |" in text
    assert "| b | problem | NaN |" in text
    assert "| attention | 1,750,000 | 1.000 ms | 2.000 ms | 2.00 |" in text
    assert "| norm | unknown | | 1.000 ms | |" in text
    assert "jax 0.12, torch 2.15.0" in text
    assert ("the measured times mean nothing" in text) is emulated
    assert [file.name for file in path.parent.iterdir()] == ["report.md"]


def test_a_report_needs_a_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"the report is one file, but .* is a folder; name a file"):
        check_report_path(tmp_path)


@pytest.mark.parametrize(
    ("heads", "shards", "image_tokens", "text_tokens", "generation", "message"),
    [
        (0, 1, 4096, 512, "v6e", "heads and text tokens must be at least 1, but are 0 and 512"),
        (24, 5, 4096, 512, "v6e", "tensor parallelism must divide the 24 heads, but is over 5 chips"),
        (24, 1, 100, 512, "v6e", "image tokens must be a positive multiple of 64, but are 100"),
        (24, 1, 4096, 512, "v9", r"the TPU generation must be one of \['tpu7x', .*, but is 'v9'"),
    ],
)
def test_bad_blocks(
    heads: int, shards: int, image_tokens: int, text_tokens: int, generation: str, message: str
):
    with pytest.raises(ValueError, match=message):
        check_block(heads, shards, image_tokens, text_tokens, generation)


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_traced_kernels_take_the_choices_of_a_generation(generation: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
    environment.take_generation(generation)
    kind = import_module(f"{load_kernels().module.__name__}.device_kind").device_kind()
    assert TARGETS[kind].generation == generation


def test_the_floor_of_a_block():
    """By hand, v6e: as 12 products of 4608 x 3072 x 3072 (288 x 144 registers) and attention."""
    whole = block_floor("v6e", BlockCase(JointShape(4096, 512)))
    assert whole == 12 * 288 * 144 * 8 // 2 + 746_496
    assert block_floor("v6e", BlockCase(JointShape(4096, 512), shards=4)) == whole // 4


def outputs_of_a_shard() -> list[list[int]]:
    """Shapes that both kinds of block give on one of two chips."""
    shapes: list[list[int]] = []
    for patched in (False, True):
        case = BlockCase(JointShape(64, 24), heads=4, shards=2, patched=patched)
        block, inputs = build_block(case, "interpret")
        with torch.no_grad():
            shapes += [list(stream.shape) for stream in block(**inputs)]
    return shapes


def test_a_shard_of_a_block_takes_and_gives_whole_rows(emulated_tpu: EmulatedProcess):
    assert emulated_tpu.run(outputs_of_a_shard) == [[1, 24, 512], [1, 64, 512]] * 2


def test_errors_that_are_no_numbers_do_not_pass():
    assert verify.relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
