"""One run's metrics on rank 0, from where they are logged to the server: spool, thinner, writer and budget together.

Made when a run is opened, closed when a stage of training ends; what the server has not taken by then stays in the
spool's folder, and whoever opens the run again, or replays the folder, goes on there.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_air.tracking.charging import Charge
from lightning_air.tracking.door import Door, open_door
from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.metric_names import renamed_warning
from lightning_air.tracking.progress import Progress, load_progress, save_progress
from lightning_air.tracking.replaying import LeftRecords
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.segments import Position
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RunInfo, read_run_info, remove_folder, write_run_info
from lightning_air.tracking.warn_once import Warn
from lightning_air.tracking.window import Event
from lightning_air.tracking.writer import Writer, WriterStats

# A checkpoint should not grow by more than a few megabytes because a server is away; what it lacks is in the spool.
_MAX_TAIL_RECORDS = 20_000


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What was logged and not acknowledged at one moment, for a checkpoint: the node's disk dies with the node.

    Attributes:
        thinner: The snapshot before the first record.
        records: Timestamp in ms, step, values; in their order.
        is_cut: There are more, which only the spool has.
    """

    thinner: dict[str, Any]
    records: list[tuple[int, int, dict[str, float]]]
    is_cut: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as a checkpoint can have it."""
        return {"thinner": self.thinner, "records": [list(record) for record in self.records]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Tail | None":
        """Return the tail in a logger's state in a checkpoint; None if there is none."""
        tail = state.get("tail")
        if not isinstance(tail, dict):
            return None
        records = [(int(timestamp_ms), int(step), dict(values)) for timestamp_ms, step, values in tail["records"]]
        return cls(thinner=dict(tail["thinner"]), records=records)


class Tracker:
    """The metrics of one run. `append` is any thread's, all else the training thread's.

    Args:
        run_id: MLflow's.
        tracking_uri: Of the server that has the run.
        folder: The run's spool. What an earlier process has left in it is sent first.
        new_thinner: Makes the thinner of a run, given the points that it has already.
        mark: What the run says that it has already.
        tail: Of the checkpoint that the run is continued from; not used if the folder holds more.
        flush_seconds: A point waits no longer for others to share its request.
        full_record: Keep all records.
        on_part: Called when a part of the full record is complete, on the writer's thread or in `close`.
        on_events: Told of values that are not finite, on the writer's thread.
        warn: Told of trouble.

    Raises:
        SpoolInUseError: Another process logs into the run from this machine.
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        run_id: str,
        tracking_uri: str,
        folder: Path,
        *,
        new_thinner: Callable[[int], RunThinner],
        mark: int,
        tail: Tail | None = None,
        flush_seconds: float,
        full_record: bool = False,
        on_part: Callable[[], object] = lambda: None,
        on_events: Callable[[list[Event]], object] = lambda _: None,
        warn: Warn,
        door: Callable[[str], Door] = open_door,
    ) -> None:
        self.run_id = run_id
        self.folder = folder
        self.seconds_blocked = 0.0
        self._warn = warn
        self._on_events = on_events
        self._spool = Spool(folder, warn=warn)
        self._keeps_all = full_record
        self._record: FullRecord | None = None
        try:
            thinner, spent = self._begin(tracking_uri, new_thinner, mark, tail)
            progress = load_progress(folder)
            if full_record or read_run_info(folder).full_record or progress.kept is not None:
                self._record = FullRecord(folder, progress.kept, warn=warn, on_part=on_part)
        except BaseException:
            self._spool.close()
            raise
        self._thinner = thinner
        self._plan = thinner.newest.thinner.plan()
        self._used = thinner.used
        opened = door(tracking_uri)
        self._charge = Charge(opened, run_id, spent=spent, mark=mark, cap=thinner.newest.thinner.cap)
        self._lock = threading.Lock()
        self._writer = Writer(
            self._spool,
            thinner,
            opened,
            run_id,
            progress=progress,
            before_send=self._charge,
            observe=self._observe,
            record=self._record,
            warn=warn,
            flush_seconds=flush_seconds,
        )
        self._writer.start()
        self._is_closed = False

    def _begin(
        self, tracking_uri: str, new_thinner: Callable[[int], RunThinner], mark: int, tail: Tail | None
    ) -> tuple[RunThinner, int]:
        """Return the thinner at the progress, and how many points the run may have beside those sent of the spool."""
        new = new_thinner(mark)
        try:
            info = read_run_info(self.folder)
        except ValueError:  # nothing is left
            if tail is None:
                write_run_info(
                    self.folder,
                    RunInfo(
                        run_id=self.run_id,
                        tracking_uri=tracking_uri,
                        thinner=new.snapshot(),
                        full_record=self._keeps_all,
                    ),
                )
                return RunThinner.from_snapshot(new.snapshot()), new.used
            lay_down(self._spool, tail, run_id=self.run_id, tracking_uri=tracking_uri)
            info, num_left = read_run_info(self.folder), self._spool.num_appended
        else:
            num_left = self._spool.count_left(load_progress(self.folder).position)
        progress = load_progress(self.folder)
        thinner = RunThinner.from_snapshot(progress.thinner or info.thinner)
        # Another machine may have sent what this folder and the tail know nothing of; the mark counts it.
        spent = spent_elsewhere(info, progress, mark)
        thinner.hand_over(new, after=num_left, spent=spent + progress.num_sent)
        # Before the first record of this attempt, or the next one would not know where it begins.
        save_progress(self.folder, replace(progress, thinner=thinner.snapshot()))
        return thinner, spent

    # ---- logging -----------------------------------------------------------------------------------------------------

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Keep what was logged at a step. Never waits for a server, never raises for the disk."""
        begun = time.perf_counter()
        self._spool.append(int(time.time() * 1000), step, values)
        self.seconds_blocked += time.perf_counter() - begun

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until what was logged before is acknowledged, and return whether it is; 0 only asks for it."""
        return self._writer.flush(deadline_seconds)

    def close(self, deadline_seconds: float) -> bool:
        """Send all, and stop; return whether nothing is left. Idempotent."""
        is_complete = self._writer.close(deadline_seconds)
        if is_complete and not self._is_closed:
            try:
                remove_folder(self.folder)  # before others may have it
            except OSError as error:
                self._warn("remove", f"{self.folder} cannot be deleted: {error}. All that it held has arrived.")
        self._is_closed = True
        self._spool.close()
        if self._record is not None:
            self._record.finish()
        return is_complete

    # ---- what is known -----------------------------------------------------------------------------------------------

    def plan(self) -> str:
        """Return in one line how the budget is spent."""
        with self._lock:
            return self._plan

    @property
    def used(self) -> int:
        """Points charged to the run; never less than were sent."""
        with self._lock:
            return max(self._used, self._charge.mark)

    @property
    def stats(self) -> WriterStats:
        """What became of what was logged."""
        return self._writer.stats()

    def snapshot(self) -> dict[str, Any]:
        """Return the thinner's state, for another tracker of the run. After `close`."""
        return self._thinner.snapshot()

    def tail(self) -> Tail:
        """Return what is not acknowledged yet, as far as it belongs into a checkpoint."""
        for _ in range(10):
            progress = load_progress(self.folder)
            snapshot = progress.thinner or read_run_info(self.folder).thinner
            records = LeftRecords(self.folder)
            try:
                read = records.read(progress.position, _MAX_TAIL_RECORDS + 1)
            except OSError:
                continue
            finally:
                records.close()
            if load_progress(self.folder).position.segment > max(1, progress.position.segment):
                continue  # the writer has deleted a segment meanwhile
            kept = [(record.timestamp_ms, record.step, dict(record.values)) for _, record in read[:_MAX_TAIL_RECORDS]]
            return Tail(thinner=dict(snapshot), records=kept, is_cut=len(read) > len(kept))
        raise OSError(f"{self.folder} cannot be read.")

    # ---- what changes ------------------------------------------------------------------------------------------------

    def set_horizon(self, horizon: int | None) -> None:
        """Say which step is the run's last."""
        self._writer.ask(lambda thinner: thinner.newest.thinner.set_horizon(horizon))

    def set_system(self, points: int) -> None:
        """Say how many points system metrics will take."""
        self._writer.ask(lambda thinner: thinner.newest.thinner.set_system(points))

    def roll_back(self, beyond: Mapping[str, int]) -> None:
        """Go on from an earlier step than these keys have values of."""
        self._writer.ask(lambda thinner: thinner.roll_back(beyond))

    # ---- on the writer's thread --------------------------------------------------------------------------------------

    def _observe(self, thinner: RunThinner) -> None:
        plan, used = thinner.thinner.plan(), thinner.used
        with self._lock:
            self._plan, self._used = plan, used
        for text in thinner.thinner.warnings_due():
            self._warn(text, text)
        if renamed := thinner.take_renamed():
            text = renamed_warning("metric", renamed)
            self._warn(text, text)
        if events := thinner.take_events():
            self._on_events(events)


def lay_down(spool: Spool, tail: Tail, *, run_id: str, tracking_uri: str) -> None:
    """Put a tail into a spool that is no run's yet.

    Raises:
        OSError: The folder cannot be written.
    """
    spool.release(Position(spool.end.segment + 1, 0))  # of a tail that was not laid down to its end
    for timestamp_ms, step, values in tail.records:
        spool.append(timestamp_ms, step, values)
    # Last: who finds it finds all.
    write_run_info(spool.folder, RunInfo(run_id=run_id, tracking_uri=tracking_uri, thinner=tail.thinner))


def spent_elsewhere(info: RunInfo, progress: Progress, mark: int) -> int:
    """Return how many points a run may have beside those sent of a spool.

    Args:
        info: The spool's.
        progress: The spool's.
        mark: What the run's tag says: it counts what was sent of this spool, and from other machines.
    """
    return max(restore_thinner(info.thinner).used, mark - progress.num_sent)


def restore_thinner(snapshot: Mapping[str, Any]) -> RunThinner:
    """Return the thinner of a spool's folder, for `replay`."""
    return RunThinner.from_snapshot(snapshot)
