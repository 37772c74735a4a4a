"""Sites within a training step at which a fault can strike: every span, before it is counted or within it.

"before dp-all-reduce" is the moment before the rank enters the collective, "in forward-compute" the moment after the
span began; with the letters " of GROUP" only operations of that group count, as in "before tp-all-reduce of tp".
"read" is the thread that reads batches ahead. Of a step, the first such moment counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.contracts.black_box.operations import Operation

READ = "read"


def is_site(place: str) -> bool:
    """Return whether this is one of the sites above."""
    when, _, rest = place.partition(" ")
    return place == READ or (when in ("before", "in") and rest.partition(" of ")[0] in set(Operation))


def sites_in(strike: Callable[[str, int], None]) -> None:
    """Call `strike(site, step)` at each site of this process, in the thread that reaches it."""
    from megatrain.data.reader import BatchReader
    from megatrain.telemetry.recorder import Recorder

    begin: Any = Recorder.begin
    set_step: Any = Recorder.set_step
    add_group: Any = Recorder.add_group
    read_step: Any = BatchReader.read_step
    names: dict[int, str] = {}
    at = [-1]

    def noted_group(recorder: Recorder, name: str, ranks: Any) -> int:
        number: int = add_group(recorder, name, ranks)
        names[number] = name
        return number

    def noted_step(recorder: Recorder, step: int) -> None:
        at[0] = step
        set_step(recorder, step)

    def noted_begin(recorder: Recorder, operation: Operation, *arguments: Any, **options: Any) -> int:
        group = names.get(arguments[4] if len(arguments) > 4 else options.get("group", 0), "")
        for site in (f"before {operation}", f"before {operation} of {group}"):
            strike(site, at[0])
        token: int = begin(recorder, operation, *arguments, **options)
        for site in (f"in {operation}", f"in {operation} of {group}"):
            strike(site, at[0])
        return token

    def noted_read(reader: BatchReader, *arguments: Any, **options: Any) -> Any:
        strike(READ, at[0])
        return read_step(reader, *arguments, **options)

    Recorder.begin = noted_begin  # type: ignore[method-assign]
    Recorder.set_step = noted_step  # type: ignore[method-assign]
    Recorder.add_group = noted_group  # type: ignore[method-assign]
    BatchReader.read_step = noted_read  # type: ignore[method-assign]
