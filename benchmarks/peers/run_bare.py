"""The reference: the same steps in a bare PyTorch loop, in two one-thread processes, and nothing else."""

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
import work
from torch import Tensor, nn


class Shared:
    """What all processes see: the model, their sums, and FedLESAM-S's memories, in shared memory."""

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.c = weights.clone().share_memory_(), torch.zeros_like(weights).share_memory_()
        self.sums, self.changes = (torch.zeros(work.WORKERS, len(weights)).share_memory_() for _ in range(2))
        memories = work.CLIENTS if work.job().method == "fedlesam-s" else 0
        self.old, self.own = (torch.zeros(memories, len(weights)).share_memory_() for _ in range(2))
        self.known = torch.zeros(work.CLIENTS, dtype=torch.bool).share_memory_()


def look_back(model: nn.Module, shared: Shared, round: int, client: int, change: Tensor) -> None:
    """FedLESAM-S: gradients at v + e, e of the round; the step turned by c - c_i."""
    parameters, (x, y) = list(model.parameters()), work.data()
    back = shared.old[client] - shared.weights
    e = back * (work.RHO / back.norm()) if shared.known[client] else torch.zeros_like(back)
    moves, turns = (pieces(vector, parameters) for vector in (e, shared.c - shared.own[client]))
    optimiser = torch.optim.SGD(parameters, work.LR, weight_decay=work.WEIGHT_DECAY)
    orders = work.orders()[round, client].split(work.batch_size())
    for indices in orders:
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        optimiser.zero_grad()
        F.cross_entropy(model(work.in_layout(x[client, indices])), y[client, indices]).backward()
        nn.utils.clip_grad_norm_(parameters, work.CLIP)
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
            torch._foreach_add_([p.grad for p in parameters], turns)
        optimiser.step()
    fresh = shared.own[client] - shared.c - (work.flat(model) - shared.weights) / (len(orders) * work.LR)
    change += fresh - shared.own[client]
    shared.own[client], shared.old[client], shared.known[client] = fresh, shared.weights, True


def pieces(vector: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    parts = vector.split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def serve(rank: int, shared: Shared, meet: "multiprocessing.Barrier") -> None:
    model, (x, y) = work.first_model(), work.data()
    parameters = list(model.parameters())
    if rank == 0:
        work.mark()
    for round in range(work.job().rounds):
        shared.sums[rank], shared.changes[rank] = 0, 0
        for client in work.active()[round][rank :: work.WORKERS]:
            nn.utils.vector_to_parameters(shared.weights.clone(), parameters)
            if work.job().method == "fedlesam-s":
                look_back(model, shared, round, client, shared.changes[rank])
            else:
                optimiser = torch.optim.SGD(parameters, work.LR, weight_decay=work.WEIGHT_DECAY)
                for indices in work.orders()[round, client].split(work.batch_size()):
                    work.step(model, optimiser, work.in_layout(x[client, indices]), y[client, indices])
            shared.sums[rank] += work.flat(model)
        meet.wait()
        if rank == 0:
            shared.weights.copy_(shared.sums.sum(0) / work.ACTIVE)
            shared.c += shared.changes.sum(0) / work.CLIENTS
            work.mark()
        meet.wait()


def main() -> None:
    shared = Shared(work.flat(work.first_model()))
    work.data(), work.orders(), work.active()
    context = multiprocessing.get_context("fork")
    meet = context.Barrier(work.WORKERS, timeout=600)
    others = [context.Process(target=serve, args=(rank, shared, meet), daemon=True) for rank in range(1, work.WORKERS)]
    for other in others:
        other.start()
    serve(0, shared, meet)
    for other in others:
        other.join()
    work.finish(shared.weights)


if __name__ == "__main__":
    main()
