"""The programs that a launch starts keep their logs: a removed log is created again."""

from __future__ import annotations

import runpy
import sys

import pytest

from megatrain.programs import own_output


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "program",
    [
        "megatrain.checkpoint.writer",
        "megatrain_dashboard",
        "megatrain_diagnostics.daemon",
        "megatrain_diagnostics.streamer",
    ],
)
def test_program_with_an_own_log_keeps_it(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = []
    monkeypatch.setattr(own_output, "keep_own_log", lambda: kept.append(program))
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit):  # without arguments
        runpy.run_module(program, run_name="__main__")
    assert kept == [program]
    assert "usage: " in capsys.readouterr().err
