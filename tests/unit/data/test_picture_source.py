"""Pictures by sample number: the same bytes from any number of producers, also when one is killed or a picture is bad.

The producers are processes that decode with Pillow; test_picture_decoder.py has those that decode with DALI.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import CommunicationError, DataError, MegatrainError, UnreachableError
from megatrain.data.pictures import picture_source
from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.picture_format import PILLOW, REFUSE, REPLACE, PictureFormat
from megatrain.data.pictures.picture_index import PictureIndex, build_index
from megatrain.data.pictures.picture_source import Pictures, PictureSource, Producers
from megatrain.data.pictures.preparation import prepared_pictures
from megatrain.data.pictures.producer import Producer
from megatrain.data.pictures.producer_file import ProducersFile, read_producers
from megatrain.data.pictures.producers import PictureProducers, local_producers, producer_command
from megatrain.data.pictures.protocol import PRODUCER_LIMITS, AnswerReader, PictureRequest, send_refusal
from megatrain.data.pictures.shard_reader import ShardReader
from megatrain.peers.link import MAX_MESSAGE_BYTES, SECRET_BYTES, PeerAddress, PeerConnection, PeerLimits, connect_peer
from megatrain.peers.server import PeerServer, listen
from tests.helpers.drawn_pictures import drawn, encoded, resized, write_pictures, write_shard
from tests.helpers.pillow_producer import NO_ENDS, SECRET, PillowDecoder, producers_in_threads
from tests.helpers.processes import descendants, is_running
from tests.helpers.thread_starts import no_thread_starts
from tests.helpers.waiting import DEADLINE_S, wait_until

FORMAT = PictureFormat(size=32, patch=8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    directory = tmp_path_factory.mktemp("shards")
    files = write_pictures(directory, 3, 20)
    build_index(directory)
    return directory, files


def asked(directory: Path, producers: Producers, numbers: Sequence[int], bad_pictures: str = REFUSE) -> Pictures:
    with PictureSource(PictureIndex(directory).digest, FORMAT, producers, bad_pictures) as source:
        return source.patches(numbers)


def patches_by_hand(content: bytes) -> np.ndarray:
    """Cut what Pillow makes of a file into patches, one value at a time."""
    picture = resized(content, FORMAT.size)
    rows = range(0, FORMAT.size, FORMAT.patch)
    return np.array([
        [picture[top + y, left + x, channel] for y in range(8) for x in range(8) for channel in range(3)]
        for top in rows for left in rows
    ])  # fmt: skip


@pytest.mark.parametrize("num_producers", [1, 2, 5])
def test_patches_are_those_of_numbers_for_any_producers(num_producers: int, shards: tuple[Path, list[bytes]]) -> None:
    directory, files = shards
    numbers = [int(number) for number in np.random.default_rng(1).permutation(len(files))] + [7, 7]
    with producers_in_threads([PictureIndex(directory)], *[PillowDecoder()] * num_producers) as producers:
        pictures = asked(directory, producers, numbers)
        assert asked(directory, producers, []).patches_NPV.shape == (0, 16, 192)
    assert pictures.patches_NPV.shape == (62, 16, 192)
    assert pictures.patches_NPV.dtype == np.uint8
    assert pictures.captions == tuple(f"picture {number}" for number in numbers)
    for place, number in enumerate(numbers):
        assert np.array_equal(pictures.patches_NPV[place], patches_by_hand(files[number])), number


class FailingDecoder(PillowDecoder):
    def decode(self, contents: Sequence[bytes], size: int) -> list[np.ndarray | str]:
        raise DataError("the memory of this host is full")


def test_producer_that_cannot_serve_says_why(shards: tuple[Path, list[bytes]]) -> None:
    directory, _ = shards
    with producers_in_threads([PictureIndex(directory)], FailingDecoder()) as producers:
        with pytest.raises(DataError, match=r"127\.0\.0\.1:\d+: the memory of this host is full"):
            asked(directory, producers, [1])
        with pytest.raises(DataError, match="has no sample 60; it has samples 0 to 59"):
            asked(directory, producers, [60])


def test_producer_serves_several_indexes(shards: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    directory, files = shards
    other = write_pictures(tmp_path, 1, 3)
    indexes = [PictureIndex(directory), build_index(tmp_path)]
    with producers_in_threads(indexes, PillowDecoder()) as producers:
        for place, contents in ((directory, files[4]), (tmp_path, other[2])):
            number = 4 if place == directory else 2
            assert np.array_equal(asked(place, producers, [number]).patches_NPV[0], patches_by_hand(contents))
        absent = PictureSource("0123456789abcdef", FORMAT, producers)
        both = ", ".join(f"{re.escape(str(index.path))} has the digest {index.digest[:12]}..." for index in indexes)
        with absent, pytest.raises(DataError, match=f"{both}, and pictures of 0123456789ab... are asked for"):
            absent.patches([0])


@pytest.mark.parametrize("num_producers", [1, 3])
def test_source_counts_what_each_producer_did(num_producers: int, shards: tuple[Path, list[bytes]]) -> None:
    directory, _ = shards
    began_ns = time.monotonic_ns()
    with producers_in_threads([PictureIndex(directory)], *[PillowDecoder()] * num_producers) as producers:
        works = asked(directory, producers, range(60)).works
    assert len(works) == num_producers
    assert [sum(values) for values in zip(*(astuple(work)[2:6] for work in works), strict=True)] == [
        60, 60 * FORMAT.num_bytes + sum(len(f"picture {number}") for number in range(60)), 4, 0,
    ]  # fmt: skip
    for work in works:
        assert work.was_asked == (work.num_pictures > 0)
        if work.was_asked:
            assert began_ns <= work.start_ns < work.end_ns <= time.monotonic_ns()
            # two requests at a time
            assert 0 < work.answering_ns <= 2 * work.duration_ns


def test_producer_reports_the_requests_that_wait_in_it(shards: tuple[Path, list[bytes]]) -> None:
    index = PictureIndex(shards[0])
    listener, request = listen("127.0.0.1"), PictureRequest(index.digest, FORMAT, (1,))
    address = PeerAddress(*listener.getsockname()[:2])
    # nothing prepares pictures, so requests remain in the queue
    producer = Producer([index], PillowDecoder(), NO_ENDS)
    with PeerServer(listener, SECRET, producer.serve, PRODUCER_LIMITS, has_low_priority=False), ExitStack() as stack:
        found = []
        for _ in range(3):
            connection = stack.enter_context(connect_peer(address, SECRET, PRODUCER_LIMITS))
            connection.send_message(request.encode())
            found.append(AnswerReader(connection, request).head.num_waiting)
    assert found == [0, 1, 2]


def test_producers_that_decode_in_two_ways_are_refused(shards: tuple[Path, list[bytes]]) -> None:
    directory, _ = shards
    with (
        producers_in_threads([PictureIndex(directory)], PillowDecoder("one"), PillowDecoder("two")) as producers,
        pytest.raises(DataError, match="a picture would depend on who decodes it"),
    ):
        asked(directory, producers, list(range(60)) * 10)


def test_close_ends_a_request_that_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that is stopped accepts connections, and sends nothing."""
    limit_s = 10 * DEADLINE_S
    monkeypatch.setattr(picture_source, "PRODUCER_LIMITS", PeerLimits(limit_s, limit_s, limit_s))
    errors: list[DataError] = []
    with listen("127.0.0.1") as stopped:
        source = PictureSource("data", FORMAT, Producers([PeerAddress(*stopped.getsockname()[:2])], SECRET))

        def ask() -> None:
            try:
                source.patches([0])
            except DataError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        accepted, _ = stopped.accept()
        source.close()
        asking.join(DEADLINE_S)
        accepted.close()
    assert [str(error) for error in errors] == ["the source of pictures is closed"]


def test_only_a_written_problem_of_producers_ends_a_wait(tmp_path: Path) -> None:
    """The first rank of a host removes the file when it ends: the ranks that wait then are not at fault."""
    path, texts = tmp_path / "producers", ["", ""]
    producers = Producers([PeerAddress("127.0.0.1", 9)], SECRET, lambda: texts[0], lambda: texts[1])
    with ProducersFile(path) as file:
        file.update()
        assert not path.exists(), "no producers are named yet"
        file.name(producers)
        read = read_producers(path)
        assert (read.addresses, read.problem(), read.failure()) == (producers.addresses, "", "")
        texts[:] = "none can be started", "it was killed"
        file.update()
        assert (read.problem(), read.failure()) == tuple(texts)
        path.write_text("damaged")
        assert "not JSON" in read.problem()
    file.update()
    assert not path.exists()
    assert read.problem() == ""


def test_wait_without_answer_names_the_last_failure() -> None:
    producers = Producers([PeerAddress("127.0.0.1", 9)], SECRET, failure=lambda: "it was killed", patience_s=0.0)
    expected = r"answered for 0 s; .*; the last failure of one: it was killed; fix the cause"
    with PictureSource("data", FORMAT, producers) as source, pytest.raises(UnreachableError, match=expected):
        source.patches([0])


def test_producers_with_another_secret_are_not_believed(shards: tuple[Path, list[bytes]]) -> None:
    directory, _ = shards
    with producers_in_threads([PictureIndex(directory)], PillowDecoder()) as producers:
        stranger = Producers(producers.addresses, bytes(SECRET_BYTES), patience_s=0.0)
        with pytest.raises(UnreachableError, match="no producer of pictures has answered"):
            asked(directory, stranger, [1])


WRONG_HEADS: dict[str, tuple[dict[str, object], str]] = {
    "hash": ({"digest": "0" * 64}, "sent other content for sample 1 than its SHA-256 names"),
    "number": ({"number": 2}, "answered with sample 2 in place of 1"),
    "text": ({"text_bytes": 1 << 40}, r"announces 1099511627776 bytes of text; the limit is 1048576"),
    "no-text": ({"text_bytes": None}, "announces None bytes of text"),
    "bad": ({"is_bad": True}, "sent a text that cannot be read"),
}


@contextmanager
def wrong_at_first(directory: Path, num_wrong: int, head: dict[str, object]) -> Iterator[Producers]:
    """Yield a producer whose first answers have another head. The connection is sound: only the content is wrong."""
    producer = Producer([PictureIndex(directory)], PillowDecoder(), NO_ENDS)
    threading.Thread(target=producer.run, daemon=True).start()
    wrong = iter(range(num_wrong))

    def serve(connection: PeerConnection) -> None:
        if next(wrong, None) is None:
            producer.serve(connection)
            return
        connection.receive_message()
        connection.send_message(b'{"decoder": "Pillow", "num_waiting": 0}')
        usual = {"number": 1, "digest": "", "is_bad": False, "text_bytes": 0}
        connection.send_message(json.dumps({**usual, **head}).encode())
        with suppress(CommunicationError):  # the source closes the connection as soon as the head is wrong
            if "is_bad" not in head:
                connection.send(bytes(FORMAT.num_bytes))
            connection.send_tag()

    listener = listen("127.0.0.1")
    with PeerServer(listener, SECRET, serve, PRODUCER_LIMITS, has_low_priority=False):
        yield Producers([PeerAddress(*listener.getsockname()[:2])], SECRET)


@pytest.mark.parametrize("name", WRONG_HEADS)
def test_answer_that_is_wrong_is_not_used(name: str, shards: tuple[Path, list[bytes]]) -> None:
    directory, files = shards
    head, reason = WRONG_HEADS[name]
    with wrong_at_first(directory, 1, head) as producers:
        with pytest.raises(UnreachableError, match=reason):
            asked(directory, replace(producers, patience_s=0.0), [1])
        assert np.array_equal(asked(directory, producers, [1]).patches_NPV[0], patches_by_hand(files[1]))


def test_answer_that_is_wrong_is_asked_for_again(
    shards: tuple[Path, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, files = shards
    with wrong_at_first(directory, 2, {"digest": "0" * 64}) as producers:
        pictures = asked(directory, producers, [1])
    assert np.array_equal(pictures.patches_NPV[0], patches_by_hand(files[1]))
    (work,) = pictures.works
    assert (work.num_pictures, work.num_answered, work.num_failed) == (1, 1, 2)
    failed, *_, again = [record.getMessage() for record in caplog.records]
    assert "the producer sent other content for sample 1 than its SHA-256 names; the request is sent again" in failed
    assert re.fullmatch(r"picture producer 0 at 127\.0\.0\.1:\d+ answers again", again)


@pytest.fixture
def with_bad(tmp_path: Path) -> Path:
    """Shards whose samples 1 and 3 cannot be used: the file is cut off, there is no caption."""
    good = encoded(drawn(50, 40))
    members = {
        "0.jpg": good,
        "1.png": encoded(drawn(50, 40), "PNG")[:-900],
        "2.jpg": good,
        "3.jpg": good,
        "4.jpg": good,
    }
    captions = {f"{number}.txt": b"caption" for number in (0, 1, 2, 4)}
    write_shard(tmp_path / "s.tar", {**members, **captions})
    build_index(tmp_path)
    return tmp_path


def test_bad_picture_is_refused_with_its_member(with_bad: Path) -> None:
    with (
        producers_in_threads([PictureIndex(with_bad)], PillowDecoder()) as producers,
        pytest.raises(BadPictureError, match=r"s\.tar: 3\.jpg \(sample 3\): it has no caption"),
    ):
        asked(with_bad, producers, [4, 3, 1])


def test_bad_picture_that_is_replaced_costs_no_other(with_bad: Path) -> None:
    with producers_in_threads([PictureIndex(with_bad)], PillowDecoder()) as producers:
        pictures = asked(with_bad, producers, [4, 3, 2, 1, 0], REPLACE)
    assert [(bad.number, bad.member) for bad in pictures.bad] == [(3, "3.jpg"), (1, "1.png")]
    assert "Pillow cannot decode it" in pictures.bad[1].reason
    assert pictures.captions == ("caption", "", "caption", "", "caption")
    is_zero = [not patches_PV.any() for patches_PV in pictures.patches_NPV]
    assert is_zero == [False, True, False, True, False]
    assert np.array_equal(pictures.patches_NPV[0], pictures.patches_NPV[2])


class CountingDecoder(PillowDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def decode(self, contents: Sequence[bytes], size: int) -> list[np.ndarray | str]:
        self.sizes.append(len(contents))
        return super().decode(contents, size)


def test_pictures_decoded_together_have_limited_pixels(tmp_path: Path) -> None:
    """Sizes of 400, 400, 1000, 400 and 100 pixels with a limit of 1000: no decoding has more."""
    sizes = [(20, 20), (20, 20), (20, 50), (20, 20), (10, 10)]
    members = {f"{number}.jpg": encoded(drawn(*size)) for number, size in enumerate(sizes)}
    write_shard(tmp_path / "s.tar", {**members, **{f"{number}.txt": b"" for number in range(5)}})
    decoder = CountingDecoder()
    reader = ShardReader(build_index(tmp_path))
    found = list(prepared_pictures(reader, decoder, PictureFormat(32, 8, max_pixels=1000), [0, 1, 2, 3, 4]))
    assert [picture.number for picture in found] == [0, 1, 2, 3, 4]
    assert decoder.sizes == [2, 1, 2]


@pytest.mark.parametrize(("size", "patch"), [(32, 7), (0, 1), (8, 16), (16384, 2)])
def test_format_that_has_no_whole_patches_is_refused(size: int, patch: int) -> None:
    with pytest.raises(DataError, match="cannot be cut into patches"):
        PictureFormat(size, patch)


class SentMessages:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send_message(self, message: bytes) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("problem", ["\U0001f600" * 1000, "\x00" * 1000, "\udc80" * 1000, "no such file"])
def test_refusal_of_any_characters_fits_a_message(problem: str) -> None:
    sent = SentMessages()
    send_refusal(sent, problem)
    (message,) = sent.messages
    assert len(message) <= MAX_MESSAGE_BYTES
    assert problem.startswith(json.loads(message)["error"])


@contextmanager
def as_processes(directory: Path, num_producers: int, logs: Path) -> Iterator[PictureProducers]:
    with local_producers(producer_command([directory], PILLOW), num_producers, logs, lambda _text: None) as producers:
        yield producers


def own_producers() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if is_running(pid)}


@pytest.mark.slow
def test_producer_that_is_killed_is_asked_again(shards: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    directory, files = shards
    before = own_producers()
    with as_processes(directory, 2, tmp_path) as processes:
        producers = Producers(processes.addresses, processes.secret, processes.problem)
        with PictureSource(PictureIndex(directory).digest, FORMAT, producers) as source:
            first = source.patches(range(60))
            for _ in range(2):
                for pid in own_producers() - before:
                    os.kill(pid, signal.SIGKILL)
                again = source.patches(range(60))
                assert np.array_equal(again.patches_NPV, first.patches_NPV)
                assert again.captions == first.captions
    wait_until(lambda: own_producers() <= before, "the end of the producers")
    assert np.array_equal(first.patches_NPV[5], patches_by_hand(files[5]))


@pytest.mark.slow
def test_producer_that_cannot_start_ends_the_wait(tmp_path: Path) -> None:
    """The directory has no index, which a restart cannot help."""
    gave_up = "picture producer 0 has failed 2 times with the same error"
    with as_processes(tmp_path, 1, tmp_path / "logs") as processes, pytest.raises(DataError, match=gave_up):
        producers = Producers(processes.addresses, processes.secret, processes.problem)
        PictureSource("data", FORMAT, producers).patches([0])


@pytest.mark.parametrize("num_started", [0, 1])
def test_thread_limit_leaves_no_producer_and_no_listener(num_started: int, tmp_path: Path) -> None:
    before, listeners = own_producers(), [listen("127.0.0.1") for _ in range(2)]
    producers = PictureProducers(producer_command([tmp_path], PILLOW), listeners, SECRET, tmp_path, lambda _text: None)
    text = "^a thread that watches a producer of pictures could not be started: .*; use fewer of them"
    with no_thread_starts(after=num_started), pytest.raises(MegatrainError, match=text), producers:
        raise AssertionError("the block began")
    assert [listener.fileno() for listener in listeners] == [-1, -1]
    assert own_producers() <= before
