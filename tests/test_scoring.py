"""The scorer, judged on true drawings, whose answers are known."""

import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from qwenimage_tpu.painting.drawings import draw, random_scene
from qwenimage_tpu.painting.scoring import Score, Seen, colour_share, look_at, score_pictures
from qwenimage_tpu.painting.vocabulary import BACKGROUNDS, COLOURS, SHAPES, Scene, Thing

PERFECT = Score(1.0, 1.0, 1.0)


def drawings(count: int, size: int = 96) -> tuple[list[Image.Image], list[Scene]]:
    chance = random.Random(7)
    scenes = [random_scene(chance) for _ in range(count)]
    return [draw(scene, seed, size) for seed, scene in enumerate(scenes)], scenes


@pytest.mark.parametrize("size", [96, 128])
def test_true_drawings_are_all_right(size: int):
    assert score_pictures(*drawings(300, size)) == PERFECT


def test_true_drawings_of_few_pixels():
    score = score_pictures(*drawings(300, 64))
    assert score.colour == score.background == 1
    assert score.shape >= 0.99


def test_blurred_and_noisy_drawings():
    images, scenes = drawings(200)
    noise = np.random.default_rng(0).normal(0, 12, (96, 96, 3))
    noisy = [Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)) for image in images]
    assert score_pictures(noisy, scenes) == PERFECT
    blurred = score_pictures([image.filter(ImageFilter.GaussianBlur(1)) for image in images], scenes)
    assert blurred.colour == blurred.background == 1
    assert blurred.shape >= 0.95


def test_a_wrong_scene_gets_nothing():
    images, scenes = drawings(100)

    def another(thing: Thing) -> Thing:
        colours, shapes = list(COLOURS), SHAPES
        return Thing(colours[colours.index(thing.colour) - 1], shapes[shapes.index(thing.shape) - 1])

    backgrounds = list(BACKGROUNDS)
    wrong = [
        replace(
            scene,
            things=tuple(another(thing) for thing in scene.things),
            background=backgrounds[backgrounds.index(scene.background) - 1],
        )
        for scene in scenes
    ]
    assert score_pictures(images, wrong) == Score(0.0, 0.0, 0.0)


def test_left_and_right_matter():
    first, second = Thing("red", "star"), Thing("blue", "ring")
    picture = draw(Scene((first, second), "white"), 0)
    assert score_pictures([picture], [Scene((second, first), "white")]) == Score(0.0, 0.0, 1.0)


def test_noise_shows_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    assert look_at(Image.fromarray(noise)) == Seen(None, None, None)
    blobs = Image.fromarray(noise).resize((12, 12)).resize((96, 96), Image.Resampling.BICUBIC)
    assert look_at(blobs).shape is None


def test_an_empty_picture_shows_a_background():
    assert look_at(Image.new("RGB", (96, 96), BACKGROUNDS["navy"])) == Seen(None, None, "navy")


def test_a_colour_between_two_names_has_none():
    picture = draw(Scene((Thing("red", "circle"),), "white"), 0)
    pixels = np.asarray(picture).copy()
    pixels[np.asarray(picture)[..., 1] < 200] = (128, 128, 0)
    assert look_at(Image.fromarray(pixels)) == Seen(None, "circle", "white")


def test_a_thing_of_two_colours_has_none():
    picture = draw(Scene((Thing("red", "square"),), "white"), 0)
    picture.paste(COLOURS["blue"], (0, 0, 48, 96), Image.fromarray(np.asarray(picture)[:, :48, 1] < 100))
    assert look_at(picture) == Seen(None, "square", "white")


@pytest.mark.parametrize("box", [(10, 40, 86, 50), (40, 10, 50, 86)], ids=["flat", "high"])
def test_a_streak_is_no_shape(box: tuple[int, int, int, int]):
    picture = Image.new("RGB", (96, 96), BACKGROUNDS["white"])
    picture.paste(COLOURS["red"], box)
    assert look_at(picture) == Seen("red", None, "white")


def test_colour_share():
    picture = Image.new("RGB", (10, 10), BACKGROUNDS["white"])
    picture.paste(COLOURS["red"], (0, 0, 5, 10))
    assert colour_share(picture, "red") == 0.5
    assert colour_share(picture, "blue") == 0


def test_as_many_pictures_as_scenes():
    images, scenes = drawings(2)
    with pytest.raises(ValueError, match="there are 2 pictures and 1 scenes"):
        score_pictures(images, scenes[:1])
    with pytest.raises(ValueError, match="there are 0 pictures and 0 scenes"):
        score_pictures([], [])
