"""Pauses between the log-ins of a client at endpoints that do not answer them in time."""

from __future__ import annotations

from megatrain_job.coordination.errors import AttemptError
from megatrain_job.coordination.gateway_response import GatewayError, GrpcCode, JsonObject
from megatrain_job.coordination.log_in import LogIn
from megatrain_job.coordination.settings import Credentials, Endpoint, EtcdSettings
from megatrain_job.coordination.transport import Deadline
from tests.helpers.waiting import DEADLINE_S

FIRST, SECOND = EtcdSettings.of(["http://127.0.0.1:1", "http://127.0.0.1:2"]).endpoints
ATTEMPT_S = 3.0


class SilentEtcd:
    """Endpoints that answer a log-in in time, or not, on a fake clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.silent_s = dict.fromkeys((FIRST, SECOND), ATTEMPT_S)
        """The time that a client waits at each endpoint until its timeout; 0: it is answered."""
        self.asked_at_s: list[float] = []
        self.failed: list[Endpoint] = []
        self.token: object = "t"
        self.client = LogIn(
            Credentials("bob", "a password"), self._exchange, self._record_failure,
            slow_after_s=0.3 * ATTEMPT_S, clock=lambda: self.now_s,
        )  # fmt: skip

    def log_in(self, endpoint: Endpoint) -> str:
        """Return the token, or the reason why there is none; a new one is needed each time."""
        self.client.drop()
        try:
            return self.client.token(endpoint, "a test", Deadline(DEADLINE_S)) or ""
        except AttemptError as error:
            return str(error)

    def _record_failure(self, endpoint: Endpoint, reason: str, *, is_alive: bool = False) -> None:
        self.failed.append(endpoint)

    def _exchange(
        self, endpoint: Endpoint, path: str, body: JsonObject, token: str | None, deadline: Deadline
    ) -> JsonObject:
        self.asked_at_s.append(self.now_s)
        self.now_s += self.silent_s[endpoint]
        if not self.silent_s[endpoint]:
            return {"token": self.token}
        try:
            raise TimeoutError
        except TimeoutError as error:
            raise AttemptError("no answer in time", may_have_applied=True) from error


def test_pauses_double_up_to_a_minute() -> None:
    etcd = SilentEtcd()
    while etcd.now_s < 1400.0:
        etcd.log_in(FIRST)
        etcd.now_s += 0.1
    pauses_s = [second - first - ATTEMPT_S for first, second in zip(etcd.asked_at_s, etcd.asked_at_s[1:], strict=False)]
    # Each pause is drawn between half of it and all of it, so that hosts do not retry at the same moment.
    longest_s = [3.0, 6.0, 12.0, 24.0, 48.0, *[60.0] * len(pauses_s)]
    assert len(pauses_s) >= 7
    assert all(0.5 * most <= found <= most + 0.2 for found, most in zip(pauses_s, longest_s, strict=False)), pauses_s


def test_another_endpoint_is_asked_during_a_pause() -> None:
    etcd = SilentEtcd()
    etcd.silent_s[SECOND] = 0.0
    assert etcd.log_in(FIRST) == "no answer in time"
    assert etcd.log_in(FIRST).startswith("no answer in time to the last log-in; the next is in")
    assert etcd.failed == [FIRST]  # The other endpoints come first from here on.
    assert etcd.log_in(SECOND) == "t"
    assert len(etcd.asked_at_s) == 2


def test_an_answer_from_anywhere_ends_all_pauses() -> None:
    etcd = SilentEtcd()
    etcd.log_in(FIRST)
    etcd.silent_s = {FIRST: 0.0, SECOND: 0.0}
    etcd.log_in(SECOND)
    assert etcd.log_in(FIRST) == "t"


def test_only_a_log_in_that_waited_long_enough_causes_a_pause() -> None:
    for waited_s, is_paused in ((0.05, False), (0.8, False), (1.0, True)):
        etcd = SilentEtcd()
        etcd.silent_s[FIRST] = waited_s
        etcd.log_in(FIRST)
        etcd.silent_s[FIRST] = 0.0
        assert (etcd.log_in(FIRST) != "t") is is_paused, waited_s


def test_only_a_refused_token_is_dropped() -> None:
    refused = GatewayError(GrpcCode.UNAUTHENTICATED, "invalid auth token")
    missing = GatewayError(5, "requested lease not found")
    client = SilentEtcd().client
    cases = [("t", refused), ("t", missing), (None, refused)]
    assert [client.drop_refused(token, error) for token, error in cases] == [True, False, False]


def test_token_that_fits_in_no_header_is_refused() -> None:
    etcd = SilentEtcd()
    etcd.silent_s[FIRST] = 0.0
    for token in ("a\r\nb: c", " a", "a b", "\x7f", "\u00e4", "", "a" * 100_000, 7, None):
        etcd.token = token
        assert etcd.log_in(FIRST) == "no token in the answer", token
    assert etcd.failed == [FIRST] * 9
