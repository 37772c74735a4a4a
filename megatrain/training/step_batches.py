"""Opens the batches of a run, which a thread of this rank or the data loader of its host reads ahead."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatrain.checkpoint.job import JobCheckpoints
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.data.loader.host_loader import HostLoader, RingLocation
from megatrain.data.loader.plan import LoaderPlan, loader_plan
from megatrain.data.loader.ring import store_order_problem
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.prefetch import Prefetcher
from megatrain.data.readahead import readahead
from megatrain.data.reader import BatchReader
from megatrain.formatting import bytes_text, count_text
from megatrain.run_files.run_directory import RunDirectory


def open_batches(
    config: Config,
    mesh: Mesh,
    reader: BatchReader,
    steps: StepSequence,
    checkpoints: JobCheckpoints,
    print_line: Callable[[str], None],
) -> Prefetcher | HostLoader:
    """Open this rank's batches, by the loader that data.loader selects. Must be called after `JobCheckpoints.restore`.

    print_line: prints a line to the log of the run.
    Communication: two agreements of all ranks if data.loader is "host".
    Raises: ConfigError, on every rank, when the memory of a host cannot hold the ring of its loader, or when its
    processor does not order stores.
    """
    if config.data.loader == "thread":
        replica, _ = mesh.layout.sample_share(mesh.rank)
        ahead = readahead(reader, steps, replica, config.data.readahead_blocks)
        encodes = mesh.stage == 0
        return Prefetcher(
            lambda plan: reader.read_step(plan, replica, has_patches=encodes),
            steps.plans(),
            config.data.prefetch,
            ahead,
        )
    attachment = checkpoints.attachment
    ranks = attachment.ranks_of_host(mesh.rank)
    plan = loader_plan(reader, checkpoints.stream, steps, mesh.layout, ranks, config.data)
    log = RunDirectory(Path(config.job.resolved_run_directory)).logs / "data-loader.log"
    place = RingLocation(attachment.arena, checkpoints.round, log.absolute())
    is_first = mesh.rank == ranks[0]
    problem = _create(place, plan) if is_first else None
    found = mesh.cpu_groups.agree(mesh.rank, problem)
    if found is not None:
        if is_first:
            with suppress(CheckpointError):  # the problem of the ring is reported, not this error
                place.remove()
        raise ConfigError([found])
    print_line(_note(plan, place))
    batches = HostLoader(place, plan, ranks.index(mesh.rank), reader.source_names)
    mesh.cpu_groups.all_agree(True)
    # all ranks have opened the ring, so its file can be removed: its memory is freed when the ranks end
    if is_first:
        place.remove_ring()
    return batches


def _create(place: RingLocation, plan: LoaderPlan) -> str | None:
    """Create the ring of this host. Returns why it cannot be used."""
    problem = store_order_problem(platform.machine())
    if problem:
        return problem
    try:
        place.create(plan)
    except CheckpointError as error:
        return str(error)
    return None


def _note(plan: LoaderPlan, place: RingLocation) -> str:
    """Return what the data loader of this host reads, as a line for the log."""
    return (
        f'data.loader="host": one process reads for the {count_text(plan.num_readers, "rank")} of this host '
        f"({count_text(len(plan.shares), 'replica')}), into {bytes_text(RingLayout.of(plan).num_bytes)} of "
        f"{place.arena.root}"
    )
