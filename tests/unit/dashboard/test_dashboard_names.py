"""A page has one name: that of its API subject, its view, and its address."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.source_tree import ROOT

API = ROOT / "diagnostics" / "megatrain_dashboard" / "api"
WEB = ROOT / "diagnostics" / "web" / "src"


def folders(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir() and path.name != "__pycache__"}


def modules(directory: Path) -> set[str]:
    return {path.stem for path in directory.glob("*.py") if path.stem != "__init__"}


def test_each_view_is_named_after_its_subject() -> None:
    assert folders(WEB / "views") <= folders(API) | modules(API)
    assert [name for name in sorted(folders(API)) if not (API / name / "route.py").is_file()] == []


def test_each_view_of_a_job_is_addressed_by_its_name() -> None:
    source = (WEB / "app" / "views.tsx").read_text()
    rows = re.findall(r'\{ name: "(\w+)", .*component: (\w+) \}', source)
    folder_of = dict(re.findall(r'import \{ (\w+) \} from "\.\./views/(\w+)";', source))
    assert len(rows) == len(folder_of)
    for name, component in rows:
        assert (component, folder_of[component]) == (f"{name.capitalize()}View", name)
