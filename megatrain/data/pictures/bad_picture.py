"""A picture that cannot be used: its address, and the error that names it."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.data.bad_tokens import BadSampleError


@dataclass(frozen=True, slots=True)
class BadPicture:
    """A sample whose picture or caption cannot be used.

    number: the sample's number. shard, member: the file, and the name of the member in it. reason: the fault, as the
    end of a sentence about the member.
    """

    number: int
    shard: str
    member: str
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.member} (sample {self.number}): {self.reason}"


class BadPictureError(BadSampleError):
    """A picture of a sample cannot be used. `picture` has its address."""

    def __init__(self, picture: BadPicture) -> None:
        # the only argument is the address, so that the error can be sent to another process
        super().__init__(picture)
        self.picture = picture
