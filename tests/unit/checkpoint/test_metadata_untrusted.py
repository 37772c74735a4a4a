"""`.metadata` that somebody made up: it runs nothing, takes no more memory than it has bytes, and is refused."""

from __future__ import annotations

import functools
import json
import os
import pickle
import posix
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.serialization import _get_layout

from megatrain.checkpoint.metadata_unpickler import read_metadata
from megatrain.checkpoint.stored_tensors import StoredTensors
from megatrain.contracts.errors import CheckpointError
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S
from tests.helpers.work import assert_grows_linearly
from tests.unit.checkpoint.made_up_pickles import (
    FILESYSTEM,
    METADATA,
    SYSTEM,
    TOUCH,
    VALID,
    call,
    name,
    new,
    root,
    size,
    text,
    valid_metadata,
    whole,
)


def test_the_assembler_makes_what_the_reader_takes() -> None:
    assert read_metadata(whole(root()), "x") == StoredTensors({}, {})
    assert pickle.loads(whole(root())) == Metadata({}, storage_data={})


# What would run in an ordinary unpickler, or come close to it


class Reduced:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def with_payload(place: str) -> bytes:
    """Return metadata with a call of os.system in one of its fields, also those that the reader does not look at."""
    metadata, payload = valid_metadata(), Reduced(posix.system, TOUCH)
    match place:
        case "a key":
            metadata.state_dict_metadata[payload] = BytesStorageMetadata()
        case "a path":
            metadata.storage_meta.checkpoint_id = payload
        case "a list":
            metadata.state_dict_metadata["w"].chunks.append(payload)
        case _:
            vars(metadata)[place] = payload
    return pickle.dumps(metadata)


GETATTR = name("builtins", "getattr")
ESCAPES: dict[str, bytes] = {
    "os.system": pickle.dumps(Reduced(posix.system, TOUCH)),
    "os.system in protocol 0": b"cposix\nsystem\n(S'touch canary'\ntR.",
    "os.system in protocol 2": b"\x80\x02" + call(b"cposix\nsystem\n", text(TOUCH)) + b".",
    "instance": whole(b"(" + text(TOUCH) + b"iposix\nsystem\n"),
    "object": whole(b"(cposix\nsystem\n" + text(TOUCH) + b"o"),
    "eval": pickle.dumps(Reduced(eval, f"__import__('os').system('{TOUCH}')")),
    "exec": pickle.dumps(Reduced(exec, f"import os; os.system('{TOUCH}')")),
    "import": pickle.dumps(Reduced(__import__, "os")),
    "partial": pickle.dumps(functools.partial(posix.system, TOUCH)),
    "tensor": pickle.dumps(torch.ones(2)),
    "torch.load": whole(call(name("torch", "load"), text("canary"))),
    "load of an allowed module": whole(call(name("torch.serialization", "load"), text("canary"))),
    "dotted name": whole(call(name(METADATA, "os.system"), text(TOUCH))),
    "dotted name below an allowed one": whole(call(name("torch", "Size.__class__"), text(TOUCH))),
    "module of an allowed module": whole(call(name("torch.serialization.os", "system"), text(TOUCH))),
    "globals of an allowed function": whole(name("torch.serialization", "_get_layout.__globals__")),
    "module": whole(name("torch", "")),
    "name without a module": whole(name("", "eval")),
    "getattr of a module": whole(call(GETATTR, call(name("builtins", "__import__"), text("os")), text("system"))),
    "getattr of a class": whole(call(GETATTR, name(METADATA, "Metadata"), text("__subclasses__"))),
    "getattr of an enumeration": whole(
        root(b"}" + text("w") + call(GETATTR, name(METADATA, "_MEM_FORMAT_ENCODING"), text("mro")) + b"s")
    ),
    "getattr called": whole(call(call(GETATTR, GETATTR, text("__call__")), GETATTR, text("__self__"))),
    "path made of a payload": whole(call(name("pathlib", "PosixPath"), SYSTEM)),
    "state of a name": whole(name(METADATA, "Metadata") + b"}" + text("__setstate__") + GETATTR + b"sb"),
    "slots of a name": whole(name(METADATA, "Metadata") + b"N}" + text("__setstate__") + GETATTR + b"s\x86b"),
    "second state": whole(root() + b"}" + text("__setstate__") + GETATTR + b"sb"),
    "class as a field": whole(root(b"}", b"}", ("__class__", name("torch", "Size")))),
    "reduce as a field": whole(root(b"}", b"}", ("__reduce__", GETATTR))),
    "call of a made object": whole(call(root(), text(TOUCH))),
    "object of a made class": whole(root() + b")\x81"),
    "Size of a text": whole(root(b"}" + text("w") + call(name("torch", "Size"), text("123")) + b"s")),
    "keyword arguments": whole(name(METADATA, "Metadata") + b")}\x92"),
    "persistent id": whole(text("posix.system") + b"Q"),
    "persistent id in a line": whole(b"Pposix.system\n"),
    "extension": whole(b"\x82\x01"),
    "buffer": whole(b"\x97"),
    "payload that is dropped": whole(SYSTEM + b"0" + root()),
    "payload after the end": VALID + SYSTEM + b".",
    "payload below the end": whole(SYSTEM + root()),
    "payload under a mark": whole(root() + b"(" + SYSTEM),
    **{
        f"payload in {place}": with_payload(place)
        for place in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "added")
    },
    **{f"payload in {place}": with_payload(place) for place in ("a key", "a path", "a list")},
}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that payloads make where they run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "canary"


@pytest.mark.parametrize("kind", ["os.system", "os.system in protocol 0", "object", "payload after the end", "eval"])
def test_the_canary_sings_where_payloads_run(kind: str, canary: Path) -> None:
    raw = ESCAPES[kind].removeprefix(VALID)
    pickle.loads(b"\x80\x04" + raw if kind == "payload after the end" else raw)
    assert canary.exists()


@pytest.mark.parametrize("kind", list(ESCAPES))
def test_an_escape_is_refused(kind: str, canary: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^c/\.metadata: .*; (it|the metadata) is damaged or forged$"):
        read_metadata(ESCAPES[kind], "c/.metadata")
    assert not canary.exists()


def test_a_name_that_is_not_expected_is_reported() -> None:
    for raw, said in (
        (ESCAPES["os.system"], "names 'posix.system', which is not a name that checkpoint metadata uses"),
        (ESCAPES["eval"], "names 'builtins.eval', which is not a name"),
        (ESCAPES["dotted name"], f"names '{METADATA}.os.system', which is not a name"),
        (whole(name("torch", "float33")), "names 'torch.float33', which is not a name"),
        (whole(name("x" * 500, "\u00e9\n")), f"names '{'x' * 120}...', which is not a name"),
        (ESCAPES["instance"], "has the opcode INST, which no checkpoint's metadata needs"),
        (whole(b"\xff"), "opcode 0xff, which"),
    ):
        with pytest.raises(CheckpointError) as caught:
            read_metadata(raw, "x")
        assert said in str(caught.value)
        assert str(caught.value).isascii()


AUDITED = """
import json, sys
from megatrain.checkpoint.metadata_unpickler import read_metadata
from megatrain.contracts.errors import CheckpointError

files = [bytes.fromhex(line) for line in sys.stdin.read().split()]
events, results, is_reading = [], [], False

def note(event, arguments):
    if is_reading:
        events.append(event)

sys.addaudithook(note)
for raw in files:
    is_reading = True
    try:
        read_metadata(raw, "x")
        results.append("read")
    except CheckpointError:
        results.append("refused")
    finally:
        is_reading = False
print(json.dumps([events, results]))
"""


@pytest.mark.slow
def test_reading_does_nothing_that_python_could_audit(tmp_path: Path) -> None:
    files = [
        VALID,
        *ESCAPES.values(),
        *(VALID[:at] + bytes([VALID[at] ^ 1]) + VALID[at + 1 :] for at in range(len(VALID))),
    ]
    done = subprocess.run(
        [sys.executable, "-c", AUDITED],
        input="\n".join(raw.hex() for raw in files),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=DEADLINE_S,
        check=True,
    )
    events, results = json.loads(done.stdout)
    assert events == []
    assert results[: len(ESCAPES) + 1] == ["read"] + ["refused"] * len(ESCAPES)
    assert len(results) == len(files)
    assert list(tmp_path.iterdir()) == []


# What would take memory or time


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x8d" + (2**62).to_bytes(8, "little") + b"x", "is cut short, or pops more values than the stack"),
        (b"X" + b"\xff" * 4, "is cut short, or pops more values than the stack"),
        (b"\x8a\xff" + b"\xff" * 255, "the whole: an integer, expected a Metadata"),
        (b"\x8b" + b"\x7f" * 4, "opcode LONG4"),
        (b"}r" + b"\xff" * 4, "the whole: a dict, expected a Metadata"),
        (b"}q\x05", "the whole: a dict, expected a Metadata"),
        (b"}q\x00q\x00", "the whole: a dict, expected a Metadata"),
        (b"j" + b"\xff" * 4, "Memo value not found at index 4294967295"),
        (b"h\x00", "Memo value not found at index 0"),
        (b"\x96" + (2**62).to_bytes(8, "little"), "opcode BYTEARRAY8"),
        (b"\x94", "is cut short, or pops more values than the stack"),
        (b"}(" + b"N" * 3 + b"u", "sets items of a dict, or a key without a value"),
        (b"N]a", "appends to None"),
        (b"]s", "is cut short, or pops more values than the stack"),
        (b"NNNs", "sets items of None"),
        (b"Nt", "is cut short, or pops more values than the stack"),
        (b"NN\x93", "STACK_GLOBAL requires str"),
        (b"]]R", "makes a call, or passes arguments, that no checkpoint's metadata needs"),
        (b"])R", "makes a call, or passes arguments, that no checkpoint's metadata needs"),
        (b"N}b", "sets fields of something that is not a new object"),
        (b"\x80\x04", "declares protocol 4, expected 2 to 5 once, at its beginning"),
        (b"X\x02\x00\x00\x00\xff\xff", "UnicodeDecodeError: 'utf-8'"),
        (b"X\x03\x00\x00\x00\xed\xa0\x80", "the whole: a text, expected a Metadata"),
        (b"ctorch\nSize", "is cut short, or pops more values than the stack"),
        (b"", "ends with more or less than one value on the stack"),
        (b"NN", "ends with more or less than one value on the stack"),
        (root() + b"}b", "sets fields of something that is not a new object"),
        (b"N(", "ends with more or less than one value on the stack"),
    ],
)
def test_a_pickle_that_lies_about_itself_is_refused(body: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_metadata(whole(body), "x")
        assert message in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [0, 1, 6, 255])
def test_another_protocol_is_refused(protocol: int) -> None:
    with pytest.raises(CheckpointError, match=f"declares protocol {protocol}, expected 2 to 5"):
        read_metadata(bytes([0x80, protocol]) + b"N.", "x")


@pytest.mark.parametrize("raw", [b"", b"\x80", b"PK\x03\x04", b"{}"])
def test_what_is_no_pickle_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^x: at byte "):
        read_metadata(raw, "x")


@pytest.mark.slow(kept=["nested3"])
@pytest.mark.parametrize(
    "nested",
    [
        b"(" * 10**5,
        b"]" * 10**5 + b"a" * 10**5,
        b"N" + b"\x85" * 10**5,
        (b"}" + text("a")) * 10**4 + b"N" + b"s" * 10**4,
    ],
)
def test_deep_nesting_neither_recurses_nor_explodes(nested: bytes) -> None:
    tracemalloc.start()
    try:
        for raw in (whole(nested), whole(root(nested)), whole(root(b"}", b"}", ("planner_data", nested)))):
            with pytest.raises(CheckpointError):
                read_metadata(raw + b"?", "x")
        assert tracemalloc.get_traced_memory()[1] < 200 * len(nested)
    finally:
        tracemalloc.stop()


def test_a_value_that_holds_itself_is_refused() -> None:
    table = b"}\x94" + text("w") + b"h\x00s"
    with pytest.raises(CheckpointError, match="a dict, expected a TensorStorageMetadata"):
        read_metadata(whole(root(table)), "x")
    chunks = valid_metadata().state_dict_metadata["w"].chunks
    metadata = valid_metadata()
    metadata.state_dict_metadata["w"].chunks = chunks
    chunks.append(chunks)
    with pytest.raises(CheckpointError, match="'w': a list, expected a ChunkStorageMetadata"):
        read_metadata(pickle.dumps(metadata), "x")


def pickled_with(change: Callable[[Metadata, int], None], times: int) -> bytes:
    metadata = valid_metadata()
    change(metadata, times)
    return pickle.dumps(metadata)


def share_many_chunks(metadata: Metadata, times: int) -> None:
    """Refer from many tensors to one list of many boxes."""
    entry = metadata.state_dict_metadata["w"]
    entry.chunks.extend(entry.chunks * times)
    metadata.state_dict_metadata.update({f"w{number}": entry for number in range(times)})


def share_a_long_path(metadata: Metadata, times: int) -> None:
    path = "a" * (50 * times)
    for number in range(times):
        metadata.storage_data[MetadataIndex(f"w{number}")] = _StorageInfo(path, 0, 1)


def share_a_long_size(metadata: Metadata, times: int) -> None:
    long = torch.Size((1,) * (5 * times))
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(long, long) for _ in range(times)]


def pickled_with_a_long_state(times: int) -> bytes:
    fields = b"".join(text(f"f{number}") + b"N" for number in range(times * 5 // 2))
    first = name(METADATA, "BytesStorageMetadata") + b")\x81}(" + fields + b"u\x94b"
    others = [name(METADATA, "BytesStorageMetadata") + b")\x81h\x00b" for _ in range(times)]
    states = b"".join(text(f"k{number}") + entry for number, entry in enumerate([first, *others]))
    info = new(FILESYSTEM, "_StorageInfo", ("relative_path", text("a")), ("offset", b"K\x00"), ("length", b"K\x01"))
    storage = b"".join(
        new(METADATA, "MetadataIndex", ("fqn", text(f"k{number}"))) + info for number in range(times + 1)
    )
    return whole(root(b"}(" + states + b"u", b"}(" + storage + b"u"))


def refuse(raw: bytes, match: str | None = None) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_metadata(raw, "x")


def test_a_long_state_is_not_gone_through_again_and_again() -> None:
    other = "sets the state of a BytesStorageMetadata to something other than"
    refuse(pickled_with_a_long_state(20_000), other)
    assert_grows_linearly(lambda times: functools.partial(refuse, pickled_with_a_long_state(times), other), 500)


@pytest.mark.slow(kept=["share_many_chunks"])
@pytest.mark.parametrize("change", [share_many_chunks, share_a_long_path, share_a_long_size])
def test_what_is_shared_is_not_gone_through_again_and_again(change: Callable[[Metadata, int], None]) -> None:
    refuse(pickled_with(change, 20_000))
    assert_grows_linearly(lambda times: functools.partial(refuse, pickled_with(change, times)), 500)


def test_equal_hashes_cost_nothing() -> None:
    # A tuple of tuples of tuples, each shared: hashing it would take 2^60 steps, and not end.
    tuples = b")\x94" + b"".join(b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86\x94" for level in range(60))
    refuse(whole(root(b"}" + tuples + b"Ns")))


# Anything at all


def is_harmless(raw: bytes) -> bool:
    try:
        return isinstance(read_metadata(raw, "x"), StoredTensors)
    except CheckpointError as error:
        return len(str(error)) < 10_000


mutations = st.lists(
    st.tuples(
        st.integers(0, len(VALID) - 1),
        st.sampled_from(["replace", "insert", "delete", "copy"]),
        st.binary(min_size=1, max_size=8) | st.sampled_from([SYSTEM, GETATTR, b"R", b"b", b"\x93", b"0", b"."]),
    ),
    min_size=1,
    max_size=4,
)


def mutated(raw: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    for at, kind, content in changes:
        match kind:
            case "replace":
                raw = raw[:at] + content + raw[at + len(content) :]
            case "insert":
                raw = raw[:at] + content + raw[at:]
            case "delete":
                raw = raw[:at] + raw[at + len(content) :]
            case "copy":
                raw = raw[:at] + raw[at // 2 : at // 2 + 40] + raw[at:]
    return raw


fuzz = settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(mutations)
def test_damage_is_refused_or_harmless(canary: Path, changes: list[tuple[int, str, bytes]]) -> None:
    assert is_harmless(mutated(VALID, changes))
    assert not canary.exists()


OPCODES = [bytes([code]) for code in b"\x80\x95(\x94qrhjN\x88\x89KMJ\x8a\x8cX\x8d)\x85\x86\x87t]ae}suc\x93\x81Rb"]
NAMES = [name(METADATA, kind) for kind in ("Metadata", "TensorProperties", "MetadataIndex", "_MEM_FORMAT_ENCODING")]


@fuzz
@given(
    st.lists(
        st.sampled_from([*OPCODES, *NAMES, GETATTR, SYSTEM, size(1, 2), b"}", b")", b"]", text("__setstate__")])
        | st.binary(max_size=3),
        max_size=60,
    )
)
def test_any_sequence_of_opcodes_is_refused_or_harmless(canary: Path, parts: list[bytes]) -> None:
    assert is_harmless(whole(b"".join(parts)))
    assert not canary.exists()


def test_every_cut_is_refused() -> None:
    for end in range(len(VALID)):
        with pytest.raises(CheckpointError):
            read_metadata(VALID[:end], "x")


def test_reading_leaves_python_as_it_was() -> None:
    """An unpickler that lets files set attributes of classes and functions would be changed for the next file."""
    classes = (Metadata, MetadataIndex, BytesStorageMetadata, ChunkStorageMetadata, _StorageInfo, _get_layout)
    before = [dict(vars(kind)) for kind in classes]
    for raw in ESCAPES.values():
        with pytest.raises(CheckpointError):
            read_metadata(raw, "x")
    assert [dict(vars(kind)) for kind in classes] == before
    assert set(read_metadata(VALID, "x").tensors) == {"w"}
