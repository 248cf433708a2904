"""Compile the PJRT shim with the machine's C compiler, once."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("pjrt_shim.c")
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")
PLUGIN_PACKAGE = "lammps-jax-pjrt-cpu"
PLUGIN_MODULE = "lammps_jax_pjrt_cpu"
PLUGIN_LIBRARY = "pjrt_c_api_cpu_plugin.so"


class EmulatorError(RuntimeError):
    """The emulated TPU cannot be used; the message says what to do or where to look."""


def cpu_plugin() -> Path:
    """The CPU's PJRT plugin; EmulatorError if it is not installed."""
    # Not imported: the package's declared dependency on an older jax concerns none of its code.
    spec = importlib.util.find_spec(PLUGIN_MODULE)
    path = Path(spec.origin).with_name(PLUGIN_LIBRARY) if spec and spec.origin else None
    if path is None or not path.is_file():
        raise EmulatorError(
            f"the emulated TPU needs a CPU's PJRT plugin, the package {PLUGIN_PACKAGE}; install it with"
            f" `pip install --no-deps {PLUGIN_PACKAGE}==0.11.2` (it asks for an older jax, but runs without)"
        )
    return path


def compiled_shim(cache: Path | None = None) -> Path:
    """The shim as a shared library, compiled into `cache` unless it is there already.

    cache: a folder; the user's cache folder if None. Raises EmulatorError without a C compiler, and if the
    source does not compile.
    """
    name = os.environ.get("CC", "cc")
    compiler = shutil.which(name)
    if compiler is None:
        raise EmulatorError(
            f"the emulated TPU needs a C compiler, but there is no {name!r} on PATH; install one (Debian: apt"
            " install gcc), or name it in the variable CC"
        )
    folder = _cache_folder() if cache is None else cache
    key = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, FLAGS)).encode()).hexdigest()[:16]
    library = folder / f"pjrt_shim-{key}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, library)
    return library


def check_installation() -> None:
    """Raise EmulatorError if something that the emulated device needs is not there; loads nothing."""
    cpu_plugin()
    compiled_shim()


def check_plugin() -> None:
    """Ask the shim for its function table, as torch-tpu will, which would crash without one.

    The environment must name both libraries. Raises EmulatorError with the shim's reason.
    """
    library = ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"])
    library.GetPjrtApi.restype = ctypes.c_void_p
    library.emulator_failure.restype = ctypes.c_char_p
    if library.GetPjrtApi() is None:
        raise EmulatorError(library.emulator_failure().decode())


def _compile(compiler: str, library: Path) -> None:
    """Write `library` complete or not at all, whoever else does the same at the same time."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unfinished = Path(folder) / library.name
        command = [compiler, *FLAGS, "-o", str(unfinished), str(SOURCE), "-ldl"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise EmulatorError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")
        unfinished.replace(library)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qwenimage-tpu"
