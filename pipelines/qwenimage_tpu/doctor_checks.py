"""Checks of what is installed, which hardware there is and how the environment is set.

Each is a pure function from a finding to `Check`s; nothing heavy is imported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

OLDEST_TORCH_OF_TORCH_TPU, FIRST_TORCH_BEYOND_TORCH_TPU = Version("2.11"), Version("2.16")

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """One finding; `remedy` says what to do about it and is empty when all is well."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def check_requirements(requirements: Iterable[str], installed: Mapping[str, str]) -> list[Check]:
    """One check per requirement of ours."""
    parsed = [Requirement(line) for line in requirements]
    # An extra is for those who asked for it.
    parsed = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    if not parsed:
        remedy = "install it, for example with `make` in a clone, so that its requirements are known"
        return [Check("qwenimage-tpu", "warning", "not installed", remedy)]
    return [_check_requirement(requirement, installed.get(requirement.name)) for requirement in parsed]


def _check_requirement(requirement: Requirement, version: str | None) -> Check:
    wanted = str(requirement.specifier) or "any version"
    install = f'pip install "{requirement}"'
    if version is None:
        return Check(requirement.name, "problem", f"not installed, {wanted} is required", install)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, "problem", f"{version}, but {wanted} is required", install)
    return Check(requirement.name, "ok", version)


def check_clashes(installed: Mapping[str, str], python: str) -> list[Check]:
    """Combinations that are known to fail; a package that is not installed clashes with nothing."""
    versions = {name: parsed for name, text in installed.items() if (parsed := _parse(text)) is not None}
    clashes = [
        _python_with_jax(Version(python), versions.get("jax")),
        _torch_with_torch_tpu(versions.get("torch"), versions.get("torch-tpu")),
        _libtpu_with_torch_tpu(versions.get("libtpu"), versions.get("torch-tpu")),
        _jax_with_jaxlib(versions.get("jax"), versions.get("jaxlib")),
        _torchax_with_torch(versions.get("torchax"), versions.get("torch")),
        _kernels_with_torch_tpu(versions.get("kernels"), versions.get("torch-tpu")),
    ]
    return [clash for clash in clashes if clash is not None]


def _python_with_jax(python: Version, jax: Version | None) -> Check | None:
    name = "Python and jax"
    if jax is None:
        return None
    if jax >= Version("0.12") and python < Version("3.12"):
        return Check(name, "problem", f"jax {jax} needs Python 3.12, this is {python}", "use Python 3.12")
    return Check(name, "ok", f"Python {python}, jax {jax}")


def _torch_with_torch_tpu(torch: Version | None, torch_tpu: Version | None) -> Check | None:
    name = "torch and torch-tpu"
    if torch is None or torch_tpu is None:
        return None
    if not OLDEST_TORCH_OF_TORCH_TPU <= torch < FIRST_TORCH_BEYOND_TORCH_TPU:
        found = f"torch-tpu {torch_tpu} accepts torch 2.11.0 to 2.15.x, this is {torch}"
        return Check(name, "problem", found, 'pip install "torch>=2.15,<2.16"')
    return Check(name, "ok", f"torch {torch}, torch-tpu {torch_tpu}")


def _libtpu_with_torch_tpu(libtpu: Version | None, torch_tpu: Version | None) -> Check | None:
    name = "libtpu and torch-tpu"
    if libtpu is None or torch_tpu is None:
        return None
    if len(libtpu.release) > 3:
        found = (
            f"torch-tpu {torch_tpu} cannot read the version {libtpu} and fails when the TPU is initialised"
        )
        return Check(name, "problem", found, "pip install libtpu==0.0.50 (a plain install picks 0.0.50.1)")
    return Check(name, "ok", f"libtpu {libtpu}, torch-tpu {torch_tpu}")


def _jax_with_jaxlib(jax: Version | None, jaxlib: Version | None) -> Check | None:
    name = "jax and jaxlib"
    if jax is None or jaxlib is None:
        return None
    if jax != jaxlib:
        return Check(name, "problem", f"jax {jax}, but jaxlib {jaxlib}", f"pip install jaxlib=={jax}")
    return Check(name, "ok", f"both {jax}")


def _torchax_with_torch(torchax: Version | None, torch: Version | None) -> Check | None:
    if torchax is None or torch is None:
        return None
    if torch >= Version("2.12"):
        found = f"torchax {torchax} does not import with torch {torch} (it was seen to work with 2.11)"
        return Check("torchax and torch", "warning", found, "nothing here uses it: pip uninstall torchax")
    return Check("torchax and torch", "ok", f"torchax {torchax}, torch {torch}")


def _kernels_with_torch_tpu(kernels: Version | None, torch_tpu: Version | None) -> Check | None:
    if kernels is None or torch_tpu is None:
        return None
    found = (
        f"kernels {kernels} cannot see torch-tpu {torch_tpu}, so it loads the cpu or cuda variant;"
        " all variants hold the same code and follow the device of the tensors"
    )
    return Check("kernels and torch-tpu", "ok", found)


def _parse(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def check_hardware(devices: list[Path]) -> Check:
    """Whether there is a TPU, judged by its device files."""
    if devices:
        return Check("TPU", "ok", ", ".join(str(device) for device in devices))
    remedy = "the kernels run in interpret mode on the CPU; for real speed use a TPU VM"
    return Check("TPU", "warning", "no /dev/accel<number> and no /dev/vfio/<number>", remedy)


def check_environment(environ: Mapping[str, str], has_tpu: bool) -> list[Check]:
    """Environment variables that keep a TPU from being used, or that change which kernels are loaded."""
    checks: list[Check] = []
    platforms = environ.get("JAX_PLATFORMS", "")
    if has_tpu and platforms and "tpu" not in platforms.split(","):
        checks.append(
            Check("JAX_PLATFORMS", "problem", f"{platforms}: jax will not use the TPU", "unset JAX_PLATFORMS")
        )
    if has_tpu and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        found, remedy = "0: torch will not know the device tpu", "unset TORCH_DEVICE_BACKEND_AUTOLOAD"
        checks.append(Check("TORCH_DEVICE_BACKEND_AUTOLOAD", "problem", found, remedy))
    if local := environ.get("LOCAL_KERNELS"):
        found = f"{local}: these folders are loaded in place of the repositories"
        checks.append(Check("LOCAL_KERNELS", "warning", found, "unset LOCAL_KERNELS unless you meant it"))
    return checks or [Check("environment", "ok", "no variable that gets in the way")]
