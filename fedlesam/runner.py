"""One run from its settings to its folder."""

import contextlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_model

from fedlesam import config as configs
from fedlesam import costs
from fedlesam.build import Experiment, build
from fedlesam.config import RunConfig
from fedlesam.data.dataset import DataSet
from fedlesam.data.split_names import save_split
from fedlesam.engines.distributed import dismiss
from fedlesam.engines.world import World
from fedlesam.federation import Federation, Record
from fedlesam.probes.catalogue import attach
from fedlesam.probes.during import watched
from fedlesam.runs import RunFolder, State, versions, write_json, write_text

Watch = Callable[[Record], None]

LAST = 10
"""How many of the last evaluations are averaged."""


def execute(
    config: RunConfig,
    path: Path,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
    data: DataSet | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train a resolved config into a folder and return its summary; a finished folder is only read.

    All settings are checked before the folder is touched. Ctrl-C and numbers that are not finite end the run with
    everything up to the last good round in the folder, and are raised again. In a `world` of several processes the
    leader does all of this, and the others `assist`.
    """
    folder = RunFolder(path)
    with leading(world):
        if world is not None:
            world.broadcast({"do": "build", "config": configs.as_table(config), "folder": str(path.resolve())})
        if not folder.claim(config, overwrite):
            if world is not None:
                dismiss(world)
            return folder.read_summary()
        if overwrite:
            shutil.rmtree(folder.memory, ignore_errors=True)  # of a run that was killed: nothing can use it
        experiment = build(config, data, folder=folder.memory, world=world)
        probes = attach(config.probe, experiment.federation)
        costs.check_fits(costs.predict(config, experiment.federation), config, path)
        if world is not None:
            world.broadcast({"do": "ready?"})
            wrong = [about for about, _ in world.gather(None) if about]
            if wrong:
                raise ValueError(wrong[0])
    folder.clear()
    write_json(folder.versions, versions())
    save_split(experiment.split, experiment.data, folder.split)
    write_text(folder.config, configs.write(config))
    records: list[dict[str, Any]] = []
    try:
        with folder.metrics.open("w", encoding="utf-8", buffering=1) as metrics, experiment.federation:
            trained = experiment.federation.run(config.rounds)
            for record in watched(experiment.federation, trained, probes, folder.probes, config.rounds):
                records.append(record.as_dict())
                metrics.write(json.dumps(records[-1]) + "\n")
                if watch is not None:
                    watch(record)
    except KeyboardInterrupt:
        _close(folder, config, experiment, records, "interrupted", "interrupted by the user")
        raise
    except Exception as error:
        with contextlib.suppress(OSError, SafetensorError):
            _close(folder, config, experiment, records, "stopped", str(error))
        raise
    return _close(folder, config, experiment, records, "finished", "")


@contextlib.contextmanager
def leading(world: World | None) -> Iterator[None]:
    """On an error let the others go, so that they wait for nothing."""
    try:
        yield
    except BaseException:
        if world is not None:
            dismiss(world)
        raise


def assist(world: World) -> None:
    """In a process that torchrun started beside the leader: do as it says, with its settings.

    What goes wrong here the leader hears and says.
    """
    try:
        about = world.broadcast()[0]
        if about["do"] == "stop":
            return
        settings = about["config"]
        hyper = settings.pop("hyper")
        config = configs.update(RunConfig(), {**settings, **hyper})
        federation, wrong = None, None
        try:
            federation = build(config, folder=RunFolder(Path(about["folder"])).memory, world=world).federation
        except Exception as error:
            wrong = f"{platform.node()}, process {world.rank}: {error}"
        if world.broadcast()[0]["do"] == "stop":
            return
        world.gather(wrong)
        if federation is None:
            world.broadcast()
        else:
            federation.follow()
    finally:
        world.close()


def _close(
    folder: RunFolder, config: RunConfig, experiment: Experiment, records: list[dict[str, Any]], state: State, why: str
) -> dict[str, Any]:
    memory = largest_memory(experiment.federation)
    shutil.rmtree(folder.memory, ignore_errors=True)
    beside = folder.model.with_name(folder.model.name + ".part")
    save_model(experiment.federation.model, str(beside))
    beside.replace(folder.model)
    summary = {
        "state": state,
        **({"why": why} if why else {}),
        "algorithm": config.algorithm,
        "rounds": len(records),
        **accuracies(records),
        **{name: sum(r[name] for r in records) for name in ("backward_passes", "bytes_down", "bytes_up", "seconds")},
        "parameters": len(experiment.federation.weights),
        "client_memory_bytes": memory,
        "split": {
            "scheme": experiment.split.scheme,
            "hash": experiment.split.hash,
            "dropped": experiment.split.dropped,
            "repeats": experiment.split.repeats,
        },
    }
    write_json(folder.summary, summary)
    return summary


def accuracies(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The last round's, the mean of the last evaluations' and the best round's accuracy, each by its name."""
    tested = [(r["test_accuracy"], r["round"]) for r in records if r.get("test_accuracy") is not None]
    if not tested:
        return {}
    last = [accuracy for accuracy, _ in tested[-LAST:]]
    best, at = max(tested, key=lambda pair: (pair[0], -pair[1]))
    found = {"last": tested[-1][0], "mean_of_last": sum(last) / len(last), "evaluations_in_mean": len(last)}
    final = [r for r in records if "per_client" in r][-1:]
    per_client = {"per_client": final[0]["per_client"]} if final else {}
    return {"accuracy": {**found, "best": best, "best_round": at}, **per_client}


def largest_memory(federation: Federation) -> int:
    """The most a client holds between rounds, in bytes."""
    return max((federation.memories[client].nbytes for client in federation.memories), default=0)
