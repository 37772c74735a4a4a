"""The key locator against the standard library's parser, on generated TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.locator import Path, key_lines

BARE = st.text("abz019_-", min_size=1, max_size=3)
COMMENT = st.sampled_from(["", "  # note", "\t# [x] = '''", '#"""'])
BLANK_LINES = st.sampled_from(["", "\n", "  \n# [not.a.header]\n", "# key = 1\n\n", "\r\n"])
STRINGS = st.sampled_from(
    [
        '"plain"',
        '"a # b"',
        r'"quote \" and [x]"',
        r'"\\"',
        "'literal \\'",
        '""',
        "''",
        '"""one\n[fake]\nfake = 1\n"""',
        '"""two ""quotes"" inside"""',
        '"""ends in two quotes"""""',
        r'''"""escaped \""" end"""''',
        '"""\\\n  folded"""',
        "'''raw\n[fake]\n'' two \\'''",
        "'''ends in one''''",
        '""""""',
    ]
)
SCALARS = st.one_of(
    STRINGS, st.sampled_from(["1", "-1_000", "0x1F", "1.5e-3", "inf", "true", "1979-05-27 07:32:00", "07:32:00"])
)


@st.composite
def key_part(draw: st.DrawFn) -> tuple[str, str]:
    """Return a name and its spelling."""
    name = draw(st.one_of(BARE, st.text("a.# =\"'[]\\e", max_size=3)))
    spellings = ['"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"']
    if name and all(character in "abz019_-" for character in name):
        spellings.append(name)
    if "'" not in name:
        spellings.append(f"'{name}'")
    return name, draw(st.sampled_from(spellings))


@st.composite
def value_text(draw: st.DrawFn, depth: int = 2, *, is_inline: bool = False) -> str:
    kind = draw(st.sampled_from(["scalar", "array", "table"])) if depth else "scalar"
    if kind == "array":
        gap = draw(st.sampled_from(["", " ", "\n  ", " # ] note\n"]))
        items = draw(st.lists(value_text(depth - 1), max_size=3))
        return "[" + gap + ("," + gap).join(items) + draw(st.sampled_from([gap, "," + gap if items else gap])) + "]"
    if kind == "table":
        names = draw(st.lists(key_part(), max_size=3, unique_by=lambda part: part[0]))
        return "{" + ", ".join(f"{text} = {draw(value_text(depth - 1))}" for _, text in names) + "}"
    return draw(SCALARS)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, Mapping[Path, int]]:
    """Return TOML and the line of each key that is at the beginning of a line."""
    text = ""
    lines: dict[Path, int] = {}
    tables = draw(st.lists(st.lists(key_part(), min_size=1, max_size=2), max_size=3, unique_by=lambda p: p[0][0]))
    for header in [None, *tables]:
        text += draw(BLANK_LINES)
        prefix: Path = ()
        if header is not None:
            prefix = tuple(name for name, _ in header)
            lines[prefix] = text.count("\n") + 1
            space = draw(st.sampled_from(["", " "]))
            text += f"[{space}{f'{space}.{space}'.join(spelled for _, spelled in header)}{space}]{draw(COMMENT)}\n"
        for name, spelled in draw(st.lists(key_part(), max_size=3, unique_by=lambda part: part[0])):
            # Names of top-level keys differ from names of tables.
            top = "" if header else "top"
            text += draw(BLANK_LINES)
            lines[(*prefix, *((top,) if top else ()), name)] = text.count("\n") + 1
            dotted = f"{top}.{spelled}" if top else spelled
            text += f"{dotted}{draw(st.sampled_from(['=', ' = ']))}{draw(value_text())}{draw(COMMENT)}\n"
    return text, lines


def nested_keys(value: object, prefix: Path = ()) -> Iterator[Path]:
    """Yield the keys of tables at any depth; the tables of an array are at the array's own key."""
    if isinstance(value, list):
        for item in value:
            yield from nested_keys(item, prefix)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield (*prefix, name)
            yield from nested_keys(item, (*prefix, name))


@pytest.mark.slow
@settings(max_examples=150, derandomize=True)
@given(documents())
def test_lines_are_where_the_document_was_written(document: tuple[str, Mapping[Path, int]]) -> None:
    text, expected = document
    table = tomllib.loads(text)
    found = key_lines(text)

    assert {path: found[path] for path in expected} == expected
    assert set(nested_keys(table)) == set(found)


@pytest.mark.slow
@settings(max_examples=50, derandomize=True)
@given(documents())
def test_keys_appear_in_the_line_found_and_not_before(document: tuple[str, Mapping[Path, int]]) -> None:
    text, expected = document
    found = key_lines(text)
    all_lines = text.splitlines(keepends=True) if "\r" not in text else text.replace("\r\n", "\n").splitlines(True)
    for path in expected:
        # The standard library's parser is the oracle: the text before the line does not contain the key.
        before = tomllib.loads("".join(all_lines[: found[path] - 1]))
        assert path not in set(nested_keys(before))


DOCUMENTS: list[tuple[str, Path, int]] = [
    ("a = 1\n", ("a",), 1),
    ("\n\n[a]\nb = 1\n", ("a", "b"), 4),
    ("\n\n[a]\nb = 1\n", ("a",), 3),
    ("[a]\r\nb = 1\r\nc = 2\r\n", ("a", "c"), 3),
    ("a.b = 1\na.c = 2", ("a", "c"), 2),
    ("a.b = 1\na.c = 2", ("a",), 1),
    ('a."b c" = 1', ("a", "b c"), 1),
    ('"\\u0061" = 1', ("a",), 1),
    ("[a]\nx = [\n 1, # ]\n 2,\n]\ny = 1", ("a", "y"), 6),
    ('[a]\nx = """\n[b]\ny = 1\n"""\ny = 1', ("a", "y"), 6),
    ("a = {b = {c = [\n1]}, d = 1}", ("a", "b", "c"), 1),
    ("a = {b = {c = [\n1]}, d = 1}", ("a", "d"), 2),
    ("[[a]]\nb = 1\n[[a]]\nc = 1", ("a-2", "c"), 4),
    ("[ a . 'b' ] # x\nc=1", ("a", "b", "c"), 2),
]


def test_keys_of_known_documents_are_in_their_lines() -> None:
    for text, path, line in DOCUMENTS:
        tomllib.loads(text)
        assert key_lines(text)[path] == line, text
    assert key_lines("") == {}
    assert key_lines("# only a comment") == {}
