"""The files that the demo reuses and removes; the demo itself is `make demo`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.demo import has_changed_since, remove_earlier_run
from megatrain.run_files.run_directory import RunDirectory


def test_an_earlier_run_is_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    remove_earlier_run(run)
    run.create()
    (run.root / "config.toml").write_text("")
    with run.locked():
        pass
    remove_earlier_run(run)
    assert not run.root.exists()


def test_foreign_files_in_the_demo_directory_are_kept(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    (run.root / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"run holds thesis\.txt, which no run writes; name another --output"):
        remove_earlier_run(run)
    assert (run.root / "thesis.txt").read_text() == "precious"


def test_text_that_changed_is_built_again(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    book, built = texts / "book.txt", tmp_path / "meta.json"
    book.write_text("one")
    built.write_text("")
    for path in (book, texts):
        os.utime(path, (1000, 1000))
    os.utime(built, (2000, 2000))
    assert not has_changed_since([str(texts)], built)
    os.utime(book, (3000, 3000))
    assert has_changed_since([str(texts)], built)
    os.utime(book, (1000, 1000))
    (texts / "more.txt").write_text("two")
    os.utime(texts / "more.txt", (1000, 1000))
    assert has_changed_since([str(texts)], built)
