"""Keep what the first blocks of a chunk save for backward in host memory, and copy it while other blocks compute.

What a block saved starts to leave when its forward has been launched, and has left when the next block's has; it
starts to come back when the backward of the next block begins. So at most two blocks' activations are on the device
beside those of the blocks that are not offloaded. Whole storages travel, byte by byte: views that share one are copied
once and come back with their strides, and every kernel sees what it would have seen.
Source: ours; the idea of swapping by layer from vDNN (arXiv:1602.08124).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.ops.residual import ResidualStream


class Copies(Protocol):
    """Copies between a device and the host that run beside the device's work. Shapes: all tensors are flat bytes."""

    def start_leaving(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Return the copies on the host, and what finish() waits for; what was launched so far writes the sources."""

    def start_coming_back(self, copies: Sequence[Tensor], left: Any) -> tuple[list[Tensor], Any]:
        """Return copies on the device of what start_leaving() made, and what finish() waits for."""

    def finish(self, pending: Any) -> None:
        """Let what is launched from now on wait until the copies are made."""

    def abandon(self, sources: Sequence[Tensor]) -> None:
        """Keep memory that is part of an abandoned copy from being reused before that copy is over."""


class CudaCopies:
    """Copies on streams of their own, one a direction, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._coming_back = torch.cuda.Stream(device)

    def start_leaving(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        self._leaving.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._leaving):
            copies = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            return copies, self._leaving.record_event()

    def start_coming_back(
        self, copies: Sequence[Tensor], left: torch.cuda.Event
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        # made on the stream that will use and free them; its earlier work may still use their memory
        results = [torch.empty(copy.shape, dtype=copy.dtype, device=self._device) for copy in copies]
        self._coming_back.wait_event(left)
        self._coming_back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._coming_back):
            for result, copy in zip(results, copies, strict=True):
                result.copy_(copy, non_blocking=True)
            return results, self._coming_back.record_event()

    def finish(self, pending: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(pending)

    def abandon(self, sources: Sequence[Tensor]) -> None:
        for source in sources:
            source.record_stream(self._leaving)


class ImmediateCopies:
    """Copies of a device without streams: made at once. Where it is the processor they save nothing."""

    def start_leaving(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        return [source.clone() for source in sources], None

    def start_coming_back(self, copies: Sequence[Tensor], left: None) -> tuple[list[Tensor], None]:
        return [copy.clone() for copy in copies], None

    def finish(self, pending: None) -> None:
        """Nothing is under way."""

    def abandon(self, sources: Sequence[Tensor]) -> None:
        """As finish()."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Traveller:
    """One storage, as bytes: on the device, on the host, or on its way. It lives as long as autograd wants it."""

    block: _BlockActivations
    on_device: Tensor | None
    on_host: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor whose storage travels."""

    traveller: _Traveller
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BlockActivations:
    """What one block saved in one forward."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._collected: dict[torch.UntypedStorage, _Traveller] = {}
        self._away: list[weakref.ref[_Traveller]] = []
        self._sources: list[Tensor] = []
        self._pending: Any = None
        self._is_arriving = False

    def collect(self, storage: torch.UntypedStorage) -> _Traveller:
        """Return the traveller of `storage`: the same for all tensors that live in it."""
        traveller = self._collected.get(storage)
        if traveller is None:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            traveller = self._collected[storage] = _Traveller(self, flat)
        return traveller

    def leave(self) -> None:
        """Start copying to the host what was collected."""
        travellers = [(one, one.on_device) for one in self._collected.values() if one.on_device is not None]
        self._collected = {}
        self._away = [weakref.ref(one) for one, _ in travellers]
        self._sources = [source for _, source in travellers]
        copies, self._pending = self._copies.start_leaving(self._sources)
        for (one, _), copy in zip(travellers, copies, strict=True):
            one.on_host = copy

    def let_go(self) -> None:
        """Give back the device's memory of what left; what is launched from now on may use it."""
        if self._sources:
            self._copies.finish(self._pending)
            self._sources = []
            for one in self._wanted():
                one.on_device = None

    def come_back(self) -> None:
        """Start copying to the device, unless it was started or nothing was let go."""
        away = [(one, one.on_host) for one in self._wanted() if one.on_device is None and one.on_host is not None]
        if self._sources:
            self._copies.abandon(self._sources)
        self._away, self._sources = [], []
        if away:
            results, self._pending = self._copies.start_coming_back([copy for _, copy in away], self._pending)
            self._is_arriving = True
            for (one, _), result in zip(away, results, strict=True):
                one.on_device, one.on_host = result, None

    def arrive(self) -> None:
        """Let what is launched from now on find all of it on the device."""
        self.come_back()
        if self._is_arriving:
            self._copies.finish(self._pending)
            self._is_arriving = False

    def _wanted(self) -> Iterator[_Traveller]:
        """Yield those that a graph still refers to."""
        yield from (one for reference in self._away if (one := reference()) is not None)


class Offloader:
    """Takes what the first blocks of one chunk save, and gives it back: the keeper of the chunk's Rematerializer."""

    def __init__(self, copies: Copies, smallest_numel: int) -> None:
        """smallest_numel: tensors with fewer elements stay where they are."""
        self._copies = copies
        self._smallest_numel = smallest_numel
        self._staying: frozenset[torch.UntypedStorage] = frozenset()
        self._open: _BlockActivations | None = None
        self._last: _BlockActivations | None = None

    def attach(self, chunk: nn.Module, blocks: Sequence[nn.Module], num_offloaded: int) -> None:
        """Let the first `num_offloaded` of `blocks` offload. Parameters of the chunk stay; they have their memory."""
        self._staying = frozenset(one.untyped_storage() for one in chunk.parameters())
        for number, block in enumerate(blocks[: num_offloaded + 1]):
            self._wrap(block, is_first=number == 0, is_offloaded=number < num_offloaded)

    def keep(self, x: Tensor) -> Any:
        """Return what to hold in place of the saved tensor x."""
        is_light = x.numel() < self._smallest_numel or not x.is_floating_point()
        if self._open is None or is_light or x.untyped_storage() in self._staying:
            return x.detach()
        traveller = self._open.collect(x.untyped_storage())
        return _View(traveller, x.dtype, x.size(), x.stride(), x.storage_offset())

    def load(self, kept: Any) -> Tensor:
        """Return the saved tensor, on its device."""
        if isinstance(kept, Tensor):
            return kept
        kept.traveller.block.arrive()
        flat = kept.traveller.on_device
        whole = torch.empty(0, dtype=kept.dtype, device=flat.device)
        return whole.set_(flat.untyped_storage(), kept.offset, kept.size, kept.stride)

    def _wrap(self, block: nn.Module, *, is_first: bool, is_offloaded: bool) -> None:
        forward = block.forward

        def run(*arguments: Any) -> ResidualStream:
            if not torch.is_grad_enabled():
                return forward(*arguments)
            activations = _BlockActivations(self._copies) if is_offloaded else None
            self._open = activations
            try:
                out = forward(*arguments)
            finally:
                self._open = None
            last, self._last = self._last, activations
            if last is not None:  # of the block before, or of the micro-batch before
                last.let_go()
                if not is_first:
                    _come_back_before_backward(last, out)
            if activations is not None:
                activations.leave()
            return out

        block.forward = run


def _come_back_before_backward(activations: _BlockActivations, out: ResidualStream) -> None:
    """Let `activations` come back when backward begins that of the block which returned `out`."""
    newest = out.x_SBH if out.added_SBH is None else out.added_SBH
    newest.register_hook(lambda _: activations.come_back())
