"""The generated reference: up to date, complete, and every key documented."""

from __future__ import annotations

from pathlib import Path

from megatrain.config import load_config, reference_markdown
from megatrain.config.config import all_options
from tests.helpers.source_tree import ROOT

OPTIONS = {f"{section}.{name}": option for section, keys in all_options().items() for name, option in keys.items()}


def test_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "reference" / "config.md"
    assert page.read_text() == reference_markdown(), f"write it again: megatrain config reference --output {page}"


def test_every_key_has_a_row_below_its_section() -> None:
    rows = []
    section = ""
    for line in reference_markdown().splitlines():
        if line.startswith("## ["):
            section = line[4:-1]
        elif line.startswith("| `"):
            rows.append(f"{section}.{line.split('`')[1]}")
    assert rows == list(OPTIONS)


def test_documentation_is_a_sentence_and_the_default_is_allowed() -> None:
    for key, option in OPTIONS.items():
        assert option.doc.endswith("."), key
        if option.default is not None:
            assert option.parse(option.default) == option.default, key
            assert option.violation(option.default) is None, key
        assert option.violation(option.placeholder) is None, key
        assert option.name.endswith("_s") == (option.unit == "s"), key
        assert option.choices or option.kind not in ("int", "list of int") or option.minimum is not None, key


def test_row_shows_type_default_unit_and_choices() -> None:
    page = reference_markdown()
    assert "| `lr` | float | required |  | > 0 and <= 1000 | Highest learning rate, reached after warm-up. |" in page
    assert '| `schedule` | choice | `"1f1b"` |  | "gpipe", "1f1b", "interleaved" or "zero_bubble" | ' in page
    assert "| `step_timeout_s` | float | `120.0` | s | > 0 and <= 1000000000 | " in page


def test_values_of_a_run_stand_beside_the_defaults(small: Path) -> None:
    loaded = load_config(small, ["--parallel.overlap=false", "--job.name=a"])
    lines = reference_markdown(loaded).splitlines()
    cells = {tuple(line.split(" | ")[:4]) for line in lines if line.startswith("| `")}

    assert lines.count("| key | type | default | Value here | unit | allowed | meaning |") == len(all_options())
    assert {line.count(" | ") for line in lines if line.startswith("| `")} == {6}
    assert ("| `num_heads`", "int", "required", "**`20`**") in cells
    assert ("| `overlap`", "bool", "`true`", "**`false`**") in cells
    assert ("| `name`", "str", '`"megatrain"`', '**`"a"`**') in cells
    assert ("| `dropout`", "float", "`0.0`", "`0.0`") in cells
