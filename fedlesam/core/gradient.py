"""The gradient of one batch after the other, for the plain local loop."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Batch
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.lesson import Lesson, logits
from fedlesam.core.task import Task


class BatchGradient:
    """The gradient of one batch after the other, by autograd on the module itself.

    Args:
        model: Differentiated.
        task: How a batch becomes a loss.
        received: The buffers that the server sent, with which a teacher looks.
    """

    batch: tuple[Batch, int]
    """The batch, and the seed of what layers draw: both passes of a step see the same mask."""

    def __init__(self, model: FlatModel, task: Task, received: Mapping[str, Tensor]) -> None:
        self.model, self.task, self.received = model, task, received
        self.draws: bool | None = None
        """Whether layers draw random numbers; the first pass of the round shows it. Where none does, none is seeded."""

    def __call__(self, at: Tensor, out: Tensor, *, final: bool, lesson: Lesson | None = None) -> Tensor:
        batch, model, passes = self.batch[0], self.model, self.model.backward_passes
        taught = None if lesson is None else self.taught(lesson.teacher)
        restore = not final and bool(model.state.names)

        def work(batch: Batch) -> Tensor:
            buffers = model.buffers() if restore else {}
            found = model.step(self.task, batch)
            value = found.loss if lesson is None or taught is None else lesson.objective(found, taught)
            loss = model.backward_of(value, out)
            model.load_buffers(buffers)
            return loss if value is found.loss else found.loss.detach()

        graphs = model.graphs if lesson is None else None  # a teacher has other tensors in every round
        run = work if graphs is None else functools.partial(graphs.run, restore, work)
        loss = self._watched(run, batch, watch=not final)
        model.backward_passes = passes + 1
        return loss

    def _watched(self, run: Callable[[Batch], Tensor], batch: Batch, watch: bool) -> Tensor:
        """A pass with its seed. A layer that draws for the first time in the first of two passes makes it once more."""
        self._seed()
        before = seeds.state(self.model.device) if watch or self.draws is None else None
        loss = run(batch)
        drew = before is not None and seeds.state(self.model.device) != before
        if drew and self.draws is False:
            self.draws = True
            return self._watched(run, batch, watch)
        self.draws = drew if self.draws is None else self.draws
        return loss

    def taught(self, teacher: Tensor) -> Tensor:
        """The teacher's logits: the same batch and mask, the buffers that were received, and no trace of the pass.

        Args:
            teacher: Its weights, flat.
        """
        batch, weights, buffers = self.batch[0], self.model.weights, self.model.buffers()
        student = self.model.scratch("student").copy_(weights)
        self.model.load(teacher, self.received)
        self._seed()
        with torch.no_grad():
            found = logits(self.model.step(self.task, batch))
        self.model.load(student, buffers)
        return found

    def _seed(self) -> None:
        if self.draws is not False:
            seeds.reseed_torch(self.batch[1], self.model.device)
