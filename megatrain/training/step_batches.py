"""Opens the batches of a run, which a thread of this rank or the data loader of its host reads ahead."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from megatrain.checkpoint.job import JobCheckpoints
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.errors import CheckpointError, ConfigError, DataError
from megatrain.data.loader.host_loader import HostLoader, RingLocation
from megatrain.data.loader.plan import LoaderPlan, loader_plan
from megatrain.data.loader.planned_pictures import HostProducers
from megatrain.data.loader.ring import store_order_problem
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producer_file import read_producers
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.prefetch import Prefetcher
from megatrain.data.readahead import readahead
from megatrain.data.reader import BatchReader
from megatrain.formatting import bytes_text, count_text
from megatrain.run_files.run_directory import RunDirectory
from megatrain.training.picture_data import shards_of
from megatrain.training.picture_producers import open_producers


def open_batches(
    config: Config,
    mesh: Mesh,
    reader: BatchReader,
    steps: StepSequence,
    checkpoints: JobCheckpoints,
    print_line: Callable[[str], None],
    closing: ExitStack,
    held_out: Sequence[ShardSamples] = (),
) -> Prefetcher | HostLoader:
    """Open this rank's batches, by the loader that data.loader selects. Must be called after `JobCheckpoints.restore`.

    print_line: prints a line to the log of the run. closing: closes the batches. held_out: held-out pictures from
    shards, which this rank requests from the same producers until `closing` closes.
    Communication: two agreements of all ranks if data.loader is "host", and one more if pictures come from
    shards.
    Raises: ConfigError, on every rank, when a host cannot create the ring of its loader (too little memory), or when
    its processor does not order stores; DataError, on every rank, as `open_producers`; CheckpointError and DataError,
    on this rank, as HostLoader.
    """
    if config.data.loader == "host":
        loader = _open_loader(config, mesh, reader, steps, checkpoints, print_line, closing, held_out)
        return closing.enter_context(loader)
    shards, asking = shards_of(reader), None
    if shards is not None:
        print_line(_picture_note(config, shards))
        asking = shards.connect(_opened_producers(config, mesh, [shards, *held_out], checkpoints, closing))
    replica, _ = mesh.layout.sample_share(mesh.rank)
    ahead = readahead(reader, steps, replica, config.data.readahead_blocks)
    encodes = mesh.stage == 0
    batches = Prefetcher(
        lambda plan: reader.read_step(plan, replica, has_patches=encodes),
        steps.plans(),
        config.data.prefetch,
        ahead,
    )
    closing.enter_context(batches)
    if asking is not None:
        # closes before the batches do, so that the thread that reads ahead does not wait for pictures
        closing.callback(asking.close)
    return batches


def _open_loader(
    config: Config,
    mesh: Mesh,
    reader: BatchReader,
    steps: StepSequence,
    checkpoints: JobCheckpoints,
    print_line: Callable[[str], None],
    closing: ExitStack,
    held_out: Sequence[ShardSamples],
) -> HostLoader:
    """Open this rank's batches by the data loader of its host. See `open_batches`."""
    attachment = checkpoints.attachment
    ranks, shards = attachment.ranks_of_host(mesh.rank), shards_of(reader)
    producers = None
    if shards is not None:
        file = attachment.arena.loader_producers(checkpoints.round)
        producers = HostProducers(str(file), config.pictures.num_producers)
    plan = loader_plan(reader, checkpoints.stream, steps, mesh.layout, ranks, config.data, producers)
    log = RunDirectory(Path(config.job.resolved_run_directory)).logs / "data-loader.log"
    place = RingLocation(attachment.arena, checkpoints.round, log.absolute())
    is_first = mesh.rank == ranks[0]
    problem = _create(place, plan) if is_first else None
    found = mesh.cpu_groups.agree(mesh.rank, problem)
    if found is not None:
        _remove(place, is_first=is_first)
        raise ConfigError([found])
    print_line(_note(plan, place))
    if shards is not None:
        print_line(_picture_note(config, shards))
        try:
            _opened_producers(config, mesh, [shards, *held_out], checkpoints, closing)
        except DataError:
            _remove(place, is_first=is_first)
            raise
    batches = HostLoader(place, plan, ranks.index(mesh.rank), reader.source_names)
    mesh.cpu_groups.all_agree(True)
    # all ranks have opened the ring, so its file can be removed: its memory is freed when the ranks end
    if is_first:
        place.remove_ring()
    return batches


def _opened_producers(
    config: Config, mesh: Mesh, all_shards: Sequence[ShardSamples], checkpoints: JobCheckpoints, closing: ExitStack
) -> Producers:
    """Open the producers of this host, and connect the held-out pictures of this rank to them.

    all_shards: the pictures of the training data, then held-out pictures.
    """
    producers = read_producers(open_producers(config, mesh, all_shards, checkpoints, closing))
    for shards in all_shards[1:]:
        closing.enter_context(shards.connect(producers))
    return producers


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


def _remove(place: RingLocation, *, is_first: bool) -> None:
    """Remove the ring of a start that fails on all ranks."""
    if is_first:
        with suppress(CheckpointError):  # why the start fails is reported, not this error
            place.remove()


def _note(plan: LoaderPlan, place: RingLocation) -> str:
    """Return what the data loader of this host reads, as a line for the log."""
    return (
        f'data.loader="host": one process reads for the {count_text(plan.num_readers, "rank")} of this host '
        f"({count_text(len(plan.shares), 'replica')}), into {bytes_text(RingLayout.of(plan).num_bytes)} of "
        f"{place.arena.root}"
    )


def _picture_note(config: Config, shards: ShardSamples) -> str:
    """Return who makes the pictures of the run, as a line for the log."""
    pictures = config.pictures
    started = f"{count_text(pictures.producers, 'producer')} on each host"
    by = f"producers at {pictures.addresses}" if pictures.peers else started
    return f"pictures.shards: {shards.index.num_samples:,} pictures, made by {by}: {shards.made_by}"
