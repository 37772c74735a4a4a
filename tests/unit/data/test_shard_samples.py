"""Samples with pictures from shards: the pixels and tokens of each sample by hand, in any layout, and bad pictures."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.data.held_out import evaluation_batches
from megatrain.data.masked_samples import without_samples
from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.picture_source import PictureSource, Producers
from megatrain.data.pictures.pillow_decoder import pillow_identity
from megatrain.data.reader import BatchReader
from megatrain.data.tokenizer import load_tokenizer
from megatrain.peers.link import PeerAddress
from megatrain.peers.server import listen
from megatrain.training.picture_data import find_decoder, shards_of
from megatrain.training.training_data import (
    all_shards,
    open_reader,
    open_validation,
    sample_stream,
)
from tests.helpers.drawn_pictures import resized
from tests.helpers.picture_shards import TOKENIZER, VOCAB_SIZE, caption_of, picture_file, shard_tables, write_shards
from tests.helpers.pillow_producer import PillowDecoder, producers_in_threads
from tests.helpers.read_samples import by_sample, read
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config

NUM_PICTURES, NUM_PATCHES, SEQ_LEN = 16, 4, 16
SIZE, PATCH = 24, 12
NOTHING = ([0] * SEQ_LEN, [IGNORED_LABEL] * SEQ_LEN, bytes(NUM_PATCHES * PATCH * PATCH * 3))
"""A sample that is replaced."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def with_bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "bad", bad=(3, 12))


@pytest.fixture
def producers(request: pytest.FixtureRequest) -> Iterator[Producers]:
    """A producer of the shards that the test's mark names, as a thread of this process."""
    index = PictureIndex(request.getfixturevalue(request.param))
    with producers_in_threads([index], PillowDecoder(pillow_identity())) as found:
        yield found


def opened(directory: Path, producers: Producers, **data: str) -> tuple[BatchReader, PictureSource]:
    tables = shard_tables(directory)
    config = make_config(tables, {"data": {**tables["data"], "seed": 5, **data}})
    reader = open_reader(config)
    find_decoder(config, all_shards(reader, ()), has_begun=False)
    shards = shards_of(reader)
    assert shards is not None
    return reader, shards.connect(producers)


def by_hand(directory: Path, number: int) -> tuple[list[int], list[int], bytes]:
    """Return tokens, labels and patches of the picture with this number in the index."""
    picture = resized(picture_file(number), SIZE)
    corners = [(top, left) for top in range(0, SIZE, PATCH) for left in range(0, SIZE, PATCH)]
    patches = b"".join(picture[top : top + PATCH, left : left + PATCH].tobytes() for top, left in corners)
    tokenizer = load_tokenizer(directory / TOKENIZER)
    caption = [tokenizer.eod_id, *tokenizer.encode(caption_of(number)), tokenizer.eod_id]
    tokens, labels = (part[: SEQ_LEN - NUM_PATCHES] for part in (caption[:-1], caption[1:]))
    padding = SEQ_LEN - NUM_PATCHES - len(tokens)
    ignored = [IGNORED_LABEL]
    return (
        [0] * NUM_PATCHES + tokens + [0] * padding,
        ignored * NUM_PATCHES + labels + ignored * padding,
        patches,
    )


@pytest.mark.parametrize("producers", ["shards"], indirect=True)
def test_samples_are_pictures_with_their_captions(shards: Path, producers: Producers) -> None:
    """Two epochs and a half: each shows every picture once, in another order; some captions are too long."""
    reader, asking = opened(shards, producers)
    with asking:
        found = by_sample(read(reader, 0, 40))
    hand = [by_hand(shards, number) for number in range(NUM_PICTURES)]
    order = [hand.index(found[sample]) for sample in range(40)]
    assert sorted(order[:16]) == sorted(order[16:32]) == list(range(NUM_PICTURES))
    assert order[:16] != order[16:32] != list(range(NUM_PICTURES))
    assert max(Counter(order[32:]).values()) == 1
    lengths = {sum(label != IGNORED_LABEL for label in labels) for _, labels, _ in hand}
    assert SEQ_LEN - NUM_PATCHES in lengths
    assert min(lengths) < SEQ_LEN - NUM_PATCHES


@pytest.mark.parametrize("producers", ["shards"], indirect=True)
def test_samples_do_not_depend_on_replicas_or_a_resume(shards: Path, producers: Producers) -> None:
    reader, asking = opened(shards, producers)
    with asking:
        whole = by_sample(read(reader, 0, 24))
        for num_replicas in (2, 3, 4):
            assert by_sample(read(reader, 0, 24, num_replicas)) == whole
        resumed, other = opened(shards, producers)
        with other:
            assert by_sample(read(resumed, 10, 14, 2)) == {n: whole[n] for n in range(10, 24)}
            assert by_sample(read(resumed, 4, 2, 4)) == {n: whole[n] for n in (4, 5)}


@pytest.mark.parametrize("producers", ["shards"], indirect=True)
def test_pictures_beside_text_are_those_without_it(shards: Path, producers: Producers, tmp_path: Path) -> None:
    reader, asking = opened(shards, producers)
    with asking:
        alone = by_sample(read(reader, 0, 24))
    text = write_corpus(tmp_path / "text", 600, VOCAB_SIZE)
    tables = shard_tables(shards)
    data = {"pictures": "none", "tokenizer": tables["data"]["tokenizer"], "seed": 5, "balance": "cost"}
    sources = {"data_source": {"pictures": "shards"}, "data_source-2": {"path": str(text), "name": "web"}}
    for has_document_mask in (False, True):
        mixed = open_reader(make_config(tables, sources, {"data": {**data, "has_document_mask": has_document_mask}}))
        samples = shards_of(mixed)
        assert samples is not None
        with samples.connect(producers):
            for num_replicas in (1, 3):
                batches = read(mixed, 0, 24, num_replicas)
                found = by_sample(batches)
                pictured = [found[number] for number in sorted(found) if found[number][2]]
                assert pictured == [alone[number] for number in range(len(pictured))]
                assert {batch.num_pictures for batch in batches} == {len(pictured)}
                assert 5 < len(pictured) < 20
                texts = [labels for _, labels, patches in found.values() if not patches]
                assert has_document_mask or all(IGNORED_LABEL not in labels for labels in texts)


def test_source_without_samples_in_a_step_is_not_asked(shards: Path, tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text", 600, VOCAB_SIZE)
    tables = shard_tables(shards)
    sources = {"data_source": {"pictures": "shards", "weight": 0.0}, "data_source-2": {"path": str(text)}}
    data = {"pictures": "none", "tokenizer": tables["data"]["tokenizer"]}
    reader = open_reader(make_config(tables, sources, {"data": data}))

    (batch,) = read(reader, 0, 8)
    assert batch.num_pictures == 0
    assert all(micro.patches_PKC is None for micro in batch.microbatches)


@pytest.mark.parametrize("producers", ["with_bad"], indirect=True)
def test_bad_pictures_cost_their_samples_only(with_bad: Path, shards: Path, producers: Producers) -> None:
    reader, asking = opened(with_bad, producers, bad_samples="replace")
    with asking:
        (batch,) = read(reader, 0, NUM_PICTURES)
    found = by_sample([batch])
    hand = [by_hand(shards, number) for number in range(NUM_PICTURES)]
    bad = {sample.number for sample in batch.bad_samples}
    assert {hand.index(found[sample]) for sample in found.keys() - bad} == set(range(NUM_PICTURES)) - {3, 12}
    assert [found[sample] for sample in bad] == [NOTHING] * 2
    texts = sorted(str(sample.reason) for sample in batch.bad_samples)
    assert texts[0].startswith(f"{with_bad / 'shard-0.tar'}: 0003.png (sample 3): Pillow cannot decode it")
    assert texts[1].startswith(f"{with_bad / 'shard-1.tar'}: 0012.png (sample 12): ")


@pytest.mark.parametrize("producers", ["shards"], indirect=True)
def test_sample_that_another_rank_cannot_use_has_no_picture(shards: Path, producers: Producers) -> None:
    reader, asking = opened(shards, producers)
    with asking:
        (batch,) = read(reader, 0, 8)
    whole = by_sample([batch])
    assert by_sample([without_samples(batch, [1, 6, 40])]) == {**whole, 1: NOTHING, 6: NOTHING}


@pytest.mark.parametrize("producers", ["with_bad"], indirect=True)
def test_bad_picture_is_refused_with_shard_and_member(with_bad: Path, producers: Producers) -> None:
    reader, asking = opened(with_bad, producers)
    with asking, pytest.raises(BadPictureError, match=r"shard-[01]\.tar: 00(03|12)\.png \(sample (3|12)\): "):
        read(reader, 0, NUM_PICTURES)


@pytest.mark.parametrize("producers", ["with_bad"], indirect=True)
def test_held_out_pictures_are_those_of_the_index_in_its_order(with_bad: Path, producers: Producers) -> None:
    """15 of 16 pictures, of which 3 and 12 are bad: each costs only itself, in any layout."""
    tables = shard_tables(with_bad)
    held_out = {"validation_set": {"path": str(with_bad), "pictures": "shards"}, "evaluation": {"num_samples": 15}}
    expected = {number: NOTHING if number in (3, 12) else by_hand(with_bad, number) for number in range(15)}
    for bad_samples in ("replace", "refuse"):
        config = make_config(tables, held_out, {"data": {**tables["data"], "bad_samples": bad_samples}})
        (validation_set,) = open_validation(config)
        assert (validation_set.name, validation_set.num_samples) == (str(with_bad), 15)
        shards = all_shards(open_reader(config), [validation_set])
        find_decoder(config, shards, has_begun=False)
        with shards[1].connect(producers):
            if bad_samples == "refuse":
                with pytest.raises(BadPictureError, match=r"shard-0\.tar: 0003\.png \(sample 3\): "):
                    list(evaluation_batches(validation_set.reader, 15, 2, 0, 1))
                continue
            for dp_size in (1, 3):
                parts = [
                    part
                    for rank in range(dp_size)
                    for part in evaluation_batches(validation_set.reader, 15, 2, rank, dp_size, at_once=3)
                ]
                assert by_sample(parts) == expected
                bad = {sample.number: str(sample.reason) for part in parts for sample in part.bad_samples}
                assert sorted(bad) == [3, 12]
                assert bad[12].startswith(f"{with_bad / 'shard-1.tar'}: 0012.png (sample 12): ")
            (without, *_) = evaluation_batches(validation_set.reader, 15, 2, 0, 1, has_patches=False)
            assert without.microbatches[0].patches_PKC is None
            assert without.microbatches[0].labels_SB[:, 0].tolist() == expected[0][1]


@pytest.mark.parametrize("producers", ["shards"], indirect=True)
def test_producers_with_another_decoder_are_refused(shards: Path, producers: Producers) -> None:
    reader, asking = opened(shards, producers)
    asking.close()
    samples = shards_of(reader)
    assert samples is not None
    samples.decoder = "DALI 2.4.0 cpu"
    with samples.connect(producers), pytest.raises(DataError, match=r"decodes with Pillow .*, and this run with DALI"):
        read(reader, 0, 2)


def test_stream_names_data_and_decoder(shards: Path) -> None:
    config = make_config(shard_tables(shards))
    reader = open_reader(config)
    find_decoder(config, all_shards(reader, ()), has_begun=False)
    stream = sample_stream(config, reader, ())
    (source,) = stream.sources
    assert source.num_tokens == NUM_PICTURES
    assert PictureIndex(shards).digest.startswith(source.digest)
    digest = hashlib.sha256((shards / TOKENIZER).read_bytes()).hexdigest()
    assert stream.pictures == f"{pillow_identity()}, at most {1 << 26} pixels, tokenizer {digest[:12]}"


def test_data_that_cannot_be_used_is_refused_at_start(shards: Path, tmp_path: Path) -> None:
    tables = shard_tables(shards)
    cases = [
        ({"pictures": {**tables["pictures"], "shards": str(tmp_path)}}, r"pictures\.index: does not exist; make it"),
        ({"model": {**tables["model"], "vocab_size": 100}}, r"has 264 tokens, more than model\.vocab_size=100"),
        (
            {"data": {**tables["data"], "tokenizer": str(tmp_path / "no.json")}},
            r"no\.json: the tokenizer cannot be read",
        ),
    ]
    for change, reason in cases:
        with pytest.raises(DataError, match=reason):
            open_reader(make_config(tables, change))


def test_shards_that_are_absent_or_changed_are_refused(tmp_path: Path) -> None:
    index = PictureIndex(write_shards(tmp_path / "shards"))
    index.check_shards()
    shard = tmp_path / "shards" / "shard-1.tar"
    shard.write_bytes(shard.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"shard-1\.tar: has \d+ bytes, and .* describes \d+; copy it again"):
        index.check_shards()
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-1\.tar: the shard cannot be read: No such file"):
        index.check_shards()


@pytest.mark.parametrize("producers", ["shards"], indirect=True)
def test_closed_source_ends_a_call_that_waits(shards: Path, producers: Producers) -> None:
    """Nobody answers: the call would wait for minutes."""
    silent = listen("127.0.0.1")
    reader, asking = opened(shards, replace(producers, addresses=[PeerAddress(*silent.getsockname()[:2])]))
    silent.close()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            read(reader, 0, 2)
        except DataError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    asking.close()
    waiting.join()
    assert [str(error) for error in errors] == ["the source of pictures is closed"]
