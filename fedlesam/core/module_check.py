"""What a model must be to be trained here; said when it is given, not after a round."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedlesam.core.buffers import Buffers, Unsupported, frozen_changes, same_bits


def check_module(module: nn.Module) -> None:
    """Refuse by name what is known without running the model.

    Args:
        module: What was given as the model.
    """
    if not isinstance(module, nn.Module):
        raise Unsupported(f"the model must be an nn.Module, got {module!r}")
    for name, tensor in _named(module):
        if is_lazy(tensor):
            raise Unsupported(
                f"{name} of the model has no shape yet (a lazy module): call the model on one batch first, then give it"
            )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise Unsupported(
                f"the layer {name or type(layer).__name__} is a SyncBatchNorm, which would mix the statistics of "
                "clients that train at once; use BatchNorm1d, BatchNorm2d or BatchNorm3d"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise Unsupported(
                f"the layer {name or type(layer).__name__} is an {type(layer).__name__} with sparse=True, and sparse "
                "gradients are not supported; use sparse=False, which learns the same"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise Unsupported(
                f"the parameter {name} has a gradient hook, and copies of a model do not keep it; do the same in "
                "forward (a mask: weight * mask), or freeze the parameter with requires_grad_(False)"
            )
        if parameter.requires_grad and parameter.is_complex():
            raise Unsupported(
                f"the parameter {name}: trainable parameters must be real numbers, got {parameter.dtype}; keep its "
                "real and imaginary parts, and use torch.view_as_complex in forward"
            )
    _check_apart(module)


def check_values(module: nn.Module) -> None:
    """Refuse a model whose weights have shapes alone.

    Args:
        module: What was given as the model.
    """
    for name, tensor in _named(module):
        if tensor.device.type == "meta":
            raise Unsupported(
                f"{name} of the model has no values yet (it is on the meta device): make the model outside "
                'torch.device("meta"), or call model.to_empty(device="cpu") and load its weights, then give it'
            )


def copied(module: nn.Module) -> nn.Module:
    """A copy, or an error that names what PyTorch does not copy: a tensor that was computed from parameters.

    Args:
        module: The model; it is not changed.
    """
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        held = [(name, key, value) for name, layer in module.named_modules() for key, value in vars(layer).items()]
        kept = [f"{name}.{key}".lstrip(".") for name, key, value in held if isinstance(value, Tensor) and value.grad_fn]
        if not kept:
            raise
        raise Unsupported(
            f"{', '.join(kept)} of the model: computed from parameters and kept, which PyTorch does not copy; after "
            "torch.nn.utils.prune or the old weight_norm or spectral_norm call their remove function, or use "
            "torch.nn.utils.parametrizations; what forward keeps, detach or delete"
        ) from error


def _check_apart(module: nn.Module) -> None:
    """Trainable parameters get new memory, and what shares theirs would not follow."""
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    spans = []
    for name, tensor in _named(module):
        if tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta":
            entries = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + entries * tensor.element_size(), name, id(tensor) in trainable))
    ends: dict[bool, tuple[int, str]] = {}
    for start, end, name, trains in sorted(spans):
        for other_trains, (other_end, other) in ends.items():
            if (trains or other_trains) and start < other_end:
                raise Unsupported(
                    f"{other} and {name} of the model lie in the same memory, and one of them is trained; make one a "
                    "copy (clone), or use the same Parameter for both"
                )
        if trains not in ends or end > ends[trains][0]:
            ends[trains] = end, name


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    named = [*module.named_parameters(), *module.named_buffers()]
    first = {id(tensor): name for name, tensor in reversed(named)}
    return [(name, tensor) for name, tensor in named if first[id(tensor)] == name]


def one_number(loss: object) -> Tensor:
    """The loss of a batch, refused if it is not one number.

    Args:
        loss: What a task's loss returned.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    told = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
    raise Unsupported(f"the loss of a batch {told}, but a tensor of one number is needed; return e.g. its mean")


def check_learns(loss: Tensor) -> Tensor:
    """A loss that is to be differentiated, refused if there is nothing to differentiate.

    Args:
        loss: Of a batch.
    """
    if loss.requires_grad:
        return loss
    raise Unsupported(
        "the loss of a batch does not depend on the model's weights, so there is nothing to learn from it; compute it "
        "from what the model returns, without detach or no_grad"
    )


def changed_buffers(module: nn.Module, run: Callable[[nn.Module], object]) -> list[str]:
    """Those that a forward pass in training mode changes, tried on a copy; what is not sent may not change.

    A pass that fails here fails in training, too, where it is known whose it is.

    Args:
        module: the model.
        run: makes a forward pass with the module it is given.
    """
    tried = copy.deepcopy(module).train()
    buffers = Buffers(tried)
    before = buffers.copy()
    frozen = {name: p.detach().clone() for name, p in tried.named_parameters() if not p.requires_grad}
    try:
        run(tried)
    except Unsupported:
        raise
    except Exception:
        return []
    buffers.check()
    now = dict(tried.named_parameters())
    for name, parameter in frozen.items():
        if not same_bits(parameter, now[name]):
            raise Unsupported(frozen_changes(name))
    after = buffers.copy()
    return [name for name in before if not same_bits(before[name], after[name])]
