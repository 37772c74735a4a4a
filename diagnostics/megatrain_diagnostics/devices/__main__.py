"""`python -m megatrain_diagnostics.devices`: reads GPUs and network interfaces, a line of JSON (HostSample) a reading.

A program of its own: a call into the driver of a GPU that has fallen off the bus may never return, and then nothing but
this program waits for it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from megatrain.contracts.record import encode
from megatrain_diagnostics.devices.sample import GpuSource, HostReader, local_gpus


def main(words: Sequence[str]) -> int:
    """Read until this process is ended, or its reader is gone."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.devices", description=__doc__)
    parser.add_argument("--interval-s", type=float, required=True, help="seconds between two readings")
    parser.add_argument("--dcgm-url", default="", help="page of NVIDIA's DCGM exporter; empty: NVML is asked")
    parser.add_argument("--count", type=int, default=0, help="readings to make; 0: as long as somebody listens")
    args = parser.parse_args(words)
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
    # only where it is used: it loads a parser
    from megatrain_diagnostics.devices.dcgm import DcgmExporter

    return DcgmExporter(dcgm_url)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(0)
