"""SIGKILL at every named point of a save and of a deletion, on either of two ranks, on a local and on a remote place.

Afterwards the newest checkpoint is the one before, or the new one if its `.metadata` was published; it is valid to the
last bit, what was half written is no checkpoint, and its name can be saved to again. The rank that was not killed ends
with an error within seconds.

The library knows nothing of these points: the hostile store has them, and a local one is given the same ones here.
"""

import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.checkpoint import AsyncUCCheckpointIO, latest_checkpoint, staging, writing
from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.places import open_store
from lightning_air.checkpoint.ranks import Together
from lightning_air.checkpoint.report import CheckpointReport
from lightning_air.checkpoint.saver import Saver
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.store import METADATA_NAME, Entry, Store
from lightning_air.checkpoint.verify import verify_checkpoint
from tests.kit.hostile import Behaviour, HostileStore
from tests.kit.points import reach
from tests.kit.ranks import run_ranks
from tests.kit.running_rank import RankResult

VOLUME = "/Volumes/main/default/hostile"
Kind = Literal["local", "remote"]
SURVIVORS_SECONDS = 20.0
"""How long a rank whose peer was killed may take to end, saving included, on a busy machine."""


# ---- places, and what is saved there --------------------------------------------------------------------------------


class Below:
    """A folder of a hostile store, as a store of its own, so that all of a process share one count of what is put."""

    is_local = False

    def __init__(self, store: HostileStore, folder: str) -> None:
        self._store = store
        self._folder = folder
        self.root = f"{store.root}/{folder}" if folder else store.root

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder and name else self._folder or name

    def path(self, name: str) -> Path:
        return self._store.path(self._at(name))

    def put(self, name: str, source: Path) -> None:
        self._store.put(self._at(name), source)

    def put_bytes(self, name: str, data: bytes) -> None:
        self._store.put_bytes(self._at(name), data)

    def get(self, name: str, target: Path) -> None:
        self._store.get(self._at(name), target)

    def read(self, name: str) -> bytes:
        return self._store.read(self._at(name))

    def num_bytes(self, name: str) -> int | None:
        return self._store.num_bytes(self._at(name))

    def md5(self, name: str) -> str | None:
        return self._store.md5(self._at(name))

    def list(self, folder: str = "") -> list[Entry]:
        start = len(self._folder) + 1 if self._folder else 0
        return [
            Entry(entry.name[start:], entry.is_folder, entry.num_bytes, entry.modified_seconds)
            for entry in self._store.list(self._at(folder))
        ]

    def delete(self, name: str) -> None:
        self._store.delete(self._at(name))

    def delete_folder(self, folder: str) -> None:
        self._store.delete_folder(self._at(folder))


def plain(name: str) -> str:
    """Return the name of a shard without the token that keeps two attempts on a remote place apart."""
    return re.sub(r"(__\d+)_[0-9a-f]{8}(_\d+\.distcp)", r"\1\2", name)


def hostile_places(
    folder: Path, behaviour: Behaviour | None = None, on_point: Callable[[str], object] = reach
) -> Callable[[str], Store]:
    """Return an `open_store` in which the volume `VOLUME` is a hostile store, kept in a folder."""
    store = HostileStore(folder, behaviour, root=VOLUME, on_point=lambda point: on_point(plain(point)))
    return lambda path: Below(store, path.removeprefix(VOLUME).strip("/"))


def make_io(open_places: Callable[[str], Store], *, file_bytes: int = 4000, **options: Any) -> AsyncUCCheckpointIO:
    """Return an IO whose files are small, so that every rank writes several."""
    io = AsyncUCCheckpointIO(**options)
    io._shelf = Shelf(open_places)
    saver_now = io._saver_now

    def with_small_files() -> Saver:
        saver = saver_now()
        saver._options = replace(saver._options, file_bytes=file_bytes)
        return saver

    io._saver_now = with_small_files  # type: ignore[method-assign]
    return io


def root_of(kind: Kind, folder: Path) -> str:
    return str(folder) if kind == "local" else VOLUME


def places_of(kind: Kind, folder: Path, on_point: Callable[[str], object] = reach) -> Callable[[str], Store]:
    return open_store if kind == "local" else hostile_places(folder, on_point=on_point)


def checkpoint_at(step: int) -> dict[str, Any]:
    """Return a checkpoint as Lightning makes it, the same on every rank; each bit of it says which step it is of."""
    generator = torch.Generator().manual_seed(step)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = [(40, 16), (16,), (30, 16), (30,)]
    return {
        "global_step": step,
        "epoch": step // 10,
        "state_dict": {f"layer.{index}": values(*shape) for index, shape in enumerate(shapes)},
        "optimizer_states": [
            {
                "state": {
                    index: {"step": torch.tensor(float(step)), "exp_avg": values(*shape)}
                    for index, shape in enumerate(shapes)
                },
                "param_groups": [{"lr": 0.1 / step, "params": [0, 1, 2, 3]}],
            }
        ],
        "loops": {"seen": list(range(step))},
    }


def assert_equal_to_the_bit(found: Any, expected: Any, at: str = "") -> None:
    """Compare two nested states; of what was loaded, our own notes do not count."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, at
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert found.keys() - {"lightning_air"} == expected.keys(), at
        for key, value in expected.items():
            assert_equal_to_the_bit(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for index, value in enumerate(expected):
            assert_equal_to_the_bit(found[index], value, f"{at}.{index}")
    else:
        assert found == expected, at


# ---- the same points on a local place -------------------------------------------------------------------------------


@contextmanager
def named_points(  # noqa: C901, PLR0915 - one wrapper for each point
    folder: Path, on_point: Callable[[str], object] = reach
) -> Iterator[None]:
    """Have this process reach, in a local folder, the points of a `HostileStore`; and those that no store sees.

    `staging #N` lies in the middle of the N-th copy into host memory, `gather #N` and `told #N` before a rank says how
    the N-th save went there, and before it hears how it ended. Names of files are relative to the folder.
    """
    patch = pytest.MonkeyPatch()
    counts = dict.fromkeys(("staging", "gather", "broadcast"), 0)
    copy_all, write_file, write, move = staging._copy_all, writing.write_shard_file, LocalStore._write, Path.replace

    def name_of(path: str | os.PathLike[str]) -> str:
        return os.path.relpath(path, folder)

    def staged(pairs: list[Any]) -> None:
        counts["staging"] += 1
        copy_all(pairs[: len(pairs) // 2])
        on_point(f"staging #{counts['staging']}")
        copy_all(pairs[len(pairs) // 2 :])

    def shard(path: Path, name: str, items: Any) -> Any:
        if not path.is_relative_to(folder):  # on its way to a store, which has points of its own
            return write_file(path, name, items)

        class Halfway(list):
            def __iter__(self) -> Iterator[Any]:
                for index, item in enumerate(items):
                    yield item
                    if index == len(items) // 2:
                        on_point(f"putting {name_of(path)}")

        on_point(f"put {name_of(path)}")
        written = write_file(path, name, Halfway(items))
        on_point(f"put done {name_of(path)}")
        return written

    def small(store: LocalStore, name: str, fill: Callable[[Any], object]) -> None:
        where = name_of(store.path(name))

        def halves(target: Any) -> None:
            class Halves:
                def write(self, data: bytes) -> None:
                    target.write(data[: len(data) // 2])
                    target.flush()
                    on_point(f"putting {where}")
                    target.write(data[len(data) // 2 :])

            fill(Halves())

        on_point(f"put {where}")
        write(store, name, halves)
        on_point(f"put done {where}")

    def renamed(path: Path, target: Any) -> Any:
        on_point(f"rename {name_of(target)}")
        moved = move(path, target)
        on_point(f"renamed {name_of(target)}")
        return moved

    def meeting(verb: str, meet: Any) -> Any:
        def met(ranks: Together, value: Any) -> Any:
            counts[verb] += 1
            if verb == "gather":
                on_point(f"gather #{counts[verb]}")
            elif counts[verb] % 2 == 0:  # the first one of each save names the folder
                on_point(f"told #{counts[verb] // 2}")
            return meet(ranks, value)

        return met

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if not is_open or not args or not str(args[0]).startswith(f"{folder}/"):
            return
        if event not in {"os.remove", "os.rmdir"}:
            on_point(f"{event} {name_of(args[0])}")
        elif os.path.lexists(args[0]):  # what is not there cannot be deleted, but an audit hook is told of the attempt
            on_point(f"delete {name_of(args[0])}")

    is_open = True
    sys.addaudithook(audit)
    patch.setattr(staging, "_copy_all", staged)
    patch.setattr(writing, "write_shard_file", shard)
    patch.setattr(LocalStore, "_write", small)
    patch.setattr(Path, "replace", renamed)
    patch.setattr(Together, "gather", meeting("gather", Together.gather))
    patch.setattr(Together, "broadcast", meeting("broadcast", Together.broadcast))
    try:
        yield
    finally:
        is_open = False
        patch.undo()


# ---- what the ranks do, and what is there afterwards ----------------------------------------------------------------


def save_three(kind: Kind, folder: str) -> str:
    """Save steps 1, 2 and 3, and delete step 1 once step 2 is published."""
    directory = Path(folder)
    root = root_of(kind, directory)
    io = make_io(places_of(kind, directory))
    with named_points(directory if kind == "local" else Path("/nowhere")):
        try:
            io.connect("ddp")
            for step in (1, 2, 3):
                io.save_checkpoint(checkpoint_at(step), f"{root}/step={step}.ckpt")
                io.settle()
                if step == 2:
                    io.remove_checkpoint(f"{root}/step=1.ckpt")
        finally:
            io.teardown()
    return "was not killed"


def reports_of(kind: Kind, folder: Path) -> dict[int, CheckpointReport]:
    """Return every byte's verdict on what a reader takes for a checkpoint, by step."""
    store = places_of(kind, folder)(root_of(kind, folder))
    published = [found for found in list_checkpoints(store) if found.has_metadata]
    return {found.step or 0: verify_checkpoint(store, name=found.name, settle_seconds=0.0) for found in published}


def newest_step(kind: Kind, folder: Path) -> int:
    """Return the step of the newest valid checkpoint, having loaded it; fail if it is not what was saved."""
    open_places, root = places_of(kind, folder), root_of(kind, folder)
    found = latest_checkpoint(open_places(root), settle_seconds=0.0)
    assert found is not None
    assert verify_checkpoint(open_places(root), name=found.rpartition("/")[2], level="digest").valid
    loaded = make_io(open_places).load_checkpoint(found)
    assert_equal_to_the_bit(loaded, checkpoint_at(loaded["global_step"]))
    return loaded["global_step"]


def assert_half_written_is_no_checkpoint(kind: Kind, folder: Path, step: int) -> None:
    """No reader takes what is there for a checkpoint, and a run that comes back can use the name."""
    open_places, root = places_of(kind, folder), root_of(kind, folder)
    path, io = f"{root}/step={step}.ckpt", make_io(open_places)
    if open_places(path).num_bytes(METADATA_NAME) is None:
        assert path not in io._shelf.newest_first(root)
    else:  # a volume shows what was written of `.metadata` until then
        assert kind == "remote"
        assert not verify_checkpoint(open_places(path), level="digest").valid
    if open_places(path).list():
        with pytest.warns(UserWarning, match=rf"step={step}\.ckpt/\.metadata .* Loading .*step=1\.ckpt instead"):
            assert_equal_to_the_bit(io.load_checkpoint(path), checkpoint_at(1))
    else:  # killed before anything was written
        with pytest.raises(FileNotFoundError, match=f"step={step}.ckpt"):
            io.load_checkpoint(path)
    io.save_and_wait(checkpoint_at(step), path)
    io.teardown()
    assert newest_step(kind, folder) == step


def assert_survivor_ended(results: list[RankResult], killed: int) -> None:
    assert results[killed].exitcode == -signal.SIGKILL, results[killed]
    survivor = results[1 - killed]
    assert "CheckpointFailedError" in (survivor.error or "") or "RuntimeError" in (survivor.error or ""), survivor
    assert "timed out after" not in (survivor.error or ""), survivor
    assert survivor.seconds < SURVIVORS_SECONDS


def kill_at(point: str, rank: int, kind: Kind, folder: Path) -> None:
    results = run_ranks(
        save_three,
        2,
        args=(kind, str(folder)),
        signals={(rank, point): signal.SIGKILL},
        init_process_group="gloo",
        timeout_seconds=SURVIVORS_SECONDS + 10,
        warnings_as_errors=False,  # that a save failed while another error is on its way is warned of
    )
    assert_survivor_ended(results, rank)


def around(name: str) -> list[str]:
    return [f"put {name}", f"putting {name}", f"put done {name}"]


SHARDS = ["__{rank}_0.distcp", "__{rank}_1.distcp"]
BEFORE_PUBLICATION = [
    "staging #2",
    *(point for shard in SHARDS for point in around(f"step=2.ckpt/{shard}")),
    "gather #2",
]
PUBLICATION = [
    *around("step=2.ckpt/meta.pt"),  # the first of them is the one between the shards and meta.pt
    *around("step=2.ckpt/manifest.json"),
    *around("step=2.ckpt/.metadata")[:2],
]


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize(
    ("rank", "point"),
    [(rank, point.format(rank=rank)) for rank in (0, 1) for point in BEFORE_PUBLICATION]
    + [(0, point) for point in PUBLICATION],
)
def test_killed_before_publication_the_previous_checkpoint_stands(
    rank: int, point: str, kind: Kind, tmp_path: Path
) -> None:
    kill_at(point, rank, kind, tmp_path)
    reports = reports_of(kind, tmp_path)
    assert reports[1].valid
    assert newest_step(kind, tmp_path) == 1
    assert_half_written_is_no_checkpoint(kind, tmp_path, step=2)


@pytest.mark.parametrize(
    ("kind", "rank", "point"),
    [
        ("local", 0, "renamed step=2.ckpt/.metadata"),
        *((kind, 0, "put done step=2.ckpt/.metadata") for kind in ("local", "remote")),
        *((kind, rank, "told #2") for kind in ("local", "remote") for rank in (0, 1)),
        *((kind, 0, "delete step=1.ckpt/.metadata") for kind in ("local", "remote")),
    ],
)
def test_killed_after_publication_the_new_checkpoint_stands_beside_the_old(
    kind: Kind, rank: int, point: str, tmp_path: Path
) -> None:
    kill_at(point, rank, kind, tmp_path)
    assert newest_step(kind, tmp_path) == 2
    reports = reports_of(kind, tmp_path)
    assert reports.keys() == {1, 2}
    assert all(report.valid for report in reports.values()), reports


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        *((kind, f"delete step=1.ckpt/{file}") for kind in ("local", "remote") for file in ("meta.pt", "__1_1.distcp")),
        ("local", "delete step=1.ckpt"),
        ("remote", "deleted step=1.ckpt/.metadata"),
        ("remote", "deleted step=1.ckpt/meta.pt"),
    ],
)
def test_killed_while_the_old_checkpoint_is_deleted_what_is_left_of_it_is_no_checkpoint(
    kind: Kind, point: str, tmp_path: Path
) -> None:
    kill_at(point, 0, kind, tmp_path)
    assert newest_step(kind, tmp_path) == 2
    reports = reports_of(kind, tmp_path)
    assert reports.keys() == {2}
    assert reports[2].valid


def test_killed_between_its_writing_and_its_renaming_local_metadata_is_not_published(tmp_path: Path) -> None:
    kill_at("rename step=2.ckpt/.metadata", 0, "local", tmp_path)
    assert newest_step("local", tmp_path) == 1
    assert_half_written_is_no_checkpoint("local", tmp_path, step=2)


# ---- at any point ---------------------------------------------------------------------------------------------------


class Bomb:
    """Kills this process at its N-th point, whatever that is."""

    def __init__(self, fuse: int | None) -> None:
        self.fuse = fuse
        self.num_points = 0
        self.lock = threading.Lock()

    def __call__(self, point: str) -> None:
        with self.lock:
            self.num_points += 1
            if self.num_points == self.fuse:
                os.kill(os.getpid(), signal.SIGKILL)


def save_on(kind: Kind, folder: str, names: list[str], keep: int, *bombs: Any) -> int:
    """Save one step after another under these names, keep some, and note each that is known to be published."""
    fuses, log = bombs
    directory, rank = Path(folder), dist.get_rank()
    bomb = Bomb(fuses.get(rank))
    root = root_of(kind, directory)
    io = make_io(places_of(kind, directory, bomb))
    with named_points(directory if kind == "local" else Path("/nowhere"), bomb), Path(log, str(rank)).open("w") as file:
        try:
            io.connect("ddp")
            for step, name in enumerate(names, 1):
                io.save_checkpoint(checkpoint_at(step), f"{root}/{name}")
                io.settle()
                file.write(f"{step}\n")
                file.flush()
                if step > keep and names[step - 1 - keep] not in names[step - keep :]:
                    io.remove_checkpoint(f"{root}/{names[step - 1 - keep]}")
        finally:
            io.teardown()
    return bomb.num_points


NUM_SAVES = 4
kills = {
    "kind": st.sampled_from(["local", "remote"]),
    "names": st.lists(st.sampled_from(["a.ckpt", "b.ckpt", "c.ckpt", "last.ckpt"]), min_size=1, max_size=NUM_SAVES),
    "keep": st.integers(1, 2),
    # Rank 0 comes to about 50 points per save, deletions included, and rank 1 to 15.
    "fuses": st.fixed_dictionaries({}, optional={0: st.integers(1, 200), 1: st.integers(1, 60)}),
}


def assert_nothing_is_lost(kind: Kind, names: list[str], keep: int, fuses: dict[int, int]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch, "run"), Path(scratch, "log")
        log.mkdir()
        results = run_ranks(
            save_on,
            2,
            args=(kind, str(folder), names, keep, fuses, str(log)),
            init_process_group="gloo",
            timeout_seconds=SURVIVORS_SECONDS + 10,
            warnings_as_errors=False,
        )
        for result in results:
            assert "timed out after" not in (result.error or ""), result
            assert result.seconds < SURVIVORS_SECONDS
        if all(result.exitcode != -signal.SIGKILL for result in results):
            assert [result.error for result in results] == [None, None]
        known = max(int(step) for rank in (0, 1) for step in ["0", *Path(log, str(rank)).read_text().split()])
        reports = reports_of(kind, folder)
        broken = {step for step, report in reports.items() if not report.valid}
        # Only a volume shows a `.metadata` that is still being written.
        assert broken <= ({known + 1} if kind == "remote" else set()), reports
        if reports.keys() - broken:
            assert newest_step(kind, folder) in (known, known + 1)
        else:
            assert known == 0
        io = make_io(places_of(kind, folder))
        io.save_and_wait(checkpoint_at(len(names) + 1), f"{root_of(kind, folder)}/{names[-1]}")
        io.teardown()
        assert newest_step(kind, folder) == len(names) + 1


@settings(max_examples=8, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**kills)
def test_killed_anywhere_nothing_that_was_published_is_lost(**case: Any) -> None:
    assert_nothing_is_lost(**case)


@pytest.mark.soak
@settings(max_examples=300, deadline=None, database=None)
@given(**kills)
def test_killed_anywhere_many_times(**case: Any) -> None:
    assert_nothing_is_lost(**case)
