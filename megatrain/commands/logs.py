"""`megatrain logs classify FILE`: what failed and whose fault it was, from logs.

FILE is JSON lines: objects with `id` and `log`, or with `id` and `ranks` = {rank: end of its log}. What is no file of
JSON lines is `megatrain logs classify --text FILE`: one log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatrain.contracts.errors import DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.printable import printable
from megatrain.failures.bundle import classify_bundle
from megatrain.failures.classifier import LogClassifier, classify

SUMMARY = "read logs: what failed, what to do about it, and whose fault it was"

_CHUNK_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    verbs = parser.add_subparsers(dest="logs_verb", metavar="VERB", required=True)
    classify_parser = verbs.add_parser(
        "classify", help="name label, action and culprit of logs", description=__doc__, add_help=True
    )
    classify_parser.add_argument(
        "file", metavar="FILE", help="JSON lines with id and log, or id and ranks; - for stdin"
    )
    classify_parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object a line")
    classify_parser.add_argument(
        "--text", action="store_true", dest="is_text", help="FILE is one log as it was printed, not JSON lines"
    )


def run(args: argparse.Namespace) -> int:
    """Classify the logs. Raises: DataError when the file or some of its lines cannot be read."""
    problems: list[str] = []
    with contextlib.nullcontext(sys.stdin.buffer) if args.file == "-" else _open(args.file) as file:
        answers = [_of_text(file, args.file)] if args.is_text else _of_lines(file, args.file, problems)
        for answer in answers:
            print(json.dumps(answer) if args.is_json else printable(_for_people(answer)))
    if problems:
        raise DataError("\n".join(problems))
    return int(ExitCode.OK)


def _open(name: str) -> BinaryIO:
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error


def _of_text(file: BinaryIO, name: str) -> dict[str, Any]:
    classifier = LogClassifier()
    while chunk := file.read(_CHUNK_BYTES):
        classifier.feed(chunk)
    return {"id": name, **classifier.finish().to_dict()}


def _of_lines(file: BinaryIO, name: str, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each line, and note the lines that have none."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield answer(json.loads(line))
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}:{number}: {error}")


def answer(case: object) -> dict[str, Any]:
    """Return the answer to one object. Raises: ValueError when it is not of the agreed form."""
    if not isinstance(case, dict):
        raise ValueError(f"a {type(case).__name__}, expected an object with id and log, or id and ranks")
    if "id" not in case:
        raise ValueError("no id; expected an object with id and log, or id and ranks")
    log, ranks = case.get("log"), case.get("ranks")
    if isinstance(log, str) and ranks is None:
        return {"id": case["id"], **classify(log).to_dict()}
    if log is None and isinstance(ranks, dict) and ranks and all(isinstance(tail, str) for tail in ranks.values()):
        bundle = classify_bundle(ranks)
        root = bundle.root_rank
        return {
            "id": case["id"],
            **bundle.verdict.to_dict(),
            "root_rank": int(root) if root is not None and root.isdecimal() else root,
            "reason": bundle.reason,
        }
    raise ValueError(f"id {case['id']!r}: expected either log, a string, or ranks, an object of strings by rank")


def _for_people(answer: dict[str, Any]) -> str:
    role = " (follows from another rank's failure)" if answer["cascade"] else ""
    lines = [f"{answer['id']}: {answer['label']}{role}; action {answer['action']}"]
    if answer.get("root_rank") is not None:
        lines.append(f"  began at rank {answer['root_rank']}: {answer['reason']}")
    if answer["culprit"]:
        lines.append(f"  names {answer['culprit']}")
    if answer["line"]:
        lines.append(f"  by rule {answer['rule']}: {answer['line'].strip()}")
    return "\n".join(lines)
