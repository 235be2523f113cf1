"""Arithmetic on flat vectors: every model, update, perturbation and correction is one of them."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

ASCENT_EPS = 1e-7
"""Keeps an ascent along a zero gradient at zero; the value of the baselines' released code."""

CLIP_EPS = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`, which every published implementation of these methods clips with."""

BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
"""The defaults of torch.optim.AdamW."""


def ascent_(direction: Tensor, rho: float) -> Tensor:
    """Scale `direction` in place to norm rho: rho * q / (norm(q) + 1e-7).

    Args:
        direction: q, overwritten with the result.
        rho: The norm; a negative one turns the direction round.
    """
    return direction.mul_(rho / (direction.norm() + ASCENT_EPS))


def clip_coefficient(gradient: Tensor, max_norm: float) -> Tensor:
    """The factor, at most 1, that brings the norm of `gradient` down to `max_norm`. It stays on the device.

    Args:
        gradient: A flat vector.
        max_norm: The largest norm that is left as it is.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)


def add_scaled_(x: Tensor, y: Tensor, scale: float | Tensor) -> Tensor:
    """x + scale * y, in place; a scale that is a number costs no temporary.

    Args:
        x: Overwritten with the result.
        y: A vector of the same size.
        scale: The factor of y.
    """
    return x.add_(y * scale) if isinstance(scale, Tensor) else x.add_(y, alpha=scale)


def add_fused_(x: Tensor, y: Tensor, scale: float | Tensor) -> Tensor:
    """As `add_scaled_`; a tensor of one entry gives the bits of the number, which a map over clients cannot.

    Args:
        x: Changed in place.
        y: What is added.
        scale: A number, or a tensor of one entry.
    """
    return x.addcmul_(y, scale) if isinstance(scale, Tensor) else x.add_(y, alpha=scale)


def adamw_(
    v: Tensor,
    g: Tensor,
    mean: Tensor,
    square: Tensor,
    lr: float | Tensor,
    number: int | Tensor,
    add: Callable[[Tensor, Tensor, float | Tensor], Tensor] = add_scaled_,
) -> None:
    """Step number `number`, from 0, of torch.optim.AdamW with its defaults, but for weight decay; g is overwritten.

    Args:
        v: The weights, changed in place.
        g: The gradient; overwritten.
        mean: The first moment, changed in place.
        square: The second moment, changed in place.
        lr: The learning rate.
        number: The number of the step, from 0.
        add: `add_scaled_` or `add_fused_`.
    """
    mean.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
    square.mul_(BETAS[1]).add_(g.mul_(g), alpha=1 - BETAS[1])
    first, second = (1 - beta ** (number + 1) for beta in BETAS)
    add(v, mean / (square.sqrt().div_(second**0.5).add_(ADAM_EPS)), -lr / first)


def is_number(value: float | Tensor, number: float) -> bool:
    """Whether it is just this number. A tensor is not read: a hyper-parameter is one where runs differ in it.

    Args:
        value: A number, or a tensor.
        number: What it is compared with.
    """
    return not isinstance(value, Tensor) and value == number


def rows_of(vectors: Sequence[Tensor]) -> Tensor:
    """A row per vector; no copy where they are rows of one matrix that follow each other.

    Args:
        vectors: Of one size.
    """
    if len(vectors) == 1:
        return vectors[0][None]
    whole = vectors[0]._base
    if whole is not None and whole.ndim == 2 and whole.is_contiguous() and vectors[0].shape == whole.shape[1:]:
        places = [vector.data_ptr() for vector in vectors]
        size = whole.stride(0) * whole.element_size()
        first, rest = divmod(places[0] - whole.data_ptr(), size) if size else (0, 0)
        neighbours = places == [places[0] + i * size for i in range(len(places))]
        if neighbours and not rest and vectors[-1]._base is whole:
            return whole[first : first + len(vectors)]
    return torch.stack(list(vectors))


def peaks_of(vectors: Iterable[Tensor]) -> Tensor:
    """Of each the largest absolute value, or what is not finite; on the device, and no second vector is made.

    Args:
        vectors: At least one.
    """
    return torch.stack([torch.stack(x.aminmax()).abs().amax() for x in vectors])


def read_at_once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of numbers on the CPU, in double precision, by one copy from the device.

    Args:
        tensors: on the device of the first. Whole numbers are exact below 2**53.
    """
    if not tensors:
        return []
    device, sizes = tensors[0].device, [tensor.numel() for tensor in tensors]
    flat = [tensor.detach().reshape(-1).to(device, torch.float64) for tensor in tensors]
    parts = torch.split(torch.cat(flat).cpu(), sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
