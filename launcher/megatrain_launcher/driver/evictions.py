"""Every reason for which a host is evicted, in one table. Pure.

An eviction takes a host out of the running round. A cordon keeps it out of later rounds until a person removes the
cordon.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class EvictionCause(StrEnum):
    """The decider of an eviction."""

    DRIVER = "the driver"
    VERDICT = "a verdict of the diagnosis, and a person who approves it if the configuration requires it"
    PERSON = "a person"


class EvictionReason(Enum):
    """The sentence of a reason, with places for the facts; the decider; and whether the host is cordoned."""

    HOST_LOST = ("{hosts} {are} gone: {evidence}", EvictionCause.DRIVER, False)
    BROKEN_HOST = ("{failure}: {host} is broken", EvictionCause.DRIVER, True)
    NETWORK_FAILURES = ("{failure}; {times} within {window_s:g} s", EvictionCause.DRIVER, True)
    HANGS = ("{hang}; {times} within an hour", EvictionCause.DRIVER, True)
    FAILURES = ("{failure}; {times} within an hour", EvictionCause.DRIVER, True)
    PAIR_TESTS = ("pair tests: {findings}", EvictionCause.DRIVER, True)
    STRAGGLER = ("{hosts}: slow by its {straggler_cause}; {balance}; {spares}", EvictionCause.VERDICT, True)
    REQUEST = ("evicted by {person}", EvictionCause.PERSON, True)
    """The sentence of the cordon if the person gave no reason."""

    def __init__(self, sentence: str, cause: EvictionCause, is_cordoned: bool) -> None:
        self.sentence = sentence
        self.cause = cause
        self.is_cordoned = is_cordoned

    def text(self, **facts: object) -> str:
        """Return the sentence with its facts."""
        return self.sentence.format(**facts)
