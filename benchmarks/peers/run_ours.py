"""fedlesam: `Federation` with two one-thread workers, or the stacked engine in one process.

It brings its own memory layout, order and choice of clients.
"""

import work

from fedlesam import Execution, Federation, LocalTraining, algorithms


def main() -> None:
    x, y = work.data()
    local = LocalTraining(
        lr=work.LR, lr_decay=1.0, epochs=1, batch_size=work.batch_size(), weight_decay=work.WEIGHT_DECAY, clip=work.CLIP
    )
    clients = list(zip(x, y, strict=True))
    model = work.first_model()
    job = work.job()
    method = algorithms.get(job.method, **({} if job.method == "fedavg" else {"rho": work.RHO}))
    how = Execution(threads=1, engine="stacked") if job.stacked else Execution(workers=work.WORKERS, threads=1)
    with Federation(model, clients, method, local, active=work.ACTIVE, execution=how) as federation:
        work.mark()
        for record in federation.run(work.job().rounds):
            work.count(record.backward_passes if job.stacked else 0)
            work.mark()
            assert record.active == work.active()[record.round], "the others were told to train other clients"
        work.finish(federation.weights, "fedlesam")


if __name__ == "__main__":
    main()
