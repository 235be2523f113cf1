"""Functions that run side by side and meet at questions, which are answered for all of them at once.

Each has a thread of its own, but only one runs at a time: they are coroutines that need not know it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


def _closed() -> threading.Lock:
    """One thread waits at it until another opens it; a semaphore of Python's library takes many times as long."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Part(Generic[Question, Answer]):
    def __init__(self) -> None:
        self.turn = _closed()
        self.question: Question | None = None
        self.answer: Answer | BaseException | None = None
        self.ended = False


class Lockstep(Generic[Question, Answer]):
    """Runs functions in lockstep.

    Args:
        answer: is given the questions of all functions that have not ended, and gives an answer or an exception each.
    """

    def __init__(self, answer: Callable[[list[Question]], Sequence[Answer | BaseException]]) -> None:
        self._answer = answer
        self._back = _closed()
        self._here = threading.local()

    def ask(self, question: Question) -> Answer:
        """Wait until all functions have asked or ended, and return the answer; outside `run` it comes at once.

        Args:
            question: of the function that runs in this thread.

        Raises:
            BaseException: the answer is one, or answering failed.
        """
        part: _Part[Question, Answer] | None = getattr(self._here, "part", None)
        if part is None:
            [answer] = self._answer([question])
        else:
            part.question = question
            self._back.release()
            part.turn.acquire()
            assert part.answer is not None
            answer = part.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run functions to their ends; what they raise they must handle themselves.

        Args:
            functions: called in threads of their own, one at a time.
        """
        parts: list[_Part[Question, Answer]] = [_Part() for _ in functions]
        threads = [
            threading.Thread(target=self._live, args=(part, function), daemon=True)
            for part, function in zip(parts, functions, strict=True)
        ]
        for part, thread in zip(parts, threads, strict=True):
            thread.start()
            self._pass_to(part)
        while asking := [part for part in parts if not part.ended]:
            try:
                answers = self._answer([part.question for part in asking if part.question is not None])
            except BaseException as error:  # it is raised in every function, which ends as it would alone
                answers = [error] * len(asking)
            for part, answer in zip(asking, answers, strict=True):
                part.answer = answer
                self._pass_to(part)
        for thread in threads:
            thread.join()

    def _pass_to(self, part: _Part[Question, Answer]) -> None:
        part.turn.release()
        self._back.acquire()

    def _live(self, part: _Part[Question, Answer], function: Callable[[], None]) -> None:
        self._here.part = part
        part.turn.acquire()
        try:
            function()
        finally:
            part.ended = True
            self._back.release()
