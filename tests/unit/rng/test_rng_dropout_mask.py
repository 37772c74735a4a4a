"""Dropout masks: a pure function of (key, token, hidden unit), with the requested rate and no pattern."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatrain.rng import derive_key, keep_mask

KEY = derive_key("dropout", 1, "0.attention")
S, B, H = 64, 8, 256


def tokens(num_rows: int = S, first: int = 0) -> Tensor:
    return torch.arange(first, first + num_rows)[:, None] + torch.arange(B)[None, :] * S


def test_share_of_kept_elements() -> None:
    for probability in (0.0, 0.01, 0.1, 0.5, 0.9):
        mask = keep_mask(KEY, probability, tokens(), H)
        assert mask.shape == (S, B, H)
        assert mask.dtype == torch.bool
        error = math.sqrt(probability * (1 - probability) / mask.numel())
        assert abs(mask.double().mean().item() - (1 - probability)) <= 4 * error, probability


def test_share_is_the_same_for_every_row_sample_and_unit() -> None:
    mask = keep_mask(KEY, 0.3, tokens(), H).double()
    for dim in range(3):
        shares = mask.mean([other for other in range(3) if other != dim])
        error = math.sqrt(0.3 * 0.7 / (mask.numel() / mask.shape[dim]))
        assert (shares - 0.7).abs().max().item() < 5 * error, f"dim {dim}"


def test_mask_of_a_sharded_sequence_is_the_rows_of_the_whole() -> None:
    whole = keep_mask(KEY, 0.3, tokens(), H)
    for num_ranks in (2, 8):
        rows = S // num_ranks
        parts = [keep_mask(KEY, 0.3, tokens(rows, first=rank * rows), H) for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), whole), f"{num_ranks} ranks"


def test_mask_of_a_sample_does_not_depend_on_the_micro_batch() -> None:
    whole = keep_mask(KEY, 0.3, tokens(), H)

    for sample in range(B):
        assert torch.equal(keep_mask(KEY, 0.3, tokens()[:, sample : sample + 1], H), whole[:, sample : sample + 1])


def test_units_of_a_narrow_layer_are_those_of_a_wide_one() -> None:
    assert torch.equal(keep_mask(KEY, 0.3, tokens(), 32), keep_mask(KEY, 0.3, tokens(), H)[..., :32])


def test_dropout_masks_are_not_correlated() -> None:
    mask = keep_mask(KEY, 0.5, tokens(), H).double()
    others = {
        "site": keep_mask(derive_key("dropout", 1, "1.attention"), 0.5, tokens(), H).double(),
        "seed": keep_mask(derive_key("dropout", 2, "0.attention"), 0.5, tokens(), H).double(),
        "next token": mask.roll(1, 0),
        "next sample": mask.roll(1, 1),
        "next unit": mask.roll(1, 2),
        "diagonal": mask.roll((1, 1), (0, 2)),
        "other diagonal": mask.roll((1, -1), (0, 2)),
    }
    for what, other in others.items():
        found = torch.corrcoef(torch.stack([mask.flatten(), other.flatten()]))[0, 1].item()
        assert abs(found) < 4 / math.sqrt(mask.numel()), what


def test_a_higher_rate_drops_more_of_the_same() -> None:
    gentle, strong = keep_mask(KEY, 0.1, tokens(), H), keep_mask(KEY, 0.4, tokens(), H)

    assert not (strong & ~gentle).any()
