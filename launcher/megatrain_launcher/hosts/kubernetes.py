"""Kubernetes: one pod per node, created by a JobSet or a TrainJob. Environment variables identify the host (see the
templates).

A node is cordoned with the pod's service account if it has one, else with kubectl. The account needs only the verb
`patch` on the job's nodes; the JobSet template grants it for the nodes that `--node` names.
"""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
from collections.abc import Mapping
from pathlib import Path

from megatrain_launcher.hosts.adapter import CordonError, HostFacts, command_problem
from megatrain_launcher.hosts.local import host_name

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REASON_ANNOTATION = "megatrain/cordon-reason"
_CALL_S = 10.0


def is_kubernetes_pod(environment: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environment


class KubernetesPlatform:
    """Implements HostAdapter in a pod."""

    name = "kubernetes"

    def __init__(self, environment: Mapping[str, str], account: Path = ACCOUNT) -> None:
        self._environment = environment
        self._account = account

    def facts(self) -> HostFacts:
        """Return the host's facts. The host's name is the node's, so that every pod on a cordoned node is refused."""
        get = self._environment.get
        jobset, attempt = get("JOBSET_NAME", ""), get("JOBSET_RESTART_ATTEMPT", "0") or "0"
        index = get("JOB_COMPLETION_INDEX", "0")
        zone = get("NODE_TOPOLOGY", "")
        return HostFacts(
            host=get("NODE_NAME") or host_name(),
            address=get("POD_IP", ""),
            launch_id=f"{jobset}.{attempt}" if jobset else "",
            index=int(index) if index.isascii() and index.isdigit() else 0,
            labels={"switch": zone} if zone else {},
        )

    def cordon(self, host: str, reason: str) -> str:
        """Mark a node as unschedulable, with the reason in an annotation. Raises: CordonError."""
        if (self._account / "token").is_file() and is_kubernetes_pod(self._environment):
            return self._cordon_by_account(host, reason)
        return self._cordon_by_kubectl(host, reason)

    def _cordon_by_account(self, host: str, reason: str) -> str:
        address = self._environment["KUBERNETES_SERVICE_HOST"]
        port = self._environment.get("KUBERNETES_SERVICE_PORT", "443")
        patch = {"metadata": {"annotations": {REASON_ANNOTATION: reason}}, "spec": {"unschedulable": True}}
        try:
            # read the token each time, because Kubernetes replaces it while a pod runs
            token = (self._account / "token").read_text().strip()
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            connection = http.client.HTTPSConnection(address, int(port), timeout=_CALL_S, context=context)
            try:
                connection.request(
                    "PATCH",
                    f"/api/v1/nodes/{host}",
                    body=json.dumps(patch),
                    headers={
                        "Authorization": f"Bearer {token}",
                        "Content-Type": "application/merge-patch+json",
                        "Accept": "application/json",
                    },
                )
                answer = connection.getresponse()
                body = answer.read(65536)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CordonError(
                f"node {host} was not cordoned: the API server {address}:{port} did not respond: {error}"
            ) from error
        if answer.status != http.client.OK:
            raise CordonError(f"node {host} was not cordoned: {_message(answer.status, body)}")
        return f"node {host} is cordoned"

    def _cordon_by_kubectl(self, host: str, reason: str) -> str:
        program = shutil.which("kubectl", path=self._environment.get("PATH"))
        if program is None:
            raise CordonError(
                f"node {host} was not cordoned: the pod has no service account, and no kubectl is on PATH; "
                "`megatrain launch --write-template jobset --node ...` grants the account rights on the named nodes"
            )
        self._kubectl(host, [program, "cordon", "--", host])
        self._kubectl(host, [program, "annotate", "--overwrite", "node", host, f"{REASON_ANNOTATION}={reason}"])
        return f"node {host} is cordoned"

    def _kubectl(self, host: str, command: list[str]) -> None:
        problem = command_problem(command, self._environment)
        if problem:
            raise CordonError(f"node {host} was not cordoned: {problem}")


def _message(status: int, body: bytes) -> str:
    """Return the API server's message; after a refusal, with the permission that the account needs."""
    try:
        text = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        text = f"the API server answered {status}"
    hint = "; the service account needs the verb patch on this node (see --node)" if status in (401, 403) else ""
    return f"{text}{hint}"
