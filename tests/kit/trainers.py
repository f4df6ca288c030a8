"""Trainers for tests: on the CPU, silent, and writing nothing that the test did not ask for."""

from pathlib import Path
from typing import Any


def fast_trainer_kwargs(default_root_dir: str | Path, **overrides: Any) -> dict[str, Any]:
    """Return keyword arguments for a `Trainer` that only trains.

    Args:
        default_root_dir: Where Lightning writes what the test asks for; usually `tmp_path`.
        **overrides: What the test is about, such as `max_steps=2` or `callbacks=[...]`.
    """
    return {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": str(default_root_dir),
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "max_epochs": 1,
        **overrides,
    }
