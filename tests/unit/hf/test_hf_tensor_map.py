"""The tables of tensors: every element of ours has one place in theirs, except the rows that pad the vocabulary."""

from __future__ import annotations

import itertools

import torch

from megatrain.hf.families import family_for_export
from megatrain.hf.tensor_map import parameter_shapes
from tests.helpers.hf_models import CASES, tiny


def test_every_element_is_stored_once() -> None:
    for case in CASES:
        model = tiny(case)
        marks = {name: torch.zeros(shape) for name, shape in parameter_shapes(model).items()}
        for tensor in family_for_export(model).tensors(model):
            stored = torch.zeros(tensor.shape)
            for theirs, ours in tensor.matching_views(stored, marks[tensor.parameter]):
                theirs += 1
                ours += 1
            assert stored.eq(1).all(), (case, tensor.name)
        for name, mark in marks.items():
            is_vocabulary = name in ("embedding.word.weight", "loss_head.weight")
            assert mark[: model.vocab_size if is_vocabulary else None].eq(1).all(), (case, name)
            assert not is_vocabulary or mark[model.vocab_size :].eq(0).all(), (case, name)


def test_tensors_of_one_parameter_stand_together() -> None:
    for case in CASES:
        model = tiny(case)
        order = [tensor.parameter for tensor in family_for_export(model).tensors(model)]
        changes = sum(first != second for first, second in itertools.pairwise(order))
        assert changes + 1 == len(set(order)), f"{case}: a parameter would be read twice"
