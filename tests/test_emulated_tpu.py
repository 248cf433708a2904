"""The emulated device: it computes, counts, captures, and says what is wrong when it cannot."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated_process import EmulatedProcess
from qwenimage_tpu import emulator
from qwenimage_tpu.emulator import Counts, shim
from qwenimage_tpu.emulator.capture import capture

pytestmark = pytest.mark.xdist_group("emulated TPU")


def count_transfers() -> tuple[list[Counts], torch.Tensor]:
    counts = [emulator.read_counts()]
    x = torch.arange(12.0).reshape(3, 4).to("tpu")
    counts.append(emulator.read_counts())
    product = x @ x.T
    counts.append(emulator.read_counts())
    product = product.cpu()
    counts.append(emulator.read_counts())
    return counts, product


def test_each_transfer_and_program_is_counted_once(emulated_tpu: EmulatedProcess):
    counts, product = emulated_tpu.run(count_transfers)
    sent, computed, received = (after - before for before, after in pairwise(counts))
    assert sent == Counts(host_to_device=1, host_to_device_bytes=48)
    assert (computed.compilations, computed.executions) == (1, 1)
    assert computed.host_to_device == computed.device_to_host == 0
    assert received == Counts(device_to_host=1, device_to_host_bytes=36)
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(product, x @ x.T)


def count_calls_of_a_compiled_function() -> list[Counts]:
    function: Any = torch.compile(lambda x: torch.sin(x) + x, backend="tpu", fullgraph=True, dynamic=False)
    x = torch.ones(5, device="tpu")
    counts = [emulator.read_counts()]
    for _ in range(3):
        function(x)
        counts.append(emulator.read_counts())
    function(torch.ones(6, device="tpu"))
    return [*counts, emulator.read_counts()]


def test_a_compiled_function_compiles_once_per_shape(emulated_tpu: EmulatedProcess):
    counts = emulated_tpu.run(count_calls_of_a_compiled_function)
    steps = [(b - a).compilations + (b - a).cache_loads for a, b in pairwise(counts)]
    assert steps[0] > 0
    assert steps[1:3] == [0, 0]
    assert steps[3] > 0


def capture_attention(plain: bool) -> tuple[bool, bool]:
    from torch.nn.functional import scaled_dot_product_attention

    query = torch.zeros((1, 2, 256, 128), dtype=torch.bfloat16, device="tpu")
    program = capture(
        torch.softmax if plain else scaled_dot_product_attention, query, *((-1,) if plain else (query, query))
    )
    return b"tpu_custom_call" in program.code, len(program.options) > 0


@pytest.mark.parametrize("plain", [True, False])
def test_programs_are_captured_with_the_kernels_of_a_tpu(emulated_tpu: EmulatedProcess, plain: bool):
    has_kernel, has_options = emulated_tpu.run(capture_attention, plain)
    assert has_kernel is not plain
    assert has_options


def capture_what_fails() -> None:
    capture(lambda x: x @ x, torch.zeros((2, 3), device="tpu"))


def test_an_error_of_the_captured_call_is_raised(emulated_tpu: EmulatedProcess):
    with pytest.raises(Exception, match=r"2x3|\[2, 3\]|must match"):
        emulated_tpu.run(capture_what_fails)


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_shim_is_compiled_once(tmp_path: Path):
    library = shim.compiled_shim(tmp_path / "new")
    written = library.stat().st_mtime_ns
    assert shim.compiled_shim(tmp_path / "new") == library
    assert library.stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "new").iterdir()] == [library.name]


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.raises(shim.EmulatorError, match=r"needs a C compiler, .* no '.*no-such-compiler' on PATH"):
        shim.compiled_shim(tmp_path)


def test_a_source_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "broken.c"
    broken.write_text("int missing_semicolon")
    monkeypatch.setattr(shim, "SOURCE", broken)
    with pytest.raises(shim.EmulatorError, match=r"(?s)failed:.*missing_semicolon"):
        shim.compiled_shim(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_the_plugin_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shim, "PLUGIN_MODULE", "no_such_module")
    with pytest.raises(shim.EmulatorError, match="with `pip install --no-deps lammps-jax-pjrt-cpu"):
        shim.cpu_plugin()


def test_a_newer_torch_tpu_that_differs_is_named():
    # A library that is none stands for whatever may change.
    code = (
        "import qwenimage_tpu.environment as e; e.configure()\n"
        "from qwenimage_tpu.emulator import device, start\n"
        "from pathlib import Path\n"
        "device.cpu_plugin = lambda: Path('/dev/null')\n"
        "start()"
    )
    done = python(code)
    assert done.returncode != 0
    assert "the emulated TPU does not start" in done.stderr
    assert "torch-tpu 0.2.0 (written for 0.2.0)" in done.stderr
    assert "look at emulator/pjrt_shim.c" in done.stderr


def test_torch_tpu_must_not_be_loaded_before():
    done = python(
        "import qwenimage_tpu.environment as e; e.configure()\nimport torch, torch_tpu\n"
        "from qwenimage_tpu import emulator\nemulator.start()"
    )
    assert "torch_tpu is loaded already, without the emulated device" in done.stderr
