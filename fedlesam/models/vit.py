"""ViT-B/32, the paper's network for OfficeHome and DomainNet, through the package transformers.

Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale, ICLR 2021.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedlesam.models.pretrained import check_colour, check_loaded
from fedlesam.models.small import Shape

HUB = "google/vit-base-patch32-224-in21k"
"""ViT-B/32 pretrained on ImageNet-21k, by the paper's authors."""


class Classifier(nn.Module):
    """A transformer and a linear head on its class token.

    Args:
        backbone: A vision transformer of `transformers`.
        classes: Outputs of the head.
    """

    def __init__(self, backbone: Any, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        states = self.backbone(pixel_values=x, interpolate_pos_encoding=True).last_hidden_state
        logits: Tensor = self.head(states[:, 0])
        return logits


def vit_b32(shape: Shape, classes: int, weights: str = HUB) -> nn.Module:
    """ViT-B/32, pretrained, with a new head; weights: a folder, a safetensors file, a name on the hub, or none.

    Args:
        shape: (channels, height, width) of an input; 3 channels.
        classes: The number of classes.
        weights: A folder with config.json and model.safetensors, a safetensors file, a name on the hub, or "none".

    Raises:
        ValueError: The package transformers is missing, or the weights are not there or not of this network.
    """
    check_colour("vit-b32", shape)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError("model vit-b32: needs the package transformers: pip install 'fedlesam[vit]'") from error
    with _quietly(transformers):
        backbone = _backbone(transformers, weights)
    patch = backbone.config.patch_size
    if min(shape[1:]) < patch:
        raise ValueError(f"model vit-b32: pictures of {shape[1]} x {shape[2]} are smaller than a patch of {patch}")
    return Classifier(backbone, classes)


def _backbone(transformers: Any, weights: str) -> Any:
    base = transformers.ViTConfig(patch_size=32)
    if weights == "none":
        return transformers.ViTModel(base, add_pooling_layer=False)
    path = Path(weights).expanduser()
    where = f"model vit-b32: {weights}"
    name: str | None = str(path) if path.is_dir() else weights
    settings: dict[str, Any] = {"add_pooling_layer": False, "use_safetensors": True, "output_loading_info": True}
    settings["ignore_mismatched_sizes"] = True  # they are refused below, by name
    try:
        if path.is_file():
            beside = path.parent / "config.json"
            config = transformers.ViTConfig(**json.loads(beside.read_text("utf-8"))) if beside.is_file() else base
            name, settings = None, settings | {"config": config, "state_dict": load_file(path)}
        made, found = transformers.ViTModel.from_pretrained(name, **settings)
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{where}: no weights were found ({reason}); give a folder with config.json and model.safetensors or a "
            "safetensors file, vit-b32:weights=PATH"
        ) from error
    check_loaded(where, sorted(found["missing_keys"]), sorted(str(key[0]) for key in found["mismatched_keys"]))
    return made


@contextlib.contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Without its own progress bars and report: a backbone that is not loaded as a whole is refused here."""
    output = transformers.utils.logging
    before, bars = output.get_verbosity(), output.is_progress_bar_enabled()
    output.set_verbosity_error()
    output.disable_progress_bar()
    try:
        yield
    finally:
        output.set_verbosity(before)
        if bars:
            output.enable_progress_bar()
