"""The command line of `generate` as one value, checked before anything heavy is imported."""

from dataclasses import dataclass
from pathlib import Path

from .options import GenerateOptions


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line: the picture's options, and where the model comes from and the pictures go."""

    options: GenerateOptions
    model: str | None
    demo: bool
    dtype: str
    device: str
    output: Path
    compare: bool
    contact_sheet: bool

    def __post_init__(self) -> None:
        check_model_choice(self.model, self.demo)
        check_output(self.output)
        if self.contact_sheet:
            check_contact_sheet(self.output)
        if not self.options.kernels:
            self._check_no_kernel_flags()

    def _check_no_kernel_flags(self) -> None:
        flags = {"--compare": self.compare, "--kernel-repo": self.options.kernel_repo is not None}
        for flag in (flag for flag, given in flags.items() if given):
            raise ValueError(f"{flag} needs the kernels, but --no-kernels was given; leave one of them out")


def check_model_choice(model: str | None, demo: bool) -> None:
    """Raise ValueError unless exactly one of a model and the demo is chosen."""
    if (model is not None) == demo:
        given = "both" if demo else "neither"
        raise ValueError(
            f"exactly one of a model and the demo is needed, but {given} was given; pass --model with a local"
            " folder or a Hub id like Qwen/Qwen-Image, or --demo for a tiny built-in model"
        )


def check_output(output: Path) -> None:
    """Raise ValueError unless `output` names a .png file, a folder, or a path without an extension."""
    if output.suffix and output.suffix.lower() != ".png" and not output.is_dir():
        raise ValueError(
            f"pictures are written as PNG, but the output path {output} ends in {output.suffix};"
            " end it in .png, or name a folder"
        )


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
