"""`megatrain ckpt inspect CHECKPOINT`: show what a checkpoint contains, from its manifest and index."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatrain.checkpoint.checked_files import find_stored
from megatrain.checkpoint.survey import stored_bytes
from megatrain.checkpoint_format.checkpoint_files import pin_reason, read_manifest
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.stored_tensors import EMA, StoredTensor, StoredTensors
from megatrain.commands.argument_types import Verbs, add_json
from megatrain.commands.checkpoint_choice import add_checkpoint, chosen_checkpoint
from megatrain.commands.printing import facts, print_json, print_lines, table
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import age_text, bytes_text, count_text, time_text

MODEL_PREFIX = "model."
EMA_PREFIX = f"optimizer.{EMA}."


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("inspect", help="show what a checkpoint contains, without loading it", allow_abbrev=False)
    add_checkpoint(parser)
    parser.add_argument("--tensors", action="store_true", help="also list every tensor with shape and type")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Print the contents. Raises: CheckpointError when manifest or index is damaged."""
    checkpoint = chosen_checkpoint(args)
    manifest = read_manifest(checkpoint)
    stored = find_stored(checkpoint, manifest)
    document = _document(checkpoint, manifest, stored)
    if args.is_json:
        listed = [_tensor(tensor) for tensor in stored.tensors.values()]
        print_json({**document, **({"tensors": listed} if args.tensors else {})})
        return int(ExitCode.OK)
    lines = facts(_facts(manifest, document))
    if document["sources"]:
        lines += ["", *table(_source_rows(document["sources"]), left=(0,))]
    if args.tensors:
        rows = [
            (tensor.key, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", bytes_text(tensor.num_bytes),
             count_text(len(tensor.items), "box", "boxes"))
            for tensor in stored.tensors.values()
        ]  # fmt: skip
        lines += ["", *table([("tensor", "type", "shape", "size", "in"), *rows], left=(0, 1, 2))]
    print_lines(lines)
    return int(ExitCode.OK)


def _document(checkpoint: Location, manifest: Manifest, stored: StoredTensors) -> dict[str, Any]:
    model = [tensor for tensor in stored.tensors.values() if tensor.key.startswith(MODEL_PREFIX)]
    data_files = stored.ranges_by_file()
    return {
        "place": str(checkpoint),
        "job": manifest.job,
        "branch": manifest.branch,
        "round": manifest.round,
        "step": manifest.step,
        "consumed_samples": manifest.consumed_samples,
        "consumed_tokens": manifest.consumed_tokens,
        "num_updates": manifest.num_updates,
        "num_skipped": manifest.num_skipped,
        "written_unix_s": manifest.written_unix_s,
        "has_optimizer": manifest.has_optimizer,
        "has_ema": any(key.startswith(EMA_PREFIX) for key in stored.tensors),
        "pin_reason": pin_reason(checkpoint),
        "data": asdict(manifest.data),
        "sources": _sources(manifest),
        "mesh": manifest.mesh.to_dict(),
        "config_hash": manifest.config_hash,
        "config": dict(manifest.config),
        "versions": asdict(manifest.versions),
        "num_parameters": sum(tensor.numel for tensor in model),
        "num_tensors": len(stored.tensors),
        "num_items": sum(len(tensor.items) for tensor in stored.tensors.values()),
        "num_data_files": len(data_files),
        "num_files": len(manifest.files),
        "num_bytes": stored_bytes(manifest),
    }


def _sources(manifest: Manifest) -> list[dict[str, Any]]:
    """Return each source of the training data with its current weight, and how many of its samples the run has read.

    Samples that a rollback skipped do not count.
    """
    stream, cursor = manifest.data, manifest.consumed_samples
    if not stream.sources:
        return []  # imported weights
    if len(stream.sources) == 1:  # without numpy, which `ckpt` otherwise never loads
        weights: Sequence[int] = [1]

        def counts(sample: int) -> list[int]:
            return [sample]
    else:
        from megatrain.data.mixture import Mixture

        mixture = Mixture.of(stream)
        weights = mixture.weights(cursor)

        def counts(sample: int) -> list[int]:
            found: list[int] = mixture.counts(sample).tolist()
            return found

    left_out = [(counts(first), counts(min(end, cursor))) for first, end in stream.skipped if first < cursor]
    return [
        {
            **asdict(source),
            "num_samples": count - sum(ends[number] - firsts[number] for firsts, ends in left_out),
            "weight": weight,
        }
        for number, (source, count, weight) in enumerate(zip(stream.sources, counts(cursor), weights, strict=True))
    ]


def _source_rows(sources: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    total = sum(source["weight"] for source in sources)
    rows = [
        (
            source["name"] or "-",
            f"{source['num_tokens']:,}",
            f"{source['num_samples']:,}",
            f"{source['weight'] / total:.2%}",
        )
        for source in sources
    ]
    return [("source", "tokens", "samples read", "share from here on"), *rows]


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {"key": tensor.key, "dtype": tensor.dtype, "shape": list(tensor.shape), "num_bytes": tensor.num_bytes,
            "num_items": len(tensor.items)}  # fmt: skip


def _facts(manifest: Manifest, document: dict[str, Any]) -> list[tuple[str, str]]:
    mesh, versions = manifest.mesh, manifest.versions
    chunks = f", {mesh.num_chunks} chunks a stage" if mesh.num_chunks > 1 else ""
    skipped = f", {count_text(manifest.num_skipped, 'step')} skipped" if manifest.num_skipped else ""
    moments = "with the optimizer's moments" if manifest.has_optimizer else "weights only"
    moments += " and an average of the weights" if document["has_ema"] else ""
    shards = f"{document['num_items']:,} boxes of {document['num_tensors']} tensors"
    shards += f" in {count_text(document['num_data_files'], 'data file')}"
    found = [
        ("checkpoint", document["place"]),
        ("job", f"{manifest.job}, branch {manifest.branch}, round {manifest.round}"),
        ("step", f"{manifest.step} ({count_text(manifest.num_updates, 'update')}{skipped})"),
        ("tokens", f"{manifest.consumed_tokens:,} in {manifest.consumed_samples:,} samples"),
        ("written", f"{time_text(manifest.written_unix_s)} ({age_text(manifest.written_unix_s, time.time())} ago)"),
        ("parameters", f"{document['num_parameters']:,}, {moments}"),
        ("mesh", f"{mesh.layout.sizes_text}{chunks}"),
        ("shards", shards),
        ("size", f"{bytes_text(document['num_bytes'])} in {document['num_files']} files"),
        ("config hash", manifest.config_hash),
        ("written by", f"megatrain {versions.megatrain}, torch {versions.torch}, Python {versions.python}"),
    ]
    if document["pin_reason"] is not None:
        found.append(("pinned", document["pin_reason"]))
    return found
