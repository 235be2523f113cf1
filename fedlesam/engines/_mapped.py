"""One local step of many clients as one computation: `look` and `move` of core/step.py, mapped over their rows."""

import logging
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedlesam.core import tree
from fedlesam.core.batches import Batch
from fedlesam.core.buffers import same_bits
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.lesson import Lesson, logits
from fedlesam.core.module_check import check_learns
from fedlesam.core.noise import standard_normal
from fedlesam.core.slots import Rule
from fedlesam.core.step import look, move
from fedlesam.core.task import Task
from fedlesam.engines._compile import compiled
from fedlesam.engines._replay import Replay, form_of, has_known_operations, settings_of, tree_form
from fedlesam.engines._rows import Bound, Program, Rows, round_of
from fedlesam.engines._sums import StackedSums
from fedlesam.engines._trees import Tree, dims_of, leaves, map_tree

log = logging.getLogger("fedlesam")

FROM, MOST = 100, 8
"""Uncompiled steps of one form after which it is recorded, which takes as long as two hundred; forms that are kept."""


class NotStackable(ValueError):
    """The model or the loss cannot be mapped over clients; no fault of a client."""


class MappedStep:
    """One step of all clients as one function of their rows.

    Compiled, the whole step (ascent, gradients, clipping, descent) is one program without a loop over clients. It is
    traced by running it, so a rule may be any Python. Without a compiler it runs as it is, and a warning says so.

    Uncompiled, a step of nobody's own Python is recorded after a while: its operations are then run without the map,
    which takes longer than they do. They give the same bits.
    """

    def __init__(self, model: FlatModel, task: Task, compile: bool, check: bool = False) -> None:
        self.model, self.task, self.compile, self.check = model, task, compile, check
        self.called = False
        """Whether the module itself was called, which may have changed what it keeps; a program does not call it."""
        self.replay, self.sums = Replay(), StackedSums()
        self._numbers: list[Tensor] = []
        """Of the steps, as tensors."""
        self._programs: list[Program] = []
        """Those used last are at the end."""

    def __call__(self, rows: Rows, batch: Batch, number: int) -> Tensor:
        """Make the step, and return the losses of the clients on their batches.

        Args:
            rows: their rounds; they are changed.
            batch: of tensors with a row per client.
            number: of the step.
        """
        while len(self._numbers) <= number:
            self._numbers.append(rows.own["u"].new_tensor(float(len(self._numbers))))
        given = (batch, self._numbers[number])
        try:
            return self._made(rows, given)
        except RuntimeError as error:
            if "out of bounds" in str(error):  # a label or token of a client: the plain loop says whose
                raise
            raise NotStackable(_refusal(error)) from error

    def _made(self, rows: Rows, given: tuple[Any, ...]) -> Tensor:
        if not self.compile and not rows.groups:  # a part of the rows, whose number changes from step to step
            return self._step(rows, rows.in_steps, rows.own, *given)
        batch = tree.leaves(given)
        shapes = [tensor.shape for tensor in batch]
        if rows.bound is None or rows.bound.shapes != shapes:
            rows.bound = self._bound(rows, given, shapes)
            if self.check and rows.groups and not rows.bound.program.checked:  # copies of rows have no groups
                self._check_apart(rows, given)
                rows.bound = self._bound(rows, given, shapes)  # without a compiler it is another program now
                rows.bound.program.checked = True
        bound = rows.bound
        if bound.program.run is None and not self._prepare(bound.program, rows, given):
            bound.program.uses += 1
            return self._step(rows, rows.in_steps, rows.own, *given)
        assert bound.program.run is not None
        [losses] = bound.program.run(*bound.tensors, *batch)
        return losses

    def _check_apart(self, rows: Rows, given: tuple[Any, ...]) -> None:
        """A client's bits must not depend on its place or its neighbours: the same rows in three orders."""
        places = torch.arange(rows.width, device=rows.own["u"].device)
        first: list[Tensor] = []
        for order in (places, places.flip(0), places.roll(1)):
            moved = rows.moved(order)
            losses = self._made(moved, _moved(given, order))
            own = leaves({name: value for name, value in moved.own.items() if name not in moved.scratch})
            found = [t.index_select(0, order.argsort()) for t in (losses, *own)]
            first = first or found
            if not all(map(same_bits, first, found)):
                raise NotStackable(
                    "a client's last bits depend on who shares its stack, for this model and machine: runs cannot be "
                    "stacked; remove --stack-runs"
                )

    def _bound(self, rows: Rows, given: tuple[Any, ...], shapes: list[torch.Size]) -> Bound:
        """The program of these rows, with its tensors."""
        own = self._given_rows(rows)
        forms = [tree_form(rows.in_steps), tree_form(own), [form_of(t) for t in tree.leaves(given)]]
        key = self.compile, forms, rows.fixed, None if self.compile else settings_of(self.model)
        program = next((program for program in self._programs if program.key == key), None)
        program = Program(key) if program is None else program
        others = [other for other in self._programs if other is not program]
        self._programs = [*(others if self.compile else others[-MOST + 1 :]), program]
        return Bound(shapes, program, [*leaves(rows.in_steps), *leaves(own)])

    def _given_rows(self, rows: Rows) -> Tree:
        """The rows that a program takes: a compiled one makes what it overwrites itself."""
        scratch = rows.scratch if self.compile else ()
        return {name: value for name, value in rows.own.items() if name not in scratch}

    def _prepare(self, program: Program, rows: Rows, given: tuple[Any, ...]) -> bool:
        """Compile the step, or record it where it is worth it; False if it is to be made as it is."""
        if not self.compile:
            if program.fails or program.uses < FROM:
                return False
            try:
                if has_known_operations(self.model, self.task, rows.fixed.algorithm):
                    program.run = self._trace(rows, given)
            except Exception:  # a map takes what a recording does not, such as a number that is read
                log.debug("the step cannot be recorded", exc_info=True)
            program.fails = program.run is None
            return not program.fails
        try:
            program.run = self._trace(rows, given)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            log.warning("the step cannot be compiled here, it runs uncompiled: %s", str(error).splitlines()[0])
            self.compile, rows.bound = False, None
        return program.run is not None

    def _trace(self, rows: Rows, given: tuple[Any, ...]) -> Callable[..., Sequence[Tensor]]:
        """The step as a function of tensors, which changes the rows in place and returns the losses.

        It goes to the compiler's back end as it is: nothing is left for dynamo, whose checks at every call take longer
        than the step of few clients, and which gives up after eight programs.
        """
        shared, own = rows.in_steps, self._given_rows(rows)
        tensors = [*leaves(shared), *(tensor.clone() for tensor in (*leaves(own), *tree.leaves(given)))]

        def step(*tensors: Tensor) -> tuple[Tensor]:
            left = iter(tensors)
            theirs, mine = map_tree(shared, lambda _: next(left)), map_tree(own, lambda _: next(left))
            mine |= {name: torch.empty_like(mine["u"]) for name in rows.own if name not in mine}
            return (self._step(rows, theirs, mine, *tree.tree_map(lambda _: next(left), given)),)

        if self.compile:
            return compiled(step, tensors)
        recorded: Callable[..., Sequence[Tensor]] = make_fx(step)(*tensors).forward
        return recorded

    def _step(self, rows: Rows, shared: Tree, own: Tree, batch: Batch, number: Tensor) -> Tensor:
        """Changes `own` in place."""
        self.called = True

        def one(shared: Tree, own: Tree, batch: Batch) -> Tensor:
            def gradient(at: Tensor, out: Tensor, *, final: bool, lesson: Lesson | None = None) -> Tensor:
                slope, (_, loss) = grad_and_value(self._losses, has_aux=True)(at, batch, lesson)
                out.copy_(slope)
                return torch.as_tensor(loss)

            r = round_of(rows.fixed, shared, own)
            loss = look(r, gradient, number, _noise(own, number))
            move(r, number)
            return loss

        losses: Tensor = vmap(one, (dims_of(shared), 0, 0), randomness="error")(shared, own, batch)
        return losses

    def _losses(self, flat: Tensor, batch: Batch, lesson: Lesson | None) -> tuple[Tensor, Tensor]:
        """What is differentiated, and the loss of the batch."""
        found = self.model.step_at(flat, self.task, batch)
        if lesson is None:
            return check_learns(found.loss), found.loss
        taught = logits(self.model.step_at(lesson.teacher, self.task, batch)).detach()
        return check_learns(lesson.objective(found, taught)), found.loss


def _noise(own: Tree, number: Tensor) -> Tensor | None:
    """The random numbers of a client's step, those of the plain loop, for a rule that draws."""
    if "mask" not in own:
        return None
    return standard_normal(own["mask"] + (number.long() + 1), own["u"].numel(), own["u"].dtype)


def _refusal(error: RuntimeError) -> str:
    """Whose code cannot be mapped over clients, what it does, and the remedy."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    rule = next((type(caller).__name__ for caller in callers if isinstance(caller, Rule)), None)
    who = "this model or loss" if rule is None else f"with the rule {rule}"
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if "random operation" in text:
        how, remedy = "draws random numbers", "set p=0 of Dropout layers and draw nothing in the loss"
        remedy = remedy if rule is None else "take step.noise, with draws = True"
    elif ".item()" in text or "data-dependent control flow" in text:
        how, remedy = "reads a number of a tensor on the host: .item(), float() or `if`", "write torch.where"
        if rule is not None:
            remedy = "see fedlesam.rules.check_on_device and docs/add-a-rule.md (Compute on the device)"
    else:
        how, remedy = re.sub(r"[,.]?[^.,]*please file.*", "", text, flags=re.IGNORECASE), ""
    return f"the stacked engine cannot train {who} ({how}); {remedy}{', or ' if remedy else ''}use the plain engine"


def _moved(given: tuple[Any, ...], order: Tensor) -> tuple[Any, ...]:
    """The rows of a batch in another order."""
    moved: tuple[Any, ...] = tree.tree_map(lambda t: t.index_select(0, order) if t.ndim else t, given)
    return moved
