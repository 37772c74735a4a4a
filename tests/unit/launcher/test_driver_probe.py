"""Probing a liveness port: refusal and another session prove a death, silence proves nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatrain_launcher.driver.actions import Probe
from megatrain_launcher.driver.probe import Prober, Vitality, ask
from tests.helpers.waiting import wait_until


@contextmanager
def port_that_says(answer: bytes | None) -> Iterator[int]:
    """Yield a port that sends `answer` to who connects; None: it accepts nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = threading.Event()

        def serve() -> None:
            server.settimeout(0.05)
            while not is_over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield server.getsockname()[1]
        is_over.set()
        if answer is not None:
            thread.join()


@pytest.mark.parametrize(
    ("answer", "vitality"),
    [
        (b"mine", Vitality.ALIVE),
        (b"mine\n", Vitality.ALIVE),
        (b"another", Vitality.DEAD),
        (b"", Vitality.UNKNOWN),
        (None, Vitality.UNKNOWN),
        (b"\xff" * 1000, Vitality.DEAD),
    ],
)
def test_answers(answer: bytes | None, vitality: Vitality) -> None:
    with port_that_says(answer) as port:
        assert ask("127.0.0.1", port, "mine", timeout_s=0.2)[0] is vitality


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ask("127.0.0.1", port, "mine")[0] is Vitality.DEAD
    assert ask("127.0.0.1", 70000, "mine")[0] is Vitality.UNKNOWN
    assert ask("no such host", 80, "mine", timeout_s=0.2)[0] is Vitality.UNKNOWN


def test_prober_asks_a_host_once_at_a_time() -> None:
    prober = Prober(lambda: 5.0)
    with port_that_says(b"mine") as port:
        for _ in range(3):
            prober.start(Probe("a", "mine", "127.0.0.1", port))
        results = []

        def has_come() -> bool:
            results.extend(prober.take())
            return not prober.is_busy

        wait_until(has_come, "the answer", 5.0)
    prober.close()
    assert {(one.host, one.vitality, one.at) for one in results} == {("a", Vitality.ALIVE, 5.0)}
