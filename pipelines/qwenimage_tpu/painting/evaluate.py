"""Score a tiny QwenImage in every setting: python -m qwenimage_tpu.painting.evaluate [FOLDER]"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qwenimage_tpu import environment


def main(
    model: Annotated[
        Path | None, typer.Argument(help="The pipeline folder that a training wrote; the demo's if left out.")
    ] = None,
) -> None:
    """Print the scores with and without kernels, in both dtypes, and what guidance and negatives do."""
    environment.configure()
    # Only now, because torch reads the environment when it is imported.
    from qwenimage_tpu.loading import DEMO_MODEL

    from .evaluation import report

    report(model or DEMO_MODEL, Console())


if __name__ == "__main__":
    typer.run(main)
