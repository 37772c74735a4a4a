"""Section [dashboard]: where the web page listens, who may look at it, and whether it may act."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option

_HEADER_NAME = "[A-Za-z0-9-]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    """Where the web page listens, who may look at it, and whether it may act."""

    is_served: bool = field(
        default=True,
        metadata=option("Whether a launch serves the page. `megatrain dashboard` does in any case."),
    )
    address: str = field(
        default="127.0.0.1",
        metadata=option(
            "Address of the page. Beyond the own machine a viewer_token_file, an operator_token_file or "
            "trusted_proxies are needed."
        ),
    )
    port: int = field(
        default=8777,
        metadata=option(
            "Port of the page; 0: any that is free, shown in the log and in etcd.",
            minimum=0,
            maximum=65535,
        ),
    )
    enable_actions: bool = field(
        default=False,
        metadata=option(
            "Whether operators may restart, evict, stop and more through the page; else it only shows. Without an "
            "operator_token_file the page makes a token for the job's user, <run>/diagnosis/operator-token."
        ),
    )
    viewer_token_file: str = field(
        default="",
        metadata=option("File, readable by its owner alone, with the token of those who may look."),
    )
    operator_token_file: str = field(
        default="",
        metadata=option("File, readable by its owner alone, with the token of those who may look and act."),
    )
    trusted_proxies: str = field(
        default="",
        metadata=option(
            "Addresses or networks, with commas between, of reverse proxies that say in user_header who asks; from "
            "anywhere else that header means nothing. Empty: none."
        ),
    )
    user_header: str = field(
        default="",
        metadata=option("Header in which a trusted proxy names the user, as X-Forwarded-User.", pattern=_HEADER_NAME),
    )
    role_header: str = field(
        default="",
        metadata=option(
            'Header in which a trusted proxy says "viewer" or "operator". Empty: its users are viewers.',
            pattern=_HEADER_NAME,
        ),
    )
    host_names: str = field(
        default="",
        metadata=option(
            "Further names, with commas between, by which browsers reach the page; a request for any other name than "
            "these, the address and this machine's is refused.",
            pattern="[A-Za-z0-9., _-]*",
        ),
    )
    base_path: str = field(
        default="",
        metadata=option(
            "Path below which the page lies where a reverse proxy serves other things too, as /megatrain.",
            pattern="(/[A-Za-z0-9._~-]+)*",
        ),
    )
    perfetto_url: str = field(
        default="",
        metadata=option(
            "A Perfetto of the site's own, to which the page may hand a trace. Empty: traces are downloaded.",
            pattern=r"(https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?)?",
        ),
    )
