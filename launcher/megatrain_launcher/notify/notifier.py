"""Notifies the job's receivers while this host's driver leads, in threads separate from the driver's.

The driver only signals that something has happened. It waits for receivers only at the end of the job, because no
later driver could send then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatrain.config.config import Config
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Leadership
from megatrain_launcher.notify.message import PageLinks
from megatrain_launcher.notify.receivers import Receiver, receivers_of
from megatrain_launcher.notify.sender import NoticeSender, SenderParts
from megatrain_launcher.notify.topic_follower import TopicFollower, TopicReader

LAST_S = 5.0
"""The longest time, in seconds, that the driver waits for the receivers at the end of a job."""


class Notifier:
    """Notifies the receivers of a job during one leadership. The function that `notifier_of` returns makes one."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        receivers: Sequence[Receiver],
        links: PageLinks,
        leadership: Leadership,
        clock: Callable[[], float],
    ) -> None:
        self._senders: list[NoticeSender] = []
        self._topics: TopicFollower | None = None
        if receivers:
            self._topics = TopicFollower(TopicReader(client, keys, links, clock), clock)
            parts = SenderParts(client, keys, leadership, self._topics, clock)
            self._senders = [NoticeSender(parts, receiver) for receiver in receivers]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why receivers cannot be notified, and why the job's topics cannot be read; empty if all works."""
        found = [sender.problem for sender in self._senders]
        if self._topics is not None:
            found.append(self._topics.problem)
        return tuple(filter(None, found))

    def wake(self) -> None:
        """Signal that something has happened. Never waits."""
        if self._topics is not None:
            self._topics.wake()

    def close(self, *, is_job_over: bool) -> None:
        """End the threads; if the job is over, report that first, as far as possible within LAST_S."""
        if self._topics is None:
            return
        if is_job_over:
            self._topics.finish(LAST_S)
            end = time.monotonic() + LAST_S
            for sender in self._senders:
                sender.join(max(0.0, end - time.monotonic()))
        for sender in self._senders:
            sender.close()
        self._topics.close()


MakeNotifier = Callable[[Leadership], Notifier]
"""Starts to notify the receivers for one leadership."""


def notifier_of(config: Config, client: EtcdClient, keys: JobKeys, clock: Callable[[], float]) -> MakeNotifier:
    """Return the function that starts notifying the receivers of a configuration."""
    receivers = receivers_of(config)
    links = PageLinks(config.notify.page_url, config.notify.runbooks_url)
    return lambda leadership: Notifier(client, keys, receivers, links, leadership, clock)
