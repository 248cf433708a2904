"""A tiny QwenImage pipeline of the real diffusers and transformers classes, with weights from a seed.

It is what the tests run: every code path of the real pipeline in a few megabytes, without a download. Its
pictures are abstract, but they depend on the prompt and on the seed. (`--demo` runs the trained model of
`qwenimage_tpu.painting`, whose text encoder and tokenizer are made here too.)
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

TEXT_DIM = 128
# Of the pixels, which span -1 to 1.
PICTURE_DEVIATION = 0.4
# More than the trainer needs for one token per word of the template; it stops by itself.
VOCAB_LIMIT = 2048
# <|endoftext|> must be the first: Qwen2Tokenizer gives it id 0 in an empty vocabulary.
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
NORM_WEIGHT = re.compile(r"txt_norm\.weight|.*\.attn\.norm_(added_)?[qk]\.weight")
LOUD_WEIGHT = re.compile(
    r"proj_out\.weight|.*\.(img_mod\.1|txt_mod\.1|attn\.to_out\.0|attn\.add_v_proj)\.weight"
)


def tiny_pipeline(seed: int = 0, dtype: torch.dtype = torch.float32) -> QwenImagePipeline:
    """Build the pipeline on the CPU. The same seed gives the same weights; torch's global RNG is untouched.

    Raises ValueError if the tokenizer does not encode the prompt template's prefix as exactly the tokens
    that the pipeline drops.
    """
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae, text_encoder, transformer = _vae(), build_text_encoder(tokenizer), _transformer()
    for model in (vae, text_encoder, transformer):
        # diffusers' own `to` warns about modules to be kept in float32 even where there are none.
        nn.Module.to(model, dtype)
    return QwenImagePipeline(
        scheduler=_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _prompt_template() -> tuple[str, int]:
    """The pipeline's prompt template and how many leading tokens of it the pipeline drops."""
    absent: Any = None
    empty = QwenImagePipeline(absent, absent, absent, absent, absent)
    return empty.prompt_template_encode, empty.prompt_template_encode_start_idx


def build_tokenizer(texts: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Byte-level BPE over the words of the prompt template and of `texts`: each of them becomes one token.

    Elsewhere each byte is one. Raises ValueError if the template's prefix does not become exactly the tokens
    that the pipeline drops.
    """
    template, prefix_length = _prompt_template()
    rules = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = rules.normalizer
    bpe.pre_tokenizer = rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT,
        min_frequency=1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*re.split(r"<\|\w+\|>|{}", template), *texts], trainer)
    trained = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(pair) for pair in trained["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        extra_special_tokens=SPECIAL_TOKENS[1:],
    )
    _check_prefix(tokenizer, template, prefix_length)
    return tokenizer


def _check_prefix(tokenizer: Qwen2Tokenizer, template: str, prefix_length: int) -> None:
    tokens = len(tokenizer(template.split("{}")[0]).input_ids)
    if tokens != prefix_length:
        raise ValueError(
            f"the prompt template's prefix must take the {prefix_length} tokens that the pipeline drops, but"
            f" the tokenizer makes {tokens} of it; raise VOCAB_LIMIT ({VOCAB_LIMIT}) to give each word one"
        )


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Two layers of TEXT_DIM, with random weights from torch's global generator."""
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_DIM,
            "intermediate_size": 2 * TEXT_DIM,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": TEXT_DIM,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


@torch.no_grad()
def _transformer() -> QwenImageTransformer2DModel:
    transformer = QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=128, joint_attention_dim=TEXT_DIM
    ).eval()
    for name, parameter in transformer.named_parameters():
        if NORM_WEIGHT.fullmatch(name):
            # A norm weight of exactly one would hide a kernel that forgets it.
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        elif LOUD_WEIGHT.fullmatch(name):
            # At the default scale the text would move the picture by a tenth of a grey level.
            parameter.mul_(4)
    return transformer


@torch.no_grad()
def _vae() -> AutoencoderKLQwenImage:
    """The decoder's last layer is scaled so that unit-variance latents give a picture of normal contrast."""
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    pixels = vae.decode(torch.randn(1, 16, 1, 16, 16), return_dict=False)[0]
    deviation, mean = torch.std_mean(pixels, dim=(0, 2, 3, 4))
    gain = PICTURE_DEVIATION / deviation
    last: Any = vae.decoder.conv_out
    last.weight.mul_(gain.view(-1, 1, 1, 1, 1))
    last.bias.copy_((last.bias - mean) * gain)
    return vae


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    """QwenImage's published scheduler settings."""
    return FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
