"""Finds out that the loop of a rank has stopped, has all ranks tell where they are, and says whom they wait for.

Every rank has one: it looks at its own marks, and in the store whether another rank has found a hang. Then each writes
its stacks into a folder and puts them into the store; rank 0 gathers them, tells, and sends them to the run's
artifacts. With `abort` every process then leaves a marker and ends: within

    limit + check_seconds + GATHER_SECONDS + SEND_SECONDS + LEAVE_SECONDS

of the last mark, where the limit is what `HangRule` says. A store that does not answer adds ANSWER_SECONDS, a file
system that does not adds a few times FILE_SECONDS. The thread needs Python's lock: a rank whose loop keeps it, or whose
process is stopped, does not answer, and the others tell that.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_air.health.collectives import pending, recorded_collectives
from lightning_air.health.hangs import HangRule, RankReport, Verdict, judge
from lightning_air.health.leaving import ABORT_EXIT_CODE
from lightning_air.health.patient_store import RankStore
from lightning_air.health.progress import Progress
from lightning_air.health.sending import SEND_SECONDS, Sender
from lightning_air.health.stacks import all_stacks, where_is
from lightning_air.health.threads import done_within

log = logging.getLogger(__name__)

GATHER_SECONDS = 15.0
"""How long rank 0 waits for the others' reports."""
LEAVE_SECONDS = 5.0
"""How long rank 0, in whose process the store may be, waits for the others to end."""
FILE_SECONDS = 5.0
"""How long writing files may take."""
_MAX_COLLECTIVES_SHOWN = 20
# A look that comes so late after the one before counts for less: the process was stopped, and not its loop alone.
_MAX_LOOKS_COUNTED = 3


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank this is.

    Attributes:
        global_rank: Among all.
        local_rank: On its node.
        node_rank: Its node.
        world_size: How many ranks there are.
        thread_ident: The thread that runs the loop.
    """

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    thread_ident: int


class HangWatch:
    """Watches the loop of this rank. `look` is called by one thread, again and again.

    Args:
        place: Which rank this is.
        progress: The marks of its loop.
        rule: When it hangs; None is never, and then it answers only.
        folder: Where the stacks go.
        tell: Called on rank 0 with the kind of what has happened, a message, and a level of `logging`.
        sender: Used on rank 0 for the run's artifacts.
        leave: Ends this process, with a reason; called for `abort`.
        check_seconds: The time between two looks.
        gather_seconds: How long to wait for the reports of other ranks.
        clock: Seconds that do not jump.
    """

    def __init__(
        self,
        place: RankPlace,
        progress: Progress,
        rule: HangRule | None,
        folder: Path,
        *,
        tell: Callable[[str, str, int], object],
        sender: Sender,
        leave: Callable[[str], object],
        check_seconds: float,
        gather_seconds: float = GATHER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._progress = progress
        self._rule = rule
        self._folder = folder
        self._tell = tell
        self._sender = sender
        self._leave = leave
        self._check_seconds = check_seconds
        self._gather_seconds = gather_seconds
        self._clock = clock
        self._num_hangs = 0
        self._last_look = clock()
        self._stalled_seconds = 0.0
        self._seen_number = -1
        self._told_number: int | None = None  # of the mark at which a hang was told

    def look(self, store: RankStore | None, closed: threading.Event) -> None:
        """See whether the loop goes on here, and whether another rank has found that it does not there.

        Args:
            store: Where the ranks meet; None where they cannot.
            closed: Set when this has to end.

        Raises:
            RuntimeError: The store has failed; so is `OSError`.
        """
        self._measure()
        name = self._hang_here(store)
        if name is None and store is not None and store.check([self._key("begun")]):
            name = store.get(self._key("begun")).decode()
        if name is not None:
            self._attend(name, store, closed)

    def say_goodbye(self, store: RankStore) -> None:
        """Tell the others that this rank's run has ended."""
        store.set(f"gone/{self._place.global_rank}", "1")

    def _measure(self) -> None:
        """Count for how long the mark has been the same, but no time in which nobody could look."""
        now, number = self._clock(), self._progress.mark.number
        passed = min(now - self._last_look, _MAX_LOOKS_COUNTED * self._check_seconds)
        self._last_look = now
        if number == self._seen_number:
            self._stalled_seconds += passed
            return
        if self._told_number is not None and self._place.global_rank == 0:
            self._tell("hang_over", "The run goes on again.", logging.INFO)
        self._told_number, self._seen_number, self._stalled_seconds = None, number, 0.0

    def _hang_here(self, store: RankStore | None) -> str | None:
        """Return the name of the hang that this rank has found, if it has."""
        if self._rule is None or self._told_number is not None:
            return None
        if self._stalled_seconds <= self._rule.limit_seconds(self._progress):
            return None
        name = time.strftime("hang-%Y%m%d-%H%M%S", time.gmtime())
        # Many ranks find it at once; the name of the first holds.
        return name if store is None else store.compare_set(self._key("begun"), "", name).decode()

    def _attend(self, name: str, store: RankStore | None, closed: threading.Event) -> None:
        number, self._num_hangs = self._num_hangs, self._num_hangs + 1
        self._told_number = self._seen_number
        report = self._report()
        self._write(name, [report])
        if self._place.global_rank == 0:
            self._conclude(name, number, report, store, closed)
        else:
            self._tell_alone(name, number, report, store, closed)

    def _report(self) -> RankReport:
        place, mark, entries = self._place, self._progress.mark, recorded_collectives()
        line = where_is(place.thread_ident)
        shown = [
            f"{entry.get('profiling_name')} number {entry.get('collective_seq_id')} of {entry.get('process_group')}, "
            f"{'ended' if entry.get('retired') else 'not ended'}"
            for entry in entries[-_MAX_COLLECTIVES_SHOWN:]
        ]
        report = RankReport(
            global_rank=place.global_rank,
            node_rank=place.node_rank,
            local_rank=place.local_rank,
            number=mark.number,
            where=mark.where,
            seconds=self._stalled_seconds,
            line=line,
            collectives=tuple(pending(entries)),
        )
        text = "\n".join(
            [
                report.describe(),
                "",
                "The last collectives, as torch has recorded them:" if shown else "torch has recorded no collectives.",
                *shown,
                "",
                f"All threads (the loop runs on {place.thread_ident:#018x}):",
                all_stacks(),
            ]
        )
        return replace(report, stacks=text)

    def _conclude(
        self, name: str, number: int, own: RankReport, store: RankStore | None, closed: threading.Event
    ) -> None:
        """On rank 0: gather what the others say, tell, and act."""
        reports, gone = {0: own}, set[int]()
        if store is not None:
            with suppress(RuntimeError, OSError):
                self._gather(number, reports, gone, store, closed)
        if closed.is_set():
            return
        ranks = range(self._place.world_size)
        silent = [rank for rank in ranks if rank not in reports and rank not in gone] if store is not None else []
        verdict = judge([reports[rank] for rank in sorted(reports)], silent, sorted(gone - reports.keys()))
        self._write(name, [reports[rank] for rank in sorted(reports) if rank != 0])
        action = self._rule.action if self._rule is not None else "warn"
        message = self._message(name, verdict, reports)
        self._tell("hang", message, logging.INFO if action == "log" else logging.WARNING)
        paths = self._write_files(name, {"hang.txt": message + "\n"})
        names = [_file_name(rank) for rank in sorted(reports)]
        if paths:
            self._sender.send_files([*paths, *(self._folder / name / each for each in names)], name)
        if action == "abort":
            self._sender.wait()  # before the others end: their end ends this process, too
            self._abort(number, message, reports, store)

    def _message(self, name: str, verdict: Verdict, reports: dict[int, RankReport]) -> str:
        longest = max(report.seconds for report in reports.values())
        ending = ""
        if self._rule is not None and self._rule.action == "abort":
            ending = f" All processes are ended, with exit status {ABORT_EXIT_CODE}; resume from the last checkpoint."
        alone = "" if len(reports) > 1 or self._place.world_size == 1 else " The other ranks could not be asked."
        return (
            f"The run has not gone on for {longest:.0f} s. {verdict.text}{alone} The stacks of all threads are in "
            f"{self._folder / name}.{ending}"
        )

    def _gather(
        self,
        number: int,
        reports: dict[int, RankReport],
        gone: set[int],
        store: RankStore,
        closed: threading.Event,
    ) -> None:
        deadline = self._clock() + self._gather_seconds
        while True:
            for rank in range(self._place.world_size):
                key = f"hang/{number}/rank/{rank}"
                if rank not in reports and store.check([key]):
                    reports[rank] = RankReport.decode(store.get(key))
                elif rank not in reports and store.check([f"gone/{rank}"]):
                    gone.add(rank)
            is_complete = len(reports.keys() | gone) == self._place.world_size
            if is_complete or self._clock() >= deadline or closed.wait(min(0.2, self._check_seconds)):
                return

    def _abort(self, number: int, message: str, reports: dict[int, RankReport], store: RankStore | None) -> None:
        if store is not None:
            with suppress(RuntimeError, OSError):
                store.set(f"hang/{number}/told", message)
                others = [f"hang/{number}/leaves/{rank}" for rank in reports if rank != 0]
                deadline = self._clock() + LEAVE_SECONDS
                while others and not store.check(others) and self._clock() < deadline:
                    time.sleep(0.05)
        self._leave(message)

    def _tell_alone(
        self, name: str, number: int, report: RankReport, store: RankStore | None, closed: threading.Event
    ) -> None:
        """On another rank: give rank 0 the report and, with `abort`, leave with it; or alone, if it does not answer."""
        is_quiet = self._rule is not None and self._rule.action == "log"
        level = logging.INFO if is_quiet else logging.WARNING
        log.log(level, "%s. Its stacks are in %s.", report.describe(), self._folder / name)
        message = f"The run has not gone on for {report.seconds:.0f} s. {report.describe()}."
        is_abort = self._rule is not None and self._rule.action == "abort"
        try:
            if store is not None:
                store.set(f"hang/{number}/rank/{report.global_rank}", report.encode())
                if is_abort:
                    message = self._wait_for_rank_zero(number, message, store, closed)
                    store.set(f"hang/{number}/leaves/{report.global_rank}", "1")
        except (RuntimeError, OSError) as error:
            if not is_abort:
                raise
            log.debug("rank 0 has gone first: %s", error)
        if is_abort and not closed.is_set():
            self._leave(message)

    def _wait_for_rank_zero(self, number: int, message: str, store: RankStore, closed: threading.Event) -> str:
        deadline = self._clock() + self._gather_seconds + SEND_SECONDS + LEAVE_SECONDS
        while self._clock() < deadline and not closed.is_set():
            if store.check([f"hang/{number}/told"]):
                return store.get(f"hang/{number}/told").decode()
            closed.wait(min(0.2, self._check_seconds))
        return message

    def _write(self, name: str, reports: Sequence[RankReport]) -> None:
        self._write_files(name, {_file_name(report.global_rank): report.stacks for report in reports})

    def _write_files(self, name: str, texts: Mapping[str, str]) -> list[Path]:
        """Write files into the folder of a hang, and return their paths; none if that fails, or takes too long."""
        paths: list[Path] = []

        def write() -> None:
            folder = self._folder / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for file_name, text in texts.items():
                    (folder / file_name).write_text(text)
            except OSError as error:
                log.warning("The stacks could not be written to %s: %s", self._folder, error)
            else:
                paths.extend(folder / file_name for file_name in texts)

        if not done_within(FILE_SECONDS, write):
            log.warning("%s does not answer; the stacks are not written there.", self._folder)
            return []
        return paths

    def _key(self, what: str) -> str:
        return f"hang/{self._num_hangs}/{what}"


def _file_name(global_rank: int) -> str:
    return f"rank-{global_rank}.txt"
