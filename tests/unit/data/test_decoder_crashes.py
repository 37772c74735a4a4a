"""A picture at which the decoder ends its process costs itself; a producer that is killed otherwise costs none.

The producers are processes whose decoder crashes at marked pictures.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.decoding_record import DecodingRecord, PicturePart
from megatrain.data.pictures.picture_format import REFUSE, REPLACE, PictureFormat
from megatrain.data.pictures.picture_index import PictureIndex, build_index
from megatrain.data.pictures.picture_source import Pictures, PictureSource, Producers
from megatrain.data.pictures.producers import local_producers
from megatrain.training.training_data import all_shards, open_reader
from tests.helpers.crashing_producer import MARK, crashing_command
from tests.helpers.drawn_pictures import drawn, encoded, resized, write_shard
from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.read_samples import by_sample, read
from tests.helpers.training_case import make_config

FORMAT = PictureFormat(size=32, patch=32)
ALWAYS = 1 << 30
CRASHING = (3, 11, 18)


@contextmanager
def crashing_producers(
    directory: Path, root: Path, number: signal.Signals, num_crashes: int, num_producers: int, reports: list[str]
) -> Iterator[Producers]:
    root.mkdir()
    (root / "left").write_text(str(num_crashes))
    command = crashing_command([directory], number, root / "left")
    with local_producers(command, num_producers, root / "logs", reports.append) as local:
        yield Producers(local.addresses, local.secret, local.problem)


def asked(index: PictureIndex, producers: Producers, bad_pictures: str) -> Pictures:
    with PictureSource(index.digest, FORMAT, producers, bad_pictures) as source:
        return source.patches(range(20))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> tuple[PictureIndex, list[bytes]]:
    """Shards of 20 pictures, of which the decoder crashes at three, and their files."""
    directory = tmp_path_factory.mktemp("shards")
    files = [encoded(drawn(40 + number, 30, seed=number)) for number in range(20)]
    members = {
        f"{number:02}.jpg": content + MARK if number in CRASHING else content for number, content in enumerate(files)
    }
    write_shard(directory / "s.tar", {**members, **{f"{number:02}.txt": b"caption" for number in range(20)}})
    return build_index(directory), files


def pixels(pictures: Pictures, number: int) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = pictures.patches_NPV[number].reshape(FORMAT.size, FORMAT.size, 3)
    return found


@pytest.mark.slow(kept=["one"])
@pytest.mark.parametrize(
    ("num_producers", "number"), [(1, signal.SIGABRT), (3, signal.SIGSEGV)], ids=["one", "several"]
)
def test_picture_that_crashes_the_decoder_costs_itself(
    num_producers: int, number: signal.Signals, marked: tuple[PictureIndex, list[bytes]], tmp_path: Path
) -> None:
    index, files = marked
    reports: list[str] = []
    with crashing_producers(index.directory, tmp_path / "run", number, ALWAYS, num_producers, reports) as producers:
        pictures = asked(index, producers, REPLACE)
        with pytest.raises(BadPictureError, match=r"s\.tar: 03\.jpg \(sample 3\): the decoder crashed: its"):
            asked(index, producers, REFUSE)
    end = f"was killed by {number.name} ({int(number)})"
    assert [(bad.number, bad.reason) for bad in pictures.bad] == [
        (one, f"the decoder crashed: its process {end}") for one in CRASHING
    ]
    for one in range(20):
        expected = np.zeros_like(pixels(pictures, one)) if one in CRASHING else resized(files[one], FORMAT.size)
        assert np.array_equal(pixels(pictures, one), expected), one
    alone = [f"{end} at sample {one} of {index.digest[:12]}...; it is started again; see" for one in CRASHING]
    counts = [sum(place in text for text in reports) for place in alone]
    if num_producers == 1:
        assert counts == [2, 2, 2]
        assert len(reports) == 8, "once in each of the two requests"
    else:  # several may work on a sample before they know of an end
        assert min(counts) >= 2


@pytest.mark.slow
def test_producers_killed_from_outside_cost_no_picture(
    marked: tuple[PictureIndex, list[bytes]], tmp_path: Path
) -> None:
    """In the same picture four times: together with others and then alone, decoded, and the same once more."""
    index, files = marked
    reports: list[str] = []
    with crashing_producers(index.directory, tmp_path / "run", signal.SIGKILL, 2, 1, reports) as producers:
        for _ in range(2):
            (tmp_path / "run" / "left").write_text("2")
            with PictureSource(index.digest, FORMAT, producers, REFUSE) as source:
                pictures = source.patches(range(10))
            assert np.array_equal(pixels(pictures, 3), resized(files[3], FORMAT.size))
    places = ["samples 0-9", "sample 3"] * 2
    assert len(reports) == len(places)
    assert all(f"SIGKILL (9) at {place} of" in text for place, text in zip(places, reports, strict=True))


@pytest.mark.slow
def test_crashes_give_the_samples_of_broken_files(tmp_path: Path) -> None:
    """For any producers and replicas, and after a resume, the stream is that of shards with damaged files."""
    bad = (4, 9)
    tables = shard_tables(write_shards(tmp_path / "broken", bad=bad))
    options = {"data": {**tables["data"], "bad_samples": "replace"}}
    marked = write_shards(tmp_path / "marked", tails=dict.fromkeys(bad, MARK))
    found = []
    for place, (directory, num_producers, num_replicas) in enumerate(
        [(tmp_path / "broken", 1, 1), (marked, 1, 1), (marked, 3, 4)]
    ):
        root = tmp_path / f"run-{place}"
        reader = open_reader(make_config(shard_tables(directory), options))
        (shards,) = all_shards(reader, ())
        with (
            crashing_producers(directory, root, signal.SIGABRT, ALWAYS, num_producers, []) as producers,
            shards.connect(producers),
        ):
            first = by_sample(read(reader, 0, 8, num_replicas))
        with (
            crashing_producers(directory, tmp_path / f"resumed-{place}", signal.SIGABRT, ALWAYS, 2, []) as producers,
            shards.connect(producers),
        ):
            found.append({**first, **by_sample(read(reader, 8, 24))})
    assert found[0].keys() == set(range(32))
    assert found[1] == found[0]
    assert found[2] == found[0]


Event = tuple[str, int, tuple[int, ...]]
"""What happens to a producer, its number, and the samples that it begins to work on."""
BEGUN, OTHER_BEGUN = ("begin", 0, (2,)), ("begin", 1, (2,))
KILLED, OTHER_KILLED, DONE = ("kill", 0, ()), ("kill", 1, ()), ("done", 0, ())
TOGETHER = [PicturePart((1, 2, 3))]
ALONE = [PicturePart((1,)), PicturePart((2,)), PicturePart((3,))]
GIVEN_UP = [PicturePart((1,)), PicturePart((2,), "was killed"), PicturePart((3,))]
EVENTS: dict[str, tuple[list[Event], list[PicturePart]]] = {
    "nothing": ([], TOGETHER),
    "idle": ([("begin", 0, (1, 2, 3)), DONE, KILLED], TOGETHER),
    "with-another": ([("begin", 0, (1, 2)), KILLED], ALONE),
    "alone": ([BEGUN, KILLED], ALONE),
    "twice": ([BEGUN, KILLED, BEGUN, KILLED], GIVEN_UP),
    "of-two-producers": ([BEGUN, KILLED, OTHER_BEGUN, OTHER_KILLED], GIVEN_UP),
    "of-two-at-once": ([BEGUN, OTHER_BEGUN, KILLED, OTHER_KILLED], ALONE),
    "of-one-that-began-before": ([BEGUN, OTHER_BEGUN, KILLED, BEGUN, KILLED, OTHER_KILLED], GIVEN_UP),
    "success-between": ([BEGUN, KILLED, BEGUN, DONE, BEGUN, KILLED], ALONE),
    "success-after": ([BEGUN, KILLED, BEGUN, DONE], TOGETHER),
    "refusal": ([("begin", 0, (1, 2)), ("refuse", 0, ()), KILLED], TOGETHER),
    "other-data": ([BEGUN, KILLED, BEGUN, KILLED], TOGETHER),
}


@pytest.mark.parametrize("name", EVENTS)
def test_sample_is_given_up_after_two_ends_alone(name: str, tmp_path: Path) -> None:
    events, expected = EVENTS[name]
    with ExitStack() as closing:

        def opened(file: str, flags: int = 0) -> int:
            descriptor = os.open(tmp_path / file, os.O_RDWR | os.O_CREAT | flags)
            closing.callback(os.close, descriptor)
            return descriptor

        ends, notes = opened("ends", os.O_APPEND), [opened("note-0"), opened("note-1")]
        records = [DecodingRecord(note, ends) for note in notes]
        working: dict[int, AbstractContextManager[None]] = {}
        for kind, producer, numbers in events:
            if kind == "begin":
                records[producer].parts("data", numbers)
                working[producer] = records[producer].working("data", numbers)
                working[producer].__enter__()
            elif kind == "kill":
                DecodingRecord(notes[producer], ends).add_end("was killed")
                records[producer] = DecodingRecord(notes[producer], ends)
            elif kind == "done":
                working[producer].__exit__(None, None, None)
            else:
                assert not working[producer].__exit__(DataError, DataError("refused"), None)
        for record in records:
            assert record.parts("other" if name == "other-data" else "data", (1, 2, 3)) == expected
