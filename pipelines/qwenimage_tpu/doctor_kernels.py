"""The doctor's checks that load the kernels: which build, does it run, which softmax a checkpoint gets."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from .doctor_checks import Check
from .environment import has_tpu
from .kernel_loader import KernelLoadError, LoadedKernels, load_kernels

NORM_WEIGHT = re.compile(r".*\.attn\.norm_(added_)?[qk]\.weight")
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"


def check_kernels(repo: str | None, trust_remote_code: bool, model: Path | None) -> list[Check]:
    """Load the kernels, run one, and ask for the checkpoint's softmax if a model folder is given."""
    try:
        loaded = load_kernels(repo, trust_remote_code=trust_remote_code)
    except KernelLoadError as error:
        return [Check("kernels", "problem", str(error), "see the message")]
    found = f"{loaded.repo}: variant {loaded.variant}, build {loaded.build_id}, digests verified"
    checks = [Check("kernels", "ok", found), check_smoke_run(loaded)]
    if model is not None:
        checks.append(check_checkpoint(loaded, model))
    return checks


def check_smoke_run(loaded: LoadedKernels) -> Check:
    """Run the RMSNorm kernel on the TPU, or in interpret mode without one, against its formula."""
    device = "tpu" if has_tpu() else "cpu"
    name = f"a kernel on {device}"
    generator = torch.Generator("cpu").manual_seed(0)
    x, weight = torch.randn(1, 8, 128, generator=generator), torch.randn(128, generator=generator)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    try:
        computed = loaded.module.rms_norm(x.to(device), weight.to(device), eps=1e-6).cpu()
    except Exception as error:  # whatever it is, the user is to read it in the table
        return Check(
            name, "problem", f"RMSNorm raised {type(error).__name__}: {error}", "see the versions above"
        )
    difference = float((computed - expected).abs().max())
    if not difference <= 1e-5:
        return Check(name, "problem", f"RMSNorm is off by {difference:.1e}", "report it with this table")
    return Check(name, "ok", f"RMSNorm is right to {difference:.1e}")


def check_checkpoint(loaded: LoadedKernels, model: Path) -> Check:
    """Which softmax the checkpoint gets, from its q and k norm weights alone."""
    name = f"softmax of {model}"
    try:
        softmax, bound = loaded.module.softmax_from_norm_weights(read_norm_weights(model))
    except (ValueError, OSError) as error:
        return Check(name, "problem", str(error), "pass the local folder of a QwenImage model")
    return Check(name, "ok", f"{softmax} (no logit is beyond {bound:.4g})")


def read_norm_weights(model: Path) -> dict[str, torch.Tensor]:
    """The q and k norm weights of a model folder's transformer by parameter name; nothing else is read.

    Raises FileNotFoundError if the folder holds no transformer in safetensors files.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(model / "transformer"):
        with safe_open(path, framework="pt") as file:
            for key in filter(NORM_WEIGHT.fullmatch, file.keys()):
                weights[key] = file.get_tensor(key)
    return weights


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {name for key, name in shards.items() if NORM_WEIGHT.fullmatch(key)}
        yield from (folder / name for name in sorted(names))
    elif (folder / WEIGHTS_FILE).is_file():
        yield folder / WEIGHTS_FILE
    else:
        raise FileNotFoundError(
            f"a local model folder must hold {WEIGHTS_FILE} or {INDEX_FILE} in its folder transformer, but"
            f" {folder} does not"
        )
