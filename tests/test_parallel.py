"""The torch pipeline over several processes on gloo: the same pictures as from one process."""

import copy
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLForConditionalGeneration
from typer.testing import CliRunner

from qwenimage_tpu.cli import app
from qwenimage_tpu.generate import generate
from qwenimage_tpu.loading import load_pipeline
from qwenimage_tpu.options import GenerateOptions
from qwenimage_tpu.painting.captions import plain_caption
from qwenimage_tpu.painting.drawings import unseen_scenes
from qwenimage_tpu.painting.scoring import score_pictures

TOLERANCE = 1e-4
SCENES = unseen_scenes(2)
DEMO = GenerateOptions(
    prompts=tuple(plain_caption(scene) for scene in SCENES),
    true_cfg_scale=3.0,
    height=96,
    width=96,
    steps=8,
)
# The prompts' bucket is longer than the negative prompt's.
WORDY = GenerateOptions(
    prompts=("fox " * 130, "a whale"), negative_prompt="red", height=64, width=96, steps=2, seed=5
)


@dataclass(frozen=True)
class Case:
    """model: a folder, or None for the demo's. mesh: of processes. The others are parallel_worker.py's."""

    model: str | None
    mesh: tuple[int, int]
    options: GenerateOptions
    compiled: int = 0
    split_text: bool = False


def run_processes(count: int, script: str, *arguments: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [*launcher, str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def run_cases(cases: list[Case], folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Latents and pictures of each case, painted by as many processes as its mesh has."""
    (processes,) = {int(np.prod(case.mesh)) for case in cases}
    given, results = folder / "cases.json", folder / "results.npz"
    given.write_text(json.dumps([asdict(case) for case in cases]))
    run_processes(processes, "parallel_worker.py", given, results)
    with np.load(results) as found:
        return [(found[f"latents {i}"], found[f"pictures {i}"]) for i in range(len(cases))]


def check(case: Case, found: tuple[np.ndarray, np.ndarray]) -> None:
    """Compare with one process and stock diffusers."""
    pipe = load_pipeline(case.model, case.model is None, torch.float32)
    expected = generate(pipe, replace(case.options, kernels=False))
    latents, pictures = found
    error = np.abs(latents - expected.latents.numpy()).max() / expected.latents.abs().max()
    assert error < TOLERANCE
    stock = np.stack([np.asarray(image, np.int16) for image in expected.images])
    assert np.abs(pictures - stock).max() <= 1
    if case.options.prompts == DEMO.prompts:
        from PIL import Image

        images = [Image.fromarray(picture) for picture in pictures]
        assert score_pictures(images, SCENES) == score_pictures(expected.images, SCENES)


@pytest.fixture(scope="module")
def four_heads(pipe: QwenImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pipeline whose transformer and text encoder four devices can share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = QwenImageTransformer2DModel(
            num_layers=2, num_attention_heads=4, joint_attention_dim=128
        )
        config: Any = copy.deepcopy(pipe.text_encoder.config)
        config.text_config.num_attention_heads = config.text_config.num_key_value_heads = 4
        config.text_config.rope_parameters["mrope_section"] = [4, 6, 6]
        text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    parts: Any = pipe.components | {"transformer": transformer, "text_encoder": text_encoder}
    folder = tmp_path_factory.mktemp("four heads")
    QwenImagePipeline(**parts).save_pretrained(folder)
    return str(folder)


def check_all(cases: list[Case], folder: Path) -> None:
    for case, found in zip(cases, run_cases(cases, folder), strict=True):
        check(case, found)


def test_four_processes(four_heads: str, tmp_path: Path):
    """Guidance over the data axis; a model over four; two pictures over four groups, which do not divide."""
    unguided = replace(WORDY, true_cfg_scale=1.0, negative_prompt=None, kernels=False)
    cases = [
        Case(None, (2, 2), DEMO),
        Case(four_heads, (1, 4), WORDY, compiled=2, split_text=True),
        Case(four_heads, (4, 1), unguided),
    ]
    check_all(cases, tmp_path)


@pytest.mark.full
def test_eight_processes(four_heads: str, tmp_path: Path):
    one = replace(WORDY, prompts=("a fox",))
    check_all([Case(four_heads, (2, 4), WORDY), Case(four_heads, (8, 1), one)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
def test_two_processes(tmp_path: Path, mesh: tuple[int, int]):
    check_all([Case(None, mesh, DEMO)], tmp_path)


def launch(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qwenimage_tpu.cli", "launch", f"--nproc={processes}", "generate"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_the_launched_command_paints(tmp_path: Path):
    picture = tmp_path / "star.png"
    done = launch(2, "--demo", "--steps=2", f"--output={picture}", "--compare", "a red star")
    assert done.returncode == 0, done.stderr
    assert picture.exists()
    assert done.stdout.count("wrote ") == 1
    assert "on a mesh of 2 x 1, build" in done.stdout
    assert re.search(r"pixels differ by at most [01] ", done.stdout)


def test_one_processs_failure_ends_all_with_its_message(tmp_path: Path):
    """The first fails to encode the text, while the other waits for it."""
    done = launch(2, "--demo", f"--output={tmp_path / 'no.png'}", "--mesh=1,2", "very " * 2000)
    assert done.returncode == 2
    assert "process 0 of 2: 'very very" in done.stderr
    assert "a text must fit the largest bucket of 1024 tokens" in done.stderr
    assert "Traceback" not in done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
def test_processes_end_with_a_launcher_that_is_killed(tmp_path: Path):
    command = [sys.executable, "-m", "qwenimage_tpu.cli", "launch", "--nproc=2", "generate", "--demo"]
    options = ["--no-kernels", "--steps=4000", f"--output={tmp_path / 'no.png'}", "a red star"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert "a mesh of 2 x 1" in launcher.stdout.readline()  # they have met
        workers = children(launcher.pid)
        assert len(workers) >= 2
        launcher.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--nproc=2", "doctor"], "only generate can be launched, but the command is 'doctor'"),
        (["launch", "--nproc=2", "generate", "--demo"], "Missing argument 'PROMPT...'"),
        (["launch", "--nproc=4", "generate", "--demo", "--mesh=1,2", "x"], "but --nproc is 4"),
        (["launch", "--nproc=2", "generate", "--demo", "--steps=0", "x"], "steps must be at least 1"),
        (["launch", "--nproc=2", "generate", "--demo", "--engine=jax", "x"], "call generate without"),
        (["generate", "--demo", "--mesh=1,2", "x"], "as in qwenimage-tpu launch --nproc 2 generate ..., or"),
    ],
)
def test_mistakes_start_no_process(arguments: list[str], message: str):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.full
def test_each_process_reads_its_shards_alone(tmp_path: Path):
    """On a checkpoint of 2 GB, which is deleted afterwards."""
    folder, results = tmp_path / "transformer", tmp_path / "results"
    results.mkdir()
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(num_layers=7, num_attention_heads=16)
    torch.nn.Module.to(model, torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(0.01)
    model.save_pretrained(folder, max_shard_size="1GB")
    del model
    try:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        assert size >= 2e9
        run_processes(4, "loading_worker.py", folder, results)
    finally:
        shutil.rmtree(folder)
    for path in results.glob("*.json"):
        found = json.loads(path.read_text())
        print(path.stem, found)
        assert found["shards"] < 0.3 * size
        assert found["growth"] <= 1.1 * (found["shards"] + found["largest"])
