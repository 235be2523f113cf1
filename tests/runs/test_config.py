"""Settings: from files, flags and `--set`, and back to a file that says the same."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlesam.algorithms import CATALOGUE, examples
from fedlesam.cli.options import build_config
from fedlesam.runs import config as configs
from fedlesam.runs.build import build
from fedlesam.runs.config import (
    HYPER,
    NO_MATTER,
    OPTIONS,
    RunConfig,
    differences,
    identity,
    parse,
    resolve,
    update,
    write,
)
from fedlesam.runs.config_file import read

OTHER: dict[str, Any] = {
    "algorithm": "fedlesam-d",
    "data": "mine:data",
    "data_dir": 'a "quoted" \\ folder/ü',
    "samples": 500,
    "held_out": 50,
    "model": "resnet18:width=16,norm=batch",
    "split": "dirichlet:0.3,repeat",
    "clients": 7,
    "active": 3,
    "rounds": 9,
    "lr": 0.123456789012345678,
    "lr_decay": 0.97,
    "epochs": "1-4",
    "steps": 6,
    "optimizer": "adamw",
    "batch_size": 33,
    "weight_decay": 1e-17,
    "clip": 0.0,
    "clip_scope": "corrected",
    "momentum": 0.5,
    "augment": False,
    "sampling": "mine:draw",
    "stop_when": "accuracy>=0.9",
    "patience": 3,
    "keep_last": False,
    "client_test": 0.25,
    "hyper": {"rho": 0.25, "lam": 1e-3, "mode": "origin", "count": 3, "flag": True},
    "weighting": "examples",
    "evaluate_every": 4,
    "per_client": True,
    "dropout": 0.25,
    "max_update_norm": 7.5,
    "on_client_error": "stop",
    "seed": 11,
    "precision": "bf16",
    "engine": "stacked",
    "stack_runs": 32,
    "compile": True,
    "threads": 2,
    "workers": 3,
    "memory": 5000,
    "store": "pinned",
    "checkpoint_every": "2.5min",
    "keep": 5,
    "probe": "sharpness:every=5 drift",
    "task": "regression",
    "metric": "f1 my_module:score",
    "lost_after": 7.5,
    "cuda_graphs": False,
    "device": "cpu",
}


def reread(config: RunConfig, folder: Path) -> RunConfig:
    path = folder / "config.toml"
    path.write_text(write(config), encoding="utf-8")
    return update(RunConfig(), read(path))


def settings_from(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "x.toml"
    path.write_text(text, encoding="utf-8")
    return read(path)


def test_every_field_goes_to_a_file_and_back(tmp_path: Path) -> None:
    names = {f.name for f in dataclasses.fields(RunConfig)}
    assert names == set(OTHER), "a field without a test"
    config, default = RunConfig(**OTHER), RunConfig()
    assert all(getattr(config, name) != getattr(default, name) for name in names)
    assert reread(config, tmp_path) == config
    assert reread(default, tmp_path) == default


@pytest.mark.parametrize("name", [*OTHER])
def test_each_field_alone(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(RunConfig(), **{name: OTHER[name]})
    assert reread(config, tmp_path) == config


@given(
    lr=st.floats(allow_nan=False, allow_infinity=False),
    active=st.one_of(st.integers(), st.floats(allow_nan=False)),
    text=st.text(st.characters(exclude_categories=("Cs",))),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_number_and_text_survive(tmp_path: Path, lr: float, active: int | float, text: str) -> None:
    config = RunConfig(lr=lr, active=active, data_dir=text, hyper={"kappa": text})
    back = reread(config, tmp_path)
    assert back == config
    assert type(back.active) is type(active), "1 is a count, 1.0 a share"


@pytest.mark.parametrize("algorithm", CATALOGUE)
@pytest.mark.parametrize("split", ["iid", "pooled"])
def test_resolved_configs_survive_and_stay(tmp_path: Path, algorithm: str, split: str) -> None:
    config = resolve(RunConfig(algorithm=algorithm, split=split, hyper=examples(algorithm)))
    back = reread(config, tmp_path)
    assert back == config
    assert resolve(back) == config
    assert differences(config, back) == []
    assert identity(config) == identity(back)


def test_resolve_settles_everything() -> None:
    config = resolve(RunConfig(algorithm="feddyn"))
    assert (config.clients, config.epochs, config.batch_size) == (40, 5, 10)
    assert config.lr_decay == 0.9995
    assert config.threads == torch.get_num_threads()
    assert config.hyper == {"lam": 0.1, "lr_g": 1.0}
    unset = [name for name in OPTIONS if getattr(config, name) is None]
    assert unset == [
        "task",
        "metric",
        "data_dir",
        "samples",
        "held_out",
        "steps",
        "sampling",
        "stop_when",
        "patience",
        "client_test",
        "stack_runs",
        "probe",
    ]
    assert resolve(RunConfig(algorithm="fedsam")).lr_decay == 0.998
    assert resolve(RunConfig(lr_decay=0.5)).lr_decay == 0.5
    assert resolve(RunConfig(threads=3)).threads == 3
    assert resolve(RunConfig(algorithm="fedadam", hyper={"b1": 0.5})).hyper == {
        "lr_g": 0.1,
        "b1": 0.5,
        "b2": 0.99,
        "eps": 0.01,
    }


@pytest.mark.parametrize(
    ("data", "expected"),
    [("cifar10", (100, 5, 50)), ("cifar100", (100, 2, 20)), ("folder:x", (100, 5, 50)), ("digits", (40, 5, 10))],
)
def test_the_protocol_of_each_data_set(data: str, expected: tuple[int, int, int]) -> None:
    config = configs.settle_data(RunConfig(data=data))
    assert (config.clients, config.epochs, config.batch_size) == expected
    said = configs.settle_data(RunConfig(data=data, clients=3, epochs=1, batch_size=7))
    assert (said.clients, said.epochs, said.batch_size) == (3, 1, 7)


@pytest.mark.parametrize("split", ["pooled", "by:x.csv", "file:x"])
def test_splits_that_bring_their_clients(split: str) -> None:
    assert configs.settle_data(RunConfig(split=split)).clients is None


def test_flags_win_over_the_file_and_set_over_flags(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("rounds = 3\nlr = 0.5\nseed = 8\n[hyper]\nrho = 0.2\nlr_g = 0.7\n")
    config = build_config(
        path, ["seed=10", "rho=0.4", "batch-size=6"], {"lr": 0.25, "seed": 9, "rho": 0.3, "model": None}
    )
    assert config == RunConfig(rounds=3, lr=0.25, seed=10, batch_size=6, hyper={"rho": 0.4, "lr_g": 0.7}), (
        "the file, flags over it, --set over both, and None is not said"
    )


def test_set_reaches_any_field() -> None:
    told = {name: str(OTHER[name]) for name in OPTIONS}
    config = build_config(None, [f"{name}={value}" for name, value in told.items()], {})
    assert config == dataclasses.replace(RunConfig(**OTHER), hyper={})


@pytest.mark.parametrize("text", ["rho", "=3", ""])
def test_set_needs_a_name_and_a_value(text: str) -> None:
    with pytest.raises(ValueError, match=f"--set {text}: expected NAME=VALUE"):
        build_config(None, [text], {})


def test_set_guesses_the_kind_of_what_it_does_not_know() -> None:
    config = build_config(None, ["a=3", "b=0.5", "c=true", "d=word", "e=1e-3", "f=x=y"], {})
    assert config.hyper == {"a": 3, "b": 0.5, "c": True, "d": "word", "e": 1e-3, "f": "x=y"}
    assert [type(value) for value in config.hyper.values()] == [int, float, bool, str, float, str]


@pytest.mark.parametrize(
    ("text", "value"),
    [("10", 10), ("0.1", 0.1), ("10%", 0.1), ("100%", 1.0), ("1", 1), ("1.0", 1.0), ("2.5%", 0.025), ("-1", -1)],
)
def test_active_forms(tmp_path: Path, text: str, value: int | float) -> None:
    parsed = parse("active", text, "--active")
    assert parsed == value
    assert type(parsed) is type(value)
    quoted = settings_from(f'active = "{text}"', tmp_path)["active"]
    assert (quoted, type(quoted)) == (value, type(value))
    if not text.endswith("%"):
        assert settings_from(f"active = {text}", tmp_path)["active"] == value


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("1-5", "1-5"), ("3-3", "3-3")])
def test_epochs_forms(tmp_path: Path, text: str, value: int | str) -> None:
    assert parse("epochs", text, "--epochs") == value
    assert settings_from(f'epochs = "{text}"', tmp_path)["epochs"] == value


def test_ranges_of_epochs() -> None:
    local = build(resolve(RunConfig(epochs="1-5", clients=4, active=1))).federation.local
    assert local.epochs == range(1, 6)
    for wrong in ("5-1", "0-3"):
        with pytest.raises(ValueError, match=f"the range {wrong} must run upwards from at least 1, e.g. 1-5"):
            build(resolve(RunConfig(epochs=wrong)))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rounds", "ten", "expected a whole number, got 'ten'"),
        ("rounds", "1.5", "expected a whole number, got '1.5'"),
        ("lr", "fast", "expected a number, or a schedule .*cosine:ROUNDS.*, got 'fast'"),
        ("rho", "x", "expected a number, got 'x'"),
        ("augment", "maybe", "expected true or false, got 'maybe'"),
        ("active", "some", "expected a count such as 10, or a share such as 0.1 or 10%, got 'some'"),
        ("active", "%", "expected a count"),
        ("epochs", "1-", "expected a number such as 5 or 0.5, or a range such as 1-5, got '1-'"),
        ("epochs", "a-b", "expected a number such as 5 or 0.5, or a range"),
    ],
)
def test_typed_values_of_the_wrong_kind(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--it: {message}"):
        parse(name, text, "--it")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# a comment\n\nround = 3\n", "line 3: unknown setting 'round': did you mean 'rounds'"),
        ("rounds = 3\nlearning = 1\n", "line 2: unknown setting 'learning'"),
        ("lr = 1\n[local]\nlr = 2\n", "line 2: unknown setting 'local'"),
        ('"weigth_decay" = 1\n', "line 1: unknown setting 'weigth_decay': did you mean 'weight_decay'"),
        ("lr = 0.1\nrounds = 'x'\n", "line 2: rounds must be a whole number, got 'x'"),
        ("rounds = 2.0", "line 1: rounds must be a whole number, got 2.0"),
        ("\n\nrounds = true", "line 3: rounds must be a whole number, got True"),
        ("lr = 'cosine'", "line 1: lr: expected a number, or a schedule .*, got 'cosine'"),
        ("augment = 1", "line 1: augment must be true or false, got 1"),
        ("model = 3", "line 1: model must be text, got 3"),
        ("lr = [0.1]", r"line 1: lr must be a number, or a schedule .*, got \[0.1\]"),
        ("seed = 1\nactive = 'few'", "line 2: active: expected a count such as 10, .* got 'few'"),
        ("active = true", "line 1: active must be a count"),
        ("epochs = 'x'", "line 1: epochs: expected a number such as 5 or 0.5, or a range such as 1-5, got 'x'"),
        ("hyper = 3", r"line 1: hyper must be a table, \[hyper\]"),
        ("[hyper]\nseed = 3", "line 2: seed is not a hyper-parameter"),
        ("[hyper]\nrho = [1]", "line 2: rho is not a hyper-parameter"),
        ("rounds = \nlr = 1\n", "is not TOML: .*line 1"),
        ("lr = 1\nlr = 2\n", "is not TOML: .*line 2"),
    ],
)
def test_mistakes_in_a_file_are_shown_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"config .*x\.toml.*{message}"):
        settings_from(text, tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "binary.toml")


def test_a_hyper_parameter_the_method_does_not_take() -> None:
    with pytest.raises(ValueError, match="fedavg has no rho; it takes lr_g"):
        resolve(RunConfig(algorithm="fedavg", hyper={"rho": 0.1}))
    with pytest.raises(ValueError, match="fedlesam has no rhoo; it takes rho, lr_g"):
        resolve(RunConfig(hyper={"rhoo": 0.1}))


def test_the_first_line_is_the_command() -> None:
    first, *rest = write(RunConfig()).splitlines()
    assert first == "# fedlesam run --config config.toml --out NEW_FOLDER"
    assert tomllib.loads("\n".join(rest))["algorithm"] == "fedlesam"


def test_a_whole_number_in_a_file_is_the_same_run_as_on_the_command_line(tmp_path: Path) -> None:
    typed = build_config(None, ["lr=1", "rho=1"], {})
    filed = update(RunConfig(), settings_from("lr = 1\n[hyper]\nrho = 1\n", tmp_path))
    assert filed == typed
    assert identity(filed) == identity(typed)


def test_identity_and_differences() -> None:
    ours = resolve(RunConfig())
    assert differences(ours, ours) == []
    moved = dataclasses.replace(ours, data_dir="elsewhere")
    assert differences(ours, moved) == []
    assert identity(moved) == identity(ours)
    other = dataclasses.replace(ours, rounds=7, hyper={**ours.hyper, "rho": 0.5})
    assert differences(ours, other) == [
        "rounds: you gave 100, the folder has 7",
        "rho: you gave 0.01, the folder has 0.5",
    ]
    assert identity(other) != identity(ours)
    threads = dataclasses.replace(ours, threads=9)
    assert differences(ours, threads) == [f"threads: you gave {ours.threads}, the folder has 9"]
    assert identity(threads) == identity(ours), "the default folder does not depend on the machine"
    unset = dataclasses.replace(ours, clients=None)
    assert differences(ours, unset) == ["clients: you gave 40, the folder has none"]


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in (*NO_MATTER, "threads")])
def test_every_setting_makes_another_run(name: str) -> None:
    ours, theirs = RunConfig(), dataclasses.replace(RunConfig(), **{name: OTHER[name]})
    assert identity(ours) != identity(theirs)
    assert len(differences(ours, theirs)) == 1


def test_every_hyper_parameter_of_a_flag_belongs_to_a_method() -> None:
    from fedlesam import algorithms

    taken = {name for algorithm in CATALOGUE for name in algorithms.hyperparameters(algorithm)}
    assert set(HYPER) <= taken
    assert not set(HYPER) & set(OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number from 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1, got 0"),
        ({"seed": -1}, "seed must be a whole number from 0, got -1"),
        ({"lr": 0.0}, "lr must be above 0, got 0"),
        ({"lr": float("nan")}, "lr must be above 0, got nan"),
        ({"clip": -1.0}, "clip must be above 0, got -1"),
        ({"evaluate_every": 0}, "evaluate_every must be a whole number from 1, got 0"),
        ({"threads": 0}, "threads must be a whole number from 1, got 0"),
        ({"dropout": 1.5}, "dropout must be below 1, got 1.5"),
        ({"dropout": -0.1}, "dropout must be at least 0, got -0.1"),
        ({"dropout": float("nan")}, "dropout must be at least 0, got nan"),
        ({"max_update_norm": -1.0}, "max_update_norm must be above 0, got -1"),
        ({"on_client_error": "ignore"}, "on_client_error must be one of 'drop', 'stop', got 'ignore'"),
        ({"keep": 0}, "keep must be a whole number from 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least a round or some time, got 0"),
        ({"checkpoint_every": "0s"}, "checkpoint_every must be at least a round or some time, got 0s"),
        ({"lost_after": -1.0}, "lost_after must be at least 0, got -1"),
        ({"lost_after": 0.5}, "lost_after must be at least 1 second, or 0 to wait for ever, got 0.5"),
        ({"data": "digit"}, "unknown data.* 'digit': did you mean 'digits'"),
    ],
)
def test_build_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(resolve(RunConfig()), **change))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rounds", "0", "rounds must be a whole number from 1, got 0"),
        ("seed", "-1", "seed must be a whole number from 0, got -1"),
        ("keep", "0", "keep must be a whole number from 1, got 0"),
        ("samples", "0", "samples must be a whole number from 1, got 0"),
        ("dropout", "1.5", "dropout must be below 1, got 1.5"),
        ("checkpoint_every", "0", "checkpoint_every must be at least a round or some time, got 0"),
    ],
)
def test_a_range_is_checked_where_it_is_typed(name: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^--{name}: {message}"):
        parse(name, value, f"--{name}")
    (tmp_path / "x.toml").write_text(f"model = 'mlp'\n{name} = {value}\n")
    with pytest.raises(ValueError, match=f"x.toml, line 2: {message}"):
        read(tmp_path / "x.toml")


def test_build_passes_every_setting_on() -> None:
    config = resolve(
        RunConfig(
            **{
                **OTHER,
                "algorithm": "fedsam",
                "hyper": {"rho": 0.25},
                "data": "digits",
                "model": "mlp:hidden=3",
                "task": None,
                "metric": "f1 token_accuracy",
                "compile": False,
                "engine": "plain",
                "stack_runs": None,
                "steps": None,
                "sampling": None,
                "optimizer": "sgd",
                "split": "dirichlet:0.3",
            }
        )
    )
    experiment = build(config)
    fed, local = experiment.federation, experiment.federation.local
    assert (local.lr, local.lr_decay, local.epochs, local.batch_size) == (config.lr, 0.97, range(1, 5), 33)
    assert (local.weight_decay, local.clip, local.clip_scope, local.momentum) == (1e-17, None, "corrected", 0.5)
    assert list(fed.task.measured) == ["f1", "token_accuracy", "accuracy"]
    assert (fed.active, fed.seed, fed.threads, fed.weighting, fed.evaluate_every) == (3, 11, 2, "examples", 4)
    assert (fed.failures.dropout, fed.failures.max_update_norm, fed.failures.on_error) == (0.25, 7.5, "stop")
    assert build(dataclasses.replace(config, max_update_norm=0.0)).federation.failures.max_update_norm is None
    assert fed.algorithm.perturbation.rho == 0.25  # type: ignore[attr-defined]
    other = build(dataclasses.replace(config, epochs=None, steps=6, momentum=0.0, optimizer="adamw")).federation.local
    assert (other.steps, other.optimizer) == (6, "adamw")
    with pytest.raises(ValueError, match="--steps 6 and --epochs 1-4: give one of the two"):
        build(dataclasses.replace(config, steps=6))
    assert len(fed.clients) == 7
    assert experiment.split.scheme == "dirichlet:0.3" and experiment.split.tests is not None
    assert len(fed.weights) == 64 * 3 + 3 + 3 * 10 + 10
    assert build(dataclasses.replace(config, clip=2.0)).federation.local.clip == 2.0
    with pytest.raises(ValueError, match="the stacked engine needs one worker, got 3"):
        build(dataclasses.replace(config, engine="stacked"))


@pytest.mark.parametrize(
    ("text", "value", "seconds"),
    [("10", 10, None), ("300s", "300s", 300), ("2.5min", "2.5min", 150), ("5 m", "5 m", 300), ("1h", "1h", 3600)],
)
def test_intervals(text: str, value: int | str, seconds: float | None) -> None:
    assert parse("checkpoint_every", text, "--checkpoint-every") == value
    assert configs.seconds_of(value) == seconds


@pytest.mark.parametrize("text", ["", "often", "5 days", "-3", "s", "1e3s"])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(ValueError, match="--checkpoint-every: expected rounds such as 10, or a time such as 300s"):
        parse("checkpoint_every", text, "--checkpoint-every")


@pytest.mark.parametrize("name", NO_MATTER)
def test_how_a_run_is_done_does_not_make_it_another(name: str) -> None:
    ours, theirs = RunConfig(), dataclasses.replace(RunConfig(), **{name: OTHER[name]})
    assert identity(ours) == identity(theirs)
    assert differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("500 mb", 5 * 10**8), ("1.5k", 1500), ("2e9", 2 * 10**9), ("0", 0), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse("memory", text, "--memory") == size


@pytest.mark.parametrize("text", ["", "much", "4 gallons", "-1GB", "GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="--memory: expected a size such as 4GB"):
        parse("memory", text, "--memory")


def test_a_hyper_parameter_with_the_name_of_a_setting(tmp_path: Path) -> None:
    """dp-fedsam's clip is that of updates; `--clip` is that of gradients."""
    config = update(RunConfig(algorithm="dp-fedsam"), {"hyper.clip": 0.5, "clip": 3.0})
    assert (config.hyper, config.clip) == ({"clip": 0.5}, 3.0)
    assert reread(config, tmp_path) == config


@pytest.mark.parametrize("name", ["seed", "clients", "dropout"])
def test_numbers_that_python_does_not_write_are_named_by_their_size(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* a whole number of 20,001 bits"):
        configs.check_setting("config x.toml", name, 16**5000)
