"""Programs that run in a fork instead of a new interpreter have the same environment and the same exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forked_program import forked_program, run_forked
from tests.helpers.permissions import heed_permissions
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

SEEN = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv, "directory": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "is_main": sys.modules["__main__"].__dict__ is globals(), "stdin": sys.stdin.read(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "path": sys.path[0], "encodings": [stream.encoding for stream in (sys.stdout, sys.stderr)],
    "shown": sorted(filter(None, open("/proc/self/environ").read().split(chr(0)))),
}))
"""


@pytest.mark.parametrize("kind", ["-c", "-m"])
def test_fork_sees_what_a_new_interpreter_sees(kind: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    arguments = [kind, SEEN if kind == "-c" else "seen", "--a", "b c"]
    environment = {"PATH": os.environ["PATH"], "ODD": "=x", "LC_CTYPE": "C.UTF-8"}
    new = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    fork = run_forked(arguments, environment=environment, directory=tmp_path)
    assert fork.returncode == 0, fork.stderr
    expected, found = json.loads(new.stdout), json.loads(fork.stdout)
    if kind == "-m":
        # The interpreter gives the absolute path.
        assert Path(expected["arguments"][0]).samefile(found["arguments"][0])
        expected["arguments"][0] = found["arguments"][0]
    assert found == expected


@pytest.mark.parametrize(
    ("source", "exit_code", "output"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(75)", 75, ""),
        ("raise SystemExit('words')", 1, "words\n"),
        ("import os; os._exit(7)", 7, ""),
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import threading, time; threading.Thread(target=lambda: print('late')).start()", 0, ""),
    ],
)
def test_fork_ends_as_a_new_interpreter_does(source: str, exit_code: int, output: str) -> None:
    done = run_forked(["-c", source])
    assert (done.returncode, done.stdout) == (exit_code, "late\n" if "late" in source else "")
    assert done.stderr.endswith(output)


def test_forked_program_writes_to_its_streams_and_leaves_nothing(tmp_path: Path) -> None:
    source = "import sys, threading; print('one', flush=True); print('two', file=sys.stderr); threading.Event().wait()"
    with (tmp_path / "output").open("ab") as file, forked_program(["-c", source], output=file) as program:
        wait_until(lambda: (tmp_path / "output").read_text() == "one\ntwo\n", "its whole output")
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.communicate(0.01)
    assert not is_running(program.pid)


def test_fork_and_its_children_heed_permissions(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    source = (
        "import os, subprocess, sys\n"
        "print(os.access('closed', os.W_OK), end=' ', flush=True)\n"
        "subprocess.run([sys.executable, '-c', \"import os; print(os.access('closed', os.W_OK))\"], check=True)\n"
    )
    done = run_forked(["-c", source], directory=tmp_path, prepare=[heed_permissions])
    assert (done.stdout, done.stderr) == ("False False\n", "")
