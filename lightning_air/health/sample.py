"""What one GPU said at one moment, and the names of its states."""

from dataclasses import dataclass

# What NVML's bits mean. Idle clocks and clocks that somebody has set are no sign of trouble.
_THROTTLE_NAMES = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
HARMLESS_REASONS = 0x1 | 0x2 | 0x100

_RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)


@dataclass(frozen=True, kw_only=True)
class GPUSample:
    """One reading of one GPU. A value is None where the GPU, its driver or its owner does not tell.

    Counters count from when the driver was loaded; `remapped_rows_*` over the life of the GPU.

    Attributes:
        uuid: NVML's name for it, "GPU-…", or "MIG-…" for an instance.
        index: NVML's number of the GPU, as `nvidia-smi` shows it; an instance has its GPU's.
        name: The model, such as "NVIDIA H100 80GB HBM3".
        parent_uuid: The GPU of a MIG instance. All but utilisation and memory are then readings of that GPU.
        utilization_pct: Share of the time in which a kernel ran.
        memory_used_bytes: Taken by processes, not by the driver.
        memory_total_bytes: All there is.
        temperature_c: Of the chip.
        temperature_margin_c: How far it is below the temperature at which the GPU slows itself down.
        temperature_slowdown_c: That temperature; not told from Ada on, where only the margin is.
        temperature_shutdown_c: Where the GPU turns itself off; not told from Ada on.
        hbm_temperature_c: Of the memory.
        power_w: Drawn now.
        power_limit_w: The limit that is enforced now.
        sm_clock_mhz: Of the multiprocessors.
        sm_clock_max_mhz: The highest they can have.
        memory_clock_mhz: Of the memory.
        memory_clock_max_mhz: The highest it can have.
        throttle_reasons: NVML's bits for why the clocks are not higher; `throttle_names` spells them out.
        throttled_power_seconds: Time below the wanted clocks because of the power limit.
        throttled_thermal_seconds: Likewise because of heat.
        throttled_board_seconds: Likewise because of the board's limits, external power brakes among them.
        throttled_reliability_seconds: Likewise because of the voltage that is safe.
        ecc_corrected: Memory errors that did no harm.
        ecc_uncorrected: Memory errors that did.
        remapped_rows_correctable: Rows of memory replaced for corrected errors.
        remapped_rows_uncorrectable: Rows of memory replaced for uncorrected errors.
        has_pending_remap: A row will be replaced at the next reset.
        has_failed_remap: A row could not be replaced; the GPU has to be.
        has_pending_retirement: A page (GPUs before Ampere) will be retired at the next reset.
        nvlink_crc_errors: Damaged packets and flow-control packets on all links.
        nvlink_replays: Packets sent again on all links.
        nvlink_recoveries: Links brought up again.
        pcie_replays: Packets sent again to or from the host.
        pcie_width: Lanes in use.
        pcie_width_max: Lanes that the GPU and its slot have.
        pcie_generation: In use; an idle GPU lowers it to save power.
        pcie_generation_max: That the GPU and its slot have.
        recovery_action: NVML's number for what would heal the GPU, 0 for nothing; `recovery_name` spells it out.
        xids: The driver's error numbers (XID) for it since sampling began, oldest first, the last 16. Always empty in a
            single reading: they are told as they happen.
        is_lost: The driver has lost the GPU. All values are None then.
    """

    uuid: str
    index: int
    name: str
    parent_uuid: str | None = None
    utilization_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    temperature_margin_c: float | None = None
    temperature_slowdown_c: float | None = None
    temperature_shutdown_c: float | None = None
    hbm_temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    throttle_reasons: int | None = None
    throttled_power_seconds: float | None = None
    throttled_thermal_seconds: float | None = None
    throttled_board_seconds: float | None = None
    throttled_reliability_seconds: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    has_pending_remap: bool | None = None
    has_failed_remap: bool | None = None
    has_pending_retirement: bool | None = None
    nvlink_crc_errors: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    pcie_replays: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    recovery_action: int | None = None
    xids: tuple[int, ...] = ()
    is_lost: bool = False

    @property
    def throttle_names(self) -> tuple[str, ...]:
        """The bits of `throttle_reasons` in words, such as ("sw_power_cap",); a bit without a name as "0x800"."""
        bits = self.throttle_reasons or 0
        return tuple(
            _THROTTLE_NAMES.get(1 << position, hex(1 << position))
            for position in range(bits.bit_length())
            if bits >> position & 1
        )

    @property
    def is_throttled(self) -> bool:
        """Whether something other than idleness or somebody's setting keeps the clocks down."""
        return bool((self.throttle_reasons or 0) & ~HARMLESS_REASONS)

    @property
    def recovery_name(self) -> str | None:
        """`recovery_action` in words, such as "gpu_reset"; a number without a name as "action_9"."""
        if self.recovery_action is None:
            return None
        is_known = 0 <= self.recovery_action < len(_RECOVERY_ACTIONS)
        return _RECOVERY_ACTIONS[self.recovery_action] if is_known else f"action_{self.recovery_action}"

    @property
    def memory_used_pct(self) -> float | None:
        """Share of the memory that is taken."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return 100.0 * self.memory_used_bytes / self.memory_total_bytes
