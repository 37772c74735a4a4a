"""`megatrain data pictures`: index shards of pictures; verify, serve and sample them."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.argument_types import Verbs, add_json, utf8_path, whole_number
from megatrain.commands.data.arguments import add_force
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import DataError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.data.pictures.picture_format import BAD_PICTURES, DECODERS, MAX_PIXELS, PictureFormat
from megatrain.formatting import count_text
from megatrain.programs.stop_signals import orderly_end

if TYPE_CHECKING:
    from megatrain.data.pictures.picture_source import Producers
    from megatrain.peers.link import PeerAddress

_SHARDS = "a directory of WebDataset shards (*.tar)"


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "pictures", help="index shards of pictures; verify, serve and sample them", allow_abbrev=False
    )
    steps = parser.add_subparsers(dest="pictures_verb", required=True, metavar="SUBCOMMAND")
    _add_index(steps)
    _add_verify(steps)
    _add_serve(steps)
    _add_sample(steps)


def _add_index(steps: Verbs) -> None:
    parser = steps.add_parser("index", help="number the samples of all shards in a directory", allow_abbrev=False)
    parser.add_argument("directory", type=utf8_path, metavar="DIR", help=_SHARDS)
    parser.add_argument("--allow-cut", action="store_true", help="index what is left of a shard that is cut off")
    add_force(parser, "an index")
    add_json(parser)
    parser.set_defaults(run_verb=run_index)


def _add_verify(steps: Verbs) -> None:
    parser = steps.add_parser(
        "verify", help="read all shards, and name each sample that cannot be used", allow_abbrev=False
    )
    parser.add_argument("directory", type=utf8_path, metavar="DIR", help=_SHARDS)
    _add_max_pixels(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_verify)


def _add_serve(steps: Verbs) -> None:
    parser = steps.add_parser(
        "serve", help="run a producer of pictures for programs on other hosts, until it is stopped", allow_abbrev=False
    )
    parser.add_argument(
        "directories", type=utf8_path, nargs="+", metavar="DIR", help=f"{_SHARDS} with an index; may be several"
    )
    parser.add_argument("--listen", type=_address, required=True, metavar="HOST:PORT",
                        help="the address of this host at which others reach it")  # fmt: skip
    _add_secret(parser, is_required=True)
    _add_decoding(parser)
    parser.set_defaults(run_verb=run_serve)


def _add_sample(steps: Verbs) -> None:
    parser = steps.add_parser("sample", help="prepare pictures as a run does, and describe them", allow_abbrev=False)
    parser.add_argument("directory", type=utf8_path, metavar="DIR", help=_SHARDS)
    parser.add_argument("--size", type=whole_number(1), default=224, metavar="PIXELS",
                        help="side of the square to which each picture is resized (default %(default)s)")  # fmt: skip
    parser.add_argument("--patch", type=whole_number(1), default=14, metavar="PIXELS",
                        help="side of a patch (default %(default)s)")  # fmt: skip
    parser.add_argument("--first", type=whole_number(0), default=0, metavar="K", help="number of the first sample")
    parser.add_argument("--count", type=whole_number(1), default=3, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--bad-pictures", choices=BAD_PICTURES, default=BAD_PICTURES[0],
                        help="what happens to a picture that cannot be used (default %(default)s)")  # fmt: skip
    parser.add_argument("--producers", type=whole_number(1, 64), default=1, metavar="N",
                        help="producers to start on this host (default %(default)s)")  # fmt: skip
    parser.add_argument("--at", type=_address, action="append", default=[], metavar="HOST:PORT",
                        help="ask this running producer instead; may be repeated")  # fmt: skip
    _add_secret(parser, is_required=False)
    _add_max_pixels(parser)
    _add_decoding(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_sample, usage_error=parser.error)


def _add_max_pixels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-pixels", type=whole_number(1), default=MAX_PIXELS, metavar="N",
                        help="refuse pictures with more pixels (default %(default)s)")  # fmt: skip


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decoder", choices=DECODERS, default=DECODERS[0],
                        help="what decodes; dali-mixed: DALI on a GPU (default %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=whole_number(1, 1024), default=1, metavar="N",
                        help="threads of each producer that decode (default %(default)s)")  # fmt: skip


def _add_secret(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    parser.add_argument("--secret", type=utf8_path, required=is_required, metavar="FILE",
                        help="32 random bytes, which both sides have; only its owner may read the file")  # fmt: skip


def _address(text: str) -> PeerAddress:
    from megatrain.peers.link import PeerAddress

    try:
        return PeerAddress.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT") from None


def run_index(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.pictures.picture_index import build_index

    with orderly_end():
        index = build_index(args.directory, is_forced=args.force, allows_cut=args.allow_cut)
    if args.is_json:
        shards = [asdict(shard) for shard in index.shards]
        print_json({"index": str(index.path), "digest": index.digest, "samples": index.num_samples, "shards": shards})
        return ExitCode.OK
    shards_text = count_text(len(index.shards), "shard")
    print_lines([f"{index.path}: {count_text(index.num_samples, 'sample')} of {shards_text}"])
    for shard in index.shards:
        lacking = {"captions without a picture": shard.num_without_picture,
                   "pictures without a caption": shard.num_without_caption}  # fmt: skip
        notes = [f"{what}: {count:,}" for what, count in lacking.items() if count] + ([shard.cut] if shard.cut else [])
        if notes:
            print_note(f"{index.directory / shard.name}: {'; '.join(notes)}")
    return ExitCode.OK


def run_verify(args: argparse.Namespace) -> int:
    """Return ExitCode.DATA if a problem was found, else OK. Raises: DataError if there is nothing to verify."""
    from megatrain.data.pictures.picture_verification import verify_pictures

    problems = list(verify_pictures(args.directory, args.max_pixels))
    if args.is_json:
        print_json({"is_sound": not problems, "problems": [asdict(problem) for problem in problems]})
    else:
        print_lines([*map(str, problems), f"{args.directory}: {'DAMAGED' if problems else 'OK'}"])
    return ExitCode.DATA if problems else ExitCode.OK


def run_serve(args: argparse.Namespace) -> int:
    """Serve until the program is stopped. Raises: DataError, CommunicationError."""
    from megatrain.data.pictures.picture_index import PictureIndex
    from megatrain.data.pictures.producer_secret import read_secret
    from megatrain.data.pictures.producers import PictureProducers, producer_command
    from megatrain.peers.server import listen

    num_samples = sum(PictureIndex(directory).num_samples for directory in args.directories)
    secret = read_secret(args.secret)
    command = producer_command(args.directories, args.decoder, args.threads)
    with orderly_end(), _log_directory() as logs:
        listeners = [listen(args.listen.host, args.listen.port)]
        with PictureProducers(command, listeners, secret, logs, print_note) as producers:
            served = ", ".join(map(str, args.directories))
            print_lines([f"serves {num_samples:,} samples of {served} at {args.listen}"])
            producers.wait()
            raise DataError(producers.problem())


def run_sample(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.pictures.picture_index import PictureIndex
    from megatrain.data.pictures.picture_source import PictureSource

    if bool(args.at) != bool(args.secret):
        args.usage_error("--at and --secret belong together")
    picture_format = PictureFormat(args.size, args.patch, args.max_pixels)
    index = PictureIndex(args.directory)
    numbers = range(args.first, min(args.first + args.count, index.num_samples))
    if not numbers:
        raise DataError(f"{index.path}: has {count_text(index.num_samples, 'sample')}, and --first is {args.first}")
    with (
        orderly_end(),
        _producers(args) as producers,
        PictureSource(index.digest, picture_format, producers, args.bad_pictures) as source,
    ):
        pictures = source.patches(numbers)
    bad = {picture.number: str(picture) for picture in pictures.bad}
    found = [
        {
            "number": number,
            "caption": caption,
            "sha256": hashlib.sha256(patches_PV).hexdigest(),
            "mean": round(float(patches_PV.mean()), 3),
            "problem": bad.get(number, ""),
        }
        for number, caption, patches_PV in zip(numbers, pictures.captions, pictures.patches_NPV, strict=True)
    ]
    if args.is_json:
        shape = [picture_format.num_patches, picture_format.patch_values]
        print_json({"directory": str(args.directory), "shape": shape, "samples": found})
        return ExitCode.OK
    print_lines(_sample_lines(found))
    return ExitCode.OK


def _sample_lines(found: Sequence[dict[str, object]]) -> list[str]:
    return [
        f"{sample['number']}: replaced: {sample['problem']}" if sample["problem"]
        else f"{sample['number']}: mean {sample['mean']}, SHA-256 {str(sample['sha256'])[:12]}...: {sample['caption']}"
        for sample in found
    ]  # fmt: skip


@contextmanager
def _producers(args: argparse.Namespace) -> Iterator[Producers]:
    """Yield the producers that the arguments name, or new ones on this host."""
    from megatrain.data.pictures.picture_source import Producers
    from megatrain.data.pictures.producer_secret import read_secret
    from megatrain.data.pictures.producers import local_producers, producer_command

    if args.at:
        yield Producers(args.at, read_secret(args.secret))
        return
    command = producer_command([args.directory], args.decoder, args.threads)
    with (
        _log_directory() as logs,
        local_producers(command, args.producers, logs, print_note) as local,
    ):
        yield Producers(local.addresses, local.secret, local.problem, local.failure)


@contextmanager
def _log_directory() -> Iterator[Path]:
    """Yield a directory for the logs of producers. It is removed, unless an error of this program may refer to it."""
    path = Path(tempfile.mkdtemp(prefix="megatrain-pictures-"))
    is_kept = False
    try:
        yield path
    except MegatrainError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(path, ignore_errors=True)
