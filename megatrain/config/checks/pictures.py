"""Rules of pictures: the encoder's keys in [model], and what else of a run they restrict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.data import DataConfig, DataSourceConfig
from megatrain.config.model import ModelConfig
from megatrain.config.options import Value, options_of
from megatrain.config.pictures import encoder_of
from megatrain.config.problem import Problem, divisors, multiples_around, nearest
from megatrain.config.toml_text import setting, value_text
from megatrain.formatting import alternatives

SMALLEST_DRAWN = 24
"""The least width of a drawn picture, in pixels."""
_SIZE, _PATCH, _TP, _DATA = "model.picture_size", "model.patch_size", "parallel.tp_size", "data.pictures"
_OF_PICTURES = ("patch_size", "encoder_hidden_size", "encoder_num_layers", "encoder_num_heads", "encoder_ffn_size")

_EXCLUDED: Mapping[str, str] = {
    "tokenizer": "captions have a vocabulary of their own",
    "packing": "a caption is a sample",
    "loader": "the loader of a host delivers no pictures",
}
"""Keys of [data] that must keep their defaults beside pictures, and why."""


def picture_problems(context: Context) -> Iterator[Problem]:
    """Yield why pictures cannot be encoded, and which keys do nothing without them."""
    model = context.config.model
    if not context.are_known(_SIZE, _PATCH):
        return
    yield from _data_problems(context.config)
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


def _data_problems(config: Config) -> Iterator[Problem]:
    """Yield which other keys of the data cannot be used with pictures, and pictures that no model takes."""
    sections = {f"{name}.pictures": one for name, one in config.sections_of("data_source").items() if one.has_pictures}
    keys = [_DATA] * (config.data.pictures != "none") + list(sections)
    if not keys:
        return
    yield from _source_problems(config, sections)
    key, model, data = keys[0], config.model, config.data
    found = f'{key}="drawn"'
    if not model.has_pictures:
        yield Problem((key, _SIZE), f'{found} does nothing with {_SIZE}=0; set picture_size, or use pictures="none"')
    if model.has_pictures and model.picture_size < SMALLEST_DRAWN:
        yield Problem(
            (key, _SIZE),
            f"{found} needs {_SIZE} of at least {SMALLEST_DRAWN}, found {model.picture_size}: in smaller pictures the "
            f"shapes look alike; use {SMALLEST_DRAWN} or more",
        )
    for name, reason in _EXCLUDED.items():
        value, default = getattr(data, name), options_of(DataConfig)[name].default
        if value != default:
            yield _excluded(f"data.{name}", value, key, f"{reason}; use {name}={value_text(default)}")
    if data.balance == "file":
        yield _excluded("data.balance", "file", key, 'captions have no file of costs; use balance="cost" or "none"')


def _source_problems(config: Config, sections: Mapping[str, DataSourceConfig]) -> Iterator[Problem]:
    """Yield which sources cannot be used beside each other. sections: those with pictures, by their key."""
    if config.data.train:
        hint = f'the text is the captions; use train="", and a [[data_source]] for {value_text(config.data.train)}'
        yield _excluded("data.train", config.data.train, next(iter(sections), _DATA), hint)
    if config.data.pictures != "none":
        for section, values in config.sections_of("data_source").items():
            if values.is_set:
                key = f"{section}.{'path' if values.path else 'pictures'}"
                value = values.path or values.pictures
                hint = 'it names all samples; use pictures="none", and a [[data_source]] with pictures="drawn"'
                yield _excluded(key, value, _DATA, hint)
    for key, values in sections.items():
        if values.path:
            hint = "the text is the captions; use another [[data_source]] for one of them"
            yield _excluded(key.replace(".pictures", ".path"), values.path, key, hint)
    first = next(iter(sections), "")
    for key in list(sections)[1:]:
        yield Problem(
            (key, first),
            f'{key}="drawn" has the samples of {first}="drawn"; use one source with the sum of their weights',
        )


def _excluded(key: str, value: Value, pictures_key: str, reason: str) -> Problem:
    return Problem((key, pictures_key), f'{setting(key, value)} cannot be used with {pictures_key}="drawn": {reason}')


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
