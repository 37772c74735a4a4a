"""Section [runtime]: the device, the processor, the network and how long to wait for peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.options import LARGEST_INTEGER, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The device, the processor, the network and how long to wait for peers."""

    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata=option("Where to compute. auto: CUDA when there is a GPU, else the processor.")
    )
    threads: int = field(
        default=0, metadata=option("Threads of torch in each process. 0: torch's own choice.", minimum=0, maximum=65536)
    )
    cpu_binding: Literal["none", "core", "numa"] = field(
        default="none",
        metadata=option("What each process is bound to: nothing, its own share of the cores, or a NUMA node."),
    )
    network_interface: str = field(
        default="",
        metadata=option("Network interface for traffic between hosts, such as eth0. Empty: the backend's choice."),
    )
    ranks_per_store: int = field(
        default=2048,
        metadata=option(
            "For how many ranks there is a store at which groups meet while they are created: up to this many meet at "
            "that of the job, in larger worlds some ranks serve one each.",
            minimum=1,
            maximum=LARGEST_INTEGER,
        ),
    )
    init_timeout_s: float = field(
        default=300.0,
        metadata=option("Longest wait for all ranks to meet and build their groups.", unit="s", above=0),
    )
    first_step_timeout_s: float = field(
        default=600.0,
        metadata=option(
            "Longest wait in a collective of the first step, which compiles and allocates.",
            unit="s",
            above=0,
        ),
    )
    step_timeout_s: float = field(
        default=120.0,
        metadata=option("Longest wait in a collective of any later step.", unit="s", above=0),
    )
    checkpoint_timeout_s: float = field(
        default=600.0,
        metadata=option("Longest wait in a collective while saving or loading.", unit="s", above=0),
    )
    evaluation_timeout_s: float = field(
        default=600.0,
        metadata=option("Longest wait in a collective while evaluating.", unit="s", above=0),
    )
    save_grace_s: float = field(
        default=60.0,
        metadata=option(
            "After SIGTERM or SIGUSR1: how long a process has, at least, to come to the end of a step and to save. "
            "Where that was measured to take longer, it has twice as long as measured.",
            unit="s",
            above=0,
        ),
    )
