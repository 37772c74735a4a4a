"""What is wrong with a part of a job that is no host: its own etcd, whose files somebody removed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """Somebody is needed now; the key is taken away when it is over."""

    source: str
    """Which part."""
    text: str
    """Whole sentences, for people."""
    since_unix_s: float
    """When it was reported."""
