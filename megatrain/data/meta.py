"""meta.json: the sources and the sizes of a data directory.

The file is next to train.bin and validation.bin. Token files from elsewhere have none, or a meta.json of another
program, which `read_meta` recognizes by the `format` key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from megatrain.contracts.errors import DataError
from megatrain.data.remote_path import DataPath, RemotePath
from megatrain.data.side_by_side import side_by_side

META_NAME = "meta.json"
SCHEMA_VERSION = 1
_FORMAT = "megatrain-data"
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    int: (int,), float: (float, int), str: (str,), str | None: (str, type(None)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SplitMeta:
    """The size of one split, and the digests of its files.

    `text_bytes` counts UTF-8 bytes; `tokens` includes the end-of-document tokens.
    """

    documents: int
    tokens: int
    text_bytes: int
    bin_sha256: str
    idx_sha256: str


@dataclass(frozen=True, slots=True)
class DataMeta:
    """The content of meta.json.

    `text_key`: the key or column that the texts come from; None for joined data with several keys.
    `unigram_entropy_nats` is the entropy of the distribution of the held-out tokens, in nats per token: the loss of a
    model that predicts only the token frequencies.
    """

    sources: tuple[str, ...]
    text_key: str | None
    seed: int
    validation_fraction: float
    vocab_size: int
    eod_id: int
    tokenizer_sha256: str
    unigram_entropy_nats: float
    skipped: Mapping[str, int]
    train: SplitMeta
    validation: SplitMeta

    def to_json(self) -> str:
        """Return the text of meta.json."""
        return json.dumps({"format": _FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n"


def read_metas(prefixes: Mapping[str, DataPath]) -> dict[str, DataMeta | None]:
    """Return the meta.json beside each of the token files (key -> prefix), as `read_meta` does.

    Each file is read once, those behind URLs at the same time.
    Raises: DataError of the first one that cannot be used.
    """
    paths = {str(path): path for path in (prefix.parent / META_NAME for prefix in prefixes.values())}
    is_remote = any(isinstance(path, RemotePath) for path in paths.values())
    found = side_by_side(read_meta, list(paths.values())) if is_remote else map(read_meta, paths.values())
    metas = dict(zip(paths, found, strict=True))
    return {key: metas[str(prefix.parent / META_NAME)] for key, prefix in prefixes.items()}


def read_meta(path: DataPath) -> DataMeta | None:
    """Return the content of a meta.json, or None if the file does not exist or belongs to another program.

    Raises: DataError when it is unreadable, has another version, lacks a key, or has a value of a wrong type.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); build the data again") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    if content.get("schema_version") != SCHEMA_VERSION:
        raise DataError(
            f"{path}: has schema_version {content.get('schema_version')}, this program reads {SCHEMA_VERSION}; "
            "build the data again, or use the megatrain that built it"
        )
    try:
        values = {field.name: content[field.name] for field in fields(DataMeta)}
        values["sources"] = tuple(values["sources"])
        values["train"] = SplitMeta(**values["train"])
        values["validation"] = SplitMeta(**values["validation"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: is damaged ({error!r}); build the data again") from error
    meta = DataMeta(**values)
    for part in (meta, meta.train, meta.validation):
        for name, kind in get_type_hints(type(part)).items():
            value = getattr(part, name)
            # isinstance would accept true as an integer
            if kind in _SCALARS and type(value) not in _SCALARS[kind]:
                problem = f"{name}={value!r} is not of type {getattr(kind, '__name__', kind)}"
                raise DataError(f"{path}: is damaged ({problem}); build the data again")
    return meta
