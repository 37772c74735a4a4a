"""Mixtures of samples with and without pictures: what is read, what it costs, and how replicas share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.config.model_products import document_cost, products_per_pair, products_per_picture, products_per_token
from megatrain.config.picture_share import picture_share
from megatrain.config.serialize import to_toml
from megatrain.data.imbalance import expected_imbalance
from megatrain.data.step_batch import StepBatch
from megatrain.telemetry.flops import attended_pairs
from megatrain.training.training_data import open_reader
from tests.helpers.read_samples import read_configured
from tests.helpers.training_case import make_config

Tables = dict[str, dict[str, Any]]
PATCHES, SEQ_LEN = 4, 16
PICTURES: dict[str, Any] = {"picture_size": 24, "patch_size": 12, "encoder_num_layers": 12}
FIRST_TOKEN = 30
"""Tokens of the text; the words of captions have smaller numbers."""


@pytest.fixture
def mixture(write_tokens: Callable[..., Path]) -> Tables:
    """Return the tables of a mixture of three samples of text for each with a picture."""
    random = np.random.default_rng(3)
    documents = [random.integers(FIRST_TOKEN, 90, length).tolist() for length in random.integers(1, 30, 200)]
    return {
        "model": PICTURES,
        "data_source": {"pictures": "drawn", "weight": 1.0},
        "data_source-2": {"path": str(write_tokens(documents, "web", 90)), "name": "web", "weight": 3.0},
    }


def config_of(mixture: Tables, dp_size: int, **data: Any) -> Config:
    sizes = {"parallel": {"dp_size": dp_size}, "batch": {"micro_batch_size": 2, "global_batch_size": 24}}
    return make_config(mixture, sizes, {"data": data})


def num_pictures(part: StepBatch) -> list[int]:
    """Return the number of pictures of each micro-batch."""
    return [0 if one.picture_place_K is None else len(one.picture_place_K) for one in part.microbatches]


def samples_of(parts: list[StepBatch]) -> dict[int, tuple[bytes, bytes]]:
    """Return tokens, labels and documents of each sample, and its patches or none, by its number."""
    found = {}
    for micro in (micro for part in parts for micro in part.microbatches):
        places = [] if micro.picture_place_K is None else micro.picture_place_K.tolist()
        for place, number in enumerate(micro.sample_B.tolist()):
            columns = [
                one[:, place] for one in (micro.tokens_SB, micro.labels_SB, micro.document_SB) if one is not None
            ]
            patches = b""
            if place in places:
                assert micro.patches_PKC is not None
                patches = micro.patches_PKC[:, places.index(place)].tobytes()
            found[number] = b"".join(column.tobytes() for column in columns), patches
    return found


def test_text_has_all_rows_and_pictures_the_first_ones(mixture: Tables) -> None:
    config = config_of(mixture, 1)
    alone = make_config({"model": PICTURES, "data": {"pictures": "drawn"}, "batch": {"global_batch_size": 24}})
    patches_of = [patches for _, patches in samples_of(read_configured(alone)).values()]
    (part,) = read_configured(config)
    assert part.sources is not None
    assert part.sources.names == ("drawn pictures", "web")
    is_pictured_MB = part.sources.source_MB == 0
    assert part.num_pictures == is_pictured_MB.sum()

    found, num_seen = samples_of([part]), 0
    for micro, sources_B in zip(part.microbatches, part.sources.source_MB, strict=True):
        for place, source in enumerate(sources_B.tolist()):
            tokens, labels = micro.tokens_SB[:, place], micro.labels_SB[:, place]
            _, patches = found[int(micro.sample_B[place])]
            if source == 1:
                assert not patches
                assert (tokens >= FIRST_TOKEN).all()
                assert (labels[:-1] == tokens[1:]).all()
                assert micro.num_labels_B[place] == SEQ_LEN
            else:
                # the pictures of a mixture are those of a run with pictures only, in the same order
                assert patches == patches_of[num_seen]
                assert (labels >= 0).tolist() == [False] * PATCHES + [True] * 4 + [False] * 8
                num_seen += 1
    assert num_seen == part.num_pictures
    parts = [part for step in range(4) for part in read_configured(config, step)]
    assert {count for part in parts for count in num_pictures(part)} == {0, 1, 2}


def test_mixture_is_the_same_for_any_dealing(mixture: Tables) -> None:
    """Replicas without samples have empty micro-batches, which have no pictures."""
    expected = samples_of(read_configured(config_of(mixture, 1, has_document_mask=True), 1))
    for dp_size in (2, 5):
        for balance in ("none", "cost"):
            parts = read_configured(config_of(mixture, dp_size, has_document_mask=True, balance=balance), 1)
            assert samples_of(parts) == expected, (dp_size, balance)
            assert {part.num_pictures for part in parts} == {sum(bool(patches) for _, patches in expected.values())}


@pytest.mark.parametrize("has_document_mask", [False, True])
def test_cost_counts_rows_and_picture(mixture: Tables, has_document_mask: bool) -> None:
    config = config_of(mixture, 1, has_document_mask=has_document_mask)
    (part,) = read_configured(config)
    cost, model = document_cost(config.model), config.model
    per_token, per_picture = (
        round(products / products_per_pair(model))
        for products in (products_per_token(model), products_per_picture(model))
    )
    expected = []
    for micro in part.microbatches:
        places = [] if micro.picture_place_K is None else micro.picture_place_K.tolist()
        for place in range(2):
            lengths = [SEQ_LEN] if micro.document_SB is None else np.bincount(micro.document_SB[:, place]).tolist()
            pairs = model.num_layers * sum(attended_pairs(length) for length in lengths)
            expected.append(per_token * SEQ_LEN + pairs + per_picture * (place in places))

    found = open_reader(config).costs(np.arange(24), cost)
    assert found.tolist() == expected
    assert per_picture > 0


def test_pictures_do_not_pile_up_on_a_replica(mixture: Tables) -> None:
    config = config_of(mixture, 4, balance="cost")
    for step in range(6):
        counts = [sum(num_pictures(part)) for part in read_configured(config, step)]
        assert max(counts) - min(counts) <= 1, (step, counts)

    reader = replace(open_reader(config), balanced_cost=None)
    plans = list(config.steps(config.layout(None), 0, 6).plans())
    found = expected_imbalance(reader, plans, document_cost(config.model))
    assert found.in_order > 1.05
    assert found.by_cost < 1 + (found.in_order - 1) / 2


def test_dry_run_states_the_imbalance_by_pictures(
    mixture: Tables,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatrain.planning.plan_text.dry_run", lambda _: "")  # the memory of ranks takes seconds
    file = tmp_path / "config.toml"
    for has_document_mask, measure in ((False, "pictures"), (True, "lengths of documents and the pictures")):
        file.write_text(to_toml(config_of(mixture, 4, has_document_mask=has_document_mask)))
        assert main(["config", "check", str(file), "--dry-run"]) == 0
        assert f'data.balance="none": by the {measure}, the replica that computes longest' in capsys.readouterr().out


def test_share_of_pictures_follows_the_stages(mixture: Tables) -> None:
    later = {"after_tokens": 24 * SEQ_LEN, "weights": "drawn pictures=1, web=4"}
    last = {"after_tokens": 48 * SEQ_LEN, "weights": "web=1"}
    config = make_config(mixture, {"data_stage": later, "data_stage-2": last})

    assert [picture_share(config, sample) for sample in (0, 23, 24, 47, 48)] == [0.25, 0.25, 0.2, 0.2, 0.0]
    assert picture_share(make_config({"model": PICTURES, "data": {"pictures": "drawn"}})) == 1.0
    assert picture_share(make_config({"data": {"train": "web"}})) == 0.0
