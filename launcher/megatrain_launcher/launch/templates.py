"""Files that start a launch on a cluster: an sbatch script, a JobSet, a TrainJob, filled in from the command line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from megatrain.config.config import Config
from megatrain.contracts.errors import FlagError
from megatrain.contracts.network_address import is_loopback
from megatrain.formatting import count_text
from megatrain_job.jobs.run_state import EXIT_CODE_FILE
from megatrain_launcher.launch.flags import DEFAULT_MODULE, DEFAULT_PRELOAD, LaunchFlags

_FILES = {"slurm": "slurm.sbatch", "jobset": "jobset.yaml", "trainjob": "trainjob.yaml"}
_BLANK = re.compile(r"\{\{(\w+)\}\}")
_MAX_GRACE_S = 3600.0
_LOWER = re.compile(r"[^a-z0-9]+")
_MAX_NAME_CHARS = 40
"""A JobSet's pods are called NAME-host-0-INDEX-RANDOM, and such a name has at most 63 characters."""

_TOKEN_NAME = "coordination/page-token"
_TOKEN_SCRIPT = """\
# the web page asks for the token in this file; `megatrain status` shows the page's address
token_file={file}
mkdir -p -m 700 "$(dirname "$token_file")"
[ -s "$token_file" ] || (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$token_file")

"""
_SECRET_DIRECTORY = "/etc/megatrain/page"
_SECRET_FILE = f"{_SECRET_DIRECTORY}/token"
_SECRET_NOTE = """\
# The web page asks for a token. Create it first:
#   kubectl create secret generic {name}-page --from-literal=token="$(openssl rand -hex 32)"
# and open the page with `kubectl port-forward` to the pod that `megatrain status` names.
"""
_SECRET_MOUNT = f"""\
- name: page-token
  mountPath: {_SECRET_DIRECTORY}
  readOnly: true"""
_SECRET_VOLUME = """\
# the token of the web page
- name: page-token
  secret:
    secretName: {name}-page
    defaultMode: 256  # 0400"""
_PORTS = """\
ports:
  - name: page
    containerPort: {port}"""

_POD_FACTS = {
    "NODE_NAME": "spec.nodeName",
    "POD_IP": "status.podIP",
    "JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
    "JOBSET_RESTART_ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
}


def write_template(flags: LaunchFlags, config: Config, max_hosts: int) -> str:
    """Return the filled-in file. Raises: FlagError when a flag that it needs is missing, or names too few nodes."""
    problems = []
    if flags.template != "slurm" and not flags.etcd.endpoints:
        problems.append("--write-template: pods need an etcd in the cluster; name it with --rdzv-endpoint=HOST:PORT")
    if flags.template != "slurm" and not flags.image:
        problems.append("--write-template: name the container image with --image=IMAGE")
    if flags.nodes and len(flags.nodes) < max_hosts + flags.spares:
        problems.append(
            f"--write-template: --node names {count_text(len(flags.nodes), 'node')}, and {max_hosts + flags.spares} "
            "pods need one each; name more, or none"
        )
    if flags.etcd.user and not flags.etcd.password_file:
        problems.append(
            "--write-template: name the password's file, as hosts will see it, with --etcd-password-file=FILE"
        )
    if problems:
        raise FlagError(problems)
    text = resources.files("megatrain_launcher").joinpath("templates", _FILES[flags.template]).read_text("utf-8")
    location = _run_directory(flags, config)
    page = _page_overrides(flags, config, location)
    own = [f"--job.run_directory={location}"] if location != config.job.resolved_run_directory else []
    flags = replace(flags, overrides=(*page, *flags.overrides, *own))
    blanks = _blanks(flags, config, max_hosts, location, has_page=bool(page))
    return _BLANK.sub(lambda match: blanks[match.group(1)], text)


def _run_directory(flags: LaunchFlags, config: Config) -> str:
    """Return the run directory as the hosts see it: pods mount it, and start in another working directory."""
    configured = config.job.resolved_run_directory
    return configured if flags.template != "jobset" or configured.startswith("/") else f"/runs/{config.job.name}"


def _page_overrides(flags: LaunchFlags, config: Config, location: str) -> tuple[str, ...]:
    """Return overrides that let other machines open the web page, with a token; empty if the configuration sets access
    already, or no page is served.

    Nothing can be mounted in a TrainJob: its page stays on loopback, where `kubectl port-forward` reaches it.
    """
    configured = config.dashboard
    is_configured = (
        configured.viewer_token_file
        or configured.operator_token_file
        or configured.trusted_proxies
        or not is_loopback(configured.address)
    )
    if is_configured or not configured.is_served or not config.diagnostics.is_streamed or flags.template == "trainjob":
        return ()
    token = _SECRET_FILE if flags.template == "jobset" else f"{location}/{_TOKEN_NAME}"
    return ("--dashboard.address=0.0.0.0", f"--dashboard.viewer_token_file={token}")


def _blanks(flags: LaunchFlags, config: Config, max_hosts: int, location: str, *, has_page: bool) -> dict[str, str]:
    is_slurm = flags.template == "slurm"
    command = ["megatrain", "launch", *launch_arguments(flags, max_hosts)]
    gpus = flags.workers if flags.workers.isdigit() and config.runtime.device != "cpu" else ""
    grace_s = min(config.runtime.save_grace_s + config.runtime.checkpoint_timeout_s, _MAX_GRACE_S)
    name = (_LOWER.sub("-", config.job.name.lower()).strip("-") or "megatrain")[:_MAX_NAME_CHARS].rstrip("-")
    indent = 20 if flags.template == "jobset" else 6
    return {
        "job": config.job.name,
        "name": name,
        "workers": flags.workers,
        "hosts": str(max_hosts + flags.spares),
        "gpus": f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        "output": f"slurm-{config.job.name}-%j.out",
        "exit_code_file": shlex.quote(f"{location}/{EXIT_CODE_FILE}"),
        "token": _TOKEN_SCRIPT.format(file=shlex.quote(f"{location}/{_TOKEN_NAME}")) if has_page else "",
        "secret_note": _SECRET_NOTE.format(name=name) if has_page else "",
        "secret_mount": _indented(_SECRET_MOUNT, 20) if has_page else "",
        "secret": _indented(_SECRET_VOLUME, 16).format(name=name) if has_page else "",
        "ports": _indented(_PORTS, 18).format(port=config.dashboard.port) if has_page and config.dashboard.port else "",
        "command": shlex.join(command) if is_slurm else json.dumps(command),
        "image": json.dumps(flags.image),
        "grace_s": str(round(grace_s)),
        "run_directory": json.dumps(location),
        "environment": _environment(indent),
        "rights": _rights(name, flags.nodes),
        "has_rights": "true" if flags.nodes else "false",
        "node_affinity": _node_affinity(flags.nodes),
        "resources": _resources(flags.template, gpus),
    }


def _indented(text: str, spaces: int) -> str:
    return "".join(" " * spaces + line + "\n" for line in text.splitlines())


def launch_arguments(flags: LaunchFlags, max_hosts: int) -> list[str]:
    """Return the arguments of `megatrain launch` that every host of this launch is started with."""
    smallest = flags.min_hosts or max_hosts
    arguments = [f"--nnodes={smallest}:{max_hosts}", f"--nproc-per-node={flags.workers}", *flags.etcd.arguments()]
    if flags.spares:
        arguments.append(f"--spares={flags.spares}")
    if not flags.is_driver_candidate:
        arguments.append("--no-driver")
    if not flags.is_daemon_candidate:
        arguments.append("--no-daemon")
    if flags.kernel_log:
        arguments.append(f"--kernel-log={flags.kernel_log}")
    if flags.log_dir:
        arguments.append(f"--log-dir={flags.log_dir}")
    if flags.tee != "first":
        arguments.append(f"--tee={flags.tee}")
    arguments += [f"--label={name}={value}" for name, value in flags.labels.items()]
    if flags.module != DEFAULT_MODULE:
        arguments += ["-m", flags.module]
    if flags.preload != (DEFAULT_PRELOAD,):
        arguments.append(f"--preload={','.join(flags.preload)}")
    if flags.from_hf:
        arguments.append(f"--from-hf={flags.from_hf}")
    return [*arguments, str(flags.config), *flags.overrides]


def _environment(indent: int) -> str:
    lines: list[str] = []
    for name, path in _POD_FACTS.items():
        lines += [f"- name: {name}", "  valueFrom:", "    fieldRef:", f'      fieldPath: "{path}"']
    return "\n".join(" " * indent + line for line in lines)


def _rights(name: str, nodes: Sequence[str]) -> str:
    """Return the rights by which the pods' account can cordon these nodes, and no others; empty if none are named."""
    if not nodes:
        return ""
    text = resources.files("megatrain_launcher").joinpath("templates", "jobset_rights.yaml").read_text("utf-8")
    blanks = {"name": name, "nodes": json.dumps(list(nodes))}
    return _BLANK.sub(lambda match: blanks[match.group(1)], text)


def _node_affinity(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    lines = [
        "nodeAffinity:",
        "  requiredDuringSchedulingIgnoredDuringExecution:",
        "    nodeSelectorTerms:",
        *(line for node in nodes for line in _node_term(node)),
    ]
    return _indented("\n".join(lines), 16)


def _node_term(node: str) -> tuple[str, ...]:
    """Return a selector term for a single node; pods may use the nodes that match one of the terms."""
    return (
        "      - matchFields:",
        "          - key: metadata.name",
        "            operator: In",
        f"            values: [{json.dumps(node)}]",
    )


def _resources(template: str, gpus: str) -> str:
    if not gpus:
        return ""
    key, indent = ("resources", 18) if template == "jobset" else ("resourcesPerNode", 4)
    return _indented(f'{key}:\n  limits:\n    nvidia.com/gpu: "{gpus}"', indent)
