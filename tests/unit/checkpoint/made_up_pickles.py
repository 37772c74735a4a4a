"""A small assembler of pickles: `.metadata` as torch writes it, and malformed."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def valid_metadata() -> Metadata:
    offsets, sizes = torch.Size((0, 0)), torch.Size((4, 6))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), sizes, [ChunkStorageMetadata(offsets, sizes)])
    return Metadata(
        state_dict_metadata={"w": tensor, "step": BytesStorageMetadata()},
        planner_data={"w": ("w",), "step": ("step", 0)},
        storage_data={
            MetadataIndex("w", offsets, 0): _StorageInfo("__0_0.distcp", 64, 1000),
            MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 50),
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/c"), save_id="1"),
        version="1.0.0",
    )


VALID = pickle.dumps(valid_metadata())


# A small assembler of pickles


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def old_name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def new(module: str, kind: str, *fields: tuple[str, bytes]) -> bytes:
    state = b"".join(text(field) + value for field, value in fields)
    return name(module, kind) + b")\x81}(" + state + b"ub"


def root(states: bytes = b"}", storage: bytes = b"}", *more: tuple[str, bytes]) -> bytes:
    return new(METADATA, "Metadata", ("state_dict_metadata", states), ("storage_data", storage), *more)


def whole(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def size(*numbers: int) -> bytes:
    packed = b"".join(b"J" + number.to_bytes(4, "little", signed=True) for number in numbers)
    return call(name("torch", "Size"), b"(" + packed + b"t")


TOUCH = "touch canary"
SYSTEM = call(name("posix", "system"), text(TOUCH))
