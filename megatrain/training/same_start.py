"""Checks that all workers were started with one configuration, the same costs for each source, and the same pictures.

Communication: each check reads a value of rank 0 from the store of the rendezvous.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from megatrain.comm.rendezvous import Rendezvous, value_of_rank_0
from megatrain.config.config import Config
from megatrain.config.serialize import config_values
from megatrain.contracts.errors import ConfigError, DataError
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.training_source import TrainingSource


def check_same_config(config: Config, rendezvous: Rendezvous) -> None:
    """Raise ConfigError naming host and keys if this rank was started with another configuration than rank 0.

    `megatrain launch` makes this check before it starts workers; torchrun does not.
    """
    own = config_values(config)
    first = json.loads(value_of_rank_0(rendezvous, "config", json.dumps(own)))
    if first == own:
        return
    problems = [
        f"{key}: {_rank_text(rendezvous)} has {own.get(key, 'no such key')}, and rank 0 has "
        f"{first.get(key, 'no such key')}; start all workers with one configuration"
        for key in sorted(own.keys() | first.keys())
        if own.get(key) != first.get(key)
    ]
    raise ConfigError(problems)


def check_same_costs(sources: Sequence[TrainingSource | None], rendezvous: Rendezvous) -> None:
    """Raise DataError naming host and file if the costs of a source differ from those of rank 0.

    With different costs, the ranks would not agree on which of them computes a sample.
    """
    costs = [source.costs for source in sources if source is not None and source.costs is not None]
    if not costs:
        return
    first = json.loads(value_of_rank_0(rendezvous, "costs", json.dumps([one.digest for one in costs])))
    for one, expected in zip(costs, first, strict=True):
        if one.digest != expected:
            raise DataError(
                f"{one.path}: {_rank_text(rendezvous)} has costs with digest {one.digest}, and rank 0 has {expected}; "
                "copy one file to all hosts"
            )


def check_same_pictures(all_shards: Sequence[ShardSamples], rendezvous: Rendezvous) -> None:
    """Raise DataError naming host and index if this rank has other pictures than rank 0, or another decoder.

    all_shards: of the training data and of held-out data.
    """
    if not all_shards:
        return
    own = [(shards.index.digest, shards.made_by) for shards in all_shards]
    first = json.loads(value_of_rank_0(rendezvous, "pictures", json.dumps(own)))
    for shards, own_pair, first_pair in zip(all_shards, own, first, strict=True):
        for what, found, expected in zip(("the digest", "pictures made by"), own_pair, first_pair, strict=True):
            if found != expected:
                raise DataError(
                    f"{shards.index.path}: {_rank_text(rendezvous)} has {what} {found}, and rank 0 has {expected}; use "
                    "one index and one version of the decoder on all hosts"
                )


def _rank_text(rendezvous: Rendezvous) -> str:
    process = rendezvous.process
    return f"rank {process.rank} on {process.host or socket.gethostname()}"
