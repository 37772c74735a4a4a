"""Typed reading of a model's config.json. Every error names the file, the key, the found and the expected value."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.contracts.errors import CheckpointError


class ConfigJson:
    """The object in a config.json, or one nested in it. A key that is null counts as missing, as in transformers.

    It records which keys were read, because an unread key might change what the model computes.
    """

    def __init__(self, values: Mapping[str, Any], location: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.location = location
        self._nulls = frozenset(key for key, value in values.items() if value is None)
        self._read: set[str] = set()
        self._sections: dict[str, ConfigJson] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def has_null(self, key: str) -> bool:
        """Return whether the file has the key with the value null."""
        return key in self._nulls

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._value(key, default, "a positive integer")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, "expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default, "a number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.refusal(key, "expected a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.refusal(key, "expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.refusal(key, "expected a string")
        return value

    def texts(self, key: str, default: list[str]) -> list[str]:
        """Return a list of strings."""
        value = self._value(key, default, "a list of strings")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(key, "expected a list of strings")
        return value

    def section(self, key: str) -> ConfigJson:
        """Return the object under `key`, or an empty one if it is missing."""
        if key not in self._sections:
            self._sections[key] = ConfigJson(self._object(key), f"{self.location}: {key}")
        return self._sections[key]

    def described(self, key: str, defaults: Mapping[str, Any]) -> ConfigJson:
        """Return the object under `key`, with `defaults` for missing keys. The caller must refuse its unread keys."""
        return ConfigJson({**defaults, **self._object(key)}, f"{self.location}: {key}")

    def require(self, key: str, computed: Sequence[object], default: object) -> None:
        """Raise CheckpointError unless the value is one of `computed`, those that megatrain's model can compute."""
        self._read.add(key)
        if self.values.get(key, default) not in computed:
            known = " or ".join(json.dumps(value) for value in computed)
            raise self.refusal(key, f"only {known} can be computed here, so this model cannot be imported")

    def require_in_layers(self, key: str, computed: object, num_layers: int) -> None:
        """Raise CheckpointError unless the value is missing, or a list of `computed` for each layer."""
        self._read.add(key)
        if key in self.values and self.values[key] != [computed] * num_layers:
            raise self.refusal(key, f"only {json.dumps(computed)} in each of {num_layers} layers can be computed here")

    def refuse_unread(self, ignored: Container[str]) -> None:
        """Raise CheckpointError for a key that was not read, unless it is one of `ignored`."""
        for config, key in self._unread(ignored):
            raise config.refusal(
                key,
                "this key is unknown here and may change what the model computes; remove it from config.json if it "
                "does not",
            )

    def refusal(self, key: str, rule: str) -> CheckpointError:
        """Return the error for the value of `key`."""
        is_there = key in self.values or self.has_null(key)
        found = f"={json.dumps(self.values.get(key))}" if is_there else " is missing"
        return CheckpointError(f"{self.location}: {key}{found}; {rule}")

    def _unread(self, ignored: Container[str]) -> Iterator[tuple[ConfigJson, str]]:
        for key in self.values:
            if key not in self._read and key not in ignored:
                yield self, key
        for section in self._sections.values():
            yield from section._unread(())

    def _object(self, key: str) -> dict[str, Any]:
        value = self._value(key, {}, "an object")
        if not isinstance(value, dict):
            raise self.refusal(key, "expected an object")
        return value

    def _value(self, key: str, default: object, kind: str) -> object:
        self._read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise self.refusal(key, f"expected {kind}")
        return value


def read_object(path: Path) -> ConfigJson:
    """Return the JSON object in the file `path`.

    Raises: CheckpointError when the file is missing or does not contain a JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; name a Hugging Face model directory with config.json and model.safetensors"
        ) from error
    return parse_object(content, str(path))


def parse_object(content: bytes, location: str) -> ConfigJson:
    """Return the JSON object in `content`, the content of the file `location`.

    Raises: CheckpointError when the content is not a JSON object.
    """
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{location}: not JSON ({error}); fetch the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{location}: a {type(values).__name__}, expected a JSON object; fetch the file again")
    return ConfigJson(values, location)
