"""Who asks, and what they may do: look, or look and act."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"


class Proof(StrEnum):
    """By what somebody is known."""

    NOTHING = "nothing"
    """The page is open: it is on loopback and has no tokens."""
    TOKEN = "token"
    SESSION = "session"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks. `user` is a name for the audit, `address` where the connection comes from."""

    user: str
    role: Role
    proof: Proof
    address: str

    @property
    def is_browser(self) -> bool:
        """A page of somebody else's could make the caller's browser ask, without the caller's will."""
        return self.proof is not Proof.TOKEN


SCOPE_KEY = "megatrain.caller"


def caller_of(request: Request) -> Caller:
    """Return who asks, as the guard found out."""
    caller: Caller = request.scope[SCOPE_KEY]
    return caller
