"""The Kubernetes launcher: prints the objects of a job, or creates them, follows their pods and deletes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from echelon.errors import UsageError
from echelon.launch.interface import Output
from echelon.launch.kubernetes.manifests import PLACEHOLDER, Settings, manifests
from echelon.launch.kubernetes.pods import Cluster, PodBackend, load_client
from echelon.launch.plan import Plan, Request, make_plan, without_restarts
from echelon.launch.run import run_job


class KubernetesLauncher:
    """Runs every process of a job as a pod."""

    name = "kubernetes"
    no_restarts = "a Job of Kubernetes starts each pod once"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of this launcher."""
        flags = {
            "image": "container image with Echelon and your program; required",
            "name": "name of the job's objects (default: echelon)",
            "namespace": "namespace of the job (default: default)",
            "context": "context of kubectl's configuration (default: the current one)",
            "cpus": "CPUs of each worker, for example 4 or 500m",
            "memory": "memory of each worker, for example 8Gi",
            "workdir": "working directory in the containers (default: the image's)",
            "pull-secret": "secret for pulling the image",
        }
        for name, text in flags.items():
            group.add_argument(f"--kubernetes-{name}", help=text)
        group.add_argument("--kubernetes-gpus", type=int, default=0, help="GPUs of each worker (nvidia.com/gpu)")
        group.add_argument(
            "--kubernetes-volume",
            action="append",
            default=[],
            metavar="CLAIM:PATH",
            help="mount a persistent volume claim in every pod; can be given several times",
        )

    def plan(self, request: Request) -> Plan:
        """Return the plan of pods. Their hosts are chosen by Kubernetes."""
        for flag, given in (
            ("-H", request.hosts),
            ("-i", request.job.interface),
            ("--sync-dst-dir", request.sync_dst_dir),
        ):
            if given:
                raise UsageError(f"{flag} has no meaning with --launcher kubernetes: Kubernetes places the pods")
        settings_of(request.options)
        return make_plan(without_restarts(request), python="python")

    def describe(self, plan: Plan) -> str:
        """Return the objects as documents for `kubectl apply -f -`, which reads JSON. The secret is a placeholder."""
        return as_documents(plan, settings_of(plan.request.options))

    def run(self, plan: Plan, output: Output) -> int:
        """Create the objects, follow the pods to their end, and delete the objects."""
        settings = settings_of(plan.request.options)
        cluster = Cluster(load_client(plan.request.options.get("kubernetes_context")), settings)
        objects = manifests(plan, settings, plan.job.credentials)
        try:
            return run_job(plan, output, PodBackend(plan, cluster, objects))
        finally:
            cluster.delete()


def as_documents(plan: Plan, settings: Settings) -> str:
    """Return the objects of a job as text."""
    credentials = None if plan.job.security == "none" else PLACEHOLDER
    return "\n---\n".join(json.dumps(one, indent=2) for one in manifests(plan, settings, credentials))


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Return the settings that the flags describe."""
    given = {name.removeprefix("kubernetes_"): options.get(name) for name in options if name.startswith("kubernetes_")}
    if not given.get("image"):
        raise UsageError("--launcher kubernetes needs --kubernetes-image IMAGE, an image with Echelon and your program")
    volumes = tuple(_volume(text) for text in given.pop("volume", None) or [])
    given.pop("context", None)
    return Settings(volumes=volumes, **{name: value for name, value in given.items() if value})


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise UsageError(f"--kubernetes-volume {text!r}: write CLAIM:/PATH, for example data:/data")
    return claim, path
