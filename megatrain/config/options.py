"""The record of one configuration key: its type, default, unit, range and meaning.

A section is a plain frozen dataclass; `option(...)` is the field of a key, whose metadata hold its documentation and
allowed range, and `options_of` reads them back. The loader, the checks and the generated reference all use these
records, so a key is described once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from megatrain.config.toml_text import TinyNumber, shortened, value_text
from megatrain.config.variants import is_variant
from megatrain.formatting import alternatives, is_utf8

Value = int | float | bool | str | tuple[int, ...]
"""The types of a key's value. A list of TOML is held as a tuple, so that a section is immutable."""

LARGEST_INTEGER = 2**53
"""No real count is larger, and some JSON readers represent larger integers only approximately."""
LONGEST_S = 1_000_000_000
"""About 30 years: longer waits overflow the clocks of communication libraries."""
LARGEST_OF_UNIT: Mapping[str, int] = {
    "s": LONGEST_S,
    "h": 1_000_000,
    "MB": 10**12,
    "GB": 10**9,
    "TFLOP/s": 10**9,
    "steps": 2**31 - 1,
}
"""Upper bounds of keys that declare none. An exabyte in bytes fits in 64 bits. A black box stores the number of a step
in 32 bits."""
LARGEST_NUMBER = 10**9
"""Upper bound of other floats that declare none: single precision can still represent its square."""
SMALLEST_OF_UNIT: Mapping[str, float] = {"s": 0.001}
SMALLEST_NUMBER = 1e-30
"""Lower bound of the magnitude of numbers except 0: single precision rounds only much smaller ones to 0. The bound of
times is in SMALLEST_OF_UNIT."""

REQUIRED: Any = MISSING
"""The default of a key that every configuration must set."""

Kind = Literal["int", "float", "bool", "str", "choice", "list of int"]

_Default = TypeVar("_Default")

_KINDS: Mapping[object, Kind] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    tuple[int, ...]: "list of int",
}
_WANTED: Mapping[str, str] = {
    "int": "an integer, such as 8",
    "float": "a number, such as 0.5",
    "bool": "true or false",
    "str": 'a string, such as "text"',
    "list of int": "a list of integers, such as [0, 8]",
}


class WrongTypeError(Exception):
    """A value has a type that its key cannot hold; the message has the rule and the hint."""


def option(
    default: _Default,
    doc: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    pattern: str = "",
    choices: tuple[str, ...] = (),
    has_variants: bool = False,
) -> _Default:
    """Return the field of a key.

    `minimum` and `maximum` are inclusive bounds, `above` and `below` exclusive ones; `pattern` must match the whole
    string. `choices`: the allowed strings, if they are not in the type because other packages may add some
    (has_variants).
    """
    bounds = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    about = {"doc": doc, "unit": unit, "pattern": pattern, "choices": choices, "has_variants": has_variants}
    return field(default=default, metadata={**about, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key of one section."""

    name: str
    kind: Kind
    choices: tuple[str, ...] | tuple[int, ...]
    default: Value | None
    """None: the key is required."""
    doc: str
    unit: str
    pattern: str
    minimum: float | None
    maximum: float | None
    above: float | None
    below: float | None
    has_variants: bool = False
    """Whether a name that another package registers is allowed beside `choices` (variants.py)."""

    @property
    def is_required(self) -> bool:
        return self.default is None

    @property
    def placeholder(self) -> Value:
        """A value within the range, used for a missing or wrong one while other keys are checked."""
        if self.default is not None:
            return self.default
        return 1.0 if self.kind == "float" else max(1, int(self.minimum or 1))

    @property
    def allowed(self) -> str:
        """The range, the choices or the form as text; empty if every value of the type is allowed."""
        if self.pattern:
            return f"text of the form {self.pattern}"
        if self.choices:
            allowed = alternatives(tuple(value_text(choice) for choice in self.choices))
            return f"{allowed}, or a variant of another package" if self.has_variants else allowed
        bounds = (
            (">=", self.minimum),
            (">", self.above),
            ("<=", self.maximum),
            ("<", self.below),
        )
        return " and ".join(f"{sign} {_bound_text(bound)}" for sign, bound in bounds if bound is not None)

    def parse(self, value: object) -> Value:
        """Return `value` in the type of this key.

        Raises: WrongTypeError when it has another type.
        """
        match self.kind, value:
            case ("bool", bool(value)) | ("float", float(value)) | ("str" | "choice", str(value)):
                return value
            # In Python a bool is an int; here it is not.
            case ("int", int(number)) if not isinstance(number, bool):
                return number
            case ("float", int(number)) if not isinstance(number, bool):
                return _to_float(number)
            case ("list of int", list() | tuple()):
                return _integers(value)
        wanted = self.allowed if self.choices else _WANTED[self.kind]
        raise WrongTypeError(f"must be {wanted}, not {_type_text(value)}")

    def violation(self, value: Value) -> str | None:
        """Return the rule that a value of the right type breaks, with the hint, or None."""
        is_other = bool(self.choices) and value not in self.choices
        if is_other and not (self.has_variants and is_variant(self.name, str(value))):
            return f"is not allowed; use {self.allowed}"
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            return f"is not allowed; use {self.allowed}"
        if isinstance(value, tuple):
            rules = ((number, item, self._number_violation(item, "values")) for number, item in enumerate(value, 1))
            wrong = next(((number, item, rule) for number, item, rule in rules if rule is not None), None)
            if wrong is None:
                return None
            fault, _, hint = wrong[2].partition(";")
            return f"{fault}: element {wrong[0]} is {shortened(value_text(wrong[1]))};{hint}"
        if isinstance(value, str):
            return None if is_utf8(value) else "holds bytes that are not UTF-8; use text in UTF-8"
        return self._number_violation(value, "a value")

    def _number_violation(self, number: float, wanted: str) -> str | None:
        if isinstance(number, int) and number > LARGEST_INTEGER:
            largest = LARGEST_INTEGER if self.maximum is None else min(LARGEST_INTEGER, int(self.maximum))
            return f"is too large; use {wanted} of at most {largest}"
        if not self._is_in_range(number):
            return f"is out of range; use {wanted} {self.allowed}"
        if isinstance(number, float) and not math.isfinite(number):
            return "must be finite; use an ordinary number"
        smallest = SMALLEST_OF_UNIT.get(self.unit, SMALLEST_NUMBER)
        if 0 < abs(number) < smallest or isinstance(number, TinyNumber):
            zero = ", or 0" if self._is_in_range(0) else ""
            return f"is too close to 0; use {wanted} of at least {smallest:g}{zero}"
        return None

    def _is_in_range(self, number: float) -> bool:
        # A NaN compares false with everything, so it fails for every bound that the key has.
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.above is None or number > self.above)
            and (self.maximum is None or number <= self.maximum)
            and (self.below is None or number < self.below)
        )


@cache
def options_of(section: type) -> Mapping[str, Option]:
    """Return the keys of a section's dataclass in the order in which they are declared."""
    hints = get_type_hints(section)
    options = {}
    for key in fields(section):
        hint, about = hints[key.name], key.metadata
        choices = get_args(hint) if get_origin(hint) is Literal else about["choices"]
        kind = _kind_of(hint, choices)
        options[key.name] = Option(
            name=key.name,
            kind=kind,
            default=None if key.default is MISSING else key.default,
            **{**about, "choices": choices, "maximum": _maximum(kind, about)},
        )
    return options


def _maximum(kind: Kind, stated: Mapping[str, Any]) -> float | None:
    """Return the upper bound of a key: its own, else that of its unit or kind."""
    if stated["maximum"] is not None or stated["below"] is not None or kind not in ("int", "float"):
        return cast("float | None", stated["maximum"])
    return LARGEST_OF_UNIT.get(stated["unit"], LARGEST_NUMBER if kind == "float" else None)


def _kind_of(hint: object, choices: tuple[object, ...]) -> Kind:
    if choices:
        return "int" if isinstance(choices[0], int) else "choice"
    return _KINDS[hint]


def _to_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        raise WrongTypeError("is too large; use a number below 1e308") from None


def _integers(items: list[object] | tuple[object, ...]) -> tuple[int, ...]:
    for number, item in enumerate(items, 1):
        if type(item) is not int:
            found = f"element {number} is {shortened(value_text(item))}, {_type_text(item)}"
            raise WrongTypeError(f"must be {_WANTED['list of int']}; {found}")
    return tuple(item for item in items if isinstance(item, int))


def _bound_text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _type_text(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    return names.get(type(value), f"a {type(value).__name__}")
