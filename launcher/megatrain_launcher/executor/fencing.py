"""When the job may have gone on without this life of its host (decision 11). Pure."""

from __future__ import annotations

from megatrain.contracts.rounds import Round


def needs_new_session(host: str, session: str, named_in: int, newest: Round | None) -> bool:
    """Say whether the job has gone on without this life of the host, once its workers are gone.

    `named_in`: the newest round that named this session, 0 for none.
    """
    if newest is None or named_in == 0:
        return False
    return newest.number > named_in and newest.part_of(host, session) is None
