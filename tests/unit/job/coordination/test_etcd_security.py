"""Users and passwords, tokens that etcd forgets, unix sockets, TLS in both directions; and no password in any text."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain.contracts.exit_codes import ExitCode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.connections import Connections
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.maintenance import status
from megatrain_job.coordination.settings import Credentials, Endpoint, EtcdSettings, TlsFiles
from megatrain_job.coordination.transport import Deadline, EtcdConnection
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Changes, Snapshot
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.certificates import Authority, CertificateFiles
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.etcd_server import EtcdMember, EtcdServers, enable_users, post
from tests.helpers.waiting import DEADLINE_S

PASSWORD = "correct horse"
WRONG = "battery staple"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("guarded")) as servers:
        post(servers.urls[0], "/v3/kv/put", {"key": "b3V0c2lkZQ==", "value": ""})
        enable_users(servers.urls[0], "root password", {"bob": PASSWORD}, "jobs/")
        yield servers


def as_bob(servers: EtcdServers) -> EtcdClient:
    return EtcdClient(EtcdSettings.of(servers.urls, credentials=Credentials("bob", PASSWORD)))


@pytest.mark.slow
def test_user_may_do_what_the_role_allows(guarded: EtcdServers) -> None:
    with as_bob(guarded) as client, LeaseKeeper(client) as keeper:
        client.put("jobs/a", "x", lease_id=keeper.lease_id)
        with Watch(client, KeyRange.prefix("jobs/")) as watch:
            assert isinstance(watch.next(DEADLINE_S), Snapshot)
            client.put("jobs/b", "y")
            assert isinstance(watch.next(DEADLINE_S), Changes)
        with pytest.raises(CoordinationRefusedError, match=r"etcd put 'outside': .*permission denied") as caught:
            client.put("outside", "")
        assert caught.value.exit_code is ExitCode.NO_PERMISSION


def test_watch_of_what_is_not_allowed_ends_with_the_reason(guarded: EtcdServers) -> None:
    with as_bob(guarded) as client:
        for start_revision in (None, 1):
            with Watch(client, KeyRange.prefix("jo"), start_revision=start_revision) as watch:
                with pytest.raises(CoordinationRefusedError, match="permission denied"):
                    watch.next(DEADLINE_S)
                assert not watch.is_open


def test_watch_of_a_partly_allowed_range_is_refused(guarded: EtcdServers) -> None:
    """The proof that the member is alive reads one permitted key; only the watch itself is refused."""
    with (
        as_bob(guarded) as client,
        Watch(client, KeyRange(b"jobs/", b"k"), start_revision=1) as watch,
        pytest.raises(CoordinationRefusedError, match=r"ended by etcd: .*ermission"),
    ):
        watch.next(DEADLINE_S)


@pytest.mark.parametrize("user", ["bob", "unknown"])
def test_wrong_password_is_refused_at_once_and_shown_nowhere(
    guarded: EtcdServers, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = EtcdSettings.of(guarded.urls, credentials=Credentials(user, WRONG))
    with EtcdClient(settings) as client, pytest.raises(CoordinationRefusedError, match=f"as user '{user}': ") as caught:
        client.get("jobs/a")

    text = "".join(traceback.format_exception(caught.value))
    assert WRONG not in text + repr(caught.value) + caplog.text + repr(settings)
    assert guarded.urls[0] in str(caught.value)


def test_missing_user_is_refused_with_a_hint(guarded: EtcdServers) -> None:
    with (
        EtcdClient(EtcdSettings.of(guarded.urls)) as client,
        pytest.raises(CoordinationRefusedError, match="requires a user and a password"),
    ):
        client.get("jobs/a")


def test_user_without_authentication_is_reported(etcd: EtcdServers) -> None:
    with as_bob(etcd) as client, pytest.raises(CoordinationRefusedError, match=r"not enabled.*give no user here"):
        client.get("a")


@pytest.mark.slow
def test_token_that_etcd_forgot_is_renewed_unseen(guarded: EtcdServers) -> None:
    """Tokens are in the memory of etcd: a restart is the fastest way to lose one."""
    with as_bob(guarded) as client, LeaseKeeper(client, ttl_s=10, period_s=0.2) as keeper:
        first = client.put("jobs/c", "1")
        with Watch(client, KeyRange.key("jobs/c"), start_revision=first) as watch:
            assert isinstance(watch.next(DEADLINE_S), Changes)
            guarded.members[0].kill()
            guarded.members[0].start()

            client.put("jobs/c", "2", deadline_s=DEADLINE_S)

            event = watch.next(DEADLINE_S)
            assert isinstance(event, Changes)
            assert event.changes[0].item.value == b"2"
            assert client.renew_lease(keeper.lease_id) == 10


def test_token_is_fetched_once(guarded: EtcdServers) -> None:
    paths: list[str] = []
    (member,) = guarded.members
    with EtcdProxy(member.client_port) as proxy:
        proxy.before = lambda request: paths.append(request.split()[1].decode())
        credentials = Credentials("bob", PASSWORD)
        with EtcdClient(EtcdSettings.of([proxy.url], credentials=credentials)) as client:
            for _ in range(5):
                client.put("jobs/d", "")
            with EtcdClient(EtcdSettings.of(guarded.urls, credentials=Credentials("root", "root password"))) as root:
                # Setting a password, even the same one, invalidates the earlier tokens.
                root.gateway.call("/v3/auth/user/changepw", {"name": "bob", "password": PASSWORD}, dict, what="users")
            client.put("jobs/d", "")

    assert paths == ["/v3/auth/authenticate", *["/v3/kv/put"] * 6, "/v3/auth/authenticate", "/v3/kv/put"]


def check_through_restart(settings: EtcdSettings, member: EtcdMember) -> None:
    """Use calls, a lease and a watch, with a value of several packets, while etcd is killed and started again."""
    with EtcdClient(settings) as client, LeaseKeeper(client, period_s=0.1) as keeper:
        first = client.put("jobs/a", "x" * 200_000, lease_id=keeper.lease_id)
        with Watch(client, KeyRange.key("jobs/a"), start_revision=first) as watch:
            event = watch.next(DEADLINE_S)
            assert isinstance(event, Changes)
            assert len(event.changes[0].item.value) == 200_000
            member.kill()
            assert f"{client.settings.endpoints[0]}: Connection refused" in refused(settings)
            member.start()
            client.put("jobs/a", "y", deadline_s=DEADLINE_S)
            again = watch.next(DEADLINE_S)
            assert isinstance(again, Changes)
            assert again.changes[0].item.value == b"y"


@pytest.mark.slow
def test_everything_goes_through_a_unix_socket() -> None:
    """The directory has a short name: a socket's path has at most 107 characters."""
    with TemporaryDirectory() as directory, EtcdServers(Path(directory), has_sockets=True) as servers:
        (member,) = servers.members
        enable_users(member.url, "root password", {"bob": PASSWORD}, "jobs/")
        endpoint = f"unix:{directory}/{member.name}:0"
        settings = EtcdSettings.of(endpoint, credentials=Credentials("bob", PASSWORD))
        check_through_restart(settings, member)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def own_files(authority: Authority) -> CertificateFiles:
    return authority.sign("client")


@pytest.fixture(scope="module")
def encrypted(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    files = authority.sign("server")
    arguments = [
        "--cert-file", str(files.certificate), "--key-file", str(files.key),
        "--client-cert-auth", "--trusted-ca-file", str(authority.files.certificate),
    ]  # fmt: skip
    with EtcdServers(tmp_path_factory.mktemp("encrypted"), arguments=arguments, scheme="https") as servers:
        yield servers


def test_tls_both_ways(encrypted: EtcdServers, authority: Authority, own_files: CertificateFiles) -> None:
    tls = TlsFiles(authority.files.certificate, own_files.certificate, own_files.key)
    check_through_restart(EtcdSettings.of(encrypted.urls, tls=tls), encrypted.members[0])


def test_connections_over_tls_are_kept_and_closed(
    encrypted: EtcdServers, authority: Authority, own_files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[EtcdConnection] = []
    open_connection = Connections.open

    def opens(connections: Connections, endpoint: Endpoint, deadline: Deadline) -> EtcdConnection:
        opened.append(open_connection(connections, endpoint, deadline))
        return opened[-1]

    monkeypatch.setattr(Connections, "open", opens)
    tls = TlsFiles(authority.files.certificate, own_files.certificate, own_files.key)
    with EtcdClient(EtcdSettings.of(encrypted.urls, tls=tls)) as client:
        for _ in range(2):
            client.put("a", "")
        assert len(opened) == 1


def refused(settings: EtcdSettings) -> str:
    # One try: the last of a call's tries may have too little time for the reason.
    with EtcdClient(settings) as client, pytest.raises(CoordinationError) as caught:
        status(client, client.settings.endpoints[0])
    return str(caught.value)


def test_server_that_is_not_trusted_is_named(
    encrypted: EtcdServers, tmp_path: Path, own_files: CertificateFiles
) -> None:
    stranger = Authority.create(tmp_path, "stranger")
    tls = TlsFiles(stranger.files.certificate, own_files.certificate, own_files.key)

    text = refused(EtcdSettings.of(encrypted.urls, tls=tls))

    assert "its certificate is not trusted" in text
    assert encrypted.urls[0] in text


def test_missing_client_certificate_is_an_error(encrypted: EtcdServers, authority: Authority) -> None:
    text = refused(EtcdSettings.of(encrypted.urls, tls=TlsFiles(authority.files.certificate)))

    assert "certificate" in text.lower()


def test_tls_on_one_side_only_is_an_error(encrypted: EtcdServers, etcd: EtcdServers) -> None:
    text = refused(EtcdSettings.of([url.replace("https", "http") for url in encrypted.urls]))
    # which of them depends on the version of etcd
    assert "HTTP status 400" in text or "closed without an answer" in text

    text = refused(EtcdSettings.of([url.replace("http", "https") for url in etcd.urls]))
    assert "SSL" in text or "TLS" in text
