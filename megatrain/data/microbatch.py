"""A micro-batch: the stretches of token streams that are its samples, and how they become arrays.

Legend: S sequence, B micro-batch, K pictures, P patches, C bytes of a patch. Arrays are sequence-first and int64,
patches are uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.data.bad_tokens import BadSampleError
from megatrain.data.patches import Patches
from megatrain.data.token_stream import TokenStream

_NO_TOKENS = np.zeros(0, dtype=np.int64)
OnBad = Callable[[int, BadSampleError], None]
"""Gets the number of a sample that cannot be used, and the error."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The input of one forward pass.

    labels_SB is the next token, or -100. document_SB numbers the documents within each sample from 0, for attention
    that must not cross them; None when the run has no document mask. sample_B is the sample's number in the run, or
    NO_SAMPLE: an empty micro-batch fills a slot of the pipeline, and all its labels are -100.
    num_labels_B: how many labels of each sample have a loss.
    squared_lengths: the sum of the squared lengths of the stretches that attend to themselves: the documents, or the
    whole samples without a document mask. Source: OSDI'25 sec. 5.2: the compute time of a micro-batch follows this sum.
    num_documents: the number of these stretches, without the padding.
    patches_PKC: of the pictures, whose rows are the first of their samples. picture_place_K: the place in the
    micro-batch of the sample that each picture belongs to, ascending. Both are None if no sample has a picture, or the
    rank does not encode them.
    """

    tokens_SB: NDArray[np.int64]
    labels_SB: NDArray[np.int64]
    document_SB: NDArray[np.int64] | None
    sample_B: NDArray[np.int64]
    num_labels_B: NDArray[np.int64]
    squared_lengths: int
    num_documents: int
    patches_PKC: Patches | None = None
    picture_place_K: NDArray[np.int64] | None = None

    @property
    def num_label_tokens(self) -> int:
        return int(self.num_labels_B.sum())


class TokenWindow(NamedTuple):
    """A stretch of a token stream: its first token, and how many labels it has. It spans one token more than labels."""

    dataset: TokenStream
    start: int
    num_labels: int

    def read(self) -> NDArray[Any]:
        """Return the tokens. Raises: BadSampleError when they cannot be used."""
        return self.dataset.window(self.start, self.num_labels + 1)


def _refuse(number: int, error: BadSampleError) -> None:
    raise error


def assemble(
    samples: Sequence[Sequence[TokenWindow]],
    samples_B: NDArray[np.int64],
    seq_len: int,
    has_document_mask: bool,
    on_bad: OnBad = _refuse,
    *,
    has_tokens: bool = True,
    first_rows: Sequence[int] = (),
    fields_FSB: NDArray[np.int64] | None = None,
) -> MicroBatch:
    """Return the micro-batch of these samples. The windows of a sample follow each other from its first row on.

    first_rows: one for each sample, or none, if all are 0. Rows before the first row are those of the picture: they
    have token 0 and label -100, and belong to the first document. A sample with fewer labels than `seq_len` is padded
    with the same token and label. With `has_document_mask`, each window begins another document, as does the padding,
    and the last token of a document gets label -100 too, because it would have to predict the first token of an
    unrelated document. Without `has_tokens`, tokens are not read; see BatchReader.read_step. fields_FSB: the memory for
    tokens, labels and, with the mask, documents; None: new memory.
    """
    if fields_FSB is None:
        fields_FSB = np.empty((2 + has_document_mask, seq_len, len(samples)), dtype=np.int64)
    tokens_SB, labels_SB = fields_FSB[:2]
    document_SB = fields_FSB[2] if has_document_mask else None
    num_labels_B = np.zeros(len(samples), dtype=np.int64)
    squared_lengths = 0 if has_document_mask else len(samples) * seq_len**2
    num_documents = 0
    for sample, windows in enumerate(samples):
        first_row = first_rows[sample] if first_rows else 0
        place, bounds = first_row, [np.zeros(1, dtype=np.int64)]
        try:
            contents = [
                (*window, window.read() if has_tokens else _NO_TOKENS) for window in windows if window.num_labels
            ]
            num_documents += not has_document_mask and bool(windows)
        except BadSampleError as error:
            on_bad(int(samples_B[sample]), error)
            contents = []
        for dataset, start, count, window in contents:
            end = place + count
            if has_tokens:
                tokens_SB[place:end, sample] = window[:-1]
                labels_SB[place:end, sample] = window[1:]
            num_labels_B[sample] += count
            if has_document_mask:
                firsts = dataset.document_starts_between(start + 1, start + count + 1) + (place - start)
                labels_SB[firsts - 1, sample] = IGNORED_LABEL
                # an empty document begins where the next one does
                num_labels_B[sample] -= np.count_nonzero(np.diff(firsts, prepend=place))
                bounds += [firsts, np.array([end])] if end < seq_len else [firsts]
            place = end
        unread = place if has_tokens else 0
        for rows in (slice(first_row), slice(unread, None)):
            tokens_SB[rows, sample] = 0
            labels_SB[rows, sample] = IGNORED_LABEL
        if document_SB is not None:
            lengths = np.diff(np.concatenate((*bounds, [seq_len])))
            document_SB[:, sample] = np.repeat(np.arange(len(lengths)), lengths)
            squared_lengths += int(lengths @ lengths)
            num_documents += int(np.count_nonzero(lengths)) - (place < seq_len)
    return MicroBatch(
        tokens_SB=tokens_SB,
        labels_SB=labels_SB,
        document_SB=document_SB,
        sample_B=samples_B.copy(),
        num_labels_B=num_labels_B,
        squared_lengths=squared_lengths,
        num_documents=num_documents,
    )
