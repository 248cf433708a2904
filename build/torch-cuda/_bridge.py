"""One torch custom op out of one JAX function.

On a `tpu` tensor the op is torch-tpu's `jax_op`; on a `cpu` tensor it runs the function with JAX on the
CPU. torch-tpu is used when it is loaded (torch loads it by itself where it is installed) and never
imported here, so the kernel also works where it is absent.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import torch

from ._ops import NAMESPACE

TensorOrTensors = torch.Tensor | tuple[torch.Tensor, ...]


def torch_tpu_loaded() -> bool:
    """Whether torch has its `tpu` device type."""
    return "torch_tpu" in sys.modules


def define_op(
    jax_function: Callable[..., Any], schema: str, fake: Callable[..., TensorOrTensors]
) -> Callable[..., Any]:
    """Register `jax_function` as a torch op of this build and return the op.

    Args:
        jax_function: its parameters annotated ``jax.Array`` are tensors; all others are static. A last
            static parameter ``implementation`` chooses "kernel", "interpret" or "reference".
        schema: the torch schema that torch-tpu derives from the annotations; stated, so that the op
            is the same without torch-tpu.
        fake: shapes and dtypes of the results. torch-tpu's own refuses symbolic shapes.
    """
    name = f"{NAMESPACE}::{jax_function.__name__}"
    run_on_cpu = _cpu_implementation(jax_function)
    if torch_tpu_loaded():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax_op says once that it is experimental
            op = sys.modules["torch.tpu"].pallas.jax_op(name, jax_function)
        op.register_kernel("cpu")(run_on_cpu)
    else:
        op = torch.library.custom_op(name, run_on_cpu, mutates_args=(), device_types="cpu", schema=schema)
    op.register_fake(fake)
    return getattr(getattr(torch.ops, NAMESPACE), jax_function.__name__).default


def _cpu_implementation(jax_function: Callable[..., Any]) -> Callable[..., TensorOrTensors]:
    parameters = inspect.signature(jax_function).parameters
    static = [name for name, p in parameters.items() if p.annotation in (int, float, str)]
    jitted = jax.jit(jax_function, static_argnames=static)

    def run_on_cpu(*arguments: Any, **keywords: Any) -> TensorOrTensors:
        _keep_jax_off_the_tpu()
        bound = inspect.signature(jax_function).bind(*arguments, **keywords).arguments
        results = jitted(**{name: _to_jax(value) for name, value in bound.items()})
        # torch may overwrite the inputs as soon as the op returns.
        results = jax.block_until_ready(results)
        if isinstance(results, jax.Array):
            return torch.from_dlpack(results)
        return tuple(torch.from_dlpack(result) for result in results)

    return run_on_cpu


def _to_jax(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return jax.dlpack.from_dlpack(value.detach().contiguous())
    return value


def _keep_jax_off_the_tpu() -> None:
    """Make JAX's first use in this process a CPU one, unless the user chose a platform.

    JAX initialises every platform it finds at once. On a TPU host it would take the TPU away from
    torch-tpu; on any other machine where libtpu is installed it would search for a TPU for minutes.
    """
    if jax.config.jax_platforms is None:  # without effect once JAX is in use
        jax.config.update("jax_platforms", "cpu")
