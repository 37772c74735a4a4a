"""A rendezvous backend for stock torchrun that uses etcd v3: `torchrun --rdzv-backend=megatrain
--rdzv-endpoint=HOST:PORT[,HOST:PORT...] --rdzv-id=NAME -m megatrain.train CONFIG`.

Each agent has keys with a lease, an elected agent writes rounds, and each round has its own store. The round ends when
an agent disappears, restarts its workers, or joins. Then torchrun restarts the workers on the other agents, within a
lease's TTL, instead of after a failed collective. The rendezvous is never closed permanently.
"""

from __future__ import annotations

from typing import Any


def torchrun_handler() -> Any:
    """Return the function that creates a handler from torchrun's parameters (entry point group `torchrun.handlers`)."""
    # torchrun calls this for every rendezvous backend, so the handler's module is imported only when it is used
    return _create_handler


def _create_handler(parameters: Any) -> Any:
    from megatrain_launcher.rendezvous.handler import create_handler

    return create_handler(parameters)
