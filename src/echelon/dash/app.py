"""The addresses of the live page. All of them only read.

`/` is the page, `/live` its changing part, `/api/state` the same as JSON, `/metrics` for Prometheus, `/healthz` says
that the page answers. The part that changes is rendered here only: the script of the page exchanges it as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from echelon.dash import formats
from echelon.dash.access import HEALTH, Guard
from echelon.dash.metrics import CONTENT_TYPE, metrics_text
from echelon.dash.snapshot import Snapshot, snapshot
from echelon.report.follow import RunFollower

READ_S = 0.3  # between two looks at the log
_HERE = Path(__file__).parent


def make_app(
    follower: RunFollower, *, token: str | None, port: int, clock: Callable[[], float] = time.time
) -> Starlette:
    """Return the page of a run. `port` is part of the cookie's name; `token` is None on a loopback address."""
    templates = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(formats.FILTERS)

    def fields(shown: Snapshot) -> dict[str, object]:
        return {name: getattr(shown, name) for name in shown.__struct_fields__}

    def now() -> Snapshot:
        return snapshot(follower.state, follower.files, clock())

    async def page(request: Request) -> Response:
        return HTMLResponse(templates.get_template("page.html").render(fields(now())))

    async def live(request: Request) -> Response:
        return HTMLResponse(templates.get_template("live.html").render(fields(now())))

    async def state(request: Request) -> Response:
        return Response(msgspec.json.encode(now()), media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(metrics_text(now()), headers={"Content-Type": CONTENT_TYPE})

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/live", live),
            Route("/api/state", state),
            Route("/metrics", metrics),
            Route(HEALTH, health),
            Mount("/assets", StaticFiles(directory=_HERE / "assets")),
        ],
        middleware=[Middleware(Guard, token=token, port=port)],
        lifespan=lambda _: _reading(follower),
    )


@asynccontextmanager
async def _reading(follower: RunFollower) -> AsyncIterator[None]:
    """Read the log piece by piece, between the requests, as long as the page is served."""

    async def read() -> None:
        while True:
            more = False
            with suppress(OSError):  # of a network disk, for a while
                more = follower.read()
            await asyncio.sleep(0 if more else READ_S)

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
