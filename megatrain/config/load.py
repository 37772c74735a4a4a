"""From a TOML file and command-line settings to a checked configuration, or to a list of all problems."""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.locator import key_lines
from megatrain.config.options import Option
from megatrain.config.origin import DEFAULT, ValueOrigin
from megatrain.config.overrides import named_section, parse_overrides
from megatrain.config.sections import NUMBERED, options_with
from megatrain.config.tables import TableReader, split_arrays
from megatrain.config.toml_text import read_float
from megatrain.contracts.errors import ConfigError

_BOM = "\ufeff"
_OTHER_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""The mark of UTF-32 in little-endian order begins with that of UTF-16."""
_SYNTAX_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration, and where each of its values ("section.key") came from."""

    config: Config
    origins: Mapping[str, ValueOrigin]


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    is_for_training: bool = False,
) -> LoadedConfig:
    """Read `path`, apply `overrides`, and check everything that can be checked without starting a run.

    Without a world size, the layout is checked as far as the configuration determines it. `is_for_training` also
    requires the keys that only training needs, such as data.

    Raises: ConfigError with every problem of the file, the overrides and the checks between keys.
    """
    text, raw, problem = _read_file(path)
    tables, doubled = split_arrays(raw, NUMBERED)
    if problem is not None:
        # the file is unreadable, so the overrides are checked without it
        options = options_with(map(named_section, overrides))
        reader = TableReader(options)
        given = parse_overrides(overrides, options)
        reader.read(given.tables, given.origins)
        raise ConfigError([problem, *given.problems, *reader.problems])
    problems = [f"{problem} ({path})" for problem in doubled]
    lines = key_lines(text)
    origins = {".".join(key): ValueOrigin(str(path), line) for key, line in lines.items() if len(key) <= 2}
    return _checked(tables, origins, ValueOrigin(str(path)), overrides, problems, world_size, is_for_training)


def load_tables(
    tables: Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    is_for_training: bool = False,
) -> LoadedConfig:
    """Do the same as `load_config` with tables from a program: section -> key -> value, as in `Config.to_dict`.

    Raises: ConfigError with every problem of the tables, the overrides and the checks between keys.
    """
    sections, problems = split_arrays(tables, NUMBERED)
    program = ValueOrigin("given by the program")
    origins = {
        f"{name}.{key}": program for name, table in sections.items() if isinstance(table, Mapping) for key in table
    }
    return _checked(sections, origins, None, overrides, problems, world_size, is_for_training)


def _checked(
    tables: Mapping[str, object],
    origins_of_tables: Mapping[str, ValueOrigin],
    fallback: ValueOrigin | None,
    overrides: Sequence[str],
    problems: Sequence[str],
    world_size: int | None,
    is_for_training: bool,
) -> LoadedConfig:
    """Return the configuration of tables and overrides. `fallback`: the origin of a missing section.

    Raises: ConfigError with `problems` and all others.
    """
    options = options_with([*tables, *map(named_section, overrides)])
    reader = TableReader(options)
    reader.problems.extend(problems)
    reader.read(tables, origins_of_tables)
    given = parse_overrides(overrides, options)
    reader.problems.extend(given.problems)
    reader.read(given.tables, given.origins)
    reader.require_all(origins_of_tables, fallback)
    origins = _complete(reader.origins, options)
    config = Config.of_values(reader.values)
    reader.problems.extend(check(config, origins, world_size, reader.doubtful, is_for_training=is_for_training))
    if reader.problems:
        raise ConfigError(reader.problems)
    return LoadedConfig(config, origins)


def _read_file(path: Path) -> tuple[str, Mapping[str, object], str | None]:
    """Return (text, tables, None), or ("", {}, problem) if the file cannot be read."""
    try:
        content = path.read_bytes()
        if content.startswith(_OTHER_BOMS):
            return "", {}, f"the file is UTF-16 or UTF-32, by its byte-order mark; save it as UTF-8 ({path})"
        text = content.decode().removeprefix(_BOM)  # some Windows editors write one
        if _BOM in text:
            line = text.count("\n", 0, text.index(_BOM)) + 1
            problem = "there is a byte-order mark (U+FEFF) inside the file, from a file that was appended; remove it"
            return "", {}, f"{problem} ({ValueOrigin(str(path), line)})"
        return text, tomllib.loads(text, parse_float=read_float), None
    except OSError as error:
        return "", {}, f"cannot read the configuration file: {error.strerror}; give the path of a TOML file ({path})"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        return "", {}, f"byte 0x{byte:02x} is not UTF-8; save the file as UTF-8 ({ValueOrigin(str(path), line)})"
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        location = _SYNTAX_PLACE.search(message)
        line = int(location.group(1)) if location else text.count("\n") + 1
        column = f" at column {location.group(2)}" if location else " at the end of the file"
        reason = _SYNTAX_PLACE.sub("", message).removesuffix(" (at end of document)")
        return (
            "",
            {},
            f"not TOML{column}: {reason}; correct this line or the one before ({ValueOrigin(str(path), line)})",
        )
    except (ValueError, RecursionError) as error:
        return "", {}, f"cannot be read as TOML: {error}; write shorter numbers and fewer brackets ({path})"


def _complete(
    origins: Mapping[str, ValueOrigin], options: Mapping[str, Mapping[str, Option]]
) -> dict[str, ValueOrigin]:
    """Return an origin for every key, in the order of the keys."""
    keys = [f"{section}.{name}" for section, names in options.items() for name in names]
    return {key: origins.get(key, DEFAULT) for key in keys}
