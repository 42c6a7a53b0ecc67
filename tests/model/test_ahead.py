"""Work ahead of its reader: in order, within its bytes, and no longer than somebody reads."""

import threading
from collections.abc import Callable

import pytest

from swiftjax.model.ahead import ahead


class Work:
    """Counts the bytes that jobs hold, from their beginning until the next result is asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun: list[int] = []

    def job(self, number: int) -> Callable[[], int]:
        def run() -> int:
            with self.lock:
                self.begun.append(number)
            return number

        return run


def test_results_come_in_order_and_only_so_many_are_begun() -> None:
    work = Work()
    results = ahead([(10, work.job(i)) for i in range(50)], budget=35)
    for i in range(50):
        assert next(results) == i
        assert max(work.begun) <= i + 2  # three of ten bytes fit, the one just given among them
    assert list(results) == []


def test_a_large_job_runs_alone() -> None:
    work = Work()
    results = ahead([(10, work.job(0)), (1000, work.job(1)), (10, work.job(2))], budget=35)
    assert next(results) == 0 and work.begun == [0]
    assert next(results) == 1 and work.begun == [0, 1]
    assert list(results) == [2]


def test_an_error_comes_where_its_result_would() -> None:
    results = ahead([(1, lambda: 1), (1, lambda: 1 // 0), (1, lambda: 3)])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_reader_that_leaves_ends_the_work() -> None:
    work = Work()
    results = ahead([(10, work.job(i)) for i in range(50)], budget=35)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(work.begun) <= 3
