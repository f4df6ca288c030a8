"""The table in the terminal: what it says, that it fits, and that all else in the terminal goes on as it was."""

import re
import sys
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.health import table
from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.scene import Scene
from lightning_air.health.table import draw_table, sparkline, table_unavailable
from tests.health.windows import PLACE, START_SECONDS, gpus, healthy
from tests.kit.nvml_stub import compiler_missing
from tests.kit.terminal import terminal, tmux_missing

ROOT = str(Path(__file__).parents[2])
needs_terminal = pytest.mark.skipif(tmux_missing() is not None, reason=str(tmux_missing()))
needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


def a_scene(num_gpus: int, *, sick: tuple[int, ...] = (), num_polls: int = 30) -> Scene:
    scene = Scene(History(720, 10), EventLog())
    for poll in range(num_polls):
        rows = {}
        for number, gpu in enumerate(gpus(num_gpus)):
            row = healthy(1)[:, 0]
            row[PLACE["ecc_uncorrected"]] = float(number in sick)
            row[PLACE["utilization_pct"]] = 100 * poll / (num_polls - 1)
            rows[gpu] = [float(value) for value in row]
        scene.history.append(START_SECONDS + 10.0 * poll, rows)
    return scene


def drawn(scene: Scene, *, width: int = 120, num_lines: int = 20) -> list[str]:
    lines = draw_table(scene, width=width, num_lines=num_lines, time_words="12:00:00")
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


def test_it_says_what_each_gpu_does() -> None:
    headline, headings, first, second = drawn(a_scene(2))
    assert headline.startswith("12:00:00  Nothing was wrong: 2 GPUs, watched for 5 min. ──")
    assert re.split("  +", headings) == [*("GPU", "utilisation", "memory", "temperature", "power", "clock", "state")]
    cells = ["GPU 0", "100 %", "▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇███", "75 %", "61 °C", "▅" * 20, "640 W", "1900 MHz", "well"]
    assert re.split("  +", first) == cells
    assert second.startswith("GPU 1")


def test_the_sick_come_first_and_what_is_hidden_is_counted() -> None:
    lines = drawn(a_scene(64, sick=(40, 41, 42)), num_lines=6)
    assert len(lines) == 6
    assert lines[0].startswith("12:00:00  3 of 64 GPUs on 8 nodes had trouble in 5 min.")
    assert [line.split("  ")[0] for line in lines[2:5]] == [f"GPU {number} on node 5" for number in range(3)]
    assert lines[2].endswith("1 uncorrected memory error")
    assert lines[2].count("%") == 2
    assert "█" not in lines[2], "no room for it"
    wide = drawn(a_scene(64, sick=(40,)), num_lines=6, width=160)
    assert wide[2].endswith(
        "███    75 %        61 °C  ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅  640 W  1900 MHz  1 uncorrected memory error"
    )
    assert lines[5] == "and 61 more, all of them well"
    assert drawn(a_scene(64, sick=(40, 41, 42)), num_lines=5)[-1] == "and 62 more, 1 of them with trouble"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(4, 40), st.integers(40, 200))
def test_it_never_takes_more_room_than_it_has(num_gpus: int, num_lines: int, width: int) -> None:
    lines = drawn(a_scene(num_gpus, sick=(1, 5), num_polls=2), width=width, num_lines=num_lines)
    assert len(lines) == (0 if num_gpus == 0 else min(num_lines, num_gpus + 2))
    assert all(sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in line) <= width for line in lines)
    if num_gpus and len(lines) == num_gpus + 2:
        assert "more" not in lines[-1]


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(np.nan), st.floats(-1e6, 1e6)), max_size=30))
def test_a_sparkline_rises_with_its_values_and_shows_gaps(values: list[float]) -> None:
    line = sparkline(np.array(values), 0, 100)
    assert [character == "·" for character in line] == [bool(np.isnan(value)) for value in values]
    pairs = sorted((value, character) for value, character in zip(values, line, strict=True) if character != "·")
    assert [character for _, character in pairs] == sorted(character for _, character in pairs)
    assert all(character == "▁" for value, character in pairs if value <= 0)
    assert all(character == "█" for value, character in pairs if value >= 100)


class Console:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "lines", "has_rich", "words"),
    [
        (80, 24, True, None),
        (80, 24, False, "pip install 'lightning-air[cli]'"),
        (80, 11, True, "the terminal has 11 lines of 80 characters, and it takes 12 of 40"),
        (39, 24, True, "the terminal has 24 lines of 39 characters"),
    ],
)
def test_where_no_table_can_be_it_says_why(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, has_rich: bool, words: str | None
) -> None:
    monkeypatch.setattr(sys, "stdout", Console())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    find_spec: Any = (lambda _: object()) if has_rich else (lambda _: None)
    monkeypatch.setattr(table.importlib.util, "find_spec", find_spec)
    reason = table_unavailable()
    assert (reason is None) if words is None else (words in str(reason))


# ---- in a terminal ---------------------------------------------------------------------------------------------------

FOOTER = """
    import sys, time
    from lightning_air.health.table import Footer, _write
    num_before, num_after = int(sys.argv[1]), int(sys.argv[2])
    for number in range(num_before):
        print("before", number)
    footer = Footer(_write)
    footer.show(["one", "two", "three"], 12)
    for number in range(num_after):
        print("after", number)
        footer.show(["uno", "dos", "tres"], 12)
    sys.stdin.readline()
    footer.show(["uno", "dos", "tres", "cuatro"], 12)
    print("larger")
    sys.stdin.readline()
    footer.close()
    print("end")
"""


@needs_terminal
@pytest.mark.parametrize(("num_before", "num_after"), [(0, 1), (0, 40), (11, 3), (30, 40)])
def test_the_table_stands_still_and_no_other_line_is_lost(num_before: int, num_after: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FOOTER), str(num_before), str(num_after)]
    said = [*(f"before {number}" for number in range(num_before)), *(f"after {number}" for number in range(num_after))]
    with terminal(command, width=40, height=12, PYTHONPATH=ROOT) as screen:
        seen = screen.wait_for(lambda lines: f"after {num_after - 1}" in lines and "tres" in lines)
        assert seen[-3:] == ["uno", "dos", "tres"]
        assert [line for line in seen[:-3] if line] == said[-8:]  # the cursor is on a line of its own

        screen.tmux("send-keys", "Enter")
        seen = screen.wait_for(lambda lines: "larger" in lines)
        assert seen[-4:] == ["uno", "dos", "tres", "cuatro"]

        screen.tmux("send-keys", "Enter")
        screen.wait_for(lambda lines: "end" in lines)
        assert [line for line in screen.everything() if line] == [*said, "larger", "end"]
        assert screen.tmux("display-message", "-p", "#{scroll_region_upper} #{scroll_region_lower}") == "0 11\n"


TRAINING = """
    import logging, sys, time, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
    from lightning_air import GPUHealth
    from tests.kit.nvml_stub import NvmlStub, use_stub
    from tests.strategy.training import Regression, loader

    bars = {"tqdm": [TQDMProgressBar()], "rich": [RichProgressBar(refresh_rate=1)], "none": []}[sys.argv[1]]
    stub = NvmlStub(Path("nvml"), 2)
    use_stub(Path("nvml"))

    class Talks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                print("a print in between")
                logging.getLogger("x").warning("a line of a log")
            if batch_idx == 3:
                while not Path("go").exists():
                    time.sleep(0.05)

    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        max_epochs=1, limit_val_batches=0, limit_train_batches=8, enable_progress_bar=bool(bars),
        callbacks=[GPUHealth(poll_seconds=0.1, live="table", report=False), Talks(), *bars],
    )
    trainer.fit(Regression(), loader(), loader())
    print("end of the script")
"""


@needs_terminal
@needs_compiler
@pytest.mark.parametrize("bar", ["tqdm", "rich", "none"])
def test_it_fights_with_no_progress_bar(bar: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), bar]
    with terminal(command, width=110, height=24, PYTHONPATH=ROOT) as screen:

        def stands(lines: list[str]) -> bool:
            has_bar = any(re.search(r"Epoch 0.*\b3/8", line) for line in lines)
            is_said = "a line of a log" in lines and lines[-1].startswith("GPU 1") and lines[-2].startswith("GPU 0")
            return is_said and has_bar == (bar != "none")

        seen = screen.wait_for(stands)
        assert re.match(r"\d\d:\d\d:\d\d  Nothing was wrong: 2 GPUs, watched for \d+ s\. ─", seen[-4])
        above = seen[:-4]
        assert not any("GPU 0" in line or ("▇" in line and "%" not in line) for line in above)
        assert any("print in between" in line for line in above)

        Path("go").touch()
        screen.wait_for(lambda lines: "end of the script" in lines)
        after = [line for line in screen.everything() if line]
        assert after[-1] == "end of the script"
        assert not any(line.startswith(("GPU 0", "GPU 1", "GPU  ")) for line in after)
        if bar != "none":
            assert any("8/8" in line for line in after)
