"""The peers of the overlap benchmark: the same model under torch's DistributedDataParallel and FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.model import Transformer
from megatrain.parallel.pipeline import PipelineInput


def join_world(init_method: str, rank: int, world_size: int) -> None:
    """Create torch's own group of all ranks, which the peers use."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)


def _fully_sharded(model: Transformer, config: Config, devices: DeviceMesh) -> torch.nn.Module:
    """Return the model in as many groups as megatrain has chunks. Each is gathered during the one before it."""
    firsts = []
    for chunk in range(config.parallel.num_chunks):
        blocks = [model.blocks[str(layer)] for layer in config.layers_of(0, chunk)]
        if not blocks:
            continue  # a chunk with only embedding or head, which are in the group of the whole model
        fully_shard(blocks, mesh=devices, reshard_after_forward=False)
        firsts.append(cast(FSDPModule, blocks[0]))
    whole = fully_shard(model, mesh=devices, reshard_after_forward=False)
    whole._set_unshard_async_op(True)
    for first, following in pairwise([whole, *firsts]):
        first.set_modules_to_forward_prefetch([following])
    return cast(torch.nn.Module, whole)


class PeerSide:
    """The same model under torch's own data parallelism, with torch's AdamW."""

    def __init__(self, kind: str, config: Config, inputs: list[PipelineInput], mesh: Mesh) -> None:
        """kind: "DDP", or "FSDP2" with parameters that stay gathered between forward and backward."""
        self._mesh, self._inputs = mesh, inputs
        model = Transformer(config.model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        if kind == "DDP":
            # megatrain's bucket size: torch's default is larger than this model, so DDP would overlap nothing
            bucket_mb = config.bucket_size(mesh.layout) * 4 / 2**20
            self._model: torch.nn.Module = DistributedDataParallel(
                model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
            )
        else:
            self._model = _fully_sharded(model, config, init_device_mesh("cpu", (mesh.replicas.size,)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def block(self, numbers: Sequence[int], mark: Callable[[], None]) -> float:
        """Train these steps. Returns the mean seconds of all except the first; marks enclose the counted steps."""
        self._mesh.barrier()
        self._step()
        mark()
        started = time.perf_counter()
        for _ in numbers[1:]:
            self._step()
        seconds = time.perf_counter() - started
        mark()
        return seconds / (len(numbers) - 1)

    def _step(self) -> None:
        num_labels = sum(one.labels_SB.numel() for one in self._inputs)
        for one in self._inputs:
            loss = self._model(one.tokens_SB, one.context, one.labels_SB)
            (loss / num_labels).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
