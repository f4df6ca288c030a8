"""When a loop hangs by the run's own measure, whom the ranks wait for, and what all of them tell of it."""

import logging
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.health.collectives import Collective, pending, recorded_collectives
from lightning_air.health.hang_watch import HangWatch, RankPlace
from lightning_air.health.hangs import HangRule, RankReport, judge
from lightning_air.health.progress import Progress
from lightning_air.health.sending import Sender
from lightning_air.health.stacks import all_stacks, where_is

CHECK = 0.1


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


# ---- what is too long ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1_000), max_size=250), st.floats(1, 100), st.floats(1, 600))
def test_the_limit_is_a_multiple_of_the_median_of_the_last_hundred_steps(
    seconds: list[float], multiple: float, minimum: float
) -> None:
    clock = Clock()
    progress = Progress(clock)
    rule = HangRule(multiple_of_step=multiple, min_seconds=minimum, pause_seconds=1_000_000)
    for number, each in enumerate(seconds):
        progress.batch_start("training", number)
        clock.seconds += each
        progress.batch_end("training", number)
    usual = statistics.median(seconds[-101:]) if len(seconds) >= 3 else None
    expected = 1_000_000 if usual is None else max(minimum, multiple * usual)
    assert rule.limit_seconds(progress) == pytest.approx(expected)


def test_what_is_no_usual_batch_has_the_room_of_a_pause() -> None:
    progress, rule = Progress(), HangRule(min_seconds=10, pause_seconds=900)
    seen = [rule.limit_seconds(progress)]
    for number in range(4):
        progress.batch_start("training", number)
        seen.append(rule.limit_seconds(progress))
        progress.batch_end("training", number)
    seen.append(rule.limit_seconds(progress))
    progress.pause("saving a checkpoint")
    seen.append(rule.limit_seconds(progress))
    progress.batch_start("evaluation", 0)
    seen.append(rule.limit_seconds(progress))
    assert seen == [900, 900, 900, 900, 10, 10, 900, 900]


def test_a_mark_tells_where_the_loop_is() -> None:
    progress = Progress()
    progress.batch_start("training", 7)
    assert progress.mark[2:] == ("training", "in training batch 7", 0)
    progress.batch_end("training", 7)
    assert progress.mark[2:] == ("training", "after training batch 7", 1)
    progress.batch_start("evaluation", 0)
    progress.batch_end("evaluation", 0)
    assert progress.mark[2:] == ("evaluation", "after evaluation batch 0", 1)
    assert progress.mark.number == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_seconds": 0}, ValueError, "min_seconds must be at least 1 and finite, got 0"),
        ({"min_seconds": "300"}, TypeError, "min_seconds must be a number, got '300'"),
        ({"multiple_of_step": 0.5}, ValueError, "multiple_of_step must be at least 1 and finite, got 0.5"),
        ({"pause_seconds": 10}, ValueError, "pause_seconds must be at least min_seconds=300, got 10"),
        ({"action": "checkpoint_stop"}, ValueError, "action must be one of 'log', 'warn', 'abort', got 'checkpoint_s"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HangRule(**options)


# ---- whom the others wait for ----------------------------------------------------------------------------------------

REDUCE = Collective("gloo:all_reduce", 12, "default_pg")


def report(rank: int, number: int = 10, *collectives: Collective) -> RankReport:
    return RankReport(
        global_rank=rank,
        node_rank=0,
        local_rank=rank,
        number=number,
        where="in training batch 4",
        seconds=31.0,
        line=f"forward (model.py:{rank})",
        collectives=collectives,
    )


@pytest.mark.parametrize(
    ("reports", "silent", "gone", "culprits", "text"),
    [
        ([report(0)], [1], [], (1,), "No answer from rank 1: stopped, dead, or stuck outside of Python. Rank 0 (node"),
        ([report(0, 10, REDUCE)], [], [1], (1,), "The others wait for rank 1, whose run has ended"),
        (
            [report(0, 10, REDUCE), report(1), report(2, 10, REDUCE)],
            [],
            [],
            (1,),
            (
                "The others wait for rank 1: rank 1 (node 0, local rank 1) is in training batch 4 since 31 s, at "
                "forward (model.py:1). Rank 0 (node 0, local rank 0) is in training batch 4 since 31 s, at forward "
                "(model.py:0), waiting in gloo:all_reduce (number 12 of default_pg); rank 2"
            ),
        ),
        ([report(0, 11), report(1, 10)], [], [], (1,), "Behind the others: rank 1 (node 0"),
        ([report(0, 11, REDUCE), report(1, 10, REDUCE)], [], [], (1,), "Behind the others: rank 1 (node 0"),
        ([report(0), report(1)], [], [], (0, 1), "Rank 0 (node 0, local rank 0) is in training batch 4 since 31 s"),
        (
            [report(0, 10, REDUCE._replace(name="gloo:barrier")), report(1, 10, REDUCE)],
            [],
            [],
            (0, 1),
            "They wait in different collectives: the ranks have not taken the same way through the program.",
        ),
    ],
)
def test_the_one_that_holds_up_the_others_is_named(
    reports: list[RankReport], silent: list[int], gone: list[int], culprits: tuple[int, ...], text: str
) -> None:
    verdict = judge(reports, silent, gone)
    assert verdict.culprits == culprits
    assert text in verdict.text


def test_of_many_ranks_a_few_are_told() -> None:
    verdict = judge([report(rank, 10, REDUCE) for rank in range(500)], list(range(500, 600)), [])
    assert "No answer from ranks 500, 501, 502, 503, 504, 505, 506, 507 and 92 more:" in verdict.text
    assert len(verdict.text) < 2_000


def test_a_report_survives_the_store() -> None:
    whole = report(3, 10, REDUCE)
    assert RankReport.decode(whole.encode().encode()) == whole


# ---- what a process tells of itself ----------------------------------------------------------------------------------


def test_where_a_thread_is_is_its_own_line_and_what_it_waits_in() -> None:
    begun, end = threading.Event(), threading.Event()

    def waits_here() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    begun.wait()
    try:
        deadline = time.monotonic() + 20
        while "threading.py" not in (line := where_is(thread.ident or 0)):
            assert time.monotonic() < deadline
        assert line.startswith("waits_here (health/test_hangs.py:")
        assert "which is in wait (" in line
        assert "in waits_here" in all_stacks()
    finally:
        end.set()
        thread.join()
    assert where_is(thread.ident or 0) == "nowhere: its thread has ended"


def test_what_is_recorded_of_collectives_may_be_anything() -> None:
    assert isinstance(recorded_collectives(), list)
    entries = [
        {"profiling_name": "gloo:all_reduce", "collective_seq_id": 1, "process_group": ["0", "pg"], "retired": True},
        {"profiling_name": "gloo:barrier", "collective_seq_id": 2, "process_group": ["0", "pg"], "retired": False},
        {"retired": False, "time_discovered_completed_ns": 5},
        {"retired": False, "process_group": []},
        {},
    ]
    assert [str(each) for each in pending(entries)] == [
        "gloo:barrier (number 2 of pg)",
        "a collective (number 0 of its group)",
    ]


# ---- finding it ------------------------------------------------------------------------------------------------------


class Rank:
    """One rank of some in this process, whose time a test sets."""

    def __init__(self, folder: Path, clock: Clock, global_rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.clock = clock
        self.progress = Progress(clock)
        self.told: list[tuple[str, str, int]] = []
        self.left: list[str] = []
        self.closed = threading.Event()
        place = RankPlace(
            global_rank=global_rank, local_rank=global_rank, world_size=world_size, thread_ident=threading.get_ident()
        )
        self.watch = HangWatch(
            place,
            self.progress,
            HangRule(**{"min_seconds": 10, "multiple_of_step": 20, "pause_seconds": 100, **options}),
            folder,
            tell=lambda *what: self.told.append(what),
            sender=Sender(),
            leave=self.left.append,
            check_seconds=CHECK,
            gather_seconds=0.0,
            clock=clock,
        )

    def trains(self, num_steps: int = 5) -> "Rank":
        for number in range(num_steps):
            self.progress.batch_start("training", number)
            self.clock.seconds += 0.01
            self.progress.batch_end("training", number)
        return self

    def looks(self, seconds: float, store: dist.Store | None = None) -> list[str]:
        """Look for so long; return the kinds of what was told."""
        for _ in range(round(seconds / CHECK)):
            self.clock.seconds += CHECK
            self.watch.look(store, self.closed)
        return [kind for kind, _, _ in self.told]


def test_a_loop_that_stands_still_is_found_after_its_limit_once_and_is_over_when_it_goes_on(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Clock()).trains()
    rank.progress.batch_start("training", 5)
    assert rank.looks(10.0) == []
    assert rank.looks(0.3) == ["hang"]
    assert rank.looks(100.0) == ["hang"]
    _, message, level = rank.told[0]
    assert message.startswith("The run has not gone on for 10 s. Rank 0 (node 0, local rank 0) is in training batch 5")
    assert "looks (health/test_hangs.py:" in message
    assert level == logging.WARNING
    (folder,) = tmp_path.iterdir()
    assert folder.name in message
    assert {path.name for path in folder.iterdir()} == {"hang.txt", "rank-0.txt"}
    assert "test_a_loop_that_stands_still" in (folder / "rank-0.txt").read_text()
    rank.progress.batch_end("training", 5)
    assert rank.looks(1.0) == ["hang", "hang_over"]
    rank.progress.batch_start("training", 6)
    assert rank.looks(300.0) == ["hang", "hang_over", "hang"]


def test_slow_batches_and_pauses_are_no_hang(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Clock())
    for number in range(5):
        rank.progress.batch_start("training", number)
        assert rank.looks(9.0) == []
        rank.progress.batch_end("training", number)
    rank.progress.batch_start("training", 5)
    assert rank.looks(100.0) == [], "twenty times the nine seconds of a step"
    rank.progress.pause("saving a checkpoint")
    assert rank.looks(99.0) == []
    assert rank.looks(2.0) == ["hang"]


def test_time_in_which_the_process_was_stopped_is_not_counted(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Clock()).trains()
    rank.looks(5.0)
    rank.clock.seconds += 10_000
    assert rank.looks(4.0) == []
    assert rank.looks(2.0) == ["hang"]


def test_the_levels_of_the_actions(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "log", Clock(), action="log").trains()
    rank.looks(12.0)
    assert [level for _, _, level in rank.told] == [logging.INFO]
    assert rank.left == []
    rank = Rank(tmp_path / "abort", Clock(), action="abort").trains()
    rank.looks(12.0)
    (message,) = rank.left
    assert rank.told == [("hang", message, logging.WARNING)]
    assert message.endswith("All processes are ended, with exit status 75; resume from the last checkpoint.")


def test_a_folder_that_cannot_be_written_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    rank = Rank(tmp_path / "file" / "folder", Clock()).trains()
    assert rank.looks(12.0) == ["hang"]
    assert "The stacks could not be written to" in caplog.text


def test_all_ranks_tell_where_they_are_when_one_finds_it(tmp_path: Path) -> None:
    """Rank 1 stands still; rank 0 has more room, and so would not have found it by itself."""
    store, clock = dist.HashStore(), Clock()
    first = Rank(tmp_path / "0", clock, 0, 2, min_seconds=90).trains()
    second = Rank(tmp_path / "1", clock, 1, 2).trains(4)
    second.looks(12.0, store)
    assert second.told == [], "what is told, rank 0 tells"
    assert first.looks(0.2, store) == ["hang"]
    message = first.told[0][1]
    assert "Behind the others: rank 1 (node 0, local rank 1) is after training batch 3" in message
    (folder,) = (tmp_path / "0").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["hang.txt", "rank-0.txt", "rank-1.txt"]
    (own,) = (tmp_path / "1").iterdir()
    assert (own.name, [path.name for path in own.iterdir()]) == (folder.name, ["rank-1.txt"])


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_rank_that_does_not_answer_is_told_from_one_that_has_ended(tmp_path: Path, has_ended: bool) -> None:
    store, clock = dist.HashStore(), Clock()
    first, second = Rank(tmp_path, clock, 0, 2).trains(), Rank(tmp_path, clock, 1, 2)
    if has_ended:
        second.watch.say_goodbye(store)
    assert first.looks(12.0, store) == ["hang"]
    expected = "The others wait for rank 1, whose run has ended" if has_ended else "No answer from rank 1:"
    assert expected in first.told[0][1]


def test_without_a_store_each_rank_finds_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    first, second = Rank(tmp_path, clock, 0, 2).trains(), Rank(tmp_path, clock, 1, 2, action="abort").trains()
    assert first.looks(12.0) == ["hang"]
    assert "The other ranks could not be asked." in first.told[0][1]
    second.looks(12.0)
    assert "rank 1 (node 0, local rank 1) is after training batch 4" in caplog.text
    assert len(second.left) == 1


def test_a_run_that_is_closed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Clock(), action="abort").trains()
    rank.closed.set()
    assert rank.looks(12.0) == []
    assert rank.left == []


def test_ranks_leave_together_the_first_one_last(tmp_path: Path) -> None:
    store, clock = dist.HashStore(), Clock()
    order: list[int] = []
    ranks = [Rank(tmp_path, clock, number, 2, action="abort").trains() for number in range(2)]

    def leaving(number: int) -> Callable[[str], None]:
        def leave(reason: str) -> None:
            order.append(number)
            ranks[number].left.append(reason)

        return leave

    for number, rank in enumerate(ranks):
        rank.watch._leave = leaving(number)
        rank.watch._gather_seconds = 60.0
        rank.watch.look(store, rank.closed)
    clock.seconds += CHECK
    for rank in ranks:
        rank.watch._stalled_seconds = 11.0
    threads = [threading.Thread(target=rank.watch.look, args=(store, rank.closed)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == [1, 0]
    assert ranks[0].left == ranks[1].left
