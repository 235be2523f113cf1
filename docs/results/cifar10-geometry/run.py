"""Sharpness, drift and loss surfaces of eight methods and of centralised training on CIFAR-10.

    python docs/results/cifar10-geometry/run.py --data-dir DIR --out runs/cifar10-geometry

Stopped and started again it goes on: a run at its last checkpoint, a surface at its last point. It trains one run
after the other, then measures all final models with the same samples, and draws the figures.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import splits  # noqa: E402
import torch  # noqa: E402

from fedlesam import config as configs  # noqa: E402
from fedlesam.build import load_data  # noqa: E402
from fedlesam.cli.show import Display  # noqa: E402
from fedlesam.compare import plan  # noqa: E402
from fedlesam.config import RunConfig  # noqa: E402
from fedlesam.data.dataset import DataSet  # noqa: E402
from fedlesam.probes import GlobalLoss, Grid, open_run, surface_of  # noqa: E402
from fedlesam.probes.base import Look, Probe, beside  # noqa: E402
from fedlesam.probes.during import take  # noqa: E402
from fedlesam.probes.hessian import Hessian  # noqa: E402
from fedlesam.probes.sharpness import Sharpness  # noqa: E402
from fedlesam.probes.surface import path_of  # noqa: E402
from fedlesam.report import surfaces as pictures  # noqa: E402
from fedlesam.runner import execute  # noqa: E402
from fedlesam.runs import RunFolder  # noqa: E402

METHODS = ["fedavg", "fedsam", "mofedsam", "fedlesam", "fedgamma", "fedsmoo", "fedlesam-s", "fedlesam-d"]


def settings(args: argparse.Namespace) -> dict[str, RunConfig]:
    """All runs by name. Rho, decay and the corrections' constants are the paper's, as in the catalogue."""
    every, samples = max(1, args.rounds // 10), args.samples
    base = RunConfig(
        data="cifar10",
        data_dir=args.data_dir,
        model="cnn",
        split="splits:clients",
        clients=args.clients,
        active=args.active,
        rounds=args.rounds,
        clip_scope="corrected",
        evaluate_every=min(5, args.rounds),
        threads=args.threads,
        probe=f"sharpness:every={every},samples={samples} drift:every={every},samples={samples} "
        f"estimate:every={every},samples={samples}",
    )
    runs = {config.algorithm: config for config in plan(base, METHODS, 1)}
    alone = dataclasses.replace(
        base, algorithm="fedavg", split="splits:pooled", clients=1, active=1, epochs=1, evaluate_every=1
    )
    alone = dataclasses.replace(alone, probe=f"sharpness:every={every},samples={samples},local=no,trained=no")
    return {**runs, "pooled": configs.resolve(alone)}


def train(runs: dict[str, RunConfig], out: Path, data: DataSet, quiet: bool) -> None:
    display = Display(quiet)
    with display.open():
        for name, config in runs.items():
            execute(config, out / name, watch=display.watch(name, config.rounds), data=data)


def measure(runs: dict[str, RunConfig], out: Path, data: DataSet, args: argparse.Namespace) -> None:
    """The final models, all on the clients of fedavg's run: pooled training has the same samples, but one client."""
    federation = open_run(out / "fedavg", runs["fedavg"], data)
    probes: list[Probe] = [Sharpness(samples=args.final_samples, trained=False), Hessian(samples=args.samples)]
    grids = [Grid(dims=1, points=51, samples=args.samples), Grid(dims=2, points=args.points, samples=args.samples)]
    found = []
    for name, config in runs.items():
        own = open_run(out / name, config, data)
        federation.state = dataclasses.replace(
            federation.state, round=own.state.round, weights=own.state.weights, buffers=own.state.buffers
        )
        folder = RunFolder(out / name)
        done = {(r["probe"], r["round"]) for r in _lines(folder.path / "final.jsonl")}
        for probe in probes:
            if (probe.name, own.state.round) not in done:
                print(f"{name}: {probe.name}", flush=True)
                take(probe, Look(federation, trains_on=False), folder.path / "final.jsonl")
        for grid in grids:
            about = {"algorithm": name, "seed": config.seed, "rounds": own.state.round}
            print(f"{name}: surface, {grid.dims}d", flush=True)
            with beside(federation):
                loss = GlobalLoss.of(federation, grid.samples)
                path = path_of(folder, grid.dims)
                found.append((name, surface_of(loss, own.state.weights, grid, path, about)))
    for picture in pictures.draw(found, out / "figures"):
        print(picture)


def _lines(path: Path) -> list[dict[str, object]]:
    from fedlesam.probes.readings import read

    return [vars(reading) for reading in read(path)]


def table(runs: dict[str, RunConfig], out: Path) -> str:
    """The final models side by side, as Markdown."""
    head = ["method", "test accuracy %", "loss", "first order", "ascent", "scale-invariant", "clients' own"]
    head += ["largest eigenvalue", "trace", "norm of w", "drift, mean over rounds"]
    rows = [head, ["---"] * len(head)]
    for name in runs:
        folder = RunFolder(out / name)
        final = {str(line["probe"]): line["values"] for line in _lines(folder.path / "final.jsonl")}
        sharp, curved = final["sharpness"], final["hessian"]
        assert isinstance(sharp, dict)
        assert isinstance(curved, dict)
        values = [r["values"] for r in _lines(folder.probes) if r["probe"] == "drift"]
        drifts = [v["drift"] for v in values if isinstance(v, dict) and "drift" in v]
        accuracy = folder.read_summary()["accuracy"]["mean_of_last"]
        numbers = [sharp[k] for k in ("loss", "first_order", "ascent", "relative_ascent", "local_mean")]
        numbers += [curved["eigenvalue_1"], curved["trace"], sharp["weight_norm"]]
        drift = f"{sum(drifts) / len(drifts):.3f}" if drifts else "-"
        rows.append([name, f"{100 * accuracy:.2f}", *(f"{x:.4g}" for x in numbers), drift])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="where CIFAR-10 is")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10-geometry"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=100, help="100 pictures each")
    parser.add_argument("--active", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1000, help="of the training data, for the probes")
    parser.add_argument("--final-samples", type=int, default=0, help="for the final models' sharpness; 0: all")
    parser.add_argument("--points", type=int, default=25, help="of a surface's side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    splits.CLIENTS = args.clients
    runs = settings(args)
    data = load_data(runs["fedavg"])
    train(runs, args.out, data, args.quiet)
    measure(runs, args.out, data, args)
    found = table(runs, args.out)
    (args.out / "table.md").write_text(found + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
