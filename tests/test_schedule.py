"""The cycle counter: kernels whose executed bundles are known by how they were made."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwenimage_tpu.lab.ahead_of_time import TOPOLOGIES, lower_program
from qwenimage_tpu.lab.bundles import ScheduleError, parse_bundles
from qwenimage_tpu.lab.compiled_program import compile_program
from qwenimage_tpu.lab.schedule import ProgramSchedule, Traffic, execute, read_schedule

# Compiled once each, in one process: how a loop, a condition and a nested condition change the count.
KERNELS = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from qwenimage_tpu.lab.ahead_of_time import lower_for

def kernel(grid, trips, once, nested):
    def body(x, out):
        step = pl.program_id(0)
        def add(_, carry):
            out[...] += jnp.exp(x[...])
            return carry
        jax.lax.fori_loop(0, trips, add, 0)
        if once:
            @pl.when(step == 1)
            def _():
                for _ in range(4):
                    out[...] += jnp.exp(out[...] * x[...])
                if nested:
                    @pl.when(x[0, 0] > 0)
                    def _():
                        for _ in range(4):
                            out[...] = jnp.exp(out[...] * x[...])
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        body, grid=(grid,), in_specs=[block], out_specs=block, name="probe",
        out_shape=jax.ShapeDtypeStruct((8 * grid, 128), jnp.float32),
    )

case = json.loads(sys.argv[1])
x = jax.ShapeDtypeStruct((8 * case["grid"], 128), jnp.float32)
lower_for("v6e:2x2", kernel(**case), [x]).compile()
"""
# name: grid steps, trips of the inner loop, a pl.when taken in one step, another inside it
CASES: dict[str, tuple[int, int, bool, bool]] = {
    "plain": (8, 3, False, False),
    "grid doubled": (16, 3, False, False),
    "loop doubled": (8, 6, False, False),
    "once": (8, 3, True, False),
    "once, grid doubled": (16, 3, True, False),
    "nested": (8, 3, True, True),
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """How often each bundle of each kernel runs."""
    counts: dict[str, list[int]] = {}
    for name, (grid, trips, once, nested) in CASES.items():
        folder = tmp_path_factory.mktemp("dumps")
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
        case = {"grid": grid, "trips": trips, "once": once, "nested": nested}
        subprocess.run(
            [sys.executable, "-c", KERNELS, json.dumps(case)],
            env=os.environ | {"LIBTPU_INIT_ARGS": f"{flags} --xla_jf_emit_annotations=true"},
            check=True,
            capture_output=True,
        )
        schedule = read_schedule(folder)
        (probe,) = [kernel for kernel in schedule.kernels if kernel.name.startswith("probe")]
        (path,) = folder.glob(f"*-{probe.name}-??-final_bundles.txt")
        counts[name] = execute(parse_bundles(path.read_text())).counts
        assert probe.cycles == sum(counts[name])
        assert probe.calls == 1
    return counts


def bundles_run(counts: list[int], times: int) -> int:
    return counts.count(times)


def test_the_grid_and_the_loop_multiply(executed: dict[str, list[int]]):
    assert bundles_run(executed["plain"], 8 * 3) == bundles_run(executed["grid doubled"], 16 * 3)
    assert bundles_run(executed["plain"], 8 * 3) == bundles_run(executed["loop doubled"], 8 * 6) > 4


def test_a_condition_taken_once_counts_once(executed: dict[str, list[int]]):
    once = bundles_run(executed["once"], 1)
    assert once > bundles_run(executed["plain"], 1) + 4
    assert bundles_run(executed["once, grid doubled"], 1) == once


def test_a_condition_on_data_counts_as_taken(executed: dict[str, list[int]]):
    more = sum(executed["nested"]) - sum(executed["once"])
    assert more > 4
    assert bundles_run(executed["nested"], 1) > bundles_run(executed["once"], 1)


BLOCK = (512, 256)  # of f32


def examine_copy(
    generation: str, grid: int, *, revisit: bool = False, parallel: bool = False
) -> ProgramSchedule:
    """A kernel that writes a block in each step, copied from its own block of the input or from the first."""

    def body(x: Any, out: Any) -> None:
        out[...] = x[...]

    semantics = "parallel" if parallel else "arbitrary"
    copy = pl.pallas_call(
        body,
        grid=(grid,),
        in_specs=[pl.BlockSpec(BLOCK, lambda step: (0 if revisit else step, 0))],
        out_specs=pl.BlockSpec(BLOCK, lambda step: (step, 0)),
        out_shape=jax.ShapeDtypeStruct((grid * BLOCK[0], BLOCK[1]), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        name="copy_blocks",
    )
    x = jax.ShapeDtypeStruct((grid * BLOCK[0], BLOCK[1]), jnp.float32)
    return compile_program(lower_program(generation, copy, [x]), TOPOLOGIES[generation]).schedule


def test_bytes_moved_are_those_of_the_blocks():
    size = 4 * BLOCK[0] * BLOCK[1]
    assert examine_copy("v6e", 4).traffic == Traffic(read=4 * size, written=4 * size)
    assert examine_copy("v6e", 8).traffic == Traffic(read=8 * size, written=8 * size)
    assert examine_copy("v6e", 4, revisit=True).traffic == Traffic(read=size, written=4 * size)


def test_two_cores_share_a_parallel_grid():
    size = 4 * BLOCK[0] * BLOCK[1]
    alone, shared = examine_copy("v5p", 8), examine_copy("v5p", 8, parallel=True)
    assert alone.traffic == shared.traffic == Traffic(read=8 * size, written=8 * size)
    (one,) = [kernel.cycles for kernel in alone.kernels if kernel.name.startswith("copy_blocks")]
    (two,) = [kernel.cycles for kernel in shared.kernels if kernel.name.startswith("copy_blocks")]
    assert 0.4 < two / one < 0.6


SEPARATE = """
     0   :  { %s1_s0 = smov 0 /* Start region 9 is no marker here */ }
   0x1 LB: > { %s2_s0 = sphi %s1_s0, %s3_s0  ;;  %s3_s0 = sadd.s32 1, %s2_s0 } /* Start region 1 */
   0x2   : > { %p4_p0 = scmp.ge.s32.totalorder %s3_s0, 7  ;;  %s5_s1 = sld [smem:[#allocation2]] }
   0x3   : > { %6 = sbr.rel (!%p4_p0) target = $region1 }
   0x4   : > {} /* End region 1 */
   0x5   :  { %p7_p0 = scmp.eq.s32.totalorder %s5_s1, 3 }
   0x6   :  { %8 = sbr.rel (%p7_p0) target = $region2 } /* Start region 3 */
   0x7   :  {} /* End region 3 */
   0x8   :  { %9 = vnop }
   0x9   :  { %10 = vnop } /* Start/End empty region 2 */
"""


def test_loops_conditions_and_delay_slots():
    execution = execute(parse_bundles(SEPARATE))
    assert execution.counts == [1, 7, 7, 7, 7, 1, 1, 1, 1, 1]
    assert execution.cycles == 34
    assert execution.unknown == {6}
    skipped = execute(parse_bundles(SEPARATE), enter_unknown=False)
    assert skipped.counts == [1, 7, 7, 7, 7, 1, 1, 1, 0, 1]
    assert skipped.unknown == {6}


def test_a_known_scalar_decides():
    text = SEPARATE.replace("%s5_s1 = sld [smem:[#allocation2]]", "%s5_s1 = smov 3")
    execution = execute(parse_bundles(text))
    assert execution.counts == [1, 7, 7, 7, 7, 1, 1, 1, 0, 1]
    assert not execution.unknown


GUARDED = """
     0   :  { %p2_p0 = scmp.gt.f32.partialorder %s1_s0, 0.0 }
   0x1   :  { %s3_s1 = smov (%p2_p0), 0  ;;  %s7_s4 = smov (!%p2_p0), 9 }
   0x2   :  { %4 = sbr.rel (!%p2_p0) target = $region2 }
   0x3   :  {} /* End region 1 */
   0x4 LB: > { %s5_s2 = sphi %s3_s1, %s6_s3 } /* Start region 3 */
   0x5   : > { %s6_s3 = sadd.s32 1, %s5_s2 }
   0x6   : > { %p7_p1 = scmp.ge.s32.totalorder %s6_s3, 3 }
   0x7   : > { %8 = sbr.rel (!%p7_p1) target = $region3 } /* End region 3 */
   0x8   :  { %9 = vnop } /* Start/End empty region 2 */
"""


def test_a_region_is_entered_with_what_its_predicate_allowed():
    """Its loop's counter was set before the branch, if the branch would not skip it."""
    assert execute(parse_bundles(GUARDED)).counts == [1, 1, 1, 1, 3, 3, 3, 3, 1]
    assert execute(parse_bundles(GUARDED), enter_unknown=False).counts == [1, 1, 1, 1, 0, 0, 0, 0, 1]


def test_a_loop_that_depends_on_data_is_refused():
    text = SEPARATE.replace("sadd.s32 1, %s2_s0", "sld [smem:[#allocation3]]")
    with pytest.raises(ScheduleError, match="loop that ends in bundle 0x3 depends on data"):
        execute(parse_bundles(text))
    # On several chips it waits for another one.
    waiting = execute(parse_bundles(text), many_chips=True)
    assert waiting.counts[1] == 1
    assert 3 in waiting.unknown


COPIES = """
     0   :  { %s1_s0 = sld [smem:[#allocation2]] /* megacore core id :: core id */  ;;  %s9_s5 = smov 3 }
   0x1   :  { %p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0  ;;  %s3_s1 = sld [smem:[#allocation3]] }
   0x2   :  { %p4_p1 = scmp.eq.s32.totalorder %s3_s1, 0 }
   0x3   :  { %5 = sbr.rel (%p2_p0) target = $region2 }
   0x4   :  {} /* End region 1 */
   0x5   :  { %6 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s9_s5, /*size_in_granules=*/16, /*vmem=*/%s7_s2 }
   0x6   :  { %7 = dma.vmem_to_hbm [thread:$0]  (%p2_p0), /*vmem=*/%s9_s5, /*size_in_granules=*/99 }
   0x7   :  { %8 = dma.vmem_to_hbm [thread:$0]  (!%p2_p0), /*vmem=*/%s9_s5, /*size_in_granules=*/%s9_s5 }
   0x8   :  { %8 = dma.vmem_to_vmem [thread:$0]  /*vmem=*/%s9_s5, /*size_in_granules=*/5 }
   0x9   :  { %8 = dma.hbm_to_smem [thread:$0]  (%p4_p1), /*hbm=*/%s9_s5, /*size_in_granules=*/1 }
   0xa   :  { %s10_s4 = scalar_lea.hbm %s9_s5, 1  ;;  %s11_s6 = int_to_ptr.vmem [resolvable:$true] %s9_s5 }
   0xb   :  { %12 = dma.general /*src=*/%s11_s6, /*size_in_granules=*/100, /*dst=*/%s10_s4, /*x=*/0 /* x */ }
   0xc PF:  {} /* exit bundle: %copy = copy(%x) */
"""


def test_copies_count_where_their_predicate_holds():
    bundles = parse_bundles(COPIES)
    assert execute(bundles, core=0).traffic == Traffic(read=32 * 17, written=32 * 103, uncertain=1)
    assert execute(bundles, core=1).counts == [1] * 5 + [0] * 7 + [1]
    assert execute(bundles, core=1).traffic == Traffic()


def test_a_last_bundle_may_do_something():
    bundles = parse_bundles(
        COPIES.replace("PF:  {} /* exit", "PF:  { %9 = vsyncpa [#allocation7], 1 } /* exit")
    )
    assert execute(bundles, core=1).counts == [1] * 5 + [0] * 7 + [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no bundles", "the dump holds no bundles"),
        ("     0   :  { %1 = sbr.rel somewhere }", "branch is of an unknown form: %1 = sbr.rel somewhere"),
        ("     0   :  { %1 = sbr.rel target = $region4 }", "branches to region 4, which starts nowhere"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str):
    with pytest.raises(ScheduleError, match=message.replace("$", r"\$")):
        execute(parse_bundles(text))


def test_a_folder_without_dumps(tmp_path: Path):
    with pytest.raises(ScheduleError, match="holds no dump of a program"):
        read_schedule(tmp_path)


def test_a_missing_dump_of_a_called_kernel(tmp_path: Path):
    text = "     0   :  { %1 = inlined_call %s1_s0 /* %fusion.7 = fusion(%x) */ }"
    (tmp_path / "123-TLP-73-final_bundles.txt").write_text(text)
    with pytest.raises(ScheduleError, match=r"no dump of \['fusion.7'\], which the program calls"):
        read_schedule(tmp_path)


@pytest.mark.parametrize(
    ("opcode", "a", "b", "result"),
    [
        ("sadd.s32", 2**32 - 1, 2, 1),
        ("ssub.s32", 1, 2, 2**32 - 1),
        ("sshra.s32", 2**32 - 8, 1, 2**32 - 4),
        ("sshrl.u32", 2**32 - 8, 1, 2**31 - 4),
        ("smin.s32", 2**32 - 1, 1, 2**32 - 1),
        ("scmp.lt.s32.totalorder", 2**32 - 1, 0, 1),
        ("scmp.lt.u32.totalorder", 2**32 - 1, 0, 0),
    ],
)
def test_words_wrap_and_have_signs(opcode: str, a: int, b: int, result: int):
    text = (
        f"     0   :  {{ %s1_s0 = {opcode} {a}, {b} }}\n"
        f"   0x1   :  {{ %p2_p0 = scmp.eq.s32.totalorder %s1_s0, {result} }}\n"
        "   0x2   :  { %3 = sbr.rel (%p2_p0) target = $region1 } /* Start region 2 */\n"
        "   0x3   :  {} /* End region 2 */\n   0x4   :  {}\n   0x5   :  {} /* Start region 1 */"
    )
    assert execute(parse_bundles(text)).counts[4] == 0
