"""All that log into a run stay within its cap together, whatever the server does and whoever is killed in between."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.budget import DEFAULT_CAP
from lightning_air.tracking.charging import (
    BEFORE,
    STEPS_TAG,
    Charge,
    Uncharged,
    charges_of,
    new_writer,
    writer_tag,
)
from lightning_air.tracking.door import open_door
from lightning_air.tracking.door_errors import Busy, DoorError, Unreachable
from tests.tracking.local_store import MLFLOW_WARNING, local_client


class Server:
    """Has the tags and the points of one run.

    Attributes:
        meanwhile: Called before and after each request; may raise, as if it, or its answer, were lost.
    """

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.points: set[tuple[str, int]] = set()
        self.num_requests = 0
        self.meanwhile: Callable[[], object] = lambda: None

    @property
    def charged(self) -> int:
        return sum(charges_of(self.tags).values())

    def store(self, points: set[tuple[str, int]]) -> None:
        self.meanwhile()
        self.points |= points
        self.meanwhile()

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = 30.0) -> None:
        assert run_id == "run"
        self.num_requests += 1
        self.meanwhile()
        self.tags[key] = value
        self.meanwhile()

    def get_tags(self, run_id: str, *, timeout_seconds: float = 30.0) -> Mapping[str, str]:
        assert run_id == "run"
        self.num_requests += 1
        self.meanwhile()
        tags = dict(self.tags)
        self.meanwhile()
        return tags

    def log_batch(self, *_: object, **__: object) -> None:
        raise AssertionError("nobody should")


class Spool:
    """A spool as far as charging goes: points in their order, and how many of them are through."""

    def __init__(self, server: Server, cap: int, *, found: int = 0) -> None:
        self.writer = new_writer()
        self.server, self.cap, self.found = server, cap, found
        self.num_sent = self.num_cut = self.num_made = 0
        self.is_busy = self.is_over = False
        self.restart()

    def restart(self) -> None:
        """Another process goes on with it; what was not acknowledged will be sent again."""
        self.charge = Charge(self.server, "run", writer=self.writer, cap=self.cap, found=self.found)

    def send(self, num_points: int) -> None:
        """Send the next points; raises what the server does, and then nothing is noted."""
        self.is_busy = True
        try:
            position = self.num_sent + self.num_cut
            self.num_made = max(self.num_made, position + num_points)
            num_allowed = self.charge(position + num_points) - position
            assert num_allowed <= num_points
            num_allowed = max(0, num_allowed)
            self.server.store({(self.writer, position + index) for index in range(num_allowed)})
            self.num_sent += num_allowed
            self.num_cut += num_points - num_allowed
        finally:
            self.is_busy = False

    def settle(self) -> None:
        """Send what was not acknowledged, and end."""
        self.send(self.num_made - self.num_sent - self.num_cut)
        self.is_busy = True
        try:
            self.charge.settle(self.num_sent + self.num_cut)
            self.is_over = True
        finally:
            self.is_busy = False


class Chaos:
    """Has one of three spools act, and others between any two of its requests, each of which may be lost."""

    def __init__(self, server: Server, cap: int, found: int, data: st.DataObject) -> None:
        self.server, self.cap, self.found, self.data = server, cap, found, data
        self.spools = [Spool(server, cap, found=found) for _ in range(3)]

    def check(self) -> None:
        assert len(self.server.points) <= max(self.cap, self.found)
        charged = charges_of(self.server.tags)
        for spool in self.spools:
            num_stored = sum(who == spool.writer for who, _ in self.server.points)
            assert num_stored <= charged.get(spool.writer, 0)

    def act(self, depth: int = 0) -> None:
        idle = [spool for spool in self.spools if not spool.is_busy and not spool.is_over]
        if not idle:
            return
        spool = self.data.draw(st.sampled_from(idle))
        before, self.server.meanwhile = self.server.meanwhile, lambda: self.interfere(depth)
        try:
            if self.data.draw(st.integers(0, 9)) == 0:
                spool.settle()
            else:
                spool.send(self.data.draw(st.integers(0, 60)))
        except Unreachable:
            if self.data.draw(st.booleans()):
                spool.restart()
        finally:
            self.server.meanwhile = before
        self.check()

    def interfere(self, depth: int) -> None:
        chance = self.data.draw(st.integers(0, 11))
        if chance == 0:
            raise Unreachable("lost")
        if chance <= 2 and depth < 2:
            self.act(depth + 1)


@settings(max_examples=200, deadline=None)
@given(cap=st.integers(1, 400), found=st.integers(0, 100), num_events=st.integers(1, 40), data=st.data())
def test_the_cap_holds_whoever_sends_at_once_and_is_killed(
    *, cap: int, found: int, num_events: int, data: st.DataObject
) -> None:
    server = Server()
    server.points = {("somebody", index) for index in range(found)}
    chaos = Chaos(server, cap, found, data)
    for _ in range(num_events):
        chaos.act()
    for spool in chaos.spools:
        if not spool.is_over:
            spool.settle()
    chaos.check()
    assert server.charged >= len(server.points) - found


@settings(max_examples=100, deadline=None)
@given(cap=st.integers(1, 5_000), batches=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900)), max_size=30))
def test_at_a_clean_end_the_run_says_exactly_what_it_has_and_all_of_the_cap_was_to_be_had(
    cap: int, batches: list[tuple[int, int]]
) -> None:
    server = Server()
    spools = [Spool(server, cap) for _ in range(3)]
    for index, num_points in batches:
        spools[index].send(num_points)
        assert server.charged <= cap
    wanted = sum(num_points for _, num_points in batches)
    for spool in spools:
        # What was cut stays charged, since a killed process may have sent it. Here none was killed.
        spool.num_cut, spool.num_made = 0, spool.num_sent
        spool.settle()

    assert server.charged == len(server.points) == int(server.tags.get(STEPS_TAG, "0"))
    assert len(server.points) >= min(wanted, cap - 3 * (cap // 100))


def test_attempts_that_end_well_use_up_no_more_than_they_send() -> None:
    """A lease of 10,000 points each, never given back, would use ten million up after 900 attempts."""
    server = Server()
    for _ in range(400):
        spool = Spool(server, DEFAULT_CAP)
        spool.send(1)
        spool.settle()

    assert server.charged == len(server.points) == 400


def test_no_number_of_killed_attempts_uses_the_cap_up() -> None:
    server = Server()
    for _ in range(800):
        spool = Spool(server, DEFAULT_CAP)
        spool.send(1)
        assert spool.num_sent == 1


def test_a_tag_goes_up_while_others_write() -> None:
    server = Server()
    one, other = Spool(server, 100_000), Spool(server, 100_000)
    one.send(5_000)
    before = server.charged
    other.send(1)
    other.settle()

    assert len(server.points) == 5_001
    assert before + 1 == server.charged


def test_it_is_seldom_that_the_server_is_asked() -> None:
    server = Server()
    spool = Spool(server, DEFAULT_CAP)
    for _ in range(1_000):
        spool.send(1_000)

    assert spool.num_sent == 1_000_000
    assert server.num_requests < 400


def test_of_two_that_raise_theirs_at_once_nobody_gets_what_the_other_has() -> None:
    server = Server()
    one, other = Spool(server, 100), Spool(server, 100)
    one.send(50)
    requests: list[int] = []

    def once() -> None:
        requests.append(1)
        if len(requests) == 4:  # the tag of `one` is raised, and it has not read the others' yet
            server.meanwhile = lambda: None
            other.send(45)
            server.meanwhile = once

    server.meanwhile = once
    one.charge = Charge(server, "run", writer=one.writer, cap=100)
    one.send(40)
    server.meanwhile = lambda: None
    other.send(60)
    one.send(60)

    assert len(server.points) == 100 == server.charged


def test_the_others_points_are_told_as_they_grow() -> None:
    server, told = Server(), list[int]()
    one = Charge(server, "run", writer="one", cap=1_000, on_others=told.append)
    other = Spool(server, 1_000)
    one(10)
    other.send(300)
    other.settle()
    one(500)
    one(900)

    assert told[-1] == 300
    assert told == sorted(told)


def test_what_the_run_had_before_is_written_down_once() -> None:
    server = Server()
    Spool(server, 1_000, found=400).send(10)
    assert charges_of(server.tags)[BEFORE] == 400
    server.tags[writer_tag(BEFORE)] = "100"  # somebody knows better

    Spool(server, 1_000, found=400).send(10)

    assert charges_of(server.tags)[BEFORE] == 100


def test_what_the_run_had_before_is_written_down_though_the_server_was_away() -> None:
    server = Server()
    spool, requests = Spool(server, 1_000, found=990), list[int]()

    def third() -> None:
        requests.append(1)
        if len(requests) == 3:  # the tags are read, and the first is to be set
            raise Unreachable("away")

    server.meanwhile = third
    with pytest.raises(Unreachable):
        spool.send(100)
    server.meanwhile = lambda: None

    spool.send(100)

    assert charges_of(server.tags)[BEFORE] == 990
    assert len(server.points) == 10


def test_what_a_killed_process_may_have_sent_stays_charged() -> None:
    """It had been granted 90, which others have taken up to the cap since it was killed."""
    server = Server()
    killed = Spool(server, 100)
    server.tags[writer_tag(killed.writer)] = "90"
    server.tags[writer_tag("other")] = "40"

    killed.send(80)
    assert killed.num_sent == 60
    assert charges_of(server.tags)[killed.writer] == 90
    killed.settle()

    assert charges_of(server.tags)[killed.writer] == 80


def test_a_server_that_forgets_a_tag_grants_nothing() -> None:
    class Forgetful(Server):
        def set_tag(self, *_: object, **__: object) -> None:
            pass

    with pytest.raises(Unreachable, match="is 0 though the server has taken 5"):
        Charge(Forgetful(), "run", writer="w", cap=100)(5)


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_the_tags_are_in_a_real_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    client = local_client(tmp_path_factory)
    run_id = client.create_run("0").info.run_id
    uri = client._tracking_client.tracking_uri
    assert charges_of(client.get_run(run_id).data.tags) == {}

    charge = Charge(open_door(uri), run_id, writer="w", cap=10_000)
    assert charge(25) == 25
    assert charges_of(client.get_run(run_id).data.tags) == {"w": 35}
    assert client.get_run(run_id).data.tags[STEPS_TAG] == "35"
    charge.settle(25)
    assert charges_of(client.get_run(run_id).data.tags) == {"w": 25}

    with pytest.raises(DoorError, match="unknown"):
        Charge(open_door(uri), "unknown", writer="w", cap=10_000)(1)


def test_tags_are_read_as_they_were_written() -> None:
    tags = {writer_tag("a"): "10000000", writer_tag("b"): "many", STEPS_TAG: "5", "other": "7"}

    assert charges_of(tags) == {"a": 10_000_000}


def test_an_outage_grants_nothing_and_loses_nothing() -> None:
    server = Server()
    charge = Charge(server, "run", writer="w", cap=100)

    def away() -> None:
        raise Busy("later")

    server.meanwhile = away
    for _ in range(3):
        with pytest.raises(Busy):
            charge(10)
    assert charge.own == 0
    server.meanwhile = lambda: None

    assert charge(10) == 10
    assert server.charged == 10


def test_uncharged_lets_all_pass() -> None:
    assert Uncharged()(7) == 7
    Uncharged().settle(7, 1.0)


def test_what_a_killed_process_has_stored_counts_although_it_was_cut_when_it_was_sent_again() -> None:
    server = Server()
    spool = Spool(server, 100)
    assert spool.charge(20) == 20
    server.store({(spool.writer, index) for index in range(20)})  # and is killed before it notes that
    spool.restart()
    server.tags[writer_tag("another")] = "95"  # raised, and not lowered yet to what it is granted
    spool.send(45)
    assert (spool.num_sent, spool.num_cut) == (5, 40)
    server.tags[writer_tag("another")] = "0"
    spool.send(40)
    assert sum(who == spool.writer for who, _ in server.points) <= charges_of(server.tags)[spool.writer] <= 100
