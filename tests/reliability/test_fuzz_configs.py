"""Damaged and random config files: settings that can be built, or one line that says where and what."""

import random
import string
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from fuzzing import HOSTILE, damage, fuzz, one_line

from fedlesam.core.checks import NotFinite
from fedlesam.data.dataset import DataSet, Images
from fedlesam.runs import config as configs
from fedlesam.runs import config_file, costs
from fedlesam.runs.build import build
from fedlesam.runs.config import HYPER, OPTIONS, RunConfig

SMALL: dict[str, Any] = {
    "rounds": 3,
    "clients": 4,
    "active": 2,
    "epochs": 1,
    "batch_size": 4,
    "split": "iid",
    "threads": 1,
}
BASES = [
    RunConfig(**SMALL),
    RunConfig(**{**SMALL, "epochs": "1-3", "active": 0.5, "algorithm": "fedsmoo", "split": "dirichlet:0.5"}),
    RunConfig(**{**SMALL, "algorithm": "feddyn", "checkpoint_every": 2, "memory": 0, "engine": "stacked"}),
    RunConfig(algorithm="fedadam", hyper={"b1": 0.8}),
]


def tiny_data() -> DataSet:
    draw = torch.Generator().manual_seed(0)
    parts = [Images(torch.rand(n, 1, 2, 2, generator=draw), torch.arange(n) % 2) for n in (16, 6)]
    return DataSet("digits", *parts, ("a", "b"), (0.0,), (1.0,), scale=1.0, fingerprint="tiny")


DATA = tiny_data()


def attempt(path: Path, content: bytes, build_it: bool) -> str:
    path.write_bytes(content)
    try:
        given = configs.update(RunConfig(), config_file.read(path))
    except ValueError as error:
        one_line(error)
        assert str(path) in str(error), f"does not say where: {error!r}"
        return "refused when read"
    finally:
        assert path.read_bytes() == content
    assert not any(configs.differences(given, given)) or "nan" in str(given), "the same run as itself"
    if not build_it or not safe(given):
        return "read"
    try:
        config = configs.resolve(given)
        experiment = build(config, DATA)
        costs.predict(config, experiment.federation)
    except (ValueError, OSError, NotFinite) as error:
        one_line(error)
        return "refused when built"
    path.write_text(configs.write(config), encoding="utf-8")
    assert configs.update(RunConfig(), config_file.read(path)) == config, "written and read again"
    assert len(configs.fingerprint(config)) == 64
    return "built"


def safe(config: RunConfig) -> bool:
    """Not to run foreign code, make a network of any size, or wait for a compiler."""
    names = (config.algorithm, config.split, config.model)
    own = any(":" in name and name.partition(":")[0] not in ("dirichlet", "pathological") for name in names)
    return not own and not config.compile


def test_damaged_configs(tmp_path: Path) -> None:
    written = [configs.write(base).encode() for base in BASES]

    def damaged(draw: random.Random) -> str:
        return attempt(tmp_path / "x.toml", damage(draw, draw.choice(written), written), True)

    found = fuzz("config files", 300, damaged)
    assert all(found[outcome] for outcome in ("refused when read", "refused when built", "built"))


def test_hostile_values(tmp_path: Path) -> None:
    """Valid TOML with values that nobody can mean."""
    near = [
        0,
        1,
        2,
        5,
        -3,
        0.1,
        1.0,
        1e-300,
        1e300,
        "1-5",
        "5-1",
        "0-0",
        "50%",
        "1e999%",
        "300s",
        "0s",
        "1e9999",
        "9" * 400,
    ]
    near += [
        "4GB",
        "1e999",
        "-4GB",
        "0x10",
        "auto",
        "cpu",
        "cuda:99",
        "cuda:-1",
        "plain",
        "shared",
        "corrected",
        "bf16",
    ]
    near += [
        "dirichlet:",
        "dirichlet:nan",
        "dirichlet:1e-320",
        "dirichlet:1e308",
        "pathological:3",
        "pathological:1e300",
    ]
    near += ["by:/nowhere", "file:/nowhere", "folder:/nowhere", "..", "iid", "pooled", "a" * 5000, "²", "٣", "1_000"]

    def damaged(draw: random.Random) -> str:
        table: dict[str, Any] = configs.as_table(draw.choice(BASES))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            name = draw.choice([*OPTIONS, *HYPER, "hyper", "b1", "b2", "tau", "x", "a\nb"])
            value = draw.choice([value for value in (*HOSTILE, *near, *near) if usable(value)])
            (table if name in OPTIONS or name == "hyper" or not isinstance(table["hyper"], dict) else table["hyper"])[
                name
            ] = value
        return attempt(tmp_path / "x.toml", tomli_w.dumps(table).encode(), True)

    fuzz("config values", 300, damaged)


def usable(value: Any) -> bool:
    """Whether TOML has it."""
    return value is not None and not (isinstance(value, str) and "\ud800" in value)


def test_random_toml(tmp_path: Path) -> None:
    words = [
        *OPTIONS,
        *HYPER,
        "hyper",
        "[hyper]",
        "[[hyper]]",
        "[hyper.rho]",
        "hyper.rho",
        "=",
        " = ",
        "\n",
        "\n",
        "\n",
        "1",
    ]
    words += [
        "0.1",
        '"x"',
        "'fedavg'",
        "true",
        "nan",
        "-inf",
        "1979-05-27",
        "07:32:00",
        "[1]",
        "{a=1}",
        '"""',
        "#",
        "0x" + "f" * 5000,
    ]
    words += ["9" * 5000, "[" * 2000, "\ufeff", "\r", '"\\ud800"', '"\\u0000"', "1e400", "0o7", "é", "\x00"]

    def damaged(draw: random.Random) -> str:
        if draw.random() < 0.5:
            lines = [f"{draw.choice(words)} = {draw.choice(words)}" for _ in range(draw.randrange(5))]
            return attempt(tmp_path / "x.toml", "\n".join(lines).encode(), False)
        text = "".join(draw.choice([*words, draw.choice(string.printable)]) for _ in range(draw.randrange(40)))
        return attempt(tmp_path / "x.toml", text.encode(), False)

    fuzz("config, random TOML", 400, damaged)


def test_a_range_of_epochs_without_end(tmp_path: Path) -> None:
    """Checked and averaged by its ends, not by counting."""
    (tmp_path / "x.toml").write_text('epochs = "1-999999999999999"\n')
    config = configs.resolve(
        configs.update(RunConfig(**{**SMALL, "epochs": None}), config_file.read(tmp_path / "x.toml"))
    )
    experiment = build(config, DATA)
    assert costs.predict(config, experiment.federation).backward_passes_per_round == pytest.approx(1e15)


@pytest.mark.parametrize(("name", "value"), [("memory", "1e999"), ("memory", "1e9999GB"), ("epochs", "9" * 5000)])
def test_numbers_too_large_to_be_one(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^--{name}: expected a "):
        configs.parse(name, value, f"--{name}")


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("nothing", "folder", "loop"):
        with pytest.raises(ValueError, match=rf"^config {tmp_path / name}: cannot be read: "):
            config_file.read(tmp_path / name)
