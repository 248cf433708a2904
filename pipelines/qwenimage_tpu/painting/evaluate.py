"""Score a tiny QwenImage in every setting: python -m qwenimage_tpu.painting.evaluate FOLDER"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qwenimage_tpu import environment


def main(
    model: Annotated[Path, typer.Argument(help="The pipeline folder that the training wrote.")],
) -> None:
    """Print the scores with and without kernels, in both dtypes, and what guidance and negatives do."""
    environment.configure()
    # Only now, because torch reads the environment when it is imported.
    from .evaluation import report

    report(model, Console())


if __name__ == "__main__":
    typer.run(main)
