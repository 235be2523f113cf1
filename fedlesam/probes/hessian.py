"""The curvature of the global loss: the largest eigenvalues of its Hessian, and its trace."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.checks import check_count, param
from fedlesam.federation import Federation
from fedlesam.probes.base import Look, SampledProbe, Tick, Values
from fedlesam.probes.loss import GlobalLoss, Unreadable

TOLERANCE = 1e-3
"""Of an eigenvalue, relative: Hessian products in single precision carry not much more."""
RESTARTS = 20
"""Of Lanczos' method, at most; then what has converged is given."""


def eigenvalues(
    loss: GlobalLoss, weights: Tensor, k: int = 5, seed: int = 0, tick: Tick = lambda done, of: None
) -> list[float]:
    """The k largest (most positive) eigenvalues of the Hessian, largest first, by Lanczos' method (ARPACK).

    Args:
        loss: The global loss.
        weights: Where the Hessian is taken, flat.
        k: How many; fewer are returned if not all converged.
        seed: Of the first vector.
        tick: Called with the number of Hessian products.
    """
    from scipy.sparse import linalg  # here: it takes long to load

    check_count("hessian", "k", k)
    size = weights.numel()
    _check_fewer(k, size)
    done, basis = 0, min(size, max(2 * k + 1, 20))

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        nonlocal done
        done += 1
        tick(done, max(done, basis))
        found = loss.product(weights, torch.from_numpy(vector.ravel()).to(weights)).double().cpu()
        if not found.isfinite().all():
            raise Unreadable("a product of the Hessian is not finite")
        return np.asarray(found)

    start = torch.randn(size, generator=seeds.generator(seed, "probe", 0), dtype=torch.float64).numpy()
    operator = linalg.LinearOperator((size, size), matvec=product, dtype=np.float64)
    try:
        limits = {"ncv": basis, "tol": TOLERANCE, "maxiter": RESTARTS}
        found = linalg.eigsh(operator, k, which="LA", v0=start, return_eigenvectors=False, **limits)
    except linalg.ArpackNoConvergence as error:
        found = error.eigenvalues
    except linalg.ArpackError as error:
        if product(start).any():
            raise Unreadable(f"Lanczos' method fails: {error}") from error
        found = np.zeros(k)  # what takes a random vector to 0 is 0, and ARPACK has nothing to start with
    return sorted(map(float, found), reverse=True)


def _check_fewer(k: int, size: int) -> None:
    if k >= size:
        raise ValueError(f"hessian: k must be below the model's {size} parameters, got {k}")


def trace(loss: GlobalLoss, weights: Tensor, draws: int = 20, seed: int = 0) -> tuple[float, float]:
    """The trace of the Hessian and its standard error, by Hutchinson's method.

    It is the mean of (z, H z) over vectors z of random signs.

    Args:
        loss: The global loss.
        weights: Where the Hessian is taken, flat.
        draws: How many vectors.
        seed: Of the vectors.
    """
    check_count("hessian", "draws", draws, at_least=2)
    found = []
    for i in range(draws):
        z = torch.randint(2, weights.shape, generator=seeds.generator(seed, "probe", 1 + i)).to(weights) * 2 - 1
        found.append(float(z.double() @ loss.product(weights, z).double()))
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(draws))


@dataclass(frozen=True)
class Hessian(SampledProbe):
    """The k largest eigenvalues and the trace of the Hessian of the global loss.

    Args:
        every: Rounds between two measurements.
        samples: About how many training samples to use, the same number of each client; 0 takes all.
        k: How many eigenvalues.
        draws: Random vectors for the trace.
    """

    name: ClassVar[str] = "hessian"

    k: int = param(3, at_least=1, whole=True)
    draws: int = param(20, at_least=2, whole=True)

    def check(self, federation: Federation) -> None:
        _check_fewer(self.k, federation.state.weights.numel())

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        w = look.federation.state.weights
        loss = self.loss(look.federation)
        loss.finite_gradient(w)
        found = eigenvalues(loss, w, self.k, tick=look.tick)
        whole, error = trace(loss, w, self.draws)
        values = {f"eigenvalue_{i}": value for i, value in enumerate(found, 1)}
        return {**values, "trace": whole, "trace_error": error}, {"samples": loss.samples}
