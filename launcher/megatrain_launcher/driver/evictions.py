"""Table of the reasons for which a host is evicted.

An eviction removes a host from the running round. A cordon keeps the host out of later rounds until a person removes
the cordon.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class EvictionCause(StrEnum):
    """The party that decides on an eviction."""

    DRIVER = "the driver"
    VERDICT = "a verdict of the diagnosis, and a person who approves it if the configuration requires it"
    PERSON = "a person"


class EvictionReason(Enum):
    """For each reason: its sentence with placeholders for the facts, who decides, and whether the host is cordoned."""

    HOST_LOST = ("{hosts} {are} gone: {evidence}", EvictionCause.DRIVER, False)
    BROKEN_HOST = ("{failure}: {host} is broken", EvictionCause.DRIVER, True)
    BROKEN_IN_A_HANG = ("{hang}: {hosts} {are} broken", EvictionCause.DRIVER, True)
    NETWORK_FAILURES = ("{failure}; {times} within {window_s:g} s", EvictionCause.DRIVER, True)
    HANGS = ("{hang}; {times} within an hour", EvictionCause.DRIVER, True)
    FAILURES = ("{failure}; {times} within an hour", EvictionCause.DRIVER, True)
    PAIR_TESTS = ("pair tests: {findings}", EvictionCause.DRIVER, True)
    STRAGGLER = ("{hosts}: slow ({straggler_cause}); {balance}; {spares}", EvictionCause.VERDICT, True)
    REQUEST = ("evicted by {person}", EvictionCause.PERSON, True)
    """The reason of the cordon if the person gave none."""

    def __init__(self, sentence: str, cause: EvictionCause, is_cordoned: bool) -> None:
        self.sentence = sentence
        self.cause = cause
        self.is_cordoned = is_cordoned

    def text(self, **facts: object) -> str:
        """Return the sentence with the facts filled in."""
        return self.sentence.format(**facts)
