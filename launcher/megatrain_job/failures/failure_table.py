"""torch elastic's table of failures: which rank on which host an exit code belongs to, and which failed first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megatrain_job.failures.weights import ROOT_BONUS

_HEAD = re.compile(r"(Root Cause \(first observed failure\))|Failures:")
_HOST = re.compile(r"^\W*host\s+: (\S+)")
_RANK = re.compile(r"^\W*rank\s+: (\d+) \(local_rank")
_ENTRY_LINE = re.compile(r"^\W*(?:exitcode|traceback)\s+: ")


@dataclass(frozen=True, slots=True)
class Entry:
    """The fields read so far of the entry that a line belongs to."""

    named: dict[str, str]
    extra_weight: int


@dataclass(slots=True)
class FailureTable:
    """Follows the table's lines."""

    _is_root: bool = False
    _named: dict[str, str] = field(default_factory=dict)

    def see(self, line: str) -> None:
        """Process a heading or a field."""
        head, host, rank = _HEAD.search(line), _HOST.match(line), _RANK.match(line)
        if host is not None:
            self._named = {"host": host[1]}
        elif rank is not None:
            # the host's line comes before the rank's, if at all
            self._named = {**({} if "rank" in self._named else self._named), "rank": rank[1]}
        elif head is not None:
            self._is_root, self._named = head[1] is not None, {}

    def entry_for(self, line: str) -> Entry | None:
        """Return the entry whose end a line describes, None for a line outside the table."""
        if not self._named or not _ENTRY_LINE.match(line):
            return None
        return Entry(dict(self._named), ROOT_BONUS if self._is_root else 0)
