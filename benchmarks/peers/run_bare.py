"""The reference: the same steps in a bare PyTorch loop, in two one-thread processes, and nothing else."""

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
import work
from torch import Tensor, nn


def serve(rank: int, weights: Tensor, sums: Tensor, meet: "multiprocessing.Barrier") -> None:
    model, (x, y) = work.first_model(), work.data()
    parameters = list(model.parameters())
    if rank == 0:
        work.mark()
    for round in range(work.job().rounds):
        sums[rank] = 0
        for client in work.active()[round][rank :: work.WORKERS]:
            nn.utils.vector_to_parameters(weights.clone(), parameters)
            optimiser = torch.optim.SGD(parameters, work.LR, weight_decay=work.WEIGHT_DECAY)
            for indices in work.orders()[round, client].split(work.BATCH):
                optimiser.zero_grad()
                loss = F.cross_entropy(model(work.in_layout(x[client, indices])), y[client, indices])
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, work.CLIP)
                optimiser.step()
            sums[rank] += work.flat(model)
        meet.wait()
        if rank == 0:
            weights.copy_(sums.sum(0) / work.ACTIVE)
            work.mark()
        meet.wait()


def main() -> None:
    weights = work.flat(work.first_model()).share_memory_()
    sums = torch.zeros(work.WORKERS, len(weights)).share_memory_()
    work.data(), work.orders(), work.active()
    context = multiprocessing.get_context("fork")
    meet = context.Barrier(work.WORKERS, timeout=600)
    others = [
        context.Process(target=serve, args=(rank, weights, sums, meet), daemon=True) for rank in range(1, work.WORKERS)
    ]
    for other in others:
        other.start()
    serve(0, weights, sums, meet)
    for other in others:
        other.join()
    work.finish(weights)


if __name__ == "__main__":
    main()
