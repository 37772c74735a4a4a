"""sbatch, srun and scontrol as programs that really run what they are given, on this machine.

sbatch SCRIPT       runs the script until it ends without having asked to be put into the queue again; when the file
                    `time-limit` appears beside the programs, the script alone gets SIGUSR1, as --signal=B:USR1@120
srun [options] ...  runs the command once per node, forwards signals, and ends with the highest code
scontrol requeue N  as the script's last word
"""

from __future__ import annotations

import sys
from pathlib import Path

_SBATCH = r"""
import os, re, signal, subprocess, sys
from contextlib import suppress
from pathlib import Path
here, script = Path(__file__).parent, Path(sys.argv[1])
text = script.read_text()
nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE).group(1)
assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.MULTILINE)
assert "#SBATCH --requeue\n" in text and "#SBATCH --ntasks-per-node=1\n" in text
limit, again = here / "time-limit", here / "requeue"
for restarts in range(5):
    environment = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_NNODES": nodes, "SLURM_RESTART_COUNT": str(restarts)}
    batch = subprocess.Popen(["bash", script], env=environment)
    while batch.poll() is None:
        if limit.exists():
            limit.unlink()
            batch.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            batch.wait(0.01)
    with open(here / "codes", "a") as codes:
        print(batch.returncode, file=codes)
    if not again.exists():
        break
    again.unlink()
sys.exit(batch.returncode)
"""

_SRUN = r"""
import os, signal, subprocess, sys
arguments = sys.argv[1:]
while arguments[0].startswith("-"):
    assert arguments[0] in ("--kill-on-bad-exit=0", "--wait=0", "--no-kill"), arguments[0]
    arguments.pop(0)
count, tasks = int(os.environ["SLURM_NNODES"]), []
def pass_on(number, _frame):
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)
signal.signal(signal.SIGUSR1, pass_on)
signal.signal(signal.SIGTERM, pass_on)
for index in range(count):
    tasks.append(subprocess.Popen(arguments, env={
        **os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(index), "SLURM_NODEID": str(index),
        "SLURMD_NODENAME": f"node{index}", "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
    }))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""

_SCONTROL = r"""
import sys
from pathlib import Path
assert sys.argv[1:] == ["requeue", "17"], sys.argv
(Path(__file__).parent / "requeue").touch()
"""


def install(directory: Path, megatrain: str) -> None:
    """Write the programs, and one called megatrain that is this Python source."""
    for name, source in {"sbatch": _SBATCH, "srun": _SRUN, "scontrol": _SCONTROL, "megatrain": megatrain}.items():
        path = directory / name
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(0o755)
