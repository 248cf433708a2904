"""Look at a picture and say what is on it: the colour, the shape and the background.

A classifier by segmentation: the frame of the picture tells the background, what differs from it is the
thing, its median colour is looked up in the palette, and its outline is compared with each shape's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from PIL import Image

from .drawings import draw
from .vocabulary import BACKGROUNDS, COLOURS, SHAPES, Rgb, Scene, Thing

type Pixels = npt.NDArray[np.float32]  # [height, width, 3], 0 to 255
type Mask = npt.NDArray[np.bool_]  # [height, width]

FRAME = 3
# A colour further than this from every one of the palette has no name. The palette's are 72 apart or more.
COLOUR_TOLERANCE = 60.0
# A pixel belongs to the thing if its colour is further than this from the background's.
THING_THRESHOLD = 60.0
SMALLEST_THING = 0.01
# A surface has a colour if this part of its pixels is within COLOUR_TOLERANCE of their median.
PLAIN = 0.7
# And if this many of the nine pixels in and around it are: stray pixels do not count.
MAJORITY = 5
TEMPLATE_SIZE = 32
# Intersection over union of the thing's outline and the best template, both scaled to the same square.
SHAPE_THRESHOLD = 0.7
# Of width to height. All shapes here are about as wide as high; a streak is none of them.
LARGEST_ASPECT = 1.35


@dataclass(frozen=True)
class Seen:
    """What a picture shows; None where it shows nothing that has a name."""

    colour: str | None
    shape: str | None
    background: str | None


@dataclass(frozen=True)
class Score:
    """The part of the pictures, 0 to 1, that show the right colour, shape and background."""

    colour: float
    shape: float
    background: float

    def __str__(self) -> str:
        return f"colour {self.colour:.0%}, shape {self.shape:.0%}, background {self.background:.0%}"


def score_pictures(images: Sequence[Image.Image], scenes: Sequence[Scene]) -> Score:
    """Compare each picture with the scene it should show.

    Of a scene with two things, the colour (or shape) is right if both things' are, left and right.
    Raises ValueError for no pictures, or for more or fewer than scenes.
    """
    if not images or len(images) != len(scenes):
        raise ValueError(
            f"as many pictures as scenes are needed, and at least one, but there are {len(images)} pictures"
            f" and {len(scenes)} scenes"
        )
    right = [_compare(image, scene) for image, scene in zip(images, scenes, strict=True)]
    return Score(*(float(part) for part in np.mean(right, axis=0)))


def _compare(image: Image.Image, scene: Scene) -> tuple[bool, bool, bool]:
    seen = [look_at(part) for part in _split(image, len(scene.things))]
    return (
        [part.colour for part in seen] == [thing.colour for thing in scene.things],
        [part.shape for part in seen] == [thing.shape for thing in scene.things],
        all(part.background == scene.background for part in seen),
    )


def _split(image: Image.Image, parts: int) -> list[Image.Image]:
    """Side by side, one for each thing."""
    edges = np.linspace(0, image.width, parts + 1).round().astype(int)
    return [image.crop((int(left), 0, int(right), image.height)) for left, right in pairwise(edges)]


def look_at(image: Image.Image) -> Seen:
    """Classify a picture of one thing, of any size."""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    behind = _plain_colour(_frame(pixels))
    if behind is None:
        return Seen(None, None, None)
    thing = _without_strays(_distance(pixels, behind) > THING_THRESHOLD)
    background = _nearest(behind, BACKGROUNDS)
    if thing.mean() < SMALLEST_THING:
        return Seen(None, None, background)
    colour = _plain_colour(pixels[_core(thing)])
    return Seen(None if colour is None else _nearest(colour, COLOURS), _shape_of(thing), background)


def colour_share(image: Image.Image, colour: str) -> float:
    """The part of the picture's pixels, 0 to 1, that are nearer to this colour than to any other."""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    palette = COLOURS | BACKGROUNDS
    distances = np.stack([_distance(pixels, np.array(rgb, np.float32)) for rgb in palette.values()])
    return float((distances.argmin(axis=0) == list(palette).index(colour)).mean())


def _frame(pixels: Pixels) -> Pixels:
    inner = np.ones(pixels.shape[:2], bool)
    inner[FRAME:-FRAME, FRAME:-FRAME] = False
    return pixels[inner]


def _plain_colour(pixels: Pixels) -> npt.NDArray[np.float32] | None:
    """The median of the pixels [..., 3], or None if too many differ from it."""
    median = np.median(pixels.reshape(-1, 3), axis=0)
    same = _distance(pixels, median) <= COLOUR_TOLERANCE
    return median if same.mean() >= PLAIN else None


def _distance(pixels: Pixels, colour: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.linalg.norm(pixels - colour, axis=-1).astype(np.float32)


def _nearest(colour: npt.NDArray[np.float32], palette: Mapping[str, Rgb]) -> str | None:
    distances = {name: float(np.linalg.norm(colour - np.array(rgb))) for name, rgb in palette.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] <= COLOUR_TOLERANCE else None


def _neighbours(mask: Mask) -> npt.NDArray[np.int64]:
    """How many of the nine pixels in and around each one are set."""
    padded = np.pad(mask, 1).astype(np.int64)
    height, width = mask.shape
    shifted = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return np.sum(shifted, axis=0)


def _without_strays(mask: Mask) -> Mask:
    return _neighbours(mask) >= MAJORITY


def _core(mask: Mask) -> Mask:
    """The mask without its blurred edge, or all of it if nothing else is left."""
    core = _neighbours(mask) == 9
    return core if core.any() else mask


def _shape_of(mask: Mask) -> str | None:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    crop = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    aspect = crop.shape[1] / crop.shape[0]
    if max(aspect, 1 / aspect) > LARGEST_ASPECT:
        return None
    outline = _scaled(crop)
    overlaps = {shape: _overlap(outline, template) for shape, template in _templates().items()}
    best = max(overlaps, key=overlaps.__getitem__)
    return best if overlaps[best] >= SHAPE_THRESHOLD else None


def _scaled(crop: Mask) -> npt.NDArray[np.float32]:
    """To TEMPLATE_SIZE square: the part of each cell that is covered, 0 to 1."""
    size = (TEMPLATE_SIZE, TEMPLATE_SIZE)
    scaled = Image.fromarray(crop.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(scaled, np.float32) / np.float32(255)


def _overlap(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    return float(np.minimum(first, second).sum() / np.maximum(first, second).sum())


@cache
def _templates() -> dict[str, npt.NDArray[np.float32]]:
    """Each shape's outline, as the drawings have it."""
    templates: dict[str, npt.NDArray[np.float32]] = {}
    for shape in SHAPES:
        scene = Scene((Thing("red", shape),), "white", size="large")
        pixels = np.asarray(draw(scene, seed=0, size=256), np.float32)
        mask = _distance(pixels, np.array(BACKGROUNDS["white"], np.float32)) > THING_THRESHOLD
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        templates[shape] = _scaled(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return templates
