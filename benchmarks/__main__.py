"""Run benchmarks one after the other."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from benchmarks.result import MissingPartError, publish
from tests.helpers.require import is_required

NAMES = (
    "throughput",
    "throughput_ranks",
    "overlap",
    "jitter",
    "group_init",
    "memory",
    "gpu_roofline",
    "zero_bubble",
    "span_overhead",
    "telemetry_overhead",
    "checkpoint",
    "model_files",
    "document_attention",
    "tokenization",
    "packing",
    "balance",
    "data_reading",
    "host_loader",
    "log_classification",
    "recovery",
    "recovery_network",
    "heartbeats",
    "closed_loop",
    "live_detection",
    "event_store",
    "event_ingest",
    "whatif",
    "dashboard",
    "command_line",
    "pictures",
    "pictures_training",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: all of {', '.join(NAMES)})"
    )
    parser.add_argument("--write", action="store_true", help="write the results to docs/benchmarks")
    parser.add_argument(
        "--size-gb", type=float, default=1.0, help="checkpoint: size of the state (default: %(default)s)"
    )
    parser.add_argument(
        "--storage", default="", help="checkpoint and model_files: directory on the disk that is measured"
    )
    parser.add_argument("--hosts", type=int, default=1250, help="heartbeats: simulated hosts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="heartbeats: duration (default: %(default)s)")
    parser.add_argument(
        "--ingest-seconds", type=float, default=60.0, help="event_ingest: duration (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, default=128, help="group_init: ranks of the largest layout (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="group_init: rounds of each side (default: %(default)s)")
    parser.add_argument("--text-mb", type=float, default=32.0, help="tokenization: MB of text (default: %(default)s)")
    parser.add_argument(
        "--million-tokens", type=float, default=100.0, help="data_reading: tokens of the files (default: %(default)s)"
    )
    parser.add_argument(
        "--million-documents", type=float, default=100.0, help="host_loader: documents in all (default: %(default)s)"
    )
    parser.add_argument(
        "--sources", type=int, default=300, help="host_loader: sources of the mixture (default: %(default)s)"
    )
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    options = {
        "checkpoint": {"size_gb": args.size_gb, "storage": args.storage},
        "event_ingest": {"seconds": args.ingest_seconds},
        "group_init": {"num_processes": args.processes, "num_rounds": args.rounds},
        "model_files": {"storage": args.storage},
        "heartbeats": {"num_hosts": args.hosts, "seconds": args.seconds},
        "tokenization": {"text_mb": args.text_mb},
        "host_loader": {"million_documents": args.million_documents, "num_sources": args.sources},
        "data_reading": {"million_tokens": args.million_tokens},
    }
    num_missed = 0
    for name in args.names or NAMES:
        try:
            result = importlib.import_module(f"benchmarks.{name}").run(**options.get(name, {}))
        except MissingPartError as missing:
            must_run = is_required(missing.part, os.environ.get("MEGATRAIN_REQUIRE", ""))
            print(f"\n{name}: {'required by MEGATRAIN_REQUIRE' if must_run else 'skipped'}: {missing}")
            num_missed += must_run
            continue
        publish(result, is_written=args.write)
        num_missed += sum(not bar.is_met for bar in result.bars)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
