"""A picture at which the decoder ends its process costs itself; a producer that is killed otherwise costs none.

The producers are processes whose decoder crashes at marked pictures.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.decoding_record import DecodingRecord, PicturePart
from megatrain.data.pictures.picture_format import REFUSE, REPLACE, PictureFormat
from megatrain.data.pictures.picture_index import PictureIndex, build_index
from megatrain.data.pictures.picture_source import Pictures, PictureSource, Producers
from megatrain.data.pictures.producers import local_producers
from megatrain.data.pictures.protocol import REQUEST_PICTURES
from megatrain.programs.supervisor import WorkAtEnd
from megatrain.training.training_data import all_shards, open_reader
from tests.helpers.crashing_producer import MARK, crashing_command
from tests.helpers.drawn_pictures import drawn, encoded, resized, write_shard
from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.read_samples import by_sample, read
from tests.helpers.training_case import make_config
from tests.helpers.waiting import wait_until

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
        yield Producers(local.addresses, local.secret, local.problem, local.failure)


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
def test_decoder_that_crashes_each_time_is_named_as_the_cause(
    marked: tuple[PictureIndex, list[bytes]], tmp_path: Path
) -> None:
    index, _ = marked
    with crashing_producers(index.directory, tmp_path / "run", signal.SIGSEGV, ALWAYS, 1, []) as producers:
        impatient = replace(producers, patience_s=0.0)
        for text in ("no producer of pictures has answered", r"SIGSEGV \(11\) at sample 3 of .*; fix the cause"):
            with PictureSource(index.digest, FORMAT, impatient) as source, pytest.raises(UnreachableError, match=text):
                source.patches([3])
            wait_until(lambda: bool(producers.failure()), "a known end of the producer")


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
FAILED = ("fail", 0, ())
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
    "exit-code": ([BEGUN, FAILED, KILLED, BEGUN, FAILED, KILLED], TOGETHER),
    "other-data": ([BEGUN, KILLED, BEGUN, KILLED], TOGETHER),
}


@contextmanager
def record_files(directory: Path, num_producers: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the descriptors of the file of ends, and of the notes of some producers."""
    with ExitStack() as closing:

        def opened(file: str, flags: int = 0) -> int:
            descriptor = os.open(directory / file, os.O_RDWR | os.O_CREAT | flags)
            closing.callback(os.close, descriptor)
            return descriptor

        yield opened("ends", os.O_APPEND), [opened(f"note-{number}") for number in range(num_producers)]


@pytest.mark.parametrize("name", EVENTS)
def test_sample_is_given_up_after_two_ends_alone(name: str, tmp_path: Path) -> None:
    events, expected = EVENTS[name]
    with record_files(tmp_path, 2) as (ends, notes):
        records = [DecodingRecord(note, ends) for note in notes]
        working: dict[int, AbstractContextManager[None]] = {}
        for kind, producer, numbers in events:
            if kind == "begin":
                records[producer].parts("data", numbers)
                working[producer] = records[producer].working("data", numbers)
                working[producer].__enter__()
            elif kind in {"kill", "fail"}:
                DecodingRecord(notes[producer], ends).add_end(-9 if kind == "kill" else 1, "was killed")
                records[producer] = DecodingRecord(notes[producer], ends)
            elif kind == "done":
                working[producer].__exit__(None, None, None)
            else:
                assert not working[producer].__exit__(DataError, DataError("refused"), None)
        for record in records:
            assert record.parts("other" if name == "other-data" else "data", (1, 2, 3)) == expected


def killed_at(part: PicturePart, producer: DecodingRecord, starter: DecodingRecord) -> WorkAtEnd:
    producer.working("data", part.numbers).__enter__()
    work = starter.add_end(-9, "was killed")
    assert work is not None
    return work


def test_ends_beyond_those_of_one_request_are_too_many(tmp_path: Path) -> None:
    """A request of crashing pictures alone is answered. The next crash is one too many, unless work was finished."""
    request = range(REQUEST_PICTURES)
    with record_files(tmp_path, 1) as (ends, (note,)):
        starter = DecodingRecord(note, ends)
        works = []
        producer = DecodingRecord(note, ends)
        while tried := [part for part in producer.parts("data", request) if not part.given_up]:
            works.append(killed_at(tried[0], producer, starter))
            producer = DecodingRecord(note, ends)
        assert [(work.num_ends, work.is_last) for work in works] == [(number, False) for number in range(1, 34)]
        assert killed_at(PicturePart((99,)), DecodingRecord(note, ends), starter).is_last
        producer = DecodingRecord(note, ends)
        with producer.working("data", (98,)):
            pass
        after = killed_at(PicturePart((99,)), producer, starter)
    assert after == WorkAtEnd("sample 99 of data...", 1, is_last=False)


LINE = json.dumps({"data": "data", "numbers": [1], "num_ends": 0, "is_first": True, "end": "was killed"}).encode()
KNOWN = [PicturePart((1,)), PicturePart((2, 3))]
CONTENTS: dict[str, list[tuple[bytes, list[PicturePart]]]] = {
    "whole": [(LINE + b"\n", KNOWN)],
    "blank-lines": [(b"\n\n" + LINE + b"\n\n", KNOWN)],
    "grows-in-a-line": [(b"\n" + LINE[:9], TOGETHER), (LINE[9:], TOGETHER), (b"\n", KNOWN)],
    "cut-off": [(LINE[:9], TOGETHER)],
    "cut-off-before-another": [(LINE[:9] + b"\n" + LINE + b"\n", KNOWN)],
    "no-text": [(b"\xff\n7\n{}\n" + LINE + b"\n", KNOWN)],
}


@pytest.mark.parametrize("name", CONTENTS)
def test_ends_are_read_from_whole_lines(name: str, tmp_path: Path) -> None:
    """And the next end is known after any of these contents."""
    with record_files(tmp_path, 1) as (ends, (note,)):
        record = DecodingRecord(note, ends)
        for content, expected in CONTENTS[name]:
            os.write(ends, content)
            assert record.parts("data", (1, 2, 3)) == expected
        killed_at(PicturePart((2,)), record, DecodingRecord(note, ends))
        assert record.parts("data", (1, 2, 3)) == ALONE


@pytest.mark.parametrize("num_files", range(4))
def test_producers_that_lack_descriptors_leave_none_open(
    num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, names = os.memfd_create, []

    def limited(name: str) -> int:
        names.append(name)
        if len(names) > num_files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return create(name)

    monkeypatch.setattr(os, "memfd_create", limited)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files"):
        local_producers(lambda inherited: ["false"], 2, tmp_path, names.append)
    assert os.listdir("/proc/self/fd") == before
