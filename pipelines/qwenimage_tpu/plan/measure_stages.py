"""Make stages.json: python -m qwenimage_tpu.plan.measure_stages [GENERATION...], half an hour for all four.

Both programs are captured from torch-tpu on the emulated device and compiled by the TPU's compiler: a layer
of the encoder for 512 tokens, counted per token, and the decoder for a small picture, counted per pixel, as
it is convolutions but for one attention layer.
"""

import json
import sys
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from rich.console import Console
from torch import nn
from transformers import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer

from qwenimage_tpu import emulator
from qwenimage_tpu.emulator.capture import capture
from qwenimage_tpu.lab.ahead_of_time import TOPOLOGIES
from qwenimage_tpu.lab.compiled_program import compile_program
from qwenimage_tpu.lab.program import Program
from qwenimage_tpu.lab.results import installed_versions, write_file

from .estimate import schedule_seconds
from .slices import Slice
from .stages import TABLE, TEMPLATE_TOKENS, TEXT_ENCODER

WAYS = (1, 2, 4)
TOKENS = 512 + TEMPLATE_TOKENS
SIDE, VAE_SCALE = 256, 8  # of the picture that is decoded


def text_layer(ways: int) -> Program:
    """One decoder layer's part on one of this many devices, without the sums over them."""
    model = TEXT_ENCODER
    config: Any = Qwen2_5_VLTextConfig(
        hidden_size=model.channels,
        intermediate_size=model.hidden // ways,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    layer = _on_tpu(lambda: _narrowed(Qwen2_5_VLDecoderLayer(config, 0), ways))
    hidden = torch.zeros(1, TOKENS, model.channels, dtype=torch.bfloat16, device="tpu")
    rope = torch.zeros(2, 1, TOKENS, model.head_dim, dtype=torch.bfloat16, device="tpu")
    # As the pipeline's: causal, with padding.
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="tpu")
    return capture(layer, hidden, attention_mask=mask, position_embeddings=(rope[0], rope[1]))


def _narrowed(layer: Qwen2_5_VLDecoderLayer, ways: int) -> nn.Module:
    """With the heads of one of `ways` devices."""
    attention: Any = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        whole = getattr(attention, name)
        setattr(attention, name, nn.Linear(whole.in_features, whole.out_features // ways))
    channels = attention.o_proj.in_features
    attention.o_proj = nn.Linear(channels // ways, channels, bias=False)
    return layer


def decoder() -> Program:
    vae = _on_tpu(AutoencoderKLQwenImage)
    side = SIDE // VAE_SCALE
    latents = torch.zeros(1, vae.config.z_dim, 1, side, side, dtype=torch.bfloat16, device="tpu")
    return capture(vae.decode, latents, return_dict=False)


def _on_tpu(build: Any) -> Any:
    """A model with weights of no meaning."""
    with torch.device("meta"):
        model = build()
    # diffusers' own `to` warns about modules to be kept in float32 even where there are none.
    return nn.Module.to(model.to_empty(device="cpu"), torch.bfloat16).requires_grad_(False).eval().to("tpu")


def measure(
    generation: str, layers: dict[int, Program], decoding: Program, console: Console
) -> dict[str, Any]:
    """Predicted seconds, by the compiler's schedule."""
    topology = TOPOLOGIES[generation]
    where = Slice.parse(topology)

    def seconds(program: Program, what: str) -> float:
        with console.status(f"compiling {what} for {generation}"):
            # On tpu7x a gather of the decoder's, elsewhere 8% of its cycles, loops by data: once, then.
            return schedule_seconds(compile_program(program, topology, many_chips=True).schedule, where)

    per_token = {
        str(ways): seconds(layer, f"1/{ways} of a text layer") / TOKENS for ways, layer in layers.items()
    }
    per_pixel = seconds(decoding, "the decoder") / SIDE**2
    return {"text_layer_per_token": per_token, "decoding_per_pixel": per_pixel}


def main(generations: list[str]) -> None:
    emulator.start()
    console = Console(stderr=True)
    layers, decoding = {ways: text_layer(ways) for ways in WAYS}, decoder()
    table = json.loads(TABLE.read_text())["generations"] if TABLE.exists() else {}
    for generation in generations or list(TOPOLOGIES):
        table[generation] = measure(generation, layers, decoding, console)
        content = json.dumps({"versions": installed_versions(), "generations": table}, indent=1) + "\n"
        write_file(TABLE, lambda path, text=content: path.write_text(text))
        console.print(f"{generation}: {table[generation]}")


if __name__ == "__main__":
    main(sys.argv[1:])
