"""Keeping a bad host from other jobs: a fake API server over TLS, and executable fakes of kubectl and scontrol."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.load import load_config
from megatrain_job.commands.etcd_flags import EtcdFlags
from megatrain_launcher.hosts.adapter import CordonError
from megatrain_launcher.hosts.kubernetes import REASON_ANNOTATION, KubernetesPlatform
from megatrain_launcher.hosts.slurm import SlurmPlatform
from megatrain_launcher.launch.templates import write_template
from tests.helpers.certificates import Authority
from tests.helpers.launch_cases import small_flags
from tests.helpers.require import require_module

TOKEN = "the-token"


class ApiServer(HTTPServer):
    """Has the node "node-a", and one account."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ApiHandler)
        self.nodes: dict[str, dict[str, Any]] = {"node-a": {}}
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""


class _ApiHandler(BaseHTTPRequestHandler):
    server: ApiServer

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        if is_whole:
            self.server.asked.append((self.command, self.path))
        return is_whole

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        node = self.path.removeprefix("/api/v1/nodes/")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(403, {"message": 'nodes is forbidden: User "x" cannot patch resource "nodes"'})
        elif self.headers["Content-Type"] != "application/merge-patch+json":
            self._answer(415, {"message": "the body of the request was in an unknown format"})
        elif node not in self.server.nodes:
            self._answer(404, {"message": f'nodes "{node}" not found'})
        else:
            self.server.nodes[node] |= json.loads(body)
            self._answer(200, {"kind": "Node"})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    require_module("trustme")
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def api(authority: Authority) -> Iterator[ApiServer]:
    files = authority.sign("api")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = ApiServer()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def account(directory: Path, certificate: Path, token: str = TOKEN) -> Path:
    (directory / "token").write_text(token)
    (directory / "ca.crt").write_bytes(certificate.read_bytes())
    return directory


def environment_of(port: int) -> dict[str, str]:
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port), "PATH": ""}


def test_a_node_is_cordoned_with_the_account(tmp_path: Path, api: ApiServer, authority: Authority) -> None:
    platform = KubernetesPlatform(environment_of(api.server_port), account(tmp_path, authority.files.certificate))
    assert platform.cordon("node-a", "two hangs") == "node node-a is cordoned"
    assert api.nodes["node-a"] == {
        "metadata": {"annotations": {REASON_ANNOTATION: "two hangs"}},
        "spec": {"unschedulable": True},
    }
    with pytest.raises(CordonError, match='node-b was not cordoned: nodes "node-b" not found'):
        platform.cordon("node-b", "")


def test_an_error_names_the_right_that_an_account_lacks(tmp_path: Path, api: ApiServer, authority: Authority) -> None:
    files = account(tmp_path, authority.files.certificate, "another")
    with pytest.raises(CordonError, match=r"forbidden.*; the service account needs the verb patch on this node"):
        KubernetesPlatform(environment_of(api.server_port), files).cordon("node-a", "")


def granted(template: str) -> set[tuple[str, str, str]]:
    """Return (verb, resource, name) of everything that a manifest grants; a rule without names grants all of them."""
    yaml = require_module("yaml")
    found = [one for one in yaml.safe_load_all(template) if one["kind"] in ("Role", "ClusterRole")]
    return {
        (verb, resource, name)
        for one in found
        for rule in one["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ["*"])
    }


def test_jobset_grants_only_cordons_of_its_own_nodes(tmp_path: Path, api: ApiServer, authority: Authority) -> None:
    """In both directions: an unused right is one too many, and a call without the right fails."""
    nodes = ("node-a", "node-b")
    api.nodes = {name: {} for name in (*nodes, "node-of-others")}
    flags = small_flags(tmp_path, template="jobset", etcd=EtcdFlags("e1:2379"), image="x:1", nodes=nodes)
    template = write_template(flags, load_config(flags.config, flags.overrides).config, 2)
    platform = KubernetesPlatform(environment_of(api.server_port), account(tmp_path, authority.files.certificate))
    for name in nodes:
        platform.cordon(name, "two hangs")
    verbs = {"PATCH": "patch", "GET": "get", "PUT": "update", "POST": "create", "DELETE": "delete"}
    used = set()
    for method, path in api.asked:
        resource, _, name = path.removeprefix("/api/v1/").partition("/")
        used.add((verbs[method], resource, name))
    assert granted(template) == used == {("patch", "nodes", name) for name in nodes}


def test_jobset_without_nodes_grants_nothing(tmp_path: Path) -> None:
    yaml = require_module("yaml")
    flags = small_flags(tmp_path, template="jobset", etcd=EtcdFlags("e1:2379"), image="x:1")
    template = write_template(flags, load_config(flags.config, flags.overrides).config, 2)
    assert granted(template) == set()
    (own,) = [one for one in yaml.safe_load_all(template) if one["kind"] == "ServiceAccount"]
    assert own["automountServiceAccountToken"] is False


def test_a_port_that_is_no_number_is_an_error_of_the_cordon(tmp_path: Path, authority: Authority) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "tcp://10.0.0.1:443"}
    files = account(tmp_path, authority.files.certificate)
    with pytest.raises(CordonError, match=r"the API server 127\.0\.0\.1:tcp://10\.0\.0\.1:443 did not respond"):
        KubernetesPlatform(environment, files).cordon("node-a", "")


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path, api: ApiServer) -> None:
    (tmp_path / "account").mkdir()
    stranger = Authority.create(tmp_path, "stranger")
    files = account(tmp_path / "account", stranger.files.certificate)
    with pytest.raises(CordonError, match=r"did not respond: .*CERTIFICATE_VERIFY_FAILED"):
        KubernetesPlatform(environment_of(api.server_port), files).cordon("node-a", "")
    assert api.nodes["node-a"] == {}


def program(directory: Path, name: str, body: str) -> dict[str, str]:
    """Create a program that writes its arguments to calls.txt, and return an environment with it on PATH."""
    path = directory / name
    path.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done >>{directory}/calls.txt\n{body}\n')
    path.chmod(0o755)
    return {"PATH": str(directory)}


def test_kubectl_is_used_where_there_is_no_account(tmp_path: Path) -> None:
    environment = program(tmp_path, "kubectl", "exit 0")
    assert KubernetesPlatform(environment, tmp_path / "none").cordon("node-a", "gpu lost") == "node node-a is cordoned"
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls == ["cordon", "--", "node-a", "annotate", "--overwrite", "node", "node-a",
                     f"{REASON_ANNOTATION}=gpu lost"]  # fmt: skip

    environment = program(tmp_path, "kubectl", "echo 'no configuration' >&2; exit 1")
    with pytest.raises(CordonError, match="node-a was not cordoned: no configuration"):
        KubernetesPlatform(environment, tmp_path / "none").cordon("node-a", "")
    environment = program(tmp_path, "kubectl", r"printf 'nicht verf\374gbar\n' >&2; exit 1")
    with pytest.raises(CordonError, match="node-a was not cordoned: nicht verf\ufffdgbar"):
        KubernetesPlatform(environment, tmp_path / "none").cordon("node-a", "")
    with pytest.raises(CordonError, match="no service account, and no kubectl is on PATH"):
        KubernetesPlatform({"PATH": ""}, tmp_path / "none").cordon("node-a", "")


def test_slurm_drains_a_node_where_it_may(tmp_path: Path) -> None:
    environment = program(tmp_path, "scontrol", "exit 0")
    assert SlurmPlatform(environment).cordon("node7", "two hangs") == "Slurm drains node7"
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls == ["update", "NodeName=node7", "State=DRAIN", "Reason=megatrain: two hangs"]

    environment = program(tmp_path, "scontrol", "echo 'slurm_update error: Access/permission denied' >&2; exit 1")
    with pytest.raises(CordonError, match=r"Access/permission denied; ask an operator to"):
        SlurmPlatform(environment).cordon("node7", "")
    environment = program(tmp_path, "scontrol", r"printf 'acc\350s refus\351\n' >&2; exit 1")
    with pytest.raises(CordonError, match="acc\ufffds refus\ufffd; ask an operator to"):
        SlurmPlatform(environment).cordon("node7", "")
    with pytest.raises(CordonError, match="no scontrol on PATH"):
        SlurmPlatform({"PATH": ""}).cordon("node7", "")
