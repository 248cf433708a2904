import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from qwenimage_tpu import generate_command
from qwenimage_tpu.cli import app
from qwenimage_tpu.kernel_loader import KernelLoadError

SMALL = ["--demo", "--height", "64", "--width", "64", "--steps", "2"]


def generate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_help_imports_nothing_heavy():
    program = (
        "import sys, typer.testing, qwenimage_tpu.cli as cli\n"
        "result = typer.testing.CliRunner().invoke(cli.app, sys.argv[1:])\n"
        "heavy = {'torch', 'jax', 'diffusers', 'transformers', 'numpy', 'kernels'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else result.exit_code)"
    )
    for arguments in (
        ["--help"],
        ["generate", "--help"],
        ["doctor", "--help"],
        ["bench", "attention", "--help"],
    ):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_picture_without_kernels(tmp_path: Path):
    output = tmp_path / "new" / "fox.png"
    result = generate("a red fox", *SMALL, "--no-kernels", "-o", output)
    assert result.exit_code == 0, result.output
    assert f"wrote {output}" in result.stdout
    assert "true CFG 3 with the default negative prompt ' '" in result.stdout
    assert "time: imports" in result.stdout
    assert "decoding" in result.stdout
    assert "kernels: none (stock diffusers)" in result.stdout
    assert "2/2" in result.stderr
    with Image.open(output) as image:
        assert image.size == (64, 64)
        assert image.info["model"] == "demo"


def test_a_picture_compared_with_stock_diffusers(tmp_path: Path, kernel_build: Path):
    result = generate("fox", *SMALL, "--kernel-repo", kernel_build, "--compare", "-o", tmp_path / "fox.png")
    assert result.exit_code == 0, result.output
    assert "bounded softmax" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith("with and without kernels: pixels differ by at most ")
    assert float(last.rpartition("= ")[2]) <= 1e-4


def test_several_pictures(tmp_path: Path):
    arguments = [
        "fox",
        "whale",
        *SMALL,
        "--no-kernels",
        "--batch",
        "2",
        "--true-cfg-scale",
        "1",
        "--seed",
        "9",
    ]
    result = generate(*arguments, "-o", tmp_path / "folder")
    assert result.exit_code == 0, result.output
    assert "true CFG" not in result.stdout
    paths = sorted((tmp_path / "folder").iterdir())
    assert [path.name for path in paths] == [f"image-{index}.png" for index in range(4)]
    with Image.open(paths[2]) as image:
        assert (image.info["prompt"], image.info["seed"]) == ("whale", "11")


def test_a_contact_sheet(tmp_path: Path):
    sheet = tmp_path / "sheet.png"
    result = generate("a red star", "a blue ring", *SMALL, "--no-kernels", "--contact-sheet", "-o", sheet)
    assert result.exit_code == 0, result.output
    assert f"wrote {sheet}" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of a model and the demo is needed, but neither was given; pass --model"),
        (["--demo", "--model", "x/y"], "exactly one of a model and the demo is needed, but both were given"),
        (["--demo", "-o", "fox.jpg"], "written as PNG, but the output path fox.jpg ends in .jpg"),
        (["--demo", "--contact-sheet", "-o", "sheets"], "one PNG file, but the output path sheets does not"),
        (["--demo", "--height", "100"], "height must be a positive multiple of 16, but is 100"),
        (["--demo", "--steps", "0"], "steps must be at least 1, but is 0"),
        (["--demo", "--true-cfg-scale", "1", "--negative-prompt", "blur"], "raise true_cfg_scale or leave"),
        (["--demo", "--no-kernels", "--compare"], "--compare needs the kernels, but --no-kernels was given"),
        (["--demo", "--no-kernels", "--kernel-repo", "x/y"], "--kernel-repo needs the kernels"),
        (["--demo", "--mesh", "2,2"], "--mesh needs a process per device"),
        (["--demo", "--engine", "jax", "--mesh", "8"], "a mesh is two positive numbers, DATA,MODEL"),
        (["--demo", "--engine", "jax", "--no-kernels"], "--no-kernels needs --engine torch"),
        (["--demo", "--engine", "jax", "--kernel-repo", "x/y"], "--kernel-repo needs --engine torch"),
        (["--model", "./none", "--no-kernels"], "'./none' is neither an existing folder nor a Hub id"),
        (["--model", ""], "'' is neither an existing folder nor a Hub id"),
        (["--demo", "--kernel-repo", "./none"], "'./none' is neither"),
        (["--demo", "--compile", "full"], "--compile full needs --device tpu, but the device is cpu"),
        (["--demo", "--text-encoder-device", "tpu"], "needs --device tpu, but the device is cpu"),
        (["--demo", "--device", "tpu"], "the device tpu needs TPU hardware"),
        (["--demo", "--compile-cache", "cache"], "keeps what is compiled, but nothing is; leave it out"),
        (["--demo", "--device", "tpu", "--compile-cache", "/proc/none"], "cannot be kept in /proc/none"),
        (["--demo", "-o", "/dev/full"], "a picture cannot replace /dev/full, which is no ordinary file"),
        (
            ["--demo", "-o", "/proc/fox.png"],
            "be written to /proc/fox.png: /proc takes no new file",
        ),
        (["--demo", "-o", f"{__file__}/fox.png"], "takes no new file (Not a directory); choose another"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(arguments: list[str], message: str):
    result = generate("a red fox", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (KernelLoadError("the digest differs"), 2, "the digest differs"),
        (NotImplementedError("head_dim must be 128"), 2, "head_dim must be 128"),
        (PermissionError("may not read"), 2, "may not read"),
    ],
)
def test_errors_while_painting_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(generate_command, "generate", fail)
    result = generate("a red fox", *SMALL, "--no-kernels", "-o", tmp_path / "fox.png")
    assert result.exit_code == code
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(generate_command, "generate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        CliRunner().invoke(app, ["generate", "fox", *SMALL, "--no-kernels"], catch_exceptions=False)


def test_doctor_prints_its_checks_and_fails_on_a_problem(kernel_build: Path):
    result = CliRunner().invoke(app, ["doctor", "--kernel-repo", str(kernel_build), "--json"])
    checks = json.loads(result.stdout)
    assert result.exit_code == int(any(check["status"] == "problem" for check in checks))
    statuses = {check["name"]: check["status"] for check in checks}
    assert statuses["kernels"] == "ok"
    assert statuses["libtpu and torch-tpu"] == "ok"


def test_doctor_table_shows_a_problem_and_its_remedy(tmp_path: Path):
    result = CliRunner().invoke(app, ["doctor", "--kernel-repo", str(tmp_path)])
    assert result.exit_code == 1
    assert "problem" in result.stdout
    assert "what to do" in result.stdout
