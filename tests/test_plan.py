"""The plan: what is read from a compiled program, and what follows from it, on cases with known answers."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from qwenimage_tpu.cli import app
from qwenimage_tpu.lab.ahead_of_time import CLOCK_HZ
from qwenimage_tpu.lab.compiled_program import Memory
from qwenimage_tpu.lab.schedule import Kernel, ProgramSchedule, Traffic
from qwenimage_tpu.options import parse_mesh
from qwenimage_tpu.plan import stages
from qwenimage_tpu.plan.collectives import Collective, read_collectives
from qwenimage_tpu.plan.command import check_cases, plan_rows
from qwenimage_tpu.plan.estimate import (
    COLLECTIVES,
    DECODING,
    REST,
    TEXT,
    estimate,
    model_flops,
    ring_bytes_per_second,
    text_encoder_ways,
)
from qwenimage_tpu.plan.picture import draw
from qwenimage_tpu.plan.program import CompiledPlan, PlanCase, compile_plan
from qwenimage_tpu.plan.report import Row, print_report, recommend, to_json
from qwenimage_tpu.plan.slices import Slice, ring_ways
from qwenimage_tpu.spmd.config import DiTConfig, parameter_shapes
from qwenimage_tpu.spmd.placement import by_blocks, compact_block

CASE = PlanCase(
    topology="v6e:2x4",
    data=2,
    model=4,
    image_tokens=4096,
    text_tokens=512,
    images=1,
    guided=True,
    steps=50,
)
TINY = DiTConfig(layers=2, heads=4, text_channels=128)


@pytest.mark.parametrize(
    ("topology", "chips", "devices"),
    [("v6e:2x4", 8, 8), ("v5e:4x4", 16, 16), ("v5p:2x2x1", 4, 4), ("tpu7x:2x2x1", 4, 8)],
)
def test_slices(topology: str, chips: int, devices: int):
    parsed = Slice.parse(topology)
    assert (parsed.chips, parsed.devices) == (chips, devices)


@pytest.mark.parametrize("topology", ["v6e", "v9:2x4", "v6e:2", "v6e:0x4", "v6e:2x4x", "2x4"])
def test_topologies_that_are_none(topology: str):
    with pytest.raises(ValueError, match=r"a topology is|must be at least 1"):
        Slice.parse(topology)


def test_meshes_divide_the_heads():
    assert Slice.parse("v6e:2x4").meshes(24) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert Slice.parse("v5e:4x4").meshes(24) == [(2, 8), (4, 4), (8, 2), (16, 1)]


@pytest.mark.parametrize(
    ("topology", "chips", "block", "ways"),
    [
        ("v6e:2x4", 4, (2, 2), 2),
        ("v6e:2x4", 8, (2, 4), 2),
        ("v6e:2x4", 2, (1, 2), 1),
        ("v6e:1x4", 4, (1, 4), 1),
        ("v6e:16x16", 16, (4, 4), 2),
        ("v5p:4x4x4", 4, (1, 2, 2), 2),
        ("v5p:1x1x4", 4, (1, 1, 4), 2),
        ("v6e:2x4", 3, None, 0),
    ],
)
def test_rings(topology: str, chips: int, block: tuple[int, ...] | None, ways: int):
    where = Slice.parse(topology)
    assert compact_block(where.grid, chips) == block
    if block is not None:
        assert ring_ways(where, block) == ways


def test_a_model_axis_is_a_compact_block_of_neighbours():
    devices: list[Any] = [
        SimpleNamespace(id=4 * y + x, coords=(x, y, 0), core_on_chip=0) for y in range(2) for x in range(4)
    ]
    ordered = by_blocks(devices, 4)
    for group in (ordered[:4], ordered[4:]):
        places = [device.coords for device in group]
        steps = [
            sum(abs(a - b) for a, b in zip(here, there, strict=True))
            for here, there in zip(places, [*places[1:], places[0]], strict=True)
        ]
        assert steps == [1, 1, 1, 1]


HLO = """HloModule m
%wrapped (p: f32[]) -> f32[] {
  ROOT %all-reduce.9 = f32[100]{0} all-reduce(%p), replica_groups=[2,4]<=[8]
}
%body (p: f32[]) -> f32[] {
  %fusion.1 = bf16[8]{0} fusion(%p), kind=kLoop
  %all-reduce.1 = (bf16[1,4096,3072]{2:T(8)}, bf16[1,512,3072]{2}) all-reduce(%a), replica_groups=[2,4]<=[8]
  %all-reduce.2 = f32[4096]{0} all-reduce(%c), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %async-start = ((f32[100]{0}), f32[100]{0}, u32[]) async-start(%p), calls=%wrapped
  %collective-permute-start = (f32[64]{0}, f32[64]{0}, u32[]{:S(2)}) collective-permute-start(%d)
}
ENTRY %main (p: f32[]) -> f32[] {
  %copy.9 = f32[2]{0} copy(%p)
  ROOT %all-gather = bf16[60,50,18432]{2} all-gather(%c), replica_groups=mesh['data'=2,'model'=4] {'model'}
  %reduce-scatter = bf16[4,8]{1,0} reduce-scatter(%e), replica_groups=[1,8]<=[8], dimensions={0}
}
"""
CALLS = {"fusion.1": 300, "all-reduce.1": 300, "all-reduce.2": 300, "copy.9": 1, "all-gather": 1}


def test_collectives_are_read_from_the_program():
    assert read_collectives(HLO, CALLS) == [
        Collective("all-reduce.9", "all-reduce", 4, 400, 300),
        Collective("all-reduce.1", "all-reduce", 4, 4608 * 3072 * 2, 300),
        Collective("all-reduce.2", "all-reduce", 2, 4096 * 4, 300),
        Collective("collective-permute-start", "collective-permute", 2, 256, 300),
        Collective("all-gather", "all-gather", 4, 60 * 50 * 18432 * 2, 1),
        Collective("reduce-scatter", "reduce-scatter", 8, 4 * 8 * 2 * 8, 1),
    ]
    with pytest.raises(ValueError, match=r"does not say how often all-reduce\.9 runs"):
        read_collectives(HLO, {"all-gather": 1})
    with pytest.raises(ValueError, match="unknown replica groups"):
        read_collectives(HLO.replace("[2,4]<=[8]", "?"), CALLS)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 150), ("all-gather", 75), ("reduce-scatter", 75), ("collective-permute", 100)],
)
def test_what_a_ring_sends(kind: str, sent: int):
    assert Collective("x", kind, 4, 100, 1).link_bytes == sent


def plan_of(kernels: list[Kernel], collectives: list[Collective], **changes: Any) -> CompiledPlan:
    case = dataclasses.replace(CASE, image_tokens=16, text_tokens=128, config=TINY, **changes)
    schedule = ProgramSchedule(tuple(kernels), top_level=0)
    return CompiledPlan(case, Memory(1, 2, 3, 4), schedule, tuple(collectives), 1.0)


@pytest.fixture
def stage_times(monkeypatch: pytest.MonkeyPatch):
    """A text layer takes a second per token on 4 devices, decoding half a second per pixel."""
    table = {"v6e": {"text_layer_per_token": {"4": 1.0}, "decoding_per_pixel": 0.5}}
    monkeypatch.setattr(stages, "_table", lambda: table)


@pytest.mark.usefixtures("stage_times")
def test_seconds_follow_from_cycles_bytes_and_links():
    clock, second = CLOCK_HZ["v6e"], int(1640e9)
    kernels = [
        Kernel("joint_attention_bounded.1", 10, int(clock)),  # bound by its cycles
        Kernel("qk_norm_rope.1", 5, 1, Traffic(read=second, written=second)),  # by its bytes
        Kernel("fusion.3", 2, int(clock)),
        Kernel("all-reduce.1", 3, int(clock)),
    ]
    # 4 of 8 chips are a ring of 2 x 2, over which a chip sends 200 GB/s: 150 GB.
    collective = Collective("all-reduce.1", "all-reduce", 4, int(1600e9), 3)
    found = estimate(plan_of(kernels, [collective]))
    # Two texts of 128 tokens behind the template's 34; each of 28 layers sums their activations twice.
    text = 2 * 162 * 28 + 2 * 28 * 2 * (1.5 * 162 * 3584 * 2) / 200e9
    decoding = 16 * 256 * 0.5
    expected = {
        "attention": 10,
        "QK norm and RoPE": 10,
        "norms and modulation": 0,
        REST: 2,
        COLLECTIVES: 36,
        TEXT: text,
        DECODING: decoding,
    }
    assert found.parts == pytest.approx(expected)
    assert found.seconds == pytest.approx(58 + text + decoding)
    assert found.overlapped_seconds == pytest.approx(36 + text + decoding)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    # With little to send, a collective takes its own cycles.
    small = dataclasses.replace(collective, bytes=8)
    assert estimate(plan_of(kernels, [small])).parts[COLLECTIVES] == pytest.approx(3)


@pytest.mark.parametrize(
    ("topology", "model", "devices", "gigabytes"),
    [
        ("v6e:2x4", 4, 4, 200),
        ("v6e:2x4", 4, 2, 100),
        ("v6e:1x4", 4, 4, 100),
        ("v5e:4x4", 8, 8, 100),
        ("tpu7x:2x2x1", 4, 4, 100),
        ("tpu7x:2x2x1", 8, 8, 200),
    ],
)
def test_what_a_chip_sends_around_a_ring(topology: str, model: int, devices: int, gigabytes: int):
    collective = Collective("all-reduce.1", "all-reduce", devices, 1, 1)
    found = ring_bytes_per_second(Slice.parse(topology), model, collective)
    assert found == pytest.approx(gigabytes * 1e9)


def test_compute_is_not_faster_than_the_published_peak():
    found = estimate(plan_of([Kernel("fusion.1", 1, 1)], []))
    denoising = found.compute - found.parts[TEXT] - found.parts[DECODING]
    assert denoising == pytest.approx(found.flops / (8 * 918e12))


def test_flops_of_the_model():
    """20.4 billion parameters, of which 6.8 in the modulation: 13.6 GFLOP per token in each direction."""
    config = DiTConfig()
    one = dataclasses.replace(CASE, guided=False, steps=1, text_tokens=512)
    tokens = 4096 + 512
    attention = 4 * tokens**2 * config.channels * config.layers
    linear = model_flops(one) - attention
    # Each token meets its own stream's weights, half of those outside of the modulation.
    assert linear / tokens == pytest.approx(13.6e9, rel=0.01)
    assert model_flops(CASE) == pytest.approx(100 * model_flops(one), rel=0.01)
    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    assert parameters == pytest.approx(20.4e9, rel=0.01)


def test_weights_of_a_device():
    whole = dataclasses.replace(CASE, table="stock", data=8, model=1).weight_bytes
    assert whole == pytest.approx(2 * 20.4e9, rel=0.01)
    # The modulation, a third of the parameters, stays whole on every chip, or is not there at all.
    stock = dataclasses.replace(CASE, table="stock").weight_bytes
    assert stock == pytest.approx(whole * (1 / 3 + 2 / 3 / 4), rel=0.01)
    assert CASE.weight_bytes == pytest.approx(whole * 2 / 3 / 4, rel=0.02)


@pytest.fixture(scope="module")
def compiled() -> CompiledPlan:
    tiny: dict[str, Any] = {"image_tokens": 128, "text_tokens": 128, "steps": 3, "config": TINY}
    return compile_plan(dataclasses.replace(CASE, topology="v6e:2x2", model=2, **tiny))


def test_a_compiled_program(compiled: CompiledPlan):
    calls = {kernel.name.partition(".")[0]: kernel.calls for kernel in compiled.schedule.kernels}
    assert calls["joint_attention_bounded"] == calls["qk_norm_rope"] == 2 * 3
    assert compiled.memory.arguments >= compiled.case.weight_bytes
    # Two sums of both streams per block and step, over the two chips of a model axis.
    layer = [each for each in compiled.collectives if each.calls == 6]
    assert sum(each.bytes for each in layer) == 2 * 256 * TINY.channels * 2
    found = estimate(compiled)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert all(seconds > 0 for seconds in found.parts.values())
    assert sum(found.cycles.values()) == compiled.schedule.cycles


def test_report_and_json(compiled: CompiledPlan, capsys: pytest.CaptureFixture[str]):
    row = Row(compiled.case, dollars_per_hour=2.0, plan=compiled, estimate=estimate(compiled))
    refused = Row(dataclasses.replace(compiled.case, data=4, model=1), 2.0, reason="it is too large")
    assert recommend([refused, row]) is row
    print_report([refused, row], Console(width=160))
    printed = capsys.readouterr().out
    assert "4 x 1: does not fit, it is too large" in printed
    assert "recommended: --mesh 2,2" in printed
    assert "predictions" in printed
    numbers = re.search(r"GiB on a device: (.*); sum ([\d.]+) of 32", " ".join(printed.split()))
    assert numbers is not None
    parts = [float(number) for number in re.findall(r"[\d.]+\d", numbers[1])]
    assert sum(parts) == pytest.approx(float(numbers[2]), abs=0.03)
    _, record = json.loads(to_json([refused, row], {"jax": "1"}))["meshes"]
    assert record["predicted_seconds"] == pytest.approx(sum(record["estimate"]["parts"].values()))
    assert record["images_per_dollar"] == pytest.approx(3600 / record["predicted_seconds"] / 2)


def test_the_text_encoder_goes_where_it_fits():
    """14.1 GB in all: 13 GB in the layers, 1.1 GB of embeddings."""
    assert stages.TEXT_ENCODER.weight_bytes(1) == pytest.approx(14.1e9, rel=0.01)
    assert stages.TEXT_ENCODER.weight_bytes(4) == pytest.approx(13.05e9 / 4 + 1.09e9, rel=0.01)
    plan = plan_of([], [])
    gib = 2**30

    def ways(used: int, **changes: Any) -> int | None:
        case = dataclasses.replace(plan.case, **changes)
        return text_encoder_ways(dataclasses.replace(plan, case=case, memory=Memory(used * gib, 0, 0, 0)))

    assert ways(25) == 4
    assert ways(26) is None
    assert ways(1, data=1, model=8) is None  # four key and value heads do not divide over eight
    assert ways(16, data=8, model=1) == 1
    assert ways(17, data=8, model=1) is None


@pytest.mark.parametrize("generation", list(CLOCK_HZ))
def test_stage_times_of_every_generation(generation: str):
    """Not below what the matrix units need: 13 GFLOP per token."""
    where = Slice.parse(f"{generation}:1x1")
    whole, quarter = (stages.text_seconds(generation, 512, ways) for ways in (1, 4))
    flops = 2 * 546 * 6.5e9 / (where.flops / where.chip.devices)
    assert flops < whole < 8 * flops
    assert whole / 5 < quarter < whole / 2
    assert 0.01 < stages.decoding_seconds(generation, 1024 * 1024) < 1


def test_several_batches_end_in_a_throughput_table(
    compiled: CompiledPlan, capsys: pytest.CaptureFixture[str]
):
    rows = [
        Row(
            dataclasses.replace(compiled.case, images=images), 2.0, plan=compiled, estimate=estimate(compiled)
        )
        for images in (1, 4)
    ]
    print_report(rows, Console(width=160))
    printed = capsys.readouterr().out
    assert "throughput, each with its best mesh" in printed
    ratio = rows[1].images_per_dollar / rows[0].images_per_dollar
    assert ratio == pytest.approx(4)


def test_weights_that_do_not_fit_are_not_compiled():
    (row,) = plan_rows([dataclasses.replace(CASE, topology="v5e:2x4", data=8, model=1)], None)
    assert row.reason == "its weights alone take 25.3 of 16 GiB"
    assert recommend([row]) is None
    assert row.dollars_per_hour == pytest.approx(8 * 1.20)


def test_cases_of_a_slice():
    cases = check_cases("v6e:2x4", None, (1024, 512), CASE)
    assert [(case.data, case.model) for case in cases] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert {case.image_tokens for case in cases} == {2048}
    several = check_cases("v6e:2x4", [(8, 1)], (1024, 512), CASE, (1, 8))
    assert [(case.images, case.data) for case in several] == [(1, 8), (8, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:2x4"], "a topology is a generation of"),
        (["--topology", "v6e:2x4", "--mesh", "3,4"], "allows the meshes"),
        (["--topology", "v6e:2x4", "--mesh", "8"], "a mesh is two positive numbers"),
        (["--topology", "v6e:2x4", "--height", "1000"], "height must be a positive multiple of 16"),
        (["--topology", "v6e:2x4", "--text-tokens", "500"], "text tokens must be one of"),
        (["--topology", "v6e:2x4", "--steps", "0"], "steps must be at least 1, but is 0"),
        (["--topology", "v6e:2x4", "--batch", "0"], "images must be at least 1, but is 0"),
        (["--topology", "v6e:2x4", "--price", "0"], "the price must be above 0"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("text", ["", "2", "2,4,1", "0,4", "-1,4", "a,b"])
def test_meshes_that_are_none(text: str):
    with pytest.raises(ValueError, match="a mesh is two positive numbers"):
        parse_mesh(text)


def test_a_mesh():
    assert parse_mesh("2, 4") == (2, 4)


def test_a_picture_of_the_parts(compiled: CompiledPlan, tmp_path: Path):
    row = Row(compiled.case, dollars_per_hour=2.0, plan=compiled, estimate=estimate(compiled))
    refused = Row(dataclasses.replace(compiled.case, data=4, model=1), 2.0, reason="it is too large")
    draw([refused, row, row], tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width == 850
