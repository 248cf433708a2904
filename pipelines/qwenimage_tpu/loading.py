"""Load a QwenImage pipeline from a folder, from the Hub, or the tiny demo."""

import contextlib
import importlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
import transformers.utils.logging
from diffusers import QwenImagePipeline
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from . import emulator
from .environment import has_tpu, is_leader
from .request import INDEX_FILE, check_local_model, check_model_choice

PIPELINE_CLASS = "QwenImagePipeline"
# The tiny model that qwenimage_tpu.painting trained.
DEMO_MODEL = Path(__file__).parent / "painting" / "model"


def load_pipeline(
    model: str | None, demo: bool, dtype: torch.dtype, *, without: Sequence[str] = ()
) -> QwenImagePipeline:
    """Load on the CPU, with diffusers' own progress bars off.

    model: a local folder as `save_pretrained` writes it, or a Hub id like "Qwen/Qwen-Image"; None with
    `demo`, which is the tiny model that paints coloured shapes. without: names of components to leave out.
    Raises ValueError if not exactly one of the two is given or if the model is of another pipeline class,
    OSError if the folder or the Hub model cannot be read.
    """
    check_model_choice(model, demo)
    path = str(DEMO_MODEL) if model is None else model
    _check_pipeline_class(path)
    # Loading the demo takes no time that a bar could show, and of several processes one shows it.
    with contextlib.nullcontext() if model and is_leader() else no_progress_bars():
        left_out: dict[str, Any] = dict.fromkeys(without)
        pipe = QwenImagePipeline.from_pretrained(path, dtype=dtype, **left_out)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextlib.contextmanager
def no_progress_bars() -> Generator[None]:
    """Keep diffusers and transformers from drawing any inside."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    shown = [library.is_progress_bar_enabled() for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, was_shown in zip(libraries, shown, strict=True):
            if was_shown:
                library.enable_progress_bar()


def _check_pipeline_class(model: str) -> None:
    found = _read_index(model).get("_class_name")
    if found != PIPELINE_CLASS:
        raise ValueError(
            f"only models of the class {PIPELINE_CLASS} can be run, but {model} is a {found}; choose a"
            " text-to-image QwenImage model"
        )


def transformer_folder(model: str | None) -> Path:
    """Where the transformer's weights lie; None is the demo's. A model of the Hub is downloaded."""
    folder = DEMO_MODEL if model is None else Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(model), allow_patterns=["transformer/*"]))
    return folder / "transformer"


def _read_index(model: str) -> dict[str, Any]:
    check_local_model(model)
    path = Path(model) / INDEX_FILE if Path(model).is_dir() else Path(_download_index(model))
    return json.loads(path.read_text(encoding="utf-8"))


def _download_index(model: str) -> str:
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise FileNotFoundError(
            f"{model} is neither an existing folder nor a Hub id like Qwen/Qwen-Image"
        ) from error
    try:
        return hf_hub_download(model, INDEX_FILE)
    except OSError as error:
        raise OSError(
            f"{model} is not a local folder, and the Hub did not give its {INDEX_FILE}:"
            f" {_first_line(error)}\nCheck the name, the network and HF_HUB_OFFLINE, or pass a local folder."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def move_pipeline(pipe: QwenImagePipeline, device: str, text_encoder_device: str) -> QwenImagePipeline:
    """Move the pipeline, and its text encoder by itself, to "cpu" or "tpu".

    Raises ValueError if "tpu" is asked for but torch has no TPU device.
    """
    if "tpu" in (device, text_encoder_device):
        import_tpu_backend()
    pipe.to(device)
    pipe.text_encoder.to(text_encoder_device)
    return pipe


def import_tpu_backend() -> None:
    """Give torch its `tpu` device. Raises ValueError without TPU hardware or without torch-tpu."""
    if not has_tpu() and not emulator.started():
        raise ValueError(
            "the device tpu needs TPU hardware, but there is no /dev/accel<number> or /dev/vfio/<number>; run"
            " on a TPU VM, or without one: generate --device cpu, verify --emulated"
        )
    try:
        # Importing it registers the device; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from doing so.
        importlib.import_module("torch_tpu")
    except ImportError as error:
        raise ValueError(
            f"the device tpu needs the package torch-tpu ({error}); install it: pip install torch-tpu"
        ) from error
