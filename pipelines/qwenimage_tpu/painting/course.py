"""The training from the first drawing to the saved pipeline."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diffusers import QwenImagePipeline
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .autoencoder import vae_loss
from .curve import save_loss_curves
from .evaluation import Setting, score_setting
from .flow import flow_loss, prepare
from .models import round_to_bfloat16, untrained_pipeline
from .saving import save_model
from .training import OnStep, Recipe, Trainer


@dataclass(frozen=True)
class Course:
    """The whole training. The transformer is scored `scores` times, each time on `scored_prompts` prompts."""

    vae: Recipe
    transformer: Recipe
    drawings: int
    scores: int
    scored_prompts: int


FULL_COURSE = Course(
    vae=Recipe(steps=4000, batch=8, learning_rate=1.5e-3, cycles=2),
    transformer=Recipe(steps=10_000, batch=64, learning_rate=2e-3),
    drawings=16_000,
    scores=10,
    scored_prompts=50,
)


def train(
    output: Path, seed: int, course: Course, console: Console, save_seconds: float = 120.0
) -> QwenImagePipeline:
    """Train both models, with checkpoints in `output`; put the pipeline into `output`/model.

    A run that finds checkpoints of an earlier one goes on from there; delete them to start anew.
    """
    output.mkdir(parents=True, exist_ok=True)
    pipe = untrained_pipeline(seed)
    pipe.set_progress_bar_config(disable=True)
    vae = Trainer(pipe.vae, course.vae, output / "vae.pt", save_seconds)
    with _progress("VAE", vae, console) as on_step:
        vae.run(vae_loss(pipe.vae, seed, course.vae.batch), on_step)
    vae.use_average()
    round_to_bfloat16(pipe.vae)
    console.print(f"encoding {course.drawings} drawings")
    lesson = prepare(pipe, seed, course.drawings)
    transformer = Trainer(pipe.transformer, course.transformer, output / "transformer.pt", save_seconds)
    loss = flow_loss(pipe.transformer, lesson, seed, course.transformer.batch)
    for until in _milestones(course):
        if until > transformer.step:
            with _progress("transformer", transformer, console) as on_step:
                transformer.run(loss, on_step, until)
            _print_score(pipe, transformer, course.scored_prompts, console)
    transformer.use_average()
    round_to_bfloat16(pipe.transformer)
    save_loss_curves({"VAE": vae.losses, "transformer": transformer.losses}, output / "loss.png")
    save_model(pipe, output / "model")
    return pipe


def _milestones(course: Course) -> list[int]:
    steps, count = course.transformer.steps, course.scores
    return [steps * (index + 1) // count for index in range(count)]


def _print_score(pipe: QwenImagePipeline, trainer: Trainer, prompts: int, console: Console) -> None:
    """Score the averaged weights; training goes on with the others."""
    weights = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    trainer.use_average()
    score = score_setting(pipe, Setting(kernels=False, prompts=prompts))
    pipe.transformer.load_state_dict(weights)
    console.print(f"after {trainer.step} steps, {prompts} unseen prompts: {score}")


@contextmanager
def _progress(label: str, trainer: Trainer, console: Console) -> Generator[OnStep]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=trainer.recipe.steps, completed=trainer.step, loss=0.0)
        smooth: list[float] = []

        def on_step(step: int, loss: float) -> None:
            smooth.append(loss)
            recent = smooth[-50:]
            progress.update(task, completed=step, loss=sum(recent) / len(recent))

        yield on_step
