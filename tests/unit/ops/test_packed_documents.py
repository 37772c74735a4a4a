"""Borders of packed documents compared with the ids themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatrain.ops.documents import pack_documents


def test_documents_are_runs_of_equal_ids() -> None:
    ids = [[0, 0, 0, 1, 1, 2], [7, 7, 7, 7, 7, 7], [3, 1, 3, 3, 1, 1], [0, 1, 2, 3, 4, 5]]
    packed = pack_documents(torch.tensor(ids).t())

    for sample, row in enumerate(ids):
        lengths = [len(list(run)) for _, run in itertools.groupby(row)]
        assert packed.starts[sample].tolist() == list(itertools.accumulate(lengths, initial=0))
        assert packed.longest[sample] == max(lengths)
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
        assert packed.number_SB[:, sample].tolist() == numbers
    assert {start.dtype for start in packed.starts} == {torch.int32}


def test_sample_of_one_token_is_one_document() -> None:
    packed = pack_documents(torch.tensor([[9]]))

    assert packed.starts[0].tolist() == [0, 1]
    assert packed.longest == (1,)


def test_borders_are_never_searched_on_a_device() -> None:
    with pytest.raises(ValueError, match=r"document_SB must be \[S, B\] on the CPU, got \[4, 2\] on meta"):
        pack_documents(torch.zeros(4, 2, device="meta"))
