"""GPU health: a sick GPU is named before the job dies of it, at no cost to training."""

from lightning_air.health.callback import GPUHealth
from lightning_air.health.default_rules import default_rules
from lightning_air.health.events import EventLog, HealthEvent
from lightning_air.health.hangs import HangRule
from lightning_air.health.history import GpuId, History, Window
from lightning_air.health.reader import read_gpus
from lightning_air.health.rules import Rule
from lightning_air.health.sample import GPUSample

__all__ = [
    "EventLog",
    "GPUHealth",
    "GPUSample",
    "GpuId",
    "HangRule",
    "HealthEvent",
    "History",
    "Rule",
    "Window",
    "default_rules",
    "read_gpus",
]
