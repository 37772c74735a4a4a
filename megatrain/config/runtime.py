"""Section [runtime]: the device, the CPU, the network and how long to wait for peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import LARGEST_INTEGER, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The device, the CPU, the network and how long to wait for peers."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where to compute. auto: CUDA if there is a GPU, else the CPU."
    )
    threads: int = option(0, "Threads of torch in each process. 0: torch's default.", minimum=0, maximum=65536)
    cpu_binding: Literal["none", "core", "numa"] = option(
        "none", "What each process is bound to: nothing, its own share of the cores, or a NUMA node."
    )
    network_interface: str = option(
        "", "Network interface for traffic between hosts, such as eth0. Empty: the backend chooses."
    )
    ranks_per_store: int = option(
        2048,
        "Largest number of ranks that use one store while process groups are created. Up to this many ranks use "
        "the job's store; in larger worlds some ranks serve one store each.",
        minimum=1,
        maximum=LARGEST_INTEGER,
    )
    init_timeout_s: float = option(
        300.0, "Longest wait for all ranks to connect and create their groups.", unit="s", above=0
    )
    first_step_timeout_s: float = option(
        600.0, "Longest wait in a collective of the first step, which compiles and allocates.", unit="s", above=0
    )
    step_timeout_s: float = option(120.0, "Longest wait in a collective of any later step.", unit="s", above=0)
    checkpoint_timeout_s: float = option(
        600.0,
        "Longest wait in a collective while saving or loading. A writer waits half as long for the files of other "
        "hosts, and then gives up the checkpoint.",
        unit="s",
        above=0,
    )
    evaluation_timeout_s: float = option(600.0, "Longest wait in a collective while evaluating.", unit="s", above=0)
    save_grace_s: float = option(
        60.0,
        "Minimum time that a process has after a stop signal, such as SIGTERM, to reach the end of a step and to "
        "save. If the measured time of this is more than two thirds of the minimum, the process has twice the "
        "measured time.",
        unit="s",
        above=0,
    )
