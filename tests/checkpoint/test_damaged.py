"""A checkpoint that is not what was written: noticed before it is used, by all ranks alike, and never in silence.

What is damaged is passed over for the newest valid checkpoint beside it, with a warning that names the file and says
how it is wrong. What names code to run, or a file outside of its checkpoint, is refused by name and passed over by
nobody. Every load here is one of two ranks together, over a checkpoint that two ranks have written.
"""

import io as io_module
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_air.checkpoint import AsyncUCCheckpointIO, latest_checkpoint
from lightning_air.checkpoint.manifest import Manifest, digest_file
from tests.checkpoint.samples import flip
from tests.checkpoint.test_killing import assert_equal_to_the_bit, checkpoint_at, make_io, places_of
from tests.kit.ranks import run_ranks, values

FILES = ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp", "meta.pt", "manifest.json", ".metadata"]
NEWEST = "step=2.ckpt"


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def save_steps(folder: str, steps: list[int]) -> None:
    io = make_io(places_of("local", Path(folder)))
    io.connect("ddp")
    for step in steps:
        io.save_and_wait(checkpoint_at(step), f"{folder}/step={step}.ckpt")
    io.teardown()


def load_each(
    paths: list[str], options: dict[str, Any], load_options: dict[str, Any]
) -> list[tuple[int | None, str | None, list[str]]]:
    """Load one after another; return the step that came, or the error, and the warnings."""
    io = AsyncUCCheckpointIO(**options)
    io.connect("ddp")
    outcomes = []
    for path in paths:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            try:
                loaded = io.load_checkpoint(path, **load_options)
                step = loaded["global_step"]
                assert_equal_to_the_bit(loaded, checkpoint_at(step))
                outcome: tuple[int | None, str | None] = step, None
            except (OSError, ValueError, RuntimeError) as error:
                outcome = None, f"{type(error).__name__}: {error}"
        outcomes.append((*outcome, [str(warning.message) for warning in given]))
    io.teardown()
    return outcomes


# ---- given a checkpoint, and another one beside it ------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    values(run_ranks(save_steps, 2, args=(str(folder), [1, 2]), init_process_group="gloo"))
    assert sorted(path.name for path in (folder / NEWEST).iterdir()) == sorted(FILES)
    return folder


def copies(saved: Path, tmp_path: Path, names: list[str], *, steps: tuple[int, ...] = (1, 2)) -> list[Path]:
    """Return a folder of its own for each name, with what was saved."""
    for name in names:
        for step in steps:
            shutil.copytree(saved / f"step={step}.ckpt", tmp_path / name / f"step={step}.ckpt")
    return [tmp_path / name for name in names]


def load(
    folders: list[Path], *, options: dict[str, Any] | None = None, load_options: dict[str, Any] | None = None
) -> list[list[tuple[int | None, str | None, list[str]]]]:
    """Return, for each folder, what each of two ranks got when they asked for the newest checkpoint in it."""
    args = ([f"{folder}/{NEWEST}" for folder in folders], options or {}, load_options or {})
    by_rank = values(run_ranks(load_each, 2, args=args, init_process_group="gloo"))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def flipped(path: Path) -> None:
    flip(path, path.stat().st_size // 2, bit=3)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def deleted(path: Path) -> None:
    path.unlink()


def from_another_step(path: Path) -> None:
    shutil.copyfile(path.parents[1] / "step=1.ckpt" / path.name, path)


def swapped(path: Path) -> None:
    other = path.with_name(FILES[(FILES.index(path.name) + 1) % len(FILES)])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: list[Callable[[Path], None]] = [flipped, cut, emptied, deleted, from_another_step, swapped]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_noticed_and_the_newest_valid_checkpoint_taken(
    damage: Callable[[Path], None], saved: Path, tmp_path: Path
) -> None:
    folders = copies(saved, tmp_path, FILES)
    for folder, file in zip(folders, FILES, strict=True):
        damage(folder / NEWEST / file)
    for folder, file, (first, second) in zip(folders, FILES, load(folders), strict=True):
        assert first[:2] == second[:2] == (1, None), (file, first, second)
        (warning,) = first[2]
        # Swapped files are both wrong, and a manifest of another step says that all of the others are.
        blamed = FILES if damage in (swapped, from_another_step) else [file]
        assert any(f"{folder}/{NEWEST}/{name}" in warning for name in blamed), warning
        assert f"Loading {folder}/step=1.ckpt instead." in warning
        assert second[2] == []  # one warning is enough


def test_no_bit_of_metadata_matters_less_than_another(saved: Path, tmp_path: Path) -> None:
    # Some flips spell other names than a `.metadata` may ask for, which must not look like an attack.
    num_bytes = (saved / NEWEST / ".metadata").stat().st_size
    names = [str(position) for position in range(0, num_bytes, num_bytes // 40)]
    folders = copies(saved, tmp_path, names)
    for folder in folders:
        flip(folder / NEWEST / ".metadata", int(folder.name), bit=int(folder.name) % 8)
    for folder, (first, second) in zip(folders, load(folders), strict=True):
        assert first[:2] == second[:2] == (1, None), (folder.name, first)
        assert f"{NEWEST}/.metadata " in first[2][0]


def test_the_warning_says_how_a_file_is_wrong(saved: Path, tmp_path: Path) -> None:
    how: dict[str, tuple[Callable[[Path], None], str]] = {
        "__0_0.distcp": (cut, "bytes instead of"),
        "__1_0.distcp": (flipped, "is not as it was written: its digest is"),
        "__1_1.distcp": (deleted, "No such file or directory"),
        "meta.pt": (deleted, "is missing"),
        "manifest.json": (deleted, "is missing"),
        ".metadata": (deleted, "is missing"),
    }
    folders = copies(saved, tmp_path, list(how))
    for folder, (file, (damage, _)) in zip(folders, how.items(), strict=True):
        damage(folder / NEWEST / file)
    for folder, (file, (_, words)), (first, _) in zip(folders, how.items(), load(folders), strict=True):
        assert words in first[2][0], (file, first)
        assert f"{folder}/{NEWEST}/{file}" in first[2][0]


def test_of_several_valid_ones_the_newest_is_taken_and_a_damaged_one_among_them_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values(run_ranks(save_steps, 2, args=(str(folder), [5, 3, 4, 2]), init_process_group="gloo"))  # it had gone back
    flipped(folder / NEWEST / "__0_1.distcp")
    cut(folder / "step=4.ckpt" / "__1_0.distcp")
    ((first, second),) = load([folder])
    assert first[0] == second[0] == 3  # saved last of those that are valid
    assert f"{NEWEST}/__0_1.distcp" in first[2][0]
    assert "step=4.ckpt/__1_0.distcp" in first[2][0]


def test_without_another_valid_one_there_is_one_error_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    folders = copies(saved, tmp_path, FILES[:-1], steps=(2,))
    for folder, file in zip(folders, FILES[:-1], strict=True):
        cut(folder / NEWEST / file)
    for file, (first, second) in zip(FILES[:-1], load(folders), strict=True):
        assert first == second
        assert first[0] is None
        assert (first[1] or "").startswith("DamagedCheckpointError: ")
        assert f"{NEWEST}/{file} " in (first[1] or "")
        assert "no other valid checkpoint" in (first[1] or "")


def test_both_damaged_names_both(saved: Path, tmp_path: Path) -> None:
    (folder,) = copies(saved, tmp_path, ["run"])
    flipped(folder / NEWEST / "meta.pt")
    deleted(folder / "step=1.ckpt" / "__1_1.distcp")
    ((first, second),) = load([folder])
    assert first == second
    assert f"{NEWEST}/meta.pt" in (first[1] or "")
    assert "step=1.ckpt/__1_1.distcp" in (first[1] or "")


def test_shards_without_metadata_are_skipped_by_every_rank(saved: Path, tmp_path: Path) -> None:
    # CASES 8 (Automodel 3254): rank 0 raised, and the others hung.
    (folder,) = copies(saved, tmp_path, ["run"])
    for file in (".metadata", "manifest.json", "meta.pt"):
        deleted(folder / NEWEST / file)
    assert latest_checkpoint(folder) == f"{folder}/step=1.ckpt"
    ((first, second),) = load([folder])
    assert first[:2] == second[:2] == (1, None), (first, second)
    assert f"{folder}/{NEWEST}/.metadata is missing" in first[2][0]


def test_a_pointer_that_was_cut_off_leads_to_the_newest_beside_it(saved: Path, tmp_path: Path) -> None:
    (folder,) = copies(saved, tmp_path, ["run"])
    (folder / "last.ckpt").write_text('{"lightning_air_poi')
    by_rank = values(run_ranks(load_each, 2, args=([f"{folder}/last.ckpt"], {}, {}), init_process_group="gloo"))
    assert [outcome[0][:2] for outcome in by_rank] == [(2, None)] * 2, by_rank
    assert f"{folder}/last.ckpt is neither a checkpoint nor a whole pointer" in by_rank[0][0][2][0]


# ---- nothing there, or for another model ----------------------------------------------------------------------------


def test_what_is_not_there_is_a_file_not_found_error_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    (folder,) = copies(saved, tmp_path, ["run"], steps=(1,))
    ((first, second),) = load([folder])
    assert first == second == (None, f"FileNotFoundError: There is no checkpoint at {folder}/{NEWEST}.", [])


def test_a_folder_that_is_no_checkpoint_stands_for_none_beside_it(saved: Path, tmp_path: Path) -> None:
    (folder,) = copies(saved, tmp_path, ["run"], steps=(1,))
    (folder / NEWEST).mkdir()
    (folder / NEWEST / "events.out").write_bytes(b"logs")
    ((first, second),) = load([folder])
    assert first[1] == second[1] == f"FileNotFoundError: There is no checkpoint at {folder}/{NEWEST}."


def load_into(path: str, name: str, shape: tuple[int, ...]) -> None:
    io = AsyncUCCheckpointIO()
    io.connect("fsdp")
    io.load_checkpoint(path, state={"state_dict": {name: torch.zeros(shape)}}, strict=name == "layer.9")


@pytest.mark.parametrize(
    ("name", "shape"), [("layer.9", (16,)), ("layer.1", (17,))], ids=["another key", "another shape"]
)
def test_a_model_that_does_not_fit_is_a_value_error_on_all_ranks(
    name: str, shape: tuple[int, ...], saved: Path
) -> None:
    results = run_ranks(load_into, 2, args=(str(saved / NEWEST), name, shape), init_process_group="gloo")
    for result in results:
        last = (result.error or "").strip().splitlines()[-1]
        assert last.startswith("ValueError: "), result
        assert f"state_dict.{name}" in last
        assert "DamagedCheckpointError" not in (result.error or "")


# ---- verify ---------------------------------------------------------------------------------------------------------


def test_verify_size_sees_sizes_and_off_sees_nothing(saved: Path, tmp_path: Path) -> None:
    folders = copies(saved, tmp_path, ["same size", "longer"])
    tensor = checkpoint_at(2)["state_dict"]["layer.3"].numpy().tobytes()
    (shard,) = [file for file in FILES[:4] if tensor in (folders[0] / NEWEST / file).read_bytes()]
    flip(folders[0] / NEWEST / shard, (folders[0] / NEWEST / shard).read_bytes().find(tensor))
    with (folders[1] / NEWEST / shard).open("ab") as longer:
        longer.write(b"more")

    def steps(verify: str) -> list[int | None]:
        return [first[0] for first, _ in load_tolerantly(folders, verify)]

    assert steps("digest") == [1, 1]
    assert steps("size") == [2, 1]
    assert steps("off") == [2, 2]


def load_tolerantly(folders: list[Path], verify: str) -> list[list[tuple[int | None, str | None, list[str]]]]:
    args = ([f"{folder}/{NEWEST}" for folder in folders], verify)
    by_rank = values(run_ranks(load_whatever, 2, args=args, init_process_group="gloo"))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def load_whatever(paths: list[str], verify: Any) -> list[tuple[int, None, list[str]]]:
    """Load what may be altered: only the step is looked at."""
    io = AsyncUCCheckpointIO(verify=verify)
    io.connect("ddp")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return [(io.load_checkpoint(path)["global_step"], None, []) for path in paths]


# ---- what was planted -----------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.marker), 0o700, True)


def seal(folder: Path) -> None:
    """Write the manifest anew, as whoever can write to the folder could."""
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    files = {name: digest_file(folder / name) for name in manifest.files}
    values_ = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    (folder / "manifest.json").write_bytes(Manifest(**{**values_, "files": files}).to_json())


def plant_in_metadata(folder: Path, marker: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker), protocol=4))


def plant_in_meta(folder: Path, marker: Path) -> None:
    torch.save({"global_step": 2, "callbacks": Evil(marker)}, folder / "meta.pt")


def plant_in_a_shard(folder: Path, marker: Path) -> None:
    """Put it in the place of an object of rank 0's, and have `.metadata` say so."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, info = next(
        (index, info)
        for index, info in metadata.storage_data.items()
        if type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata"
    )
    stream = io_module.BytesIO()
    torch.save(Evil(marker), stream)
    content = (folder / info.relative_path).read_bytes()
    metadata.storage_data[index] = type(info)(info.relative_path, len(content), len(stream.getvalue()))
    (folder / info.relative_path).write_bytes(content + stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def plant_as_a_tensor(folder: Path, marker: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, info = next((i, info) for i, info in metadata.storage_data.items() if i.fqn == "state_dict.layer.0")
    stream = io_module.BytesIO()
    torch.save(Evil(marker), stream)
    content = (folder / info.relative_path).read_bytes()
    metadata.storage_data[index] = type(info)(info.relative_path, len(content), len(stream.getvalue()))
    (folder / info.relative_path).write_bytes(content + stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def plant_in_a_single_file(folder: Path, marker: Path) -> None:
    shutil.rmtree(folder)
    torch.save({"global_step": 2, "state_dict": {}, "callbacks": Evil(marker)}, folder)


PLANTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    ".metadata": (plant_in_metadata, f"{NEWEST}/.metadata"),
    "meta.pt": (plant_in_meta, f"{NEWEST}/meta.pt"),
    "object": (plant_in_a_shard, f"{NEWEST}/__0_0.distcp"),
    "tensor": (plant_as_a_tensor, f"{NEWEST}/__"),
    "file": (plant_in_a_single_file, NEWEST),
}


def test_planted_code_is_refused_by_name_is_not_run_and_is_not_passed_over(saved: Path, tmp_path: Path) -> None:
    folders = copies(saved, tmp_path, list(PLANTS))
    markers = [folder / "has run" for folder in folders]
    for (name, (plant, _)), folder, marker in zip(PLANTS.items(), folders, markers, strict=True):
        plant(folder / NEWEST, marker)
        if name != "file":
            seal(folder / NEWEST)
    outcomes = load(folders)
    for (name, (_, file)), marker, (first, second) in zip(PLANTS.items(), markers, outcomes, strict=True):
        for outcome in (first, second):
            assert outcome[0] is None, name
            assert (outcome[1] or "").startswith("UnsafeCheckpointError: "), (name, outcome)
            assert "os.makedirs" in (outcome[1] or ""), (name, outcome)
            assert file in (outcome[1] or ""), (name, outcome)
        assert not marker.exists()


def test_planted_code_does_run_when_the_user_says_so(saved: Path, tmp_path: Path) -> None:
    # Or the test above would prove nothing of meta.pt, the shards and the single file.
    names = ["meta.pt", "object", "file"]
    for name in names:
        (folder,) = copies(saved, tmp_path, [name], steps=(2,))
        PLANTS[name][0](folder / NEWEST, folder / "has run")
        if name != "file":
            seal(folder / NEWEST)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            AsyncUCCheckpointIO().load_checkpoint(folder / NEWEST, weights_only=False)
        assert (folder / "has run").is_dir(), name


def traverse_in_manifest(folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_bytes())
    document["files"]["../../outside"] = document["files"]["meta.pt"]
    del document["digest"]
    from lightning_air.checkpoint.manifest import _canonical, digest_bytes

    document["digest"] = digest_bytes(_canonical(document)).xxh3_128
    (folder / "manifest.json").write_bytes(_canonical(document))


def traverse_in_metadata(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)("../../outside", info.offset, info.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    seal(folder)


def test_a_path_out_of_the_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    folders = copies(saved, tmp_path, ["manifest.json", ".metadata"])
    traverse_in_manifest(folders[0] / NEWEST)
    traverse_in_metadata(folders[1] / NEWEST)
    for folder, (first, second) in zip(folders, load(folders), strict=True):
        for outcome in (first, second):
            assert outcome[0] is None
            assert (outcome[1] or "").startswith("UnsafeCheckpointError: "), outcome
            assert f"{NEWEST}/{folder.name}" in (outcome[1] or "")
            assert "'../../outside', which leads out of its folder" in (outcome[1] or "")
