"""The producers of pictures that a host uses in a round: its first rank starts them, or reads where they run.

The other processes of the host find them by a file in the arena (data/pictures/producer_file.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatrain.checkpoint.job import JobCheckpoints
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.contracts.errors import DataError, MegatrainError
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producer_file import ProducersFile
from megatrain.data.pictures.producers import PictureProducers, local_producers, producer_command
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.programs.thread_limits import thread_error
from megatrain.run_files.run_directory import RunDirectory
from megatrain.training.picture_data import named_producers

_logger = logging.getLogger(__name__)


def open_producers(
    config: Config, mesh: Mesh, all_shards: Sequence[ShardSamples], checkpoints: JobCheckpoints, closing: ExitStack
) -> Path:
    """Start the producers of this host, or use those at pictures.addresses, until `closing` closes.

    Returns the file in the arena that names them. all_shards: the pictures of the training data and of held-out data.
    Communication: an agreement of all ranks.
    Raises: DataError, on every rank, when a host cannot start producers, or lacks a shard or the secret.
    """
    attachment = checkpoints.attachment
    path = attachment.arena.loader_producers(checkpoints.round)
    problem = None
    if mesh.rank == attachment.ranks_of_host(mesh.rank)[0]:
        # hosts may share the run directory, and a supervisor reads the end of its log
        logs = RunDirectory(Path(config.job.resolved_run_directory)).logs / f"pictures-{mesh.rank:05d}"
        try:
            # a round that was killed has left its files
            attachment.arena.remove_loader_files(checkpoints.round - 1)
            closing.enter_context(_named(config, all_shards, path, logs))
        except (MegatrainError, OSError) as error:
            problem = str(error)
    found = mesh.cpu_groups.agree(mesh.rank, problem)
    if found is not None:
        raise DataError(found)
    return path


@contextmanager
def _named(config: Config, all_shards: Sequence[ShardSamples], path: Path, logs: Path) -> Iterator[None]:
    """Run producers, and name them in a file, during the block."""
    pictures = config.pictures
    with ExitStack() as ending:
        file = ProducersFile(path)

        def report(text: str) -> None:
            _logger.warning(text)
            file.update()

        if pictures.peers:
            producers, local = named_producers(config), None
        else:
            for shards in all_shards:
                shards.index.check_shards()
            directories = [shards.index.directory.absolute() for shards in all_shards]
            command = producer_command(directories, pictures.decoder, pictures.threads)
            local = ending.enter_context(local_producers(command, pictures.producers, logs.absolute(), report))
            producers = Producers(local.addresses, local.secret, local.problem, local.failure)
        # the file is removed before the producers end, so that no process of the host reports their end
        ending.callback(file.close)
        file.name(producers)
        if local is not None:
            announcing = threading.Thread(target=_announce_end, args=(local, file), daemon=True)
            try:
                announcing.start()
            except RuntimeError as error:
                subject = "the thread that waits for the end of the producers of pictures"
                raise thread_error(subject, error, "use fewer of them (pictures.producers)") from error
        yield


def _announce_end(local: PictureProducers, file: ProducersFile) -> None:
    """Write why no producer can answer, once no producer is started again, so that processes stop waiting for one."""
    local.wait()
    file.update()
