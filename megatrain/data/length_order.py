"""Samples whose length may change: what the orders of windows (order.py) and of packed samples have in common.

An epoch that begins with samples of a length consists of windows of this length, which are pieces of the token stream
or bins of documents, in an order that belongs to the epoch. stretches.py determines which windows, or which parts of
them, a sample is taken from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from megatrain.data.parts import EpochParts
from megatrain.data.stretches import LengthChange, Stretch, following
from megatrain.data.token_stream import Int64, SamplePieces


class LengthOrder(ABC):
    """An order of samples. seq_len: the length of the first samples. later: the changes of the length, ascending."""

    __slots__ = ()
    seq_len: int
    later: tuple[LengthChange, ...]

    @abstractmethod
    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order of the same tokens with these lengths. The first one begins at index 0.

        Raises: DataError when the source cannot provide samples of one of the lengths.
        """

    @abstractmethod
    def epoch_parts(self, epoch_len: int) -> EpochParts:
        """Return the parts of an epoch that begins with samples of this length. Numbers of tokens include padding."""

    @abstractmethod
    def windows(self, epoch_len: int, epochs: Int64, parts: Int64, numbers: Int64, seq_len: int) -> SamplePieces:
        """Return the pieces of some windows of `seq_len`: at least one for each window, which is given by an epoch, a
        part of it, and the window's number in the order of that part.

        Shapes: epochs, parts and numbers [N]. epoch_len: the length with which the epochs began.
        If a part's number of tokens is no multiple of seq_len, the last window in its order is shorter.
        Raises: BadTokensError when a file of packed samples is damaged at these windows.
        """

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples of an epoch of the first length."""
        return self.epoch_parts(self.seq_len).samples_from(0, self.seq_len)

    def lengths(self, indices: Int64) -> Int64:
        """Return the number of positions of each sample. Shapes: all [N]."""
        known = [self.seq_len, *(change.seq_len for change in self.later)]
        return np.array(known, dtype=np.int64)[self._stretch_numbers(indices)]

    def num_assembled(self, index: int) -> int:
        """Return how many samples of the length of sample `index` are assembled from windows of another length."""
        return _stretches(self)[int(self._stretch_numbers(np.array([index]))[0])].num_rest

    def epochs_after(self, num_samples: int) -> float:
        """Return how many passes over the stream the first `num_samples` samples make."""
        stretch = _stretches(self)[int(self._stretch_numbers(np.array([num_samples]))[0])]
        at = following(stretch, LengthChange(num_samples, stretch.seq_len), self.epoch_parts)
        num_tokens = self.epoch_parts(at.epoch_len or stretch.seq_len).num_tokens_from(0)
        left = at.tokens_left(self.epoch_parts) if at.epoch_len else 0
        return (at.next_epoch * num_tokens - left) / num_tokens

    def pieces(self, cursors: Int64) -> SamplePieces:
        """Return the pieces of each sample: those of its window, or of parts of windows of the previous length.

        Raises: BadTokensError when a file of packed samples is damaged at these samples.
        """
        indices = np.asarray(cursors, dtype=np.int64)
        numbers = self._stretch_numbers(indices)
        found = [_NO_PIECES]
        for number in np.unique(numbers).tolist():
            found += self._pieces_within(_stretches(self)[number], np.flatnonzero(numbers == number), indices)
        owners, starts, labels = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        in_order = np.argsort(owners, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(indices)))]).astype(np.int64)
        return SamplePieces(starts[in_order], labels[in_order], bounds)

    def _stretch_numbers(self, indices: Int64) -> Int64:
        return np.searchsorted([change.first_index for change in self.later], indices, side="right").astype(np.int64)

    def _pieces_within(self, stretch: Stretch, owners: Int64, indices: Int64) -> list[_OwnedPieces]:
        """Return the pieces of samples `indices[owners]` of a stretch: of whole epochs, later parts and the rest."""
        places = indices[owners] - stretch.first_index
        seq_len, num_rest, num_begun = stretch.seq_len, stretch.num_rest, stretch.num_rest + stretch.num_later
        found = []
        of_epochs = places >= num_begun
        if of_epochs.any():
            parts = self.epoch_parts(seq_len)
            epochs, within = np.divmod(places[of_epochs] - num_begun, parts.samples_from(0, seq_len))
            windows = self.windows(seq_len, epochs + stretch.next_epoch, *parts.located(within, seq_len), seq_len)
            found.append(_owned(owners[of_epochs], windows))
        of_later = (places >= num_rest) & ~of_epochs
        if of_later.any():
            within = places[of_later] - num_rest
            located = self.epoch_parts(stretch.epoch_len).located(within, seq_len, stretch.part)
            windows = self.windows(stretch.epoch_len, np.full_like(within, stretch.epoch), *located, seq_len)
            found.append(_owned(owners[of_later], windows))
        of_rest = places < num_rest
        if of_rest.any():
            found.append(self._pieces_of_rest(stretch, owners[of_rest], places[of_rest]))
        return found

    def _pieces_of_rest(self, stretch: Stretch, owners: Int64, places: Int64) -> _OwnedPieces:
        """Return the pieces of samples that are cut from the rest of a part, which consists of windows of the previous
        length.

        Positions count the tokens of the part, with padding, in the order of these windows, of which only the last may
        be shorter. A sample of padding alone has no piece.
        """
        old_len, parts = stretch.rest_len, self.epoch_parts(stretch.epoch_len)
        first = stretch.rest_start + places * stretch.seq_len
        end = np.minimum(first + stretch.seq_len, parts.num_tokens_of(stretch.part - 1, old_len))
        counts = (end - 1) // old_len - first // old_len + 1
        owner = np.repeat(np.arange(len(places)), counts)
        numbers = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + (first // old_len)[owner]
        epochs, of_part = np.full_like(numbers, stretch.epoch), np.full_like(numbers, stretch.part - 1)
        found = _owned(np.arange(len(owner)), self.windows(stretch.epoch_len, epochs, of_part, numbers, old_len))
        # where the piece begins in its window
        before = np.cumsum(found.labels) - found.labels
        places = before - before[np.searchsorted(found.owners, found.owners)]
        low = np.maximum(first[owner] - numbers * old_len, 0)[found.owners]
        high = (end[owner] - numbers * old_len)[found.owners]
        starts, ends = np.maximum(low, places), np.minimum(high, places + found.labels)
        kept = starts < ends
        return _OwnedPieces(
            owners[owner][found.owners][kept], (found.starts + starts - places)[kept], (ends - starts)[kept]
        )


class _OwnedPieces(NamedTuple):
    """Pieces, and for each the place of its sample among the requested ones. Shapes: all [P]."""

    owners: Int64
    starts: Int64
    labels: Int64


_NO_PIECES = _OwnedPieces(*[np.zeros(0, dtype=np.int64)] * 3)


def _owned(owners: Int64, windows: SamplePieces) -> _OwnedPieces:
    """Return the pieces of windows with the owner of each window. Shape: owners [windows]."""
    return _OwnedPieces(np.repeat(owners, np.diff(windows.bounds)), windows.starts, windows.labels)


@lru_cache(maxsize=2048)
def _stretches(order: LengthOrder) -> tuple[Stretch, ...]:
    """Return the stretches of an order: one for each length."""
    found = [Stretch(0, order.seq_len)]
    for change in order.later:
        found.append(following(found[-1], change, order.epoch_parts))
    return tuple(found)
