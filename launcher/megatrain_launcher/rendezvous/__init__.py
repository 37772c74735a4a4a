"""A rendezvous for stock torchrun: `torchrun --rdzv-backend=megatrain --rdzv-endpoint=HOST:PORT[,HOST:PORT...]
--rdzv-id=NAME -m megatrain.train CONFIG`, with etcd v3 behind it.

Each agent has a leased key, an elected one writes rounds, and each round has a store of its own. When an agent is gone,
restarts its workers, or a missing one comes, the round is over and the others' torchrun restarts theirs: within a
lease's TTL, not when a collective happens to fail. Nothing is ever closed for good.
"""

from __future__ import annotations

from typing import Any


def torchrun_handler() -> Any:
    """Return what makes a handler from torchrun's parameters: the entry point of group `torchrun.handlers`."""
    # torchrun calls this whichever rendezvous was asked for
    return _create_handler


def _create_handler(parameters: Any) -> Any:
    from megatrain_launcher.rendezvous.handler import create_handler

    return create_handler(parameters)
