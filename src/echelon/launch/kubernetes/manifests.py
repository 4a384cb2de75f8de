"""The Kubernetes objects of a job, as plain data: a Secret, a headless Service, and an indexed Job per role.

The completion index of a pod is its rank. With the Service as its subdomain, the pod of index i in the Job NAME-worker
has the host name NAME-worker-i.NAME, so the address of the scheduler and of worker 0 are known before they run. The
other addresses are those of the pods.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.cluster.messages import WORKER
from echelon.environment import CREDENTIALS
from echelon.errors import UsageError
from echelon.launch.plan import SCHEDULER, Address, Addresses, Plan, PlannedProcess

SCHEDULER_PORT, RENDEZVOUS_PORT = 9091, 9092
LABEL = "echelon.job"  # has the name of the job, on every object
ROLE = "echelon.role"
INDEX = "batch.kubernetes.io/job-completion-index"
PLACEHOLDER = "<credentials of the job>"
KEEP_S = 3600  # how long Kubernetes keeps the Jobs of a launcher that was killed, after they have ended
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # a DNS label; pods append their role and index

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags of the launcher say. `volumes` are (claim, path) pairs."""

    image: str
    name: str = "echelon"
    namespace: str = "default"
    cpus: str | None = None
    memory: str | None = None
    gpus: int = 0
    volumes: tuple[tuple[str, str], ...] = ()
    workdir: str | None = None
    pull_secret: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--kubernetes-name {self.name!r} is not a valid name: use up to 40 lower-case letters, digits and "
                "hyphens, beginning with a letter"
            )


def manifests(plan: Plan, settings: Settings, credentials: str | None = PLACEHOLDER) -> list[Manifest]:
    """Return all objects of a job, in the order of their creation. `credentials` None: the job has none."""
    roles = list(dict.fromkeys(process.role for process in plan.processes))
    secret = [_secret(settings, credentials)] if credentials is not None else []
    return [*secret, _service(settings), *(_job(plan, settings, role, credentials is not None) for role in roles)]


def addresses(settings: Settings) -> Addresses:
    """Return the host names of the scheduler and of worker 0."""
    return Addresses(
        Address(f"{settings.name}-{SCHEDULER}-0.{settings.name}", SCHEDULER_PORT),
        Address(f"{settings.name}-{WORKER}-0.{settings.name}", RENDEZVOUS_PORT),
    )


def _metadata(settings: Settings, name: str, **labels: str) -> Manifest:
    return {"name": name, "namespace": settings.namespace, "labels": {LABEL: settings.name, **labels}}


def _secret(settings: Settings, credentials: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(settings, settings.name),
        "type": "Opaque",
        "stringData": {"credentials": credentials},
    }


def _service(settings: Settings) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(settings, settings.name),
        "spec": {
            "clusterIP": "None",
            "selector": {LABEL: settings.name},
            "publishNotReadyAddresses": True,  # processes look each other up while they start
            "ports": [
                {"name": SCHEDULER, "port": SCHEDULER_PORT},
                {"name": "rendezvous", "port": RENDEZVOUS_PORT},
            ],
        },
    }


def _job(plan: Plan, settings: Settings, role: str, has_credentials: bool) -> Manifest:
    processes = plan.of_role(role)
    survives = role == WORKER and plan.job.num_servers > 0  # the other workers continue without a failed one
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(settings, f"{settings.name}-{role}", **{ROLE: role}),
        "spec": {
            "completionMode": "Indexed",
            "completions": len(processes),
            "parallelism": len(processes),
            **({"backoffLimitPerIndex": 0} if survives else {"backoffLimit": 0}),
            "ttlSecondsAfterFinished": KEEP_S,
            "template": {
                "metadata": {"labels": {LABEL: settings.name, ROLE: role}},
                "spec": _pod(plan, settings, processes[0], has_credentials),
            },
        },
    }


def _pod(plan: Plan, settings: Settings, first: PlannedProcess, has_credentials: bool) -> Manifest:
    volumes = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(settings.volumes)
    ]
    return {
        "restartPolicy": "Never",
        "subdomain": settings.name,
        "enableServiceLinks": False,
        "containers": [_container(plan, settings, first, has_credentials)],
        **({"volumes": volumes} if volumes else {}),
        **({"imagePullSecrets": [{"name": settings.pull_secret}]} if settings.pull_secret else {}),
    }


def _container(plan: Plan, settings: Settings, first: PlannedProcess, has_credentials: bool) -> Manifest:
    mounts = [{"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(settings.volumes)]
    resources = _resources(settings, first.role)
    return {
        "name": first.role,
        "image": settings.image,
        "command": list(first.arguments),
        "env": _environment(plan, settings, first, has_credentials),
        **({"workingDir": settings.workdir} if settings.workdir else {}),
        **({"resources": resources} if resources else {}),
        **({"volumeMounts": mounts} if mounts else {}),
    }


def _resources(settings: Settings, role: str) -> Manifest:
    """Return the resources of a worker. Servers and the scheduler take what is left."""
    if role != WORKER:
        return {}
    amounts = {name: value for name, value in (("cpu", settings.cpus), ("memory", settings.memory)) if value}
    gpus = {"nvidia.com/gpu": str(settings.gpus)} if settings.gpus else {}
    limits = {**amounts, **gpus}
    return {"requests": limits, "limits": limits} if limits else {}


def _environment(
    plan: Plan, settings: Settings, first: PlannedProcess, has_credentials: bool
) -> Sequence[dict[str, Any]]:
    """Return the variables of a container: equal for all pods of a role, but for those that name fields of the pod."""
    whole = plan.complete(first, addresses(settings))
    job = replace(whole.job, rank=None, host=None, interface=None, credentials=None, credentials_file=None)
    plain = {**first.variables, **job.to_environment(), "PYTHONUNBUFFERED": "1"}
    fields = {"ECHELON_RANK": f"metadata.annotations['{INDEX}']", "DMLC_NODE_HOST": "status.podIP"}
    secret = {"secretKeyRef": {"name": settings.name, "key": "credentials"}}
    return [
        *({"name": name, "value": value} for name, value in sorted(plain.items())),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *([{"name": CREDENTIALS, "valueFrom": secret}] if has_credentials else []),
    ]
