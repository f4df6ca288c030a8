"""The rules that GPUHealth has when it is given none, with where their numbers come from.

| name | bad is | for | source |
|---|---|---|---|
| `gpu_lost` | the driver does not reach the GPU | at once | NVML: NVML_ERROR_GPU_IS_LOST |
| `xid_context_dead` | XID 48, 79, 94, 95, 119, 120, 140 | at once | [1], [2] |
| `xid_hardware` | XID 64, 74 | at once | [1], [2] |
| `xid_application` (log) | XID 13, 31, 43, 45, 69 | at once | [1] |
| `memory_errors` | an uncorrectable memory error since the start | at once | [3] |
| `remap_failed` | a row of memory could not be remapped | at once | [3]: replace the GPU |
| `remap_pending` | a row or page waits for a reset to be remapped | at once | [3] |
| `retirement_pending` | likewise before Ampere | at once | [3] |
| `many_remapped_rows` | 512 rows or more remapped for uncorrectable errors | at once | [2], [3] |
| `recovery_needed` | the driver asks for a reset, a drain or a reboot | 30 s | NVML: nvmlDeviceGetGpuRecoveryAction |
| `hot` | less than 2 degrees below the slowdown temperature | 30 s | NVML: nvmlDeviceGetMarginTemperature |
| `hot_memory` | memory above 95 degrees | 60 s | "Memory Max Operating Temp" of `nvidia-smi -q` (A100) |
| `thermal_throttling` | more than 6 of the last 60 s slowed by heat | | [2]: a minute's window; a tenth is our choice |
| `power_brake` | the machine's power supply asks for less | 30 s | NVML: HwPowerBrakeSlowdown |
| `power_capped` (log) | more than 30 of the last 60 s at the power limit | | usual under load; half is our choice |
| `nvlink_errors` | more than 6,000 CRC errors in 60 s | | [2]: 100 per second |
| `nvlink_recoveries` | a link was brought up again in the last 60 s | | [2] |
| `pcie_replays_gen4` | more than 16 replays in 60 s, up to PCIe 4 | | [2] |
| `pcie_replays_gen5` | more than 31 replays in 60 s, from PCIe 5 on | | [2] |
| `pcie_lanes` | fewer lanes than GPU and slot have | 60 s | NVML: nvmlDeviceGetMaxPcieLinkWidth |
| `pcie_speed` | a lower generation, while busy | 300 s | NVML: idle GPUs lower it themselves |
| `stuck` | busy at less than 40 % of its power, no step for 120 s | 120 s | what a hung NCCL kernel shows |
| `memory_full` (log) | more than 98 % taken | 60 s | our choice; torch's cache may take that much on purpose |
| `slow_clock` | a busy GPU's clock below 85 % of the busy ones' median | 60 s | all ranks wait for it; our choice |
| `slow_throttled` | throttled 60 of the last 300 s more than the median | | likewise |

[1] https://docs.nvidia.com/deploy/xid-errors/
[2] https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/ (health monitoring, and the limits in DCGM's source)
[3] https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/

Their action is "warn", or "log" where it is said. What is worth stopping for is for the user to say:

    from dataclasses import replace

    rules = [replace(rule, action="abort") if rule.name == "gpu_lost" else rule for rule in default_rules()]
"""

from lightning_air.health.rules import Rule
from lightning_air.health.xids import APPLICATION, CONTEXT_DEAD, HARDWARE

_BUSY = {"utilization_pct": (50.0, 100.0)}
_RESET = "The GPU needs a reset; take its machine out of the pool until then."
_REPLACE = "Leave its machine out, and have the GPU replaced."


def default_rules() -> list[Rule]:
    """Return the rules that count when nobody names others: a list of one's own, which may be changed.

    The module's docstring has a table of them, with their numbers and where these come from.
    """
    return [*_broken(), *_memory(), *_heat_and_power(), *_links(), *_speed()]


def _broken() -> list[Rule]:
    return [
        Rule("is_lost", above=0.5, name="gpu_lost", excludes_node=True, advice=_RESET),
        Rule(
            "xid",
            any_of=CONTEXT_DEAD,
            name="xid_context_dead",
            excludes_node=True,
            advice="What runs on this GPU cannot go on: end the run, and resume from the last checkpoint.",
        ),
        Rule(
            "xid",
            any_of=HARDWARE,
            name="xid_hardware",
            excludes_node=True,
            advice="Take a checkpoint while it goes on, and resume on another machine.",
        ),
        Rule("xid", any_of=APPLICATION, name="xid_application", action="log", advice="Look at the program first."),
        Rule("recovery_action", above=0, for_seconds=30, name="recovery_needed", advice=_RESET),
    ]


def _memory() -> list[Rule]:
    return [
        Rule("ecc_uncorrected", above=0, name="memory_errors", advice=_RESET),
        Rule("has_failed_remap", above=0.5, name="remap_failed", excludes_node=True, advice=_REPLACE),
        Rule("has_pending_remap", above=0.5, name="remap_pending", advice="Have the GPU reset after this run."),
        Rule(
            "has_pending_retirement", above=0.5, name="retirement_pending", advice="Have the GPU reset after this run."
        ),
        Rule("remapped_rows_uncorrectable", above=511, name="many_remapped_rows", excludes_node=True, advice=_REPLACE),
        Rule(
            "memory_used_pct",
            above=98,
            clear_at=95,
            for_seconds=60,
            name="memory_full",
            action="log",
            advice="If steps fail or slow down: smaller micro-batches, activation checkpointing or sharding.",
        ),
    ]


def _heat_and_power() -> list[Rule]:
    return [
        Rule(
            "temperature_margin_c",
            below=2,
            clear_at=5,
            for_seconds=30,
            name="hot",
            advice="It is about to slow down: look at the fans, the flow of air and the room of its machine.",
        ),
        Rule(
            "hbm_temperature_c",
            above=95,
            clear_at=92,
            for_seconds=60,
            name="hot_memory",
            advice="Look at the cooling of its machine; hot memory makes errors.",
        ),
        Rule(
            "throttled_thermal_seconds",
            above=6,
            over_seconds=60,
            clear_at=1,
            name="thermal_throttling",
            advice="Heat slows it down, and all ranks with it: look at the cooling of its machine.",
        ),
        Rule(
            "is_power_braked",
            above=0.5,
            for_seconds=30,
            name="power_brake",
            advice="The power supply of its machine asks for less: have it looked at.",
        ),
        Rule(
            "throttled_power_seconds",
            above=30,
            over_seconds=60,
            clear_at=15,
            name="power_capped",
            action="log",
            advice="Usual under full load; a limit below that of the other machines is not (`nvidia-smi -q -d POWER`).",
        ),
    ]


def _links() -> list[Rule]:
    return [
        Rule(
            "nvlink_crc_errors",
            above=6000,
            over_seconds=60,
            name="nvlink_errors",
            advice="Packets are sent again all the time, which slows collectives down: have the link looked at.",
        ),
        Rule(
            "nvlink_recoveries",
            above=0,
            over_seconds=60,
            name="nvlink_recoveries",
            advice="A link that fails again and again breaks collectives: have it looked at.",
        ),
        *(
            Rule(
                "pcie_replays",
                above=limit,
                over_seconds=60,
                given={"pcie_generation_max": generations},
                name=name,
                advice="Packets to the host are sent again: have the GPU's seat, riser and slot looked at.",
            )
            for name, limit, generations in (
                ("pcie_replays_gen4", 16, (1.0, 4.0)),
                ("pcie_replays_gen5", 31, (5.0, 99.0)),
            )
        ),
        Rule(
            "pcie_lanes_missing",
            above=0,
            for_seconds=60,
            name="pcie_lanes",
            advice="Copies to and from the host are slower: have the GPU's seat, riser and slot looked at.",
        ),
        Rule(
            "pcie_generations_missing",
            above=0,
            for_seconds=300,
            given=_BUSY,
            name="pcie_speed",
            advice="Copies to and from the host are slower: have the GPU's seat, riser and slot looked at.",
        ),
    ]


def _speed() -> list[Rule]:
    return [
        Rule(
            "power_used_pct",
            below=40,
            for_seconds=120,
            given={"utilization_pct": (99.0, 100.0), "seconds_without_step": (120.0, float("inf"))},
            name="stuck",
            advice="It waits inside a kernel, as a rule for another rank in a collective: see which rank is behind.",
        ),
        Rule(
            "sm_clock_mhz",
            below=85,
            compared="pct_of_median",
            clear_at=90,
            for_seconds=60,
            given=_BUSY,
            name="slow_clock",
            advice="All ranks wait for it: look at its temperature, its power and its limits.",
        ),
        Rule(
            "throttled_seconds",
            above=60,
            over_seconds=300,
            compared="minus_median",
            clear_at=30,
            name="slow_throttled",
            advice="All ranks wait for it: look at its temperature, its power and its limits.",
        ),
    ]
