"""Functions that run side by side and meet at questions, which are answered for all of them at once.

Each is a greenlet: it runs until it asks, in the thread that runs all of them. Threads of their own would move from
core to core and leave their caches behind.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Lockstep(Generic[Question, Answer]):
    """Runs functions in lockstep.

    Args:
        answer: is given the questions of all functions that have not ended, and gives an answer or an exception each.
    """

    def __init__(self, answer: Callable[[list[Question]], Sequence[Answer | BaseException]]) -> None:
        self._answer = answer
        self._running: set[greenlet] = set()

    def ask(self, question: Question) -> Answer:
        """Wait until all functions have asked or ended, and return the answer; outside `run` it comes at once.

        Args:
            question: of the function that asks.

        Raises:
            BaseException: the answer is one, or answering failed.
        """
        here = getcurrent()
        if here in self._running:
            assert here.parent is not None
            answer = here.parent.switch(question)
        else:
            [answer] = self._answer([question])
        if isinstance(answer, BaseException):
            raise answer
        found: Answer = answer
        return found

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run functions to their ends.

        Args:
            functions: called one after the other, each up to its next question.

        Raises:
            BaseException: what the first of them raised, once all have ended.
        """
        parts = [greenlet(function) for function in functions]
        raised: list[BaseException] = []
        self._running = set(parts)
        try:
            asking = [(part, question) for part in parts for question in self._questions(part, raised)]
            while asking:
                answers: Sequence[Answer | BaseException]
                try:
                    answers = self._answer([question for _, question in asking])
                except BaseException as error:  # it is raised in every function, which ends as it would alone
                    answers = [error] * len(asking)
                told = zip([part for part, _ in asking], answers, strict=True)
                asking = [(part, again) for part, answer in told for again in self._questions(part, raised, answer)]
        finally:
            self._running = set()
        if raised:
            raise raised[0]

    def _questions(
        self, part: greenlet, raised: list[BaseException], *answer: Answer | BaseException
    ) -> list[Question]:
        """Let a function run on, up to its next question; none if it has ended."""
        try:
            question: Question = part.switch(*answer)
        except BaseException as error:
            raised.append(error)
        return [] if part.dead else [question]
