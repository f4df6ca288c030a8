"""Where am I? The launch, the platform and the scratch disk, read from the environment.

The only room that reads environment variables. Given the same mapping it answers the same; it changes nothing, opens no
connection and imports neither Lightning nor torch. An environment that contradicts itself is a `ValueError` that names
the variables, before any process group could hang on it. An empty variable counts as unset.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

LaunchKind = Literal["air-node", "air-process", "torchrun", "slurm", "notebook", "local"]

# mlflow.start_run() adopts MLFLOW_RUN_ID and deletes it from os.environ. A logger built after that (the user opened the
# run first, or a second Trainer follows) would start a run of its own, so remember what the launch said.
_MLFLOW_RUN_ID_AT_IMPORT = os.environ.get("MLFLOW_RUN_ID")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which launcher started this process, and the place it gave to it.

    Attributes:
        kind: The launcher. Any launcher that sets RANK, WORLD_SIZE and LOCAL_RANK for each process is "air-process".
        node_rank: Index of the node; 0 where the launch does not say.
        num_nodes: None where the launch does not say: the Trainer's arguments decide.
        local_rank: Index of the process on its node; 0 in a process that has yet to start its siblings.
        local_world_size: Processes on this node, once all are started; None where the launch does not say.
        global_rank: None where it follows from the Trainer's arguments only.
        world_size: Processes on all nodes, once all are started; None where the launch does not say.
        master_address: Host of rank 0; None where Lightning chooses it.
        master_port: Port on that host.
        starts_processes: One process per node (or one in all) runs; Lightning's launcher has to start the local ranks.
        uses_agent_store: torchrun's agent already hosts the TCP store at the master's address and port.
        restart_count: How often torchrun has restarted the workers; 0 elsewhere.
    """

    kind: LaunchKind
    node_rank: int
    num_nodes: int | None
    local_rank: int
    local_world_size: int | None
    global_rank: int | None
    world_size: int | None
    master_address: str | None
    master_port: int | None
    starts_processes: bool
    uses_agent_store: bool
    restart_count: int


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The workspace, the run and the files that the platform handed to this process.

    Attributes:
        is_databricks: DATABRICKS_RUNTIME_VERSION (compute), DATABRICKS_ENV_VERSION (serverless) or both NUM_NODES and
            HYPERPARAMETERS_PATH (`databricks air run`) is set. DATABRICKS_HOST is no sign: laptops set it to log in.
        runtime_version: As "16.4" or, on serverless, "client.5".
        workspace_url: As "https://host", from DATABRICKS_HOST.
        user: The e-mail in DATABRICKS_USERNAME; no variable of the platform's own names the user.
        notebook_path: DATABRICKS_NOTEBOOK_PATH, which the caller may set: the platform tells it through dbutils only.
        mlflow_run_id: The run to adopt.
        mlflow_experiment_name: Absolute workspace path or plain name.
        mlflow_experiment_id: `mlflow.set_experiment()` leaves it here, too.
        mlflow_tracking_uri: As MLflow reads it.
        job_run_id: The job run behind serverless GPUs, as MLflow reads it; retries share it.
        code_source_path: Where `databricks air run` unpacked the code.
        hyperparameters_path: The YAML file with the workload's `parameters`.
        system_metrics_enabled: Whether MLflow is to log system metrics; None where MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
            does not say.
        system_metrics_interval_seconds: From one sample of them to the next, from
            MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL; None where it does not say.
        system_metrics_samples_per_point: MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING; None where it does not say.
    """

    is_databricks: bool
    runtime_version: str | None
    workspace_url: str | None
    user: str | None
    notebook_path: str | None
    mlflow_run_id: str | None
    mlflow_experiment_name: str | None
    mlflow_experiment_id: str | None
    mlflow_tracking_uri: str | None
    job_run_id: str | None
    code_source_path: str | None
    hyperparameters_path: str | None
    system_metrics_enabled: bool | None
    system_metrics_interval_seconds: float | None
    system_metrics_samples_per_point: int | None


class JobRun(NamedTuple):
    """What a scheduler calls one submission, which its retries share.

    Attributes:
        scheduler: Who starts it again.
        id: The scheduler's own name for it.
    """

    scheduler: Literal["databricks", "slurm", "torchrun"]
    id: str


@dataclass(frozen=True, kw_only=True)
class GpuVisibility:
    """Which of the machine's GPUs CUDA shows to this process, as the environment says it.

    Attributes:
        devices: CUDA_VISIBLE_DEVICES as it stands there; None where it is unset (all GPUs), "" for none at all.
        is_in_pci_order: CUDA_DEVICE_ORDER is PCI_BUS_ID, so that a number means the same GPU to CUDA and to NVML.
    """

    devices: str | None
    is_in_pci_order: bool


@dataclass(frozen=True, kw_only=True)
class StagingArea:
    """A local directory for files on their way to a volume, and the bytes this user may still write there."""

    path: Path
    free_bytes: int


def detect_launch(environ: Mapping[str, str] | None = None, *, interactive: bool = False) -> Launch:
    """Tell which launcher started this process and which place it has among the others.

    The most specific launcher wins: torchrun also runs inside SLURM and inside an AIR command, and both of them leave
    their own variables in its environment.

    Args:
        environ: The environment; None is `os.environ`.
        interactive: Python runs in a notebook or REPL. Only the caller knows: Databricks sets no variable that tells
            a notebook from a job on the same compute.

    Returns:
        The launch. Host names play no part in it: they are equal on all AIR nodes.

    Raises:
        ValueError: The variables contradict each other, one that the launch needs is missing, or one is no number. So
            does a SLURM batch script that asked for several tasks and forgot `srun`: the others would never come.
    """
    env = _Environment(os.environ if environ is None else environ)
    on_slurm = env.text("SLURM_NTASKS") is not None and env.text("SLURM_JOB_NAME") not in {"bash", "interactive"}
    if env.text("TORCHELASTIC_RUN_ID"):
        return _launch(env, "torchrun", _TORCHRUN)
    # A RANK that merely repeats SLURM's (`export RANK=$SLURM_PROCID`) leaves the job to SLURM, which can requeue it.
    if _has_rank_per_process(env) and not (on_slurm and env.text("RANK") == env.text("SLURM_PROCID")):
        return _launch(env, "air-process", _AIR)
    if env.text("NUM_NODES") and env.text("LOCAL_WORLD_SIZE"):
        return _launch(env, "air-node", _AIR._replace(rank=""))
    if on_slurm:
        return _slurm(env)
    # Before Lightning's launcher ran, a WORLD_SIZE is a leftover of something else.
    names = _LIGHTNING if env.text("LOCAL_RANK") else _LIGHTNING._replace(world_size="")
    return _launch(env, "notebook" if interactive else "local", names)


def detect_platform(environ: Mapping[str, str] | None = None) -> Platform:
    """Tell what the platform says about the workspace and the run.

    The names are those of the Databricks documents and of the public sources of MLflow and the Databricks SDK.

    Args:
        environ: The environment; None is `os.environ` with the MLFLOW_RUN_ID that was there when this module was
            imported, if it is gone since.
    """
    env = _Environment(os.environ if environ is None else environ)
    run_id_at_import = _MLFLOW_RUN_ID_AT_IMPORT if environ is None else None
    serverless = env.text("DATABRICKS_ENV_VERSION")
    version = env.text("DATABRICKS_RUNTIME_VERSION") or (f"client.{serverless}" if serverless else None)
    host = re.match(r"(?:https?://)?([^/?#]+)", env.text("DATABRICKS_HOST") or "", re.IGNORECASE)
    user = env.text("DATABRICKS_USERNAME")
    is_air_command = bool(env.text("NUM_NODES") and env.text("HYPERPARAMETERS_PATH"))
    return Platform(
        is_databricks=version is not None or is_air_command,
        runtime_version=version,
        workspace_url=f"https://{host[1]}" if host else None,
        user=user if user and "@" in user else None,
        notebook_path=env.text("DATABRICKS_NOTEBOOK_PATH"),
        mlflow_run_id=env.text("MLFLOW_RUN_ID") or run_id_at_import or None,
        mlflow_experiment_name=env.text("MLFLOW_EXPERIMENT_NAME"),
        mlflow_experiment_id=env.text("MLFLOW_EXPERIMENT_ID"),
        mlflow_tracking_uri=env.text("MLFLOW_TRACKING_URI"),
        job_run_id=env.text("SERVERLESS_GPU_COMPUTE_ASSOCIATED_JOB_RUN_ID"),
        code_source_path=env.text("CODE_SOURCE_PATH"),
        hyperparameters_path=env.text("HYPERPARAMETERS_PATH"),
        system_metrics_enabled=env.truth("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"),
        system_metrics_interval_seconds=env.seconds("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"),
        system_metrics_samples_per_point=env.count("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING"),
    )


def detect_job_run(environ: Mapping[str, str] | None = None) -> JobRun | None:
    """Tell which submission this process belongs to, if anything starts it again under the same name.

    The outermost scheduler wins. A SLURM job is named without its step, since a batch script may repeat its `srun`.

    Args:
        environ: The environment; None is `os.environ`.
    """
    env = _Environment(os.environ if environ is None else environ)
    if databricks := env.text("SERVERLESS_GPU_COMPUTE_ASSOCIATED_JOB_RUN_ID"):
        return JobRun("databricks", databricks)
    if slurm := env.text("SLURM_JOB_ID"):
        return JobRun("slurm", slurm)
    torchrun = env.text("TORCHELASTIC_RUN_ID")
    return JobRun("torchrun", torchrun) if torchrun and torchrun != "none" else None  # "none" is torchrun's default


def detect_gpu_visibility(environ: Mapping[str, str] | None = None) -> GpuVisibility:
    """Tell which GPUs CUDA was told to show.

    Args:
        environ: The environment; None is `os.environ`.
    """
    environ = os.environ if environ is None else environ
    # The one variable that means something when it is empty: CUDA then shows no GPU.
    return GpuVisibility(
        devices=environ.get("CUDA_VISIBLE_DEVICES"),
        is_in_pci_order=environ.get("CUDA_DEVICE_ORDER", "").strip() == "PCI_BUS_ID",
    )


def global_seed(environ: Mapping[str, str] | None = None) -> int | None:
    """Return what `seed_everything` was given, which it leaves in PL_GLOBAL_SEED; None if nothing.

    Args:
        environ: The environment; None is `os.environ`.

    Raises:
        ValueError: If the variable holds no whole number.
    """
    text = _Environment(os.environ if environ is None else environ).text("PL_GLOBAL_SEED")
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"PL_GLOBAL_SEED must be a whole number, got {text!r}. Call `seed_everything`, or unset it."
        ) from None


def staging_area(path: str | Path | None = None) -> StagingArea:
    """Choose the local directory for files on their way to a volume; creates nothing.

    Args:
        path: The directory, which need not exist yet; None is the system's temporary directory, on AIR an NVMe disk.

    Returns:
        The absolute path, and the free bytes of the file system that it is or will be on.

    Raises:
        ValueError: The path is under `/local_disk0`.
    """
    chosen = Path(tempfile.gettempdir() if path is None else path).expanduser().absolute()
    if chosen.is_relative_to("/local_disk0") and path is None:
        chosen = Path("/tmp")  # noqa: S108  # classic clusters point TMPDIR at the disk that serverless cannot write
    if chosen.resolve().is_relative_to("/local_disk0"):
        raise ValueError(
            f"The staging directory must not be under /local_disk0, which serverless compute cannot write, got "
            f"{str(chosen)!r}. Pass one under '/tmp'."
        )
    existing = next(folder for folder in (chosen, *chosen.parents) if folder.exists())
    return StagingArea(path=chosen, free_bytes=shutil.disk_usage(existing).free)


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return how much host memory this process may still take, within its container's limit; None if nothing tells.

    Args:
        root: Where `proc` and `sys` lie.
    """
    free = []
    with suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such controller, or "max"
            free.append(int((root / limit).read_text()) - _unreclaimable(root / used))
    return max(0, min(free)) if free else None


def _unreclaimable(used: Path) -> int:
    """Return a container's memory without the page cache that it gives back when asked."""
    statistics = dict(line.split() for line in (used.parent / "memory.stat").read_text().splitlines())
    cache = int(statistics.get("inactive_file", statistics.get("total_inactive_file", 0)))
    return int(used.read_text()) - cache


class _Environment:
    """Reads one mapping; an empty or blank value counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str | None:
        return self._environ.get(name, "").strip() or None

    def truth(self, name: str) -> bool | None:
        """Return what a switch of MLflow's says; None if it is nothing that MLflow knows, who will complain itself."""
        return {"true": True, "1": True, "false": False, "0": False}.get((self.text(name) or "").lower())

    def seconds(self, name: str) -> float | None:
        """Return a positive number of seconds; None for anything else."""
        with suppress(ValueError):
            if 0 < (seconds := float(self.text(name) or "")) < float("inf"):
                return seconds
        return None

    def count(self, name: str) -> int | None:
        """Return a positive whole number; None for anything else."""
        value = self.text(name) or ""
        return int(value) if re.fullmatch(r"[0-9]{1,10}", value) and int(value) else None

    def number(self, name: str, *, minimum: int = 0, maximum: int = 10**9) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if re.fullmatch(r"[0-9]{1,10}", value) is None or not minimum <= int(value) <= maximum:
            self.refuse(f"{name} must be a whole number from {minimum} to {maximum}.", name)
        return int(value)

    def refuse(self, reason: str, *names: str) -> NoReturn:
        found = ", ".join(f"{name}={self._environ.get(name, '')!r}" for name in names if name)
        raise ValueError(f"The launch environment cannot be right: {reason} Found {found}.")


class _Names(NamedTuple):
    """The variable a launcher puts each number in; "" where it gives none."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str
    num_nodes: str


_AIR = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES")
# The AIR command around torchrun has a NODE_RANK of its own, but the rendezvous may number the nodes otherwise.
_TORCHRUN = _AIR._replace(node_rank="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE")
_LIGHTNING = _Names("", "WORLD_SIZE", "LOCAL_RANK", "", "NODE_RANK", "")


def _has_rank_per_process(env: _Environment) -> bool:
    # A RANK without LOCAL_RANK in a world of one, or of no size, is nobody's launch: scripts that open a process group
    # by hand leave it behind. In a larger world it is half a launch, and to go on alone would train many models.
    is_shared = env.text("WORLD_SIZE") not in {None, "1"}
    return env.text("RANK") is not None and (env.text("LOCAL_RANK") is not None or is_shared)


def _slurm(env: _Environment) -> Launch:
    """Read the place srun gave; the address of rank 0 is left to Lightning, which resolves the node list."""
    if env.text("SLURM_NTASKS") != "1" and not (env.text("SLURM_STEP_ID") or env.text("SLURM_STEPID")):
        env.refuse(
            "a batch script runs once, so the other tasks do not exist and rank 0 would wait for them. Start Python "
            "with `srun`, or name the job 'interactive' (`--job-name`) to let Lightning start the processes.",
            *("SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_NAME"),
        )
    # A step may run on fewer nodes than its job, whose variables it inherits.
    num_nodes = "SLURM_STEP_NUM_NODES" if env.text("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    names = _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID", num_nodes)
    return _launch(env, "slurm", names, local_world_size=_slurm_tasks_here(env, names))


def _slurm_tasks_here(env: _Environment, names: _Names) -> int | None:
    num_tasks, num_nodes = env.number(names.world_size) or 1, env.number(names.num_nodes, minimum=1)
    node_rank = env.number(names.node_rank) or 0
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.text(name) or "")  # "2(x3),1" is 2, 2, 2, 1
        layout = [int(tasks) for tasks, repeats in parts for _ in range(int(repeats or 1))]
        if sum(layout) == num_tasks and node_rank < len(layout):
            return layout[node_rank]
    return num_tasks // num_nodes if num_nodes and num_tasks % num_nodes == 0 else None


def _launch(env: _Environment, kind: LaunchKind, names: _Names, *, local_world_size: int | None = None) -> Launch:
    """Read the numbers, complete them from each other, and refuse what does not fit together."""
    _refuse_half_a_launch(env, kind, names)
    rank, local_rank = env.number(names.rank), env.number(names.local_rank) or 0
    local_size = local_world_size or env.number(names.local_world_size, minimum=1)
    num_nodes, world_size = env.number(names.num_nodes, minimum=1), env.number(names.world_size, minimum=1)
    if local_size and num_nodes and world_size is None:  # LightningEnvironment deletes WORLD_SIZE at teardown
        world_size = num_nodes * local_size
    if local_size and world_size and num_nodes is None and world_size % local_size == 0:
        num_nodes = world_size // local_size
    node_rank = env.number(names.node_rank)
    if node_rank is None and rank is not None and local_size:
        node_rank = rank // local_size
    if rank is None and (local_size or not node_rank):
        rank = (node_rank or 0) * (local_size or 0) + local_rank
    launch = Launch(
        kind=kind,
        node_rank=node_rank or 0,
        num_nodes=num_nodes,
        local_rank=local_rank,
        local_world_size=local_size,
        global_rank=rank,
        world_size=world_size,
        master_address=env.text("MASTER_ADDR"),
        master_port=env.number("MASTER_PORT", minimum=1, maximum=65535),
        starts_processes=kind in {"air-node", "notebook", "local"} and env.text("LOCAL_RANK") is None,
        uses_agent_store=kind == "torchrun" and env.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=(env.number("TORCHELASTIC_RESTART_COUNT") or 0) if kind == "torchrun" else 0,
    )
    reason = _contradiction(launch, knows_node_rank=node_rank is not None)
    if reason:
        remedy = "Correct these variables, or unset those that another launch left behind."
        env.refuse(f"{reason} {remedy}", *names, "MASTER_ADDR", "MASTER_PORT")
    return launch


def _refuse_half_a_launch(env: _Environment, kind: LaunchKind, names: _Names) -> None:
    needed = {"air-node": [names.node_rank], "notebook": [], "local": []}.get(kind, names[:3])
    for name in needed:
        if env.text(name) is None:
            env.refuse(f"{name} is missing ({kind}). Set it, or unset what another launch left behind.", *names)


def _contradiction(launch: Launch, *, knows_node_rank: bool) -> str | None:
    """Say what in a launch does not fit together; None where all does."""
    nodes, local_size, world = launch.num_nodes, launch.local_world_size, launch.world_size
    # torchrun and SLURM may start another number of processes on each node, and SLURM may deal the ranks out in turn.
    is_even = not (nodes and local_size and world) or nodes * local_size == world
    if not is_even and launch.kind in {"air-node", "air-process"}:
        return f"{nodes} nodes of {local_size} processes do not make a world of {world}."
    for what, index, size in (
        ("global rank", launch.global_rank, world),
        ("local rank", launch.local_rank, local_size),
        ("node rank", launch.node_rank, nodes),
    ):
        if index is not None and size is not None and index >= size:
            return f"{what} {index} is not below {size}."
    if knows_node_rank and launch.kind != "slurm" and is_even and (local_size or launch.node_rank == 0):
        expected = launch.node_rank * (local_size or 0) + launch.local_rank
        if launch.global_rank != expected:
            return f"local rank {launch.local_rank} of node {launch.node_rank} has global rank {expected}."
    if launch.kind == "slurm" or ((world or 1) == 1 and launch.node_rank == 0):
        return None
    # Alone on its node, Lightning's own launch may leave the address out (loopback), but never the port.
    needs_address = launch.kind not in {"notebook", "local"} or launch.node_rank > 0
    if launch.master_port is None or (launch.master_address is None and needs_address):
        return "more than one process has to meet at MASTER_ADDR and MASTER_PORT, the host of rank 0 and a free port."
    return None
