"""Run folders as a run and its probes write them, with made-up numbers."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig

RATE = {"fedavg": 30.0, "fedsam": 28.0, "scaffold": 22.0, "fedlesam": 24.0, "fedlesam-s": 18.0, "fedsmoo": 20.0}


def fake_run(
    folder: Path,
    algorithm: str = "fedavg",
    *,
    seed: int = 0,
    rounds: int = 12,
    finished: bool = True,
    probes: bool = False,
    evaluate_every: int = 1,
    hyper: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A plausible run: accuracy rises with the method's own rate, with noise that differs between seeds."""
    config = RunConfig(algorithm=algorithm, seed=seed, rounds=rounds, evaluate_every=evaluate_every, threads=1)
    known = {"clients": 10, "epochs": 1, "batch_size": 10, "lr_decay": 0.998, "hyper": hyper or {}, **settings}
    config = dataclasses.replace(config, **known)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(configs.write(config))
    draw = np.random.default_rng([seed, *algorithm.encode()])
    passes = 2 if "sam" in algorithm and "le" not in algorithm else 1
    sent = 2_000_000 if algorithm in ("scaffold", "fedlesam-s") else 1_000_000
    records = []
    for t in range(rounds):
        record = {
            "round": t,
            "active": [1, 2],
            "train_loss": 2 * math.exp(-t / 20) + 0.1 * draw.random(),
            "lr": 0.1,
            "seconds": 0.5 * passes,
            "backward_passes": 100 * passes,
            "bytes_down": sent,
            "bytes_up": sent,
            "divergence": 5 * math.exp(-t / 15) + 0.01,
        }
        if (t + 1) % evaluate_every == 0:
            share = 0.9 * (1 - math.exp(-(t + 1) / RATE.get(algorithm, 25.0))) + 0.03 * (draw.random() - 0.5)
            record |= {"test_accuracy": max(0.1, share), "test_loss": 2.3 - 2 * share}
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    versions = {
        "fedlesam": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "machine": "x86_64, 2 cores",
        "commit": "1a2b",
    }
    (folder / "versions.json").write_text(json.dumps(versions))
    tested = [r["test_accuracy"] for r in records if "test_accuracy" in r]
    if finished:
        summary = {
            "state": "finished",
            "accuracy": {"last": tested[-1], "mean_of_last": float(np.mean(tested[-10:])), "best": max(tested)},
            "parameters": 250_000,
            "client_memory_bytes": 1_000_000 if algorithm.startswith(("scaffold", "fedlesam")) else 0,
            "split": {"hash": f"{config.split} {seed}"},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    counts = np.random.default_rng(seed).multinomial(60, np.full(10, 0.1), size=10)
    counts[counts < 5] = 0
    save_file({"class_counts": counts.astype(np.int64)}, folder / "split.safetensors")
    if probes:
        fake_probes(folder, algorithm, rounds, seed)
    return folder


def fake_sweep(folder: Path) -> Path:
    """FedSAM over rho with two seeds, FedLESAM over rho and lr, FedSMOO over three settings, FedAvg once."""
    fake_run(folder / "fedavg", "fedavg")
    for rho in (0.01, 0.1, 1.0):
        for seed in (0, 1):
            fake_run(folder / f"fedsam-{rho}-{seed}", "fedsam", seed=seed, hyper={"rho": rho})
        for lr in (0.01, 0.1):
            fake_run(folder / f"fedlesam-{rho}-{lr}", "fedlesam", hyper={"rho": rho}, lr=lr)
            for lam in (0.1, 0.2):
                fake_run(folder / f"fedsmoo-{rho}-{lr}-{lam}", "fedsmoo", hyper={"rho": rho, "lam": lam}, lr=lr)
    return folder


def fake_probes(folder: Path, algorithm: str, rounds: int, seed: int) -> None:
    flat = RATE.get(algorithm, 25.0) / 30
    lines = []
    for done in range(max(1, rounds // 6), rounds + 1, max(1, rounds // 6)):
        rise = flat * (0.2 + done / rounds) * (1 + 0.05 * seed)
        sharpness = {
            "loss": 0.5,
            "first_order": rise,
            "ascent": 1.3 * rise,
            "local_mean": 0.4 * rise,
            "relative_ascent": 0.01 * rise,
        }
        entries = [("sharpness", sharpness, {"radius": 0.05, "steps": 10, "samples": 2000})]
        if algorithm not in ("fedavg", "scaffold"):
            entries.append(("drift", {"drift": 0.7 * flat, "cosine": 1 - flat, "norm": 0.1}, {"samples": 500}))
        entries.append(("hessian", {"eigenvalue_1": 900 * flat, "trace": 2e4 * flat}, {"vectors": 20}))
        for probe, values, metadata in entries:
            line = {"round": done, "probe": probe, "values": values, "metadata": metadata, "seconds": 0.1}
            lines.append(json.dumps(line) + "\n")
    (folder / "probes.jsonl").write_text("".join(lines))
    axis = np.linspace(-1, 1, 25)
    x, y = np.meshgrid(axis, axis)
    loss = 0.2 + 3 * flat * (x**2 + 0.6 * y**2 + 0.15 * np.sin(5 * x) * np.cos(4 * y) + 0.2)
    header = {"metadata": json.dumps({"seed": 0, "samples": 1000})}
    save_file(
        {"x": axis, "loss": loss[12].copy(), "accuracy": 1 / (1 + loss[12])}, folder / "surface-1d.safetensors", header
    )
    grid = {"x": axis, "y": axis, "loss": loss, "accuracy": 1 / (1 + loss)}
    save_file(grid, folder / "surface-2d.safetensors", header)
