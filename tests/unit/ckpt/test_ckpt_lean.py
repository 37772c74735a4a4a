"""Subcommands that list and select checkpoints run with a broken torch, and start fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

HEAVY = ["torch", "numpy", "safetensors", "transformers", "tokenizers"]
SCRIPT = f"""
import json, sys
from megatrain.cli import main
for arguments in json.loads(sys.argv[1]):
    code = main(["ckpt", *arguments])
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([arguments[0], code, heavy]), file=sys.stderr)
"""


def test_only_conversions_load_torch(run: Path) -> None:
    main = run / "checkpoints/main"
    lines = [
        ["ls", run], ["inspect", run, "--tensors"], ["verify", run, "--all"], ["pin", run], ["unpin", run],
        ["diff", main / "step-000000010", main / "step-000000020"],
        ["diff", main / "step-000000010", main / "step-000000010", "--tensors"],
        ["restore", run, "--step", "20"], ["prune", run, "--keep-last", "1", "--abandoned", "--yes"],
    ]  # fmt: skip
    arguments = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=True,
    )
    assert [json.loads(line) for line in done.stderr.splitlines()] == [[line[0], 0, []] for line in lines]
