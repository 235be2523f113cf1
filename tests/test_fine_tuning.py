"""LoRA on a frozen transformer: nothing but adapters is trained, sent, kept and written; resume is exact."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedlesam as fl
from fedlesam.runs.folder import RunFolder

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore::UserWarning:peft.*")]
pytest.importorskip("peft", reason="the extra `huggingface` is not installed")
pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "fine_tune_lora.py"))
WIDTH = 32


def adapted() -> nn.Module:
    return SCRIPT["with_adapters"](SCRIPT["backbone"](WIDTH))


def federation(method: str = "fedlesam") -> fl.Federation:
    made = SCRIPT["federation"]("lora", WIDTH, clients=4, samples=10)
    if method == "fedlesam":
        return made
    local = fl.LocalTraining(lr=0.05, steps=2, batch_size=5)
    return fl.Federation(adapted(), made.clients, method, local, task=fl.Task.huggingface(), active=2)


def sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of what is trained, and of the rest."""
    both = [[p.nbytes for p in model.parameters() if p.requires_grad is wanted] for wanted in (True, False)]
    return sum(both[0]), sum(both[1])


@pytest.mark.parametrize(("method", "vectors"), [("fedlesam", 1), ("fedlesam-s", 2)])
def test_only_adapters_are_trained_sent_and_kept(method: str, vectors: int) -> None:
    fed = federation(method)
    trained, frozen = sizes(adapted())
    assert frozen > 10 * trained
    before = fed.model.state_dict()
    list(fed.run(2))
    record = fed.history[-1]
    assert fed.state.weights.nbytes == trained
    assert not fed.state.buffers
    assert record.bytes_down == record.bytes_up == vectors * trained * len(record.active)
    assert max(fed.memories[client].nbytes for client in fed.memories) == vectors * trained
    after = fed.model
    for name, parameter in after.named_parameters():
        same = torch.equal(parameter, before[name])
        assert same is not parameter.requires_grad, f"{name}: frozen weights stay to the bit, adapters and head move"
        assert parameter.requires_grad is ("lora_" in name or "modules_to_save" in name)


def test_a_run_holds_adapters_only_and_resumes(tmp_path: Path) -> None:
    whole = federation()
    whole.fit(4, out=tmp_path / "whole")
    federation().fit(2, out=tmp_path / "parts")
    again = federation()
    again.fit(4, out=tmp_path / "parts")
    assert torch.equal(again.weights, whole.weights)

    trained, frozen = sizes(adapted())
    files = [path for path in (tmp_path / "parts").rglob("*") if path.is_file()]
    assert any("checkpoint" in str(path) for path in files)
    assert max(path.stat().st_size for path in files) < 4 * trained + 20_000 < frozen
    saved = load_file(tmp_path / "parts" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in saved.values()) == trained

    fresh = adapted()
    RunFolder(tmp_path / "parts").load_model(fresh)
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), whole.model.parameters(), strict=True))
    with torch.no_grad():
        next(p for p in fresh.parameters() if not p.requires_grad).add_(1)
    with pytest.raises(ValueError, match="frozen weights are not those that it was trained with"):
        RunFolder(tmp_path / "parts").load_model(fresh)


def test_the_adapters_alone_can_be_handed_out(tmp_path: Path) -> None:
    """By peft's own file, which others put onto the same base."""
    from peft import PeftModel

    fed = federation()
    fed.round()
    fed.model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(SCRIPT["backbone"](WIDTH), tmp_path).eval()
    batch = {name: value[:3] for name, value in SCRIPT["texts"](1, 3, seed=5)[0].items()}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, fed.model(**batch).logits)
