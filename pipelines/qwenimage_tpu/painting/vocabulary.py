"""What can be on a drawing: shapes, colours, backgrounds, sizes and positions, and what is held out."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

type Rgb = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
COLOURS: dict[str, Rgb] = {
    "red": (222, 28, 36),
    "orange": (255, 140, 0),
    "yellow": (252, 218, 30),
    "green": (30, 160, 60),
    "cyan": (30, 205, 225),
    "blue": (40, 80, 230),
    "purple": (140, 40, 175),
    "pink": (255, 120, 190),
}
BACKGROUNDS: dict[str, Rgb] = {
    "white": (255, 255, 255),
    "black": (12, 12, 14),
    "gray": (150, 150, 150),
    "navy": (18, 28, 84),
    "beige": (226, 208, 172),
}
# The radius of the circle around a shape, as a part of the picture's side: the smallest and the largest.
SIZES: dict[str, tuple[float, float]] = {
    "small": (0.15, 0.19),
    "medium": (0.25, 0.31),
    "large": (0.37, 0.42),
}
# Of the shape's centre, in parts of the picture's side from its middle.
POSITIONS: dict[str, tuple[float, float]] = {
    "in the middle": (0.0, 0.0),
    "on the left": (-0.2, 0.0),
    "on the right": (0.2, 0.0),
    "at the top": (0.0, -0.2),
    "at the bottom": (0.0, 0.2),
}
HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Thing:
    """One coloured shape."""

    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """What a drawing shows. Two things stand side by side, the first on the left, and differ in colour."""

    things: tuple[Thing, ...]
    background: str
    size: str = "medium"
    position: str = "in the middle"


def is_held_out(thing: Thing, background: str) -> bool:
    """Whether training never shows this thing on this background.

    Every colour meets every shape, every colour every background, and every shape every background in
    training, but one in HELD_OUT_EVERY of the combinations of all three is kept for the tests.
    """
    number = SHAPES.index(thing.shape) + 2 * list(COLOURS).index(thing.colour)
    return (number + list(BACKGROUNDS).index(background)) % HELD_OUT_EVERY == 0


def all_combinations() -> Iterator[tuple[Thing, str]]:
    """Every thing on every background."""
    for colour, shape, background in product(COLOURS, SHAPES, BACKGROUNDS):
        yield Thing(colour, shape), background
