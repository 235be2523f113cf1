"""Whether samples can be trained on: finite numbers, and targets that the task takes."""

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Augment, Batch, Batches, ClientData, Loadable, check_client, given_tensors
from fedlesam.core.buffers import Unsupported
from fedlesam.core.flat_model import CalledModel, FlatModel, ForwardPass
from fedlesam.core.module_check import changed_buffers
from fedlesam.core.task import Task, is_pair
from fedlesam.core.tree import named_tensors

BROADCAST = "Using a target size"
"""How PyTorch's warning begins."""

Clients = Sequence[ClientData] | Mapping[int, ClientData]
"""All clients, or some of them by their number."""


NamedTests = Mapping[str, ClientData]
"""Data to test on, by what they are called in a message."""


def named(clients: Clients, tests: NamedTests) -> Iterator[tuple[str, ClientData]]:
    """What the data are called in a message.

    Args:
        clients: The training data, by client.
        tests: The test data, by what they are called.
    """
    numbered = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    yield from ((f"client {i}", data) for i, data in numbered)
    yield from tests.items()


def named_tests(test: ClientData | None, clients: Sequence[ClientData | None] | None, whole: bool) -> NamedTests:
    """All data to test on.

    Args:
        test: The test set.
        clients: The test samples of every client.
        whole: Of all clients; else of the first.
    """
    found = {} if test is None else {"the test set": test}
    if clients is not None:
        for number in range(len(clients) if whole else 1):
            if (data := clients[number]) is not None:
                found[f"the test samples of client {number}"] = data
    return found


def check_finite(batch: Batch, where: str, numbers: Tensor | slice | None = None) -> None:
    """A ValueError for a NaN or an infinity. `numbers` are the samples' own, where they are a batch.

    Args:
        batch: Tensors of any form.
        where: What the data are called in the message.
        numbers: The numbers of the samples in their data set; None where the batch is all of it.
    """
    for what, values in named_tensors(batch):
        if values.is_floating_point() and values.numel() and not all(end.isfinite() for end in values.aminmax()):
            sample = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0]) if values.ndim else 0
            number = int(numbers[sample]) if isinstance(numbers, Tensor) and sample < len(numbers) else sample
            raise ValueError(f"{where}: {what} of sample {number} is not finite; repair the sample or remove it")


def check_samples(clients: Clients, tests: NamedTests, *, drop: bool) -> None:
    """A ValueError for data that cannot be used. With `drop` a client with numbers that are not finite may stay.

    Args:
        clients: The training data, by client.
        tests: The test data, by what they are called.
        drop: Whether clients that fail are dropped.
    """
    first: tuple[str, dict[str, torch.dtype]] | None = None
    for where, data in named(clients, tests):
        check_client(data, where)
        if (given := given_tensors(data)) is None:
            continue
        if where in tests or not drop:
            check_finite(given, where)
        kinds = {name: tensor.dtype for name, tensor in named_tensors(given) if name != "y"}
        first = first or (where, kinds)
        for name, kind in kinds.items():
            if (known := first[1].get(name, kind)) != kind:
                raise ValueError(f"{where}: {name} is {kind}, but {known} for {first[0]}; use {name}.to({known})")


def augmented(batch: Batch, augment: Augment, rng: torch.Generator) -> Batch:
    """A batch with augmented inputs, the first of a pair.

    Args:
        batch: A pair of tensors, or a tree.
        augment: Changes the inputs.
        rng: From which it draws.
    """
    if is_pair(batch) and isinstance(batch[0], Tensor):
        return augment(batch[0], rng), batch[1]
    raise Unsupported(
        f"augment changes the x of a pair (x, y), and a batch is a {type(batch).__name__} here; augment in the "
        "Dataset's __getitem__, or in the task's loss"
    )


def shapes(batch: Batch) -> str:
    """The tensors of a batch in words.

    Args:
        batch: Tensors of any form.
    """
    found = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in named_tensors(batch))
    return found or f"a {type(batch).__name__}"


def describe(batch: Batch, weights: torch.dtype, whose: str) -> str:
    """A batch that a model refused, by its shapes, and by its dtype where it is not the model's.

    Args:
        batch: What the model was given.
        weights: The dtype of the model's weights.
        whose: What the batch is called, e.g. `client 3`.
    """
    tensors = named_tensors(batch)
    if not tensors or tensors[0][0] != "x":
        return f"a batch of {whose}: {shapes(batch)}"
    x = tensors[0][1]
    if x.dtype == weights:
        return f"inputs of shape {tuple(x.shape)}, as {whose} has"
    told = f"inputs of shape {tuple(x.shape)} and dtype {x.dtype}, as {whose} has"
    numbers = x.is_floating_point() or x.dtype == torch.uint8  # others may be meant, as for an embedding
    return f"{told}: its weights are {weights}, give x.to({weights})" if numbers else told


def check_targets(clients: Clients, tests: NamedTests | None = None, *, task: Task, output: Sequence[int]) -> None:
    """All targets that are known in advance.

    Args:
        clients: The training data, by client.
        tests: The test data, by what they are called.
        task: Says what the targets of a batch are, and whether they fit.
        output: The shape of the model's outputs for one batch.
    """
    if task.fits is None:
        return
    for where, data in named(clients, tests or {}):
        try:
            known = task.known_targets(data)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error
        if known is not None:
            task.fits(known, output, where)


def check_outputs(
    model: FlatModel, clients: Clients, tests: NamedTests, task: Task, *, stacked: bool
) -> tuple[int, list[str], Callable[..., None]]:
    """Show the model one sample, and check all targets against its outputs, before any work is done.

    Args:
        model: the model.
        clients: their data; the sample is the first of the first.
        tests: the data to test on.
        task: how a batch becomes a loss.
        stacked: look for buffers that change even where only norm layers have any.

    Returns:
        The number of outputs, the names of the buffers that a training step changes, and what checks the targets of
        further clients.
    """
    batches = Batches(clients[0], model.device, task.collate)
    with seeds.preserve_rng(model.device):
        batch, changed = batches.fetch(torch.tensor([0]), seed=0), list[str]()
        twice = batches.fetch(torch.tensor([0, 0]), seed=0) if model.batch_norm else batch  # statistics need two
        if stacked or model.state.own or model.state.frozen:
            changed = changed_buffers(
                model.module, lambda tried: CalledModel(tried, tried, model.called.cast).run(task, twice)
            )
    model.module.eval()
    shown = twice if model.needs_batch else batch
    with torch.no_grad(), seeds.preserve_rng(model.device):
        with warnings.catch_warnings(record=True) as told:  # the rest of what they warn of is refused below
            warnings.simplefilter("always")
            done = _shown(model, task, shown, "client 0")
        if task.fits is None and any(str(one.message).startswith(BROADCAST) for one in told):
            _check_broadcast(model, task, batches.fetch(torch.tensor([0, 0]), seed=0))  # of one it may be right
        for whose, test in itertools.islice(tests.items(), 2):
            if not isinstance(test, Loadable):  # of those the first sample would load all
                places = torch.tensor([0, 0] if model.needs_batch else [0])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _shown(model, task, Batches(test, model.device, task.collate).fetch(places, seed=0), whose)
    if task.fits is None and not task.measured:
        return 1, changed, functools.partial(check_targets, task=task, output=())
    outputs = done.outputs
    if not isinstance(outputs, Tensor):
        raise Unsupported(f"the outputs of the task are a {type(outputs).__name__}, and one tensor is needed")
    if task.fits is not None:
        if not isinstance(targets := task.targets_of(batch), Tensor):
            raise Unsupported(
                f"client 0: the targets of a batch are a {type(targets).__name__} of "
                f"{type(targets[0]).__name__ if isinstance(targets, tuple | list) and targets else 'something'}, and a "
                "tensor of numbers is needed; number the labels, or make it in Task(..., collate=f)"
            )
        task.fits(targets, outputs.shape, "client 0")
    check = functools.partial(check_targets, task=task, output=outputs.shape)
    check(clients, tests)
    return outputs.shape[-1] if outputs.ndim else 1, changed, check


def blame_targets(model: FlatModel, task: Task, batch: Batch, where: str) -> None:
    """After a loss or a metric has failed on a batch: a ValueError if its targets are why.

    Args:
        model: that has seen the batch.
        task: how a batch becomes a loss.
        batch: the batch.
        where: whose it is.
    """
    if task.fits is None or model.called.running or len(model.called.returned) != 1:
        return
    outputs = task.outputs_of(model.called.returned)
    if isinstance(outputs, Tensor):
        task.fits(task.targets_of(batch), outputs.shape, where)


def _check_broadcast(model: FlatModel, task: Task, batch: Batch) -> None:
    """Refuse what PyTorch's losses only warn of: (n, 1) against (n,) is (n, n) to them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):  # in training it is known whose it is
            model.step(task, batch)
    for text in (str(one.message) for one in told):
        if text.startswith(BROADCAST):
            targets, outputs = re.findall(r"\[([\d, ]*)\]", text)[:2]
            raise Unsupported(
                f"the loss compares outputs of shape ({outputs}) with targets of shape ({targets}), of two samples, "
                "which PyTorch would broadcast; give one shape: y.unsqueeze(-1), or output.squeeze(-1) in the model"
            )


def _shown(model: FlatModel, task: Task, batch: Batch, whose: str) -> ForwardPass:
    """The model, shown a batch. A loss that fails after the model returned fails again when a client trains."""
    try:
        return model.step(task, batch)
    except Unsupported:
        raise
    except Exception as error:
        if model.called.returned and not model.called.running:
            return ForwardPass(task, torch.zeros(()), model.called.returned)
        who = "the model" if model.called.running else "the loss of the task"
        told = str(error) if model.called.running else f"{type(error).__name__}: {error}"
        raise ValueError(f"{who} does not take {describe(batch, model.weights.dtype, whose)}: {told}") from error
