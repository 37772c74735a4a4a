"""The manifest: reading returns what was written, and an invalid manifest is refused with the file and the field."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import make_manifest


def test_manifest_round_trip() -> None:
    manifest = make_manifest(config={"profile": {"ranks": [0, 1]}})
    assert Manifest.from_json(manifest.to_json(), "m") == manifest
    assert Manifest.from_json(manifest.to_json().encode(), "m") == manifest
    assert json.loads(manifest.to_json())["schema_version"] == 7


DIGEST = "sha256:" + "0a" * 32


def corrupted(path: str, value: Any) -> str:
    """Return the manifest with the field at a dotted path changed, or removed with `...`."""
    raw = json.loads(make_manifest().to_json())
    *parents, last = path.split("/")
    place = raw
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(raw)


def with_file(name: str, entry: Any) -> str:
    return corrupted("files", {name: entry})


WRONG: list[tuple[str | bytes, str]] = [
    ("{", r"m\.json: not JSON"),
    ("[" * 100_000, r"m\.json: not JSON"),
    ("[]", r"m\.json: a list, expected a JSON object"),
    (b"\xff\xfe", r"m\.json: not UTF-8 \(invalid start byte\); the checkpoint is damaged"),
    (
        corrupted("schema_version", 1),
        r"m\.json: schema_version=1, this program reads 7; use the program that wrote it",
    ),
    (corrupted("schema_version", ...), r"m\.json: schema_version=None, this program reads 7"),
    (corrupted("schema_version", True), r"schema_version=True"),
    (corrupted("step", ...), r"m\.json: step is missing; expected an integer of at least 0"),
    (corrupted("step", -1), r"step=-1; expected an integer"),
    (corrupted("step", True), r"step=True; expected an integer"),
    (corrupted("consumed_tokens", 1.5), r"consumed_tokens=1\.5; expected an integer"),
    (corrupted("job", None), r"job=None; expected a string"),
    (corrupted("config", []), r"config=\[\]; expected an object"),
    (corrupted("mesh", 3), r"mesh=3; expected an object"),
    (corrupted("mesh/tp_size", 0), r"mesh\.tp_size=0; expected an integer of at least 1"),
    (corrupted("mesh/xp_size", 1), r"mesh\.xp_size=1; no such field in schema version 7"),
    (corrupted("versions/torch", ...), r"versions\.torch is missing; expected a string"),
    (corrupted("loss", 1), r"loss=1; no such field in schema version 7"),
    (corrupted("step", 2**63), r"step=9223372036854775808; expected an integer of at least 0 and below 2\^63"),
    (corrupted("step", [0] * 1000), r"step=\[0, 0, .{0,100}\.\.\.; expected an integer"),
    (corrupted("has_optimizer", 1), r"has_optimizer=1; expected true or false"),
    (corrupted("written_unix_s", "now"), r"written_unix_s='now'; expected a number of seconds"),
    (corrupted("written_unix_s", True), r"written_unix_s=True; expected a number of seconds"),
    (corrupted("written_unix_s", -0.5), r"written_unix_s=-0\.5; expected a number of seconds"),
    (corrupted("written_unix_s", float("nan")), r"written_unix_s=nan; expected a number of seconds"),
    (corrupted("written_unix_s", float("inf")), r"written_unix_s=inf; expected a number of seconds"),
    (corrupted("written_unix_s", 10**400), r"written_unix_s=10+\.\.\.; expected a number of seconds"),
    (corrupted("files/a.bin", 10), r"files\.a\.bin=10; expected an object"),
    (corrupted("files/a.bin", {"size": 1}), r"files\.a\.bin\.digest is missing; expected a string"),
    (corrupted("files/a.bin", {"digest": DIGEST}), r"files\.a\.bin\.size is missing; expected an integer"),
    (corrupted("files/a.bin", {"size": -1, "digest": DIGEST}), r"files\.a\.bin\.size=-1; expected an integer"),
    (corrupted("files/a.bin", {"size": 1, "digest": DIGEST, "crc": 1}), r"files\.a\.bin\.crc=1; no such field"),
    (with_file("a", {"size": 1, "digest": "md5:" + "0" * 64}), r"files\.a\.digest='md5:0+'; expected sha256: or"),
    (with_file("a", {"size": 1, "digest": DIGEST + "0"}), r"files\.a\.digest='sha256:[0a]+'; expected sha256: or"),
    (
        with_file("a", {"size": 1, "digest": DIGEST.upper()}),
        r"files\.a\.digest='SHA256:[0A]+'; expected sha256: or",
    ),
    *(
        (with_file(name, {"size": 1, "digest": DIGEST}), "expected a path inside the checkpoint directory")
        for name in ("", "/x", "../x", "a/../../x", "a/..", "./x", "a//b", "a\0", "\ud800")
    ),
]


def test_a_wrong_manifest_names_file_and_field() -> None:
    for text, message in WRONG:
        with pytest.raises(CheckpointError, match=message):
            raise AssertionError(f"accepted: {Manifest.from_json(text, 'm.json')}; expected: {message}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [field.name for field in dataclasses.fields(Manifest)]


@pytest.mark.slow
@settings(max_examples=150, derandomize=True)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_random_fields_are_accepted_or_refused_by_name(changes: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(make_manifest().to_json()), **changes})
    message = "m.json"
    try:
        Manifest.from_json(text, "m.json")
    except CheckpointError as error:
        message = str(error)
    assert "m.json" in message


STREAM = SampleStream(
    seed=7,
    sources=(StreamSource("web", 5000, "d" * 32), StreamSource("code", 3000)),
    stages=(MixtureStage(0, (1,), 16), MixtureStage(640, (3, 1), 16)),
    skipped=((80, 96), (120, 128)),
    tokenizer_digest="e" * 64,
)


def test_sample_stream_round_trip() -> None:
    manifest = make_manifest(data=STREAM)
    assert Manifest.from_json(manifest.to_json(), "m.json").data == STREAM
    assert SampleStream.from_dict(json.loads(json.dumps(STREAM.to_dict()))) == STREAM


def test_stages_of_no_sample_stream_are_refused() -> None:
    raw = json.loads(make_manifest(data=STREAM).to_json())
    first = {"first_sample": 0, "seq_len": 4}
    for stages, message in [
        ([{"first_sample": 5, "seq_len": 4, "weights": [1]}], r"data\.stages.*expected a first stage at sample 0"),
        ([], r"data\.stages=\[\]; expected a first stage at sample 0"),
        ([{"first_sample": 0, "seq_len": 4, "weights": [1]}] * 2, r"data\.stages.*in ascending order"),
        ([{**first, "weights": []}], r"data\.stages\[0\]\.weights=\[\]; expected 1 to 2 weights"),
        (
            [{"first_sample": 0, "seq_len": 4, "weights": [0, 0]}],
            r"data\.stages\[0\]\.weights.*at least one of them above 0",
        ),
        ([{**first, "weights": [1.5]}], r"data\.stages\[0\]\.weights.*expected a list of integers"),
        ([7], r"data\.stages=\[7\]; expected a list of objects"),
    ]:
        raw["data"]["stages"] = stages
        with pytest.raises(CheckpointError, match=message):
            Manifest.from_json(json.dumps(raw), "m.json")
