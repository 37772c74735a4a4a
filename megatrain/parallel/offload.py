"""Offload the activations that a chunk's first blocks save for backward to the host, while other blocks compute.

The copy of a block's activations to the host starts when the block's forward has been launched. It ends before any
work that is launched after the next block's forward. The copy back starts when the backward of the next block begins.
So the device holds the activations of at most two offloaded blocks, besides those of the blocks that are not offloaded.
Whole storages are copied, byte by byte. Views of one storage are copied once and come back with their strides, so every
kernel reads the same bytes as without offloading.
Source: vDNN (arXiv:1602.08124), for the idea of swapping by layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.ops.normalization import ResidualStream


class OffloadCopies(Protocol):
    """Copies between a device and the host, overlapped with the device's work. Shapes: all tensors are flat bytes."""

    def start_copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start to copy `sources` to the host. Return the copies, and a handle for finish().

        Work that is already launched may still write the sources; the copies wait for it.
        """

    def start_copy_to_device(self, copies: Sequence[Tensor], copied: Any) -> tuple[list[Tensor], Any]:
        """Start to copy `copies` back to the device. Return the results, and a handle for finish().

        copied: the handle that start_copy_to_host() returned.
        """

    def finish(self, pending: Any) -> None:
        """Make all work that is launched from now on wait until the copies are done."""

    def abandon(self, sources: Sequence[Tensor]) -> None:
        """Keep the memory of `sources` from being reused before a copy that is no longer needed has ended."""


class CudaCopies:
    """Copies through pinned memory, on a separate stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def start_copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            copies = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            return copies, self._to_host.record_event()

    def start_copy_to_device(
        self, copies: Sequence[Tensor], copied: torch.cuda.Event
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        # allocated on the stream that uses and frees them; its earlier work may still use the memory, so the copy waits
        results = [torch.empty(copy.shape, dtype=copy.dtype, device=self._device) for copy in copies]
        self._to_device.wait_event(copied)
        self._to_device.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_device):
            for result, copy in zip(results, copies, strict=True):
                result.copy_(copy, non_blocking=True)
            return results, self._to_device.record_event()

    def finish(self, pending: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(pending)

    def abandon(self, sources: Sequence[Tensor]) -> None:
        for source in sources:
            source.record_stream(self._to_host)


class ImmediateCopies:
    """Copies for a device without streams: each call copies at once. If the device is the CPU, they save no memory."""

    def start_copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        return [source.clone() for source in sources], None

    def start_copy_to_device(self, copies: Sequence[Tensor], copied: None) -> tuple[list[Tensor], None]:
        return [copy.clone() for copy in copies], None

    def finish(self, pending: None) -> None:
        """Do nothing: the copies are already made."""

    def abandon(self, sources: Sequence[Tensor]) -> None:
        """Do nothing: the copies are already made."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _OffloadedStorage:
    """One storage, as bytes: on the device, on the host, or being copied. It lives as long as autograd refers to it."""

    block: _BlockActivations
    on_device: Tensor | None
    on_host: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor whose storage is offloaded."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BlockActivations:
    """The activations that one block saved in one forward."""

    def __init__(self, copies: OffloadCopies) -> None:
        self._copies = copies
        self._collected: dict[torch.UntypedStorage, _OffloadedStorage] = {}
        self._offloaded: list[weakref.ref[_OffloadedStorage]] = []
        self._sources: list[Tensor] = []
        self._pending: Any = None
        self._is_coming_back = False

    def collect(self, storage: torch.UntypedStorage) -> _OffloadedStorage:
        """Return the offloaded form of `storage`, which all tensors in this storage share."""
        offloaded = self._collected.get(storage)
        if offloaded is None:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            offloaded = self._collected[storage] = _OffloadedStorage(self, flat)
        return offloaded

    def start_copy_to_host(self) -> None:
        """Start to copy the collected storages to the host."""
        storages = [
            (storage, storage.on_device) for storage in self._collected.values() if storage.on_device is not None
        ]
        self._collected = {}
        self._offloaded = [weakref.ref(storage) for storage, _ in storages]
        self._sources = [source for _, source in storages]
        copies, self._pending = self._copies.start_copy_to_host(self._sources)
        for (storage, _), copy in zip(storages, copies, strict=True):
            storage.on_host = copy

    def free_device_memory(self) -> None:
        """Free the device memory of the storages that were copied; work that is launched from now on may reuse it."""
        if self._sources:
            self._copies.finish(self._pending)
            self._sources = []
            for storage in self._referenced():
                storage.on_device = None

    def start_copy_to_device(self) -> None:
        """Start to copy the storages back to the device, unless that was started or no device memory was freed."""
        on_host = [
            (storage, storage.on_host)
            for storage in self._referenced()
            if storage.on_device is None and storage.on_host is not None
        ]
        if self._sources:
            self._copies.abandon(self._sources)
        self._offloaded, self._sources = [], []
        if on_host:
            results, self._pending = self._copies.start_copy_to_device([copy for _, copy in on_host], self._pending)
            self._is_coming_back = True
            for (storage, _), result in zip(on_host, results, strict=True):
                storage.on_device, storage.on_host = result, None

    def wait_until_back(self) -> None:
        """Make all storages available on the device to the work that is launched from now on."""
        self.start_copy_to_device()
        if self._is_coming_back:
            self._copies.finish(self._pending)
            self._is_coming_back = False

    def _referenced(self) -> Iterator[_OffloadedStorage]:
        """Yield the offloaded storages that an autograd graph still refers to."""
        yield from (storage for reference in self._offloaded if (storage := reference()) is not None)


class Offloader:
    """Offloads the activations of a chunk's first blocks, as the keeper of the chunk's SelectiveRecompute."""

    def __init__(self, copies: OffloadCopies, smallest_numel: int) -> None:
        """smallest_numel: tensors with fewer elements stay on the device."""
        self._copies = copies
        self._smallest_numel = smallest_numel
        self._kept_on_device: frozenset[torch.UntypedStorage] = frozenset()
        self._collecting: _BlockActivations | None = None
        self._last: _BlockActivations | None = None

    def attach(self, chunk: nn.Module, blocks: Sequence[nn.Module], num_offloaded: int) -> None:
        """Make the first `num_offloaded` of `blocks` offload. The chunk's parameters stay on the device.

        Copying them would free no memory, because parameters stay allocated there.
        """
        self._kept_on_device = frozenset(parameter.untyped_storage() for parameter in chunk.parameters())
        for number, block in enumerate(blocks[: num_offloaded + 1]):
            self._wrap(block, is_first=number == 0, is_offloaded=number < num_offloaded)

    def keep(self, x: Tensor) -> Any:
        """Return what to hold in place of the saved tensor x."""
        is_small = x.numel() < self._smallest_numel or not x.is_floating_point()
        if self._collecting is None or is_small or x.untyped_storage() in self._kept_on_device:
            return x.detach()
        offloaded = self._collecting.collect(x.untyped_storage())
        return _View(offloaded, x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def load(self, kept: Any) -> Tensor:
        """Return the saved tensor on its device."""
        if isinstance(kept, Tensor):
            return kept
        kept.storage.block.wait_until_back()
        flat = kept.storage.on_device
        whole = torch.empty(0, dtype=kept.dtype, device=flat.device)
        return whole.set_(flat.untyped_storage(), kept.offset, kept.size, kept.stride)

    def _wrap(self, block: nn.Module, *, is_first: bool, is_offloaded: bool) -> None:
        forward = block.forward

        def run(*arguments: Any) -> ResidualStream:
            if not torch.is_grad_enabled():
                return forward(*arguments)
            activations = _BlockActivations(self._copies) if is_offloaded else None
            self._collecting = activations
            try:
                out = forward(*arguments)
            finally:
                self._collecting = None
            last, self._last = self._last, activations
            if last is not None:  # of the previous block, or of the previous micro-batch
                last.free_device_memory()
                if not is_first:
                    _copy_back_before_backward(last, out)
            if activations is not None:
                activations.start_copy_to_host()
            return out

        block.forward = run


def _copy_back_before_backward(activations: _BlockActivations, out: ResidualStream) -> None:
    """Copy `activations` back when the backward of the block that returned `out` begins."""
    newest = out.x_SBH if out.added_SBH is None else out.added_SBH
    newest.register_hook(lambda _: activations.start_copy_to_device())
