"""Read a transformer's safetensors straight into its shards: each device's slices, and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from safetensors import safe_open

from .config import DiTConfig, parameter_shapes

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SINGLE = "diffusion_pytorch_model.safetensors"
Index = tuple[slice, ...]  # of what a device holds


class Checkpoint:
    """The safetensors files of a transformer's folder.

    Raises OSError if a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        names = [SINGLE]
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {missing}; pass the folder of a model that save_pretrained wrote with"
                " safetensors"
            )
        self._files: list[Any] = [safe_open(folder / name, "np") for name in names]
        self._file_of = {name: file for file in self._files for name in list(file.keys())}

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ValueError for a tensor that no file has."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """The part of a tensor; only its bytes are read."""
        return self._slice(name)[index or ...]

    def norm_weights(self) -> dict[str, np.ndarray]:
        """Of the q and k norms of all blocks, by name."""
        return {name: self.read(name) for name in self._file_of if ".attn.norm_" in name}

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"the checkpoint has no tensor {name}; it is not a QwenImage transformer's")
        return self._file_of[name].get_slice(name)


def load_parameters(
    checkpoint: Checkpoint, config: DiTConfig, shardings: Mapping[str, NamedSharding], dtype: Any
) -> dict[str, jax.Array]:
    """The parameters that have a sharding, cast to `dtype`; those of the blocks stacked.

    Raises ValueError for a missing tensor and for one of another shape than the config says.
    """
    parameters: dict[str, jax.Array] = {}
    shapes = parameter_shapes(config)
    for name, sharding in shardings.items():
        _check_shapes(checkpoint, name, shapes[name])
        parameters[name] = jax.make_array_from_callback(
            shapes[name],
            sharding,
            lambda index, name=name: _read_shard(checkpoint, config, name, index, dtype),
        )
    return parameters


def load_layer(
    checkpoint: Checkpoint, name: str, layer: int, sharding: NamedSharding, dtype: Any
) -> jax.Array:
    """One layer's part of a stacked parameter. sharding: of that part. Raises ValueError if it is missing."""
    source = _sources(name, layer + 1)[layer]
    return jax.make_array_from_callback(
        checkpoint.shape(source), sharding, lambda index: checkpoint.read(source, index or ()).astype(dtype)
    )


def _read_shard(checkpoint: Checkpoint, config: DiTConfig, name: str, index: Any, dtype: Any) -> np.ndarray:
    """index: slices, of the layers first where they are stacked."""
    if not name.startswith("blocks."):
        return checkpoint.read(name, index).astype(dtype)
    parts = [checkpoint.read(source, index[1:]) for source in _sources(name, config.layers)[index[0]]]
    return np.stack([part.astype(dtype) for part in parts])


def _sources(name: str, layers: int) -> list[str]:
    """The checkpoint's names of a stacked parameter, by layer."""
    suffix = name.removeprefix("blocks.")
    return [f"transformer_blocks.{layer}.{suffix}" for layer in range(layers)]


def _check_shapes(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    stacked = name.startswith("blocks.")
    sources = _sources(name, shape[0]) if stacked else [name]
    expected = shape[1:] if stacked else shape
    for source in sources:
        if checkpoint.shape(source) != expected:
            raise ValueError(
                f"{source} must have the shape {expected} by the model's config, but has"
                f" {checkpoint.shape(source)}"
            )
