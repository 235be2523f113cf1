"""The engine of the experiment on frozen features against the plain one, method by method."""

import pytest
import torch

import fedlesam as fl
from fedlesam.data.augment import other_view
from reproduction.heads import HEADS, known
from reproduction.heads_engine import HeadStep, use_head_engine
from reproduction.leaderboard import GRIDS

ALIKE, UNLIKE = (11,) * 6, (11, 9, 7, 13, 5, 8)


def federation(
    arm: str,
    engine: str,
    scope: str = "corrected",
    sizes: tuple[int, ...] = ALIKE,
    method: fl.Algorithm | None = None,
) -> fl.Federation:
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 1, 2, 6, generator=rng), torch.randint(0, 3, (n,), generator=rng)) for n in sizes]
    torch.manual_seed(0)
    return fl.Federation(
        fl.models.head((1, 2, 6), 3, hidden=5),
        clients,
        method or fl.algorithms.get(HEADS[arm].method, **HEADS[arm].hyper),
        fl.LocalTraining(batch_size=4, epochs=2, clip=0.5, clip_scope=scope, augment=other_view),  # type: ignore[arg-type]
        active=4,
        test=clients[0],
        execution=fl.Execution(threads=1, engine=engine),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("scope", ["corrected", "loss"])
@pytest.mark.parametrize("arm", known(list(HEADS)))
def test_the_same_results_to_rounding(arm: str, scope: str) -> None:
    plain, mine = federation(arm, "plain", scope), federation(arm, "stacked", scope)
    use_head_engine(mine)
    assert isinstance(mine._local_engine.step, HeadStep)  # type: ignore[attr-defined]
    for _ in range(4):
        theirs, ours = plain.round(), mine.round()
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-5)
    assert torch.allclose(plain.weights, mine.weights, atol=2e-6), (plain.weights - mine.weights).abs().max()


@pytest.mark.parametrize("name", list(GRIDS))
def test_every_method_of_the_leaderboard(name: str) -> None:
    """Those that the engine does not write out, too: they take the general way."""
    hyper = {key: values[-1] for key, values in GRIDS[name].items()}
    plain, mine = (federation("", e, method=fl.algorithms.get(name, **hyper)) for e in ("plain", "stacked"))
    use_head_engine(mine)
    for _ in range(3):
        plain.round(), mine.round()
    assert torch.allclose(plain.weights, mine.weights, atol=2e-5), (plain.weights - mine.weights).abs().max()


@pytest.mark.parametrize("arm", ["fedgamma", "fedlesam-d"])
def test_a_client_unlike_all_others_is_a_stack_of_one(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, mine = (federation(arm, engine, sizes=UNLIKE) for engine in ("plain", "stacked"))
    use_head_engine(mine)
    steps: list[int] = []
    step = HeadStep.__call__
    monkeypatch.setattr(HeadStep, "__call__", lambda self, *given: steps.append(1) or step(self, *given))  # type: ignore[func-returns-value]
    for _ in range(3):
        plain.round(), mine.round()
    assert len(steps) == sum(2 * -(-UNLIKE[client] // 4) for record in mine.history for client in record.active)
    assert torch.allclose(plain.weights, mine.weights, atol=2e-6)
