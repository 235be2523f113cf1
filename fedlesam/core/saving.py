"""A module as a safetensors file holds it: one tensor, one memory, and of frozen weights their digest alone."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save, save_file, save_model
from torch import Tensor, nn

FROZEN = "frozen"
"""The key of the digest in a file."""


def separate(module: nn.Module) -> None:
    """Give tensors memory of their own where safetensors would refuse the module: of parts none of which is all.

    What is tied stays tied.

    Args:
        module: Changed in place; its values stay.
    """
    sharing: dict[tuple[torch.device, int], dict[int, Tensor]] = defaultdict(dict)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.layout is torch.strided and tensor.numel():
            sharing[tensor.device, tensor.untyped_storage().data_ptr()][id(tensor)] = tensor
    for tensors in sharing.values():
        if not any(tensor.nbytes == tensor.untyped_storage().nbytes() for tensor in tensors.values()):
            for tensor in tensors.values():
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def check_savable(module: nn.Module) -> None:
    """Refuse a model whose file could not be written, before it is trained.

    Args:
        module: The model.
    """
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the model's state {name} is a {type(value).__name__}, and a model.safetensors holds tensors only; "
                "make it a buffer"
            )
        try:
            if value.layout is not torch.strided:
                raise ValueError(str(value.layout))
            save({name: torch.empty(0, dtype=value.dtype)})
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            what = value.dtype if value.layout is torch.strided else value.layout
            raise ValueError(
                f"{name} of the model is {what}, which a model.safetensors cannot hold; use another dtype, or "
                "register the buffer with persistent=False"
            ) from error


def save_trained(module: nn.Module, path: Path) -> None:
    """Write a module. Of one with frozen parameters only the rest, with a digest of the frozen ones.

    Args:
        module: The module.
        path: The file.
    """
    frozen = _frozen(module)
    if not frozen:
        save_model(module, str(path))
        return
    written: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in frozen:
            written.setdefault(id(tensor), name)  # what is tied is written once
    state = module.state_dict()
    tensors = {
        name: state[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in written.values()
    }
    save_file(tensors, path, {FROZEN: _digest(frozen.values())})


def load_trained(module: nn.Module, path: Path) -> None:
    """Put what `save_trained` wrote into a module.

    Args:
        module: One of the same form; its frozen weights must be those that the file was written beside.
        path: The file.

    Raises:
        ValueError: They are others.
        RuntimeError: The module has other tensors.
    """
    with safe_open(path, "pt") as file:
        known = (file.metadata() or {}).get(FROZEN)
    if known is None:
        load_model(module, str(path))
        return
    frozen = _frozen(module)
    if _digest(frozen.values()) != known:
        raise ValueError("the module's frozen weights are not those that it was trained with")
    now, found = module.state_dict(keep_vars=True), load_file(path)
    there = {id(now[name]) for name in found if name in now} | frozen.keys()
    missing = [name for name, tensor in now.items() if id(tensor) not in there]
    if missing or found.keys() - now.keys():
        raise RuntimeError(f"its tensors differ: {', '.join([*missing, *sorted(found.keys() - now.keys())][:5])}")
    module.load_state_dict(found, strict=False)


def _frozen(module: nn.Module) -> dict[int, Tensor]:
    return {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}


def _digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
