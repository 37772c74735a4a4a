"""One e-mail to an SMTP server: encrypted before a login over a network, and sent within one deadline."""

from __future__ import annotations

import base64
import smtplib
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import EmailMessage
from io import BufferedReader
from typing import Literal

from megatrain_launcher.notify.delivery import DeliveryError, answer_text, attempt_failure

_MAX_ANSWER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class MailServer:
    """The mail server, and the login there. Empty `user`: no login."""

    host: str
    port: int
    encryption: Literal["starttls", "tls", "none"]
    context: ssl.SSLContext = field(repr=False)
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that must not be shown: the password, and the forms in which a login sends it."""
        forms = (self.password, f"\0{self.user}\0{self.password}") if self.password else ()
        return (*forms, *(base64.b64encode(form.encode()).decode() for form in forms))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def send_mail(mail: EmailMessage, server: MailServer, timeout_s: float) -> str:
    """Send an e-mail to a server, and return a short text on the result.

    Raises: DeliveryError, whose text holds no password.
    """
    session = _Session(server, timeout_s)
    # smtplib's own limit is for one read: a server that sends a character a second would block this thread for hours
    watch = threading.Timer(timeout_s, session.interrupt)
    watch.daemon = True
    watch.start()
    try:
        session.open()
        if server.encryption == "starttls":
            session.starttls(context=server.context)
        if server.user:
            session.login(server.user, server.password)
        refused = session.send_message(mail)
        with suppress(OSError, smtplib.SMTPException):  # the mail is accepted, however the session ends
            session.quit()
        return f"accepted, but not for {', '.join(sorted(refused))}" if refused else "accepted"
    except (OSError, smtplib.SMTPException, ValueError) as error:
        # an interrupted session fails as if the server had disconnected
        reason = _reason(TimeoutError() if session.was_interrupted else error, timeout_s)
        raise DeliveryError(f"{server}: {answer_text(reason, server.secrets)}") from None
    finally:
        watch.cancel()
        session.close()


def _reason(error: Exception, timeout_s: float) -> str:
    match error:
        case smtplib.SMTPResponseException(smtp_code=code, smtp_error=answer):
            text = answer if isinstance(answer, str) else answer.decode(errors="replace")
            return f"answers {code}: {text}"
        case smtplib.SMTPRecipientsRefused(recipients=recipients):
            return f"refuses all recipients ({', '.join(sorted({str(code) for code, _ in recipients.values()}))})"
    return attempt_failure(error, timeout_s)


class _Session(smtplib.SMTP):
    """A session that another thread can end, and that reads a bounded amount."""

    def __init__(self, server: MailServer, timeout_s: float) -> None:
        super().__init__(timeout=timeout_s, local_hostname=socket.gethostname())
        self._server = server
        self.was_interrupted = False

    def open(self) -> None:
        """Raises: OSError, smtplib.SMTPException."""
        self._host = self._server.host  # the name that STARTTLS expects in the certificate
        code, answer = self.connect(self._server.host, self._server.port)
        if code != 220:
            raise smtplib.SMTPConnectError(code, answer)

    def interrupt(self) -> None:
        """End the session from another thread; the session's thread then reads the end of the connection."""
        self.was_interrupted = True
        sock = self.sock
        if sock is not None:
            with suppress(OSError):
                # shut down the plain socket: the method of SSLSocket would first drop the state that the reader uses
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        plain = socket.create_connection((host, port), timeout)
        if self._server.encryption != "tls":
            return plain
        try:
            return self._server.context.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise

    def getreply(self) -> tuple[int, bytes]:
        if self.file is None and self.sock is not None:
            self.file = _BoundedLines(self.sock.makefile("rb"))
        return super().getreply()


class _BoundedLines:
    """Reads lines of a file, up to a total number of bytes."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._left = _MAX_ANSWER_BYTES

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(min(limit, self._left))
        self._left -= len(line)
        if self._left <= 0:
            raise smtplib.SMTPServerDisconnected(f"it has sent more than {_MAX_ANSWER_BYTES:,} bytes")
        return line

    def close(self) -> None:
        self._file.close()
