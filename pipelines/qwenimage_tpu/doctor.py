"""`qwenimage-tpu doctor`: run all checks on this machine and print them."""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from .doctor_checks import Check, check_clashes, check_environment, check_hardware, check_requirements
from .environment import tpu_device_files

DISTRIBUTION = "qwenimage-tpu"
# Not all of them are required, but they take part in clashes.
CLASHING_PACKAGES = ("torch", "torch-tpu", "libtpu", "jax", "jaxlib", "kernels", "torchax")
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def diagnose(
    environ: Mapping[str, str],
    model: Path | None = None,
    kernel_repo: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> list[Check]:
    """All checks of this machine.

    environ: the user's environment variables, from before `environment.configure`. model: a local folder
    whose checkpoint is asked which softmax it gets.
    """
    requirements = declared_requirements()
    installed = installed_versions([Requirement(line).name for line in requirements])
    devices = tpu_device_files()
    return [
        *check_requirements(requirements, installed),
        *check_clashes(installed, python=platform.python_version()),
        check_hardware(devices),
        *check_environment(environ, has_tpu=bool(devices)),
        *_kernel_checks(kernel_repo, trust_remote_code, model),
    ]


def has_problem(checks: Iterable[Check]) -> bool:
    return any(check.status == "problem" for check in checks)


def declared_requirements() -> list[str]:
    """The requirements in our own metadata, like "torch<2.16,>=2.15"; none if we are not installed."""
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Version by package name, for those of `names` and CLASHING_PACKAGES that are installed."""
    versions: dict[str, str] = {}
    for name in {*names, *CLASHING_PACKAGES}:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _kernel_checks(kernel_repo: str | None, trust_remote_code: bool, model: Path | None) -> list[Check]:
    try:
        # Here, because the table must also appear where torch does not import.
        from .doctor_kernels import check_kernels
    except Exception as error:
        return [Check("imports", "problem", f"{type(error).__name__}: {error}", "see the versions above")]
    return check_kernels(kernel_repo, trust_remote_code, model)


def print_table(checks: Sequence[Check]) -> None:
    table = Table("check", "status", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
    for check in checks:
        # Text, so that brackets in a message are not taken for markup.
        status = Text(check.status, style=STYLES[check.status])
        table.add_row(Text(check.name), status, Text(check.found), Text(check.remedy))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # ids and commands in one piece, to be searched and copied
    console.print(table)


def print_json(checks: Sequence[Check]) -> None:
    print(json.dumps([asdict(check) for check in checks], indent=2))
