"""A job in a Kubernetes cluster: creating and deleting its objects, and its pods as processes of the job.

The official client makes the requests. It blocks, so a thread per pod reads the log and writes it to a pipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.errors import UsageError
from echelon.launch.kubernetes.manifests import INDEX, LABEL, ROLE, Manifest, Settings
from echelon.launch.plan import Plan, PlannedProcess
from echelon.launch.supervision.processes import how_ended

POLL_S = 1.0
LOST_S = 60.0  # without an answer of the API, after which the job is given up
SAVING_S = 30  # to end, for a pod that is asked to
LOG_S = 5.0  # for the rest of a log to arrive after the end of its pod
_CANNOT_START = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}
_INSTALL = "--launcher kubernetes needs the Kubernetes client: pip install 'echelon[kubernetes]'"


def load_client(context: str | None) -> Any:
    """Return the client module, configured as kubectl is, or as a pod of the cluster."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UsageError(_INSTALL) from error
    try:
        config.load_kube_config(context=context)
    except config.ConfigException as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            raise UsageError(
                f"there is no usable Kubernetes configuration: {error}; let 'kubectl get pods' work first"
            ) from error
    return client


class Cluster:
    """The objects of one job in a cluster."""

    def __init__(self, client: Any, settings: Settings) -> None:
        self._client = client
        self._core, self._batch = client.CoreV1Api(), client.BatchV1Api()
        self._settings = settings
        self._created: list[Manifest] = []

    def create(self, manifests: Sequence[Manifest]) -> None:
        """Create the objects. Raises UsageError, without traces of the job, if the cluster refuses one."""
        calls = {
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
            "Job": self._batch.create_namespaced_job,
        }
        for one in manifests:
            with self._explained(f"cannot create the {one['kind']} {one['metadata']['name']}"):
                calls[one["kind"]](self._settings.namespace, one)
            self._created.append(one)

    def delete(self) -> None:
        """Delete what was created, with all pods. What is already gone is no error."""
        calls = {
            "Secret": self._core.delete_namespaced_secret,
            "Service": self._core.delete_namespaced_service,
            "Job": self._batch.delete_namespaced_job,
        }
        while self._created:
            one = self._created.pop()
            name = one["metadata"]["name"]
            try:
                response = calls[one["kind"]](
                    name, self._settings.namespace, propagation_policy="Background", _preload_content=False
                )
                status, why = response.status, str(response.status)
            except Exception as error:  # the client raises errors of several libraries
                status, why = getattr(error, "status", None), _reason(error)
            if status != 404 and not (status and status < 300):
                print(f"echelon: the {one['kind']} {name} was not deleted: {why}", file=sys.stderr, flush=True)

    def pods(self) -> list[Any]:
        """Return the pods of the job."""
        selector = f"{LABEL}={self._settings.name}"
        found: list[Any] = self._core.list_namespaced_pod(self._settings.namespace, label_selector=selector).items
        return found

    def delete_pod(self, name: str, within_s: int) -> None:
        """Ask a pod to end, and let the cluster kill it after some seconds."""
        with suppress(Exception):  # a pod that is gone needs no request, and the next one repeats a lost request
            self._core.delete_namespaced_pod(name, self._settings.namespace, grace_period_seconds=within_s)

    def log(self, name: str) -> Iterator[bytes]:
        """Yield the output of a pod as it appears, until the pod has ended."""
        response = self._core.read_namespaced_pod_log(
            name, self._settings.namespace, follow=True, _preload_content=False
        )
        yield from response.stream()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.delete()
            settings = self._settings
            advice = ""
            if getattr(error, "status", None) == 409:
                advice = (
                    f"; another job has the name {settings.name}: choose another with --kubernetes-name, or delete it: "
                    f"kubectl -n {settings.namespace} delete jobs,services,secrets -l {LABEL}={settings.name}"
                )
            raise UsageError(f"Kubernetes {what} in {settings.namespace}: {_reason(error)}{advice}") from error


class PodProcess:
    """A pod of the job, as the supervisor sees a process."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.name = name
        self._cluster = cluster
        self._pod: str | None = None
        self._code: int | None = None
        self._how = ""
        self._ended_at = 0.0
        self._signalled: int | None = None
        self._reader: int | None = None
        self._log: threading.Thread | None = None

    @property
    def where(self) -> str:
        """Its pod."""
        return f"pod {self._pod}" if self._pod else "no pod yet"

    def update(self, pod: Any | None) -> None:
        """Take the state of the pod that the cluster reports; None: it has none."""
        if self._code is not None:
            return
        if pod is None:
            if self._pod is not None:
                self._end(-(self._signalled or signal.SIGKILL), "was deleted by the cluster")
            return
        self._pod = pod.metadata.name
        states = [one.state for one in pod.status.container_statuses or []]
        if any(state.running or state.terminated for state in states) and self._log is None:
            self._follow_log()
        for state in states:
            if state.terminated:
                code = state.terminated.exit_code
                self._end(128 - code if code > 128 else code)
            elif state.waiting and state.waiting.reason in _CANNOT_START:
                self._end(1, f"cannot start: {state.waiting.reason}: {state.waiting.message}")
        if pod.status.phase == "Failed" and self._code is None:  # for example evicted
            self._end(1, f"failed: {pod.status.reason}: {pod.status.message}")

    def fail(self, why: str) -> None:
        """Give the process up."""
        self._end(1, why)

    def fileno(self) -> int | None:
        """Return the pipe of its log, once there is one."""
        return self._reader

    def read_output(self) -> bytes | None:
        """Return the output since the last call, None if there is none, or b"" if it has ended."""
        if self._reader is None:
            return b"" if self._code is not None else None
        try:
            return os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return None

    def exit_code(self) -> int | None:
        """Return the exit code, when the rest of the log has arrived, or None while the pod runs."""
        if self._code is None or self._log is None or not self._log.is_alive():
            return self._code
        return self._code if time.monotonic() - self._ended_at > LOG_S else None

    def how_ended(self) -> str:
        """Say how it ended."""
        return self._how or how_ended(self._code or 0)

    def send_signal(self, number: int) -> None:
        """Ask the pod to end. Kubernetes sends SIGTERM, whatever the signal, and then SIGKILL."""
        self._signalled = number
        if self._pod is not None and self._code is None:
            self._cluster.delete_pod(self._pod, 0 if number == signal.SIGKILL else SAVING_S)
        elif self._pod is None:
            self._end(-number)

    def reap(self) -> int:
        """Kill the pod if it runs, and return its exit code."""
        if self._code is None:
            self.send_signal(signal.SIGKILL)
            self._end(-signal.SIGKILL)
        assert self._code is not None
        return self._code

    def close(self) -> None:
        """Reap the process and close the pipe."""
        self.reap()
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None

    def cpu_ticks(self) -> int:
        """Return a growing number: the API does not report processor time, and only Kubernetes stops idle pods."""
        return int(time.monotonic() * 100)

    def _end(self, code: int, how: str = "") -> None:
        if self._code is None:
            self._code, self._how, self._ended_at = code, how, time.monotonic()

    def _follow_log(self) -> None:
        assert self._pod is not None
        pod = self._pod
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)

        def copy() -> None:
            with open(writer, "wb", buffering=0) as pipe:
                try:
                    for data in self._cluster.log(pod):
                        pipe.write(data)
                except BrokenPipeError:
                    pass  # the launcher has ended
                except Exception as error:
                    with suppress(OSError):
                        pipe.write(f"\nthe log of {pod} was interrupted: {_reason(error)}\n".encode())

        self._log = threading.Thread(target=copy, name=f"log of {pod}", daemon=True)
        self._log.start()


class PodBackend:
    """Starts a plan by creating its objects, and follows its pods."""

    def __init__(self, plan: Plan, cluster: Cluster, objects: Sequence[Manifest]) -> None:
        self._plan = plan
        self._cluster = cluster
        self._objects = objects
        self._processes: dict[tuple[str, str], PodProcess] = {}
        self._last_poll = self._last_answer = time.monotonic()
        self._reported: set[str] = set()

    def start(self, planned: PlannedProcess) -> PodProcess:
        """Return the process of a pod. The first call creates all objects."""
        if not self._processes:
            self._cluster.create(self._objects)
        process = PodProcess(planned.name, self._cluster)
        self._processes[planned.role, str(planned.rank)] = process
        return process

    def turn(self) -> None:
        """Ask for the state of all pods, once per second."""
        now = time.monotonic()
        if now - self._last_poll < POLL_S:
            return
        self._last_poll = now
        try:
            pods = self._cluster.pods()
        except Exception as error:
            if now - self._last_answer > LOST_S:
                for process in self._processes.values():
                    process.fail(f"is unknown: the Kubernetes API did not answer for {LOST_S:g} s: {_reason(error)}")
            return
        self._last_answer = now
        by_place = {(pod.metadata.labels[ROLE], pod.metadata.annotations[INDEX]): pod for pod in pods}
        for place, process in self._processes.items():
            pod = by_place.get(place)
            process.update(pod)
            self._report_waiting(process, pod)

    def on_joined(self, handler: Callable[[list[str]], None]) -> None:
        """Assume that all workers join: a pod does not report it, and a warning must not be wrong."""
        handler([f"{process.rank} dist_sync" for process in self._plan.of_role(WORKER)])

    def report_exit(self, exited: WorkerExited) -> None:
        """Do nothing: the scheduler, inside the cluster, notices the end of a connection itself."""

    def can_restart(self, planned: PlannedProcess) -> bool:
        """Return False: the Job objects of Kubernetes start each pod once."""
        return False

    def restart(self, planned: PlannedProcess) -> PodProcess:
        """Never called, because no process can be restarted."""
        raise NotImplementedError

    def release(self, planned: PlannedProcess) -> None:
        """Do nothing."""

    def scheduler_address(self) -> None:
        """Return None: only pods of the cluster reach the scheduler."""

    def _report_waiting(self, process: PodProcess, pod: Any | None) -> None:
        """Say once why a pod is not scheduled, for example because no node has the GPUs."""
        for condition in (pod.status.conditions or []) if pod is not None else []:
            if condition.type == "PodScheduled" and condition.status == "False" and process.name not in self._reported:
                self._reported.add(process.name)
                print(f"echelon: {process.name} waits: {condition.message}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    """Return the shortest text that says what an error of the client means."""
    body = getattr(error, "body", None)
    text = str(getattr(error, "reason", None) or error)
    if body:
        with suppress(ValueError, AttributeError):
            text = json.loads(body).get("message") or text
    return text.strip().partition("\n")[0]
