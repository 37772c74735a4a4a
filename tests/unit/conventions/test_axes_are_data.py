"""Axes and schedules are data: code about all axes reads `contracts/layout.py`, and no code compares a schedule."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

from megatrain.config.parallel import ParallelConfig
from megatrain.contracts.layout import AXES
from megatrain.schedule import SCHEDULE_NAMES, ScheduleName
from tests.helpers.source_tree import ROOT, naming, nodes, python_files, relative

WINDOW_LINES = 4
NAMED = ("dp", "pp", "tp")
_AXIS = re.compile(rf"(?<![a-z])({'|'.join(NAMED)})(?![a-z])")
_SUFFIXES = {".py", ".ts", ".tsx", ".json", ".yaml"}
_ROOTS = ("megatrain", "launcher", "diagnostics", "benchmarks")
_ELSEWHERE = ("node_modules", "static", "tests")
_OF_OPERATIONS = "a table of operations, each of which runs along one axis"
_OF_CASES = "chooses the layouts that it measures"
_PUBLIC = "the columns of the public trace format are fixed"

ALLOWED = {
    "megatrain/contracts/layout.py": "the list itself",
    "megatrain/contracts/black_box/operations.py": _OF_OPERATIONS,
    "megatrain/config/parallel.py": "the options of axes to which comm and parallel give a meaning",
    "diagnostics/megatrain_diagnostics/analysis/exposure.py": _OF_OPERATIONS,
    "diagnostics/megatrain_diagnostics/analysis/timeline.py": _OF_OPERATIONS,
    "diagnostics/web/src/canvas/timeline-scene.ts": _OF_OPERATIONS,
    "diagnostics/megatrain_diagnostics/analysis/whatif/from_spans.py": _PUBLIC,
    "diagnostics/megatrain_diagnostics/analysis/whatif/operations.py": _PUBLIC,
    "diagnostics/megatrain_diagnostics/store/public_trace.py": _PUBLIC,
    "diagnostics/grafana/ranks.json": "a Grafana file names its labels one by one",
    "diagnostics/prometheus/alerts_test.yaml": "a made-up series of one job's ranks",
    "benchmarks/group_init.py": _OF_CASES,
    "benchmarks/jitter.py": _OF_CASES,
    "benchmarks/live_detection.py": _OF_CASES,
    "benchmarks/memory.py": _OF_CASES,
    "benchmarks/throughput_ranks.py": _OF_CASES,
    "benchmarks/whatif.py": _OF_CASES,
    "benchmarks/whatif_scale.py": _OF_CASES,
}
"""File -> the reason why it names them."""

_QUOTED = re.compile(rf"([\"'])({'|'.join(axis.name for axis in AXES)})\1")
_OF_REPLICAS = "shows the replicas of a job that train on other samples, which are the places along dp"
_OF_TENSOR = "transfers along tp and dp, which are judged apart"

QUOTING = {
    "megatrain/contracts/layout.py": "the list itself",
    "megatrain/comm/mesh.py": "the tensor-parallel group, over which the model exchanges rows of the sequence",
    "megatrain/config/config.py": "the holders of a key-value head, which the decoder's table cuts over tp",
    "megatrain/parallel/decoder.py": "the table of placements, which says what each axis cuts",
    "megatrain/planning/traffic.py": "rows of the sequence travel between tp ranks",
    "diagnostics/megatrain_dashboard/api/stragglers/whatif_reader.py": _OF_REPLICAS,
    "diagnostics/megatrain_dashboard/api/timeline/reader.py": _OF_REPLICAS,
    "diagnostics/megatrain_dashboard/api/timeline/view.py": "draws tp ranks beside those of a pipeline",
    "diagnostics/megatrain_diagnostics/analysis/drift_causes.py": _OF_OPERATIONS,
    "diagnostics/megatrain_diagnostics/analysis/exposure.py": _OF_OPERATIONS,
    "diagnostics/megatrain_diagnostics/analysis/hang_grid.py": _OF_REPLICAS,
    "diagnostics/megatrain_diagnostics/analysis/history.py": _OF_TENSOR,
    "diagnostics/megatrain_diagnostics/analysis/network.py": _OF_TENSOR,
    "diagnostics/megatrain_diagnostics/analysis/timeline.py": _OF_OPERATIONS,
    "diagnostics/megatrain_diagnostics/analysis/waiting.py": _OF_REPLICAS,
    "diagnostics/megatrain_diagnostics/analysis/whatif/from_spans.py": _PUBLIC,
    "diagnostics/web/src/canvas/ranks-picture.ts": _OF_REPLICAS,
    "diagnostics/web/src/views/stragglers/what_if.tsx": _OF_REPLICAS,
    "benchmarks/overlap_ideal.py": _OF_CASES,
    "benchmarks/overlap_rank.py": _OF_CASES,
    "benchmarks/span_overhead.py": "a group of one rank with some name",
}
"""File -> the reason why it names an axis."""


def source_files() -> Iterator[Path]:
    for root in _ROOTS:
        for path in sorted((ROOT / root).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file() and not set(path.parts).intersection(_ELSEWHERE):
                yield path


def code_lines(name: str, text: str) -> dict[int, str]:
    """Return the text of each line's code."""
    if not name.endswith(".py"):
        lines = enumerate(text.splitlines(), 1)
        return {number: re.sub(r"^\s*(//|\*|/\*|#).*|\s//\s.*", "", line) for number, line in lines}
    found: dict[int, str] = {}
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type in (tokenize.NAME, tokenize.STRING) and not is_docstring:
            for place, line in enumerate(token.string.splitlines()):
                found[token.start[0] + place] = f"{found.get(token.start[0] + place, '')} {line}"
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return found


def spelled_at(name: str, text: str) -> list[int]:
    """Return the lines at which a window begins that names all three axes."""
    # The text of a file contains all names of its code: most files need not be parsed.
    if set(_AXIS.findall(text)) != set(NAMED) or not windows(dict(enumerate(text.split("\n"), 1))):
        return []
    return windows(code_lines(name, text))


def quoted_at(name: str, text: str) -> list[int]:
    """Return the lines that quote the name of an axis. In languages other than Python, quoted names are labels."""
    if not name.endswith((".py", ".ts", ".tsx")) or not _QUOTED.search(text):
        return []
    return [number for number, line in sorted(code_lines(name, text).items()) if _QUOTED.search(line)]


def windows(lines: dict[int, str]) -> list[int]:
    """Return the first line of each window of numbered lines that names all three axes."""
    named = {number: set(_AXIS.findall(line)) for number, line in lines.items()}
    return [
        number
        for number in sorted(named)
        if named[number]
        and set().union(*(named.get(number + more, set()) for more in range(WINDOW_LINES))) == set(NAMED)
    ]


def test_no_module_spells_the_axes() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in source_files()
        if (lines := spelled_at(path.name, path.read_text(encoding="utf-8")))
    }
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert sorted(set(ALLOWED) - set(found)) == [], "these no longer name the axes"


def test_axes_are_named_for_a_reason() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in source_files()
        if (lines := quoted_at(path.name, path.read_text(encoding="utf-8")))
    }
    assert {name: lines for name, lines in found.items() if name not in QUOTING} == {}, (
        "take the property of the axis that is meant from contracts/layout.py (STAGES, NEAREST, DENSE_REPLICAS, "
        "deals_samples, ...), or add the file with its reason"
    )
    assert sorted(set(QUOTING) - set(found)) == [], "these no longer name an axis"


def test_detection_of_quoted_axes() -> None:
    cases: list[tuple[str, str, list[int]]] = [
        ("a.py", 'stage = coordinate["pp"]\n', [1]),
        ("a.py", "text = f\"stage {at['pp']}\"\n", [1]),
        ("a.py", 'groups = ["dp-cp", "tp-in-2", "stop"]\n', []),
        ("a.py", '"""The group "dp"."""\nx = 1  # "dp"\n', []),
        ("a.py", 'x = {\n    "ep": 1,\n}\n', [2]),
        ("a.ts", 'const n = sizeOf(layout, "dp"); // "tp"\n', [1]),
        ("a.ts", '// "dp"\n', []),
        ("a.json", '{"label": "dp"}\n', []),
    ]
    for name, text, lines in cases:
        assert quoted_at(name, text) == lines, text


def test_detection_of_spelled_axes() -> None:
    cases: list[tuple[str, str, list[int]]] = [
        ("a.py", "sizes = (layout.dp_size, layout.pp_size, layout.tp_size)\n", [1]),
        ("a.py", 'labels = ["dp",\n    "pp",\n    "tp"]\n', [1]),
        ("a.py", 'text = f"dp {at} stage {pp} tp {tp}"\n', [1]),
        ("a.py", '"""Sums over dp, pp and tp."""\nx = 1  # dp, pp, tp\n', []),
        ("a.py", "dp = mesh.dp\npp = mesh.pp\n", []),
        ("a.py", "dp = 1\n\n\n\n\npp = tp = 1\n", []),
        ("a.ts", "const { tp_size: tp, pp_size: pp, dp_size: dp } = layout;\n", [1]),
        ("a.ts", "// dp, pp, tp\nconst x = 1; // dp pp tp\n", []),
        ("a.json", '{"expr": "group_left (dp, pp, tp)"}\n', [1]),
    ]
    for name, text, lines in cases:
        assert spelled_at(name, text) == lines, text


SCHEDULE_ALLOWED = {
    "megatrain/config/parallel.py": "the default of the option",
    "megatrain/config/checks/kernels.py": "recorded micro-batches hold the order of 1f1b on one stage",
    "megatrain/config/checks/parallel.py": "a hint names a schedule that has no such needs",
}
"""File -> the reason why it names one."""
_SET = re.compile(rf'schedule="({"|".join(SCHEDULE_NAMES)})"')


def test_no_other_module_names_a_schedule() -> None:
    found = {
        relative(path)
        for path in naming(python_files("megatrain", "launcher", "diagnostics"), *SCHEDULE_NAMES)
        if not relative(path).startswith("megatrain/schedule/")
        for node in nodes(path, ast.Constant)
        if isinstance(node.value, str) and _names_one(node.value)
    }
    assert found == set(SCHEDULE_ALLOWED)


def _names_one(text: str) -> bool:
    """Return whether a text is the name of a schedule or an option with it; prose may use the names."""
    return text in SCHEDULE_NAMES or _SET.search(text) is not None


def test_the_options_values_are_the_rows() -> None:
    assert get_type_hints(ParallelConfig)["schedule"] == ScheduleName
    assert get_args(ScheduleName) == SCHEDULE_NAMES
