"""Joint attention of image and text tokens: flash attention with all keys of a head in VMEM.

Keys lie on sublanes and queries on lanes (``S^T = K Q^T``, ``O^T = V^T P^T``), so that the softmax reduces
over sublanes, which costs plain vector adds. A step works on one block of queries of one head, image and
text together, in one straight run of instructions: its matrix units never wait but at its two ends. For that

- the logits of the next tile are asked for before the values of this one (and, at the end of a step, those
  of the next step's first tile);
- a block of queries is divided by its sums, transposed and stored while the next one is worked on.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .attention_copies import Copies, Step, slot, start, wait
from .attention_layout import (
    OUT_SLOTS,
    QUERY_SLOTS,
    SUBLANES,
    AttentionConfig,
    AttentionLayout,
    KeyTile,
    default_config,
)
from .devices import TARGETS, Target, jax_device_kind
from .layouts import HEAD_DIM, LANES, Ref, matmul_precision
from .softmax import LARGEST_EXPONENT, LOG2_E, Softmax
from .validation import check_joint_attention

QueryTile = tuple[int, int]


def _sublane_groups(x: jax.Array) -> jax.Array:
    """``[rows, lanes]`` as ``[rows / 8, 8, lanes]``: a reduction over the first axis crosses no sublanes."""
    return x.reshape(-1, SUBLANES, x.shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scratch:
    """VMEM that holds what is computed."""

    transposed_values: Ref  # [HEAD_DIM, keys], the head's values, written by the first query tile
    tail_key: Ref  # [tail, HEAD_DIM], zeros where a key does not count
    tail_value: Ref
    tail_mask: Ref  # [tail, LANES] f32: 0, and infinity where a key does not count
    out: Ref  # [HEAD_DIM, block_q] f32, weighted sums of values
    sums: Ref  # [8, block_q] f32, of the weights, one partial sum per sublane
    anchors: Ref  # [8, block_q] f32, what the exact softmax subtracts, in every row
    logits: Sequence[Ref]  # [keys of a group, block_q_compute] f32
    maxima: Sequence[Ref]  # [8, block_q_compute] f32, of the logits of a group


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The arithmetic of a step on tiles of keys and queries."""

    layout: AttentionLayout
    base2_scale: float
    heads: int
    lengths_ref: Ref  # [batch] SMEM
    copies: Copies
    scratch: _Scratch

    def _dot(self, lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
        if self.copies.interpret:
            # The same products and sums. XLA's CPU has no 16-bit matmul in every place that this one runs in.
            lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        return jax.lax.dot_general(
            lhs,
            rhs,
            (((contract[0],), (contract[1],)), ((), ())),
            precision=matmul_precision(lhs.dtype),
            preferred_element_type=jnp.float32,
        )

    def _tail_counts(self, step: Step) -> jax.Array:
        """``[tail, 1]`` bool: which rows of the tail are keys of this batch row."""
        layout, (batch,) = self.layout, self.lengths_ref.shape
        # The step after the last one has no batch row of its own.
        batch_row = jnp.minimum(jax.lax.div(step.pair, self.heads), batch - 1) if batch > 1 else 0
        row = jax.lax.broadcasted_iota(jnp.int32, (layout.tail, 1), 0)
        text = row - layout.tail_text_start
        return (row < layout.tail_image) | ((text >= 0) & (text < self.lengths_ref[batch_row]))

    def _clean_tail(self, step: Step, buffer: Ref) -> jax.Array:
        """The tail's rows of a buffer of keys or values, zero where they do not count.

        0 * NaN is NaN, so a weight of 0 alone would not keep padding out of the sum. In f32, because v5e
        selects no 16-bit vectors.
        """
        rows = buffer[slot(step.pair, self.layout.key_slots), self.layout.whole_keys :, :]
        return jnp.where(self._tail_counts(step), rows.astype(jnp.float32), 0).astype(rows.dtype)

    def prepare_keys(self, step: Step) -> None:
        """What `logits` reads of a step's tail; all logits of the step before must have been asked for."""
        self.scratch.tail_key[...] = self._clean_tail(step, self.copies.key_buffer)
        mask = jnp.where(self._tail_counts(step), 0.0, math.inf)
        self.scratch.tail_mask[...] = jnp.broadcast_to(mask, self.scratch.tail_mask.shape)

    def prepare_values(self, step: Step) -> None:
        """What `add` reads of a step's tail."""
        self.scratch.tail_value[...] = self._clean_tail(step, self.copies.value_buffer)

    def _rows(self, step: Step, tile: KeyTile, buffer: Ref, tail: Ref) -> jax.Array:
        if tile.masked:
            first = tile.start - self.layout.whole_keys
            return tail[first : first + tile.size, :]
        return buffer[slot(step.pair, self.layout.key_slots), tile.start : tile.start + tile.size, :]

    def logits(self, step: Step, queries: QueryTile, tile: KeyTile) -> jax.Array:
        """``[keys, queries]`` f32, base 2; minus infinity where a key does not count."""
        first, size = queries
        query = self.copies.query_buffer[slot(step.number, QUERY_SLOTS), first : first + size, :]
        logits = self._dot(
            self._rows(step, tile, self.copies.key_buffer, self.scratch.tail_key), query, (1, 1)
        )
        if self.base2_scale != 1:
            logits *= self.base2_scale
        return self._masked(logits, tile) if tile.masked else logits

    def _masked(self, logits: jax.Array, tile: KeyTile) -> jax.Array:
        first = tile.start - self.layout.whole_keys
        mask = self.scratch.tail_mask[first : first + tile.size, :]
        # Subtracted: Mosaic would fuse an addition into the matmul, at half its speed.
        return logits - jnp.concatenate([mask] * (logits.shape[1] // LANES), axis=1)

    def weights(self, queries: QueryTile, logits: jax.Array, first: bool) -> jax.Array:
        """Bounded: ``exp2(s)``. Exact: ``exp2(s - a)``, where the anchor a is the maximum of the first tile.

        Neither is ever rescaled: the smallest sum is 1 for the latter. One that overflows is seen in
        `overflowed`.
        """
        if self.layout.softmax == "bounded":
            return jnp.exp2(logits)
        lanes = slice(queries[0], queries[0] + queries[1])
        if first:
            anchor = jnp.max(jnp.max(_sublane_groups(logits), axis=0), axis=0, keepdims=True)
            self.scratch.anchors[:, lanes] = jnp.broadcast_to(anchor, (SUBLANES, queries[1]))
        anchored = _sublane_groups(logits) - self.scratch.anchors[:, lanes]
        return jnp.exp2(anchored).reshape(logits.shape)

    def _values(self, step: Step, queries: QueryTile, tile: KeyTile) -> jax.Array:
        """``[HEAD_DIM, keys]``, transposed once per step."""
        columns = slice(tile.start, tile.start + tile.size)
        if queries == self.layout.query_tiles[0]:
            rows = self._rows(step, tile, self.copies.value_buffer, self.scratch.tail_value)
            self.scratch.transposed_values[:, columns] = rows.T
        return self.scratch.transposed_values[:, columns]

    def add(
        self,
        step: Step,
        queries: QueryTile,
        tile: KeyTile,
        weights: jax.Array,  # [keys, queries] f32
        rescale: jax.Array | float,  # [1, queries], or 0 to start the sums
    ) -> None:
        """Add a tile's weights and weighted values to the sums, after these were multiplied by `rescale`."""
        lanes = slice(queries[0], queries[0] + queries[1])
        values = self._values(step, queries, tile)
        weights = weights.astype(values.dtype)
        # The sum of the rounded weights: the rounding error then cancels in the quotient.
        total = jnp.sum(_sublane_groups(weights.astype(jnp.float32)), axis=0)
        out = self._dot(values, weights, (1, 0))
        for ref, added in ((self.scratch.sums, total), (self.scratch.out, out)):
            if isinstance(rescale, jax.Array):
                ref[:, lanes] = ref[:, lanes] * rescale + added
            elif rescale:
                ref[:, lanes] += added
            else:
                ref[:, lanes] = added

    def finish(self, index: jax.Array, queries: QueryTile) -> None:
        """Divide by the sums, and write the rows into the buffer from which step `index` is sent."""
        first, size = queries
        lanes = slice(first, first + size)
        inverse = 1 / jnp.sum(self.scratch.sums[:, lanes], axis=0, keepdims=True)
        buffer = self.copies.out_buffer
        rows = (self.scratch.out[:, lanes] * inverse).astype(buffer.dtype).T
        if buffer.dtype == jnp.bfloat16:
            # As pairs of rows: a transposed 16-bit tile is otherwise stored in two halves, each moved first.
            buffer, rows = buffer.bitcast(jnp.int32), pltpu.bitcast(rows, jnp.int32)
            first, size = first // 2, size // 2
        buffer[slot(index, OUT_SLOTS), first : first + size, :] = rows

    def overflowed(self) -> jax.Array:
        """Whether a logit of this step is so far above its row's anchor that sums may be infinite.

        Compared before the reduction, so that a row of NaN does not hide another one.
        """
        too_large = self.scratch.sums[...] >= 2.0**LARGEST_EXPONENT
        return jnp.max(jnp.where(too_large, 1.0, 0.0)) > 0

    def start_over(self, step: Step) -> None:
        """Sums of all queries of a step with running maxima: slow and small, for steps that overflowed."""
        self.prepare_keys(step)
        whole = self.layout.whole_keys // self.layout.config.block_kv_compute

        def queries_at(index: jax.Array, _carried: None) -> None:
            lanes = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
            query = self.copies.query_buffer[slot(step.number, QUERY_SLOTS), lanes, :]
            state = (
                jnp.full((1, LANES), -math.inf, jnp.float32),
                jnp.zeros((1, LANES), jnp.float32),
                jnp.zeros((HEAD_DIM, LANES), jnp.float32),
            )
            if whole:
                state = jax.lax.fori_loop(0, whole, functools.partial(self._add_online, step, query), state)
            for tile in itertools.chain(*self.layout.key_groups):
                if tile.masked:
                    state = self._add_online(step, query, tile, state)
            _, total, out = state
            # `finish` adds the eight partial sums.
            self.scratch.sums[:, lanes] = jnp.broadcast_to(total / SUBLANES, (SUBLANES, LANES))
            self.scratch.out[:, lanes] = out

        jax.lax.fori_loop(0, self.layout.config.block_q // LANES, queries_at, None)

    def _add_online(
        self,
        step: Step,
        query: jax.Array,
        tile: KeyTile | jax.Array,  # the number of a whole tile, or a tile of the tail
        state: tuple[jax.Array, jax.Array, jax.Array],  # maximum and sum [1, queries], [HEAD_DIM, queries]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        maximum, total, out = state
        if isinstance(tile, KeyTile):
            rows: slice | Any = slice(tile.start, tile.start + tile.size)
            key = self._rows(step, tile, self.copies.key_buffer, self.scratch.tail_key)
        else:
            size = self.layout.config.block_kv_compute
            rows = pl.ds(pl.multiple_of(tile * size, size), size)
            key = self.copies.key_buffer[slot(step.pair, self.layout.key_slots), rows, :]
        logits = self._dot(key, query, (1, 1)) * self.base2_scale
        if isinstance(tile, KeyTile):
            logits = self._masked(logits, tile)
        new = jnp.maximum(maximum, jnp.max(logits, axis=0, keepdims=True))
        rescale, weights = jnp.exp2(maximum - new), jnp.exp2(logits - new)
        values = self.scratch.transposed_values[:, rows]
        weights = weights.astype(values.dtype)
        total = total * rescale + jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
        return new, total, out * rescale + self._dot(values, weights, (1, 0))


@dataclasses.dataclass(frozen=True)
class _Work:
    """A tile of queries with a group of keys: the unit in which a step's work is ordered."""

    queries: QueryTile
    tiles: Sequence[KeyTile]
    first: bool
    last: bool


class _TileOrder:
    """A step's work tile by tile: the next tile's logits before the values of this one."""

    def __init__(self, attention: _Attention, works: Sequence[_Work]) -> None:
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
        for work, ahead in zip(self._works, [*self._works[1:], None], strict=True):
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

    def __init__(self, attention: _Attention, works: Sequence[_Work]) -> None:
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
        maximum = jnp.max(_sublane_groups(logits), axis=0)
        maxima[:, :width] = maximum if first == 0 else jnp.maximum(maxima[:, :width], maximum)

    def begin(self, step: Step) -> None:
        """The first group's logits and maximum, which `run` finds where the step before left them."""
        if self._pipelined:
            self._attention.prepare_keys(step)
            for tile in self._works[0].tiles:
                self._look(step, 0, tile)

    def run(self, step: Step, following: Step, between: Callable[[_Work], None]) -> None:
        if not self._pipelined:
            self._attention.prepare_keys(step)
            for tile in self._works[0].tiles:
                self._look(step, 0, tile)
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
        _Work(queries, tiles, number == 0, number == len(groups) - 1)
        for queries in layout.query_tiles
        for number, tiles in enumerate(groups)
    ]


def _run_steps(attention: _Attention, first_pair: jax.Array | int, pairs: int) -> None:
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
    order.begin(first)
    jax.lax.fori_loop(0, steps, body, (*before, first))
    attention.finish(jnp.int32(steps - 1), tiles[-1])
    start(copies.out(at(steps - 1)))
    for last in range(max(steps - 2, 0), steps):
        wait(copies.out(at(last)))


def _kernel(
    lengths_ref: Ref,
    image_query_ref: Ref,
    image_key_ref: Ref,
    image_value_ref: Ref,
    text_query_ref: Ref,
    text_key_ref: Ref,
    text_value_ref: Ref,
    image_out_ref: Ref,
    text_out_ref: Ref,
    buffers: Sequence[Ref],
    semaphores: Sequence[Ref],
    scratch: _Scratch,
    *,
    layout: AttentionLayout,
    base2_scale: float,
    cores: int,
    interpret: bool,
) -> None:
    batch, _, channels = image_query_ref.shape
    heads = channels // HEAD_DIM
    copies = Copies(
        layout,
        heads,
        interpret,
        (image_query_ref, text_query_ref),
        (image_key_ref, text_key_ref),
        (image_value_ref, text_value_ref),
        (image_out_ref, text_out_ref),
        *buffers,
        *semaphores,
    )
    attention = _Attention(layout, base2_scale, heads, lengths_ref, copies, scratch)
    pairs = batch * heads // cores
    _run_steps(attention, pl.program_id(0) * pairs if cores > 1 else 0, pairs)


def scratch_shapes(layout: AttentionLayout, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Buffers of the copies, their semaphores, and `_Scratch`."""
    block_q, width = layout.config.block_q, layout.query_tiles[0][1]
    group = max(sum(tile.size for tile in tiles) for tiles in layout.key_groups)
    slots, maxima = (layout.logit_slots,) * 2 if layout.softmax == "online" else (1, 0)
    activation = functools.partial(pltpu.VMEM, dtype=dtype)
    statistic = functools.partial(pltpu.VMEM, dtype=jnp.float32)
    buffers = [
        activation((QUERY_SLOTS, block_q, HEAD_DIM)),
        *[activation((layout.key_slots, layout.keys, HEAD_DIM))] * 2,
        activation((OUT_SLOTS, block_q, HEAD_DIM)),
    ]
    semaphores = [pltpu.SemaphoreType.DMA((n,)) for n in (QUERY_SLOTS, layout.key_slots, OUT_SLOTS)]
    scratch: Any = cast(Any, _Scratch)(
        activation((HEAD_DIM, layout.keys)),
        *[activation((layout.tail, HEAD_DIM))] * 2,
        statistic((layout.tail, LANES)),
        statistic((HEAD_DIM, block_q)),
        *[statistic((SUBLANES, block_q))] * 2,
        [statistic((group, width))] * slots,
        [statistic((SUBLANES, width))] * maxima,
    )
    return buffers, semaphores, scratch


def joint_attention(
    image_query: jax.Array,
    image_key: jax.Array,
    image_value: jax.Array,
    text_query: jax.Array,
    text_key: jax.Array,
    text_value: jax.Array,
    text_lengths: jax.Array,
    *,
    softmax: Softmax = "online",
    scale: float = HEAD_DIM**-0.5,
    config: AttentionConfig | None = None,
    device_kind: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Non-causal attention of image and text queries to image and text keys, per head.

    ``softmax(scale * q k^T) v``, where the keys of batch row b are all image keys and the first
    ``text_lengths[b]`` text keys. Key order does not matter, so a text mask of any pattern is served
    by moving its valid tokens to the front. Whatever stands in the other text keys and values (NaN
    included) has no effect. Text queries beyond the length are computed like any other row. Every
    row has a valid key, as there is at least one image token.

    Args:
        image_query, image_key, image_value: ``[batch, image_tokens, heads * 128]``, bf16 or f32.
        text_query, text_key, text_value: ``[batch, text_tokens, heads * 128]``, the same dtype.
        text_lengths: ``[batch]`` int32; values outside ``[0, text_tokens]`` are clamped to it.
        softmax: "bounded", "exact" or "online", see the module `softmax`.
        scale: factor of the logits. ``math.log(2)`` costs nothing: the kernel works in base 2.
        config: block sizes; None takes those tuned for the TPU and the shape.
        device_kind: the TPU that this is traced for, as PJRT names it; None asks JAX.
        interpret: run in Pallas' interpret mode, on any platform.

    Returns:
        The image's and the text's rows, with the shapes and dtype of `image_query` and `text_query`.

    Raises:
        ValueError: shapes or dtypes do not belong together, or `softmax` is unknown.
        NotImplementedError: another dtype or head size, or the keys of a head do not fit VMEM.
    """
    check_joint_attention(
        image_query,
        image_key,
        image_value,
        text_query,
        text_key,
        text_value,
        text_lengths,
        softmax,
    )
    image_tokens, text_tokens = image_query.shape[1], text_query.shape[1]
    target = TARGETS.get(jax_device_kind() if device_kind is None else device_kind, Target("", 1))
    config = config or default_config(
        image_tokens, text_tokens, softmax, image_query.dtype.name, target.generation
    )
    layout = AttentionLayout(image_tokens, text_tokens, softmax, config)
    vmem.check_fits(
        "joint_attention",
        layout.vmem_bytes(image_query.dtype.itemsize),
        "use fewer tokens, bf16, or smaller blocks",
    )
    pairs = image_query.shape[0] * image_query.shape[2] // HEAD_DIM
    cores = target.cores if pairs % target.cores == 0 else 1
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(
            _kernel, layout=layout, base2_scale=_base2_scale(scale), cores=cores, interpret=interpret
        ),
        grid=(cores,),
        in_specs=[smem, *[hbm] * 6],
        out_specs=[hbm, hbm],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (image_query, text_query)],
        scratch_shapes=scratch_shapes(layout, image_query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES,
            # Copies of ragged blocks end in the padding of the last tile, and checks cost 1% of the call.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"joint_attention_{softmax}",
    )(
        jnp.clip(text_lengths, 0, text_tokens),
        image_query,
        image_key,
        image_value,
        text_query,
        text_key,
        text_value,
    )


def _base2_scale(scale: float) -> float:
    """`scale` times log2(e); exactly 1 for ``math.log(2)``, whatever the rounding of the two logarithms."""
    product = scale * LOG2_E
    return 1.0 if math.isclose(product, 1, rel_tol=1e-15) else product
