"""Command-line settings: `--section.key=value`, or `--section.key value`; the last one for a key wins.

A value is read as TOML. A value that is not TOML is taken literally, so that strings need no quotes; the type check
then shows whether the key takes a string.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatrain.config.options import Option
from megatrain.config.origin import ValueOrigin
from megatrain.config.tables import missing_parallelism, suggestions
from megatrain.config.toml_text import read_float
from megatrain.formatting import alternatives


@dataclass(slots=True)
class Overrides:
    """The settings of a command line as tables, like those of a file."""

    tables: dict[str, dict[str, object]] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def named_section(argument: str) -> str:
    """Return the section of a command-line setting."""
    return argument.removeprefix("--").partition("=")[0].partition(".")[0]


def parse_overrides(arguments: Sequence[str], sections: Mapping[str, Mapping[str, Option]]) -> Overrides:
    """Return what `arguments` set, and a problem for each that sets nothing. Never raises."""
    result = Overrides()
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, has_equals, text = argument.partition("=")
        section, has_dot, key = name.removeprefix("--").partition(".")
        if not (name.startswith("--") and section and has_dot and key):
            result.problems.append(_not_a_setting(argument, sections))
            # The value of a malformed "--key value" is part of the same mistake.
            if argument.startswith("--") and not has_equals and _is_value(waiting):
                waiting.pop(0)
            continue
        if not has_equals:
            if not _is_value(waiting):
                result.problems.append(f"{argument} has no value; write {argument}=VALUE (on the command line)")
                continue
            text = waiting.pop(0)
        option = sections.get(section, {}).get(key)
        result.tables.setdefault(section, {})[key] = _value(text, option)
        result.origins[f"{section}.{key}"] = ValueOrigin(f"--{section}.{key} on the command line")
    return result


def _is_value(waiting: Sequence[str]) -> bool:
    return bool(waiting) and not waiting[0].startswith("--")


def _value(text: str, option: Option | None) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}", parse_float=read_float)
    except (ValueError, RecursionError):
        # Not TOML, or more digits or brackets than Python reads.
        return text
    value: object = parsed["value"]
    is_word = option is not None and option.kind in ("str", "choice") and not isinstance(value, str)
    # A text of several lines can parse as more than one TOML setting; then the literal text was meant.
    return text if is_word or len(parsed) > 1 else value


def _not_a_setting(argument: str, sections: Mapping[str, Mapping[str, Option]]) -> str:
    name, _, text = argument.partition("=")
    key = name.lstrip("-").replace("-", "_") if argument.startswith("--") else ""
    if rule := missing_parallelism(key, sections):
        return f"{argument} cannot be set: {rule} (on the command line)"
    meant = suggestions(key, None, sections) if key else ()
    written = tuple(f"--{key}={text or 'VALUE'}" for key in meant)
    hint = f"did you mean {alternatives(written)}?" if written else "write --section.key=value"
    return f"{argument} is not a setting of the form --section.key=value; {hint} (on the command line)"
