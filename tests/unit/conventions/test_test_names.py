"""The name of a test names its topic: `test_<subject>_<condition>_<result>`, at most 60 characters."""

from __future__ import annotations

import re

from tests.helpers.source_tree import python_files, relative

MAX_LENGTH = 60
WITHOUT_SUBJECT = re.compile(r"test_(what|of|where|one|nothing|who|whoever|nobody|somebody)_")


def name_problem(name: str) -> str | None:
    """Return why a test cannot have this name, or None."""
    if len(name) > MAX_LENGTH:
        return f"{len(name)} characters, at most {MAX_LENGTH}"
    found = WITHOUT_SUBJECT.match(name)
    return f'begins with "{found[1]}", which is no subject' if found else None


def test_names_of_tests_are_short_and_begin_with_a_subject() -> None:
    problems = [
        f"{relative(path)}: {name}: {problem}"
        for path in python_files("tests")
        for name in re.findall(r"\bdef (test_\w+)\(", path.read_text())
        if (problem := name_problem(name))
    ]

    assert not problems, "\n".join(problems)


def test_unsuitable_name_of_a_test_is_found() -> None:
    assert name_problem("test_index_with_a_foreign_file_is_refused") is None
    assert name_problem("test_" + "x" * 56) == "61 characters, at most 60"
    assert name_problem("test_what_is_no_index_is_refused") == 'begins with "what", which is no subject'
    assert name_problem("test_of_two_launches_one_gets_the_name") == 'begins with "of", which is no subject'
