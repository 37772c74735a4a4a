"""The options for reaching etcd: --rdzv-endpoint, --rdzv-conf and --etcd-*.

A password comes from a file or from the environment, never from the command line, which all users of the machine can
see.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.commands.argument_types import spellings
from megatrain.contracts.errors import ConfigError
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles

PASSWORD_VARIABLE = "MEGATRAIN_ETCD_PASSWORD"

# torch's names in --rdzv-conf -> megatrain's names of the same settings
_CONF_KEYS = {
    "user": "etcd_user",
    "password_file": "etcd_password_file",
    "cacert": "etcd_cacert",
    "cert": "etcd_cert",
    "key": "etcd_key",
}
_CONF_ELSEWHERE = {
    "password": f"other users of the machine would see it; use password_file=FILE or the variable {PASSWORD_VARIABLE}",
    "protocol": "write https:// before the endpoints",
    "ttl": "set recovery.lease_ttl_s",
    "keep_alive_interval": "set recovery.lease_renew_s",
    "keep_alive_max_attempt": "set recovery.lease_ttl_s",
    "join_timeout": "set recovery.join_timeout_s",
    "last_call_timeout": "set recovery.join_timeout_s",
    "close_timeout": "leave it out",
    "timeout": "set recovery.join_timeout_s",
    "is_host": "leave it out",
    "read_timeout": "leave it out",
}


@dataclass(frozen=True, slots=True)
class EtcdFlags:
    """The etcd settings of the command line. `endpoints` is empty if the command line names none."""

    endpoints: str = ""
    user: str = ""
    password_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""

    def settings(self, environment: Mapping[str, str]) -> EtcdSettings:
        """Return the settings for a client, including the password.

        Raises: ConfigError naming the unusable flag or file.
        """
        tls = None
        if self.ca or self.certificate or self.key:
            ca, certificate, key = (Path(name) if name else None for name in (self.ca, self.certificate, self.key))
            tls = TlsFiles(ca, certificate, key)
            tls.context()  # reports an unusable file now, not at the first connection
        return EtcdSettings.of(self.endpoints, credentials=self._credentials(environment), tls=tls)

    def _credentials(self, environment: Mapping[str, str]) -> Credentials | None:
        if not self.user:
            if self.password_file:
                raise ConfigError(["--etcd-password-file without a user: add --etcd-user=NAME"])
            return None
        if self.password_file:
            try:
                password = Path(self.password_file).read_text().removesuffix("\n").removesuffix("\r")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
                raise ConfigError(
                    [f"--etcd-password-file={self.password_file} cannot be read: {reason}; name a text file"]
                ) from error
        else:
            password = environment.get(PASSWORD_VARIABLE, "")
        if not password:
            raise ConfigError(
                [f"--etcd-user={self.user} without a password: set {PASSWORD_VARIABLE}, or --etcd-password-file=FILE"]
            )
        return Credentials(self.user, password, Path(self.password_file) if self.password_file else None)

    def arguments(self) -> list[str]:
        """Return the flags that pass the same settings to another process of this machine."""
        pairs = {
            "--rdzv-endpoint": self.endpoints,
            "--etcd-user": self.user,
            "--etcd-password-file": self.password_file,
            "--etcd-cacert": self.ca,
            "--etcd-cert": self.certificate,
            "--etcd-key": self.key,
        }
        return [f"{name}={value}" for name, value in pairs.items() if value]


def add_etcd_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `etcd_flags` reads."""
    group = parser.add_argument_group("etcd")
    group.add_argument(
        *spellings("--rdzv-endpoint"),
        default="",
        metavar="HOST:PORT,...",
        help="addresses of etcd; prefix with https:// for TLS; the default port is 2379 (default: the job's own etcd, "
        "found by the run directory)",
    )
    group.add_argument(
        *spellings("--rdzv-conf"),
        default="",
        metavar="KEY=VALUE,...",
        help="torchrun's form of the options below: user, password_file, cacert, cert and key",
    )
    group.add_argument(*spellings("--etcd-user"), default="", metavar="NAME")
    group.add_argument(
        *spellings("--etcd-password-file"),
        default="",
        metavar="FILE",
        help=f"file with the password in one line (default: the environment variable {PASSWORD_VARIABLE})",
    )
    group.add_argument(
        *spellings("--etcd-cacert"),
        default="",
        metavar="FILE",
        help="certificate of the authority that signed etcd's certificate",
    )
    group.add_argument(*spellings("--etcd-cert"), default="", metavar="FILE", help="this client's certificate")
    group.add_argument(*spellings("--etcd-key"), default="", metavar="FILE", help="key of this client's certificate")


def etcd_flags(args: argparse.Namespace) -> EtcdFlags:
    """Return the parsed flags. Raises: ConfigError with every setting of --rdzv-conf that cannot be used."""
    values = {name: getattr(args, name) for name in _CONF_KEYS.values()}
    problems = []
    for setting in filter(None, (part.strip() for part in args.rdzv_conf.split(","))):
        name, has_value, value = (part.strip() for part in setting.partition("="))
        if name in _CONF_ELSEWHERE:
            problems.append(f"--rdzv-conf {name}: {_CONF_ELSEWHERE[name]}")
        elif name not in _CONF_KEYS:
            problems.append(f"--rdzv-conf {name} is not known; use {', '.join(_CONF_KEYS)}")
        elif not has_value or not value:
            problems.append(f"--rdzv-conf {name} has no value; write {name}=VALUE")
        elif values[_CONF_KEYS[name]] not in ("", value):
            option = "--" + _CONF_KEYS[name].replace("_", "-")
            problems.append(
                f"--rdzv-conf {name}={value} and {option}={values[_CONF_KEYS[name]]} differ; give only one of them"
            )
        else:
            values[_CONF_KEYS[name]] = value
    if problems:
        raise ConfigError(problems)
    return EtcdFlags(
        endpoints=args.rdzv_endpoint.strip(),
        user=values["etcd_user"],
        password_file=values["etcd_password_file"],
        ca=values["etcd_cacert"],
        certificate=values["etcd_cert"],
        key=values["etcd_key"],
    )


def etcd_arguments(settings: EtcdSettings) -> list[str]:
    """Return the flags, without a password, with which another process of this machine reaches the same etcd."""
    tls = settings.tls
    files = [str(path) if path else "" for path in (tls.ca, tls.certificate, tls.key)]
    flags = EtcdFlags(
        endpoints=",".join(map(str, settings.endpoints)),
        user=settings.credentials.user if settings.credentials else "",
        password_file=str(settings.credentials.file or "") if settings.credentials else "",
        ca=files[0],
        certificate=files[1],
        key=files[2],
    )
    return flags.arguments()


def etcd_environment(settings: EtcdSettings) -> dict[str, str]:
    """Return the variables that a process with these flags needs too: the password, unless a file contains it."""
    found = settings.credentials
    return {} if found is None or found.file is not None else {PASSWORD_VARIABLE: found.password}


def without_password(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes that do not use etcd, such as workers."""
    return {name: value for name, value in environment.items() if name != PASSWORD_VARIABLE}
