"""Train the tiny QwenImage: python -m qwenimage_tpu.painting.train --output FOLDER

Interrupt it when you like: the same command goes on where it stopped.
"""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qwenimage_tpu import environment


def main(
    output: Annotated[Path, typer.Option(help="Gets checkpoints, the loss curve and the model.")],
    seed: Annotated[int, typer.Option(help="Determines the drawings, the weights' start and the noise.")] = 0,
) -> None:
    """Train the tiny QwenImage on the CPU, or go on with a training that was interrupted."""
    environment.configure()
    # Only now, because torch reads the environment when it is imported.
    from .course import FULL_COURSE, train

    console = Console()
    start = time.monotonic()
    train(output, seed, FULL_COURSE, console)
    console.print(f"wrote {output / 'model'} after {(time.monotonic() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    typer.run(main)
