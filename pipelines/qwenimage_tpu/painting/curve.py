"""Draw the loss curves of a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

POINTS = 200


def save_loss_curves(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """One panel per stage: the loss of each step, averaged to at most POINTS points, on a log scale."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, len(losses), squeeze=False)[0]
    for panel, (name, values) in zip(panels, losses.items(), strict=True):
        width = max(1, len(values) // POINTS)
        usable = len(values) // width * width
        smooth = np.reshape(np.array(values[:usable]), (-1, width)).mean(axis=1)
        panel.semilogy(width * np.arange(1, len(smooth) + 1), smooth)
        panel.set(title=name, xlabel="step", ylabel="loss")
        panel.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=80)
