"""Tokens that cannot be used: their address, the error that names it, and the samples that they make unusable."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.errors import DataError


@dataclass(frozen=True, slots=True)
class BadTokens:
    """A location in the files of a source where the tokens cannot be used, and why.

    offset: the first bad byte of `file`. document: the number of the document that the byte is in; None if that is not
    known. reason: the fault and a hint, as the end of a sentence about the file.
    """

    file: str
    offset: int
    document: int | None
    reason: str

    def __str__(self) -> str:
        document = "" if self.document is None else f" (document {self.document})"
        return f"{self.file} at byte {self.offset}{document}: {self.reason}"


class BadSampleError(DataError):
    """A sample cannot be used: its tokens, or its picture. The text has the address."""


class BadTokensError(BadSampleError):
    """Tokens of a sample cannot be used. `tokens` has their address."""

    def __init__(self, tokens: BadTokens) -> None:
        # the only argument is the address, so that the error can be sent to another process
        super().__init__(tokens)
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample of a step that is replaced by one without labels.

    number: the sample's number in the run. source: the number of its source in the mixture. reason: the address of what
    cannot be used, and why; None if only another rank, which works on the same samples, knows it.
    """

    number: int
    source: int
    reason: str | None
