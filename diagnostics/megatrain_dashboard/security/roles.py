"""The caller of a request, and its role: a viewer may read, an operator may also act."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"


class Proof(StrEnum):
    """The method by which a caller was authenticated."""

    NOTHING = "nothing"
    """The page is open: it is on loopback and has no tokens."""
    TOKEN = "token"
    SESSION = "session"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `user` is a name for the audit; `address` is where the connection comes from."""

    user: str
    role: Role
    proof: Proof
    address: str

    @property
    def is_browser(self) -> bool:
        """Whether the caller uses a browser, so that another site's page could cause requests in the user's name."""
        return self.proof is not Proof.TOKEN


SCOPE_KEY = "megatrain.caller"


def caller_of(request: Request) -> Caller:
    """Return the caller, as the guard authenticated it."""
    caller: Caller = request.scope[SCOPE_KEY]
    return caller
