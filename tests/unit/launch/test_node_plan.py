"""One node's part of a job, and the benchmark files of DLBS that describe it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.bench.recipe import read_recipe
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.node import Rendezvous, node_plan, parse_rendezvous
from echelon.launch.plan import Plan, Request

RENDEZVOUS = Rendezvous("10.0.0.1", 29500, "eth0")
EXAMPLES = Path(__file__).parents[3] / "examples" / "image-classification"


def plan(rank: int, num_nodes: int = 2, servers_per_node: int = 1) -> Plan:
    job = Job(num_workers=num_nodes, num_servers=num_nodes * servers_per_node)
    return node_plan(Request(job, ["train"]), rank, RENDEZVOUS)


def test_the_rendezvous_has_an_optional_interface() -> None:
    assert parse_rendezvous("ib0:10.0.0.1:29500") == Rendezvous("10.0.0.1", 29500, "ib0")
    assert parse_rendezvous("10.0.0.1:29500") == Rendezvous("10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1", "write INTERFACE:IP:PORT or IP:PORT"),
        ("a:b:c:d", "write INTERFACE:IP:PORT or IP:PORT"),
        (":10.0.0.1:29500", "write INTERFACE:IP:PORT or IP:PORT"),
        ("10.0.0.1:http", "'http' is not a port"),
        ("10.0.0.1:65535", "write a number from 1 to 65534"),
        ("INTERFACE:two..dots:29500", "'two..dots' is neither an IP address nor a known host"),
        ("INTERFACE:IP_ADDRESS.invalid:29500", "'IP_ADDRESS.invalid' is neither an IP address nor a known host"),
    ],
)
def test_another_rendezvous_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_rendezvous(text, "mxnet.rendezvous in config.json")
    assert str(caught.value).startswith(f"mxnet.rendezvous in config.json is {text!r}")


def test_node_0_also_runs_the_scheduler() -> None:
    assert [process.name for process in plan(0).processes] == ["scheduler 0", "server 0", "worker 0"]
    assert [process.name for process in plan(1).processes] == ["server 1", "worker 1"]
    assert [process.name for process in plan(1, servers_per_node=2).processes] == ["server 2", "server 3", "worker 1"]
    assert [process.name for process in plan(0, servers_per_node=0).processes] == ["worker 0"]


def test_every_process_has_the_variables_of_dlbs() -> None:
    for rank in (0, 1):
        for process in plan(rank).processes:
            expected = {
                "DMLC_ROLE": process.role,
                "DMLC_PS_ROOT_URI": "10.0.0.1",
                "DMLC_PS_ROOT_PORT": "29500",
                "DMLC_NUM_SERVER": "2",
                "DMLC_NUM_WORKER": "2",
                "DMLC_INTERFACE": "eth0",
                "PS_VERBOSE": "0",
            }
            assert process.environment.items() >= expected.items()


def test_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="a job of 2 nodes has the nodes 0 to 1"):
        plan(2)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., list[str]]:
    """Write a config.json with these parameters; return the flags of the worker of node 1."""
    (tmp_path / "train_imagenet.py").touch()

    def read(**parameters: Any) -> list[str]:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"parameters": {key.replace("__", "."): one for key, one in parameters.items()}}))
        return list(read_recipe(config, 1, {"DATA": "/data"}.get).command[2:])

    return read


def test_a_recipe_becomes_the_flags_of_a_worker(recipe: Callable[..., list[str]]) -> None:
    flags = recipe(
        exp__num_nodes=2,
        exp__gpus="0,1",
        exp__replica_batch=32,
        exp__num_warmup_batches=2,
        exp__num_batches=8,
        exp__model="vgg16",
        exp__dtype="float16",
        exp__data_dir="${DATA}/rank_${mxnet.rank}",
        mxnet__kv_store="dist_device_sync",
    )
    assert shlex.join(flags) == (
        "--network vgg --num-layers 16 --batch-size 64 --num-examples 1280 --num-epochs 1 --dtype float16 "
        "--kv-store dist_device_sync --disp-batches 8 --gpus 0,1 --data-train /data/rank_1/train.rec"
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"exp__num_nodes": "two"}, "exp.num_nodes is 'two'; it must be a whole number, 1 or more"),
        ({"exp__model": "resnet51"}, "did you mean 'resnet50'"),
        ({"exp__data_dir": "${NOWHERE}"}, r"exp.data_dir uses \$\{NOWHERE\}, which is neither"),
        ({"exp__data_dir": "${exp.dtype}", "exp__dtype": "${exp.data_dir}"}, "refers to itself"),
    ],
)
def test_a_wrong_recipe_names_file_and_key(
    recipe: Callable[..., list[str]], tmp_path: Path, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        recipe(**parameters)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_damaged_recipe_names_the_line(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"parameters": {\n  "exp.num_nodes": 2,\n}}')
    with pytest.raises(UsageError, match=r"is not valid JSON: .* line 3"):
        read_recipe(config, 0, lambda name: None)


def test_the_example_is_complete() -> None:
    recipe = read_recipe(EXAMPLES / "config.json", 0, lambda name: None)
    assert (recipe.num_nodes, recipe.rendezvous, recipe.unused) == (2, "127.0.0.1:29500", ())
