"""Arguments that the command lines refuse: exit code 2, a message, and no name of an internal function."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatrain import cli
from megatrain.commands.argument_types import real_number, seed, utf8_path, utf8_text, whole_number
from tests.helpers.refusals import refusal

NOT_UTF8 = "caf\udce9 au lait"


def test_whole_numbers_lie_between_their_limits() -> None:
    parse = whole_number(257, 1000)
    assert [parse(text) for text in ("257", "1000")] == [257, 1000]
    for text in ("256", "1001", "300.0", "", "9" * 5000):
        reason = refusal(argparse.ArgumentTypeError, parse, text)
        assert reason.endswith(" is not a whole number from 257 to 1000"), text
        assert len(reason) < 100


def test_a_whole_number_without_an_upper_limit_fits_64_bits() -> None:
    parse = whole_number(0)
    assert parse(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(argparse.ArgumentTypeError, match=f"is not a whole number from 0 to {2**63 - 1}$"):
        parse(str(2**63))
    with pytest.raises(argparse.ArgumentTypeError, match=r"^'-1' is not a whole number of at least 0$"):
        parse("-1")


def test_real_numbers_obey_their_rule() -> None:
    parse = real_number("a finite number of at least 0", lambda value: 0.0 <= value < float("inf"))
    assert parse("0.5") == 0.5
    for text in ("nan", "inf", "-0.1", "1e999", "half"):
        reason = refusal(argparse.ArgumentTypeError, parse, text)
        assert reason == f"'{text}' is not a finite number of at least 0"


def test_a_seed_is_any_integer_of_64_bits() -> None:
    for value in (0, -(2**63), 2**64 - 1):
        assert seed(str(value)) == value
    for text in (str(2**64), str(-(2**63) - 1), "x"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not an integer of 64 bits$"):
            seed(text)


def test_text_is_utf8() -> None:
    assert (
        utf8_text("caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}")
        == "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}"
    )
    assert utf8_path("a/b") == Path("a/b")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^holds byte 0xe9 after 3 characters, which is not UTF-8$"):
        utf8_text(NOT_UTF8)
    with pytest.raises(argparse.ArgumentTypeError, match=r"^holds U\+D800 after 0 characters"):
        utf8_text("\ud800")


BUILD = ("data", "build", "--input", "python-stdlib", "--output", "out")
REFUSED = [
    (("blackbox", "box", "--last", "abc"), "--last: 'abc' is not a whole number of at least 1"),
    (("config", "check", "a.toml", "--world-size=0"), "--world-size: '0' is not a whole number from 1 to 10000000"),
    ((*BUILD, "--vocab-size", "100"), "--vocab-size: '100' is not a whole number from 257 to 10000000"),
    ((*BUILD, "--validation", "1.5"), "--validation: '1.5' is not a number above 0 and below 1"),
    ((*BUILD, "--validation", "0"), "--validation: '0' is not a number above 0 and below 1"),
    ((*BUILD, "--seed", "9" * 30), f"--seed: '{'9' * 30}' is not an integer of 64 bits"),
    (("data", "build", "--input", "x", "--output", NOT_UTF8), "--output: holds byte 0xe9 after 3 characters"),
    (("data", "inspect", "x", "--documents", "-1"), "--documents: '-1' is not a whole number of at least 0"),
    (("sample", "x", "--seed", "99999999999999999999999"), "'99999999999999999999999' is not an integer of 64 bits"),
    (("sample", "x", "--prompt", NOT_UTF8), "--prompt: holds byte 0xe9 after 3 characters, which is not UTF-8"),
    (("sample", "x", "--max-tokens", "abc"), "--max-tokens: 'abc' is not a whole number of at least 0"),
    (("sample", "x", "--top-k", "-1"), "--top-k: '-1' is not a whole number of at least 0"),
    (("sample", "x", "--temperature", "nan"), "--temperature: 'nan' is not a finite number of at least 0"),
    (("sample", "x", "--top-p", "0"), "--top-p: '0' is not a number above 0 and at most 1"),
]


def test_commands_refuse_with_a_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in REFUSED:
        assert cli.main(arguments) == 2, arguments
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
