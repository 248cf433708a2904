"""Load a QwenImage pipeline from a folder, from the Hub, or the tiny model that comes with this package."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .environment import has_tpu
from .request import check_model_choice

PIPELINE_CLASS = "QwenImagePipeline"
INDEX_FILE = "model_index.json"
# Trained by us to paint coloured shapes; its README.md says how.
DEMO_MODEL = Path(__file__).parent / "painting" / "model"


def load_pipeline(model: str | None, demo: bool, dtype: torch.dtype) -> QwenImagePipeline:
    """Load on the CPU, with diffusers' own progress bars off.

    model: a local folder as `save_pretrained` writes it, or a Hub id like "Qwen/Qwen-Image"; None with
    `demo`, which loads the tiny model of this package.
    Raises ValueError if not exactly one of the two is given or if the model is of another pipeline class,
    OSError if the folder or the Hub model cannot be read.
    """
    check_model_choice(model, demo)
    model = str(DEMO_MODEL) if model is None else model
    _check_pipeline_class(model)
    pipe = QwenImagePipeline.from_pretrained(model, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _check_pipeline_class(model: str) -> None:
    found = _read_index(model).get("_class_name")
    if found != PIPELINE_CLASS:
        raise ValueError(
            f"only models of the class {PIPELINE_CLASS} can be run, but {model} is a {found}; choose a"
            " text-to-image QwenImage model"
        )


def _read_index(model: str) -> dict[str, Any]:
    path = Path(model) / INDEX_FILE if Path(model).is_dir() else Path(_download_index(model))
    if not path.is_file():
        raise FileNotFoundError(
            f"a model folder must hold {INDEX_FILE}, but {model} does not; pass the folder that"
            " save_pretrained wrote, not one of its parts"
        )
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


def move_pipeline(pipe: QwenImagePipeline, device: str) -> QwenImagePipeline:
    """Move the pipeline to "cpu" or "tpu"; "auto" takes the TPU if the machine has one.

    Raises ValueError if "tpu" is asked for but torch has no TPU device.
    """
    if device == "auto":
        device = "tpu" if has_tpu() else "cpu"
    if device == "tpu":
        _import_tpu_backend()
    return pipe.to(device)


def _import_tpu_backend() -> None:
    if not has_tpu():
        raise ValueError(
            "the device tpu needs TPU hardware, but there is no /dev/accel<number> or /dev/vfio/<number>; use"
            " --device cpu, or run on a TPU VM"
        )
    try:
        # Importing it registers the device; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from doing so.
        importlib.import_module("torch_tpu")
    except ImportError as error:
        raise ValueError(
            f"the device tpu needs the package torch-tpu ({error}); install it: pip install torch-tpu"
        ) from error
