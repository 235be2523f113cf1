"""A round of many small clients, compiled: this package's stacked engine, or a round jitted by JAX.

    python benchmarks/jitted_round.py                   # in the environment of this package
    OTHER_ENVIRONMENT/bin/python benchmarks/jitted_round.py --jax     # pip install 'jax[cpu]' there

mlp 64-64-10, 10 steps of 10 samples, one thread: processor milliseconds per client and round. The JAX round is as bare
as it can be: vmap over clients, scan over steps, and the mean; no records, no memories, no checks.
"""

import argparse
import os
import time
from collections.abc import Callable

METHODS, CLIENTS = ("fedavg", "fedsam"), (40, 240)


def ours(method: str, clients: int) -> Callable[[], object]:
    import torch

    import fedlesam as fl
    from fedlesam.models.catalogue import make_model

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(clients, 50, 1, 8, 8, generator=draw), torch.randint(0, 10, (clients, 50), generator=draw)
    how = fl.Execution(engine="stacked", compile=True, threads=1)
    model, local = make_model("mlp", (1, 8, 8), 10, 0), fl.LocalTraining(epochs=2, batch_size=10)
    return fl.Federation(model, list(zip(x, y, strict=True)), method, local, execution=how).round


def jitted(method: str, clients: int) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    def loss(w, x, y):
        outputs = jax.nn.relu(x @ w["a"] + w["b"]) @ w["c"] + w["d"]
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()

    def norm(g):
        return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g)))

    def step(w, batch):
        at = w
        if method == "fedsam":
            first = jax.grad(loss)(w, *batch)
            scale = 0.01 / (norm(first) + 1e-7)
            at = jax.tree.map(lambda p, q: p + scale * q, w, first)
        value, g = jax.value_and_grad(loss)(at, *batch)
        clip = jnp.minimum(1.0, 10.0 / (norm(g) + 1e-6))
        return jax.tree.map(lambda p, q: p - 0.1 * (clip * q + 1e-3 * p), w, g), value

    def client(w, x, y, order):
        end, losses = jax.lax.scan(step, w, (x[order], y[order]))
        return jax.tree.map(jnp.subtract, end, w), losses.mean()

    @jax.jit
    def train(w, x, y, order):
        updates, losses = jax.vmap(client, (None, 0, 0, 0))(w, x, y, order)
        return jax.tree.map(lambda p, d: p + d.mean(0), w, updates), losses.mean()

    draw = np.random.default_rng(0)
    x, y = jnp.array(draw.normal(size=(clients, 50, 64)), jnp.float32), jnp.array(draw.integers(0, 10, (clients, 50)))
    shapes = {"a": (64, 64), "b": (64,), "c": (64, 10), "d": (10,)}
    state = {"w": {name: jnp.array(0.1 * draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}}

    def round() -> object:
        orders = [np.concatenate([draw.permutation(50) for _ in range(2)]).reshape(10, 10) for _ in range(clients)]
        state["w"], value = train(state["w"], x, y, np.stack(orders))
        return jax.block_until_ready(value)

    return round


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--jax", action="store_true")
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    print("| method | clients | ms per client |\n|---|---|---|")
    for method in METHODS:
        for clients in CLIENTS:
            round = (jitted if options.jax else ours)(method, clients)
            for _ in range(3):
                round()
            spent = []
            for _ in range(options.rounds):
                began = time.process_time()
                round()
                spent.append(time.process_time() - began)
            print(f"| {method} | {clients} | {sorted(spent)[len(spent) // 4] / clients * 1e3:.3f} |", flush=True)


if __name__ == "__main__":
    main()
