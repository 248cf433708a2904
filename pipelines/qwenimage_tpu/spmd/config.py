"""What a transformer's config.json says, as far as its computation depends on it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenimage_tpu_pallas.layouts import HEAD_DIM

TIME_CHANNELS = 256
# What the other members of the family switch on, and the JAX program does not have.
UNSUPPORTED = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Sizes of a `QwenImageTransformer2DModel`; the defaults are QwenImage's own.

    text_channels: of the text encoder. in_channels, out_channels: of an image token of 2 x 2 latent pixels.
    rope_axes: channels of a head that turn with the frame, the row and the column.
    """

    layers: int = 60
    heads: int = 24
    text_channels: int = 3584
    in_channels: int = 64
    out_channels: int = 64
    rope_axes: tuple[int, int, int] = (16, 56, 56)

    @property
    def channels(self) -> int:
        return self.heads * HEAD_DIM

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "DiTConfig":
        """From a model's config.

        Raises NotImplementedError for another head size and for features of the Edit and Layered models.
        """
        found = [name for name in UNSUPPORTED if config.get(name)]
        if found:
            raise NotImplementedError(
                f"the JAX engine runs the text-to-image model, but this one has {found}; use --engine torch"
            )
        if config["attention_head_dim"] != HEAD_DIM:
            raise NotImplementedError(
                f"heads must be {HEAD_DIM} wide, as QwenImage's are, but are {config['attention_head_dim']}"
            )
        patch = config["patch_size"] ** 2
        return cls(
            layers=config["num_layers"],
            heads=config["num_attention_heads"],
            text_channels=config["joint_attention_dim"],
            in_channels=config["in_channels"],
            out_channels=patch * (config["out_channels"] or config["in_channels"]),
            rope_axes=tuple(config["axes_dims_rope"]),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "DiTConfig":
        """From a transformer's folder, as `save_pretrained` writes it. Raises OSError without a config."""
        return cls.from_diffusers(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def is_modulation(name: str) -> bool:
    """Whether a parameter makes AdaLN's modulation: a third of all, and no token meets them."""
    return "_mod.1." in name or name.startswith(("time_text_embed.", "norm_out."))


def parameter_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by name: those of the checkpoint, where "blocks." stands for all blocks, stacked in the order
    of the layers, instead of "transformer_blocks.<layer>.".
    """
    wide, layers = config.channels, config.layers
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int, stacked: tuple[int, ...] = ()) -> None:
        shapes[f"{name}.weight"] = (*stacked, outputs, inputs)
        shapes[f"{name}.bias"] = (*stacked, outputs)

    linear("time_text_embed.timestep_embedder.linear_1", TIME_CHANNELS, wide)
    linear("time_text_embed.timestep_embedder.linear_2", wide, wide)
    shapes["txt_norm.weight"] = (config.text_channels,)
    linear("img_in", config.in_channels, wide)
    linear("txt_in", config.text_channels, wide)
    for stream in ("img", "txt"):
        linear(f"blocks.{stream}_mod.1", wide, 6 * wide, (layers,))
        linear(f"blocks.{stream}_mlp.net.0.proj", wide, 4 * wide, (layers,))
        linear(f"blocks.{stream}_mlp.net.2", 4 * wide, wide, (layers,))
    for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"):
        linear(f"blocks.attn.{name}", wide, wide, (layers,))
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        shapes[f"blocks.attn.{name}.weight"] = (layers, HEAD_DIM)
    linear("norm_out.linear", wide, 2 * wide)
    linear("proj_out", wide, config.out_channels)
    return shapes
