"""`AsyncUCCheckpointIO`: checkpoints that training does not wait for, as a part of Lightning's.

Under AirStrategy every rank takes part, each with its own share. Under a stock single-process strategy or stock DDP,
Lightning calls a CheckpointIO on rank 0 only, and rank 0 does all of it.
"""

import atexit
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_air._lightning import CheckpointIO, PathLike, rank_zero_warn
from lightning_air.checkpoint.last_path import unwrapped
from lightning_air.checkpoint.loading import Loader, LoadOptions, Verify
from lightning_air.checkpoint.matching import Into, Like
from lightning_air.checkpoint.places import parse_place
from lightning_air.checkpoint.publishing import Details
from lightning_air.checkpoint.ranks import Alone, Ranks, Together, any_rank, ranks_sharing
from lightning_air.checkpoint.saver import CheckpointFailedError, Saver, SaveReport
from lightning_air.checkpoint.scratch import sweep_scratch
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.writing import WriteOptions
from lightning_air.runtime import staging_area


class AsyncUCCheckpointIO(CheckpointIO):
    """Save and load checkpoints on Unity Catalog volumes, object stores and local folders, while training goes on.

    A checkpoint is a folder of shards, `meta.pt` and `manifest.json`, and becomes visible with `.metadata`, which is
    written last, once all else has arrived and was checked. Training waits only for the copy of this rank's share into
    host memory, and for a save before that has not ended. What fails in the background is raised on every rank at the
    next save, or at the end.

    Loading verifies before it uses, passes a damaged checkpoint over for the newest valid one beside it and says so,
    and takes any world size and sharding, Lightning's own sharded folders, plain `dcp.save`d ones, and single `.ckpt`
    files.

    Args:
        staging_dir: A local folder for files on their way to or from a volume or store. Default: the system's temporary
            folder. Local checkpoints need none.
        max_upload_workers: How many files a rank sends or fetches at once.
        verify: What loading compares with the manifest: "digest" (all bytes that are used), "size", or "off".
        on_failure: "raise" a failed save at the next one, or "warn" and train on.
        max_consecutive_failures: With "warn": so many failed saves in a row are raised after all.
        upload_timeout: How long one save or load may spend on moving files, retries included, in seconds.
        drain_timeout: How long the end of a run waits for the last save, in seconds.
        overlap_copy: Let the copy of trained parameters and optimizer state overlap with the next forward and backward;
            it is waited for before any optimizer's step. Only for a run in which nothing but optimizers changes them:
            no weight averaging, no clipping of weights by hand.

    Attributes:
        loaded_from: The checkpoint last loaded, behind pointers and after damaged ones.
        passed_over: Those found damaged before it.

    Raises:
        ValueError: If an option is wrong.
    """

    collective: Literal[True] = True

    def __init__(
        self,
        *,
        staging_dir: str | Path | None = None,
        max_upload_workers: int = 8,
        verify: Verify = "digest",
        on_failure: Literal["raise", "warn"] = "raise",
        max_consecutive_failures: int = 3,
        upload_timeout: float = 1800.0,
        drain_timeout: float = 600.0,
        overlap_copy: bool = False,
    ) -> None:
        _one_of("verify", verify, ("digest", "size", "off"))
        _one_of("on_failure", on_failure, ("raise", "warn"))
        _at_least_one("max_upload_workers", max_upload_workers)
        _at_least_one("max_consecutive_failures", max_consecutive_failures)
        _positive("upload_timeout", upload_timeout)
        _positive("drain_timeout", drain_timeout)
        _one_of("overlap_copy", overlap_copy, (True, False))
        self._staging_dir = staging_area(staging_dir).path
        self._max_upload_workers = max_upload_workers
        self._verify: Verify = verify
        self._on_failure: Literal["raise", "warn"] = on_failure
        self._max_consecutive_failures = max_consecutive_failures
        self._upload_timeout = float(upload_timeout)
        self._drain_timeout = float(drain_timeout)
        self._overlap_copy = overlap_copy
        self._sharding = "none"
        self._shelf = Shelf()
        self._ranks: Ranks = Alone()
        self._sharing = [0]
        self._saver: Saver | None = None
        self._reports: list[SaveReport] = []
        self._step_hook: Any = None
        self._is_over = False  # the run has ended, and no other has begun
        self._is_abandoned = False  # a save was given up, and its thread may still sit in our group
        self._outer_exception: BaseException | None = None  # the user's own, around the whole run
        self.loaded_from: str | None = None
        self.passed_over: set[str] = set()

    def connect(self, sharding: str) -> None:
        """Meet the other ranks, over a group of our own. Collective: AirStrategy calls this on every rank, in setup.

        Args:
            sharding: How the state is spread, for the manifest.
        """
        self._sharding = sharding
        self.begin()
        must_meet = not isinstance(self._ranks, Together) or not self._ranks.is_current or self._is_abandoned
        if not any_rank(must_meet):  # one rank may have given up a save that another saw end
            return
        # One rank may still upload while another waits for it.
        ranks = Together(2 * self._upload_timeout + 300)
        self._sharing = ranks_sharing(self._staging_dir, ranks)
        self._ranks, self._is_abandoned = ranks, False

    def begin(self) -> None:
        """Begin a run: saves are asynchronous from here to `teardown`, and synchronous after it. Any rank by itself."""
        self._is_over = False
        self._outer_exception = sys.exception()

    # ---- saving ------------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Begin to save, and return once the state may change.

        Collective under AirStrategy: every rank calls this; otherwise rank 0 does.

        Args:
            checkpoint: Lightning's.
            path: A local path, `/Volumes/…`, `dbfs:/Volumes/…` or a URL; the same on every rank. If a checkpoint is
                there, the new one gets a name of its own, `last@2.ckpt`, and replaces it once it is published.
            storage_options: Must be None.

        Raises:
            CheckpointFailedError: If the save before this one failed.
            ValueError: If the path is wrong.
        """
        if storage_options is not None:
            raise TypeError(f"AsyncUCCheckpointIO takes no storage_options, got {storage_options!r}. Pass None.")
        root = parse_place(path).root
        details = Details(
            step=int(checkpoint.get("global_step", 0)),
            epoch=int(checkpoint.get("epoch", 0)),
            world_size=self._ranks.world_size,
            sharding=self._sharding,
        )
        # After the end of a run nobody may come to finish what was begun.
        overlap = self._overlap_copy and not self._is_over
        self._saver_now().save(checkpoint, root, details, overlap=overlap, wait=self._is_over)

    def save_and_wait(self, checkpoint: dict[str, Any], path: PathLike) -> None:
        """Save, and return once the checkpoint is published. Called as `save_checkpoint` is.

        Raises:
            CheckpointFailedError: If it failed, or did not end within `drain_timeout`.
        """
        self.save_checkpoint(checkpoint, path)
        if not self.settle():
            raise CheckpointFailedError(f"Checkpoint {path} was not published within {self._drain_timeout:g} s.")

    def _saver_now(self) -> Saver:
        if self._saver is None:
            sweep_scratch(self._staging_dir)
            self._saver = Saver(
                self._ranks,
                WriteOptions(
                    staging_dir=self._staging_dir,
                    max_upload_workers=self._max_upload_workers,
                    deadline_seconds=self._upload_timeout,
                    num_sharing_disk=len(self._sharing),
                ),
                self._shelf,
                on_failure=self._on_failure,
                max_consecutive_failures=self._max_consecutive_failures,
                warn=rank_zero_warn,
            )
            atexit.register(self._drain_at_exit)
            if self._overlap_copy:
                saver = self._saver
                self._step_hook = register_optimizer_step_pre_hook(partial(_before_step, saver))
        return self._saver

    @override
    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint once those begun after it are published; never the one that the run resumed from."""
        self._saver_now().remove(parse_place(path).root)

    def point(self, pointer: str, *, link: bool = False) -> None:
        """Let a path, such as "…/last.ckpt", stand for the checkpoint last begun, once that is published.

        Args:
            pointer: In the same folder.
            link: Make a symbolic link where the file system has them; otherwise, and elsewhere, a small file.
        """
        self._saver_now().point(parse_place(pointer).root, link=link)

    def note_scores(self, folder: str, monitor: str, scores: Mapping[str, float]) -> None:
        """Note how good the checkpoints in a folder are, beside them, in the background.

        Args:
            folder: Of the checkpoints.
            monitor: The metric that they were rated by.
            scores: By the checkpoints' names.
        """
        self._saver_now().note_scores(folder, monitor, scores)

    def discard(self, paths: Sequence[str]) -> None:
        """Delete exactly these checkpoints, once the saves begun before are published; never the one resumed from."""
        self._saver_now().discard([parse_place(path).root for path in paths])

    def sweep(self, folders: Sequence[str]) -> None:
        """Delete folders that killed saves have left, in the background."""
        self._saver_now().sweep([parse_place(folder).root for folder in folders])

    def settle(self, timeout_seconds: float | None = None, *, quietly: bool = False) -> bool:
        """Wait until the save under way has ended; at most `drain_timeout`, or this long.

        Args:
            timeout_seconds: How long to wait.
            quietly: Warn of a failed save instead of raising.

        Returns:
            Whether it has.

        Raises:
            CheckpointFailedError: If it failed.
        """
        if self._saver is None:
            return True
        return self._saver.settle(self._drain_timeout if timeout_seconds is None else timeout_seconds, quietly=quietly)

    def take_reports(self, paths: Collection[str] | None = None) -> list[SaveReport]:
        """Return what became of saves that have ended, each once. Waits for none.

        Args:
            paths: As they were asked for; the reports of others stay for whoever began them. None: all.
        """
        if self._saver is not None:
            self._reports += self._saver.take_reports()
        taken = [report for report in self._reports if paths is None or report.path in paths]
        self._reports = [report for report in self._reports if paths is not None and report.path not in paths]
        return taken

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._saver is not None and self._saver.is_saving

    # ---- loading -----------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self,
        path: PathLike,
        map_location: Any | None = None,
        weights_only: bool | None = None,
        *,
        state: dict[str, Any] | None = None,
        like: Like | None = None,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Load and verify a checkpoint, or, if it is damaged, the newest valid one beside it.

        Collective under AirStrategy: every rank calls this.

        Args:
            path: As for `save_checkpoint`; also a folder of plain DCP or stock Lightning, or a single `.ckpt` file.
            map_location: Ignored: tensors are loaded into host memory, or where `state` has them.
            weights_only: False allows objects of any class to be unpickled, and thereby any code to run. True and None
                admit plain data types and tensors only.
            state: Nested tensors to fill in place, `state_dict` and `optimizer_<i>`, which are then not returned.
            like: With `state`: what further tensors are loaded into, by their last key and shape.
            strict: With `state`: whether the weights must be the same as in `state["state_dict"]`, by name. If not,
                those that the checkpoint lacks stay as they are.

        Raises:
            FileNotFoundError: If nothing is there.
            BadCheckpointError: If it is unsafe or too new, or damaged and there is no other.
            ValueError: If it does not fit the state.
        """
        del map_location
        path = unwrapped(os.fspath(path))
        self.begin()
        if not self.settle():  # it may be what is to be loaded; and the ranks meet in one place only
            raise CheckpointFailedError(f"{path} cannot be loaded: the save before it has not ended.")
        loader = Loader(
            self._ranks,
            self._shelf,
            self._sharing,
            LoadOptions(
                verify=self._verify,
                cache_dir=self._staging_dir,
                max_download_workers=self._max_upload_workers,
                deadline_seconds=self._upload_timeout,
            ),
            warn=rank_zero_warn,
        )
        into = None if state is None else Into(state, like, strict=strict)
        found, checkpoint = loader.load(parse_place(path).root, into, weights_only=weights_only)
        self._shelf.protect(found)
        self.loaded_from, self.passed_over = found, set(loader.passed_over)
        return checkpoint

    # ---- ending ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Wait for the last save, at most `drain_timeout`, and end the thread. Idempotent.

        Raises:
            CheckpointFailedError: If it failed; while another exception is on its way, it is warned of instead.
        """
        exception = sys.exception()
        self._drain(quietly=exception is not None and exception is not self._outer_exception)
        self._is_over = True

    def _drain(self, *, quietly: bool) -> None:
        saver, self._saver = self._saver, None
        if saver is None:
            return
        atexit.unregister(self._drain_at_exit)
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        try:
            saver.close(self._drain_timeout, quietly=quietly)
        finally:
            self._is_abandoned = saver.is_at_work
            self._reports += saver.take_reports()

    def _drain_at_exit(self) -> None:
        self._drain(quietly=True)


def _before_step(
    saver: Saver, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have a copy finished before the optimizer changes anything: after the closure's backward, if it has a closure.

    Lightning hands forward and backward to the optimizer as its closure.
    """
    del optimizer
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None:
        saver.finish_copy()
        return None

    def closed() -> Any:
        loss = closure()
        saver.finish_copy()
        return loss

    return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closed})


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}.")
