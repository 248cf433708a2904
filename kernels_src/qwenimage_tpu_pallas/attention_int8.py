"""Joint attention from int8 queries and keys, which the matrix units multiply at twice the rate.

Queries are scaled one by one, keys by pieces of 128, after their mean over the head was subtracted: that
moves all logits of a row alike, so the softmax stays (smoothing, SageAttention, arXiv 2410.02367).
The softmax is the bounded one, with its exponentials in bf16 where the TPU has these.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .attention_copies import Step, slot
from .attention_layout import INT8_PIECE, QUERY_SLOTS, SUBLANES, KeyTile, split
from .attention_tiles import Attention, QueryTile, sublane_groups
from .layouts import HEAD_DIM, LANES, ROW_ALIGNMENT, Ref

LARGEST = 127.0
TINY = 1e-30  # instead of zero, where all of a piece is zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Scratch:
    """VMEM that holds the quantized queries of a step, and the keys of its head and of the next."""

    query: Ref  # [HEAD_DIM, block_q] int8
    query_scale: Ref  # [8, block_q] f32, the same in every row
    key: Ref  # [keys, HEAD_DIM] int8
    key_scale: Ref  # [pieces, 8, LANES] f32, one number per piece
    next_key: Ref
    next_key_scale: Ref
    key_mean: Ref  # [8, HEAD_DIM] f32, the same in every row


def _quantize(x: jax.Array, largest: jax.Array) -> jax.Array:
    return jnp.round(x * (LARGEST / largest)).astype(jnp.int8)


@dataclasses.dataclass(frozen=True)
class Int8Attention(Attention):
    """Its `logits` read keys that `prepare_ahead` quantized during the step before."""

    int8: Int8Scratch

    def prepare_keys(self, step: Step) -> None:
        self.prepare_mask(step)
        self.int8.key[...] = self.int8.next_key[...]
        self.int8.key_scale[...] = self.int8.next_key_scale[...]

    def prepare_first(self, step: Step) -> None:
        self._find_mean(step)
        whole = self.layout.whole_keys // INT8_PIECE

        def piece_at(number: jax.Array, _carried: None) -> None:
            start = pl.multiple_of(number * INT8_PIECE, INT8_PIECE)
            rows = self.copies.key_buffer[slot(step.pair, self.layout.key_slots), pl.ds(start, INT8_PIECE), :]
            self._keep(number, pl.ds(start, INT8_PIECE), rows)

        if whole:
            jax.lax.fori_loop(0, whole, piece_at, None)
        for number, piece in enumerate(self.layout.int8_pieces):
            if number >= whole:
                self._quantize_keys(step, number, piece)

    def prepare_ahead(self, following: Step, position: int, positions: int) -> None:
        """A share of the next step's keys, spread evenly, because vector units have little time to spare.

        `prepare_keys` moves them to where `logits` reads them.
        """
        if position == 0:
            self._find_mean(following)
        pieces = list(enumerate(self.layout.int8_pieces))
        first, end = (index * len(pieces) // positions for index in (position, position + 1))
        for number, piece in pieces[first:end]:
            self._quantize_keys(following, number, piece)

    def _find_mean(self, step: Step) -> None:
        layout = self.layout
        total = jnp.sum(sublane_groups(self.clean_tail(step, self.copies.key_buffer, 0, layout.tail)), axis=0)
        if layout.whole_keys:
            whole = self.copies.key_buffer[slot(step.pair, layout.key_slots), : layout.whole_keys, :]
            total += jnp.sum(sublane_groups(whole.astype(jnp.float32)), axis=0)
        keys = layout.image_tokens + self.lengths_ref[self.batch_row(step)]
        mean = jnp.sum(total, axis=0, keepdims=True) / keys.astype(jnp.float32)
        self.int8.key_mean[...] = jnp.broadcast_to(mean, self.int8.key_mean.shape)

    def _quantize_keys(self, step: Step, number: int, piece: tuple[int, int]) -> None:
        first, size = piece
        if first < self.layout.whole_keys:
            rows = self.copies.key_buffer[slot(step.pair, self.layout.key_slots), first : first + size, :]
        else:
            rows = self.clean_tail(step, self.copies.key_buffer, first - self.layout.whole_keys, size)
        self._keep(number, slice(first, first + size), rows)

    def _keep(self, number: int | jax.Array, at: slice | Any, rows: jax.Array) -> None:
        smooth = sublane_groups(rows.astype(jnp.float32)) - self.int8.key_mean[...]
        largest = jnp.maximum(jnp.max(jnp.max(jnp.abs(smooth), axis=0), keepdims=True), TINY)
        self.int8.next_key[at, :] = _quantize(smooth.reshape(rows.shape), largest)
        self.int8.next_key_scale[number] = jnp.broadcast_to(largest / LARGEST, (SUBLANES, LANES))

    def _quantize_queries(self, step: Step, queries: QueryTile) -> None:
        first, size = queries
        lanes = slice(first, first + size)
        rows = self.copies.query_buffer[slot(step.number, QUERY_SLOTS), lanes, :]
        columns = rows.T.astype(jnp.float32)
        largest = jnp.max(jnp.max(jnp.abs(sublane_groups(columns)), axis=0), axis=0, keepdims=True)
        largest = jnp.maximum(largest, TINY)
        self.int8.query[:, lanes] = _quantize(columns, largest)
        scale = largest * (self.base2_scale / LARGEST)
        self.int8.query_scale[:, lanes] = jnp.broadcast_to(scale, (SUBLANES, size))

    def logits(self, step: Step, queries: QueryTile, tile: KeyTile) -> jax.Array:
        if tile.start == 0:
            self._quantize_queries(step, queries)
        lanes = slice(queries[0], queries[0] + queries[1])
        key = self.int8.key[tile.start : tile.start + tile.size, :]
        products = self.dot(key, self.int8.query[:, lanes], (1, 0), jnp.int32).astype(jnp.float32)
        query_scale = self.int8.query_scale[:, lanes]
        scaled: list[jax.Array] = []
        for first, size in split(tile.size, INT8_PIECE):
            key_scale = self.int8.key_scale[(tile.start + first) // INT8_PIECE]
            scale = query_scale * jnp.concatenate([key_scale] * (queries[1] // LANES), axis=1)
            piece = products[first : first + size]
            scaled.append((sublane_groups(piece) * scale).reshape(piece.shape))
        logits = jnp.concatenate(scaled, axis=0)
        return self.masked(logits, tile) if tile.masked else logits

    def sum_up(self, values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sums of the weights from the matrix units, too: the vector units are the busier ones."""
        eighth = jnp.full((ROW_ALIGNMENT, values.shape[1]), 1 / SUBLANES, values.dtype)
        out = self.dot(jnp.concatenate([values, eighth], axis=0), weights, (1, 0))
        return out[HEAD_DIM : HEAD_DIM + SUBLANES], out[:HEAD_DIM]
