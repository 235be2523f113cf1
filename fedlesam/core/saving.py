"""A module as a safetensors file holds it: one tensor, one memory."""

from collections import defaultdict

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn


def separate(module: nn.Module) -> None:
    """Give tensors memory of their own where safetensors would refuse the module: of parts none of which is all.

    What is tied stays tied.
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
    """Refuse a model whose file could not be written, before it is trained."""
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
