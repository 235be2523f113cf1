"""A round of many small clients, compiled: this package's stacked engine, or a round jitted by JAX.

    python benchmarks/jitted_round.py                   # in the environment of this package
    python benchmarks/jitted_round.py --eager --methods fedavg scaffold fedlesam-s --clients 40
    OTHER_ENVIRONMENT/bin/python benchmarks/jitted_round.py --jax     # pip install 'jax[cpu]' there

mlp 64-64-10, 10 steps of 10 samples, one thread: processor milliseconds per client and round. The JAX round is as bare
as it can be: vmap over clients, scan over steps, and the mean; no records, no memories, no checks.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

METHODS, CLIENTS = ("fedavg", "fedsam"), (40, 240)


def ours(method: str, clients: int, compile: bool = True) -> Callable[[], object]:
    import torch

    import fedlesam as fl
    from fedlesam.models.catalogue import make_model

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(clients, 50, 1, 8, 8, generator=draw), torch.randint(0, 10, (clients, 50), generator=draw)
    how = fl.Execution(engine="stacked", compile=compile, threads=1)
    model, local = make_model("mlp", (1, 8, 8), 10, 0), fl.LocalTraining(epochs=2, batch_size=10)
    algorithm = fl.algorithms.example(method)
    return fl.Federation(model, list(zip(x, y, strict=True)), algorithm, local, execution=how).round


def timed_parts() -> dict[str, float]:
    """Processor seconds of the parts of our rounds from now on, by their names."""
    from fedlesam.core.reduction import Reduction
    from fedlesam.engines import _feed, _mapped, _stack, stacked

    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, owner: Any, function: str) -> None:
        inner = getattr(owner, function)

        def outer(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return inner(*given, **named)
            finally:
                spent[name] += time.process_time() - began

        setattr(owner, function, outer)

    timed("step", _mapped.MappedStep, "__call__")
    timed("results", _stack, "_results")
    timed("exact sum", Reduction, "add_many")
    timed("clients", stacked.StackedEngine, "_member")
    timed("orders", _feed.Gathered, "__init__")
    timed("batches", _feed.Gathered, "__call__")
    timed("start", _stack, "begin_rows")
    return spent


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
    arguments.add_argument("--eager", action="store_true", help="the stacked engine without compiling")
    arguments.add_argument("--methods", nargs="+", default=METHODS, help="JAX has the first two alone")
    arguments.add_argument("--clients", nargs="+", type=int, default=CLIENTS)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--parts", action="store_true", help="also print where our rounds spend their time")
    options = arguments.parse_args()
    parts = timed_parts() if options.parts else {}
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    print("| method | clients | ms per client |\n|---|---|---|")
    for method in options.methods:
        for clients in options.clients:
            round = jitted(method, clients) if options.jax else ours(method, clients, not options.eager)
            for _ in range(3):
                round()
            spent = []
            parts.clear()
            for _ in range(options.rounds):
                began = time.process_time()
                round()
                spent.append(time.process_time() - began)
            print(f"| {method} | {clients} | {sorted(spent)[len(spent) // 4] / clients * 1e3:.3f} |", flush=True)
            for name, seconds in parts.items():
                print(f"| | {name} | {seconds / options.rounds / clients * 1e3:.3f} |", flush=True)


if __name__ == "__main__":
    main()
