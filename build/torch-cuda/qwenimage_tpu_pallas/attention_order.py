"""The order of joint attention's work: in a step, so that the matrix units never wait, and over the steps."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .attention_copies import Step, start, wait
from .attention_layout import AttentionLayout, KeyTile
from .attention_tiles import Attention, QueryTile, sublane_groups


@dataclasses.dataclass(frozen=True)
class _Work:
    """A tile of queries with a group of keys: the unit in which a step's work is ordered."""

    queries: QueryTile
    tiles: Sequence[KeyTile]
    first: bool  # of these queries


class _TileOrder:
    """A step's work tile by tile: the next tile's logits before the values of this one."""

    def __init__(self, attention: Attention, works: Sequence[_Work]) -> None:
        self._attention, self._works = attention, works
        (self._carried,) = attention.scratch.logits

    def begin(self, step: Step) -> None:
        """The first tile's logits, which `run` finds where the step before left them."""
        work, *_ = self._works
        self._attention.prepare_keys(step)
        self._carried[: work.tiles[0].size, : work.queries[1]] = self._attention.logits(
            step, work.queries, work.tiles[0]
        )

    def run(self, step: Step, following: Step, between: Callable[[_Work], None]) -> None:
        attention, first = self._attention, self._works[0]
        logits = self._carried[: first.tiles[0].size, : first.queries[1]]
        for position, (work, ahead) in enumerate(zip(self._works, [*self._works[1:], None], strict=True)):
            attention.prepare_ahead(following, position, len(self._works))
            if ahead:
                next_logits = attention.logits(step, ahead.queries, ahead.tiles[0])
            else:
                next_logits = logits
                self.begin(following)
            between(work)
            weights = attention.weights(work.queries, logits, work.first)
            attention.add(step, work.queries, work.tiles[0], weights, 0 if work.first else 1)
            logits = next_logits


class _GroupedOrder:
    """A step's work with one maximum per group of keys.

    The next group's logits and their maximum stand between this group's weights and values, tile by tile.
    """

    def __init__(self, attention: Attention, works: Sequence[_Work]) -> None:
        self._attention, self._works = attention, works
        self._pipelined = len(works) > 1

    def _slot(self, position: int) -> int:
        """The buffers of a group's logits: not those of its neighbours, the next step's first included."""
        last_of_odd = position == len(self._works) - 1 and position % 2 == 0 and self._pipelined
        return 2 if last_of_odd else position % 2

    def _look(self, step: Step, position: int, tile: KeyTile) -> None:
        """Keep the logits of one tile of a group, and their maximum."""
        scratch, work = self._attention.scratch, self._works[position]
        width, first = work.queries[1], tile.start - work.tiles[0].start
        logits = self._attention.logits(step, work.queries, tile)
        scratch.logits[self._slot(position)][first : first + tile.size, :width] = logits
        maxima = scratch.maxima[self._slot(position)]
        maximum = jnp.max(sublane_groups(logits), axis=0)
        maxima[:, :width] = maximum if first == 0 else jnp.maximum(maxima[:, :width], maximum)

    def begin(self, step: Step) -> None:
        """The first group's logits and maximum, which `run` finds where the step before left them."""
        if self._pipelined:
            self._look_at_first(step)

    def _look_at_first(self, step: Step) -> None:
        self._attention.prepare_keys(step)
        for tile in self._works[0].tiles:
            self._look(step, 0, tile)

    def run(self, step: Step, following: Step, between: Callable[[_Work], None]) -> None:
        if not self._pipelined:
            self._look_at_first(step)
        maximum = None
        for position, work in enumerate(self._works):
            between(work)
            maxima = self._attention.scratch.maxima[self._slot(position)][:, : work.queries[1]]
            group = jnp.max(maxima, axis=0, keepdims=True)
            before, maximum = maximum, group if work.first or maximum is None else jnp.maximum(maximum, group)
            rescale = 0 if work.first or before is None else jnp.exp2(before - maximum)
            ahead, ahead_step = position + 1, step
            if ahead == len(self._works):
                ahead, ahead_step = 0, following
                if self._pipelined:
                    self._attention.prepare_keys(following)
            ahead_tiles = self._works[ahead].tiles if self._pipelined else []
            for tile, ahead_tile in itertools.zip_longest(work.tiles, ahead_tiles):
                if ahead_tile:
                    self._look(ahead_step, ahead, ahead_tile)
                if tile:
                    self._use(step, position, tile, maximum, rescale)
                    rescale = 1

    def _use(
        self, step: Step, position: int, tile: KeyTile, maximum: jax.Array, rescale: jax.Array | int
    ) -> None:
        """Weights and values of one tile of a group whose maximum is known."""
        work = self._works[position]
        first = tile.start - work.tiles[0].start
        kept = self._attention.scratch.logits[self._slot(position)]
        logits = kept[first : first + tile.size, : work.queries[1]]
        self._attention.add(step, work.queries, tile, jnp.exp2(logits - maximum), rescale)


def _works(layout: AttentionLayout) -> list[_Work]:
    groups = layout.key_groups
    return [
        _Work(queries, tiles, number == 0)
        for queries in layout.query_tiles
        for number, tiles in enumerate(groups)
    ]


def run_steps(attention: Attention, first_pair: jax.Array | int, pairs: int) -> None:
    """All steps: step n computes while n + 1 is there, n + 2 is fetched and n - 2 is sent."""
    layout, copies, works = attention.layout, attention.copies, _works(attention.layout)
    steps, at = pairs * layout.blocks, functools.partial(Step.at, blocks=layout.blocks, first_pair=first_pair)
    blocks, tiles = layout.blocks, layout.query_tiles
    order = (_GroupedOrder if layout.softmax == "online" else _TileOrder)(attention, works)

    def move(step: Step, before: tuple[Step, Step]) -> None:
        """The copies between steps: at the end of the one before `step`, where all wait anyway."""
        n, following = step.number, step.next(blocks)
        second = following.next(blocks)
        start(copies.out(before[1]), n >= 2)
        wait(copies.out(before[0]), n >= 3)
        start(copies.query(second), n + 2 < steps)
        wait(copies.query(following), n + 1 < steps)
        wait(copies.key(following), (n + 1 < steps) & (following.block == 0))

    def fetch_keys(step: Step) -> None:
        """Last, because the keys of the step before this one are overwritten."""
        second = step.next(blocks).next(blocks)
        start(copies.key(second), (second.number < steps) & (second.block == 0))

    def finish_previous(step: Step, work: _Work) -> None:
        """While a tile of queries is begun, the one before it is finished."""
        if not work.first:
            return
        position = tiles.index(work.queries)
        attention.finish(step.number - 1 if position == 0 else step.number, tiles[position - 1])

    def start_over(step: Step, following: Step) -> None:
        attention.start_over(step)
        for tile in tiles[:-1]:
            attention.finish(step.number, tile)
        attention.prepare_keys(following)

    def body(_number: jax.Array, state: tuple[Step, Step, Step]) -> tuple[Step, Step, Step]:
        _, second_last, step = state
        following = step.next(blocks)
        attention.prepare_values(step)
        order.run(step, following, functools.partial(finish_previous, step))
        after = (second_last, second_last.next(blocks), following)
        move(following, after[:2])
        if layout.softmax == "exact":
            pl.when(attention.overflowed())(lambda: start_over(step, following))
        fetch_keys(following)
        return after

    if layout.image_rows.rest or layout.text_rows.rest:
        # Rows beyond the last query are computed too. Without numbers that could overflow in them.
        copies.query_buffer[...] = jnp.zeros(copies.query_buffer.shape, copies.query_buffer.dtype)
    first, second = at(0), at(1)
    start([*copies.query(first), *copies.key(first)])
    if steps > 1:
        start(copies.query(second))
        if blocks == 1:
            start(copies.key(second))
    wait([*copies.query(first), *copies.key(first)])
    before = (at(-3), at(-2))
    move(first, before)
    fetch_keys(first)
    attention.prepare_first(first)
    order.begin(first)
    jax.lax.fori_loop(0, steps, body, (*before, first))
    attention.finish(jnp.int32(steps - 1), tiles[-1])
    start(copies.out(at(steps - 1)))
    for last in range(max(steps - 2, 0), steps):
        wait(copies.out(at(last)))
