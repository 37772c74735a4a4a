"""What the samples of one length are taken from, after changes of the sample length. Pure functions on integers.

A change may fall in the middle of a part (parts.py). The rest of this part is dealt first: its remaining windows of the
old length are concatenated in their order, and cut into samples of the new length. So longer samples have several
pieces, and the last sample may be shorter. All later parts of the epoch, and all later epochs, are windows of the new
length. So each token of an epoch is in exactly one sample, after any sequence of changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from megatrain.data.parts import EpochParts

PartsOf: TypeAlias = Callable[[int], EpochParts]
"""Returns the parts of an epoch that begins with samples of a length."""


class LengthChange(NamedTuple):
    """From number `first_index` of a source's order on, samples have `seq_len` tokens."""

    first_index: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """The samples of `seq_len` from `first_index` on: the rest of a part, the later parts of its epoch, whole epochs.

    epoch, epoch_len: the epoch that was begun, and the length of the samples with which it began; 0: none.
    part: the first of its later parts. num_later: how many samples they have.
    rest_len: the length of the windows in the part before `part`; 0: this part has no rest. rest_start: how many of its
    tokens, in the order of these windows, were read before. num_rest: how many samples the rest has.
    next_epoch: the first whole epoch.
    """

    first_index: int
    seq_len: int
    next_epoch: int = 0
    epoch: int = 0
    epoch_len: int = 0
    part: int = 0
    num_later: int = 0
    rest_len: int = 0
    rest_start: int = 0
    num_rest: int = 0

    def tokens_left(self, parts_of: PartsOf) -> int:
        """Return how many tokens of the epoch that was begun are left at the beginning of the stretch."""
        parts = parts_of(self.epoch_len)
        rest = parts.num_tokens_of(self.part - 1, self.rest_len) - self.rest_start if self.rest_len else 0
        return parts.num_tokens_from(self.part) + rest


def following(before: Stretch, change: LengthChange, parts_of: PartsOf) -> Stretch:
    """Return the stretch that begins with `change`, which is in `before`."""
    left = change.first_index - before.first_index
    epoch, epoch_len, part = before.epoch, before.epoch_len, before.part
    rest_len = rest_start = 0
    if left < before.num_rest:
        rest_len, rest_start = before.rest_len, before.rest_start + left * before.seq_len
    else:
        left -= before.num_rest
        if left >= before.num_later:
            epoch_len, part = before.seq_len, 0
            num_epochs, left = divmod(left - before.num_later, parts_of(epoch_len).samples_from(0, epoch_len))
            epoch = before.next_epoch + num_epochs
        located = parts_of(epoch_len).located(np.array([left], dtype=np.int64), before.seq_len, part)
        part, left = (int(numbers[0]) for numbers in located)
        if left:
            rest_len, rest_start, part = before.seq_len, left * before.seq_len, part + 1
    if not part:
        return Stretch(*change, next_epoch=epoch)
    parts = parts_of(epoch_len)
    return Stretch(
        *change,
        next_epoch=epoch + 1,
        epoch=epoch,
        epoch_len=epoch_len,
        part=part,
        num_later=parts.samples_from(part, change.seq_len),
        rest_len=rest_len,
        rest_start=rest_start,
        num_rest=-(-(parts.num_tokens_of(part - 1, rest_len) - rest_start) // change.seq_len) if rest_len else 0,
    )
