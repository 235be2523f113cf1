"""Weights from a file into a backbone: all of them, or an error that names those that are not there."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedlesam.models.small import Shape

SHOWN = 8
"""Names in an error."""


def read_weights(path: Path, where: str) -> Mapping[str, Tensor]:
    """The tensors of a file by name.

    Args:
        path: A safetensors file, or a .pth file: that is a pickle, of which only tensors are taken.
        where: The start of error messages.

    Raises:
        ValueError: The file cannot be read or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{where}: {path} cannot be read: {error}") from error
    except Exception as error:  # unpickling raises whatever a damaged file provokes
        raise ValueError(f"{where}: {path} is not a file of weights ({str(error).splitlines()[0]})") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{where}: {path} does not hold weights by name")
    return found


def check_colour(name: str, shape: Shape) -> None:
    """Refuse pictures that are not colour.

    Args:
        name: The network's.
        shape: (channels, height, width) of an input.
    """
    if shape[0] != 3:
        raise ValueError(f"model {name}: takes colour pictures, the data has {shape[0]} channels")


def load_backbone(model: nn.Module, path: Path, head: str, where: str) -> None:
    """Load everything but the head, which stays new.

    Args:
        model: The network.
        path: A file of weights, as for `read_weights`.
        head: How the names of the head's weights begin.
        where: The start of error messages.

    Raises:
        ValueError: The file cannot be read, or a weight of the backbone is missing or has another shape.
    """
    tensors = read_weights(path, where)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith(head)}
    missing = [name for name in own if name not in tensors]
    other = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    check_loaded(f"{where}: {path}", missing, other)
    model.load_state_dict({name: tensors[name] for name in own}, strict=False)


def check_loaded(where: str, missing: list[str], other: list[str]) -> None:
    """Refuse a backbone that is partly random: it would train all the same, only worse.

    Args:
        where: The start of error messages.
        missing: The names of weights that the file lacks.
        other: The names of weights of another shape.
    """
    for names, what in ((missing, "has no weights for"), (other, "has weights of another shape for")):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            shown = ", ".join(names[:SHOWN])
            raise ValueError(f"{where}: {what} {shown}{more} of the backbone; is it another network?")
