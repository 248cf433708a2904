import random
from itertools import product

import numpy as np
import pytest

from qwenimage_tpu.painting.captions import plain_caption, random_caption
from qwenimage_tpu.painting.drawings import draw, random_scene, unseen_scenes
from qwenimage_tpu.painting.vocabulary import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_EVERY,
    SHAPES,
    Scene,
    Thing,
    all_combinations,
    is_held_out,
)

STAR = Thing("red", "star")


def scenes(count: int) -> list[Scene]:
    chance = random.Random(5)
    return [random_scene(chance) for _ in range(count)]


def test_a_seed_determines_the_drawing():
    first, again, other = (np.asarray(draw(Scene((STAR,), "white"), seed)) for seed in (3, 3, 4))
    assert first.shape == (96, 96, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_seed_determines_the_scenes_and_the_captions():
    def captions(seed: int) -> list[str]:
        chance = random.Random(seed)
        return [random_caption(random_scene(chance), chance) for _ in range(50)]

    assert captions(1) == captions(1)
    assert captions(1) != captions(2)


def test_training_never_shows_what_is_held_out():
    shown = {(thing, scene.background) for scene in scenes(4000) for thing in scene.things}
    held_out = {combination for combination in all_combinations() if is_held_out(*combination)}
    assert shown == set(all_combinations()) - held_out
    assert len(held_out) == len(list(all_combinations())) // HELD_OUT_EVERY


def test_every_pair_of_what_is_held_out_is_in_training():
    shown = [
        (thing.colour, thing.shape, background)
        for thing, background in all_combinations()
        if not is_held_out(thing, background)
    ]
    assert {pair[:2] for pair in shown} == set(product(COLOURS, SHAPES))
    assert {pair[1:] for pair in shown} == set(product(SHAPES, BACKGROUNDS))
    assert {pair[::2] for pair in shown} == set(product(COLOURS, BACKGROUNDS))


def test_unseen_scenes_are_held_out_and_always_the_same():
    unseen = unseen_scenes(100)
    assert unseen == unseen_scenes(100)
    assert unseen_scenes(25) == unseen[:25]
    assert all(is_held_out(scene.things[0], scene.background) for scene in unseen)
    assert {scene.things[0].colour for scene in unseen} == set(COLOURS)
    assert {scene.things[0].shape for scene in unseen} == set(SHAPES)
    assert {scene.background for scene in unseen} == set(BACKGROUNDS)


@pytest.mark.parametrize(
    ("scene", "caption"),
    [
        (Scene((STAR,), "white"), "a red star on a white background"),
        (Scene((Thing("orange", "ring"),), "navy"), "an orange ring on a navy background"),
        (Scene((STAR,), "gray", "small"), "a small red star on a gray background"),
        (
            Scene((STAR,), "gray", "large", "on the left"),
            "a large red star on a gray background on the left",
        ),
        (
            Scene((STAR, Thing("blue", "cross")), "black"),
            "a red star and a blue cross on a black background",
        ),
    ],
)
def test_plain_captions(scene: Scene, caption: str):
    assert plain_caption(scene) == caption


def test_positions_move_the_thing():
    def centre(position: str) -> tuple[float, float]:
        red = np.asarray(draw(Scene((STAR,), "black", position=position), 0))[..., 0] > 100
        rows, columns = np.nonzero(red)
        return float(columns.mean()), float(rows.mean())

    assert centre("on the left")[0] < 38 < 58 < centre("on the right")[0]
    assert centre("at the top")[1] < 38 < 58 < centre("at the bottom")[1]


def test_two_things_differ_in_colour():
    pairs = [scene.things for scene in scenes(500) if len(scene.things) == 2]
    assert len(pairs) > 50
    assert all(first.colour != second.colour for first, second in pairs)
