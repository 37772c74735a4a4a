"""A message: everything that is sent to a receiver at once, in sentences that need no context. No I/O and no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from megatrain.formatting import age_text, count_text, time_text
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.topics import Stage, Topic, worst_level

_MAX_KEY_CHARS = 255
"""Characters of a deduplication key that PagerDuty accepts."""
_MAX_TITLE_CHARS = 140


@dataclass(frozen=True, slots=True)
class PageLinks:
    """The addresses of the web page and the runbooks; empty if unknown."""

    page: str = ""
    runbooks: str = ""

    def page_of(self, topic: Topic) -> str:
        return f"{self.page.rstrip('/')}/#/{quote(topic.route)}" if self.page and topic.route else ""

    def runbook_of(self, topic: Topic) -> str:
        """Return the runbook's address, or its path in the repository if no address is configured."""
        if not topic.runbook:
            return ""
        return f"{self.runbooks.rstrip('/')}/{topic.runbook}" if self.runbooks else f"docs/runbooks/{topic.runbook}"


@dataclass(frozen=True, slots=True)
class Message:
    """Topics that are sent together, most important first."""

    job: str
    topics: tuple[Topic, ...]
    links: PageLinks
    now_unix_s: float
    num_waiting: int = 0
    """Number of further topics that are sent later."""
    outdated: tuple[Topic, ...] = ()
    """The ends of alerts that were sent with another level."""

    @property
    def lead(self) -> Topic:
        return self.topics[0]

    @property
    def is_over(self) -> bool:
        """Whether all topics are closed."""
        return all(topic.stage is Stage.CLOSED for topic in self.topics)

    @property
    def level(self) -> HealthLevel:
        """The worst level of the open topics; green if none is open."""
        return worst_level(topic for topic in self.topics if topic.stage is not Stage.CLOSED)

    @property
    def title(self) -> str:
        """One line: the level, the job, and what happened."""
        word = "over" if self.is_over else str(self.level)
        more = f" (and {len(self.topics) - 1} more)" if len(self.topics) > 1 else ""
        title = f"[{word}] {self.job}: {self.lead.what}"
        return (
            f"{title[: _MAX_TITLE_CHARS - len(more) - 3]}...{more}"
            if len(title + more) > _MAX_TITLE_CHARS
            else title + more
        )

    @property
    def text(self) -> str:
        """All facts of all topics, as lines of plain text."""
        blocks = ["\n".join(f"{name}: {value}" for name, value in self.facts(topic)) for topic in self.topics]
        if self.num_waiting:
            blocks.append(f"{count_text(self.num_waiting, 'further topic')} will be sent later, to limit the messages.")
        return "\n\n".join(blocks)

    def facts(self, topic: Topic) -> Iterator[tuple[str, str]]:
        """Yield the known facts about a topic, as pairs of a name and a text."""
        yield "job", self.job
        yield ("over" if topic.stage is Stage.CLOSED else str(topic.level)), topic.what
        if topic.where:
            yield "where", topic.where
        if topic.step is not None:
            yield "last step before it", f"{topic.step:,}"
        yield "since", f"{time_text(topic.began_unix_s)}, {age_text(topic.began_unix_s, self.now_unix_s)} ago"
        if topic.cost:
            yield "lost", topic.cost
        if topic.activity:
            yield "now", topic.activity
        if topic.action:
            yield "who acts", topic.action
        page, runbook = self.links.page_of(topic), self.links.runbook_of(topic)
        if page:
            yield "page", page
        if runbook:
            yield "runbook", runbook

    def key_of(self, topic: Topic) -> str:
        """Return the name by which receivers recognize that two messages have the same topic."""
        key = f"megatrain/{self.job}/{topic.name}"
        if len(key) <= _MAX_KEY_CHARS:
            return key
        return f"{key[:180]}/{hashlib.sha256(key.encode()).hexdigest()}"
