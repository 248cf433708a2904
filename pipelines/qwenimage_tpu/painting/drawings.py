"""Draw a scene, and choose scenes at random."""

import math
import random
from collections.abc import Callable

from PIL import Image, ImageDraw

from qwenimage_tpu.options import DEMO_SIZE

from .vocabulary import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    Rgb,
    Scene,
    Thing,
    is_held_out,
)

PICTURE_SIZE = DEMO_SIZE
# Drawn this many times larger and scaled down, for smooth edges.
SUPERSAMPLING = 4
# The centre moves by up to this part of the picture's side.
JITTER = 0.03
SIDE_BY_SIDE_OFFSET = 0.25
SIDE_BY_SIDE_RADIUS = (0.17, 0.21)
TWO_THINGS_CHANCE = 0.2
# A square and a cross of the circle's own radius would look larger than it.
SQUARE_SIDE = 0.84
CROSS_ARM = 0.34
RING_HOLE = 0.55
STAR_INNER_RADIUS = 0.42

type Drawer = Callable[[ImageDraw.ImageDraw, float, float, float, Rgb, Rgb], None]


def _circle(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Rgb, _behind: Rgb) -> None:
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _ring(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Rgb, behind: Rgb) -> None:
    _circle(pen, x, y, radius, colour, behind)
    _circle(pen, x, y, RING_HOLE * radius, behind, behind)


def _square(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Rgb, _behind: Rgb) -> None:
    half = SQUARE_SIDE * radius
    pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)


def _cross(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Rgb, _behind: Rgb) -> None:
    arm = CROSS_ARM * radius
    pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
    pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)


def _triangle(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Rgb, _behind: Rgb) -> None:
    pen.polygon(_corners(x, y, [radius] * 3), fill=colour)


def _star(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Rgb, _behind: Rgb) -> None:
    pen.polygon(_corners(x, y, [radius, STAR_INNER_RADIUS * radius] * 5), fill=colour)


def _corners(x: float, y: float, radii: list[float]) -> list[tuple[float, float]]:
    """Corners at equal angles, the first one straight up."""
    angles = [2 * math.pi * index / len(radii) for index in range(len(radii))]
    return [
        (x + radius * math.sin(angle), y - radius * math.cos(angle))
        for radius, angle in zip(radii, angles, strict=True)
    ]


DRAWERS: dict[str, Drawer] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
}


def draw(scene: Scene, seed: int, size: int = PICTURE_SIZE) -> Image.Image:
    """The scene as an RGB picture of size x size pixels; the seed moves and resizes things a little."""
    chance = random.Random(seed)
    side = size * SUPERSAMPLING
    behind = BACKGROUNDS[scene.background]
    picture = Image.new("RGB", (side, side), behind)
    pen = ImageDraw.Draw(picture)
    for thing, (x, y), radii in zip(scene.things, _centres(scene), _radii(scene), strict=True):
        x, y = (side * (0.5 + place + chance.uniform(-JITTER, JITTER)) for place in (x, y))
        DRAWERS[thing.shape](pen, x, y, side * chance.uniform(*radii), COLOURS[thing.colour], behind)
    return picture.resize((size, size), Image.Resampling.BOX)


def _centres(scene: Scene) -> list[tuple[float, float]]:
    if len(scene.things) == 1:
        return [POSITIONS[scene.position]]
    return [(-SIDE_BY_SIDE_OFFSET, 0.0), (SIDE_BY_SIDE_OFFSET, 0.0)]


def _radii(scene: Scene) -> list[tuple[float, float]]:
    return [SIZES[scene.size]] if len(scene.things) == 1 else [SIDE_BY_SIDE_RADIUS] * 2


def random_scene(chance: random.Random) -> Scene:
    """A scene for training: nothing of it is held out."""
    background = chance.choice(list(BACKGROUNDS))
    first = _random_thing(chance, background)
    if chance.random() < TWO_THINGS_CHANCE:
        second = _random_thing(chance, background)
        while second.colour == first.colour:
            second = _random_thing(chance, background)
        return Scene((first, second), background)
    size = chance.choice(["medium", chance.choice(list(SIZES))])
    # A large thing fills the picture wherever its centre is.
    position = "in the middle" if size == "large" else chance.choice(["in the middle", _any(chance)])
    return Scene((first,), background, size, position)


def _any(chance: random.Random) -> str:
    return chance.choice(list(POSITIONS))


def _random_thing(chance: random.Random, background: str) -> Thing:
    while True:
        thing = Thing(chance.choice(list(COLOURS)), chance.choice(SHAPES))
        if not is_held_out(thing, background):
            return thing


def unseen_scenes(count: int) -> list[Scene]:
    """Scenes of one thing, each on a background on which training never showed it; always the same ones."""
    from .vocabulary import all_combinations

    chance = random.Random("unseen")
    held_out = [combination for combination in all_combinations() if is_held_out(*combination)]
    scenes: list[Scene] = []
    while len(scenes) < count:
        chance.shuffle(held_out)
        scenes += [Scene((thing,), background) for thing, background in held_out]
    return scenes[:count]
