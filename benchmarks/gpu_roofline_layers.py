"""The kernels of one layer and of a whole micro-batch: the planner's own chunk runs on the meta device.

A layer is the difference of two models, one of which has one layer more, so that everything that a model does once
cancels out. The peer is the model in plain torch of the GPU benchmark, with fake tensors: nothing is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_roofline_trace import Kernel, Kernels, KernelTrace
from benchmarks.gpu_step import PlainLlama
from megatrain.chunks.builder import build_chunks
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.planning.chunks import planned_kind, planned_mesh, planned_micro_batch
from megatrain.planning.footprint import HostCopies, parameter_tensors


@dataclass(frozen=True, slots=True)
class MicroBatchKernels:
    """The kernels of forward and backward, of a layer or of a model."""

    forward: Kernels
    backward: Kernels

    def without(self, other: MicroBatchKernels) -> MicroBatchKernels:
        """Return the kernels that `other` does not have.

        Raises: ValueError when `other` has kernels that this one lacks.
        """
        return MicroBatchKernels(_difference(self.forward, other.forward), _difference(self.backward, other.backward))

    def times(self, number: int) -> MicroBatchKernels:
        """Return the kernels of `number` of these."""
        return MicroBatchKernels(*(_times(kernels, number) for kernels in (self.forward, self.backward)))

    def plus(self, other: MicroBatchKernels) -> MicroBatchKernels:
        """Return the kernels of both."""
        return MicroBatchKernels(self.forward + other.forward, self.backward + other.backward)

    @property
    def kernels(self) -> Kernels:
        return self.forward + self.backward


def our_micro_batch(config: Config, num_layers: int) -> MicroBatchKernels:
    """Return the kernels of a micro-batch of rank 0, for the model with `num_layers` layers on one pipeline stage.

    With ZeRO-1 and several micro-batches it is one after the first, which adds its gradients to those of the first.
    """
    tables = config.to_dict()
    tables["model"] |= {"num_layers": num_layers}
    config = Config.from_dict(tables)
    if config.parallel.pp_size > 1 or config.parallel.num_chunks > 1:
        raise ValueError("only a model on one stage in one chunk is traced; set parallel.pp_size=1 and num_chunks=1")
    layout = config.layout(None)
    with planned_mesh(config, layout, 0) as mesh:
        mesh.recorder.set_step(0)
        (chunk,) = build_chunks(config, mesh, torch.device("meta"), HostCopies(), planned_kind(config))
        parameter_tensors(chunk)  # allocates the gradients
        chunk.meta.module.train()
        micro = planned_micro_batch(config, mesh.tp)
        mesh.recorder.complete_step()
        with KernelTrace() as forward:
            _, run_backward = chunk.pipeline_chunk.forward(micro.tokens_SB, micro.context, micro.labels_SB)
        forward.kernels.update(_exchanges(mesh))
        if config.parallel.zero_stage == 1 and config.num_microbatches(layout) > 1:
            buckets = chunk.data_parallel.buckets
            chunk.data_parallel.set_written_gradients(tuple((True,) * len(bucket.parameters) for bucket in buckets))
        gradient = torch.zeros((), device="meta")
        with KernelTrace() as backward:
            run_backward(gradient)
        backward.kernels.update(_exchanges(mesh))
    return MicroBatchKernels(forward.kernels, backward.kernels)


def plain_micro_batch(model: Mapping[str, Any], num_layers: int) -> MicroBatchKernels:
    """Return the kernels of a later micro-batch of the model in plain torch, under autocast, without a compiler."""
    with FakeTensorMode():
        net = PlainLlama({**model, "num_layers": num_layers})
        tokens_1S = torch.zeros((1, model["seq_len"]), dtype=torch.int64)
        for _ in range(2):
            # fake tensors are those of a CPU, because fake CUDA tensors that need gradients abort torch without CUDA
            with KernelTrace() as forward, torch.autocast("cpu", torch.bfloat16):
                loss = net(tokens_1S, tokens_1S)
            with KernelTrace() as backward:
                loss.backward()
    return MicroBatchKernels(forward.kernels, backward.kernels)


def layer(micro_batch: Callable[[int], MicroBatchKernels]) -> MicroBatchKernels:
    """Return the kernels of one layer. micro_batch: returns those of a model with a number of layers."""
    return micro_batch(3).without(micro_batch(2))


def _exchanges(mesh: Mesh) -> Kernels:
    """Return the exchanges over the tensor-parallel group since the last call, with the bytes that a rank sends."""
    found: Kernels = Counter()
    totals, others = mesh.recorder.complete_step().totals, mesh.tp.size - 1
    for operation in (Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER):
        if operation not in totals:
            continue
        one, rest = divmod(totals[operation].num_bytes, totals[operation].count)
        if rest:
            raise ValueError(f"exchanges of {operation.value} have unequal sizes; their kernels would not be equal")
        # a record has the bytes of this rank's input: its shard of a gather, the whole of a reduce-scatter
        sent = others * one if operation is Operation.TP_ALL_GATHER else others * one // mesh.tp.size
        found[Kernel(operation.value, 1, sent, unit="NVLink")] = totals[operation].count
    return found


def _difference(more: Kernels, fewer: Kernels) -> Kernels:
    if missing := fewer - more:
        raise ValueError(f"the larger model lacks {', '.join(kernel.name for kernel in missing)}")
    return more - fewer


def _times(kernels: Kernels, number: int) -> Kernels:
    return Counter({kernel: number * count for kernel, count in kernels.items()})
