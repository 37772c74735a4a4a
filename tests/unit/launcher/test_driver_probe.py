"""Probing a liveness port: refusal and another session prove a death, silence proves nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatrain.contracts.records.host_records import HostRecord
from megatrain_launcher.driver.actions import Probe
from megatrain_launcher.driver.probe import Prober, ProbeResult
from megatrain_launcher.liveness import Liveness, LivenessPort, LivenessReader, ask
from tests.helpers.waiting import DEADLINE_S, wait_until


@contextmanager
def port_that_says(answer: bytes | None) -> Iterator[int]:
    """Yield a port that sends `answer` to each connection; None: it accepts none."""
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
    ("answer", "liveness"),
    [
        (b"mine", Liveness.ALIVE),
        (b"mine\n", Liveness.ALIVE),
        (b"another", Liveness.DEAD),
        (b"", Liveness.UNKNOWN),
        (None, Liveness.UNKNOWN),
        (b"\xff" * 1000, Liveness.DEAD),
    ],
)
def test_answer_of_a_port_tells_alive_dead_or_unknown(answer: bytes | None, liveness: Liveness) -> None:
    with port_that_says(answer) as port:
        limit_s = 0.05 if answer is None else DEADLINE_S
        assert ask("127.0.0.1", port, "mine", timeout_s=limit_s)[0] is liveness


def test_probe_of_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ask("127.0.0.1", port, "mine")[0] is Liveness.DEAD
    assert ask("no such host", 80, "mine")[0] is Liveness.UNKNOWN


def test_invalid_port_proves_no_death() -> None:
    """Linux refuses a connection to port 0, and a candidate revokes the lease of a leader that refuses."""
    for port in [-1, 0, 65536, 10**6]:
        assert ask("127.0.0.1", port, "mine")[0] is Liveness.UNKNOWN, port


def test_a_liveness_port_answers_with_the_current_session() -> None:
    port = LivenessPort("1", "127.0.0.1")
    assert ask("127.0.0.1", port.port, "1")[0] is Liveness.ALIVE
    port.session = "2"
    with socket.create_connection(("127.0.0.1", port.port)):
        pass  # A client that closes at once has no effect.
    assert ask("127.0.0.1", port.port, "2")[0] is Liveness.ALIVE
    port.close()
    assert ask("127.0.0.1", port.port, "2")[0] is Liveness.DEAD


def test_only_a_port_that_was_reached_before_proves_a_death() -> None:
    """A firewall that refuses, or loopback in place of another machine, must not end a live host's lease."""
    ports = [LivenessPort("mine", "127.0.0.1") for _ in range(2)]
    reader = LivenessReader()
    liveness, detail = reader.ask("127.0.0.1", ports[1].port, "other")
    assert liveness is Liveness.UNKNOWN
    assert detail.endswith("now belongs to another executor, or a firewall is in between: it has never answered here")
    assert reader.ask("127.0.0.1", ports[0].port, "mine")[0] is Liveness.ALIVE
    for port in ports:
        port.close()
    assert [reader.ask("127.0.0.1", port.port, "mine")[0] for port in ports] == [Liveness.DEAD, Liveness.UNKNOWN]


def test_a_host_that_was_reached_before_is_proven_dead_later() -> None:
    prober = Prober(LivenessReader(), lambda: 5.0)
    port = LivenessPort("mine", "127.0.0.1")
    host = HostRecord("a", "mine", 1, "127.0.0.1", 1, port.port, 1, "", "", "", 0.0, is_fit=True)
    for _ in range(3):
        prober.reach_new_hosts([host])
    probe = Probe("a", "mine", "127.0.0.1", port.port)
    assert next_result(prober, probe).liveness is Liveness.ALIVE
    port.close()
    assert next_result(prober, probe).liveness is Liveness.DEAD
    prober.close()


def next_result(prober: Prober, probe: Probe) -> ProbeResult:
    prober.start(probe)
    results: list[ProbeResult] = []
    wait_until(lambda: results.extend(prober.take()) or bool(results), "the answer")
    return results[0]


def test_prober_asks_a_host_once_at_a_time() -> None:
    prober = Prober(LivenessReader(), lambda: 5.0)
    with port_that_says(b"mine") as port:
        for _ in range(3):
            prober.start(Probe("a", "mine", "127.0.0.1", port))
        results = []

        def has_come() -> bool:
            results.extend(prober.take())
            return not prober.is_busy

        wait_until(has_come, "the answer")
    prober.close()
    assert {(result.host, result.liveness, result.at) for result in results} == {("a", Liveness.ALIVE, 5.0)}
