"""Manifests as Kubernetes would accept them, checked against the fields of the public definitions."""

from __future__ import annotations

import getpass
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.load import load_config
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain_job.commands.etcd_flags import EtcdFlags
from megatrain_launcher.launch.templates import write_template
from tests.helpers.launch_cases import small_flags
from tests.helpers.require import require_module
from tests.helpers.source_tree import ROOT

# A schema: a type, a list of one schema, a mapping of names to schemas ("*": any name), or a tuple of allowed values.
# A name that ends with "!" is required. An unknown name is an error, as `kubectl apply --validate=strict` has it.
Schema = Any
_NAMES = {"*": str}
_META = {"name!": str, "namespace": str, "labels": _NAMES, "annotations": _NAMES}
_ENV = [{"name!": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath!": str, "apiVersion": str}}}]
_LIMITS = {"limits": {"*": str}, "requests": {"*": str}}
_CONTAINER = {
    "name!": str, "image!": str, "command": [str], "args": [str], "env": _ENV, "resources": _LIMITS,
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
    "ports": [{"name": str, "containerPort!": int}],
    "securityContext": {
        "allowPrivilegeEscalation": bool, "capabilities": {"add": [str], "drop": [str]},
        "seccompProfile": {"type!": ("RuntimeDefault", "Localhost", "Unconfined")},
    },
}  # fmt: skip
_AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms!": [
                {"matchFields": [{"key!": ("metadata.name",), "operator!": ("In",), "values!": [str]}]}
            ]
        }
    },
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey!": str, "labelSelector": {"matchLabels": _NAMES}}
        ]
    },
}
_VOLUME = {
    "name!": str,
    "emptyDir": {"medium": ("", "Memory"), "sizeLimit": str},
    "persistentVolumeClaim": {"claimName!": str},
    "secret": {"secretName": str, "defaultMode": int},
}
_POD = {
    "metadata": {"labels": _NAMES, "annotations": _NAMES},
    "spec!": {
        "containers!": [_CONTAINER], "restartPolicy": ("Never", "OnFailure"), "serviceAccountName": str,
        "terminationGracePeriodSeconds": int, "affinity": _AFFINITY, "volumes": [_VOLUME],
    },
}  # fmt: skip
_POD_FAILURE_RULE = {
    "action!": ("FailJob", "FailIndex", "Ignore", "Count"),
    "onExitCodes": {"containerName": str, "operator!": ("In", "NotIn"), "values!": [int]},
    "onPodConditions": [{"type!": str, "status": ("True", "False", "Unknown")}],
}
_JOB = {
    "parallelism": int, "completions": int, "completionMode": ("Indexed", "NonIndexed"), "backoffLimit": int,
    "backoffLimitPerIndex": int, "maxFailedIndexes": int, "podFailurePolicy": {"rules!": [_POD_FAILURE_RULE]},
    "template!": _POD,
}  # fmt: skip
_JOB_FAILURES = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded",
                 "PodFailurePolicy")  # fmt: skip
_JOBSET = {
    "apiVersion!": ("jobset.x-k8s.io/v1alpha2",), "kind!": ("JobSet",), "metadata!": _META,
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator!": ("All", "Any"), "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{
                "name!": str, "action!": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                "onJobFailureReasons": [_JOB_FAILURES], "targetReplicatedJobs": [str],
            }],
        },
        "replicatedJobs!": [
            {"name!": str, "replicas": int, "template!": {"metadata": {"labels": _NAMES}, "spec!": _JOB}}
        ],
        "suspend": bool, "ttlSecondsAfterFinished": int,
    },
}  # fmt: skip
_TRAINJOB = {
    "apiVersion!": ("trainer.kubeflow.org/v1alpha1",), "kind!": ("TrainJob",), "metadata!": _META,
    "spec!": {
        "runtimeRef!": {"apiGroup": str, "kind": ("TrainingRuntime", "ClusterTrainingRuntime"), "name!": str},
        "trainer": {
            "image": str, "command": [str], "args": [str], "env": _ENV, "numNodes": int, "numProcPerNode": int,
            "resourcesPerNode": _LIMITS,
        },
        "suspend": bool, "labels": _NAMES, "annotations": _NAMES,
    },
}  # fmt: skip
_OTHERS: Mapping[str, Schema] = {
    "ServiceAccount": {
        "apiVersion!": ("v1",), "kind!": str, "metadata!": _META, "automountServiceAccountToken": bool,
    },
    "ClusterRole": {
        "apiVersion!": ("rbac.authorization.k8s.io/v1",), "kind!": str, "metadata!": _META,
        "rules": [{"apiGroups!": [str], "resources!": [str], "resourceNames": [str], "verbs!": [str]}],
    },
    "ClusterRoleBinding": {
        "apiVersion!": ("rbac.authorization.k8s.io/v1",), "kind!": str, "metadata!": _META,
        "roleRef!": {"apiGroup!": str, "kind!": ("ClusterRole",), "name!": str},
        "subjects": [{"kind!": str, "name!": str, "namespace": str}],
    },
    "JobSet": _JOBSET,
    "TrainJob": _TRAINJOB,
}  # fmt: skip


def wrongs(schema: Schema, value: Any, place: str = "") -> list[str]:
    """Return the places at which a value does not match."""
    if isinstance(schema, Mapping):
        if not isinstance(value, dict):
            return [f"{place}: not an object"]
        known = {name.rstrip("!"): inner for name, inner in schema.items()}
        found = [f"{place}.{name[:-1]} is missing" for name in schema if name[-1] == "!" and name[:-1] not in value]
        for name, item in value.items():
            inner = known.get(name, known.get("*"))
            found += [f"{place}.{name} is unknown"] if inner is None else wrongs(inner, item, f"{place}.{name}")
        return found
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{place}: not a list, or empty"]
        return [text for number, item in enumerate(value) for text in wrongs(schema[0], item, f"{place}[{number}]")]
    if isinstance(schema, tuple):
        return [] if value in schema else [f"{place}: {value!r} is none of {schema}"]
    return [] if type(value) is schema else [f"{place}: {value!r} is no {schema.__name__}"]


def written(directory: Path, template: str, **changes: Any) -> str:
    given: dict[str, Any] = {
        "min_hosts": 2, "max_hosts": 3, "spares": 1, "workers": "8", "etcd": EtcdFlags("e1:2379"), "image": "repo/x:1",
        "overrides": ("--runtime.device=cuda", '--job.name="Small.Job"'),
    }  # fmt: skip
    flags = small_flags(directory, template=template, **(given | changes))
    return write_template(flags, load_config(flags.config, flags.overrides).config, flags.max_hosts or 1)


def documents(text: str) -> dict[str, Any]:
    yaml = require_module("yaml")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_manifests_fit_the_definitions(tmp_path: Path) -> None:
    for template, expected in (("jobset", "JobSet"), ("trainjob", "TrainJob")):
        for workers in ("8", "gpu"):
            found = documents(written(tmp_path, template, workers=workers))
            for kind, one in found.items():
                assert wrongs(_OTHERS[kind], one, kind) == [], (template, workers)
            assert expected in found, workers


def test_mistakes_in_manifests_are_found(tmp_path: Path) -> None:
    jobset = documents(written(tmp_path, "jobset"))["JobSet"]
    jobset["spec"]["replicas"] = 3
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["parallelism"], job["completionMode"] = "4", "indexed"
    del jobset["metadata"]["name"]
    assert len(wrongs(_JOBSET, jobset)) == 4


def test_a_jobset_has_a_pod_for_each_host_and_spare(tmp_path: Path) -> None:
    found = documents(written(tmp_path, "jobset", kernel_log="/host/kmsg"))
    jobset, name = found["JobSet"], "small-job"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]

    assert jobset["metadata"]["name"] == name
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert container["command"][:2] == ["megatrain", "launch"]
    assert {"--nnodes=2:3", "--nproc-per-node=8", "--spares=1", "--rdzv-endpoint=e1:2379",
            "--kernel-log=/host/kmsg"} < set(container["command"])  # fmt: skip
    assert container["command"][-5:] == [
        str(tmp_path / "small.toml"),
        "--dashboard.address=0.0.0.0",
        "--dashboard.viewer_token_file=/etc/megatrain/page/token",
        "--runtime.device=cuda",
        '--job.name="Small.Job"',
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        "/dev/shm", str(tmp_path / "run"), "/etc/megatrain/page"
    }  # fmt: skip
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    names = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]}
    assert names["NODE_NAME"] == "spec.nodeName"
    assert pod["terminationGracePeriodSeconds"] == 660
    assert found["ServiceAccount"]["metadata"]["name"] == pod["serviceAccountName"] == name
    assert found.keys() == {"ServiceAccount", "JobSet"}, "no rights where no nodes are named"


NODES = ("node-1", "node-2", "node-3", "node-4")


def test_jobset_runs_on_and_may_cordon_named_nodes(tmp_path: Path) -> None:
    found = documents(written(tmp_path, "jobset", nodes=NODES))
    for kind, one in found.items():
        assert wrongs(_OTHERS[kind], one, kind) == []
    pod = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    # The API accepts one name per term, and a node that fulfills one of the terms.
    assert [one["matchFields"][0]["values"] for one in affinity["nodeSelectorTerms"]] == [[name] for name in NODES]
    (rule,) = found["ClusterRole"]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["nodes"], "resourceNames": list(NODES), "verbs": ["patch"]}
    assert found["ClusterRoleBinding"]["subjects"][0]["name"] == found["ServiceAccount"]["metadata"]["name"]
    with pytest.raises(ConfigError, match="--node names 3 nodes, and 4 pods need one each"):
        written(tmp_path, "jobset", nodes=NODES[:3])


def test_a_jobset_goes_on_after_75_and_ends_after_other_codes(tmp_path: Path) -> None:
    jobset = documents(written(tmp_path, "jobset"))["JobSet"]
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    by_code = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }  # fmt: skip
    reactions = {
        reason: rule["action"] for rule in jobset["spec"]["failurePolicy"]["rules"]
        for reason in rule["onJobFailureReasons"]
    }  # fmt: skip
    reason_of = {"FailJob": "PodFailurePolicy", "FailIndex": "MaxFailedIndexesExceeded"}

    assert reactions[reason_of[by_code[75]]] == "RestartJobSetAndIgnoreMaxRestarts"
    # etcd out of reach, and signals (128 and more): the pod is started again
    ends = set(ExitCode) - {ExitCode.OK, ExitCode.COORDINATION, ExitCode.SAVED_AND_STOPPED}
    assert by_code.keys() == {*ends, ExitCode.SAVED_AND_STOPPED}
    assert {reactions[reason_of[by_code[code]]] for code in ends} == {"FailJobSet"}
    assert job["maxFailedIndexes"] == 0


def test_a_trainjob_has_a_node_for_each_host_and_spare(tmp_path: Path) -> None:
    trainer = documents(written(tmp_path, "trainjob"))["TrainJob"]["spec"]["trainer"]
    assert trainer["numNodes"] == 4
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    assert trainer["command"][:2] == ["megatrain", "launch"]


def test_missing_template_arguments_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "jobset", etcd=EtcdFlags(user="u"), image="")
    assert len(caught.value.problems) == 3
    written(tmp_path, "slurm", etcd=EtcdFlags(), image="")


def test_the_notice_is_as_long_as_a_stop_may_take(tmp_path: Path) -> None:
    for template, line in (
        ("slurm", "#SBATCH --signal=B:USR1@{}\n"),
        ("jobset", "terminationGracePeriodSeconds: {}\n"),
    ):
        for grace_s, notice_s in (("300", "900"), ("9000", "3600")):
            text = written(tmp_path, template, overrides=(f"--runtime.save_grace_s={grace_s}",))
            assert line.format(notice_s) in text, (template, grace_s)


def test_slurm_script_is_valid_bash(tmp_path: Path) -> None:
    flags = small_flags(tmp_path, template="slurm", min_hosts=2, max_hosts=3, spares=1, workers="8",
                        overrides=("--runtime.device=cuda", "--job.name=a b'c"))  # fmt: skip
    config = load_config(flags.config, flags.overrides[:1]).config
    text = write_template(flags, config, 3)
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert """'--job.name=a b'"'"'c'""" in text
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_template_is_ascii_and_names_nothing_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = {str(tmp_path), str(tmp_path.resolve()), str(Path.home()), sys.prefix, sys.base_prefix, str(ROOT)}
    here |= {socket.gethostname(), getpass.getuser()} - {"root"}
    for template in ("jobset", "trainjob", "slurm"):
        flags = small_flags(tmp_path, template=template, etcd=EtcdFlags("e1:2379"), image="x:1")
        flags = replace(flags, config=Path("small.toml"))
        own = [line for line in flags.config.read_text().splitlines() if str(tmp_path) not in line]
        flags.config.write_text("\n".join(own))
        text = write_template(flags, load_config(flags.config).config, 2)
        assert [word for word in (*here, "{{", "}}") if word != "/" and word in text] == [], template
        assert text.isascii(), template
        assert text.endswith("\n"), template


def test_pods_write_to_their_mounted_storage(tmp_path: Path) -> None:
    flags = small_flags(tmp_path, template="jobset", etcd=EtcdFlags("e1:2379"), image="x:1",
                        overrides=("--job.run_directory=runs/mine",))  # fmt: skip
    found = documents(write_template(flags, load_config(flags.config, flags.overrides).config, 2))["JobSet"]
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (place,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "run"]
    assert place == "/runs/small"
    assert container["command"][-1] == f"--job.run_directory={place}", "and the configuration does not take precedence"


def test_pods_page_needs_a_token_and_has_few_rights(tmp_path: Path) -> None:
    found = documents(written(tmp_path, "jobset"))["JobSet"]
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (secret,) = [one["secret"] for one in pod["volumes"] if one["name"] == "page-token"]
    assert secret == {"secretName": "small-job-page", "defaultMode": 0o400}
    assert container["ports"] == [{"name": "page", "containerPort": 8777}]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert "secret generic small-job-page --from-literal=token=" in written(tmp_path, "jobset")


def test_configured_page_gets_no_generated_token(tmp_path: Path) -> None:
    for override in (
        "--dashboard.is_served=false", "--diagnostics.is_streamed=false",
        "--dashboard.operator_token_file=/own", "--dashboard.viewer_token_file=/own",
    ):  # fmt: skip
        for template in ("jobset", "slurm"):
            text = written(tmp_path, template, overrides=(override,))
            assert "token_file=" not in text.replace("_token_file=/own", ""), override
            assert "secret" not in text, override


def test_the_script_makes_a_token_once_and_for_its_user_alone(tmp_path: Path) -> None:
    flags = small_flags(tmp_path, template="slurm", min_hosts=1, max_hosts=1)
    text = write_template(flags, load_config(flags.config).config, 1)
    token = tmp_path / "run" / "coordination" / "page-token"
    assert f"--dashboard.viewer_token_file={token}" in text
    begin = text[text.index("token_file=") : text.index("srun --kill")]
    for _ in range(2):
        subprocess.run(["bash", "-eu"], input=begin, text=True, check=True)
    first = token.read_text()
    assert len(first) == 64
    assert set(first) <= set("0123456789abcdef")
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    subprocess.run(["bash", "-eu"], input=begin, text=True, check=True)
    assert token.read_text() == first
