"""A server that answers the Kubernetes API's requests for one job: objects, pods and their logs.

Creating a Job starts its pods. A pod prints a line and ends with the status that `statuses` has for it. With `runs` it
runs until it is deleted.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Manifest = dict[str, Any]


class Api:
    """The state of the cluster, and its server at `url`."""

    def __init__(
        self, statuses: dict[str, int] | None = None, waiting: str | None = None, *, runs: bool = False
    ) -> None:
        self.statuses = statuses or {}
        self.waiting = waiting  # why no container can start
        self.runs = runs
        self.deleted_pods: set[str] = set()
        self.objects: dict[str, Manifest] = {}  # by path
        self.created: list[Manifest] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def pods(self) -> list[Manifest]:
        jobs = [one for one in self.objects.values() if one["kind"] == "Job"]
        pods = [self._pod(job, index) for job in jobs for index in range(job["spec"]["completions"])]
        return [pod for pod in pods if pod["metadata"]["name"] not in self.deleted_pods]

    def _pod(self, job: Manifest, index: int) -> Manifest:
        name = f"{job['metadata']['name']}-{index}"
        state: Manifest = {"terminated": {"exitCode": self.statuses.get(name, 0)}}
        if self.runs:
            state = {"running": {}}
        if self.waiting:
            state = {"waiting": {"reason": self.waiting, "message": "no such image"}}
        return {
            "metadata": {
                "name": name,
                "labels": job["spec"]["template"]["metadata"]["labels"],
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            },
            "spec": {"containers": []},
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {"name": "c", "image": "i", "imageID": "", "ready": True, "restartCount": 0, "state": state}
                ],
            },
        }


def _handler(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, content: Manifest | bytes, status: int = 200) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(content, bytes) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path.endswith("/log"):
                self.answer(f"the output of {path.split('/')[-2]}\n".encode())
            else:
                self.answer({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": api.pods()})

        def do_POST(self) -> None:
            one = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = f"{urlsplit(self.path).path}/{one['metadata']['name']}"
            if path in api.objects:
                self.answer({"kind": "Status", "message": f"{path} already exists"}, 409)
                return
            api.objects[path] = one
            api.created.append(one)
            self.answer(one, 201)

        def do_DELETE(self) -> None:
            path = urlsplit(self.path).path
            if "/pods/" in path:
                api.deleted_pods.add(path.rpartition("/")[2])
            elif api.objects.pop(path, None) is None:
                self.answer({"kind": "Status", "message": "not found"}, 404)
                return
            self.answer({"kind": "Status", "status": "Success"})

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    return Handler
