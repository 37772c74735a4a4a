"""A problem of a part of a job that is not a host, such as its own etcd, whose files were removed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem that needs a person now. The key is removed when the problem is over."""

    source: str
    """The affected part."""
    text: str
    """Whole sentences, for people."""
    since_unix_s: float
    """When it was reported."""
