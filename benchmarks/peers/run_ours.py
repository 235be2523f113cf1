"""fedlesam: `Federation` with two one-thread workers. It brings its own memory layout, order and choice of clients."""

import work

from fedlesam import Execution, Federation, LocalTraining


def main() -> None:
    x, y = work.data()
    local = LocalTraining(
        lr=work.LR, lr_decay=1.0, epochs=1, batch_size=work.BATCH, weight_decay=work.WEIGHT_DECAY, clip=work.CLIP
    )
    clients = list(zip(x, y, strict=True))
    model = work.first_model()
    with Federation(
        model, clients, "fedavg", local, active=work.ACTIVE, execution=Execution(workers=work.WORKERS, threads=1)
    ) as federation:
        work.mark()
        for record in federation.run(work.job().rounds):
            work.mark()
            assert record.active == work.active()[record.round], "the others were told to train other clients"
        work.finish(federation.weights, "fedlesam")


if __name__ == "__main__":
    main()
