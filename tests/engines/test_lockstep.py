"""Functions in lockstep: their questions meet, one runs at a time, and an error reaches whom it concerns."""

import threading
from functools import partial

import pytest

from fedlesam.engines.lockstep import Lockstep


def test_questions_meet_and_who_has_ended_is_not_waited_for() -> None:
    meetings: list[list[int]] = []
    ended: dict[int, list[int]] = {}

    def answer(questions: list[int]) -> list[int]:
        meetings.append(questions)
        return [10 * question for question in questions]

    together: Lockstep[int, int] = Lockstep(answer)

    def one(number: int, times: int) -> None:
        ended[number] = [together.ask(number + time) for time in range(times)]

    together.run([partial(one, 0, 1), partial(one, 100, 3), partial(one, 200, 2)])
    assert meetings == [[0, 100, 200], [101, 201], [102]]
    assert ended == {0: [0], 100: [1000, 1010, 1020], 200: [2000, 2010]}


def test_one_runs_at_a_time() -> None:
    inside, most = 0, 0

    def one() -> None:
        nonlocal inside, most
        for _ in range(20):
            inside += 1
            most = max(most, inside)
            threading.Event().wait(0.0001)
            inside -= 1
            together.ask(0)

    together: Lockstep[int, int] = Lockstep(lambda questions: questions)
    together.run([one] * 4)
    assert most == 1


@pytest.mark.parametrize("for_all", [False, True])
def test_an_exception_is_an_answer(for_all: bool) -> None:
    heard: list[str] = []

    def answer(questions: list[int]) -> list[int | BaseException]:
        if for_all:
            raise KeyboardInterrupt("stop")
        return [ValueError("not you") if question == 1 else question for question in questions]

    def one(number: int) -> None:
        try:
            together.ask(number)
            heard.append("fine")
        except (ValueError, KeyboardInterrupt) as error:
            heard.append(str(error))

    together: Lockstep[int, int] = Lockstep(answer)
    together.run([partial(one, number) for number in range(3)])
    assert heard == (["stop"] * 3 if for_all else ["fine", "not you", "fine"])


def test_outside_of_a_run_an_answer_comes_at_once() -> None:
    assert Lockstep[int, int](lambda questions: questions).ask(7) == 7
