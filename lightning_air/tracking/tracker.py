"""One run's metrics on rank 0, from where they are logged to the server: spool, thinner, writer and budget together.

Made when a run is opened, closed when a stage of training ends; what the server has not taken by then stays in the
spool's folder, and whoever opens the run again, or replays the folder, goes on there.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_air.tracking.beginning import Beginning, has_run, restore_thinner
from lightning_air.tracking.charging import Charge
from lightning_air.tracking.door import Door, open_door
from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.metric_names import renamed_warning
from lightning_air.tracking.progress import load_progress
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import remove_folder
from lightning_air.tracking.tails import Tail, copy_tail
from lightning_air.tracking.warn_once import Warn
from lightning_air.tracking.window import Event
from lightning_air.tracking.writer import Writer, WriterStats

__all__ = ["Tracker", "restore_thinner"]

_TRIES = 10


class Tracker:
    """The metrics of one run. `append` is any thread's, all else the training thread's.

    Args:
        run_id: MLflow's.
        tracking_uri: Of the server that has the run.
        folder: The run's spool. What an earlier process has left in it is sent first.
        new_thinner: Makes the thinner of a run, given the points that it has already.
        charged: What the run's tags say: the points that each writer may have sent.
        found: Points that the run had when no writer had come to it.
        shown: Time in ms and step of the latest value of each key that the run had when it was opened.
        earlier: Of the same run and process, and closed: this one goes on where it ended. None at first.
        tail: Of the checkpoint that the run is continued from; not used if the folder holds more, or after an earlier
            one, which has had it.
        flush_seconds: A point waits no longer for others to share its request.
        full_record: Keep all records.
        on_part: Called when a part of the full record is complete, on the writer's thread or in `close`.
        on_events: Told of values that are not finite, on the writer's thread.
        warn: Told of trouble.

    Raises:
        SpoolInUseError: Another process logs into the run from this machine.
        OSError: The folder cannot be written. Not if only the disk is full.
    """

    def __init__(
        self,
        run_id: str,
        tracking_uri: str,
        folder: Path,
        *,
        new_thinner: Callable[[int], RunThinner],
        charged: Mapping[str, int],
        found: int = 0,
        shown: Mapping[str, tuple[int, int]] | None = None,
        earlier: "Tracker | None" = None,
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
        beginning = Beginning(folder, run_id, tracking_uri, found=found, full_record=full_record, warn=warn)
        if tail is not None and earlier is None and not has_run(folder):
            beginning.lay_down(tail, shown or {})
        self._spool = Spool(folder, warn=warn)
        self._record: FullRecord | None = None
        try:
            begun = beginning.known(self._spool)
            if begun is not None and earlier is None:
                begun = beginning.take_over(self._spool, begun, new_thinner, charged)
            elif begun is None and earlier is None:
                begun = beginning.anew(self._spool, new_thinner(sum(charged.values()) + found))
            elif begun is None:
                begun = beginning.anew(self._spool, *_handed_on(earlier))
            # Else the thinner goes on where the server's acknowledgements ended.
            thinner, info, progress = begun.thinner, begun.info, begun.progress
            if full_record or info.full_record or progress.kept is not None:
                self._record = FullRecord(folder, progress.kept, warn=warn, on_part=on_part)
        except BaseException:
            self._spool.close()
            raise
        self._info = info
        self._thinner = thinner
        self._plan, self._used = thinner.newest.plan(), thinner.newest.used
        opened = door(tracking_uri)
        self._charge = Charge(
            opened,
            run_id,
            writer=info.writer,
            cap=thinner.newest.cap,
            earlier=info.charged,
            found=info.found,
            on_others=lambda num_points: self._writer.ask(lambda asked: asked.spend_elsewhere(num_points)),
        )
        self._lock = threading.Lock()
        self._writer = Writer(
            self._spool,
            thinner,
            opened,
            run_id,
            progress=progress,
            before_send=self._charge,
            settle=self._charge.settle,
            observe=self._observe,
            record=self._record,
            info=info,
            warn=warn,
            flush_seconds=flush_seconds,
        )
        self._writer.start()
        self._is_closed = False

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
        """Points that the run has by now, those included that it may still get of what is logged already."""
        with self._lock:
            return self._used

    @property
    def stats(self) -> WriterStats:
        """What became of what was logged."""
        return self._writer.stats()

    def tail(self) -> Tail:
        """Return what is not acknowledged yet, as far as it belongs into a checkpoint.

        Raises:
            OSError: The folder cannot be read.
        """
        for _ in range(_TRIES):
            progress = load_progress(self.folder)
            snapshot = progress.thinner or self._info.thinner
            copied = copy_tail(self.folder, progress.position)
            has_gap = load_progress(self.folder).position.segment > max(1, progress.position.segment)
            if copied is not None and not has_gap:  # the writer has deleted no segment meanwhile
                pieces, is_cut = copied
                return Tail(thinner=snapshot, pieces=pieces, is_cut=is_cut)
        raise OSError(f"{self.folder} cannot be read.")

    # ---- what changes ------------------------------------------------------------------------------------------------

    def set_horizon(self, horizon: int | None) -> None:
        """Say which step is the run's last."""
        self._writer.ask(lambda thinner: thinner.newest.set_horizon(horizon))

    def roll_back(self, step: int, beyond: Mapping[str, int]) -> None:
        """Go on from an earlier step than was reached.

        Args:
            step: The last one that still counts.
            beyond: Keys to the later steps that the server has values of. What is left in the folder is known here.
        """
        self._writer.ask(lambda thinner: thinner.roll_back(step, beyond))

    # ---- on the writer's thread --------------------------------------------------------------------------------------

    def _observe(self, thinner: RunThinner) -> None:
        plan, used = thinner.newest.plan(), thinner.newest.used
        with self._lock:
            self._plan, self._used = plan, used
        for text in thinner.thinner.warnings_due():
            self._warn(text, text)
        if renamed := thinner.take_renamed():
            text = renamed_warning("metric", renamed)
            self._warn(text, text)
        if events := thinner.take_events():
            self._on_events(events)


def _handed_on(earlier: Tracker | None) -> tuple[RunThinner, str, int]:
    """Return what the next tracker of the same process goes on with: the thinner, who is charged, and with how much."""
    assert earlier is not None
    thinner = restore_thinner(earlier._thinner.snapshot())  # noqa: SLF001 - of its own class
    thinner.begin_anew()
    return thinner, earlier._charge.writer, earlier._charge.own  # noqa: SLF001
