"""`megatrain ckpt diff A B`: show how two checkpoints differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.difference import (
    DigestComparison,
    FieldDifference,
    StoredCheckpoint,
    TensorDifference,
    comparable_keys,
    field_differences,
    open_stored,
    tensor_differences,
)
from megatrain.checkpoint.find import find_checkpoint
from megatrain.commands.argument_types import Verbs, add_json, utf8_text
from megatrain.commands.printing import print_result
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import time_text

if TYPE_CHECKING:
    from megatrain.checkpoint.value_difference import ValueDifference


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("diff", help="show how two checkpoints differ", allow_abbrev=False)
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(),
            type=utf8_text,
            metavar=name,
            help="a checkpoint; or a run or branch: then its newest checkpoint",
        )
    parser.add_argument("--tensors", action="store_true", help="also compare the values of all tensors (needs torch)")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Compare the checkpoints. Raises: CheckpointError when one of the two is damaged."""
    before, after = (open_stored(find_checkpoint(text)) for text in (args.a, args.b))
    fields, tensors = field_differences(before, after), tensor_differences(before, after)
    values = _value_differences(before, after) if args.tensors else None
    compared = before, after, fields, tensors, values
    print_result(lambda: _document(*compared), lambda: _lines(*compared), is_json=args.is_json)
    return int(ExitCode.OK)


def _value_differences(before: StoredCheckpoint, after: StoredCheckpoint) -> dict[str, ValueDifference]:
    """Return the differences of all tensors that have different values, by key."""
    comparison = DigestComparison(before, after)
    doubtful = {key: items for key in comparable_keys(before, after) if (items := comparison.doubtful_items(key))}
    if not doubtful:
        return {}
    from megatrain.checkpoint.value_difference import ValueComparison

    values = ValueComparison(before, after)
    found = {key: values.difference(key, items) for key, items in doubtful.items()}
    return {key: difference for key, difference in found.items() if difference.num_elements}


def _document(
    before: StoredCheckpoint,
    after: StoredCheckpoint,
    fields: Sequence[FieldDifference],
    tensors: Sequence[TensorDifference],
    values: dict[str, ValueDifference] | None,
) -> dict[str, Any]:
    return {
        "a": str(before.location),
        "b": str(after.location),
        "fields": [asdict(field) for field in fields],
        "tensors": [asdict(tensor) for tensor in tensors],
        "num_compared": None if values is None else len(comparable_keys(before, after)),
        "values": None if values is None else [{"key": key, **asdict(value)} for key, value in values.items()],
    }


def _lines(
    before: StoredCheckpoint,
    after: StoredCheckpoint,
    fields: Sequence[FieldDifference],
    tensors: Sequence[TensorDifference],
    values: dict[str, ValueDifference] | None,
) -> list[str]:
    lines = [f"A  {before.location}", f"B  {after.location}"]
    lines += [
        f"{field.name}: {_value(field.name, field.before)} -> {_value(field.name, field.after)}" for field in fields
    ]
    for tensor in tensors:
        if tensor.before is None or tensor.after is None:
            lines.append(f"{tensor.key}: only in {'B' if tensor.before is None else 'A'}")
        else:
            lines.append(f"{tensor.key}: {tensor.before} -> {tensor.after}")
    if not tensors:
        lines.append("the same tensors in the same shapes")
    if values is not None:
        num_compared = len(comparable_keys(before, after))
        lines.append(f"the values of {len(values)} of {num_compared} tensors differ")
        for key, found in values.items():
            by = "not finite" if found.max_abs_difference is None else f"up to {found.max_abs_difference:.3g}"
            lines.append(f"  {key}: {found.num_elements:,} of {before.tensors[key].numel:,} elements, by {by}")
    return lines


def _value(name: str, value: Any) -> str:
    return time_text(value) if name == "written_unix_s" else str(value)
