"""Measure what every method of the catalogue computes, sends and keeps, as the table of docs/design.md.

    python docs/scripts/catalogue_table.py

Two rounds of a tiny model with every client active; the figures are those of the second round, in vectors of the
model's size, from Record.bytes_down, Record.bytes_up, Record.backward_passes and Federation.memories.
"""

import torch

import fedlesam as fl
from fedlesam.core.state import size_in_bytes

CLIENTS, EPOCHS = 2, 3


def measure(algorithm: fl.Algorithm) -> dict[str, float]:
    """Backward passes per step, and vectors per client and round."""
    rng = torch.Generator().manual_seed(0)
    shard = torch.randn(8, 100, generator=rng), torch.randint(2, (8,), generator=rng)
    local = fl.LocalTraining(epochs=EPOCHS, batch_size=8)
    federation = fl.Federation(torch.nn.Linear(100, 100), [shard] * CLIENTS, algorithm, local)
    *_, last = federation.run(2)
    vector = federation.weights.nbytes
    state = federation.state
    return {
        "passes": last.backward_passes / (CLIENTS * EPOCHS),
        "down": last.bytes_down / (CLIENTS * vector),
        "up": last.bytes_up / (CLIENTS * vector),
        "kept": federation.memories[0].nbytes / vector,
        "server": 1 + size_in_bytes(state.perturbation, state.correction, state.server) / vector,
    }


def table() -> list[str]:
    lines = [
        "| method | perturbation | correction | server | passes per step | down | up | client keeps | server keeps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in fl.algorithms.CATALOGUE:
        algorithm = fl.algorithms.example(name)
        rules = (algorithm.perturbation, algorithm.correction, algorithm.server)
        cells = [
            name,
            *(type(rule).__name__ for rule in rules),
            *(f"{round(n, 2):g}" for n in measure(algorithm).values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n".join(table()))
