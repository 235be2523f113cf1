"""Arithmetic on flat vectors: every model, update, perturbation and correction is one of them."""

import torch
from torch import Tensor

ASCENT_EPS = 1e-7
"""Keeps an ascent along a zero gradient at zero; the value of the baselines' released code."""

CLIP_EPS = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`, which every published implementation of these methods clips with."""


def ascent_(direction: Tensor, rho: float) -> Tensor:
    """Scale `direction` in place to norm rho: rho * q / (norm(q) + 1e-7)."""
    return direction.mul_(rho / (direction.norm() + ASCENT_EPS))


def clip_coefficient(gradients: list[Tensor], max_norm: float | None) -> float:
    """The factor, at most 1, that brings the joint norm of `gradients` down to `max_norm`; None never clips.

    A number, not a scaled gradient: the caller folds it into the step size and saves one pass over the model.
    """
    if max_norm is None:
        return 1.0
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return min(1.0, max_norm / (float(norm) + CLIP_EPS))
