"""Who may read the page: this machine, and on other addresses whoever has the token. Nobody may change anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from dash_pages import page_of

from echelon.dash.access import host_of, is_loopback

TOKEN = "secret-token"
PATHS = ["/", "/live", "/api/state", "/metrics", "/assets/page.js"]


@pytest.mark.parametrize("path", [*PATHS, "/healthz", "/nosuch"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_allowed(tmp_path: Path, path: str, method: str) -> None:
    with page_of(tmp_path) as page:
        answer = page.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", [*PATHS, "/healthz"])
def test_head_is_answered_without_a_body(tmp_path: Path, path: str) -> None:
    with page_of(tmp_path) as page:
        answer = page.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", [*PATHS, "/nosuch"])
def test_every_answer_forbids_foreign_scripts(tmp_path: Path, path: str) -> None:
    with page_of(tmp_path) as page:
        headers = page.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("header", "is_local"),
    [
        ("127.0.0.1:8077", True),
        ("127.0.0.1", True),
        ("localhost:9000", True),
        ("LocalHost.:1", True),
        ("[::1]:8077", True),
        ("[::1]", True),
        ("evil.example:8077", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1:8077", False),
        ("[::1", True),
        ("", False),
    ],
)
def test_names_of_this_machine(header: str, is_local: bool) -> None:
    assert is_loopback(host_of(header)) is is_local


@pytest.mark.parametrize("path", [*PATHS, "/healthz"])
def test_a_foreign_host_name_is_rejected_on_loopback(tmp_path: Path, path: str) -> None:
    """DNS rebinding: the browser sends the name of the web site that made the request."""
    with page_of(tmp_path, base_url="http://evil.example:8077") as page:
        answer = page.get(path)
    assert answer.status_code == 421
    assert "evil.example" in answer.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query", ["", "?token=wrong", "?token=", "?token=é"])
def test_without_the_token_nothing_is_shown(tmp_path: Path, path: str, query: str) -> None:
    with page_of(tmp_path, token=TOKEN, base_url="http://host:8077") as page:
        answer = page.get(path + query, headers={"Cookie": "echelon_dash_8077=wrong", "Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert TOKEN not in answer.text


def test_health_needs_no_token(tmp_path: Path) -> None:
    with page_of(tmp_path, token=TOKEN, base_url="http://host:8077") as page:
        assert page.get("/healthz").text == "ok\n"


def test_the_token_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    with page_of(tmp_path, token=TOKEN, base_url="http://host:8077") as page:
        answer = page.get(f"/api/state?token={TOKEN}&x=1", follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/api/state?x=1"
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"echelon_dash_8077={TOKEN};")
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert page.get("/").status_code == 200, "the client has kept the cookie"


def test_the_token_does_not_lead_to_another_host(tmp_path: Path) -> None:
    with page_of(tmp_path, token=TOKEN, base_url="http://host:8077") as page:
        answer = page.get(f"http://host:8077//evil.example/?token={TOKEN}", follow_redirects=False)
    assert answer.headers["location"].startswith("/evil.example")


def test_prometheus_sends_the_token_as_a_header(tmp_path: Path) -> None:
    with page_of(tmp_path, token=TOKEN, base_url="http://host:8077") as page:
        assert page.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
