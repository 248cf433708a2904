"""Small source trees and builds in the project's layout, for the assembler's and the loader's tests."""

import json
import shutil
from pathlib import Path
from typing import Any

from qwenimage_tpu.assemble import assemble

ROOT = Path(__file__).resolve().parents[1]

SOURCES = {
    "kernels_src/qwenimage_tpu_pallas/__init__.py": "from .factor import FACTOR as FACTOR\n",
    "kernels_src/qwenimage_tpu_pallas/factor.py": "FACTOR = {factor}\n",
    "kernels_src/qwenimage_tpu_pallas/tuned.json": '{{"block_q": 512}}\n',
    "torch_ext/qwenimage_tpu_kernels/__init__.py": """\
import torch

from ._ops import NAMESPACE
from .qwenimage_tpu_pallas import FACTOR


@torch.library.custom_op(f"{{NAMESPACE}}::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def late_factor() -> float:
    from .late import LATE_FACTOR

    return LATE_FACTOR


__all__ = ["late_factor", "scale"]
""",
    "torch_ext/qwenimage_tpu_kernels/late.py": "LATE_FACTOR = {factor}\n",
}


def make_sources(root: Path, *, factor: float) -> Path:
    """Source trees whose op multiplies by `factor`; another factor gives another build id."""
    for relative, text in SOURCES.items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(factor=factor))
    shutil.copyfile(ROOT / "build.toml", root / "build.toml")
    return root


def make_build(root: Path, *, factor: float) -> Path:
    """A complete clone-like tree under `root`; returns its build folder."""
    make_sources(root, factor=factor)
    assemble(root, root / "build")
    return root / "build"


def edit_metadata(build: Path, **changes: Any) -> None:
    """Set keys of every variant's metadata.json; None deletes the key."""
    for path in build.glob("torch-*/metadata.json"):
        metadata = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in metadata.items() if value is not None}))


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
