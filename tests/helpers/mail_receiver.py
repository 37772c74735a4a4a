"""A real SMTP server (aiosmtpd) on loopback that stores the mail it receives."""

from __future__ import annotations

import asyncio
import ssl
import threading
from types import TracebackType
from typing import Any, Literal, Self

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from tests.helpers.certificates import CertificateFiles
from tests.helpers.waiting import DEADLINE_S


class MailReceiver:
    """Serves while its context is open.

    With a `login` (user, password) it accepts only mail of that user. `answer`: to the data of a message.
    """

    def __init__(
        self,
        encryption: Literal["starttls", "tls", "none"] = "none",
        tls: CertificateFiles | None = None,
        login: tuple[str, str] | None = None,
        answer: str = "250 OK",
    ) -> None:
        self.mails: list[Envelope] = []
        self.port = 0
        self._encryption = encryption
        self._login = login
        self._answer = answer
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(tls.certificate, tls.key)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 -- the name that aiosmtpd calls
        if self._answer.startswith("2"):
            self.mails.append(envelope)
        return self._answer

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        context = self._context if self._encryption == "tls" else None
        server = await self._loop.create_server(self._protocol, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        await server.wait_closed()

    def _protocol(self) -> SMTP:
        is_late = self._encryption == "starttls"
        return SMTP(
            self,
            hostname="receiver.example",
            tls_context=self._context if is_late else None,
            require_starttls=is_late,
            auth_required=self._login is not None,
            auth_require_tls=is_late,
            authenticator=self._authenticated,
        )

    def _authenticated(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        is_known = (data.login.decode(), data.password.decode()) == self._login
        return AuthResult(success=is_known, handled=False)
