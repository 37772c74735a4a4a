"""Checkpoints on an S3 server: conditional puts, and two rounds that run concurrently while requests fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from uuid import uuid4

import pytest

from megatrain.checkpoint.housekeeping import Housekeeping
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.location import Location, put_once
from megatrain.checkpoint_format.url_location import open_location
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import put_main
from tests.helpers.location_cases import LocationCases
from tests.helpers.s3_server import Fault, FaultyS3, s3_server
from tests.helpers.two_rounds import STEP, make_round, newest, two_rounds


@pytest.fixture(scope="module")
def running() -> Iterator[FaultyS3]:
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def s3(running: FaultyS3) -> Iterator[FaultyS3]:
    yield running
    running.hook = lambda method, key: None


@pytest.fixture
def place(s3: FaultyS3) -> Location:
    return open_location(f"s3://bucket/{uuid4().hex}/place")


@pytest.mark.slow
class TestS3Location(LocationCases):
    """The contract of all locations; quick tests check it on a disk, behind file:// and in memory."""


@pytest.mark.slow
def test_the_server_and_its_driver_let_one_of_two_win(place: Location) -> None:
    assert place.is_exclusive()
    assert place.entries() == []


def test_a_server_without_the_condition_is_detected(place: Location, s3: FaultyS3) -> None:
    """Such a server, as older ones do, ignores the condition and stores the object."""
    application = s3._application

    def forget(environment: dict[str, object], start_response: object) -> object:
        environment.pop("HTTP_IF_NONE_MATCH", None)
        return application(environment, start_response)

    s3._application = forget
    try:
        assert not place.is_exclusive()
    finally:
        s3._application = application


@pytest.mark.slow(kept=["Fault.REFUSED-False"])
@pytest.mark.parametrize(("fault", "is_there"), [(Fault.LOST, True), (Fault.REFUSED, False)])
def test_put_without_an_answer_is_read_back(place: Location, s3: FaultyS3, fault: Fault, is_there: bool) -> None:
    s3.hook = lambda method, key: fault if method == "PUT" else None
    if is_there:
        assert put_once(place / "a", b"mine")
        assert not put_once(place / "a", b"another's")
    else:
        with pytest.raises(CheckpointError, match="place/a: cannot be written: "):
            put_once(place / "a", b"mine")
        assert not (place / "a").exists()


@pytest.fixture
def checkpoints(place: Location, tmp_path: Path) -> Location:
    put_main(place)
    make_round(tmp_path, 1, str(place), step=5).persist(place)
    return place


# test_two_rounds.py tests each put that is late, fails or loses its answer, on a disk and in memory.


@pytest.mark.slow
def test_an_older_round_whose_commit_is_late(checkpoints: Location, s3: FaultyS3, tmp_path: Path) -> None:
    """The request is in flight while the newer round commits and its retention removes the earlier checkpoints."""
    old, new = two_rounds(tmp_path, str(checkpoints))
    is_late = [True]

    def hold(method: str, key: str) -> None:
        if is_late[0] and method == "PUT" and key.endswith("COMMIT"):
            is_late[0] = False
            new.persist(checkpoints)
            Housekeeping().run(checkpoints, new.plan)

    s3.hook = hold
    with suppress(CheckpointError):
        old.persist(checkpoints)
        Housekeeping().run(checkpoints, old.plan)
    assert not is_late[0]
    assert committed_steps(checkpoints / "main") == [STEP]
    assert newest(checkpoints) == STEP
    assert read_manifest(checkpoints / "main/step-000000010").round == 3


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "committed"), [(Fault.LOST, STEP), (Fault.REFUSED, 5)])
def test_an_older_round_whose_commit_fails(
    checkpoints: Location, s3: FaultyS3, tmp_path: Path, fault: Fault, committed: int
) -> None:
    """A commit whose answer was lost is a success. Then the newer round starts, and the older one tries again."""
    old, new = two_rounds(tmp_path, str(checkpoints))
    s3.hook = lambda method, key: fault if method == "PUT" and key.endswith("COMMIT") else None
    with suppress(CheckpointError) if fault is Fault.REFUSED else nullcontext():
        old.persist(checkpoints)
    s3.hook = lambda method, key: None
    assert newest(checkpoints) == committed
    new.persist(checkpoints)
    assert newest(checkpoints) == STEP
    with suppress(CheckpointError):
        old.persist(checkpoints)
    assert newest(checkpoints) == STEP
