"""Evaluation of a single rank: the loss, the counted tokens, bits per byte, and the state afterwards."""

from __future__ import annotations

import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.config import Config
from megatrain.contracts.errors import DataError
from megatrain.data.drawn_pictures import NUM_PICTURES, drawn, scene_of
from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta
from megatrain.data.patches import patchify
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producer import Producer
from megatrain.data.pictures.protocol import PRODUCER_LIMITS
from megatrain.model import PatchRows, TokenContext, Transformer
from megatrain.peers.link import SECRET_BYTES, PeerAddress
from megatrain.peers.server import PeerServer, listen
from megatrain.training.bad_samples import disagreement
from megatrain.training.evaluation import Evaluation, combined, evaluate
from megatrain.training.picture_data import shards_of
from megatrain.training.rank_model import RankModel
from megatrain.training.training_data import ValidationSet, open_validation
from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.pillow_producer import NO_ENDS, PillowDecoder
from tests.helpers.single_rank import SilentRecorder, make_config, parameters_by_name, single_rank_model
from tests.helpers.training_case import make_config as make_case

LENGTHS = (11, 5, 1, 9, 6)
"""32 tokens in windows of 8: three full windows and one with seven labels."""
NUM_LABELS = sum(LENGTHS) - 1
ENDS_INSIDE = len(LENGTHS) - 1
"""The last token of each document except the last would have to predict an unrelated token."""
TEXT_BYTES = 77


def corpus(directory: Path, name: str = "validation", **tables: object) -> Config:
    """Write held-out tokens and their meta.json, and return a configuration that names them."""
    generator = np.random.default_rng(3)
    with IndexedWriter(directory / name, token_dtype(61)) as writer:
        for length in LENGTHS:
            writer.add_document(generator.integers(0, 61, length))
    train, validation = SplitMeta(1, 5, 999, "", ""), SplitMeta(len(LENGTHS), sum(LENGTHS), TEXT_BYTES, "", "")
    meta = DataMeta(("text",), "text", 0, 0.1, 61, 0, "", 1.0, {}, train, validation)
    (directory / META_NAME).write_text(meta.to_json())
    data = {"validation": str(directory / name), "train": str(directory / name)}
    sections = {name: dict(table) for name, table in tables.items()}  # type: ignore[call-overload]
    return make_config(**{**sections, "data": {**data, **sections.get("data", {})}})


def evaluated(config: Config, rank_model: RankModel | None = None) -> Evaluation:
    (found,) = evaluate(rank_model or single_rank_model(config), open_validation(config), SilentRecorder())
    return found


def tokens_of(config: Config) -> Tensor:
    (opened,) = open_validation(config)
    return torch.from_numpy(opened.dataset.window(0, sum(LENGTHS)).astype(np.int64))


def several(directory: Path, *lengths: int, **tables: object) -> Config:
    """Write sets of one document each, set-2 and so on, named after their lengths, the first one with a meta.json."""
    config = corpus(directory, **tables)
    generator, sections = np.random.default_rng(4), {}
    for number, length in enumerate(lengths, start=2):
        prefix = directory / f"set-{number}" / "validation"
        prefix.parent.mkdir()
        with IndexedWriter(prefix, token_dtype(61)) as writer:
            writer.add_document(generator.integers(0, 61, length))
        sections[f"validation_set-{number}"] = {"path": str(prefix), "name": f"{length} tokens"}
    shutil.copy(directory / META_NAME, directory / "set-2" / META_NAME)
    data = {**config.to_dict()["data"], "validation": ""}
    return Config.from_dict({**config.to_dict(), "data": data, **sections})


def plain_loss_sum(config: Config, weights: dict[str, Tensor]) -> float:
    """Return the summed loss of all labels, window by window, computed with the model alone."""
    model = Transformer(config.model).double().eval()
    model.load_state_dict(weights, strict=False)
    tokens, total = tokens_of(config), 0.0
    for start in range(0, NUM_LABELS, config.model.seq_len):
        window = tokens[start : start + config.model.seq_len + 1]
        context = TokenContext(torch.zeros(1, dtype=torch.int64), len(window) - 1)
        with torch.no_grad():
            total += model(window[:-1, None], context, window[1:, None]).item()
    return total


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_the_loss_is_that_of_the_model_on_every_window(micro_batch_size: int, tmp_path: Path) -> None:
    config = corpus(
        tmp_path,
        batch={"micro_batch_size": micro_batch_size, "global_batch_size": micro_batch_size},
        model={"vocab_size": 61, "seq_len": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "dropout": 0.5},
    )
    rank_model = single_rank_model(config)
    found = evaluated(config, rank_model)

    expected = plain_loss_sum(config, parameters_by_name(rank_model))
    assert found.num_tokens == NUM_LABELS
    assert found.loss == pytest.approx(expected / NUM_LABELS, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / TEXT_BYTES, rel=1e-12)


def test_loss_of_pictures_is_that_of_their_captions() -> None:
    """The model alone predicts the three words and the end of each caption from the picture and the words before."""
    model = {"vocab_size": 12, "seq_len": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    config = make_config(
        model={**model, "picture_size": 24, "patch_size": 6}, data={"pictures": "drawn"},
        validation_set={"pictures": "drawn"}, evaluation={"num_samples": 3},
        batch={"micro_batch_size": 2, "global_batch_size": 2},
    )  # fmt: skip
    rank_model = single_rank_model(config)
    found = evaluated(config, rank_model)

    plain = Transformer(config.model).double().eval()
    plain.load_state_dict(parameters_by_name(rank_model), strict=False)
    expected = 0.0
    for number in range(NUM_PICTURES, NUM_PICTURES + 3):
        scene = scene_of(config.resolved_data_seed, number)
        patches_PC = torch.from_numpy(patchify(drawn(scene, 24), 6))
        tokens = torch.tensor([0] * 16 + list(scene.caption[:-1]))[:, None]
        context = TokenContext(torch.zeros(1, dtype=torch.int64), 20, pictures=PatchRows.of_all(patches_PC[:, None]))
        with torch.no_grad():
            hidden = plain.hidden(tokens, context)
            assert plain.loss_head is not None
            logits = plain.loss_head.logits(hidden)[16:, 0, :12].double()
        expected += functional.cross_entropy(logits, torch.tensor(scene.caption[1:]), reduction="sum").item()
    assert found.num_tokens == 12
    assert found.loss == pytest.approx(expected / 12, rel=1e-10)
    assert found.bits_per_byte is None


def test_labels_across_documents_do_not_count_with_a_mask(tmp_path: Path) -> None:
    plain, masked = (corpus(tmp_path, data={"has_document_mask": has_mask}) for has_mask in (False, True))
    found = evaluated(masked)

    assert found.num_tokens == NUM_LABELS - ENDS_INSIDE
    assert found.loss != evaluated(plain).loss


def test_bits_need_the_text_of_all_that_was_evaluated(tmp_path: Path) -> None:
    whole = evaluated(corpus(tmp_path))
    part = evaluated(corpus(tmp_path, evaluation={"num_samples": 2}))
    other = evaluated(corpus(tmp_path, name="test"))
    assert whole.bits_per_byte is not None
    assert (part.num_tokens, part.bits_per_byte) == (16, None)
    # meta.json has the bytes of the train and validation texts only
    assert (other.num_tokens, other.loss, other.bits_per_byte) == (NUM_LABELS, whole.loss, None)
    config = corpus(tmp_path)
    (tmp_path / META_NAME).unlink()
    assert evaluated(config).bits_per_byte is None


def test_evaluation_has_no_auxiliary_loss_terms(tmp_path: Path) -> None:
    config = corpus(tmp_path, train={"z_loss": 0.01, "label_smoothing": 0.2})
    rank_model = single_rank_model(config)
    expected = plain_loss_sum(config, parameters_by_name(rank_model)) / NUM_LABELS
    assert evaluated(config, rank_model).loss == pytest.approx(expected, rel=1e-12)

    model = rank_model.pipeline.chunks[0].module
    tokens, seq_len = tokens_of(config)[: config.model.seq_len + 1, None], config.model.seq_len
    context = TokenContext(torch.zeros(1, dtype=torch.int64), seq_len)
    logits = model.loss_head.logits(model(tokens[:-1], context)).flatten(0, 1)[:, : config.model.vocab_size]
    smoothed = functional.cross_entropy(logits, tokens[1:].flatten(), reduction="sum", label_smoothing=0.2)
    added = 0.01 * torch.logsumexp(logits, -1).square().sum()
    trained = model(tokens[:-1], context, tokens[1:])
    assert trained.item() == pytest.approx((smoothed + added).item(), rel=1e-12)


def test_training_has_dropout_after_an_evaluation(tmp_path: Path) -> None:
    config = corpus(tmp_path)
    rank_model = single_rank_model(config)
    evaluated(config, rank_model)

    modules = [module for chunk in rank_model.pipeline.chunks for module in chunk.module.modules()]
    assert all(module.training for module in modules)


@pytest.mark.parametrize("num_samples", [0, 2])
def test_sets_together_have_the_numbers_of_each_alone(num_samples: int, tmp_path: Path) -> None:
    config = several(tmp_path, 40, 11, evaluation={"num_samples": num_samples})
    rank_model, sets = single_rank_model(config), open_validation(config)
    found = evaluate(rank_model, sets, SilentRecorder())

    assert found == [evaluate(rank_model, [one], SilentRecorder())[0] for one in sets]
    assert [(one.name, one.num_samples) for one in sets] == [("40 tokens", num_samples or 5), ("11 tokens", 2)]
    assert [one.num_tokens for one in found] == [8 * num_samples or 39, 10]
    total = combined(found)
    assert total.num_tokens == sum(one.num_tokens for one in found)
    assert total.loss == sum(one.loss * one.num_tokens for one in found) / total.num_tokens
    assert combined(found[:1]) == found[0]
    # the size of one text is not known
    assert [one.bits_per_byte is None for one in (*found, total)] == [num_samples > 0, True, True]


def test_sets_that_cannot_be_evaluated_are_refused(tmp_path: Path) -> None:
    config = several(tmp_path, 40, 11)
    prefixes = [tmp_path / f"set-{number}" / "validation" for number in (2, 3)]
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefixes[0]}{suffix}", f"{prefixes[1]}{suffix}")
    with pytest.raises(
        DataError, match=r"^validation_set-3\.path='.*' has the same content as validation_set-2\.path='.*; remove one"
    ):
        open_validation(config)
    with IndexedWriter(prefixes[1], token_dtype(61)) as writer:
        writer.add_document(np.array([1]))
    with pytest.raises(DataError, match=r"set-3/validation: holds 1 token, and evaluation needs 2"):
        open_validation(config)
    Path(f"{prefixes[1]}.bin").unlink()
    with pytest.raises(DataError, match=r"set-3/validation\.bin: "):
        open_validation(config)


def bad_set(directory: Path, tokens: list[int]) -> tuple[Config, ValidationSet]:
    """Return a set of windows of 8 tokens that leaves out those with a token beyond the vocabulary of 61."""
    dtype = token_dtype(61)
    with IndexedWriter(directory / "validation", dtype) as writer:
        writer.add_document(np.ones(len(tokens), dtype=dtype))
    config = make_config(data={"validation": str(directory / "validation")})
    (found,) = open_validation(config)
    with (directory / "validation.bin").open("r+b") as file:  # the disk fails after the file was opened
        file.write(np.array(tokens, dtype=dtype).tobytes())
    return config, replace(found, reader=replace(found.reader, replaces_bad_samples=True))


def test_evaluation_without_usable_samples_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, found = bad_set(tmp_path, [1] * 9 + [99] * 8)
    (part,) = evaluate(single_rank_model(config), [replace(found, num_samples=1)], SilentRecorder())
    assert part.num_tokens == 8

    config, found = bad_set(tmp_path, [99] * 17)
    with pytest.raises(DataError, match=r"^validation set data\.validation: none of its 2 samples can be used"):
        evaluate(single_rank_model(config), [found], SilentRecorder())
    assert caplog.text.count("validation.bin") == 2, "each address is in the log"


def test_evaluation_of_other_samples_than_a_peer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = bad_set(tmp_path, [1] * 9 + [99] * 8)
    rank_model = single_rank_model(config)
    (own,) = evaluate(rank_model, [found], SilentRecorder())
    assert [one.number for one in own.bad_samples] == [1]
    for of_peer, is_same in ((own.bad_samples, True), ((), False), ([replace(own.bad_samples[0], number=0)], False)):
        parts = [
            disagreement(samples, is_first=is_first, num_peers=2)
            for samples, is_first in ((own.bad_samples, True), (of_peer, False))
        ]
        with monkeypatch.context() as both_ranks:
            difference = torch.tensor([0.0, 0.0, sum(parts)], dtype=torch.float64)
            both_ranks.setattr(type(rank_model.mesh), "sum_over_all", lambda _, sums, more=difference: sums + more)
            if is_same:
                assert evaluate(rank_model, [found], SilentRecorder()) == [own]
                continue
            with pytest.raises(
                DataError, match=r"^validation set data\.validation: the hosts of a replica found different samples"
            ) as raised:
                evaluate(rank_model, [found], SilentRecorder())
            assert str(raised.value).endswith(": repair the files (megatrain data verify)")


def test_difference_of_pictures_names_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_shards(tmp_path / "shards", 1, 4, bad=(2,))
    tables = shard_tables(directory)
    config = make_case({
        **tables, "data": {**tables["data"], "bad_samples": "replace"},
        "validation_set": {"path": str(directory), "pictures": "shards"},
    })  # fmt: skip
    (found,) = open_validation(config)
    shards, secret, listener = shards_of(found.reader), bytes(SECRET_BYTES), listen("127.0.0.1")
    assert shards is not None
    producer = Producer([shards.index], PillowDecoder(), NO_ENDS)
    threading.Thread(target=producer.run, daemon=True).start()
    rank_model = single_rank_model(config)
    difference = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    monkeypatch.setattr(type(rank_model.mesh), "sum_over_all", lambda _, sums: sums + difference)
    with (
        PeerServer(listener, secret, producer.serve, PRODUCER_LIMITS, has_low_priority=False),
        shards.connect(Producers([PeerAddress(*listener.getsockname()[:2])], secret)),
        pytest.raises(DataError, match=rf"repair the files \(megatrain data pictures verify {directory}\)$"),
    ):
        evaluate(rank_model, [found], SilentRecorder())


def test_without_held_out_tokens_there_is_nothing_to_evaluate() -> None:
    assert open_validation(make_config()) == ()
