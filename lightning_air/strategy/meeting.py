"""The ranks meet at a store before there is a process group.

So a missing rank is named after a bounded wait, ranks that were started differently are told apart, and so are a port
in use and a rank that is late.
"""

import itertools
import json
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_air.strategy.membership import Membership

# What a step may take beyond what it was given: answers travel, and the others wait longer than rank 0 does for them.
_GRACE_SECONDS = 15.0
_TOLD_SECONDS = 5.0
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_MAX_NAMED_RANKS = 16

# Every rank joins equally often, so the same number means the same group on all of them.
_joins = itertools.count()


def meet(membership: Membership, join_timeout: timedelta) -> dist.Store:
    """Return a store that every rank is known to have reached. Collective: every rank calls this.

    On a thread of its own, so that Ctrl-C is heard and every wait has an end: torch waits without one for the greeting
    of a program that is no store, and for the answer of a store whose machine is frozen.

    Raises:
        RuntimeError: If ranks are missing after `join_timeout` (they are named), they disagree, or the port is taken.
    """
    meeting = _Meeting(membership, join_timeout)
    stores: list[dist.Store] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()  # Python takes a thread for ended whose `join` was interrupted

    def hold() -> None:
        try:
            stores.append(meeting.hold())
        except _GivenUpError:
            pass  # its traceback would keep the store, and the port with it
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that has to know
            errors.append(error)
        finally:
            has_ended.set()

    thread = threading.Thread(target=hold, name="air-join", daemon=True)
    thread.start()
    try:
        while not has_ended.wait(_POLL_SECONDS) and time.monotonic() < meeting.deadline:
            pass
    finally:
        # A daemon thread that comes back from C++ when the interpreter is gone aborts the process.
        meeting.given_up.set()
        thread.join(1.0)
    if errors:
        raise errors[0]
    if stores:
        return stores[0]
    if meeting.is_open:
        raise RuntimeError(f"The store of {membership.host} at {membership.where} has stopped answering. See its log.")
    raise meeting.not_opened()


class _GivenUpError(Exception):
    """Nobody waits for the end of this meeting any more."""


class _Meeting:
    """What the ranks say to each other before there is a group.

    Attributes:
        is_open: Whether the store has been reached.
        deadline: When the step that is under way has taken too long, in the time of `time.monotonic`.
        given_up: Set by whoever does not wait any longer; `hold` then ends soon, unless torch hangs.
    """

    def __init__(self, membership: Membership, join_timeout: timedelta) -> None:
        self._membership = membership
        self._join_seconds = join_timeout.total_seconds()
        self._hosts = membership.global_rank == 0 and not membership.agent_hosts_store
        self.is_open = False
        self.deadline = time.monotonic() + self._join_seconds + _GRACE_SECONDS
        self.given_up = threading.Event()

    def hold(self) -> dist.Store:
        """Return a store that every rank is known to have reached, and that holds nothing of another group."""
        # torchrun's agent keeps its store through restarts, with the addresses of the ranks that are gone.
        name = f"lightning_air/group/{self._membership.attempt}/{next(_joins)}"
        end = time.monotonic() + self._join_seconds
        try:
            store = dist.PrefixStore(name, self._open_store(end))
            objection = self._roll_call(store)
        except dist.DistNetworkError:
            # Rank 0 had not yet destroyed an earlier group, and closed that group's store while we waited in it.
            store = dist.PrefixStore(name, self._open_store(max(end, time.monotonic() + _GRACE_SECONDS)))
            objection = self._roll_call(store)
        if objection:
            raise RuntimeError(objection)
        return store

    def _open_store(self, end: float) -> dist.TCPStore:
        here = self._membership
        self.deadline = end + _GRACE_SECONDS
        try:
            if not self._hosts:
                self._await_listener(end)
            store = dist.TCPStore(
                here.address,
                here.port,
                here.world_size,
                is_master=self._hosts,
                # Whoever still holds an earlier group's store holds its port, which the next group is to use again.
                multi_tenant=True,
                timeout=timedelta(seconds=max(end - time.monotonic(), 1.0)),
                wait_for_workers=False,
            )
        except (dist.DistError, OSError) as error:
            raise self.not_opened(_first_line(error)) from error
        self.is_open = True
        return store

    def _await_listener(self, end: float) -> None:
        """Return when something listens at the address.

        Torch's own wait comes back up to a minute late, may take twice the time it is given, and nothing can end it.

        Raises:
            OSError: If nothing does until then.
        """
        address = (self._membership.address, self._membership.port)
        while True:
            try:
                socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            except OSError:
                if time.monotonic() >= end:
                    raise
                self._pause()
            else:
                return

    def not_opened(self, reason: str = "") -> RuntimeError:
        """Return the error of a store that could not be opened; without a reason, torch has not come back with one."""
        host, where = self._membership.host, self._membership.where
        if self._hosts:
            reason = reason or "it does not reach itself there"
            return RuntimeError(
                f"Rank 0 cannot listen on {where}: {reason}. If the port is in use, stop the process that holds it or "
                "set MASTER_PORT to a free one on every rank; if MASTER_ADDR is not a name or address of this machine, "
                "correct it."
            )
        reason = reason or "what listens there took the connection and was silent; another program may hold the port"
        return RuntimeError(
            f"No answer from {host} at {where} within {self._join_seconds:g} s: {reason}. See its log; check that "
            "MASTER_ADDR and MASTER_PORT are the same on every rank and reachable."
        )

    def _roll_call(self, store: dist.Store) -> str:
        """Return what is wrong, or ""; rank 0 looks and tells the others, so that all say the same."""
        here = self._membership
        mine = ", ".join(part for part in (f"world size {here.world_size}", here.plan) if part)
        if here.global_rank == 0:
            return self._call_the_roll(store, mine)
        # First rank 0: who waited for the others from an earlier moment than it does would leave before it has decided.
        if not self._came(store, ["present/0"], self._join_seconds):
            raise RuntimeError(self._missing([0], here.world_size))
        store.set(f"present/{here.global_rank}", mine)
        if not self._came(store, ["verdict"], self._join_seconds + _GRACE_SECONDS):
            raise RuntimeError(f"{here.describe(0)} came to {here.where} and then was silent. See its log.")
        verdict = json.loads(store.get("verdict"))
        store.set(f"told/{here.global_rank}", "1")
        # Rank 0 does not look for ranks beyond its own world.
        objection: str = verdict["objection"] or _difference(here.global_rank, mine, verdict["rank_0"])
        return objection

    def _call_the_roll(self, store: dist.Store, mine: str) -> str:
        store.set("present/0", mine)
        ranks = range(self._membership.world_size)
        self._came(store, [f"present/{rank}" for rank in ranks], self._join_seconds)
        came = [rank for rank in ranks if store.check([f"present/{rank}"])]
        missing = [rank for rank in ranks if rank not in came]
        said = {rank: store.get(f"present/{rank}").decode() for rank in came}
        difference = next((_difference(rank, what, mine) for rank, what in said.items() if what != mine), "")
        # The difference first: where a world size is wrong, missing ranks may be its consequence.
        objection = f"{difference} {self._missing(missing, len(ranks)) if missing else ''}".strip()
        store.set("verdict", json.dumps({"objection": objection, "rank_0": mine}))
        others = [f"told/{rank}" for rank in came if rank != 0]
        if objection and others:  # this process holds the store: it stays until those who came have read the answer
            self._came(store, others, _TOLD_SECONDS)
        return objection

    def _came(self, store: dist.Store, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all keys were there within so many seconds. Not `Store.wait`, which nothing can end."""
        end = time.monotonic() + seconds
        self.deadline = end + _GRACE_SECONDS
        while not store.check(list(keys)):
            self._pause()
            if time.monotonic() >= end:
                return False
        return True

    def _pause(self) -> None:
        if self.given_up.wait(_POLL_SECONDS):
            raise _GivenUpError

    def _missing(self, ranks: Sequence[int], world_size: int) -> str:
        names = ", ".join(self._membership.describe(rank) for rank in ranks[:_MAX_NAMED_RANKS])
        more = f" and {len(ranks) - _MAX_NAMED_RANKS} more" if len(ranks) > _MAX_NAMED_RANKS else ""
        return (
            f"{len(ranks)} of {world_size} ranks did not join within {self._join_seconds:g} s: {names}{more}. "
            "See their logs, or raise join_timeout if their start is slow."
        )


def _difference(rank: int, said: str, by_rank_0: str) -> str:
    if said == by_rank_0:
        return ""
    return (
        f"Rank {rank} has {said} and rank 0 has {by_rank_0}. Start every rank with the same environment and the same "
        "options."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
