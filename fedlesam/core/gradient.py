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
        taught = None if lesson is None else self.taught(lesson.teacher)
        run = functools.partial(self.once, self.batch[0], at, out, final=final, lesson=lesson, taught=taught)
        passes = self.model.backward_passes
        loss = self._watched(run, watch=not final)
        self.model.backward_passes = passes + 1
        return loss

    def once(
        self,
        batch: Batch,
        at: Tensor,
        out: Tensor,
        *,
        final: bool,
        lesson: Lesson | None = None,
        taught: Tensor | None = None,
    ) -> Tensor:
        """The pass alone: nothing is seeded.

        Args:
            batch: Any batch.
            at: Where the gradient is taken: the model's weights.
            out: The vector for the gradient; it is overwritten.
            final: Whether buffers keep what this pass makes of them.
            lesson: Of a rule that teaches.
            taught: The logits of its teacher for the batch.
        """
        model = self.model
        buffers = model.buffers() if not final and model.state.names else {}
        found = model.step(self.task, batch)
        value = found.loss if lesson is None or taught is None else lesson.objective(found, taught)
        loss = model.backward_of(value, out)
        model.load_buffers(buffers)
        return loss if value is found.loss else found.loss.detach()

    def _watched(self, run: Callable[[], Tensor], watch: bool) -> Tensor:
        """A pass with its seed. A layer that draws for the first time in the first of two passes makes it once more."""
        if self.draws is not False:
            self.seed()
        before = seeds.state(self.model.device) if watch or self.draws is None else None
        loss = run()
        drew = before is not None and seeds.state(self.model.device) != before
        if drew and self.draws is False:
            self.draws = True
            return self._watched(run, watch)
        self.draws = drew if self.draws is None else self.draws
        return loss

    def taught(self, teacher: Tensor) -> Tensor:
        """The teacher's logits: the same batch and mask, the buffers that were received, and no trace of the pass.

        Args:
            teacher: Its weights, flat.
        """
        batch, weights, buffers = self.batch[0], self.model.weights, self.model.buffers()
        student = self.model.scratch("student").copy_(weights)
        weights.copy_(teacher)
        self.model.load_buffers(self.received)
        if self.draws is not False:
            self.seed()
        with torch.no_grad():
            found = logits(self.model.step(self.task, batch))
        weights.copy_(student)
        self.model.load_buffers(buffers)
        return found

    def seed(self) -> None:
        """Set what layers draw from, as both passes of the step see it."""
        seeds.reseed_torch(self.batch[1], self.model.device)
