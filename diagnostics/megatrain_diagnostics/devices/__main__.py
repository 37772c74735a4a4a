"""`python -m megatrain_diagnostics.devices`: read GPUs and network interfaces; print each reading as a line of JSON.

Each line is a HostSample. This is a separate program because a call into the driver of a GPU that has fallen off the
bus may never return; then only this program hangs.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from megatrain.contracts.records.record import encode
from megatrain_diagnostics.devices.sample import GpuSource, HostReader, local_gpus


def main(arguments: Sequence[str]) -> int:
    """Print readings until --count is reached or the process is killed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.devices", description=__doc__)
    parser.add_argument("--interval-s", type=float, required=True, help="seconds between two readings")
    parser.add_argument("--dcgm-url", default="", help="URL of NVIDIA's DCGM exporter; empty: read NVML")
    parser.add_argument("--count", type=int, default=0, help="number of readings; 0: until the output is closed")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    reader = HostReader(_gpus(args.dcgm_url))
    left = args.count
    while True:
        sys.stdout.write(encode(reader.read()).decode() + "\n")
        sys.stdout.flush()
        left -= 1
        if left == 0:
            return 0
        reader.wait(args.interval_s)


def _gpus(dcgm_url: str) -> GpuSource:
    if not dcgm_url:
        return local_gpus()
    # imported only when needed, because it loads a parser
    from megatrain_diagnostics.devices.dcgm import DcgmExporter

    return DcgmExporter(dcgm_url)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(0)
