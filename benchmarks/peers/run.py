"""Our rounds beside those of other simulators, on the same work: the same model, samples, batches, steps and cores.

    python benchmarks/peers/run.py [--method fedsam] [--model mlp] [--rounds 5] [--repeats 3] [--only ours,flower]
                                   [--fresh] [--out results.json]

LeNet on CIFAR-10, 20 clients of 500 pictures, 10 of them active per round, one local epoch in batches of 50, SGD with
learning rate 0.1, weight decay 1e-3 and gradients clipped to norm 10, FedAvg, no evaluation; two processes that compute
on one thread each. Every system has its own script beside this file and, but for ours and the bare loop, its own
virtual environment, made at the first run with the newest release of each (gigabytes; some minutes; --fresh makes them
again). --model mlp is a two-layer network on clients of 80 digits in batches of 10, where overhead decides, not
convolutions. --method fedsam is run by the systems whose users write the local loop; fedlesam-s, whose clients
remember, by ours and by the bare loop.

Each runs as its users run it, with pictures in PyTorch's default memory layout, and again with its pictures in the
channels-last layout that ours always uses; with --keep-memory all of them also get the settings of malloc that ours
makes for itself. The runs are interleaved. A round lasts from the end of the round before it to its own end; the first
one includes what a system starts for it. End to end is from the start of the process to its exit; processor is what all
its processes computed in that time. Every backward pass is counted, and the last model is compared with ours.
"""

import argparse
import contextlib
import ctypes
import datetime
import io
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import work  # noqa: E402
from lenet import PARAMETERS, SHAPES  # noqa: E402

from fedlesam import Federation  # noqa: E402
from fedlesam.core import seeds as our_seeds  # noqa: E402
from fedlesam.core.batches import batch_indices  # noqa: E402
from fedlesam.core.computing import LARGE, NEVER  # noqa: E402
from fedlesam.models import small  # noqa: E402

SYSTEMS = ("ours", "stacked", "bare", "flower", "pfl", "fedlab")
PACKAGES = {"flower": ("flwr[simulation]",), "pfl": ("pfl[pytorch]",), "fedlab": ("fedlab",)}
METHODS = {
    "fedavg": SYSTEMS,
    "fedsam": ("ours", "stacked", "bare", "flower", "fedlab"),
    "fedlesam-s": ("ours", "stacked", "bare"),
}
"""Which systems run which method."""
OURS = ("ours", "stacked")
INSTALLED = {"flower": ("flwr", "ray"), "pfl": ("pfl",), "fedlab": ("fedlab",)}
NOTES = {
    "ours": "Execution(workers=2, threads=1); always channels-last, and memory kept",
    "stacked": "ours with Execution(engine='stacked', threads=1): one process",
    "bare": "the same steps in two processes and nothing else; the reference",
    "flower": "Message API and FedAvg in run_simulation on ray, client_resources by --flower-cpus; DataLoader batches",
    "pfl": "SimulatedBackend and FederatedAveraging under torchrun with two processes; its own local loop",
    "fedlab": "a server and two client processes of ten clients each, which it does not balance; DataLoader batches",
}
TORCH = "torch==2.13.0"
SAME = 0.1
"""How far a last model may be from ours, relative to how far ours moved.

Layouts round differently, and where that turns the sign of one hidden unit, the gradient of a step changes by a percent
or so. In two short rounds that made 0.02, and in five of 10 steps 0.05; in the short ones no weight decay made 0.14,
another order of the samples 0.18 and other clients 0.35.
"""


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


# The work


def pictures(folder: Path | None, count: int) -> tuple[np.ndarray, np.ndarray, str]:
    """The first `count` training pictures, whose order in the file is random, or noise where there is no data."""
    file = folder / "train.parquet" if folder is not None else None
    if file is None or not file.exists():
        draw = np.random.default_rng(0)
        x, y = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), draw.integers(0, 10, count)
        return x, y, "random pictures, as CIFAR-10 was not found: give its folder with --data"
    import pyarrow.parquet
    from PIL import Image

    table = pyarrow.parquet.read_table(file).slice(0, count)
    decoded = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table["img"].to_pylist()]
    return np.stack(decoded), table["label"].to_numpy(), "CIFAR-10"


def samples(model: str, data: Path | None, count: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Normalised, channels first."""
    if model == "mlp":
        digits = np.load(ROOT / "fedlesam" / "data" / "digits.npz")
        return (digits["images"][:, None] / 16 - 0.5).astype(np.float32), digits["labels"], "digits"
    x, y, name = pictures(data, count)
    mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    return ((x / 255.0 - mean) / deviation).astype(np.float32).transpose(0, 3, 1, 2), y, name


def export(folder: Path, options: argparse.Namespace) -> str:
    """What the systems read, so that they need neither our package nor the data set's format."""
    images, rounds, shape = options.images, options.rounds, SHAPES[options.model]
    x, y, name = samples(options.model, options.data, work.CLIENTS * images)
    x, y = x[: work.CLIENTS * images], y[: work.CLIENTS * images]
    np.save(folder / "x.npy", np.ascontiguousarray(x).reshape(work.CLIENTS, images, *shape))
    np.save(folder / "y.npy", y.astype(np.int64).reshape(work.CLIENTS, images))

    module = getattr(small, options.model)(shape, 10)
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[options.model], "the peers' model is not ours"
    assert str(module) == str(work.first_model(options.model)), "the peers' model is not ours any more"
    draws = Federation(module, [(torch.zeros(1, *shape), torch.zeros(1).long())] * work.CLIENTS, active=work.ACTIVE)
    np.save(folder / "active.npy", np.array([draws.draw_active(round) for round in range(rounds)]))

    def order(round: int, client: int) -> np.ndarray:
        draw = our_seeds.generator(0, "batches", round, client)
        parts = list(batch_indices(images, work.BATCHES[options.model], 1, False, draw))
        return torch.cat([torch.arange(images)[part] for part in parts]).numpy()

    np.save(folder / "order.npy", np.array([[order(r, c) for c in range(work.CLIENTS)] for r in range(rounds)]))
    return name


# The environments


def environment(system: str, envs: Path, fresh: bool) -> tuple[Path | None, str]:
    """The Python of a system's own environment, made if need be, or None and why not."""
    python = envs / system / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = ", ".join(map(repr, ("torch", *INSTALLED[system])))
    check = [str(python), "-c", f"from importlib.metadata import version; [version(name) for name in ({wanted},)]"]
    if not fresh and python.exists() and subprocess.run(check, capture_output=True, timeout=120).returncode == 0:
        return python, ""
    say(f"{system}: making its environment")
    envs.mkdir(parents=True, exist_ok=True)
    (envs / ".gitignore").write_text("*\n")
    constraint = envs / "constraint.txt"
    constraint.write_text(f"{TORCH}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(envs / system)],
        [*install, TORCH, "numpy"],
        [*install, "--constraint", str(constraint), *PACKAGES[system]],
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        except subprocess.TimeoutExpired:
            return None, f"did not install within half an hour: {' '.join(command[3:])}"
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return None, f"did not install: {(errors or done.stderr.splitlines() or ['no reason given'])[-1]}"
    return python, ""


# The runs


@dataclass
class Entry:
    """A system in one memory layout, and its runs."""

    system: str
    layout: str
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds, for each run."""
    whole: list[float] = field(default_factory=list)
    """Seconds from the start of the process to its exit, for each run."""
    processor: list[float] = field(default_factory=list)
    """Seconds that all processes of a run computed, for each run: what other work on the machine disturbs least."""
    steps: list[list[int]] = field(default_factory=list)
    away: list[float] = field(default_factory=list)
    """How far the last model was from ours, relative to how far ours moved, for each run."""
    versions: dict[str, str] = field(default_factory=dict)
    failed: str = ""

    @property
    def name(self) -> str:
        return f"{self.system}, {self.layout}"

    def first(self) -> float:
        return statistics.median(run[0] for run in self.rounds)

    def later(self) -> float:
        """The median of all rounds but the first ones."""
        return statistics.median([second for run in self.rounds for second in run[1:]] or [self.first()])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def descendants() -> list[int]:
    """Processes below this one, as Linux tells; they are its own, as it adopts orphans of what it starts."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, level = [], {os.getpid()}
    while level:
        level = {process for process, parent in parents.items() if parent in level}
        found += level
    return found


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Ends whatever a run has started, also when it is interrupted."""
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while sys.platform == "linux" and (left := descendants()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.05)


def processor_seconds() -> float:
    """Of all processes that this one has started or adopted, and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def run(entry: Entry, python: Path, folder: Path, options: argparse.Namespace, ours: np.ndarray | None) -> None:
    """One run of a system, added to its entry."""
    out = Path(tempfile.mkdtemp(dir=folder, prefix="r"))
    job = work.Job(
        str(folder),
        str(out / "result"),
        options.rounds,
        entry.layout == "channels-last",
        options.flower_cpus,
        options.method,
        options.model,
        entry.system == "stacked",
    )
    (out / "job.json").write_text(json.dumps(asdict(job)))
    script = str(HERE / f"run_{'ours' if entry.system == 'stacked' else entry.system}.py")
    command = [str(python), script]
    port = str(free_port())
    if entry.system == "pfl":
        start = ["--nnodes", "1", "--nproc-per-node", str(work.WORKERS), "--master-addr", "127.0.0.1"]
        command = [str(python), "-m", "torch.distributed.run", *start, "--master-port", port, script]
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "FLWR_"))}
    settings = {
        "PEERS_JOB": str(out / "job.json"),
        "PEERS_PORT": port,
        "PYTHONPATH": str(ROOT) if entry.system in OURS else "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(out / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(out),
    }
    if options.keep_memory and entry.system not in OURS:
        settings |= {"MALLOC_MMAP_THRESHOLD_": str(LARGE), "MALLOC_TRIM_THRESHOLD_": str(NEVER)}
    log = out / "log"
    used = processor_seconds()
    with nothing_left_behind(), log.open("w") as heard:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=keep | settings, cwd=out, stdin=subprocess.DEVNULL, stdout=heard, stderr=heard
        )
        try:
            code: int | str = process.wait(timeout=options.limit)
        except subprocess.TimeoutExpired:
            code = f"did not end within {options.limit:g} seconds"
        whole = time.perf_counter() - began
    result = Path(f"{job.out}.json")
    if code != 0 or not result.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        marks = [line for line in lines if "Error" in line] or lines[-1:] or ["it said nothing"]
        entry.failed = code if isinstance(code, str) else f"exit code {code}: {marks[0].strip()[:300]}"
        kept = Path(tempfile.gettempdir()) / f"peers-{entry.system}.log"
        shutil.copy(log, kept)
        say(f"{entry.name}: failed, {entry.failed} (all it said is in {kept.name} in the temporary folder)")
        return
    measured: dict[str, Any] = json.loads(result.read_text())
    weights = np.load(f"{job.out}.npy")
    if ours is not None:
        moved = np.linalg.norm(ours - work.flat(work.first_model(options.model)).numpy())
        entry.away.append(float(np.linalg.norm(weights - ours) / moved))
    entry.rounds.append(measured["rounds"])
    entry.steps.append(measured["steps"])
    entry.whole.append(whole)
    entry.processor.append(processor_seconds() - used)
    entry.versions = measured["versions"]
    if entry.system == "ours":
        np.save(folder / "ours.npy", weights)
    shutil.rmtree(out, ignore_errors=True)
    each = " ".join(f"{second:.2f}" for second in measured["rounds"])
    say(f"{entry.name}: rounds {each} s, end to end {whole:.1f} s, processor {entry.processor[-1]:.1f} s")


# The results


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {"processor": model, "cores": cores, "load": os.getloadavg()[0], "python": platform.python_version()}


def table(entries: list[Entry], expected: int) -> tuple[list[str], bool]:
    """The rows, and whether every system did the work it was told to."""
    ours = next((entry for entry in entries if entry.system == "ours" and entry.rounds), None)
    head = (
        "system",
        "layout",
        "s/round",
        "first",
        "end to end",
        "processor",
        "round/ours",
        "whole/ours",
        "steps/round",
        "from ours",
    )
    rows, right = [head], True
    for entry in entries:
        if not entry.rounds:
            rows.append((entry.system, entry.layout, f"failed: {entry.failed}", *[""] * 7))
            right = False
            continue
        counts = sorted({count for run in entry.steps for count in run})
        away = max(entry.away, default=None)
        right &= counts == [expected] and (away is None or away <= SAME) and not entry.failed
        whole = statistics.median(entry.whole)
        ratios = (entry.later() / ours.later(), whole / statistics.median(ours.whole)) if ours else ()
        rows.append(
            (
                entry.system,
                entry.layout,
                f"{entry.later():.2f}",
                f"{entry.first():.2f}",
                f"{whole:.1f}",
                f"{statistics.median(entry.processor):.1f}",
                *([f"{ratio:.2f}" for ratio in ratios] or ["", ""]),
                " ".join(map(str, counts)),
                f"{away:.0e}" if away is not None else "",
            )
        )
    widths = [max(len(row[i]) for row in rows if not row[2].startswith("failed")) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines, right


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each run (5)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system and layout, interleaved (3)")
    parser.add_argument("--only", default=",".join(SYSTEMS), help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--layouts", default="contiguous,channels-last", help="of the systems but ours")
    parser.add_argument("--method", choices=tuple(METHODS), default="fedavg")
    parser.add_argument("--model", choices=tuple(SHAPES), default="lenet")
    parser.add_argument("--images", type=int, help="samples of a client (500; mlp: 80)")
    parser.add_argument("--fresh", action="store_true", help="make the environments again, with the newest releases")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/cifar10", help="with train.parquet")
    parser.add_argument("--envs", type=Path, default=ROOT / ".venv-peers", help="the systems' environments")
    parser.add_argument("--flower-cpus", type=int, choices=(1, 2), default=1, help="of a client (1; its default is 2)")
    parser.add_argument("--keep-memory", action="store_true", help="freed memory stays with the others' processes too")
    parser.add_argument("--limit", type=float, default=600, help="seconds a run may take (600)")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    options = parser.parse_args()
    options.only, options.layouts = options.only.split(","), options.layouts.split(",")
    if unknown := set(options.only) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if unknown := set(options.layouts) - {"contiguous", "channels-last"}:
        parser.error(f"no such layout: {', '.join(sorted(unknown))}; there are contiguous and channels-last")
    options.images = options.images or {"lenet": 500, "mlp": 80}[options.model]
    options.only = [system for system in options.only if system in METHODS[options.method]]
    if options.model == "mlp":
        options.layouts = ["contiguous"]
        if options.images > 89:
            parser.error("there are 1,797 digits: at most 89 for each of 20 clients")
    if min(options.rounds, options.repeats, options.images) < 1:
        parser.error("rounds, repeats and images must be at least 1")
    return options


def main() -> int:
    options = parse()
    adopt_orphans()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    about: dict[str, Any] = {"date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "machine": machine()}
    pythons, missing = {}, {}
    for system in SYSTEMS:
        if system in options.only:
            python, why = (
                environment(system, options.envs, options.fresh) if system in PACKAGES else (Path(sys.executable), "")
            )
            if python is None:
                missing[system] = why
                say(f"{system}: {why}")
            else:
                pythons[system] = python
    own = ["channels-last" if options.model == "lenet" else "contiguous"]
    entries = [Entry(system, layout) for system in pythons for layout in (own if system in OURS else options.layouts)]
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        say("exporting the pictures")
        about["data"] = export(folder, options)
        for repeat in range(options.repeats):
            say(f"repeat {repeat + 1} of {options.repeats}")
            for entry in entries:
                if not entry.failed:
                    ours = np.load(folder / "ours.npy") if (folder / "ours.npy").exists() else None
                    run(entry, pythons[entry.system], folder, options, ours)

    passes = 2 if options.method == "fedsam" else 1
    steps = work.ACTIVE * -(-options.images // work.BATCHES[options.model]) * passes
    lines, right = table(entries, steps)
    versions = {name: number for entry in entries for name, number in entry.versions.items()}
    people = f"{work.ACTIVE} of {work.CLIENTS} clients x {options.images} samples, 1 epoch"
    print(f"\n{options.method}, {options.model}, {about['data']}, {people}")
    print(f"{about['date']}; {about['machine']['processor']}, {about['machine']['cores']} cores, load before", end=" ")
    print(f"{about['machine']['load']:.1f}; Python {about['machine']['python']}, {versions}")
    print(f"seconds: medians over {options.repeats} runs of {options.rounds} rounds, the first round apart\n")
    print("\n".join(lines))
    for system in options.only:
        print(f"{system}: {missing.get(system) or NOTES[system]}")
    print(f"\n{steps} backward passes a round and the last model within {SAME:g} of ours:", "yes" if right else "NO")
    if options.out is not None:
        measured = [asdict(entry) for entry in entries]
        report = {
            **about, "versions": versions, "expected_steps": steps, "right": right, "missing": missing,
            "rounds": options.rounds, "repeats": options.repeats, "flower_cpus": options.flower_cpus,
            "keep_memory": options.keep_memory, "entries": measured,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if right and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
