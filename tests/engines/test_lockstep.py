"""Functions in lockstep: their questions meet in one thread, and an error reaches whom it concerns."""

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


def test_all_run_in_the_callers_thread_each_up_to_its_next_question() -> None:
    seen: list[tuple[int, int]] = []

    def one(number: int) -> None:
        for time in range(3):
            seen.append((time, number))
            threads.add(threading.get_ident())
            together.ask(number)

    threads: set[int] = set()
    together: Lockstep[int, int] = Lockstep(lambda questions: questions)
    together.run([partial(one, number) for number in range(4)])
    assert seen == [(time, number) for time in range(3) for number in range(4)]
    assert threads == {threading.get_ident()}


def test_another_thread_is_answered_at_once() -> None:
    meetings: list[list[int]] = []

    def answer(questions: list[int]) -> list[int]:
        meetings.append(questions)
        return questions

    def one(number: int) -> None:
        if number == 1:
            other = threading.Thread(target=together.ask, args=(7,))
            other.start()
            other.join()
        together.ask(number)

    together: Lockstep[int, int] = Lockstep(answer)
    together.run([partial(one, number) for number in range(3)])
    assert meetings == [[7], [0, 1, 2]]


@pytest.mark.parametrize("error", [ValueError("not handled"), SystemExit(3)])
def test_what_one_raises_does_not_end_the_others_and_comes_out_at_the_end(error: BaseException) -> None:
    ended: list[int] = []

    def one(number: int) -> None:
        together.ask(number)
        if number == 1:
            raise error
        together.ask(number)
        ended.append(number)

    together: Lockstep[int, int] = Lockstep(lambda questions: questions)
    with pytest.raises(type(error)) as raised:
        together.run([partial(one, number) for number in range(3)])
    assert raised.value is error
    assert ended == [0, 2]
    assert together.ask(5) == 5, "and it can be used again"


def test_each_hears_of_an_error_though_another_raises_it_again() -> None:
    heard: list[int] = []

    def answer(questions: list[int]) -> list[int]:
        raise KeyboardInterrupt

    def one(number: int) -> None:
        try:
            together.ask(number)
        except KeyboardInterrupt:
            heard.append(number)
            raise

    together: Lockstep[int, int] = Lockstep(answer)
    with pytest.raises(KeyboardInterrupt):
        together.run([partial(one, number) for number in range(3)])
    assert heard == [0, 1, 2]


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
