"""The assembled build: reproducible, complete, accepted by `kernels`, and replaced atomically."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernels import Metadata
from kernels._rust import Build, Digest

from kernel_trees import ROOT, SOURCES, make_build, make_sources, read_files
from qwenimage_tpu.assemble import assemble, read_build_config, stale_files

VARIANTS = ("torch-tpu", "torch-cpu", "torch-cuda")
# `kernels` lets a process load "cpu" and the backend that its torch was built for.
LOADABLE_BACKENDS = ("cpu", "cuda") if torch.version.cuda else ("cpu",)


def test_committed_build_is_up_to_date() -> None:
    assert stale_files(ROOT) == [], "run `make build` and commit build/"


LOAD_EVERY_VARIANT = """
import sys
from pathlib import Path
from kernels import get_kernel, get_local_kernel
build, *backends = sys.argv[1:]
modules = [get_local_kernel(Path(build), backend=backend) for backend in backends]
modules.append(get_local_kernel(Path(build) / "torch-tpu"))
assert get_kernel("org/qwenimage-tpu-kernels", version=1) in modules
for module in modules:
    assert all(hasattr(module, name) for name in module.__all__), module
    print(module.__name__)
"""


def test_kernels_loads_every_variant_of_the_committed_build() -> None:
    """In a process of its own: other tests may have registered the ops of the same build already."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD_EVERY_VARIANT, str(ROOT / "build"), *LOADABLE_BACKENDS],
        env=os.environ | {"LOCAL_KERNELS": f"org/qwenimage-tpu-kernels={ROOT / 'build'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for build_id, backend in zip(ran.stdout.split(), (*LOADABLE_BACKENDS, "tpu"), strict=True):
        assert build_id.startswith(f"_qwenimage_tpu_kernels_{backend}_")


def test_build_toml_is_kernel_builders_format(capfd: pytest.CaptureFixture[str]) -> None:
    build = Build.open(ROOT)
    assert [str(backend) for backend in build.general.backends] == ["tpu", "cpu", "cuda"]
    assert capfd.readouterr() == ("", "")
    hub = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]
    assert hub["repo-id"] == "org/qwenimage-tpu-kernels"


def test_two_runs_under_different_umasks_are_equal(tmp_path: Path) -> None:
    make_sources(tmp_path, factor=2.0)
    trees: list[dict[str, tuple[int, bytes]]] = []
    for name, umask in (("first", 0o022), ("second", 0o077)):
        before = os.umask(umask)
        try:
            variants = assemble(tmp_path, tmp_path / name)
        finally:
            os.umask(before)
        assert variants == [tmp_path / name / variant for variant in VARIANTS]
        trees.append(
            {
                str(p.relative_to(tmp_path / name)): (
                    p.stat().st_mode,
                    p.read_bytes() if p.is_file() else b"",
                )
                for p in (tmp_path / name).rglob("*")
            }
        )
    assert trees[0] == trees[1]
    assert {mode & 0o777 for mode, _ in trees[0].values()} == {0o644, 0o755}


def test_variant_holds_sources_generated_files_and_nothing_else(tmp_path: Path) -> None:
    make_sources(tmp_path, factor=2.0)
    package = tmp_path / "torch_ext/qwenimage_tpu_kernels"
    (package / "notes.txt").write_text("not shipped")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "late.py").write_text("not shipped")
    assemble(tmp_path, tmp_path / "build")
    assert sorted(read_files(tmp_path / "build" / "torch-cpu")) == [
        "__init__.py",
        "_ops.py",
        "late.py",
        "metadata.json",
        "qwenimage_tpu_kernels/__init__.py",
        "qwenimage_tpu_pallas/__init__.py",
        "qwenimage_tpu_pallas/factor.py",
        "qwenimage_tpu_pallas/tuned.json",
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_metadata_is_what_kernels_expects(tmp_path: Path, variant: str) -> None:
    folder = make_build(tmp_path, factor=2.0) / variant
    metadata = Metadata.read_from_file(folder / "metadata.json")
    config = read_build_config(tmp_path)
    assert (str(metadata.name), metadata.version, metadata.license) == (
        config.name,
        config.version,
        config.license,
    )
    assert f"torch-{str(metadata.backend.backend_type).lower()}" == variant
    assert metadata.id.isidentifier()
    assert f'NAMESPACE = "{metadata.id}"' in (folder / "_ops.py").read_text()
    assert metadata.digest is not None
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))


@pytest.mark.parametrize("changed", [*SOURCES, "build.toml"])
def test_build_id_follows_every_source(tmp_path: Path, changed: str) -> None:
    before = Metadata.read_from_file(make_build(tmp_path, factor=2.0) / "torch-cpu" / "metadata.json").id
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    assert stale_files(tmp_path)
    assemble(tmp_path, tmp_path / "build")
    assert Metadata.read_from_file(tmp_path / "build" / "torch-cpu" / "metadata.json").id != before


def test_line_endings_do_not_matter(tmp_path: Path) -> None:
    make_build(tmp_path, factor=2.0)
    for relative in SOURCES:
        path = tmp_path / relative
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert stale_files(tmp_path) == []


def test_stale_files_names_altered_missing_and_extra_files(tmp_path: Path) -> None:
    build = make_build(tmp_path, factor=2.0)
    assert stale_files(tmp_path) == []
    (build / "torch-cpu" / "late.py").write_text("LATE_FACTOR = 3.0\n")
    (build / "torch-tpu" / "_ops.py").unlink()
    (build / "torch-cuda" / "extra.py").touch()
    assert stale_files(tmp_path) == ["torch-cpu/late.py", "torch-cuda/extra.py", "torch-tpu/_ops.py"]


@pytest.mark.parametrize(
    "python_path", ["torch_ext/qwenimage_tpu_kernels/a.py", "kernels_src/qwenimage_tpu_pallas/a.py"]
)
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import qwenimage_tpu_pallas", "qwenimage_tpu_pallas"),
        ("import qwenimage_tpu_pallas.factor as factor", r"qwenimage_tpu_pallas\.factor"),
        ("from qwenimage_tpu_kernels import scale", "qwenimage_tpu_kernels"),
        ("from qwenimage_tpu.assemble import assemble", r"qwenimage_tpu\.assemble"),
        ("def f():\n    import os, qwenimage_tpu", "qwenimage_tpu"),
    ],
)
def test_absolute_import_is_refused(tmp_path: Path, python_path: str, line: str, named: str) -> None:
    make_sources(tmp_path, factor=2.0)
    (tmp_path / python_path).write_text(f"# first line\n{line}\n")
    number = 2 + line.count("\n")
    with pytest.raises(
        ValueError, match=rf"^{python_path}:{number} imports '{named}' absolutely; .*relatively"
    ):
        assemble(tmp_path, tmp_path / "build")


def test_names_that_only_begin_like_ours_are_allowed(tmp_path: Path) -> None:
    make_sources(tmp_path, factor=2.0)
    (tmp_path / "torch_ext/qwenimage_tpu_kernels/a.py").write_text(
        "import qwenimage_tpu_other\nfrom .late import LATE_FACTOR\nfrom . import qwenimage_tpu_pallas\n"
    )
    assemble(tmp_path, tmp_path / "build")


def _delete(relative: str) -> Callable[[Path], None]:
    return lambda root: (root / relative).unlink()


def _write(relative: str, text: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        (root / relative).write_text(text)

    return write


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_delete("build.toml"), r"build\.toml does not exist: run the build in a clone"),
        (_write("build.toml", "[general"), r"build\.toml is not valid TOML"),
        (_write("build.toml", '[general]\nname = "x"\n'), r"'version' is missing: add it"),
        (
            _delete("torch_ext/qwenimage_tpu_kernels/__init__.py"),
            r"must be a Python package with an __init__",
        ),
        (
            _write("torch_ext/qwenimage_tpu_kernels/_ops.py", ""),
            r"holds _ops\.py, which the build writes itself",
        ),
        (
            _write("torch_ext/qwenimage_tpu_kernels/metadata.json", "{}"),
            r"holds metadata\.json, which the build",
        ),
        (_write("build/notes.txt", ""), r"may hold only folders torch-<backend>, but there is .*notes\.txt"),
    ],
)
def test_faulty_tree_is_refused(tmp_path: Path, fault: Callable[[Path], None], message: str) -> None:
    make_sources(tmp_path, factor=2.0)
    fault(tmp_path)
    with pytest.raises(ValueError, match=message):
        assemble(tmp_path, tmp_path / "build")


def test_source_that_is_not_python_is_refused(tmp_path: Path) -> None:
    make_sources(tmp_path, factor=2.0)
    (tmp_path / "torch_ext/qwenimage_tpu_kernels/a.py").write_text("def f(:\n")
    with pytest.raises(SyntaxError, match=r"a\.py, line 1"):
        assemble(tmp_path, tmp_path / "build")


@pytest.mark.parametrize(("method", "interrupted_call"), [("write_bytes", 7), ("rename", 1), ("rename", 2)])
def test_interrupted_run_keeps_the_old_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, interrupted_call: int
) -> None:
    before = read_files(make_build(tmp_path, factor=2.0))
    make_sources(tmp_path, factor=3.0)
    original = getattr(Path, method)
    calls = 0

    def interrupt(path: Path, argument: object) -> object:
        nonlocal calls
        calls += 1
        if calls == interrupted_call:
            raise KeyboardInterrupt("in the middle")
        return original(path, argument)

    monkeypatch.setattr(Path, method, interrupt)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        assemble(tmp_path, tmp_path / "build")
    monkeypatch.undo()

    assert read_files(tmp_path / "build") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["build", "build.toml", "kernels_src", "torch_ext"]
    assemble(tmp_path, tmp_path / "build")
    assert read_files(tmp_path / "build") != before


@pytest.mark.parametrize("shim_first", [True, False])
def test_old_loaders_get_the_same_module(tmp_path: Path, shim_first: bool) -> None:
    """Importing both ways registers the build's ops once."""
    variant = make_build(tmp_path, factor=5.0 + shim_first) / "torch-cpu"
    build_id = Metadata.read_from_file(variant / "metadata.json").id

    def load(name: str, path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    if not shim_first:
        load(build_id, variant / "__init__.py")
    shim = load(f"old_loader_{shim_first}", variant / "qwenimage_tpu_kernels" / "__init__.py")
    kernel = sys.modules[build_id]
    assert shim.__all__ == kernel.__all__ == ["late_factor", "scale"]
    assert shim.scale is kernel.scale
    assert torch.equal(kernel.scale(torch.ones(2)), torch.full((2,), 5.0 + shim_first))


def test_command_builds_and_checks(tmp_path: Path) -> None:
    make_sources(tmp_path, factor=2.0)
    package = tmp_path / "pipelines" / "qwenimage_tpu"
    package.mkdir(parents=True)
    for name in ("__init__.py", "assemble.py", "cli.py", "environment.py", "options.py"):
        shutil.copy(ROOT / "pipelines/qwenimage_tpu" / name, package)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "qwenimage_tpu.cli", "build", *arguments],
            cwd=tmp_path / "pipelines",
            capture_output=True,
            text=True,
            check=False,
        )

    missing = run("--check")
    assert missing.returncode == 1
    assert "build/torch-cpu/_ops.py is stale" in missing.stderr
    built = run()
    assert built.returncode == 0, built.stderr
    assert built.stdout.split() == [f"build/{variant}" for variant in VARIANTS]
    assert run("--check").returncode == 0
