"""The arithmetic of joint attention on tiles of keys and queries, and the scratch memory that it works in."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .attention_copies import Copies, Step, slot
from .attention_layout import OUT_SLOTS, QUERY_SLOTS, SUBLANES, AttentionLayout, KeyTile
from .layouts import HEAD_DIM, LANES, Ref, matmul_precision
from .softmax import LARGEST_EXPONENT

QueryTile = tuple[int, int]  # first query and number of queries


def sublane_groups(x: jax.Array) -> jax.Array:
    """``[rows, lanes]`` as ``[rows / 8, 8, lanes]``: a reduction over the first axis crosses no sublanes."""
    return x.reshape(-1, SUBLANES, x.shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
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
class Attention:
    """The arithmetic of a step on tiles of keys and queries."""

    layout: AttentionLayout
    base2_scale: float
    exponents: Any  # dtype of what exp2 takes and gives
    heads: int
    lengths_ref: Ref  # [batch] SMEM
    copies: Copies
    scratch: Scratch

    def dot(
        self, lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int], result: Any = jnp.float32
    ) -> jax.Array:
        if self.copies.interpret:
            # The same products and sums. XLA's CPU has no 16-bit matmul in every place that this one runs in.
            lhs, rhs, result = lhs.astype(jnp.float32), rhs.astype(jnp.float32), jnp.float32
        return jax.lax.dot_general(
            lhs,
            rhs,
            (((contract[0],), (contract[1],)), ((), ())),
            precision=matmul_precision(lhs.dtype),
            preferred_element_type=result,
        )

    def batch_row(self, step: Step) -> jax.Array | int:
        (batch,) = self.lengths_ref.shape
        # The step after the last one has no batch row of its own.
        return jnp.minimum(jax.lax.div(step.pair, self.heads), batch - 1) if batch > 1 else 0

    def _tail_counts(self, step: Step, first: int, size: int) -> jax.Array:
        """``[size, 1]`` bool: which of these rows of the tail are keys of this batch row."""
        row = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) + first
        text = row - self.layout.tail_text_start
        length = self.lengths_ref[self.batch_row(step)]
        return (row < self.layout.tail_image) | ((text >= 0) & (text < length))

    def clean_tail(self, step: Step, buffer: Ref, first: int, size: int) -> jax.Array:
        """Rows of the tail of a buffer of keys or values, in f32, zero where they do not count.

        0 * NaN is NaN, so a weight of 0 alone would not keep padding out of the sum. v5e selects no 16-bit
        vectors.
        """
        start = self.layout.whole_keys + first
        rows = buffer[slot(step.pair, self.layout.key_slots), start : start + size, :]
        return jnp.where(self._tail_counts(step, first, size), rows.astype(jnp.float32), 0)

    def prepare_first(self, step: Step) -> None:
        """What the first step of all needs and others find prepared; nothing here."""

    def prepare_ahead(self, following: Step, position: int, positions: int) -> None:
        """A share of what the next step needs, at one of several positions in this one; nothing here."""

    def prepare_mask(self, step: Step) -> None:
        """What `masked` reads; all logits of the step before must have been asked for."""
        mask = jnp.where(self._tail_counts(step, 0, self.layout.tail), 0.0, math.inf)
        self.scratch.tail_mask[...] = jnp.broadcast_to(mask, self.scratch.tail_mask.shape)

    def prepare_keys(self, step: Step) -> None:
        """What `logits` reads of a step's tail; all logits of the step before must have been asked for."""
        self.prepare_mask(step)
        rows = self.clean_tail(step, self.copies.key_buffer, 0, self.layout.tail)
        self.scratch.tail_key[...] = rows.astype(self.scratch.tail_key.dtype)

    def prepare_values(self, step: Step) -> None:
        """What `add` reads of a step's tail."""
        rows = self.clean_tail(step, self.copies.value_buffer, 0, self.layout.tail)
        self.scratch.tail_value[...] = rows.astype(self.scratch.tail_value.dtype)

    def _rows(self, step: Step, tile: KeyTile, buffer: Ref, tail: Ref) -> jax.Array:
        if tile.masked:
            first = tile.start - self.layout.whole_keys
            return tail[first : first + tile.size, :]
        return buffer[slot(step.pair, self.layout.key_slots), tile.start : tile.start + tile.size, :]

    def logits(self, step: Step, queries: QueryTile, tile: KeyTile) -> jax.Array:
        """``[keys, queries]`` f32, base 2; minus infinity where a key does not count."""
        first, size = queries
        query = self.copies.query_buffer[slot(step.number, QUERY_SLOTS), first : first + size, :]
        logits = self.dot(
            self._rows(step, tile, self.copies.key_buffer, self.scratch.tail_key), query, (1, 1)
        )
        if self.base2_scale != 1:
            logits *= self.base2_scale
        return self.masked(logits, tile) if tile.masked else logits

    def masked(self, logits: jax.Array, tile: KeyTile) -> jax.Array:
        first = tile.start - self.layout.whole_keys
        mask = self.scratch.tail_mask[first : first + tile.size, :]
        # Subtracted: Mosaic would fuse an addition into the matmul, at half its speed.
        return logits - jnp.concatenate([mask] * (logits.shape[1] // LANES), axis=1)

    def weights(self, queries: QueryTile, logits: jax.Array, first: bool) -> jax.Array:
        """Exact: ``exp2(s - a)``, where the anchor a is the maximum of the first tile. Others: ``exp2(s)``.

        None is ever rescaled: the smallest sum is 1 for the exact one. One that overflows is seen in
        `overflowed`.
        """
        if self.layout.softmax != "exact":
            return jnp.exp2(logits.astype(self.exponents))
        lanes = slice(queries[0], queries[0] + queries[1])
        if first:
            anchor = jnp.max(jnp.max(sublane_groups(logits), axis=0), axis=0, keepdims=True)
            self.scratch.anchors[:, lanes] = jnp.broadcast_to(anchor, (SUBLANES, queries[1]))
        anchored = sublane_groups(logits) - self.scratch.anchors[:, lanes]
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
        weights: jax.Array,  # [keys, queries]
        rescale: jax.Array | float,  # [1, queries], or 0 to start the sums
    ) -> None:
        """Add a tile's weights and weighted values to the sums, after these were multiplied by `rescale`."""
        lanes = slice(queries[0], queries[0] + queries[1])
        values = self._values(step, queries, tile)
        total, out = self.sum_up(values, weights.astype(values.dtype))
        for ref, added in ((self.scratch.sums, total), (self.scratch.out, out)):
            if isinstance(rescale, jax.Array):
                ref[:, lanes] = ref[:, lanes] * rescale + added
            elif rescale:
                ref[:, lanes] += added
            else:
                ref[:, lanes] = added

    def sum_up(self, values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of a tile, the weights' eight partial sums, and the weighted values.

        The sum of the rounded weights: the rounding error then cancels in the quotient.
        """
        total = jnp.sum(sublane_groups(weights.astype(jnp.float32)), axis=0)
        return total, self.dot(values, weights, (1, 0))

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
        logits = self.dot(key, query, (1, 1)) * self.base2_scale
        if isinstance(tile, KeyTile):
            logits = self.masked(logits, tile)
        new = jnp.maximum(maximum, jnp.max(logits, axis=0, keepdims=True))
        rescale, weights = jnp.exp2(maximum - new), jnp.exp2(logits - new)
        values = self.scratch.transposed_values[:, rows]
        weights = weights.astype(values.dtype)
        total = total * rescale + jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
        return new, total, out * rescale + self.dot(values, weights, (1, 0))
