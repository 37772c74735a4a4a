"""`megatrain data pack`: pack the documents of a pair into samples, for a run with data.packing="best_fit"."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from megatrain.commands.argument_types import Verbs, add_json, whole_number
from megatrain.commands.data.arguments import add_force, add_prefix
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.errors import DataError
from megatrain.formatting import count_text
from megatrain.programs.stop_signals import orderly_end

_PROGRESS_INTERVAL_S = 5.0
_LARGEST_SEQ_LEN = 1 << 24


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "pack", help="pack the documents of a pair into samples, so that short ones stay whole", allow_abbrev=False
    )
    add_prefix(parser)
    parser.add_argument(
        "--seq-len",
        type=whole_number(1, _LARGEST_SEQ_LEN),
        required=True,
        metavar="N",
        help="labels per sample: the length of the run's samples (data.seq_len, else model.seq_len)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="number of processes that pack; it does not change the file (default: one per core)",
    )
    add_force(parser, "a file of packed samples")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.bins import bins_path, write_bins
    from megatrain.data.indexed import IndexedDataset

    path = bins_path(args.prefix, args.seq_len)
    if path.exists() and not args.force:
        raise DataError(f"{path}: exists; replace it with --force, or remove it")
    dataset = IndexedDataset(args.prefix)
    with orderly_end():
        done = write_bins(
            dataset,
            args.seq_len,
            num_workers=args.workers or len(os.sched_getaffinity(0)),
            report=_progress(lambda line: print(line, file=sys.stderr if args.is_json else sys.stdout, flush=True)),
        )
    if args.is_json:
        print_json({"path": str(path), **asdict(done), "waste": done.waste})
        return 0
    lines = [f"{path}: {done.num_bins:,} samples of {args.seq_len:,}, {done.waste:.3%} padding"]
    if done.num_left_out:
        left_out = count_text(done.num_left_out, "document")
        lines.append(f"left out: {left_out} of fewer than two tokens, without a label")
    print_lines(lines)
    return 0


def _progress(report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return a function that reports at most every few seconds."""
    start_s = reported_s = time.monotonic()

    def on_block(done: int, total: int) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= _PROGRESS_INTERVAL_S:
            reported_s = now_s
            left_s = (now_s - start_s) * (total - done) / done
            report(f"packed {done:,} of {count_text(total, 'document')}, {left_s:.0f} s left")

    return on_block
