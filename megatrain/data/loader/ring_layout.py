"""The offsets of the words and slots in the ring of a host's data loader. Pure functions of the loader's plan.

The file begins with words, 64-bit integers in native order. Words that different processes store lie in different cache
lines. Further lines follow: for each slot, one for each producer of pictures. Then come the slots, each on its own
pages: `depth` of them for each share. Step n of a share is in slot n % depth.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Self

from megatrain.config.config import Config
from megatrain.config.pictures import patch_width
from megatrain.contracts.layout import Layout
from megatrain.data.loader.plan import LoaderPlan, shares_of
from megatrain.data.producer_work import ProducerWork

WORD_BYTES = 8
_LINE_BYTES = 64
_LEAST_CONTENT_BYTES = 4096
"""Enough for the text of an error."""
_REASON_BYTES = 1 << 15
_NUM_COMMON_LINES = 2
_SLOT_LINE_WORDS = _LINE_BYTES // WORD_BYTES
PRODUCER_WORDS = len(fields(ProducerWork))


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The sizes of a ring.

    max_microbatches: the largest number of micro-batches of a replica in any step, empty ones included. seq_len: the
    tokens of the longest samples. picture_shape: the patches of a picture, and the bytes of a patch; zeros if the slots
    have none.
    text_bytes: for the reasons of samples that are replaced; 0 if the run replaces none.
    num_producers: how many producers of pictures the loader asks.
    """

    depth: int
    num_shares: int
    num_readers: int
    max_microbatches: int
    micro_batch_size: int
    seq_len: int
    has_document_mask: bool
    picture_shape: tuple[int, int] = (0, 0)
    text_bytes: int = 0
    num_producers: int = 0

    STARTS = 0
    """Word: how often ranks have started a loader since the last slot was filled."""
    FILLS_AT_START = 1
    """Word: FILLS when STARTS was counted last."""
    ALL_STARTS = 2
    """Word: how often ranks have started a loader in this round."""
    FILLS = _SLOT_LINE_WORDS
    """Word: how many slots loaders have filled. Only the loader stores it and the next ones."""
    CACHE_USE = slice(FILLS + 1, FILLS + 5)
    """Words: the fields of CacheUse, of all loaders of the round."""

    @classmethod
    def of(cls, plan: LoaderPlan) -> Self:
        """Return the layout of the ring of a plan."""
        return cls(
            depth=plan.depth,
            num_shares=len(plan.shares),
            num_readers=plan.num_readers,
            max_microbatches=plan.steps.max_slots,
            micro_batch_size=plan.steps.batches.batch.micro_batch_size,
            seq_len=plan.seq_len,
            has_document_mask=plan.has_document_mask,
            picture_shape=plan.picture_shape,
            num_producers=plan.num_producers,
            text_bytes=_REASON_BYTES if plan.replaces_bad_samples else 0,
        )

    @classmethod
    def of_host(cls, config: Config, layout: Layout, ranks: Sequence[int]) -> Self:
        """Return the layout of the ring of the host with these ranks, in a new run."""
        shares = shares_of(layout, ranks)
        model = config.model
        has_patches = model.has_pictures and any(share.encoders for share in shares)
        asks_producers = any(source.pictures == "shards" for source in config.data_sources.values())
        return cls(
            depth=config.data.prefetch + 1,
            num_shares=len(shares),
            num_readers=len(ranks),
            max_microbatches=config.steps(layout, 0, config.train.steps).max_slots,
            micro_batch_size=config.batch.micro_batch_size,
            seq_len=max(config.seq_lens),
            has_document_mask=config.data.has_document_mask,
            picture_shape=(model.num_patches, patch_width(model)) if has_patches else (0, 0),
            num_producers=config.pictures.num_producers if asks_producers else 0,
            text_bytes=_REASON_BYTES if config.data.bad_samples == "replace" else 0,
        )

    def done(self, reader: int) -> int:
        """Return the word with the number of steps that a rank does not need any more. Only that rank stores it."""
        return (_NUM_COMMON_LINES + reader) * _SLOT_LINE_WORDS

    def filled(self, share: int, slot: int) -> int:
        """Return the word with the number of the step in a slot, plus 1; 0: none. Only the loader stores it."""
        return (_NUM_COMMON_LINES + self.num_readers + share * self.depth + slot) * _SLOT_LINE_WORDS

    def count(self, share: int, slot: int) -> int:
        """Return the word with the number of micro-batches in a slot; below 0: minus the bytes of an error's text."""
        return self.filled(share, slot) + 1

    def read(self, share: int, slot: int) -> slice:
        """Return the three words about the read of a slot: its start, its duration, the bytes of the batch."""
        first = self.filled(share, slot) + 2
        return slice(first, first + 3)

    def producers(self, share: int, slot: int) -> slice:
        """Return the words about what each producer did for the read of a slot, PRODUCER_WORDS for each."""
        first = self._num_lines * _SLOT_LINE_WORDS
        num_words = self.num_producers * PRODUCER_WORDS
        first += (share * self.depth + slot) * num_words
        return slice(first, first + num_words)

    def exit_code(self, share: int, slot: int) -> int:
        """Return the word with the exit code of the error in a slot."""
        return self.filled(share, slot) + 5

    @property
    def num_words(self) -> int:
        return self._num_lines * _SLOT_LINE_WORDS + self.num_shares * self.depth * self.num_producers * PRODUCER_WORDS

    @property
    def _num_lines(self) -> int:
        return _NUM_COMMON_LINES + self.num_readers + self.num_shares * self.depth

    @property
    def content_words(self) -> int:
        """The words of the largest batch in a slot, before its patches: see slot_content.py."""
        per_sample = 5 + self.seq_len * (3 if self.has_document_mask else 2)
        return self.max_microbatches * (4 + self.micro_batch_size * per_sample)

    @property
    def slot_bytes(self) -> int:
        num_bytes = self.content_words * WORD_BYTES
        num_bytes += self.max_microbatches * self.micro_batch_size * prod(self.picture_shape) + self.text_bytes
        return _whole_pages(max(num_bytes, _LEAST_CONTENT_BYTES))

    def content(self, share: int, slot: int) -> int:
        """Return the first byte of a slot."""
        return _whole_pages(self.num_words * WORD_BYTES) + (share * self.depth + slot) * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.content(self.num_shares, 0)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
