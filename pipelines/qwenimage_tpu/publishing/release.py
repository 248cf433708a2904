"""What is published: the files of a release, made from a clone that has been checked."""

import io
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from qwenimage_tpu.assemble import BuildConfig, read_build_config, stale_files
from qwenimage_tpu.lab.attention_picture import check_picture, draw
from qwenimage_tpu.lab.attention_report import KERNEL, AttentionReport, from_json
from qwenimage_tpu.lab.results import sources_digest

from .card import TEMPLATE, fill_card
from .public_api import Declaration, public_api

BENCHMARK = "benchmarks/attention.json"
SCRIPT = "benchmarks/benchmark.py"
PICTURE = "benchmarks/attention-v6e.png"
PICTURED = "v6e"
BENCH_COMMAND = "qwenimage-tpu bench attention -g v6e -g v5e -g v5p -g tpu7x --json"


@dataclass(frozen=True)
class Release:
    """The files of a version by their path in the repository, and what they are made from.

    build_ids: of each variant. commit: of this clone.
    """

    config: BuildConfig
    files: dict[str, bytes]
    api: dict[str, Declaration]
    build_ids: dict[str, str]
    commit: str


def make_release(root: Path, repo: str) -> Release:
    """Check the clone at `root`, and put the release together in memory.

    Raises:
        ValueError: `root` is no clone, has uncommitted changes or a stale build, the benchmark is not of
            these kernels, or a file of the release is missing or wrong.
    """
    config = read_build_config(root)
    commit = check_tree_is_clean(root)
    if stale := stale_files(root):
        raise ValueError(
            f"build/ must be what the sources give, but {len(stale)} of its files differ, {stale[0]} the"
            " first: run `make build` and commit build/"
        )
    variants = sorted(path for path in (root / "build").iterdir() if path.is_dir())
    api = public_api(variants[0])
    reports, versions = read_benchmark(root, variants[0])
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted((root / "build").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for path in ("LICENSE", SCRIPT, BENCHMARK):
        files[path] = (root / path).read_bytes()
    files[PICTURE] = draw_picture(reports)
    files["README.md"] = fill_card(root / TEMPLATE, repo, config, api, reports, versions).encode()
    build_ids = {
        variant.name: json.loads((variant / "metadata.json").read_bytes())["id"] for variant in variants
    }
    return Release(config, files, api, build_ids, commit)


def check_tree_is_clean(root: Path) -> str:
    """The commit that is checked out. Raises ValueError if anything differs from it."""
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise ValueError(
            f"what is published must be committed, but git reports\n{changed}\ncommit, ignore or remove it"
        )
    return _git(root, "rev-parse", "HEAD")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            f"publishing takes a git clone of the project, but {root} is none ({done.stderr.strip()}): clone"
            " it"
        )
    return done.stdout.rstrip()


def read_benchmark(root: Path, variant: Path) -> tuple[list[AttentionReport], dict[str, str]]:
    """The committed results of `bench attention`, if they are of the kernel in the build."""
    path = root / BENCHMARK
    if not path.is_file():
        raise ValueError(f"{path} must hold the benchmark's results, but is missing: {_bench(path)}")
    reports, versions = from_json(path.read_text(encoding="utf-8"))
    measured = versions.get(KERNEL)
    built = sources_digest((variant / KERNEL.replace(".", "/")).with_suffix(".py"))
    if measured != built:
        raise ValueError(
            f"the benchmark must be of the kernel in build/, whose sources are {built}, but {path} is of"
            f" {measured}: {_bench(path)}"
        )
    if not any(report.generation == PICTURED for report in reports):
        raise ValueError(f"{path} must have results for {PICTURED}, which the card shows: {_bench(path)}")
    return reports, versions


def _bench(path: Path) -> str:
    return f"run `{BENCH_COMMAND} {path}` and commit it"


def draw_picture(reports: list[AttentionReport]) -> bytes:
    """The benchmark's bars as a PNG; the same bytes for the same results and matplotlib."""
    check_picture(Path(PICTURE))
    buffer = io.BytesIO()
    draw([report for report in reports if report.generation == PICTURED], buffer)
    return buffer.getvalue()
