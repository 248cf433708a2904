"""The TPU compiler takes every kernel: of one shape here, all of them in `make check-tpu`."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu.lab.ahead_of_time import TOPOLOGIES, lower_for
from qwenimage_tpu.lab.compile_check import compile_case
from qwenimage_tpu.lab.kernel_cases import KernelCase, kernel_cases
from qwenimage_tpu_pallas.layouts import HEAD_DIM, Ref
from qwenimage_tpu_pallas.shapes import QWENIMAGE_SHAPES
from qwenimage_tpu_pallas.softmax import Softmax

# One libtpu process at a time.
pytestmark = pytest.mark.xdist_group("libtpu")
# The awkward one: an image whose token count is odd.
SHAPE = QWENIMAGE_SHAPES[1]


def cases_and_generations() -> Iterator[Any]:
    """Every kernel for v6e and for one other generation in turn; the rest of the cross product is full."""
    others = [name for name in TOPOLOGIES if name != "v6e"]
    for index, case in enumerate(kernel_cases()):
        for generation in TOPOLOGIES:
            quick = generation in ("v6e", others[index % len(others)])
            marks = () if quick else pytest.mark.full
            name = case.name.replace(" ", "-")
            yield pytest.param(case, generation, marks=marks, id=f"{name}-{generation}")


@pytest.mark.parametrize(("case", "generation"), [*cases_and_generations()])
def test_compiles(case: KernelCase, generation: str):
    result = compile_case(case, SHAPE, "bfloat16", generation)
    assert not result.error


def test_a_refusal_is_reported():
    def refused(x: jax.Array) -> jax.Array:
        # Pallas lowers no sort for a TPU.
        def kernel(x_ref: Ref, out_ref: Ref) -> None:
            out_ref[...] = jnp.sort(x_ref[...], axis=0)

        return pl.pallas_call(kernel, out_shape=x)(x)

    case = KernelCase("refused", refused, lambda _, dtype: [jax.ShapeDtypeStruct((8, 128), dtype)])
    assert "sort" in compile_case(case, SHAPE, "float32", "v6e").error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softmax", kernels.SOFTMAXES)
def test_f32_matmuls_ask_for_full_precision(dtype: str, softmax: Softmax):
    """Interpret mode on a CPU multiplies f32 exactly whatever is asked, so read the kernel itself."""
    stream = jax.ShapeDtypeStruct((1, 256, HEAD_DIM), dtype)
    arguments = [stream] * 6 + [
        jax.ShapeDtypeStruct((1,), jnp.int32),
    ]
    jaxpr = jax.make_jaxpr(functools.partial(kernels.joint_attention, softmax=softmax))(*arguments)
    wanted = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    precisions = [eqn.params["precision"] for eqn in _dots(jaxpr.jaxpr)]
    assert precisions
    assert set(precisions) == {(wanted, wanted)}
    assert (
        "tpu_custom_call"
        in lower_for(
            TOPOLOGIES["v6e"], functools.partial(kernels.joint_attention, softmax=softmax), arguments
        ).as_text()
    )


def _dots(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _dots(inner)
