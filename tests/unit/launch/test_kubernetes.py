"""The Kubernetes launcher: its objects, and what it asks of the API. No cluster runs here."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
from kubernetes_api import Api

from echelon.environment import Job
from echelon.errors import NOT_WHOLE, UsageError
from echelon.launch.interface import Output
from echelon.launch.kubernetes.launcher import KubernetesLauncher
from echelon.launch.kubernetes.manifests import PLACEHOLDER, Manifest, Settings, manifests
from echelon.launch.plan import Plan, Request
from echelon.launch.run import protect

GOLDEN = Path(__file__).parent / "golden" / "kubernetes.json"
OPTIONS = {
    "kubernetes_image": "registry.example/echelon:1",
    "kubernetes_name": "mnist",
    "kubernetes_namespace": "lab",
    "kubernetes_cpus": "4",
    "kubernetes_memory": "8Gi",
    "kubernetes_gpus": 1,
    "kubernetes_volume": ["images:/data"],
    "kubernetes_workdir": "/work",
    "kubernetes_pull_secret": "registry",
}
COMMAND = ["python", "train.py", "--name", "it's $HOME"]


def plan(num_servers: int = 1, **options: object) -> Plan:
    job = Job(num_workers=2, num_servers=num_servers)
    return KubernetesLauncher().plan(Request(job, COMMAND, options={**OPTIONS, **options}))


def documents(text: str) -> list[Manifest]:
    return [json.loads(one) for one in text.split("\n---\n")]


def test_the_objects_are_those_of_the_golden_file() -> None:
    """After a wanted change: python -m pytest …, look at the difference, and write the text to the file."""
    assert KubernetesLauncher().describe(plan()) == GOLDEN.read_text().rstrip("\n")


def check_against_model(one: Manifest) -> None:
    """Check an object with its model in the official client, which refuses unknown, missing and wrong fields."""
    getattr(kubernetes.client, f"V1{one['kind']}").model_validate(one)


@pytest.mark.parametrize("num_servers", [0, 2])
def test_the_objects_are_valid(num_servers: int) -> None:
    for one in manifests(plan(num_servers), Settings("image")):
        check_against_model(one)


def test_the_check_of_objects_can_fail() -> None:
    job = manifests(plan(), Settings("image"))[-1]
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        check_against_model(job)


def test_without_servers_every_worker_is_needed_and_worker_0_is_the_address() -> None:
    _, _, workers = documents(KubernetesLauncher().describe(plan(num_servers=0)))
    assert workers["spec"]["backoffLimit"] == 0
    variables = {one["name"]: one.get("value") for one in workers["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert (variables["DMLC_PS_ROOT_URI"], variables["DMLC_PS_ROOT_PORT"]) == ("mnist-worker-0.mnist", "9092")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kubernetes_image": None}, "needs --kubernetes-image"),
        ({"kubernetes_name": "My_Job"}, "'My_Job' is not a valid name"),
        ({"kubernetes_volume": ["data"]}, "write CLAIM:/PATH"),
    ],
)
def test_wrong_flags_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**options)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Start a server for the API, and let the client's configuration name it."""
    started: list[Api] = []

    def start(**settings: Any) -> Api:
        api = Api(**settings)
        started.append(api)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": api.url}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path = tmp_path / "config"
        path.write_text(json.dumps(config))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        return api

    yield start
    for api in started:
        api.close()


def run(plan: Plan) -> tuple[int, list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    status = KubernetesLauncher().run(protect(plan), Output(lambda name, text: lines.append((name, text))))
    return status, lines


def test_a_job_runs_and_leaves_nothing(cluster: Callable[..., Api], capfd: pytest.CaptureFixture[str]) -> None:
    api = cluster()
    status, lines = run(plan())
    assert status == 0
    names = ("scheduler 0", "server 0", "worker 0", "worker 1")
    assert sorted(lines) == [(name, f"the output of mnist-{name.replace(' ', '-')}") for name in names]
    assert [one["kind"] for one in api.created] == ["Secret", "Service", "Job", "Job", "Job"]
    assert api.created[0]["stringData"]["credentials"] != PLACEHOLDER
    assert api.objects == {}
    assert capfd.readouterr().err == ""


def test_a_failed_worker_gives_its_status(cluster: Callable[..., Api], capfd: pytest.CaptureFixture[str]) -> None:
    api = cluster(statuses={"mnist-worker-0": 5, "mnist-worker-1": 5})
    assert run(plan())[0] == 5
    assert re.search(r"\(pod mnist-worker-[01]\) exited with status 5", capfd.readouterr().err), "the first to end"
    assert api.objects == {}


def test_a_lost_worker_whose_work_others_did_not_do_gives_the_status_of_the_scheduler(
    cluster: Callable[..., Api], capfd: pytest.CaptureFixture[str]
) -> None:
    cluster(statuses={"mnist-worker-1": 5, "mnist-scheduler-0": NOT_WHOLE})
    assert run(plan())[0] == NOT_WHOLE
    assert "worker 1 (pod mnist-worker-1) exited with status 5" in capfd.readouterr().err


def test_no_process_waits_for_a_restart_of_a_pod() -> None:
    """The scheduler would wait for a lost server."""
    assert all(process.job.max_restarts == 0 for process in plan().processes)


def test_ctrl_c_deletes_the_pods_and_the_objects(
    cluster: Callable[..., Api], capfd: pytest.CaptureFixture[str]
) -> None:
    api = cluster(runs=True)
    shown: list[str] = []

    def interrupt(name: str, text: str) -> None:
        shown.append(name)
        if len(shown) == 4:  # every process has printed its line
            signal.raise_signal(signal.SIGINT)

    status = KubernetesLauncher().run(protect(plan()), Output(interrupt))
    assert status == 128 + signal.SIGINT
    assert {"mnist-worker-0", "mnist-worker-1"} <= api.deleted_pods
    assert api.objects == {}
    assert "echelon: stopped by SIGINT" in capfd.readouterr().err


def test_an_image_that_cannot_be_pulled(cluster: Callable[..., Api], capfd: pytest.CaptureFixture[str]) -> None:
    api = cluster(waiting="ImagePullBackOff")
    assert run(plan())[0] == 1
    assert "cannot start: ImagePullBackOff: no such image" in capfd.readouterr().err
    assert api.objects == {}


def test_a_name_that_is_taken_gives_one_line(cluster: Callable[..., Api]) -> None:
    api = cluster()
    other = "/api/v1/namespaces/lab/services/mnist"
    api.objects[other] = {"kind": "Service"}
    with pytest.raises(UsageError, match="another job has the name mnist: choose another with --kubernetes-name"):
        run(plan())
    assert list(api.objects) == [other]  # the Secret, which was created before, is gone


def test_an_api_that_does_not_answer_gives_one_line(cluster: Callable[..., Api]) -> None:
    api = cluster()
    api.server.server_close()  # refuses connections from now on
    with pytest.raises(UsageError, match="Kubernetes cannot create the Secret mnist in lab"):
        run(plan())


def test_no_configuration_gives_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="there is no usable Kubernetes configuration"):
        run(plan())


def test_the_secret_is_not_in_the_dry_run() -> None:
    secured = protect(plan())
    text = KubernetesLauncher().describe(secured)
    assert secured.job.credentials is not None
    assert secured.job.credentials not in text
    assert PLACEHOLDER in text
    insecure = replace(secured.request.job, security="none", credentials=None)
    unprotected = KubernetesLauncher().plan(replace(secured.request, job=insecure))
    assert "Secret" not in [one["kind"] for one in documents(KubernetesLauncher().describe(unprotected))]
