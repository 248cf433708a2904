"""The attention bench: what it reads of kernels that are known by construction, its floor and its files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from qwenimage_tpu.cli import app
from qwenimage_tpu.lab.ahead_of_time import TOPOLOGIES, lower_program
from qwenimage_tpu.lab.attention_contenders import (
    BLOCKS,
    AttentionCase,
    Candidate,
    Contender,
    attend_flash,
    attend_padded,
    attend_splash,
    attend_unfused,
)
from qwenimage_tpu.lab.attention_floor import MATRIX_UNITS, Floor, matmul_floor
from qwenimage_tpu.lab.attention_picture import check_picture, draw, draw_panel
from qwenimage_tpu.lab.attention_report import (
    AttentionReport,
    from_json,
    print_report,
    to_json,
)
from qwenimage_tpu.lab.bench_attention import bench_attention, check_cases
from qwenimage_tpu.lab.bundles import ScheduleError
from qwenimage_tpu.lab.compiled_program import ExaminedProgram, examine_program
from qwenimage_tpu.lab.kernel_details import allocated_vmem, find_hot_region
from qwenimage_tpu.lab.results import write_file
from qwenimage_tpu_pallas.shapes import JointShape

GRID = 16
REGISTER = (8, 128)  # of f32


def examine(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str) -> ExaminedProgram:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return examine_program(lower_program("v6e", function, arguments), TOPOLOGIES["v6e"])


def test_additions_are_counted():
    registers = 64

    def body(x: Any, out: Any) -> None:
        total = x[:8]
        for index in range(1, registers):
            total += x[8 * index : 8 * index + 8]
        out[...] = total

    add = pl.pallas_call(
        body,
        grid=(GRID,),
        in_specs=[pl.BlockSpec((registers * 8, 128), lambda step: (step, 0))],
        out_specs=pl.BlockSpec(REGISTER, lambda step: (step, 0)),
        out_shape=jax.ShapeDtypeStruct((GRID * 8, 128), jnp.float32),
        name="add_chain",
    )
    details = examine(add, (GRID * registers * 8, 128), dtype="float32").biggest
    region = details.hot_region
    assert details.name.startswith("add_chain")
    assert region.utilisation["VALU"] * 4 * region.cycles == pytest.approx(GRID * (registers - 1))
    assert region.utilisation["VLOAD"] * 3 * region.cycles >= GRID * registers
    assert region.utilisation["MXU"] == region.fills == region.spills == 0
    # Two windows of each operand, one register wide or 64.
    assert details.vmem_bytes >= 2 * 4096 * (registers + 1)


def test_the_floor_is_that_of_a_matmul():
    rows, contraction, columns = 2048, 128, 1024

    def body(x: Any, y: Any, out: Any) -> None:
        product = jax.lax.dot_general(
            x[...], y[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        out[...] = product.astype(out.dtype)

    matmul = pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16), name="matmul"
    )
    details = examine(matmul, (rows, contraction), (columns, contraction), dtype="bfloat16").biggest
    units = MATRIX_UNITS["v6e"]
    needed = units.registers(rows, contraction, columns) * units.scheduled
    region = details.hot_region
    used = region.utilisation["MXU"] * units.count * region.cycles
    # The first registers after each change of the square may follow faster.
    assert used == pytest.approx(float(needed), rel=0.1)


@pytest.mark.parametrize(("generation", "cores"), [("v5e", 1), ("v5p", 2), ("v6e", 1), ("tpu7x", 1)])
def test_the_floor_of_attention(generation: str, cores: int):
    units = MATRIX_UNITS[generation]
    # 128 rows of a square are filled by q k^T; p v fills all.
    pushes = 6 * 4608 * 4608 / 16 * (1 + 128 / units.size) / units.size
    per_unit = pushes / (units.count * cores)
    shape = JointShape(4096, 512)
    floor = matmul_floor(generation, shape, 6)
    assert (floor.scheduled, floor.peak) == (per_unit * units.scheduled, per_unit * units.peak)
    assert floor.peak >= floor.scheduled
    assert matmul_floor(generation, shape, 12).scheduled == 2 * floor.scheduled
    int8 = matmul_floor(generation, shape, 6, int8_logits=True)
    # q k^T is half of the work of a small MXU, two thirds of a large one's.
    expected = {"v5e": 3 / 4, "v5p": 3 / 4, "v6e": 2 / 3, "tpu7x": 1}
    assert int8.scheduled == floor.scheduled * expected[generation]


UTILISATION = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 1
2 0 4 0 1 3 1 0 0 0
0 0 2 0 0 0 1 1 1 0
0 0 0 0 0 0 0 0 0 0
"""


def test_the_hot_region_is_the_heaviest_run():
    region = find_hot_region([1, 5, 5, 7], UTILISATION)
    assert (region.cycles, region.fills, region.spills) == (10, 10, 5)
    expected = {
        "MXU": 0.5,
        "XLU": 0,
        "VALU": 0.75,
        "VPOP": 0,
        "EUP": 0.5,
        "VLOAD": 0.5,
        "VSTORE": 0.25,
        "SALU": 0,
    }
    assert region.utilisation == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [("nothing", "has another form"), (UTILISATION + "0 0 0 0 0 0 0 0 0 0\n", "has 5 bundles, the kernel 4")],
)
def test_a_utilisation_dump_that_cannot_be_read(text: str, message: str):
    with pytest.raises(ScheduleError, match=message):
        find_hot_region([1, 5, 5, 7], text)


def test_vmem_of_regions_apart_does_not_add_up():
    allocation = "#allocation{0} [shape = 'u8[{1}]', space=vmem, size = {1:#x}, scoped, tag = 'x']\n"
    text = (
        "$region0: #{k}\n"
        + "  " + allocation.format(1, 64)
        + "  #allocation2 [shape = 's32[1]', space=smem, size = 0x200, scoped, tag = 'x']\n"
        + "  $region1: #{k} parent=0\n" + "    " + allocation.format("3_spill", 16)
        + "  $region2: #{k} parent=0\n" + "    " + allocation.format(4, 32)
    )  # fmt: skip
    assert allocated_vmem(text) == 96


def refused(*_: jax.Array) -> tuple[jax.Array, jax.Array]:
    raise ValueError("blocks of 7 do not divide 144")


@pytest.mark.parametrize("attend", [attend_flash, attend_splash])
def test_peers_compute_the_same_attention(attend: Callable[..., jax.Array]):
    keys = jax.random.split(jax.random.key(0), 6)
    # Small ones, because the contenders' queries carry the softmax's scale already.
    tokens = (200, 200, 200, 40, 40, 40)
    streams = [jax.random.normal(key, (1, n, 128)) / 3 for key, n in zip(keys, tokens, strict=True)]
    expected = attend_unfused(*streams)
    with pltpu.force_tpu_interpret_mode():
        # 240 tokens: 16 more to the blocks of both.
        found = attend_padded(*streams, attend=attend, blocks=(128, 256, 128))
    for rows, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, right, atol=1e-5)


CASE = AttentionCase("v6e", JointShape(128, 16), heads=1)
CONTENDERS = [
    Contender("ours", [Candidate("", attend_unfused)], ours=True),
    Contender("same", [Candidate("7", refused), Candidate("16", attend_unfused)]),
    Contender("broken", [Candidate("7", refused)]),
    Contender("absent", (), missing="it is not installed"),
]


@pytest.fixture(scope="module")
def report() -> AttentionReport:
    (report,) = bench_attention([CASE], Console(quiet=True), CONTENDERS)
    return report


def test_contenders_that_fail_leave_the_others(report: AttentionReport):
    ours, same, broken, absent = report.results
    assert ours.measured is not None
    # The same program is not compiled twice.
    assert ours.measured is same.measured or ours.measured == same.measured
    assert (same.choice, same.tried, same.failed) == ("16", 2, 1)
    assert (broken.tried, broken.failed, broken.measured) == (1, 1, None)
    assert broken.error == "7 ValueError: blocks of 7 do not divide 144"
    assert (absent.tried, absent.error, absent.measured) == (0, "it is not installed", None)
    assert ours.measured.worst_cycles == ours.measured.cycles
    # Six arrays in and two out, of 128 or 16 tokens of 128 channels in bf16, all of them once.
    assert ours.measured.hbm_written == 144 * 128 * 2
    assert ours.measured.hbm_read >= 3 * 144 * 128 * 2


def test_the_tables_name_everyone(report: AttentionReport, capsys: pytest.CaptureFixture[str]):
    print_report(report, Console(width=160))
    printed = capsys.readouterr().out
    assert "absent: it is not installed" in printed
    assert "broken: 1 of 1 choices failed, the last: 7 ValueError" in printed
    assert printed.count("same") == 3


def test_json_round_trip(report: AttentionReport):
    assert from_json(to_json([report, report], {"jax": "1"})) == ([report, report], {"jax": "1"})


def test_the_slower_of_cycles_and_peak_and_memory_binds(report: AttentionReport):
    assert report.results[0].measured is not None
    measured = dataclasses.replace(
        report.results[0].measured, floor=Floor(500, 2000), cycles=1000, hbm_read=600, hbm_written=400
    )
    report = dataclasses.replace(report, clock_hz=1e3, hbm_bytes_per_second=1e2)
    assert report.cycle_seconds(measured) == 2
    assert report.memory_seconds(measured) == 10


def test_one_bar_per_contender_that_compiled(report: AttentionReport, tmp_path: Path):
    panel = Figure().subplots()
    draw_panel(report, panel)
    assert len(panel.patches) == 2
    for name in ("chart.png", "chart.svg"):
        check_picture(tmp_path / name)
        write_file(tmp_path / name, lambda path: draw([report, report], path))
    with Image.open(tmp_path / "chart.png") as image:
        assert image.width == 850


def test_an_interrupted_file_is_not_there(tmp_path: Path):
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "report.json", interrupted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for", "v9"], "must be of ['tpu7x', 'v5e', 'v5p', 'v6e'], but are ['v9']; name one of these"),
        (["--text-tokens", "0"], "must be at least 1, but are 6, 4096 and 0; give positive numbers"),
        (["--picture", "chart.gif"], "a picture ends in .png or .svg, but chart.gif does not; name it so"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["bench", "attention", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_generation_is_compiled_once():
    assert [case.generation for case in check_cases(6, 4096, 512, ["v6e", "v5e", "v6e"])] == ["v6e", "v5e"]


def test_the_help_lists_the_block_sizes_that_are_tried():
    printed = CliRunner().invoke(app, ["bench", "attention", "--help"], terminal_width=200).stdout
    for blocks in BLOCKS:
        assert "/".join(map(str, blocks)) in printed
