"""A rendezvous for stock torchrun: `torchrun --rdzv-backend=megatrain --rdzv-endpoint=HOST:PORT[,HOST:PORT...]
--rdzv-id=NAME -m megatrain.train CONFIG`, with etcd v3 behind it.

Each agent has a leased key, an elected agent writes rounds, and each round has its own store. When an agent disappears,
restarts its workers, or joins, the round is over, and the other agents' torchrun restarts their workers: within a
lease's TTL, not when a collective happens to fail. Nothing is ever closed permanently.
"""

from __future__ import annotations

from typing import Any


def torchrun_handler() -> Any:
    """Return the function that makes a handler from torchrun's parameters: the entry point of group
    `torchrun.handlers`.
    """
    # torchrun calls this for every rendezvous backend
    return _create_handler


def _create_handler(parameters: Any) -> Any:
    from megatrain_launcher.rendezvous.handler import create_handler

    return create_handler(parameters)
