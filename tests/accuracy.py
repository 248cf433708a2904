"""Accuracy of a kernel: its error against float64, beside that of the plain computation on the same input."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Sequence[jax.Array | None]

# Half the spacing of the dtype's numbers, relative.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def random_array(
    rng: np.random.Generator, *shape: int, dtype: str = "float32", scale: float = 1
) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape) * scale, dtype)


def in_float64(function: Callable[..., Any], arguments: Arrays, **keywords: Any) -> list[np.ndarray]:
    """`function` of the arguments, floats widened to f64, as numpy arrays."""
    with jax.enable_x64(True):
        wide = [
            None if x is None else jnp.asarray(np.asarray(x, np.float64 if _is_float(x) else None))
            for x in arguments
        ]
        results = jax.jit(functools.partial(function, **keywords))(*wide)
        return [np.asarray(r) for r in (results if isinstance(results, tuple) else (results,))]


def rounded_everywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one program that rounds after each operation, as it does run one by one.

    One by one, each operation would compile for each shape.
    """
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False})


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def assert_as_accurate(
    actual: Any, plain: Any, exact: np.ndarray, *, reduction: int, condition: float = 1
) -> None:
    """The actual result's RMS and largest errors are at most twice the plain computation's.

    An error within the roundings that nothing can avoid, of the result and of an f32 sum of `reduction`
    terms, passes however lucky the plain computation was. `condition` is by how much those terms enlarge
    the relative error of what they are made of: exp(s) has that of s times |s|.
    """
    unit = UNIT_ROUNDOFF[str(actual.dtype).rsplit(".", maxsplit=1)[-1]]
    rounding = 2 * unit + UNIT_ROUNDOFF["float32"] * condition * reduction**0.5
    actual64, plain64 = np.asarray(actual, np.float64), np.asarray(plain, np.float64)
    assert np.isfinite(actual64).all()
    error, plain_error = actual64 - exact, plain64 - exact
    assert _rms(error) <= max(2 * _rms(plain_error), rounding * _rms(exact))
    largest = float(np.max(np.abs(exact)))
    assert np.max(np.abs(error)) <= max(2 * np.max(np.abs(plain_error)), rounding * largest)
