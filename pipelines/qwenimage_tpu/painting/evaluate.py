"""Score the tiny QwenImage in every setting: python -m qwenimage_tpu.painting.evaluate [--model FOLDER]"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qwenimage_tpu import environment


def main(
    model: Annotated[Path | None, typer.Option(help="A pipeline folder instead of the shipped one.")] = None,
) -> None:
    """Print the scores with and without kernels, in both dtypes, and what guidance and negatives do."""
    environment.configure()
    # Only now, because torch reads the environment when it is imported.
    from qwenimage_tpu.loading import DEMO_MODEL

    from .evaluation import report

    report(DEMO_MODEL if model is None else model, Console())


if __name__ == "__main__":
    typer.run(main)
