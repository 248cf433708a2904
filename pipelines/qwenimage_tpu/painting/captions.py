"""Say in words what a scene shows."""

import random

from .vocabulary import Scene, Thing

# How often a caption leaves out some of what it could say, so that each word also acts alone.
PARTIAL_CHANCE = 0.15


def plain_caption(scene: Scene) -> str:
    """The phrasing that the examples use: "a red star on a white background"."""
    things = " and ".join(_a(f"{_size(scene)}{_name(thing)}") for thing in scene.things)
    return f"{things} on {_a(scene.background)} background{_position(scene)}"


def random_caption(scene: Scene, chance: random.Random) -> str:
    """A caption in one of several phrasings; some are partial."""
    if chance.random() < PARTIAL_CHANCE:
        return _partial_caption(scene, chance)
    things = [f"{_size(scene)}{_name(thing)}" for thing in scene.things]
    articles = " and ".join(map(_a, things))
    position, background = _position(scene), scene.background
    return chance.choice(
        [
            plain_caption(scene),
            f"a drawing of {articles} on {_a(background)} background{position}",
            f"{' and '.join(things)}{position}, {background} background",
            f"{articles}{position}, painted on {background}",
        ]
    )


def _partial_caption(scene: Scene, chance: random.Random) -> str:
    thing = chance.choice(scene.things)
    return chance.choice(
        [
            thing.colour,
            thing.shape,
            scene.background,
            _a(_name(thing)),
            _a(thing.shape),
            _a(f"{thing.colour} shape"),
            f"{_a(scene.background)} background",
            f"{_a(thing.shape)} on {_a(scene.background)} background",
            f"{_a(thing.colour)} shape on {_a(scene.background)} background",
        ]
    )


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _size(scene: Scene) -> str:
    return "" if len(scene.things) > 1 or scene.size == "medium" else f"{scene.size} "


def _position(scene: Scene) -> str:
    return "" if scene.position == "in the middle" else f" {scene.position}"


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
