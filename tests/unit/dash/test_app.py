"""The addresses of the page, for runs in every stage and for logs of any content."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from dash_pages import begin, event, page_of, progress, write

from echelon.dash import app

TEMPLATES = Path(app.__file__).parent / "templates"


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_a_run_that_has_not_started_says_so(tmp_path: Path) -> None:
    with page_of(tmp_path) as page:
        text = text_of(page.get("/").text)
    assert "waiting" in text
    assert "The job has not written any event yet." in text
    assert "No worker has started." in text


def test_a_run_that_trains_is_readable_without_scripts(tmp_path: Path) -> None:
    write(tmp_path, begin(0), begin(1), progress(0, 1.0, 2), progress(0, 2.0, 20), progress(1, 2.0, 10))
    write(tmp_path, event("training", 2.0, rank=0, epoch=1, samples=16, accuracy=0.5, loss=1.25))
    write(tmp_path, event("validation", 2.0, epoch=1.0, seconds=2.0, accuracy=0.8125, loss=0.5))
    with page_of(tmp_path, after_s=2.5) as page:
        html = page.get("/").text
    text = text_of(html)
    assert '<noscript><meta http-equiv="refresh" content="2"></noscript>' in html
    assert "epoch 2 of 4 25%" in text
    assert "Worker 0 training" in text
    assert "accuracy, validation 0.8125" in text
    assert "loss, training 1.2500" in text
    assert re.search(r"<td>1\.0</td><td>0:02</td><td>0\.8125</td><td>0\.5000</td>", html), "the table of validations"


def test_the_part_that_changes_is_a_part_of_the_page(tmp_path: Path) -> None:
    """The script exchanges each part by its name, so the page must have every part that /live has."""
    write(tmp_path, begin(0), progress(0, 1.0, 2))
    with page_of(tmp_path, after_s=1.0) as page:
        whole, live = page.get("/").text, page.get("/live").text
    parts = re.findall(r'data-part="(\w+)"', live)
    assert sorted(parts) == sorted(re.findall(r'data-part="(\w+)"', whole))
    assert len(parts) == len(set(parts)) == len(list((TEMPLATES / "parts").iterdir()))


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    folder.mkdir()
    write(
        folder, begin(0), event("view", 1.0, number=2, workers=[], departure="died", reason="<script>alert(1)</script>")
    )
    with page_of(folder, after_s=1.0) as page:
        html = page.get("/").text
    assert "<b>run" not in html
    assert "<script>alert" not in html


def test_the_page_has_no_inline_script_and_no_foreign_address(tmp_path: Path) -> None:
    write(tmp_path, begin(0), progress(0, 1.0, 2))
    with page_of(tmp_path, after_s=1.0) as page:
        html = page.get("/").text
    assert re.findall(r"<script(?! src=\"/assets/)", html) == []
    assert re.findall(r"\s(?:style|on\w+)=", html) == []
    assert re.findall(r"(?:src|href)=\"(?!/)", html) == []


def test_every_asset_of_the_page_exists(tmp_path: Path) -> None:
    with page_of(tmp_path) as page:
        for path in re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.get("/").text):
            assert page.get(path).status_code == 200, path
        assert "Permission is hereby granted" in page.get("/assets/uplot-LICENSE.txt").text
        assert page.get("/assets/../app.py").status_code == 404
        assert page.get("/assets/%2e%2e/app.py").status_code == 404


def test_the_state_is_valid_json_even_after_a_loss_of_nan(tmp_path: Path) -> None:
    write(tmp_path, begin(0), progress(0, 1.0, 2))
    write(tmp_path, event("training", 1.0, rank=0, epoch=1, samples=16, accuracy=0.1, loss=None))
    with page_of(tmp_path, after_s=1.0) as page:
        state = json.loads(page.get("/api/state").text, parse_constant=pytest.fail)
        assert "nan" in page.get("/").text
    assert state["training"]["loss"] == [None]
    assert state["workers"][0]["loss"] is None


def test_a_deleted_run_keeps_its_last_state(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder, begin(0), progress(0, 1.0, 2))
    with page_of(folder, after_s=1.0) as page:
        shutil.rmtree(folder)
        text = text_of(page.get("/").text)
    assert "The folder of this run was deleted." in text
    assert "Worker 0 training" in text


def test_sixty_four_workers_are_shown_densely(tmp_path: Path) -> None:
    write(tmp_path, *(begin(rank) for rank in range(64)), *(progress(rank, 1.0, 2) for rank in range(64)))
    with page_of(tmp_path, after_s=1.0) as page:
        html = page.get("/").text
    assert len(re.findall(r'id="worker-\d+"', html)) == 64
    assert 'class="workers dense"' in html


def test_the_log_is_read_while_the_page_is_served(tmp_path: Path) -> None:
    with page_of(tmp_path, after_s=1.0) as page, page:
        assert page.get("/api/state").json()["run"]["status"] == "waiting"
        write(tmp_path, begin(0), progress(0, 1.0, 2))
        while page.get("/api/state").json()["run"]["status"] != "training":
            pass
