"""Clones that can be published, and what is common to publishing them to the tests' Hub."""

import json
import shutil
import subprocess
from io import StringIO
from pathlib import Path

from rich.console import Console

from kernel_trees import ROOT
from qwenimage_tpu.assemble import assemble
from qwenimage_tpu.lab.attention_report import KERNEL
from qwenimage_tpu.lab.results import sources_digest

PARTS = (
    "kernels_src/qwenimage_tpu_pallas",
    "torch_ext/qwenimage_tpu_kernels",
    "benchmarks",
    "build.toml",
    "CARD.md",
    "LICENSE",
)


def make_clone(root: Path) -> Path:
    """A git repository of this checkout's kernels, built and committed, and benchmarked by its own word: here
    the kernels may have changed since, which only a real release must not.
    """
    for part in PARTS:
        source, target = ROOT / part, root / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    benchmark = root / "benchmarks/attention.json"
    results = json.loads(benchmark.read_text())
    kernel = root / "kernels_src/qwenimage_tpu_pallas/attention.py"
    results["versions"][KERNEL] = sources_digest(kernel)
    benchmark.write_text(json.dumps(results))
    git(root, "init", "--quiet")
    build_and_commit(root)
    return root


def build_and_commit(root: Path) -> None:
    assemble(root, root / "build")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "all")


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class Printed(Console):
    """A console whose output can be read."""

    def __init__(self) -> None:
        super().__init__(file=StringIO(), width=200)

    @property
    def text(self) -> str:
        assert isinstance(self.file, StringIO)
        return self.file.getvalue()
