"""Where each parameter lies on the mesh: tables of rules, the first that matches a name decides."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwenimage_tpu.options import RuleTableName

DATA, MODEL = "data", "model"
RuleTable = RuleTableName
# A spec, or what computes it from the shape of one layer's parameter and the size of the model axis.
Rule = tuple[str, P | Callable[[tuple[int, ...], int], P]]

COLUMNS = r"attn\.(to_[qkv]|add_[qkv]_proj)|(img|txt)_mlp\.net\.0\.proj"
ROWS = r"attn\.(to_out\.0|to_add_out)|(img|txt)_mlp\.net\.2"
TENSOR_PARALLEL: tuple[Rule, ...] = (
    # torch's weights are [outputs, inputs].
    (rf"blocks\.({COLUMNS})\.(weight|bias)", P(MODEL)),
    (rf"blocks\.({ROWS})\.weight", P(None, MODEL)),
)


def largest_dimension(shape: tuple[int, ...], size: int) -> P:
    """The largest dimension that the model axis divides, of several the first; else nothing.

    The rule of the PyTorch/XLA port of QwenImage.
    """
    divisible = [axis for axis, length in enumerate(shape) if length % size == 0]
    if not divisible:
        return P()
    largest = max(divisible, key=lambda axis: shape[axis])
    return P(*[None] * largest, MODEL)


TABLES: dict[RuleTable, tuple[Rule, ...]] = {
    # Tensor parallelism, and the modulation by its outputs, while a schedule's table is made of it.
    "sharded": (*TENSOR_PARALLEL, (r"blocks\.(img|txt)_mod\.1\.(weight|bias)", P(MODEL))),
    # diffusers' _tp_plan: it leaves the modulation whole on every chip.
    "stock": TENSOR_PARALLEL,
    "largest-dimension": ((r".*", largest_dimension),),
}


def partition_specs(shapes: Mapping[str, tuple[int, ...]], table: RuleTable, model_size: int) -> dict[str, P]:
    """A spec per parameter. Names that no rule matches stay whole on every chip.

    Raises ValueError where a rule splits a dimension that the model axis does not divide.
    """
    return {name: _spec(name, shape, TABLES[table], model_size) for name, shape in shapes.items()}


def _spec(name: str, shape: tuple[int, ...], rules: Sequence[Rule], model_size: int) -> P:
    stacked = name.startswith("blocks.")
    layer_shape = shape[1:] if stacked else shape
    for pattern, rule in rules:
        if re.fullmatch(pattern, name):
            spec = rule if isinstance(rule, P) else rule(layer_shape, model_size)
            break
    else:
        return P()
    for axis, length in zip(spec, layer_shape, strict=False):
        if axis is not None and length % model_size:
            raise ValueError(
                f"{name} has {length} rows or columns, which {model_size} chips cannot share; choose a model"
                " axis that divides them"
            )
    return P(None, *spec) if stacked else spec


def shardings(specs: Mapping[str, P], mesh: Mesh) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def make_mesh(devices: Sequence[Any], data: int, model: int) -> Mesh:
    """A mesh ("data", "model"). On TPUs each model axis is a compact block of neighbouring chips.

    Raises ValueError unless there are data * model devices.
    """
    if data < 1 or model < 1 or data * model != len(devices):
        raise ValueError(
            f"a mesh of {data} x {model} needs {data * model} devices, but there are {len(devices)}; choose"
            " two factors of that"
        )
    ordered = by_blocks(devices, model) if hasattr(devices[0], "coords") else list(devices)
    return Mesh(np.array(ordered, dtype=object).reshape(data, model), (DATA, MODEL))


def by_blocks(devices: Sequence[Any], model: int) -> list[Any]:
    """The devices block by block; in their own order where no block of chips tiles the slice."""
    grid = tuple(max(device.coords[axis] for device in devices) + 1 for axis in range(3))
    cores = len(devices) // math.prod(grid)
    block = compact_block(grid, -(-model // cores))
    if block is None:
        return list(devices)

    def position(device: Any) -> tuple[Any, ...]:
        parts = [divmod(at, size) for at, size in zip(device.coords, block, strict=True)]
        return tuple(part[0] for part in parts), _around([part[1] for part in parts]), device.core_on_chip

    return sorted(devices, key=position)


def _around(at: Sequence[int]) -> tuple[int, ...]:
    """A key that makes each chip of a block a neighbour of the next: row by row, to and fro."""
    first, second, third = at
    return third, first, second if first % 2 == 0 else -second


def compact_block(grid: Sequence[int], chips: int) -> tuple[int, ...] | None:
    """The least elongated block of this many chips that tiles the grid; None if there is none."""
    blocks = [
        block
        for block in itertools.product(*([d for d in range(1, n + 1) if n % d == 0] for n in grid))
        if math.prod(block) == chips
    ]
    return min(blocks, key=max, default=None)
