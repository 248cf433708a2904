"""The command line of `generate` as one value, checked before anything heavy is imported."""

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .environment import process_count
from .options import GenerateOptions

INDEX_FILE = "model_index.json"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line: the picture's options, and where the model comes from and the pictures go."""

    options: GenerateOptions
    model: str | None
    demo: bool
    dtype: str
    device: str
    text_encoder_device: str
    engine: str
    mesh: tuple[int, int] | None
    output: Path
    compare: bool
    contact_sheet: bool

    def __post_init__(self) -> None:
        check_model_choice(self.model, self.demo)
        if self.model is not None:
            check_local_model(self.model)
        self._check_devices()
        self._check_engine()
        check_output(self.output)
        check_writable(self.output)
        if self.contact_sheet:
            check_contact_sheet(self.output)
        if not self.options.kernels:
            self._check_no_kernel_flags()

    def _check_devices(self) -> None:
        if self.device == "cpu" and self.text_encoder_device == "tpu":
            raise ValueError(
                "--text-encoder-device tpu needs --device tpu, but the device is cpu; leave it out"
            )
        if self.device == "cpu" and self.options.compile:
            raise ValueError(
                f"--compile {self.options.compile} needs --device tpu, but the device is cpu; leave it out"
            )

    def _check_engine(self) -> None:
        processes = process_count()
        if self.engine == "torch":
            if self.mesh is not None and math.prod(self.mesh) != processes:
                raise ValueError(
                    "--mesh needs a process per device, as in qwenimage-tpu launch --nproc"
                    f" {math.prod(self.mesh)} generate ..., or --engine jax, but --nproc is {processes}"
                )
            return
        if processes > 1:
            raise ValueError(
                "--engine jax runs all devices from one process; call generate without the launcher"
            )
        flags = {
            "--no-kernels": not self.options.kernels,
            "--kernel-repo": self.options.kernel_repo is not None,
            "--compile": self.options.compile is not None,
            "--text-encoder-device tpu": self.text_encoder_device == "tpu",
        }
        for flag in (flag for flag, given in flags.items() if given):
            raise ValueError(f"{flag} needs --engine torch, but the engine is jax; leave one of them out")

    def _check_no_kernel_flags(self) -> None:
        flags = {"--compare": self.compare, "--kernel-repo": self.options.kernel_repo is not None}
        for flag in (flag for flag, given in flags.items() if given):
            raise ValueError(f"{flag} needs the kernels, but --no-kernels was given; leave one of them out")


def check_model_choice(model: str | None, demo: bool) -> None:
    """Raise ValueError unless exactly one of a model and the demo is chosen."""
    if (model is not None) == demo:
        given = "both were" if demo else "neither was"
        raise ValueError(
            f"exactly one of a model and the demo is needed, but {given} given; pass --model with a local"
            " folder or a Hub id like Qwen/Qwen-Image, or --demo for a tiny built-in model"
        )


def check_output(output: Path) -> None:
    """Raise ValueError unless `output` names a .png file, a folder, or a path without an extension."""
    if output.suffix and output.suffix.lower() != ".png" and not output.is_dir():
        raise ValueError(
            f"pictures are written as PNG, but the output path {output} ends in {output.suffix};"
            " end it in .png, or name a folder"
        )


def check_writable(output: Path) -> None:
    """Raise OSError unless a picture can be written there; leaves nothing behind.

    Asked before the work, so that no picture is lost at its end.
    """
    if output.exists() and not (output.is_file() or output.is_dir()):
        raise OSError(f"a picture cannot replace {output}, which is no ordinary file; choose another path")
    folder = output if output.is_dir() or not output.suffix else output.parent
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"nothing can be written to {output}: {folder} takes no new file ({error.strerror}); choose"
            " another path"
        ) from error


def check_report_path(output: Path) -> None:
    """Raise ValueError unless `output` names a file, OSError unless it can be written."""
    if output.is_dir():
        raise ValueError(f"the report is one file, but {output} is a folder; name a file")
    check_writable(output)


def check_local_model(model: str) -> None:
    """Raise OSError when `model` is a local path without a model in it; what looks like a Hub id passes."""
    folder = Path(model)
    if folder.is_dir() and model:
        if not (folder / INDEX_FILE).is_file():
            raise FileNotFoundError(
                f"a model folder must hold {INDEX_FILE}, but {model} does not; pass the folder that"
                " save_pretrained wrote, not one of its parts"
            )
    elif not HUB_ID.fullmatch(model):
        raise FileNotFoundError(f"{model!r} is neither an existing folder nor a Hub id like Qwen/Qwen-Image")


def check_contact_sheet(output: Path) -> None:
    """Raise ValueError unless `output` names a .png file."""
    if output.suffix.lower() != ".png" or output.is_dir():
        raise ValueError(
            f"a contact sheet is one PNG file, but the output path {output} does not name one; end it in .png"
        )


def picture_paths(output: Path, count: int) -> list[Path]:
    """One path per picture.

    "fox.png" is itself for one picture and fox-0.png, fox-1.png, ... for several; an existing folder or a
    path without an extension is a folder that gets image-0.png, image-1.png, ...
    """
    check_output(output)
    if output.is_dir() or not output.suffix:
        return [output / f"image-{index}.png" for index in range(count)]
    if count == 1:
        return [output]
    return [output.with_name(f"{output.stem}-{index}{output.suffix}") for index in range(count)]
