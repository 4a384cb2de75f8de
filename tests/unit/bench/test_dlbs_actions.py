"""The actions of the harness, as far as they start no job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.bench.dlbs.command import checked_run
from echelon.bench.dlbs.configuration.config import load_config
from echelon.bench.dlbs.configuration.experiment import Experiment, build_experiments
from echelon.bench.dlbs.records import record_line
from echelon.cli.main import main
from echelon.errors import UsageError

MLP = ["-P", 'exp.model="mlp"']


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def experiment(*parameters: str, variables: tuple[str, ...] = ()) -> Experiment:
    return build_experiments(load_config(None, ['exp.model="mlp"', *parameters], variables), lambda name: None)[0]


def write_log(one: Experiment, **results: Any) -> None:
    records = {**one.parameters, "exp.status": "ok"} | {f"results.{key}": value for key, value in results.items()}
    one.log_file.parent.mkdir(exist_ok=True)
    one.log_file.write_text("".join(f"{record_line(key, value)}\n" for key, value in records.items()))


def test_parameters_become_the_flags_of_training() -> None:
    run = checked_run(
        experiment(
            "exp.replica_batch=8",
            "exp.num_warmup_batches=2",
            "exp.num_batches=10",
            "echelon.num_workers=3",
            'mxnet.kv_store="dist_gsync"',
            'echelon.groups="0,1/2"',
            "echelon.staleness=4",
            "echelon.pace=0.01",
            'echelon.slow="2:3"',
            "echelon.lr=0.2",
            'exp.model_opts={"num_classes": 7}',
        )
    )
    options = run.options
    assert (options.batch_size, options.num_examples, options.num_epochs) == (8, 3 * 12 * 8, 1)
    assert (options.kv_store, options.groups, options.staleness) == ("dist_gsync", "0,1/2", 4)
    assert (options.pace.seconds, options.pace.slow, options.lr) == (0.01, {2: 3.0}, 0.2)
    assert (options.network, options.image_shape, options.num_classes) == ("mlp", (1, 28, 28), 7)
    assert options.benchmark
    assert run.num_servers == 3


def test_variables_of_the_environment_are_texts() -> None:
    one = experiment('mxnet.env="A=1"', "runtime.env.B=true", "runtime.env.C=2.5", 'runtime.env.D="{}"')
    assert one.variables == {"A": "1", "B": "true", "C": "2.5", "D": "{}"}


def test_stores_without_servers_get_none() -> None:
    assert checked_run(experiment('mxnet.kv_store="dist_device_sync"', "echelon.num_workers=2")).num_servers == 0
    assert checked_run(experiment("echelon.num_workers=2", "echelon.num_servers=1")).num_servers == 1


def test_a_sweep_over_stores_gives_each_store_what_it_takes() -> None:
    swept = ('mxnet.kv_store=["dist_sync"]',)
    one = experiment("echelon.staleness=3", variables=swept)
    assert "echelon.staleness" not in one.parameters  # nor in the results
    assert checked_run(one).options.staleness is None
    with pytest.raises(UsageError, match=r"-P echelon.staleness: echelon.staleness 3 has no meaning for"):
        checked_run(experiment("echelon.staleness=3", 'mxnet.kv_store="dist_sync"'))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (['exp.model="lennet"'], "-P exp.model: unknown exp.model 'lennet'; did you mean 'lenet'"),
        (['mxnet.kv_store="dist_snyc"'], "-P mxnet.kv_store: unknown store 'dist_snyc'; did you mean 'dist_sync'"),
        (['echelon.slow="1:3"'], "-P echelon.slow: echelon.slow and echelon.stall multiply"),
        (['mxnet.kv_store="dist_ssync"'], "-P mxnet.kv_store: dist_ssync needs a bound"),
        (['echelon.engine="fast"'], "-P echelon.engine: "),
        (['exp.model_opts={"depth": 3}'], "-P exp.model_opts: unknown option of exp.model_opts 'depth'"),
        (["exp.num_nodes=2", "mxnet.rank=2"], "-P mxnet.rank: mxnet.rank is 2"),
        (["exp.num_nodes=2", 'mxnet.rendezvous="here"'], "-P mxnet.rendezvous: mxnet.rendezvous is 'here'"),
        (["exp.num_nodes=2", "echelon.num_workers=2"], "-P echelon.num_workers: echelon.num_workers is 2"),
        (['exp.data_dir="/nowhere"'], "-P exp.data_dir: exp.data_dir: /nowhere/train.rec does not exist"),
        (
            ["echelon.num_workers=2", 'mxnet.kv_store="dist_gsync"', 'echelon.groups="0,1/9"'],
            "-P echelon.groups: groups '0,1/9' line 2: worker 9 does not exist",
        ),
        (['mxnet.env="A"'], "-P mxnet.env: mxnet.env: 'A' is not NAME=VALUE"),
    ],
)
def test_an_experiment_that_cannot_run_names_the_parameter(parameters: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_run(experiment(*parameters))
    assert message in str(caught.value)


def test_validate_reports_every_invalid_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "validate", *MLP, "-V", 'mxnet.kv_store=["dist_sync","nope","none"]']) == 2
    output = capsys.readouterr()
    assert output.out == "3 experiments, 2 of them cannot run\n"
    assert output.err.count("-V mxnet.kv_store: unknown store") == 2
    assert main(["bench", "validate", *MLP]) == 0


def test_a_plan_is_written_and_run_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MLP, '-Pexp.status="simulate"', "-V", "exp.replica_batch=[4,8]", "--plan", "plan.json"]
    assert main(["bench", "build", *flags]) == 0
    plan = json.loads(Path("plan.json").read_text())
    assert [one["exp.replica_batch"] for one in plan] == [4, 8]
    assert main(["bench", "run", "--plan", "plan.json"]) == 0
    assert capsys.readouterr().err.count("-m echelon.train") == 2
    assert main(["bench", "run", "--plan", "plan.json", *MLP]) == 2
    assert "omit --config, -P, -V and -E" in capsys.readouterr().err
    plan[1]["exp.num_batches"] = "many"
    Path("plan.json").write_text(json.dumps(plan, indent=0))
    assert main(["bench", "run", "--plan", "plan.json"]) == 2
    assert 'exp.num_batches is "many"; it must be a whole number' in capsys.readouterr().err
    Path("plan.json").write_text("[\n{}]")
    assert main(["bench", "run", "--plan", "plan.json"]) == 2
    assert "plan.json, line 2: the experiment has no exp.log_file" in capsys.readouterr().err


def test_nothing_to_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run"]) == 2
    assert "nothing to run: give --config FILE" in capsys.readouterr().err


def test_print_config_shows_defaults_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "print-config", "-P", "exp.num_batches=3", "-V", "exp.replica_batch=[1]"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["exp.num_batches"] == 3
    assert found["parameters"]["exp.num_warmup_batches"] == 1
    assert found["variables"] == {"exp.replica_batch": [1]}
    assert main(["bench", "print-config", "--discard-default-config", "-P", "exp.num_batches=3"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == {"exp.num_batches": 3}


def test_help_finds_parameters_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "help", "staleness"]) == 0
    assert capsys.readouterr().out.startswith("echelon.staleness ")
    assert main(["bench", "help", "nothingsuch"]) == 2


def test_sysinfo_describes_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sysinfo", "--sources", "meminfo,cpuinfo"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hw.cores"] >= 1
    assert "MemTotal" in found["hw.meminfo"]
    assert main(["bench", "sysinfo", "--sources", "mem"]) == 2
    assert "did you mean 'meminfo'" in capsys.readouterr().err


def test_existing_results_are_shown_with_their_scaling_and_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MLP, "-V", "echelon.num_workers=[1,4]", "--json", "results.json", "--progress_file", "progress.json"]
    config = load_config(None, ['exp.model="mlp"'], ["echelon.num_workers=[1,4]"])
    one, four = build_experiments(config, lambda name: None)
    write_log(one, time=10.0, time_std=1.0, throughput=100.0)
    write_log(four, time=12.5, time_std=1.0, throughput=320.0)
    assert main(["bench", "run", *flags]) == 0
    output = capsys.readouterr()
    rows = [line.split() for line in output.out.splitlines()]
    assert rows[0] == ["num_workers", "batch", "ms", "±", "std", "samples/s", "speedup", "weak", "%", "status"]
    assert rows[3] == ["4", "12.50", "1.00", "320.0", "3.20", "80", "ok"]
    assert output.err.count("it has a result already") == 2
    data = json.loads(Path("results.json").read_text())["data"]
    assert [row["results.throughput"] for row in data] == [100.0, 320.0]
    progress = json.loads(Path("progress.json").read_text())
    assert (progress["status"], progress["num_existing_successful_benchmarks"]) == ("completed", 2)


def test_a_log_of_another_experiment_is_kept_and_the_cell_fails(capsys: pytest.CaptureFixture[str]) -> None:
    given = ['exp.log_file="fixed.log"', "exp.num_batches=5"]
    write_log(experiment(*given), time=10.0, time_std=1.0, throughput=100.0)
    before = Path("fixed.log").read_bytes()
    words = [word for one in (*given[:1], "exp.num_batches=6") for word in ("-P", one)]
    assert main(["bench", "run", *MLP, *words]) == 1
    assert "fixed.log holds another experiment, with exp.num_batches 5 instead of 6" in capsys.readouterr().out
    assert Path("fixed.log").read_bytes() == before


@pytest.mark.parametrize("more", [[], ["-P", 'exp.rerun="always"'], ["--no-validation", "-P", 'echelon.slow="x"']])
def test_a_file_that_is_not_a_log_is_never_overwritten(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.txt").write_text("my notes\n")
    main(["bench", "run", *MLP, "-P", 'exp.log_file="notes.txt"', *more])
    assert Path("notes.txt").read_text() == "my notes\n"
    assert not Path("notes.run").exists()
    if "--no-validation" not in more:
        assert "notes.txt exists and is not the log of an experiment" in capsys.readouterr().out


def test_a_failed_cell_has_a_log_a_status_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    disabled = '{"condition": {"mxnet.kv_store": "dist_async"}, "parameters": {"exp.status": "disabled"}}'
    words = [
        *MLP,
        "-V",
        'mxnet.kv_store=["dist_async","nope"]',
        "-E",
        disabled,
        "-P",
        'exp.log_file="${mxnet.kv_store}.log"',
    ]
    assert main(["bench", "run", *words]) == 1
    output = capsys.readouterr().out
    assert 'mxnet.kv_store="nope": failure: -V mxnet.kv_store: unknown store' in output
    assert json.loads(Path("nope.status.json").read_text())["status"] == "failure"
    assert '__exp.status__="failure"' in Path("nope.log").read_text()
    assert not Path("dist_async.log").exists()
