"""A module seen as one vector: with buffers.py the only place that writes into a module."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedlesam.core.batches import Batch
from fedlesam.core.buffers import Buffers
from fedlesam.core.choices import Precision as Precision
from fedlesam.core.computing import own_device
from fedlesam.core.graphs import Graphs
from fedlesam.core.half import Cast, HalfWeights
from fedlesam.core.module_check import check_learns, check_module, one_number
from fedlesam.core.order import Order
from fedlesam.core.slots import TensorSpec
from fedlesam.core.task import Task
from fedlesam.core.tree import tree_map

MANY_WEIGHTS = 8_000_000
"""Of convolutions: with more, on a CPU, turning their gradients back costs more than pictures in channels-last gain.

ResNet-18 at batch 50 takes 0.89 of the time with 0.7 million of them, 0.97 with 6, 1.02 with 11 (docs/benchmarks.md).
"""

REORDERED = {"cuda", "meta"}
"""Devices on which weights of convolutions may lie in channels-last inside the vector; on CPUs nothing is gained."""


class ForwardPass(NamedTuple):
    """A batch, seen by a model: its loss, with a graph where gradients are on."""

    task: Task
    """Made the loss."""
    loss: Tensor
    """Of the batch; one number."""
    returned: list[Any]
    """What the model returned, each time the task's loss called it."""
    told: Any = None
    """The outputs, if the loss returned them."""

    @property
    def outputs(self) -> Any:
        """The model's outputs; an error says what a task must give where they are not known."""
        return self.task.outputs_of(self.returned) if self.told is None else self.told


class CalledModel:
    """A module as a task's loss sees it: a call is remembered, in the precision and layout of the run.

    Args:
        module: The model.
        call: What is called in its place, e.g. the compiled module; None calls the module.
        cast: The precision of its passes; None for that of its weights.
        channels_last: Whether pictures are given to it with the channels last in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any] | None = None,
        cast: "Cast | None" = None,
        channels_last: bool = False,
    ) -> None:
        self.module, self.call = module, module if call is None else call
        self.cast, self.channels_last = cast or Cast("fp32", "cpu"), channels_last
        self.returned: list[Any] = []
        self.running = False
        """Inside a call; it stays so if the call fails."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Pictures go in channels-last where convolutions are faster so; the weights keep their layout."""
        self.running = True
        if self.channels_last:
            inputs, named = tree_map(_channels_last, inputs), tree_map(_channels_last, named)
        found = self.cast.call(self.call, inputs, named)
        self.returned.append(found)
        self.running = False
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def run(self, task: Task, batch: Batch) -> ForwardPass:
        """The loss of a batch at the module's weights, and what the module returned for it.

        Args:
            task: How the batch becomes a loss.
            batch: On the module's device.
        """
        self.returned, self.running = [], False
        value = task.loss(self, batch)
        returned, self.returned = self.returned, []
        if isinstance(value, tuple):
            value, outputs = value
            return ForwardPass(task, one_number(value), returned, outputs)
        return ForwardPass(task, one_number(value), returned)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


class _Held(nn.Module):
    """A module inside another one, so that whatever a task's loss calls of it sees the weights of `functional_call`."""

    def __init__(self, called: CalledModel) -> None:
        super().__init__()
        self.module, self.called = called.module, [called]

    def forward(self, task: Task, batch: Batch) -> ForwardPass:
        return self.called[0].run(task, batch)


class FlatModel:
    """Takes a module over: its trainable parameters become views into the one vector `weights`.

    Frozen parameters are left alone. Gradients are views into one vector too, which never moves.

    Args:
        module: The model; it belongs to this object from now on.
        precision: Of forward and backward passes; weights stay in their own.
        compile: Whether passes are compiled by torch.compile.
        graphs: Whether steps on a GPU are recorded as CUDA graphs.
        reorder: Whether `weights` may have another order than the module's tensors, if that is faster. Whoever allows
            it reads them by `plain_weights`. What methods are given and return has the plain order, but for gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: Precision = "fp32",
        compile: bool = False,
        graphs: bool = False,
        reorder: bool = False,
    ) -> None:
        self.module, self.precision = module, precision
        check_module(module)
        self.call: Callable[..., Any] = torch.compile(module) if compile else module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not any(p.numel() for p in parameters):
            raise ValueError(
                "the model has no trainable parameters: nothing to train (is requires_grad False everywhere?)"
            )
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) > 1:
            raise ValueError(
                f"all trainable parameters must have one dtype and one device, got {sorted(map(str, kinds))}; "
                "convert the model first, e.g. model.float().to(device)"
            )
        if not parameters[0].is_floating_point():
            raise ValueError(f"trainable parameters must be real numbers, got {parameters[0].dtype}")
        self.parameters, self.shapes = parameters, [p.shape for p in parameters]
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        kernels = {id(m.weight): m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d)}
        convolutions, gpu = sum(kernels.values()), self.device.type != "cpu"
        turned = [reorder and id(p) in kernels and self.device.type in REORDERED for p in parameters]
        self.order = Order(self.shapes, turned) if any(turned) else None
        """Of `weights` and of gradients, if it is not the plain one."""
        if self.order is not None:
            self.weights = self.order.inward(self.weights, torch.empty_like(self.weights))
        for parameter, view in zip(parameters, self._own_views(self.weights), strict=True):
            parameter.data = view
        self.half = None
        if precision == "bf16-pure":
            self.half = HalfWeights(module, parameters, self.weights, self._own_views)
        self.state = Buffers(module)
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        self.batch_norm = bool(norms)
        self.needs_batch = any(norm.running_mean is None for norm in norms)
        """Also in eval mode: statistics of one sample are none."""
        self.channels_last = convolutions > 0 and (gpu or convolutions <= MANY_WEIGHTS)
        cast = Cast(precision, self.device.type)
        self.called = CalledModel(module, self.call, cast, self.channels_last)
        self._elsewhere = _Held(CalledModel(module, None, cast))
        self.graphs = Graphs(self.device, self.state) if graphs and self.device.type == "cuda" else None
        """Replays passes on a GPU; None runs each of them."""
        self.backward_passes = 0
        self._scratch: dict[str, Tensor] = {}
        self._held: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._gradient: Tensor | None = None
        self._grads: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is a model of its own; torch would let both write into the same memory."""
        module = self.module
        if self.half is not None:  # it is rounded
            module = copy.deepcopy(module)
            trainable = (p for p in module.parameters() if p.requires_grad)
            for parameter, view in zip(trainable, self._own_views(self.weights), strict=True):
                parameter.data = view.clone(memory_format=torch.contiguous_format)
        if self.device.type == "cuda":  # the other process may have another GPU
            module = copy.deepcopy(module).cpu()
        how = self.precision, self.call is not self.module, self.graphs is not None, self.order is not None
        return _own, (module, self.device.type, *how)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.device

    @property
    def names(self) -> list[str]:
        """Of the trainable parameters, in their order."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    @property
    def tensors(self) -> list[TensorSpec]:
        """The trainable parameters, in their order."""
        return [TensorSpec(name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]

    @property
    def sizes(self) -> list[int]:
        """Entries of each trainable parameter, in their order."""
        return [shape.numel() for shape in self.shapes]

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` cut into the parameters' shapes, without copying.

        Args:
            flat: A vector as long as `weights`, in the plain order.
        """
        pieces = torch.split(flat, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def _own_views(self, flat: Tensor) -> list[Tensor]:
        return self.views(flat) if self.order is None else self.order.views(flat)

    def plain_weights(self) -> Tensor:
        """A copy of the weights in the plain order."""
        return self.plain(self.weights, torch.empty_like(self.weights))

    def plain(self, vector: Tensor, into: Tensor) -> Tensor:
        """A vector of this model's order in the plain order.

        Args:
            vector: the vector.
            into: where it is written to.
        """
        return into.copy_(vector) if self.order is None else self.order.outward(vector, into)

    def hold(self, name: str, value: Tensor) -> Tensor:
        """A copy of a tensor, at the same place for all values of this name and form; vectors in this model's order.

        Args:
            name: tells apart what is held at the same time.
            value: what is copied; of the plain order, if it has the weights' shape.
        """
        key = name, value.shape, value.dtype
        if key not in self._held:
            self._held[key] = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        into = self._held[key]
        return (
            into.copy_(value)
            if self.order is None or value.shape != self.weights.shape
            else self.order.inward(value, into)
        )

    def scratch(self, name: str) -> Tensor:
        """A model-sized vector with arbitrary content, allocated once and reused by every client and step.

        Args:
            name: The same name gives the same vector again.
        """
        if name not in self._scratch:
            self._scratch[name] = torch.empty_like(self.weights)
        return self._scratch[name]

    def buffers(self) -> dict[str, Tensor]:
        """A copy of those that are sent, e.g. BatchNorm's statistics."""
        return self.state.copy()

    def load(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Set the weights and the buffers, in place.

        Args:
            weights: Flat, in the plain order.
            buffers: By name; the others stay as they are.
        """
        if self.order is None:
            self.weights.copy_(weights)
        else:
            self.order.inward(weights, self.weights)
        self.load_buffers(buffers)

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Set the buffers, in place.

        Args:
            buffers: By name; the others stay as they are.
        """
        self.state.load(buffers)

    def forward(self, *inputs: Any) -> Any:
        """What the module returns, in the precision and layout of the run.

        Args:
            inputs: The module's arguments.
        """
        self._round()
        found = self.called(*inputs)
        self.called.returned.clear()
        return found

    def step(self, task: Task, batch: Batch) -> ForwardPass:
        """The loss of a batch and the model's outputs, at the current weights.

        Args:
            task: How the batch becomes a loss.
            batch: On the model's device.
        """
        self._round()
        return self.called.run(task, batch)

    def step_at(self, weights: Tensor, task: Task, batch: Batch) -> ForwardPass:
        """As `step`, at other weights, flat; a pure function of them, so it can be differentiated and mapped.

        Args:
            weights: Where the loss is taken.
            task: How the batch becomes a loss.
            batch: On the model's device.
        """
        views = self.views(weights) if self.half is None else self.half.rounded(self.views(weights))
        pieces = {f"module.{name}": piece for name, piece in zip(self.names, views, strict=True)}
        found: ForwardPass = functional_call(self._elsewhere, pieces, (task, batch))
        return found

    def backward(self, task: Task, batch: Batch, out: Tensor) -> Tensor:
        """One forward and backward pass at the current weights: the gradient goes into `out`, the loss is returned.

        Args:
            task: How the batch becomes a loss.
            batch: On the model's device.
            out: The vector for the gradient; it is overwritten.
        """
        return self.backward_of(self.step(task, batch).loss, out)

    def backward_of(self, value: Tensor, out: Tensor) -> Tensor:
        """The backward pass of a loss that was taken at the current weights; its gradient goes into `out`.

        Args:
            value: The loss, with its graph.
            out: The vector for the gradient; it is overwritten.
        """
        if self._gradient is not out:
            self._gradient, self._grads = out, self._own_views(out)
        for parameter, view in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not view:  # another vector, or the model has called zero_grad
                parameter.grad = view if parameter.dtype == view.dtype else None
        out.zero_()
        torch.autograd.backward(check_learns(value))
        for parameter, view in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not view and parameter.grad is not None:  # a model that handles gradients itself
                view.copy_(parameter.grad)
        self.backward_passes += 1
        return value.detach()

    def _round(self) -> None:
        if self.half is not None:
            self.half.vector.copy_(self.weights)


def _own(module: nn.Module, kind: str, precision: Precision, compile: bool, graphs: bool, reorder: bool) -> FlatModel:
    module = module.to(own_device(kind)) if kind == "cuda" else copy.deepcopy(module)
    return FlatModel(module, precision, compile, graphs, reorder)
