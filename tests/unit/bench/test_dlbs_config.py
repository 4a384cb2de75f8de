"""Configurations of the harness: every error names the file, the key and the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.bench.dlbs.configuration.config import load_config
from echelon.bench.dlbs.configuration.experiment import Experiment, build_experiments, notes
from echelon.bench.dlbs.configuration.parameters import PARAMETERS
from echelon.bench.dlbs.configuration.source import Step, parse
from echelon.errors import UsageError

Build = Callable[..., list[Experiment]]
EXAMPLES = Path(__file__).parents[3] / "examples" / "image-classification"


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Write a configuration; return the experiments that it and the flags describe."""

    def make(text: str | dict[str, Any] = "{}", **flags: Any) -> list[Experiment]:
        path = tmp_path / "config.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return build_experiments(load_config(path, **flags), {"DATA": "/data"}.get)

    return make


TEXT = st.characters(codec="utf-8", exclude_characters="\0")  # what a text of a configuration may hold
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TEXT, max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_every_key_and_element_has_its_line(value: Any) -> None:
    """With one line per key and element, the lines of a value's paths are in order and all there."""
    text = json.dumps(value, indent=1)
    document = parse(text, "f")
    assert document.value == value

    def paths(value: Any, path: tuple[Step, ...] = ()) -> list[tuple[Step, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [found for key, one in items for found in ((*path, key), *paths(one, (*path, key)))]

    expected = paths(value)
    assert list(document.lines) == expected
    lines = text.split("\n")
    for path in expected:
        line = lines[document.lines[path] - 1].strip()
        assert line.startswith(json.dumps(path[-1])) if isinstance(path[-1], str) else line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"parameters": {\n "exp.num_nodes": 2,\n}}', "config.json, line 3, column 1: not valid JSON"),
        ('{"parameters": {\n "exp.num_batches": NaN}}', "config.json, line 2: NaN is not a finite JSON number"),
        ('{"parameters": {"x.NaN": 1,\n "echelon.lr": NaN}}', "config.json, line 2: NaN is not a finite JSON number"),
        ('{"parameters": {\n "my.value": 1e999}}', "config.json, line 2: 1e999 is not a finite JSON number"),
        (f'{{"parameters": {{\n "exp.num_batches": {"9" * 5000}}}}}', "config.json, line 2: 99999999999999999999 is"),
        ('{"parameters": {\n "exp.proj": "\\ud800"}}', r"config.json, line 2: \ud800 is not allowed in a text"),
        ('{"parameters": {\n "exp.log_file": "a\\u0000b"}}', r"config.json, line 2: \u0000 is not allowed in a text"),
        ('{"parameters": {\n "x\\u0000": 1}}', r"config.json, line 2: \u0000 is not allowed in a text"),
        (
            f'{{"parameters": {{\n "exp.model": {"[" * 500}{"]" * 500}}}}}',
            "config.json, line 2: the JSON has more than 32 objects and lists in each other",
        ),
        ('{"parameters": {\n"a.b": 1,\n"a.b": 2}}', "config.json, line 3: the key 'a.b' is already on line 2"),
        ('{\n"parameter": {}}', "config.json, line 2: unknown section 'parameter'; did you mean 'parameters'"),
        ('{\n"parameters": []}', "config.json, line 2: parameters must be an object, not []"),
        ('{"parameters": {\n"exp.model": null}}', "line 2: exp.model is null; it must be text"),
        ("[1]", "config.json: a configuration is an object such as"),
        ("[" * 100_000, "config.json: the JSON has more than 32 objects and lists in each other"),
        ("", "config.json, line 1, column 1: not valid JSON"),
        ('{"parameters": {\n"exp.num_batches": "ten"}}', 'line 2: exp.num_batches is "ten"; it must be a whole number'),
        ('{"parameters": {\n"exp.num_batches": 0}}', "line 2: exp.num_batches is 0; it must be 1 or more"),
        ('{"parameters": {\n"exp.num_batches": true}}', "line 2: exp.num_batches is true; it must be a whole number"),
        ('{"parameters": {\n"exp.num_batches": 1.5}}', "line 2: exp.num_batches is 1.5; it must be a whole number"),
        ('{"parameters": {\n"exp.rerun": "allways"}}', "did you mean 'always'?); it must be"),
        ('{"parameters": {\n"exp.gpus": "0;1"}}', 'line 2: exp.gpus is "0;1"; expected: GPUs of'),
        ('{"parameters": {\n"exp.phase": "inference"}}', 'line 2: exp.phase is "inference"; it must be "training"'),
        (
            '{"parameters": {\n"exp.framework": "tensorflow"}}',
            'line 2: exp.framework is "tensorflow"; it must be "echelon" or "mxnet"',
        ),
        (
            '{"parameters": {\n"exp.num_batchs": 5}}',
            "line 2: unknown parameter 'exp.num_batchs'; did you mean 'exp.num_",
        ),
        ('{"parameters": {\n"echelon.foo": 5}}', "line 2: unknown parameter 'echelon.foo'"),
        (
            '{"parameters": {\n"exp.proj": "${NOWHERE}"}}',
            "line 2: exp.proj uses ${NOWHERE}, which is neither a parameter",
        ),
        ('{"parameters": {\n"exp.proj": "${exp.modle}"}}', "did you mean ${exp.model}?"),
        ('{"parameters": {\n"a": "${b}",\n"b": "${a}"}}', "config.json, line 3: a refers to itself: a -> b -> a"),
        ('{"parameters": {\n"exp.proj": "$(1+1)$"}}', "line 2: exp.proj has $(…)$, which DLBS evaluates as Python"),
        ('{"parameters": {\n"exp.proj": "${exp.model"}}', "line 2: exp.proj has '${' without '}'"),
        (
            '{"variables": {\n"exp.replica_batch": []}}',
            "line 2: exp.replica_batch has no values, so the sweep is empty",
        ),
        ('{"variables": {\n"exp.replica_batch": [1, 1]}}', "line 2: exp.replica_batch has the value 1 twice"),
        (
            '{"variables": {\n"exp.replica_batch": [4, 8, 4.0]}}',
            "line 2: exp.replica_batch=4 and exp.replica_batch=4.0 give the same experiment",
        ),
        (
            '{"parameters": {"my.x": 4}, "variables": {\n"echelon.num_workers": [1, 2],\n'
            '"exp.replica_batch": ["${my.x}", 4]}}',
            'line 3: exp.replica_batch="${my.x}" and exp.replica_batch=4 give the same experiment',
        ),
        (
            '{"extensions": [{"cases": [{"exp.replica_batch": 16},\n{"exp.num_batches": 100}]}]}',
            "line 2: exp.replica_batch=16 and exp.num_batches=100 give the same experiment",
        ),
        (
            '{"parameters": {\n"sys.plan_builder.var_order": ["exp.replica_bach"]},'
            '"variables": {"exp.replica_batch": [1, 2]}}',
            "line 2: sys.plan_builder.var_order: unknown variable 'exp.replica_bach'; did you mean 'exp.replica_batch'",
        ),
        (
            '{"parameters": {\n"sys.plan_builder.var_order": ["exp.model"]}}',
            "line 2: sys.plan_builder.var_order names exp.model, but the configuration has no variables",
        ),
        (
            '{"parameters": {\n"runtime.env.AB": {"a": 1}}}',
            'line 2: runtime.env.AB is {"a": 1}; it must be text, a number, true or false',
        ),
        ('{"parameters": {\n"runtime.env.AB": [1, 2]}}', "line 2: runtime.env.AB is [1, 2]; it must be text"),
        (
            '{"extensions": [\n{"conditions": {}}]}',
            "line 2: unknown part of an extension 'conditions'; did you mean 'condition'",
        ),
        ('{"extensions": [\n{"condition":\n{"exp.model": "("}}]}', "line 3: the condition on exp.model, '(', is not a"),
        ('{"extensions": [\n{"cases": [3]}]}', "line 2: a case must be an object, not 3"),
        ('{"parameters": {\n"exp.log_file": "a.log"},"variables": {"exp.num_batches": [1, 2]}}', "for two experiments"),
        (
            '{"parameters": {\n"x.y": {"val": 1, "type": "integer"}}}',
            'line 2: x.y: type is "integer"; it must be one of',
        ),
    ],
)
def test_an_error_names_file_key_and_line(build: Build, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(text)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"parameters": ["exp.model=lenet"]},
            """a text needs quotes inside those of the shell: -P 'exp.model="lenet"'""",
        ),
        ({"parameters": ["exp.model"]}, "-P exp.model: write KEY=VALUE, for example -P exp.num_batches=100"),
        ({"parameters": ["exp.model="]}, "-P exp.model: there is no value"),
        ({"parameters": ["=3"]}, "-P =3: write KEY=VALUE"),
        ({"variables": ["exp.model=[vgg, lenet]"]}, """-V 'exp.model=["vgg","lenet"]'"""),
        ({"variables": ["exp.replica_batch=32,64"]}, "-V 'exp.replica_batch=[32,64]'"),
        ({"variables": ["exp.num_batches=[]"]}, "-V exp.num_batches: exp.num_batches has no values"),
        ({"extensions": ["{condition: {}}"]}, "-E: '{condition: {}}' is not JSON"),
        ({"extensions": ["[]"]}, "-E: an extension must be an object, not []"),
    ],
)
def test_an_error_of_a_flag_names_the_flag(build: Build, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(**flags)
    assert message in str(caught.value)


VALUES = JSON | st.sampled_from(
    ["0,1", "1:3", "${exp.model}", "${", "${a}", "$(1)$", 10**30, 1e30, {"val": 3, "type": "int"}, {"val": []}, [[1]]]
)
KEYS = st.sampled_from([*PARAMETERS, "my.own", "runtime.env.A", "exp.num_batchs"])
SETTINGS = st.dictionaries(KEYS, VALUES, max_size=3)
EXTENSION = st.fixed_dictionaries(
    {"condition": SETTINGS, "parameters": SETTINGS, "cases": st.lists(SETTINGS, max_size=2)}
)
CONFIG = st.fixed_dictionaries(
    {"parameters": SETTINGS, "variables": st.dictionaries(KEYS, st.lists(VALUES, max_size=2), max_size=2)},
    optional={"extensions": st.lists(EXTENSION, max_size=2)},
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example writes the file again
@given(CONFIG | JSON)
def test_any_configuration_is_built_or_refused(build: Build, config: Any) -> None:
    """Nothing but a UsageError may be raised. References to `a` are unknown, unless the example has such a key."""
    try:
        experiments = build(json.dumps(config))
    except UsageError:
        return
    assert experiments
    for one in experiments:
        assert (
            one.parameters["exp.effective_batch"]
            == one.parameters["exp.replica_batch"] * (one.parameters["exp.num_replicas"])
        )


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.json cannot be read: No such file"):
        load_config(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{\n"parameters": "\xe9"}')
    with pytest.raises(UsageError, match=r"latin.json, line 2: not valid UTF-8"):
        load_config(tmp_path / "latin.json")


def test_flags_override_the_file_and_the_file_the_defaults(build: Build) -> None:
    config = {"parameters": {"exp.num_batches": 7, "exp.model": "vgg16"}}
    (one,) = build(config, parameters=["exp.num_batches=9"])
    found = [one.parameters[key] for key in ("exp.num_batches", "exp.model", "exp.num_warmup_batches")]
    assert found == [9, "vgg16", 1]


def test_texts_of_numbers_become_numbers_and_long_texts_are_joined(build: Build) -> None:
    (one,) = build({"parameters": {"exp.num_batches": "12", "exp.gpus": 0, "exp.docker_args": ["--rm", "-i"]}})
    assert (one.parameters["exp.num_batches"], one.parameters["exp.gpus"]) == (12, "0")
    assert one.parameters["exp.docker_args"] == "--rm -i"


def test_variables_give_all_combinations_and_the_last_varies_fastest(build: Build) -> None:
    plan = build(variables=["exp.replica_batch=[32,64]", 'mxnet.kv_store=["dist_sync","dist_async"]'])
    found = [(one.parameters["exp.replica_batch"], one.parameters["mxnet.kv_store"]) for one in plan]
    assert found == [(32, "dist_sync"), (32, "dist_async"), (64, "dist_sync"), (64, "dist_async")]
    assert len({one.parameters["exp.log_file"] for one in plan}) == 4
    order = ['sys.plan_builder.var_order=["mxnet.kv_store"]']
    plan = build(variables=["exp.replica_batch=[32,64]", 'mxnet.kv_store=["dist_sync","dist_async"]'], parameters=order)
    assert [one.parameters["exp.replica_batch"] for one in plan] == [32, 64, 32, 64]


def test_null_means_that_a_parameter_without_default_is_not_given(build: Build) -> None:
    plan = build(variables=["echelon.staleness=[null,3]"])
    assert [one.parameters.get("echelon.staleness") for one in plan] == [None, 3]


def test_a_huge_sweep_is_refused_at_once(build: Build) -> None:
    many = json.dumps(list(range(1, 1001)))
    with pytest.raises(
        UsageError, match=r"-V exp.num_batches: the variables give 1,000,000 experiments .* at most 10,000 are allowed"
    ):
        build(variables=[f"exp.num_batches={many}", f"exp.replica_batch={many}"])


@pytest.mark.parametrize("text", ["x${LOOP}", "${exp.framework}${LOOP}"])
def test_an_environment_variable_that_names_itself_is_an_error(text: str) -> None:
    config = load_config(None, [f'exp.proj="{text}"'])
    with pytest.raises(UsageError, match=r"-P exp.proj: exp.proj has no end: \$\{LOOP\} leads to itself"):
        build_experiments(config, {"LOOP": "${LOOP}"}.get)


def test_a_configuration_may_be_a_device_without_a_size() -> None:
    with pytest.raises(UsageError, match="/dev/zero is larger than 16 MB"):
        load_config(Path("/dev/zero"))


def test_references_are_nested_and_keep_their_type(build: Build) -> None:
    (one,) = build(
        {
            "parameters": {
                "exp.framework": "mxnet",
                "mine.mxnet.batch": 24,
                "exp.replica_batch": "${mine.${exp.framework}.batch}",
                "exp.data_dir": "${DATA}/rank_${mxnet.rank}",
                "exp.proj": "${exp.effective_batch} of ${exp.device_type}",
            }
        },
        parameters=["echelon.num_workers=3"],
    )
    assert one.parameters["exp.replica_batch"] == 24
    assert one.parameters["exp.data_dir"] == "/data/rank_0"
    assert one.parameters["exp.proj"] == "72 of cpu"
    assert one.parameters["exp.data"] == "real"


def test_references_that_double_a_text_again_and_again_are_refused(build: Build) -> None:
    doubled: dict[str, Any] = {f"k{n}": f"${{k{n + 1}}}${{k{n + 1}}}" for n in range(30)}
    with pytest.raises(UsageError, match="is longer than 65536 characters"):
        build({"parameters": {**doubled, "k30": "x"}})


def test_an_effective_batch_is_divided_among_the_replicas(build: Build) -> None:
    plan = build(parameters=["exp.effective_batch=96"], variables=["echelon.num_workers=[1,2,4]"])
    assert [one.parameters["exp.replica_batch"] for one in plan] == [96, 48, 24]
    with pytest.raises(UsageError, match="cannot be divided among 5 replicas; use 95 or 100"):
        build(parameters=["exp.effective_batch=96", "echelon.num_workers=5"])
    with pytest.raises(UsageError, match=r"exp\.effective_batch is 96, but exp\.replica_batch 8 "):
        build(parameters=["exp.effective_batch=96", "exp.replica_batch=8"])


def test_what_follows_from_other_parameters_cannot_be_claimed(build: Build) -> None:
    (one,) = build(parameters=["exp.num_replicas=2", "echelon.num_workers=2", "exp.device_type=null"])
    assert (one.parameters["exp.num_replicas"], one.parameters["exp.device_type"]) == (2, "cpu")
    with pytest.raises(UsageError, match=r"-P exp.num_gpus: exp.num_gpus is 8, but .* make it 0; remove it"):
        build(parameters=["exp.num_gpus=8"])


def test_extensions_change_what_matches(build: Build) -> None:
    config = {
        "variables": {"exp.model": ["vgg16", "vgg19", "lenet"]},
        "extensions": [
            {
                "condition": {"exp.model": "vgg([0-9]+)", "not.there": 3},
                "parameters": {"exp.proj": "${__condition.exp.model_0} has ${__condition.exp.model_1} layers"},
                "cases": [{"exp.replica_batch": 2}, {"exp.replica_batch": 4}],
            },
            {"condition": {"exp.model": ["lenet", "mlp"]}, "parameters": {"exp.replica_batch": 64}},
        ],
    }
    found = [
        (one.parameters["exp.model"], one.parameters["exp.replica_batch"], one.parameters.get("exp.proj"))
        for one in build(config)
    ]
    assert found == [
        ("vgg16", 2, "vgg16 has 16 layers"),
        ("vgg16", 4, "vgg16 has 16 layers"),
        ("vgg19", 2, "vgg19 has 19 layers"),
        ("vgg19", 4, "vgg19 has 19 layers"),
        ("lenet", 64, None),
    ]


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ({"condition": {"exp.num_gpus": 2}}, "tests exp.num_gpus, which is computed"),
        ({"condition": {"exp.proj": "a"}}, "only constants can be tested"),
        ({"parameters": {"exp.node_id": "${__condition.exp.model_1}"}}, "was not matched by the condition"),
    ],
)
def test_a_condition_that_cannot_be_tested_is_refused(build: Build, extension: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build({"parameters": {"exp.proj": "${exp.model}"}, "extensions": [extension]})
    assert "config.json, line 1" in str(caught.value)


def test_a_repeated_command_finds_its_logs_and_another_one_does_not(build: Build) -> None:
    logs = [
        one.parameters["exp.log_file"]
        for flags in (["exp.num_batches=5"], ["exp.num_batches=5", 'exp.rerun="onfail"'], ["exp.num_batches=6"])
        for one in build(parameters=flags)
    ]
    assert logs[0] == logs[1]
    assert logs[2] not in logs[:2]


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    given = {"exp.docker": False, "mxnet.workspace": 1024, "tensorflow.x": 1, "my.own": 3, "exp.proj": "${my.own}"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"parameters": given}))
    assert notes(load_config(path)) == ["no effect: exp.docker, mxnet.workspace, tensorflow.x"]


def test_without_the_defaults_a_missing_parameter_is_named() -> None:
    config = load_config(None, ["exp.num_nodes=1"], with_defaults=False)
    with pytest.raises(UsageError, match="has no value: with --discard-default-config"):
        build_experiments(config, lambda name: None)


def test_the_recipe_of_seed_002_is_read_as_it_is(build: Build, tmp_path: Path) -> None:
    """The config.json of DLBS's recipe. BENCH_ROOT, which its script sets, is the folder of the file."""
    recipe = {
        "exp.framework": "mxnet",
        "exp.docker_image": "dlbs/mxnet:18.11",
        "exp.docker_args": "--rm --shm-size=1g --net=host",
        "exp.num_nodes": 2,
        "mxnet.rendezvous": "INTERFACE:IP_ADDRESS:29500",
        "exp.gpus": "0,1,2,3,4,5,6,7",
        "mxnet.kv_store": "dist_device_sync",
        "exp.num_warmup_batches": 100,
        "exp.num_batches": 400,
        "exp.log_file": "${BENCH_ROOT}/logs/rank_${mxnet.rank}.log",
        "exp.dtype": "float16",
        "exp.model": "resnet50",
        "exp.replica_batch": 128,
    }
    (one,) = build({"parameters": recipe}, parameters=["mxnet.rank=1", "mxnet.scheduler=true"])
    assert one.parameters["exp.log_file"] == f"{tmp_path}/logs/rank_1.log"
    assert one.parameters["exp.effective_batch"] == 2 * 8 * 128
    assert one.parameters["exp.num_gpus"] == 16


def test_the_example_is_complete() -> None:
    (one,) = build_experiments(load_config(EXAMPLES / "config.json", ["mxnet.rank=1"]), lambda name: None)
    assert one.log_file == EXAMPLES / "logs" / "rank_1.log"
    assert one.parameters["exp.num_replicas"] == 2
