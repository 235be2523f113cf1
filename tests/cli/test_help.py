"""Help, lists and completion."""

import json
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from command_line import Call, process

from fedlesam.cli import COMMANDS, cli

SLOTS_AND_COSTS = {
    "fedavg": ("-", "-", "Average", 1, 1, 1, 1),
    "fedadam": ("-", "-", "Adam", 1, 1, 1, 1),
    "scaffold": ("-", "ControlVariates", "Average", 1, 2, 2, 2),
    "fedcm": ("-", "ClientMomentum", "Average", 1, 2, 1, 1),
    "feddyn": ("-", "DynamicRegulariser", "Dynamic", 1, 1, 1, 2),
    "fedsam": ("LocalAscent", "-", "Average", 2, 1, 1, 1),
    "mofedsam": ("LocalAscent", "ClientMomentum", "Average", 2, 2, 1, 1),
    "fedgamma": ("LocalAscent", "ControlVariates", "Average", 2, 2, 2, 2),
    "fedsmoo": ("CorrectedAscent", "DynamicRegulariser", "Dynamic", 2, 2, 2, 3),
    "fedlesam": ("GlobalAscent", "-", "Average", 1, 1, 1, 2),
    "fedlesam-s": ("GlobalAscent", "ControlVariates", "Average", 1, 2, 2, 3),
    "fedlesam-d": ("GlobalAscent", "DynamicRegulariser", "Dynamic", 1, 1, 1, 3),
    "fedprox": ("-", "Proximal", "Average", 1, 1, 1, 1),
    "fedlesam-m": ("GlobalAscent", "ClientMomentum", "Average", 1, 2, 1, 2),
    "freesam": ("PreviousStepAscent", "-", "Average", 1, 1, 1, 1),
    "freesam-s": ("PreviousStepAscent", "ControlVariates", "Average", 1, 2, 2, 2),
    "freesam-d": ("PreviousStepAscent", "DynamicRegulariser", "Dynamic", 1, 1, 1, 2),
    "fedspeed": ("MixedAscent", "SentDual", "DualMean", 2, 1, 2, 2),
    "fedasam": ("AdaptiveAscent", "-", "Average", 2, 1, 1, 1),
    "fedgf": ("InterpolatedAscent", "-", "Average", 2, 2, 1, 1),
    "fedgloss": ("RampedAscent", "DynamicRegulariser", "ShiftedDynamic", 2, 1, 1, 2),
    "fednsam": ("LocalAscent", "-", "Nesterov", 2, 1, 1, 1),
    "fedswa": ("-", "-", "Average", 1, 1, 1, 1),
    "fedmoswa": ("-", "MomentumVariates", "Average", 1, 2, 2, 2),
    "fedgmt": ("TaughtDescent", "DualBias", "Dynamic", 1, 2, 1, 2),
    "fedsol": ("ProximalAscent", "-", "Average", 2, 1, 1, 1),
    "fedwmsam": ("TrajectoryAscent", "WeightedMomentum", "Average", 1, 3, 2, 2),
    "dp-fedsam": ("LocalAscent", "-", "Average", 2, 1, 1, 1),
    "msam": ("MomentumAscent", "-", "Average", 1, 1, 1, 1),
    "fedavgm": ("-", "-", "ServerMomentum", 1, 1, 1, 1),
    "fedyogi": ("-", "-", "Yogi", 1, 1, 1, 1),
    "fedadagrad": ("-", "-", "Adagrad", 1, 1, 1, 1),
    "fedlesam-released": ("ReleasedAscent", "-", "Average", 1, 2, 1, 1),
    "fedlesam-released-s": ("ReleasedAscent", "ControlVariates", "Average", 1, 3, 2, 2),
    "fedlesam-released-d": ("ReleasedAscent", "DynamicRegulariser", "Dynamic", 1, 2, 1, 2),
    "random-round": ("RandomRoundAscent", "-", "Average", 1, 1, 1, 1),
    "random-step": ("RandomStepAscent", "-", "Average", 1, 1, 1, 1),
    "shuffled-s": ("ShuffledAscent", "ControlVariates", "Average", 1, 12, 2, 2),
    "scaffold-damped": ("-", "ControlVariates", "Average", 1, 2, 2, 2),
    "fedspeed-released": ("LocalAscent", "DynamicRegulariser", "Dynamic", 2, 1, 1, 2),
    "fedsmoo-released": ("ReleasedCorrectedAscent", "DynamicRegulariser", "Dynamic", 2, 2, 2, 3),
    "fednsam-released": ("LocalAscent", "-", "ReleasedNesterov", 2, 1, 1, 1),
}


# help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(call: Call, command: str) -> None:
    done = call(command, "--help")
    assert done.code == 0
    assert done.out.startswith("Usage: ")
    assert f"fedlesam {command} " in done.out
    assert done.err == ""


@pytest.mark.parametrize("command", ["run", "compare", "split"])
def test_help_teaches_with_examples_in_groups(call: Call, command: str) -> None:
    text = call(command, "-h").out
    groups = [line for line in text.splitlines() if line and not line.startswith(" ") and line.endswith(":")]
    assert groups[0] == "What to train:"
    assert groups[-1] == "Examples:", "last, where they are seen"
    examples = text.rpartition("Examples:")[2].strip().splitlines()
    assert len(examples) >= 2
    assert all(line.strip().startswith("fedlesam ") for line in examples)


def test_the_examples_of_the_help_are_commands_that_parse() -> None:
    for name in ("run", "compare", "split", "report"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for example in command.examples:  # type: ignore[attr-defined]
            words = example.partition("#")[0].split()
            assert words[0] == "fedlesam"
            asked = cli.get_command(click.Context(cli), words[1])
            assert asked is not None
            given = [word for word in words[2:] if not word.endswith("config.toml") and word != "--config"]
            asked.make_context(words[1], given)


def test_every_setting_of_the_protocol_has_a_flag(call: Call) -> None:
    text = call("run", "--help").out
    flags = "--algorithm --data --data-dir --model --split --clients --active --rounds --seed --threads --out --config"
    flags += " --lr --lr-g --lr-decay --rho --alpha --lam --prox --weight-decay --epochs --batch-size --clip"
    flags += " --dropout --max-update-norm --on-client-error --checkpoint-every --keep --lost-after"
    flags += " --clip-scope --momentum --evaluate-every --per-client --set --quiet --json --overwrite --weighting"
    for flag in flags.split():
        assert f"{flag} " in text or f"{flag}\n" in text, flag


def test_the_list_of_commands(call: Call) -> None:
    text = call("--help").out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert call().out.startswith("Usage:") or call().err.startswith("Usage:")


@pytest.mark.parametrize(
    "args", [["--help"], ["run", "--help"], ["compare", "--help"], ["report", "--help"], ["--version"]]
)
def test_help_does_not_import_torch(tmp_path: Path, args: list[str]) -> None:
    code = (
        "import sys\n"
        "from fedlesam.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    done = process(*args, folder=tmp_path, code=code)
    assert (done.code, done.err) == (0, "")
    assert done.out


@pytest.mark.parametrize("args", [["--help"], ["data", "--help"], ["deploy", "--help"]])
def test_no_command_is_described_by_half_a_sentence(call: Call, args: list[str]) -> None:
    assert "..." not in call(*args).out.partition("Commands:")[2]


# lists


def test_list_algorithms_shows_the_whole_catalogue_with_their_costs(call: Call) -> None:
    rows = json.loads(call("list", "algorithms", "--json").out)
    shown = {
        row["name"]: (
            *(row[slot].partition("(")[0] for slot in ("perturbation", "correction", "server rule")),
            *(float(row[cost]) for cost in ("passes", "down", "up", "stored")),
        )
        for row in rows
    }
    assert shown == SLOTS_AND_COSTS
    by_name = {row["name"]: row for row in rows}
    assert by_name["fedlesam"]["perturbation"] == "GlobalAscent(0.01)"
    assert by_name["feddyn"]["correction"] == "DynamicRegulariser(0.1)"
    assert by_name["fedadam"]["server rule"] == "Adam(0.1, 0.9, 0.99, 0.01)"


def test_list_algorithms_as_a_table(call: Call) -> None:
    lines = call("list", "algorithms").out.splitlines()
    found = {
        line.split()[0]: line.split()[-4:] for line in lines if line.split() and line.split()[0] in SLOTS_AND_COSTS
    }
    assert found == {name: [str(n) for n in row[3:]] for name, row in SLOTS_AND_COSTS.items()}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("models", {"mlp", "cnn", "lenet", "resnet18", "module:callable"}),
        ("data", {"digits"}),
        ("splits", {"iid", "pooled", "dirichlet:B[,repeat]", "dirichlet-by-class:B", "by:FILE", "file:PATH"}),
    ],
)
def test_other_lists(call: Call, what: str, names: set[str]) -> None:
    rows = json.loads(call("list", what, "--json").out)
    assert names <= {next(iter(row.values())) for row in rows}
    text = call("list", what).out
    assert all(name in text for name in names)


# completion


@pytest.mark.parametrize(
    ("words", "begun", "expected"),
    [
        ([], "com", {"compare"}),
        (["run", "--algorithm"], "fedlesam-r", {"fedlesam-released", "fedlesam-released-s", "fedlesam-released-d"}),
        (["compare", "fedavg"], "sca", {"scaffold", "scaffold-damped"}),
        (["run", "--model"], "re", {"resnet18"}),
        (["run", "--split"], "path", {"pathological:"}),
        (["run", "--clip-scope"], "", {"loss", "corrected"}),
        (["run"], "--weight", {"--weight-decay", "--weighting"}),
        (["run", "--on-client-error"], "", {"drop", "stop"}),
    ],
)
def test_completions(words: list[str], begun: str, expected: set[str]) -> None:
    found = ShellComplete(cli, {}, "fedlesam", "_FEDLESAM_COMPLETE").get_completions(words, begun)
    assert {item.value for item in found} == expected
