"""A traced step made into one program, rewritten where inductor would be slow at it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

CHUNK = 4096
"""Numbers that inductor adds up in registers; a longer sum takes it four times as long."""

PRECISE = (torch.float32, torch.float64)
"""What is computed as it is stored. Sums of half precision would overflow, and those of complex numbers have moduli."""

SHORT = 16
"""Terms of a product of matrices that inductor's loops take three quarters of MKL's time for, with AVX-512."""


def compiled(step: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """The program of a function of tensors, which may change them in place.

    Args:
        step: the function; it is traced by running it.
        tensors: what it is called with.
    """
    from torch import _inductor  # as long to import as PyTorch itself

    faster: dict[Any, Callable[..., Any]] = {aten.linalg_vector_norm.default: _norm}
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        faster[aten.bmm.default] = _product
    traced = make_fx(step, faster)(*tensors)
    _compute_once(traced)
    program: Callable[..., Sequence[Tensor]] = _inductor.compile(traced, list(tensors))
    return program


def _norm(
    x: Tensor, ord: float = 2, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The norm of each row, as sums that inductor is fast at; any other norm is left to PyTorch."""
    if (ord, x.ndim, dim, keepdim, dtype) != (2, 2, [1], False, None) or x.dtype not in PRECISE:
        return NotImplemented
    rows, whole = len(x), x.shape[1] // CHUNK
    squares = x.square()
    chunks = squares[:, : whole * CHUNK].reshape(rows, whole, CHUNK).sum(2).sum(1)
    return (chunks + squares[:, whole * CHUNK :].sum(1)).sqrt()


def _product(a: Tensor, b: Tensor) -> Any:
    """A product of few terms, such as a gradient of weights: as many as a batch has samples."""
    if a.shape[2] > SHORT or b.stride(2) != 1 or a.device.type != "cpu" or a.dtype not in PRECISE:
        return NotImplemented
    return (a.unsqueeze(3) * b.unsqueeze(1)).sum(2)


def _compute_once(traced: fx.GraphModule) -> None:
    """Have inductor put into memory what it would compute again wherever it is used.

    That is a number of each row by which its vector is multiplied, such as the factor that clips it, and the first
    matrix of a product of few terms.
    """
    graph = traced.graph
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        source = node.args[0]
        value = source.meta["val"]
        if value.ndim == 1 and node.meta["val"].ndim > 1 and value.is_floating_point():
            _put_into_memory(graph, node, source)
    for node in graph.find_nodes(op="call_function", target=aten.unsqueeze.default):
        source, place = node.args
        if place == 3 and source.meta["val"].ndim == 3 and all(use.target is aten.mul.Tensor for use in node.users):
            _put_into_memory(graph, node, source)
    traced.recompile()


def _put_into_memory(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Its strides are asked for, which only memory has; a tensor with others would be copied."""
    from torch._inductor.inductor_prims import force_stride_order

    value = source.meta["val"]
    if source.op != "call_function" or not (value.is_contiguous() or (value.ndim > 1 and value.mT.is_contiguous())):
        return
    with graph.inserting_before(node):
        stored = graph.call_function(force_stride_order, (source, list(value.stride())))
    node.replace_input_with(source, stored)
