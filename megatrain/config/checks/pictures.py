"""Rules of pictures: the encoder's keys in [model], and what else of a run they restrict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.data import DataConfig
from megatrain.config.model import ModelConfig
from megatrain.config.options import Value, options_of
from megatrain.config.picture_files import PicturesConfig
from megatrain.config.picture_share import mixes_pictures
from megatrain.config.pictures import encoder_of
from megatrain.config.problem import Problem, divisors, multiples_around, nearest
from megatrain.config.toml_text import setting, value_text
from megatrain.formatting import alternatives

SMALLEST_DRAWN = 24
"""The least width of a drawn picture, in pixels."""
_SIZE, _PATCH, _TP, _DATA = "model.picture_size", "model.patch_size", "parallel.tp_size", "data.pictures"
_SHARDS, _ADDRESSES = "pictures.shards", "pictures.addresses"
_OF_PICTURES = ("patch_size", "encoder_hidden_size", "encoder_num_layers", "encoder_num_heads", "encoder_ffn_size")

_EXCLUDED: Mapping[str, str] = {"packing": "a caption is a sample"}
"""Keys of [data] that must keep their defaults beside pictures, and why."""
_EXCLUDED_BY_DRAWN: Mapping[str, str] = {**_EXCLUDED, "tokenizer": "captions have a vocabulary of their own"}
_OF_STARTED = ("decoder", "producers", "threads")
"""Keys of the producers that a run starts itself."""


def picture_problems(context: Context) -> Iterator[Problem]:
    """Yield why pictures cannot be encoded, and which keys do nothing without them."""
    model = context.config.model
    if not context.are_known(_SIZE, _PATCH):
        return
    yield from _data_problems(context.config)
    yield from _shard_problems(context.config)
    yield from _held_out_problems(context.config)
    if not model.has_pictures:
        yield from _unused_problems(model)
    elif model.picture_size % model.patch_size:
        yield Problem(
            (_SIZE, _PATCH),
            f"{_PATCH}={model.patch_size} must divide {_SIZE}={model.picture_size}; use patch_size "
            f"{alternatives(nearest(divisors(model.picture_size), model.patch_size))}, or picture_size "
            f"{alternatives(multiples_around(model.patch_size, model.picture_size))}",
        )
    else:
        yield from _head_problems(model)
        yield from _length_problems(context)
        yield from _tensor_parallel_problems(context)


def _unused_problems(model: ModelConfig) -> Iterator[Problem]:
    for name in _OF_PICTURES:
        value, default = getattr(model, name), options_of(ModelConfig)[name].default
        if value != default:
            yield Problem(
                (f"model.{name}", _SIZE),
                f"model.{name}={value_text(value)} does nothing with {_SIZE}=0; set picture_size, or remove {name}",
            )


def _kinds(config: Config) -> dict[str, str]:
    """Return the kind of the pictures by the key that names it."""
    kinds = {_DATA: config.data.pictures}
    kinds |= {f"{name}.pictures": source.pictures for name, source in config.sections_of("data_source").items()}
    return {key: kind for key, kind in kinds.items() if kind != "none"}


def _data_problems(config: Config) -> Iterator[Problem]:
    """Yield which other keys of the data cannot be used with pictures, and pictures that no model takes."""
    kinds = _kinds(config)
    if not kinds:
        return
    yield from _source_problems(config, kinds)
    (key, kind), model, data = next(iter(kinds.items())), config.model, config.data
    found = f"{key}={value_text(kind)}"
    if not model.has_pictures:
        yield Problem((key, _SIZE), f'{found} does nothing with {_SIZE}=0; set picture_size, or use pictures="none"')
    if kind == "drawn" and model.has_pictures and model.picture_size < SMALLEST_DRAWN:
        yield Problem(
            (key, _SIZE),
            f"{found} needs {_SIZE} of at least {SMALLEST_DRAWN}, found {model.picture_size}: in smaller pictures the "
            f"shapes look alike; use {SMALLEST_DRAWN} or more",
        )
    for name, reason in (_EXCLUDED_BY_DRAWN if kind == "drawn" else _EXCLUDED).items():
        value, default = getattr(data, name), options_of(DataConfig)[name].default
        if value != default:
            yield _excluded(f"data.{name}", value, (key, kind), f"{reason}; use {name}={value_text(default)}")
    if data.balance == "file":
        reason = 'captions have no file of costs; use balance="cost" or "none"'
        yield _excluded("data.balance", data.balance, (key, kind), reason)
    if data.balance == "cost" and data.has_document_mask and not mixes_pictures(config):
        yield _excluded("data.balance", data.balance, (key, kind), 'all samples cost the same; use balance="none"')


def _source_problems(config: Config, kinds: Mapping[str, str]) -> Iterator[Problem]:
    """Yield which sources cannot be used beside each other. kinds: from `_kinds`."""
    first, *others = kinds.items()
    train = config.data.train
    if train:
        own = f', {_DATA}="none", and another [[data_source]] for the pictures' if first[0] == _DATA else ""
        reason = f'the text is the captions; use data.train="", a [[data_source]] for {value_text(train)}{own}'
        yield _excluded("data.train", train, first, reason)
    for section, source in config.sections_of("data_source").items():
        if source.path and source.has_pictures:
            reason = "the text is the captions; use another [[data_source]] for one of them"
            yield _excluded(f"{section}.path", source.path, (f"{section}.pictures", source.pictures), reason)
        elif source.path and first[0] == _DATA:
            reason = f'{_DATA} covers all samples; use {_DATA}="none", and a [[data_source]] with pictures="{first[1]}"'
            yield _excluded(f"{section}.path", source.path, first, reason)
    for key, kind in others:
        reason = "only one source may have pictures; remove one of them"
        yield _excluded(key, kind, first, reason)


def _shard_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with pictures from shards, and which keys of [pictures] do nothing."""
    pictures, data = config.pictures, config.data
    changed = {
        name: value
        for name, option in options_of(PicturesConfig).items()
        if (value := getattr(pictures, name)) != option.default
    }
    key = next((key for key, kind in _kinds(config).items() if kind == "shards"), None)
    if key is None:
        for name, value in changed.items():
            unused = f"pictures.{name}"
            yield Problem(
                (unused, _DATA),
                f"{setting(unused, value)} does nothing with {_DATA}={value_text(data.pictures)}; use "
                f'{_DATA}="shards" or a [[data_source]] with pictures="shards", or remove {name}',
            )
        return
    if "://" in pictures.shards:
        yield Problem(
            (_SHARDS,),
            f"{setting(_SHARDS, pictures.shards)} is a URL; copy shards and index to a directory of each host, or use "
            f"{_ADDRESSES} of producers that have them",
        )
    if not pictures.shards:
        yield Problem(
            (_SHARDS, key),
            f'{key}="shards" needs {_SHARDS}: the directory of the shards and their index, which `megatrain data '
            "pictures index` makes",
        )
    if not data.tokenizer:
        yield Problem(
            ("data.tokenizer", key),
            f'{key}="shards" needs data.tokenizer, the tokenizer of the captions: the path of a tokenizer.json or of '
            "a NAME.model",
        )
    yield from _producer_problems(pictures, changed)


def _held_out_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with sets of held-out pictures: they need training pictures of the same kind."""
    kinds, model = _kinds(config), config.model
    for section, one in config.sections_of("validation_set").items():
        if not one.has_pictures:
            continue
        key, path = f"{section}.pictures", f"{section}.path"
        found = setting(key, one.pictures)
        if one.pictures not in kinds.values():
            yield Problem(
                (key, _DATA),
                f"{found} needs training samples with pictures of the same kind; set "
                f'{_DATA}={value_text(one.pictures)} or a [[data_source]] with it, or use pictures="none"',
            )
        if config.data.validation and not one.path:
            text = f"{found} and {setting('data.validation', config.data.validation)} both name held-out data"
            yield Problem((key, "data.validation"), f"{text}; add a [[validation_set]] for data.validation")
        if one.pictures == "drawn" and one.path:
            yield Problem((path, key), f"{setting(path, one.path)} does nothing with {found}; remove path")
        if one.pictures == "shards" and (not one.path or "://" in one.path):
            yield Problem(
                (path, key),
                f"{found} needs {path}: a directory of shards and their index on each host, which `megatrain data "
                f"pictures index` makes; found {value_text(one.path)}",
            )
        if model.has_pictures and config.evaluation_seq_len <= model.num_patches:
            yield Problem(
                ("evaluation.seq_len", key),
                f"held-out samples have {config.evaluation_seq_len} tokens, and the patches of a picture take the "
                f"first {model.num_patches}; use a larger evaluation.seq_len",
            )


def _producer_problems(pictures: PicturesConfig, changed: Mapping[str, Value]) -> Iterator[Problem]:
    """Yield what is wrong with the producers. changed: the keys of [pictures] whose values are not the defaults."""
    try:
        has_addresses = bool(pictures.peers)
    except ValueError as error:
        yield Problem(
            (_ADDRESSES,),
            f"{setting(_ADDRESSES, pictures.addresses)}: {str(error)!r} is not HOST:PORT; separate several by commas",
        )
        return
    if has_addresses != bool(pictures.secret):
        yield Problem(
            (_ADDRESSES, "pictures.secret"),
            f"{setting(_ADDRESSES, pictures.addresses)} and {setting('pictures.secret', pictures.secret)} belong "
            "together: producers answer only programs that have their secret; set both, or neither",
        )
    for name in _OF_STARTED if has_addresses else ():
        if name in changed:
            key = f"pictures.{name}"
            yield Problem(
                (key, _ADDRESSES),
                f"{setting(key, changed[name])} does nothing with {_ADDRESSES}: no producers are started; remove one "
                "of them",
            )


def _excluded(key: str, value: Value, pictures: tuple[str, str], reason: str) -> Problem:
    """Return the problem of a key that cannot be used beside pictures.

    pictures: the key that names the pictures, and their kind.
    """
    pictures_key, kind = pictures
    found = f"{pictures_key}={value_text(kind)}"
    return Problem((key, pictures_key), f"{setting(key, value)} cannot be used with {found}: {reason}")


def _head_problems(model: ModelConfig) -> Iterator[Problem]:
    encoder = encoder_of(model)
    if encoder.hidden_size % encoder.num_heads:
        fitting = alternatives(nearest(divisors(encoder.hidden_size), encoder.num_heads))
        yield Problem(
            ("model.encoder_num_heads", "model.encoder_hidden_size", "model.num_heads", "model.hidden_size"),
            f"the encoder's heads, model.encoder_num_heads={model.encoder_num_heads} (0: model.num_heads="
            f"{model.num_heads}), must divide its hidden size {encoder.hidden_size}; use {fitting}",
        )


def _length_problems(context: Context) -> Iterator[Problem]:
    config = context.config
    shortest, num_patches = min(config.seq_lens), config.model.num_patches
    if shortest <= num_patches and context.are_known("model.seq_len", "data.seq_len"):
        yield Problem(
            (_SIZE, _PATCH, "model.seq_len", "data.seq_len"),
            f"a sample has {shortest} tokens, and the patches of its picture take the first {num_patches} "
            f"(({_SIZE}={config.model.picture_size} / {_PATCH}={config.model.patch_size}) squared); use longer "
            "samples, smaller pictures or larger patches",
        )


def _tensor_parallel_problems(context: Context) -> Iterator[Problem]:
    """Yield what tensor-parallel ranks cannot divide among them: heads and units of the encoder, and patches."""
    model, tp_size = context.config.model, context.config.parallel.tp_size
    encoder = encoder_of(model)
    sizes = {
        f"the {model.num_patches} patches of a picture": (model.num_patches, (_SIZE, _PATCH)),
        f"the {encoder.num_heads} heads of the encoder": (
            encoder.num_heads,
            ("model.encoder_num_heads", "model.num_heads"),
        ),
        f"the {encoder.resolved_ffn_size} feed-forward units of the encoder": (
            encoder.resolved_ffn_size,
            ("model.encoder_ffn_size", "model.encoder_hidden_size", "model.hidden_size"),
        ),
        f"model.hidden_size={model.hidden_size}, the inner width of the projector": (
            model.hidden_size,
            ("model.hidden_size",),
        ),
    }
    for text, (size, keys) in sizes.items():
        if size % tp_size:
            fitting = alternatives(nearest(divisors(size), tp_size))
            yield Problem((_TP, *keys), f"{_TP}={tp_size} must divide {text}; use {fitting}")
