"""What the user asks for, checked before torch is imported or any model loaded."""

import math
from dataclasses import dataclass
from typing import Literal

# Padded text lengths, in tokens: few, so that few programs are compiled.
TEXT_BUCKETS = (128, 256, 512, 1024)
# Of the attention kernel.
SoftmaxName = Literal["bounded", "exact", "online", "int8"]
# Of the JAX program's weights.
RuleTableName = Literal["sharded", "stock", "largest-dimension"]
# Tables with a row per step have a multiple of this many, so that another number of steps compiles nothing.
SCHEDULE_ROWS = 64
# QwenImage: the VAE shrinks 8 times, the transformer takes 2x2 patches of what is left.
SIZE_MULTIPLE = 16
# diffusers' documented habit for true CFG without a negative prompt.
DEFAULT_NEGATIVE_PROMPT = " "
# The side of the pictures that the demo's model was trained on, enough steps for it, and the guidance with
# which it paints best what it was trained on.
DEMO_SIZE, DEMO_STEPS, DEMO_TRUE_CFG_SCALE = 96, 16, 3.0


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """One call of the pipeline: `images_per_prompt` pictures of each prompt.

    Picture i (counted over all prompts) has the seed `seed + i`, so that it equals a run of its own.
    `true_cfg_scale` > 1 turns on classifier-free guidance with `negative_prompt`, or with " " if that is
    None. `text_bucket` fixes the padded text length; None takes the smallest of TEXT_BUCKETS that fits.
    `kernel_repo` None means the bundled build; `trust_remote_code` allows one on the Hub whose publisher is
    not trusted there. `softmax` None lets the kernels choose one that is exact for the model. `compile`
    "blocks" or "full" compiles the models, the transformer by its blocks or as a whole; None runs them
    eagerly.
    Raises ValueError with the rule, the value and the remedy.
    """

    prompts: tuple[str, ...]
    negative_prompt: str | None = None
    true_cfg_scale: float = 4.0
    height: int = 1024
    width: int = 1024
    steps: int = 50
    seed: int = 0
    images_per_prompt: int = 1
    text_bucket: int | None = None
    kernels: bool = True
    kernel_repo: str | None = None
    trust_remote_code: bool = False
    softmax: SoftmaxName | None = None
    compile: Literal["blocks", "full"] | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("at least one prompt is needed, but none was given")
        for prompt in (*self.prompts, self.negative_prompt or ""):
            _check_unicode(prompt)
        _check_at_least_one("steps", self.steps)
        _check_at_least_one("images per prompt", self.images_per_prompt)
        check_size(self.height, self.width)
        self._check_guidance()
        if self.trust_remote_code and self.kernel_repo is None:
            raise ValueError("--trust-remote-code is said of a --kernel-repo; name one, or leave it out")
        if self.softmax is not None and not self.kernels:
            raise ValueError(
                f"the {self.softmax} softmax belongs to the kernels, which are turned off; leave one out"
            )
        if self.text_bucket is not None and self.text_bucket not in TEXT_BUCKETS:
            raise ValueError(f"the text bucket must be one of {TEXT_BUCKETS}, but is {self.text_bucket}")
        if not 0 <= self.seed <= 2**63 - self.image_count:
            raise ValueError(
                f"every picture's seed must lie in [0, 2**63), but the first of {self.image_count} is"
                f" {self.seed}; choose another seed"
            )

    def _check_guidance(self) -> None:
        if not 1 <= self.true_cfg_scale < math.inf:
            raise ValueError(
                f"true_cfg_scale must be a finite number of at least 1, but is {self.true_cfg_scale}; 1 turns"
                " guidance off"
            )
        if not self.guided and self.negative_prompt is not None:
            raise ValueError(
                f"a negative prompt only acts with true_cfg_scale > 1, but true_cfg_scale is"
                f" {self.true_cfg_scale}; raise true_cfg_scale or leave the negative prompt out"
            )

    @property
    def image_count(self) -> int:
        return len(self.prompts) * self.images_per_prompt

    @property
    def guided(self) -> bool:
        """Whether true CFG is on."""
        return self.true_cfg_scale > 1

    @property
    def used_negative_prompt(self) -> str | None:
        """The negative prompt that the model sees; None without true CFG."""
        if not self.guided:
            return None
        return DEFAULT_NEGATIVE_PROMPT if self.negative_prompt is None else self.negative_prompt

    @property
    def buckets(self) -> tuple[int, ...]:
        return TEXT_BUCKETS if self.text_bucket is None else (self.text_bucket,)


def choose_mesh(options: GenerateOptions, devices: int) -> tuple[int, int]:
    """Data and model axis: the branches of true CFG, or two pictures, get half of the devices each, if that
    can be.
    """
    rows = options.image_count * (2 if options.guided else 1)
    data = 2 if rows % 2 == 0 and devices % 2 == 0 else 1
    return data, devices // data


def parse_mesh(text: str) -> tuple[int, int]:
    """The two sizes of a mesh such as "2,4". Raises ValueError for anything else."""
    sizes = [part.strip() for part in text.split(",")]
    if len(sizes) != 2 or not all(part.isdecimal() and int(part) for part in sizes):
        raise ValueError(f"a mesh is two positive numbers, DATA,MODEL, as in 2,4, but is {text!r}")
    return int(sizes[0]), int(sizes[1])


def check_size(height: int, width: int, multiple: int = SIZE_MULTIPLE) -> None:
    """Raise ValueError, naming the nearest valid sizes, unless both are positive multiples of `multiple`."""
    for name, value in (("height", height), ("width", width)):
        if value <= 0 or value % multiple:
            below = max(value // multiple, 0) * multiple
            nearest = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
            raise ValueError(
                f"{name} must be a positive multiple of {multiple}, but is {value}; the nearest valid"
                f" is {nearest}"
            )


def _check_unicode(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a prompt must be valid Unicode text, but {prompt!r} is not ({error.reason})"
        ) from error


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, but is {value}")
