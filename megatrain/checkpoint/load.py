"""Fill this rank's state from a checkpoint of any layout. A replica group reads each stored item once.

Rank 0 reads the index and broadcasts it. The ranks of a replica group exchange the lists of the items that they
need, assign each item to one reader (load_plan.py), and process the items in the same order. The reader reads an item,
checks its digest and sends the bytes to the other ranks that need it. So a group of any size reads its items from
storage once, and a rank holds only a few items at a time. Source: MegaScale sec. 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatrain.checkpoint.agreement import raise_for_all, raised_by_all
from megatrain.checkpoint.checked_files import checked_index, read_index
from megatrain.checkpoint.image import key_of
from megatrain.checkpoint.item_reader import ItemReader, tensor_of, torch_dtype
from megatrain.checkpoint.load_plan import ItemCatalog, ItemRead, WantedBox, assign_readers, plan_load
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.stored_tensors import EMA, MASTER, StoredItem, StoredTensor
from megatrain.comm.channel import Channel
from megatrain.comm.cpu_groups import CpuGroups, gather_json_in
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box
from megatrain.parallel.sharding import FlatShard

FP8_HISTORY = "fp8_history"
"""The history of FP8 delayed scaling. A checkpoint that was written without delayed scaling lacks this state."""
_READ_AHEAD = 2
"""How many items are read ahead while the current one is sent to other ranks and copied."""


@dataclass(slots=True)
class LoadReport:
    """This rank's reads and receives during a load."""

    num_items: int = 0
    bytes_read: int = 0
    """From storage."""
    bytes_received: int = 0
    """From other ranks."""


def load_state(
    directory: Location, manifest: Manifest, shards: Sequence[tuple[str, FlatShard]], rank: int, cpu_groups: CpuGroups
) -> LoadReport:
    """Fill `shards`, (kind of state, shard) each, from a checkpoint. Moments and histories that it lacks become zero.

    A checkpoint has only the moments that its job's update rule keeps. If it lacks the average of the weights, the
    average is set to the weights.

    Communication: a broadcast of the index to all ranks; within each replica group, an exchange of the numbers of the
    needed items, and a broadcast or sends of each item that several of its ranks need; agreements of all ranks.
    Raises: CheckpointError, the same on every rank, naming the file, the tensor or the item. The state is then partly
    filled.
    """
    with raised_by_all(cpu_groups, rank):
        index = checked_index(directory, manifest) if rank == 0 else b""
    index = cpu_groups.broadcast_bytes(index)
    wanted: list[WantedBox] = []
    targets: list[Tensor] = []
    with raised_by_all(cpu_groups, rank):
        tensors = read_index(index, directory, manifest).tensors
        for kind, shard in shards:
            box, target = WantedBox(key_of(kind, shard.name), shard.global_shape, shard.box), shard.tensor
            if kind == FP8_HISTORY:
                target.zero_()
                box, target = _newest_steps(box, target, tensors.get(box.key))
            if kind == EMA and box.key not in tensors:
                box = replace(box, key=key_of(MASTER, shard.name))
            is_stored = manifest.has_optimizer and box.key in tensors
            if (is_stored or kind in (MASTER, EMA)) and target.numel():
                wanted.append(box)
                targets.append(target)
            else:
                target.zero_()
        catalog = ItemCatalog(tensors, str(directory), manifest.file_name)
        items, dtypes = catalog.items, {key: torch_dtype(tensor.dtype) for key, tensor in tensors.items()}
        reads = plan_load(wanted, catalog)
    loader = _Loader(ItemReader(directory, manifest.files), items, dtypes, targets, cpu_groups)
    loader.run(reads)
    loader.report.num_items, loader.report.bytes_read = loader.reader.num_items, loader.reader.bytes_read
    raise_for_all(cpu_groups, rank, loader.problem)
    loader.report.bytes_read += len(index) if rank == 0 else 0
    return loader.report


def _newest_steps(history: WantedBox, target: Tensor, stored: StoredTensor | None) -> tuple[WantedBox, Tensor]:
    """Return the part of a stored history to load, and its target: the newest steps that both have, or nothing."""
    num_slots, num_steps = history.global_shape
    num_stored = 0 if stored is None else stored.shape[-1]
    num_steps = min(num_steps, num_stored)
    box = Box((0, 0), (num_slots, num_steps))
    return WantedBox(history.key, (num_slots, num_stored), box), target[:, :num_steps]


@dataclass(slots=True)
class _Loader:
    """One pass over the items that a replica group needs. `problem`: an error of this rank; None without one."""

    reader: ItemReader
    items: tuple[StoredItem, ...]
    dtypes: Mapping[str, torch.dtype]
    targets: list[Tensor]
    cpu_groups: CpuGroups
    report: LoadReport = field(default_factory=LoadReport)
    problem: str | None = None

    def run(self, reads: Sequence[ItemRead]) -> None:
        replicas = self.cpu_groups.replicas
        own = {read.number: read for read in reads}
        needs = gather_json_in(replicas, sorted(own))
        readers = assign_readers(needs, [item.length for item in self.items])
        needed_by = _members_by_item(needs)
        order = sorted(needed_by, key=lambda number: (self.items[number].file, self.items[number].offset))
        contents = self._contents([number for number in order if readers[number] == replicas.rank])
        for number in order:
            members, reader = needed_by[number], readers[number]
            content = next(contents) if reader == replicas.rank else None
            content = self._distribute(number, content, members, reader)
            if content is not None and number in own and self.problem is None:
                self._fill(own[number], content)

    def _contents(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Yield the bytes of the items that this rank reads. After an error, yield zeros, because other ranks wait."""
        with ThreadPoolExecutor(1) as pool:
            ahead: list[Future[Tensor]] = []
            remaining = iter(numbers)
            for number in remaining:
                ahead.append(pool.submit(self._read, self.items[number]))
                if len(ahead) > _READ_AHEAD:
                    yield ahead.pop(0).result()
            while ahead:
                yield ahead.pop(0).result()

    def _read(self, item: StoredItem) -> Tensor:
        try:
            return torch.frombuffer(self.reader.read(item), dtype=torch.uint8)
        except CheckpointError as error:
            self.problem = self.problem or str(error)
            return torch.zeros(item.length, dtype=torch.uint8)

    def _distribute(self, number: int, content: Tensor | None, members: Sequence[int], reader: int) -> Tensor | None:
        """Send an item's bytes to all members that need it. Returns the bytes; None on a rank that does not get them.

        If more than half of the group need the item, it is broadcast, and every rank gets the bytes.
        """
        replicas = self.cpu_groups.replicas
        if len(members) == 1:
            return content
        if 2 * len(members) > replicas.size:
            buffer = content if content is not None else torch.empty(self.items[number].length, dtype=torch.uint8)
            replicas.broadcast(buffer, Operation.CHECKPOINT_EXCHANGE, source=reader).wait()
        elif content is not None:
            buffer = content
            others = [member for member in members if member != reader]
            for sending in [self._channel(member).send(content, Operation.CHECKPOINT_EXCHANGE, chunk=-1, microbatch=-1)
                            for member in others]:  # fmt: skip
                sending.wait()
        elif replicas.rank in members:
            buffer = (
                self._channel(reader)
                .receive(
                    (self.items[number].length,),
                    torch.uint8,
                    torch.device("cpu"),
                    Operation.CHECKPOINT_EXCHANGE,
                    chunk=-1,
                    microbatch=-1,
                )
                .wait()
            )
        else:
            return None
        if content is None and replicas.rank in members:
            self.report.bytes_received += buffer.numel()
        return buffer

    def _channel(self, member: int) -> Channel:
        return Channel(self.cpu_groups.replicas, self.cpu_groups.replicas.ranks[member], number=0)

    def _fill(self, read: ItemRead, content: Tensor) -> None:
        try:
            tensor = tensor_of(content, self.reader.directory, read.key, read.item, self.dtypes[read.key])
        except CheckpointError as error:
            self.problem = str(error)
            return
        for copy in read.copies:
            self.targets[copy.wanted][copy.target].copy_(tensor[copy.source])


def _members_by_item(needs: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for member, numbers in enumerate(needs):
        for number in numbers:
            members.setdefault(number, []).append(member)
    return members
