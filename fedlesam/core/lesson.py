"""A second model beside the one that is trained: what a rule that teaches differentiates."""

from typing import NamedTuple

from torch import Tensor

from fedlesam.core.buffers import Unsupported
from fedlesam.core.flat_model import ForwardPass
from fedlesam.core.slots import Perturbation
from fedlesam.core.targets import numbers, zero_or_one


class Lesson(NamedTuple):
    """A rule that teaches, with its teacher's weights."""

    rule: Perturbation
    """The perturbation that teaches."""
    teacher: Tensor
    """Its weights, flat."""

    def objective(self, found: ForwardPass, taught: Tensor) -> Tensor:
        """What is differentiated: what the rule distils, and the loss beside it if that is descended.

        Args:
            found: The pass of the model that learns.
            taught: The teacher's logits for the same batch.
        """
        distilled = self.rule.distil(logits(found), taught)
        return distilled if self.rule.teaches == "ascent" else found.loss + distilled


def logits(found: ForwardPass) -> Tensor:
    """The outputs of a batch as logits (samples, classes); an error where they are none.

    Args:
        found: A pass of a model.
    """
    outputs, task = found.outputs, found.task
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or task.fits in (numbers, zero_or_one):
        what = f"of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise Unsupported(
            f"this method compares the class probabilities of two models, and the outputs of {task!r} are {what}: no "
            "logits (samples, classes); choose a method without a teacher, or a task of classes"
        )
    return outputs
