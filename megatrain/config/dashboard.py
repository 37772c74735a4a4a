"""Section [dashboard]: the address of the web page, who may read it, and whether operators may act through it."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.options import option

_HEADER_NAME = "[A-Za-z0-9-]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    """The address of the web page, who may read it, and whether operators may act through it."""

    is_served: bool = option(True, "Whether a launch serves the dashboard. `megatrain dashboard` always serves it.")
    address: str = option(
        "127.0.0.1",
        "Address that the dashboard listens at. An address that other machines can reach needs viewer_token_file, "
        "operator_token_file or trusted_proxies.",
    )
    port: int = option(
        8777, "Port of the dashboard; 0: any free port, shown in the log and in etcd.", minimum=0, maximum=65535
    )
    enable_actions: bool = option(
        False,
        "Whether operators may restart, evict, stop and more through the dashboard; otherwise it is read-only. Without "
        "token files and trusted_proxies, the dashboard creates a token for operators in a file of the job's user, "
        "<run>/diagnosis/operator-token.",
    )
    viewer_token_file: str = option(
        "", "File, readable only by its owner, with the viewers' token. Viewers cannot act."
    )
    operator_token_file: str = option(
        "", "File, readable only by its owner, with the operators' token. Operators can view and act."
    )
    trusted_proxies: str = option(
        "",
        "Addresses or networks, comma-separated, of the reverse proxies whose user_header is trusted. The header "
        "is ignored in requests from other addresses. Empty: none.",
    )
    user_header: str = option(
        "", "Header in which a trusted proxy names the user, such as X-Forwarded-User.", pattern=_HEADER_NAME
    )
    role_header: str = option(
        "",
        'Header in which a trusted proxy sends the role, "viewer" or "operator". Empty: all its users are viewers.',
        pattern=_HEADER_NAME,
    )
    host_names: str = option(
        "",
        "Further host names, comma-separated, of the dashboard. Requests for any other name are refused, except for "
        "the address, localhost and, if the address is 0.0.0.0 or ::, the name of this machine.",
        pattern="[A-Za-z0-9., _-]*",
    )
    base_path: str = option(
        "",
        "Path prefix of the dashboard, such as /megatrain, behind a reverse proxy that also serves other pages.",
        pattern="(/[A-Za-z0-9._~-]+)*",
    )
    perfetto_url: str = option(
        "",
        "URL of a self-hosted Perfetto, in which the dashboard opens traces. Empty: traces are downloaded.",
        pattern=r"(https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?)?",
    )
