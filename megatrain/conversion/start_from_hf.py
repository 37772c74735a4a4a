"""Prepares a job that starts from a Hugging Face directory: imports the model into the run directory, once.

`megatrain train --from-hf` calls this module. `megatrain launch --from-hf` runs the program commands/start_from_hf.py,
which calls it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.load import load_config
from megatrain.config.toml_text import value_text
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.files.file_locks import wait_and_lock
from megatrain.conversion.hugging_face import import_hf
from megatrain.hf import HfModel, open_model

IMPORTED_NAME = "from-hf"
"""The checkpoint of step 0 in the run directory."""


def settings_from_hf(config: Path, overrides: Sequence[str], source: Path, *, can_import: bool = True) -> list[str]:
    """Return the settings, to be put before `overrides`, with which the job starts from the model in `source`.

    They set the keys of [model] from config.json, except keys that the file `config` sets. The first call imports the
    weights into the run directory; later calls, and those of other hosts, find them there.
    can_import: whether this process may import the weights; else they must be there already.
    Raises: ConfigError with every problem of the configuration; CheckpointError and DataError as `import_hf`.
    """
    opened = open_model(source)
    own = _own_keys(config)
    settings = [f"--model.{key}={value_text(value)}" for key, value in opened.config.items() if key not in own]
    loaded = load_config(config, [*settings, *overrides]).config
    if loaded.checkpoint.load:
        load = f"checkpoint.load={value_text(loaded.checkpoint.load)}"
        raise ConfigError([f"{load} and --from-hf {source} each name a model to start from; remove one of them"])
    if opened.tokenizer is not None and not loaded.data.tokenizer:
        settings.append(f"--data.tokenizer={opened.tokenizer.absolute()}")
    imported = Path(loaded.job.resolved_run_directory).absolute() / IMPORTED_NAME
    _import_once(opened, source, imported, can_import=can_import)
    return [*settings, f"--checkpoint.load={imported}"]


def _own_keys(config: Path) -> frozenset[str]:
    """Return the keys of [model] that the file sets; none if the file is invalid, which load_config reports."""
    with suppress(OSError, ValueError):
        model = tomllib.loads(config.read_bytes().decode().removeprefix("\ufeff")).get("model", {})
        if isinstance(model, dict):
            return frozenset(model)
    return frozenset()


def _import_once(opened: HfModel, source: Path, imported: Path, *, can_import: bool) -> None:
    location = LocalLocation(imported)
    if not can_import and not (location / COMMIT_NAME).exists():
        problem = "several workers would import the model at once; use `megatrain launch`, or import it first"
        raise ConfigError([f"--from-hf {source}: {problem}"])
    imported.parent.mkdir(parents=True, exist_ok=True)
    with (imported.parent / f"{IMPORTED_NAME}.lock").open("w") as lock:
        wait_and_lock(lock.fileno())  # of hosts that start together, the first one imports
        if not (location / COMMIT_NAME).exists():
            import_hf(source, location)
    found = read_manifest(location).config["model"]
    wrong = [key for key, value in opened.config.items() if found.get(key) != value]
    if wrong:
        raise CheckpointError(
            f"{imported}: holds another model than {source} ({', '.join(wrong)}); name another job.run_directory, or "
            "remove this checkpoint"
        )
