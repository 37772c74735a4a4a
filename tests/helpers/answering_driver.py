"""A stand-in for the driver: it is elected, and answers each request as a test configures it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from megatrain.contracts.records.host_records import CheckReport
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import TURN_MARK, JobEnd
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import ChangeKind, Changes
from megatrain_job.coordination.wire import Delete, KeyRange, Put

Record = Answer | CheckReport | JobEnd
Reply = Callable[[JobRequest], Sequence[Record]]


class AnsweringDriver:
    """As a context manager: leads under the name of a host; `requests` has the requests that it received."""

    def __init__(self, client: EtcdClient, keys: JobKeys, reply: Reply, host: str = "host-1") -> None:
        self.requests: list[JobRequest] = []
        self._client = client
        self._keys = keys
        self._reply = reply
        self._lease = client.grant_lease(30)
        revision = client.put(f"{keys.election}/{self._lease.lease_id:x}", host, lease_id=self._lease.lease_id)
        self._watch = Watch(client, KeyRange.prefix(keys.directory("requests")), start_revision=revision)
        self._thread = threading.Thread(target=self._run, name="etcd answering driver")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()
        self._thread.join()
        self._client.revoke_lease(self._lease.lease_id)

    def _run(self) -> None:
        for event in self._watch:
            assert isinstance(event, Changes)
            for change in event.changes:
                if change.kind is ChangeKind.PUT:
                    request = decode(JobRequest, change.item.value, "request")
                    if all(request.request_id != one.request_id for one in self.requests):
                        self.requests.append(request)
                        for record in self._reply(request):
                            self._write(request, record)

    def _write(self, request: JobRequest, record: Record) -> None:
        keys = self._keys
        match record:
            case Answer():
                key = keys.answer(request.request_id)
            case CheckReport():
                is_of_pair = any(result.partner for result in record.results)
                key = keys.check(request.request_id + (f"{TURN_MARK}0" if is_of_pair else ""), record.host)
            case JobEnd():
                key = keys.end
        put = Put(key, encode(record), lease_id=0 if isinstance(record, JobEnd) else self._lease.lease_id)
        is_last = isinstance(record, Answer) and record.is_done
        taken = [Delete(KeyRange.key(keys.request(request.request_id)))] if is_last else []
        self._client.txn([], [put, *taken], is_repeatable=True)


def answer(request: JobRequest, text: str, *, is_accepted: bool = True, is_done: bool = True) -> Answer:
    return Answer(request.request_id, is_accepted, is_done, text, time.time())
