"""The first start of a run looks up its remote data once: a wrong URL, endpoint or key ends the run at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped, unused-ignore]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped, unused-ignore]

from megatrain.config.config import Config
from megatrain.config.serialize import CONFIG_NAME, to_toml
from megatrain.contracts.errors import DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.training.first_start import check_storage_of_first_start
from tests.helpers.s3_server import Fault, s3_server
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config
from tests.helpers.watched_store import WatchedStore, watched_store

VOCAB_SIZE = 90
ADVICE = (
    "; check the URL, the endpoint and the credentials. The run has not begun, so it ends and does not wait for the "
    "storage"
)


def config_of(root: object, tmp_path: Path, held_out: str = "") -> Config:
    data = {"train": f"{root}/web", "validation": held_out, "cache_directory": str(tmp_path / "cache")}
    return make_config({"data": data, "job": {"run_directory": str(tmp_path / "run")}})


@pytest.fixture
def local(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "local" / "web", 1000, VOCAB_SIZE)
    return tmp_path / "local"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, local: Path) -> Iterator[WatchedStore]:
    with watched_store(monkeypatch) as store:
        store.upload(local)
        yield store


@contextmanager
def answering(info: Callable[..., Any]) -> Iterator[None]:
    """Let the storage answer look-ups in this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "info", info)
        yield


def problem_of(config: Config, tmp_path: Path, timeout_s: float = 20.0) -> str:
    with pytest.raises(DataError) as found:
        check_storage_of_first_start(config, tmp_path / "run", timeout_s)
    assert found.value.exit_code == ExitCode.DATA
    return str(found.value)


def test_files_that_are_there_are_looked_up_once(store: WatchedStore, local: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    info = MemoryFileSystem.info

    def watched(self: MemoryFileSystem, path: str, **more: Any) -> Any:
        asked.append(path.rpartition("/")[2])
        return info(self, path, **more)

    with answering(watched):
        check_storage_of_first_start(config_of(store.root, tmp_path, f"{local}/web"), tmp_path / "run")
        assert asked == ["web.idx"]
        check_storage_of_first_start(config_of(local, tmp_path), tmp_path / "run")
        assert asked == ["web.idx"]


def refuse(self: MemoryFileSystem, path: str, **more: Any) -> Any:
    raise ConnectionRefusedError(111, "Connection refused")


def deny(self: MemoryFileSystem, path: str, **more: Any) -> Any:
    raise PermissionError


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "endpoint": (refuse, "Connection refused"),
    "credentials": (deny, "Permission denied"),
    "bucket": (MemoryFileSystem.info, "No such file or directory"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_first_start_ends_with_key_url_and_error(name: str, store: WatchedStore, tmp_path: Path) -> None:
    info, text = FAULTS[name]
    root = f"{store.root}-of-another" if name == "bucket" else store.root
    with answering(info):
        found = problem_of(config_of(root, tmp_path, f"{root}/held-out"), tmp_path)
    assert found == f"data.train='{root}/web': cannot be read: {text} (nor can data.validation){ADVICE}"


def test_storage_that_does_not_answer_is_not_awaited(store: WatchedStore, tmp_path: Path) -> None:
    may_end = threading.Event()
    with answering(lambda self, path, **more: may_end.wait()):
        try:
            found = problem_of(config_of(store.root, tmp_path), tmp_path, timeout_s=0.05)
        finally:
            may_end.set()
    assert found == f"data.train='{store.root}/web': cannot be read: no answer within 0.05 s{ADVICE}"


def test_a_run_that_has_begun_waits_for_its_storage(store: WatchedStore, tmp_path: Path) -> None:
    """The reads of the data themselves repeat each request."""
    config = config_of(store.root, tmp_path)
    (tmp_path / "run").mkdir()
    with answering(refuse):
        problem_of(config, tmp_path)
        (tmp_path / "run" / CONFIG_NAME).write_text(to_toml(config))
        check_storage_of_first_start(config, tmp_path / "run")


@pytest.mark.slow
def test_wrong_endpoint_of_s3_is_named(tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as server, socket.socket() as closed:
        from fsspec.config import conf
        from s3fs import S3FileSystem

        fsspec.filesystem("s3").put(f"{local}/", "bucket/corpus/", recursive=True)
        config = config_of("s3://bucket/corpus", tmp_path)
        check_storage_of_first_start(config, tmp_path / "run")
        right = conf["s3"]["endpoint_url"]
        server.hook = lambda method, key: Fault.REFUSED
        assert f"data.train='s3://bucket/corpus/web': cannot be read at {right}: " in problem_of(config, tmp_path)

        closed.bind(("127.0.0.1", 0))
        wrong = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setitem(conf, "s3", {name: value for name, value in conf["s3"].items() if name != "endpoint_url"})
        monkeypatch.setenv("AWS_ENDPOINT_URL", wrong)
        S3FileSystem.clear_instance_cache()
        found = problem_of(config, tmp_path)
        assert f"data.train='s3://bucket/corpus/web': cannot be read at {wrong}: " in found
        assert "Could not connect to the endpoint URL" in found
