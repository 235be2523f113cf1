"""What a compiled step is rewritten to: the same numbers, to rounding."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedlesam.engines import _compile
from fedlesam.engines._compile import CHUNK, SHORT, aten


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [3, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_norms_in_chunks(size: int) -> None:
    x = normal(2, size)
    assert torch.allclose(_compile._norm(x, 2, [1]), torch.linalg.vector_norm(x, dim=1))
    assert _compile._norm(x, 1, [1]) is _compile._norm(x, 2, [0]) is NotImplemented


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("terms", [1, 7, SHORT])
def test_products_of_few_terms(terms: int, turned: bool) -> None:
    a = normal(3, terms, 5).transpose(1, 2) if turned else normal(3, 5, terms)
    b = normal(3, terms, 4)
    assert torch.allclose(_compile._product(a, b), torch.bmm(a, b), atol=1e-6)


def test_other_products_are_left_to_pytorch() -> None:
    assert _compile._product(normal(3, 5, SHORT + 1), normal(3, SHORT + 1, 4)) is NotImplemented
    assert _compile._product(normal(3, 5, 7), normal(3, 4, 7).transpose(1, 2)) is NotImplemented


def test_a_number_of_each_row_is_computed_once() -> None:
    """It is put into memory before it is spread over its row; tensors of other shapes are not."""

    def clip(x: Tensor) -> Tensor:
        factor = (1 / torch.linalg.vector_norm(x, dim=1)).clamp(max=1)
        return x * factor.view(-1, 1) + (x * 2).view(len(x), -1)

    x = normal(3, 5)
    traced = make_fx(clip)(x)
    _compile._compute_once(traced)
    stored = traced.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert [node.args[1] for node in stored] == [[3]]
    assert torch.equal(traced(x), clip(x))
