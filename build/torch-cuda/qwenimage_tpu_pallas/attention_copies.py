"""The copies of joint attention between HBM and VMEM: which rows, in which step, into which slot.

The kernel moves its own blocks, because Pallas' pipeline would spend 3% of the call on the scalar unit.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .attention_layout import OUT_SLOTS, QUERY_SLOTS, AttentionLayout
from .layouts import HEAD_DIM, Ref, round_up

# Rows of the tiles that XLA stores an array in: a copy of a ragged block takes the padding along.
TILE_ROWS = 8


class Step(NamedTuple):
    """One block of queries of one head. All are int32 scalars."""

    pair: jax.Array  # batch row * heads + head
    block: jax.Array  # of the head's queries
    number: jax.Array  # of the step

    @classmethod
    def at(cls, index: int, blocks: int, first_pair: jax.Array | int) -> "Step":
        """Step `index` of the run that begins with `first_pair`; steps before it have a negative index."""
        return cls(jnp.int32(first_pair + index // blocks), jnp.int32(index % blocks), jnp.int32(index))

    def next(self, blocks: int) -> "Step":
        last = self.block == blocks - 1
        return Step(
            jnp.where(last, self.pair + 1, self.pair), jnp.where(last, 0, self.block + 1), self.number + 1
        )


def slot(index: jax.Array, slots: int) -> jax.Array:
    """``index % slots``; the number of slots is a power of two, because a mask costs one scalar operation."""
    return jnp.bitwise_and(index, slots - 1)


class Copy(NamedTuple):
    """A copy that takes place if `condition` holds; None: always."""

    condition: jax.Array | None
    descriptor: Any

    def run(self, action: Callable[[Any], None], when: jax.Array | None) -> None:
        conditions = [c for c in (when, self.condition) if c is not None]
        if not conditions:
            action(self.descriptor)
            return
        pl.when(jnp.logical_and(conditions[0], conditions[-1]))(lambda: action(self.descriptor))


def start(copies: Iterable[Copy], when: jax.Array | None = None) -> None:
    for copy in copies:
        copy.run(lambda descriptor: descriptor.start(), when)


def wait(copies: Iterable[Copy], when: jax.Array | None = None) -> None:
    for copy in copies:
        copy.run(lambda descriptor: descriptor.wait(), when)


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of each step. Refs of HBM come in pairs: the image's and the text's."""

    layout: AttentionLayout
    heads: int
    interpret: bool
    queries: tuple[Ref, Ref]  # [batch, tokens, heads * HEAD_DIM]
    keys: tuple[Ref, Ref]
    values: tuple[Ref, Ref]
    outs: tuple[Ref, Ref]
    query_buffer: Ref  # [QUERY_SLOTS, block_q, HEAD_DIM]
    key_buffer: Ref  # [key_slots, keys, HEAD_DIM]
    value_buffer: Ref
    out_buffer: Ref  # [OUT_SLOTS, block_q, HEAD_DIM]
    query_semaphores: Ref
    key_semaphores: Ref
    out_semaphores: Ref

    def _row_and_columns(self, step: Step) -> tuple[jax.Array | int, Any]:
        """The batch row of a step, and the channels of its head."""
        row, head = (0, step.pair)
        if self.queries[0].shape[0] > 1:
            row, head = jax.lax.div(step.pair, self.heads), jax.lax.rem(step.pair, self.heads)
        return row, pl.ds(pl.multiple_of(head * HEAD_DIM, HEAD_DIM), HEAD_DIM)

    def _copied_rows(self, rows: int) -> int:
        return rows if self.interpret else round_up(rows, TILE_ROWS)

    def _blocks(self, step: Step, refs: tuple[Ref, Ref], copy: Callable[[Ref, slice], Any]) -> list[Copy]:
        """The copies of both streams' rows of this step: a full block, the rest of the tokens, or nothing.

        copy: makes one, of rows of a ref and of the buffer's slot.
        """
        row, columns = self._row_and_columns(step)
        image, text = self.layout.image_rows, self.layout.text_rows
        copies: list[Copy] = []
        for ref, rows, at in zip(refs, (image, text), (0, image.size), strict=True):
            first = pl.multiple_of(step.block * rows.size, TILE_ROWS)
            if rows.full_blocks:
                full = None if rows.full_blocks == self.layout.blocks else step.block < rows.full_blocks
                block = ref.at[row, pl.ds(first, rows.size), columns]
                copies.append(Copy(full, copy(block, slice(at, at + rows.size))))
            if rows.rest:
                size = self._copied_rows(rows.rest)
                block = ref.at[row, pl.ds(first, size), columns]
                copies.append(Copy(step.block == rows.full_blocks, copy(block, slice(at, at + size))))
        return copies

    def query(self, step: Step) -> list[Copy]:
        into = slot(step.number, QUERY_SLOTS)
        buffer, semaphore = self.query_buffer, self.query_semaphores.at[into]
        return self._blocks(
            step,
            self.queries,
            lambda block, rows: pltpu.make_async_copy(block, buffer.at[into, rows], semaphore),
        )

    def key(self, step: Step) -> list[Copy]:
        """Keys and values of the step's head."""
        row, columns = self._row_and_columns(step)
        into = slot(step.pair, self.layout.key_slots)
        text_start = self.layout.whole_keys + self.layout.tail_text_start
        copies: list[Copy] = []
        for refs, buffer in ((self.keys, self.key_buffer), (self.values, self.value_buffer)):
            for ref, at in zip(refs, (0, text_start), strict=True):
                size = self._copied_rows(ref.shape[1])
                # A start that is not static, because the padding of the last tile is no row of the array.
                first = pl.multiple_of(step.pair * 0, TILE_ROWS)
                copy = pltpu.make_async_copy(
                    ref.at[row, pl.ds(first, size), columns],
                    buffer.at[into, at : at + size],
                    self.key_semaphores.at[into],
                )
                copies.append(Copy(None, copy))
        return copies

    def out(self, step: Step) -> list[Copy]:
        source = slot(step.number, OUT_SLOTS)
        buffer, semaphore = self.out_buffer, self.out_semaphores.at[source]
        return self._blocks(
            step,
            self.outs,
            lambda block, rows: pltpu.make_async_copy(buffer.at[source, rows], block, semaphore),
        )
