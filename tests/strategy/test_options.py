"""Every option is checked once, before anything exists; an error says what, with which value, and what to do."""

import inspect
import math
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_air import AirStrategy
from lightning_air.strategy.options import (
    DDP_ONLY,
    FSDP_ONLY,
    LONGEST,
    SHARDINGS,
    StrategyOptions,
    check_options,
    check_sharding,
)

# One legal value of each option that belongs to some shardings only. False is as much a value as True: a user who
# wrote it wants to be told that nothing reads it.
LEGAL: dict[str, Any] = {
    "broadcast_buffers": False,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "cpu_offload": False,
    "reshard_after_forward": False,
    "wrap": 1000,
}


class Block(nn.Module):
    pass


def check(sharding: Any = "ddp", **changes: Any) -> StrategyOptions:
    given: dict[str, Any] = {
        "process_group_backend": "auto",
        "timeout": 1800.0,
        "join_timeout": 300.0,
        "activation_checkpointing": None,
        **changes,
    }
    return check_options(sharding=sharding, **given)


def refusal(sharding: Any = "ddp", **changes: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        check(sharding, **changes)
    return str(error.value)


# ---- defaults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_defaults(sharding: str) -> None:
    assert check(sharding) == StrategyOptions(
        sharding=sharding,  # type: ignore[arg-type]
        process_group_backend="auto",
        timeout=timedelta(minutes=30),
        join_timeout=timedelta(minutes=5),
        wrap=None,
        activation_checkpointing=(),
        reshard_after_forward=True,
        cpu_offload=False,
        ddp={},
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_front_door_has_the_same_defaults(sharding: Any) -> None:
    assert AirStrategy(sharding).options == check(sharding)


def test_every_option_stands_in_the_front_door() -> None:
    # YAML refuses what is not in this signature.
    assert set(LEGAL) == {*DDP_ONLY, *FSDP_ONLY}
    assert set(LEGAL) < set(inspect.signature(AirStrategy.__init__).parameters)


@pytest.mark.parametrize("name", LEGAL)
def test_the_front_door_hands_every_option_on(name: str) -> None:
    # Given the sharding to which the option is foreign, only an option that arrived can be refused.
    foreign: Any = "ddp" if name in FSDP_ONLY else "fsdp"
    with pytest.raises(ValueError, match=f"^{name}="):
        AirStrategy(foreign, **{name: LEGAL[name]})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="find_unused_paramters"):
        AirStrategy(find_unused_paramters=True)  # type: ignore[call-arg]


def test_options_cannot_change_later() -> None:
    with pytest.raises(FrozenInstanceError):
        check().timeout = timedelta(1)  # type: ignore[misc]


# ---- sharding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["FSDP", "zero3", "", None, True, 0, ["ddp"], {"ddp": 1}])
def test_unknown_sharding(value: object) -> None:
    with pytest.raises(ValueError, match="sharding must be one of 'ddp', 'fsdp', 'hsdp'") as error:
        check_sharding(value)
    assert f"got {value!r}. Use 'ddp' when" in str(error.value)
    with pytest.raises(ValueError, match="sharding must be one of"):
        AirStrategy(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FSDP_ONLY)
def test_what_belongs_to_fsdp_is_refused_under_ddp(name: str) -> None:
    assert refusal("ddp", **{name: LEGAL[name]}) == (
        f"{name}={LEGAL[name]!r}: has no meaning under sharding='ddp', only under 'fsdp' and 'hsdp'. "
        "Remove it or choose another sharding."
    )


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp"])
@pytest.mark.parametrize("name", DDP_ONLY)
def test_what_belongs_to_ddp_is_refused_under_fsdp_and_hsdp(name: str, sharding: str) -> None:
    assert refusal(sharding, **{name: LEGAL[name]}) == (
        f"{name}={LEGAL[name]!r}: has no meaning under sharding={sharding!r}, only under 'ddp'. "
        "Remove it or choose another sharding."
    )


def test_all_foreign_options_are_named_at_once() -> None:
    message = refusal("fsdp", static_graph=True, bucket_cap_mb=5, cpu_offload=True)
    assert message.startswith("bucket_cap_mb=5, static_graph=True: ")
    assert "Remove them" in message
    assert "cpu_offload" not in message


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_own_options_are_kept(sharding: str) -> None:
    own = FSDP_ONLY if sharding != "ddp" else DDP_ONLY
    options = check(sharding, **{name: LEGAL[name] for name in own})
    if sharding == "ddp":
        assert options.ddp == {name: LEGAL[name] for name in DDP_ONLY}
    else:
        assert {name: getattr(options, name) for name in FSDP_ONLY} == {name: LEGAL[name] for name in FSDP_ONLY}


def test_ddp_gets_only_what_was_given() -> None:
    # Lightning and torch have defaults of their own, which are not ours to repeat.
    assert check("ddp", static_graph=None, bucket_cap_mb=None, broadcast_buffers=False).ddp == {
        "broadcast_buffers": False
    }


def test_activation_checkpointing_belongs_to_all() -> None:
    for sharding in SHARDINGS:
        assert check(sharding, activation_checkpointing=["Block"]).activation_checkpointing == ("Block",)


# ---- durations -------------------------------------------------------------------------------------------------------

DURATIONS = ["timeout", "join_timeout"]


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, timedelta(seconds=1)),
        (0.25, timedelta(milliseconds=250)),
        (timedelta(minutes=2), timedelta(minutes=2)),
        (LONGEST, LONGEST),
        (LONGEST.total_seconds(), LONGEST),
    ],
)
def test_seconds_and_timedeltas(name: str, value: Any, expected: timedelta) -> None:
    assert getattr(check(**{name: value}), name) == expected


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "longer than zero"),
        (0.0, "longer than zero"),
        (-1, "longer than zero"),
        (1e-9, "longer than zero"),
        (timedelta(0), "longer than zero"),
        (timedelta(seconds=-5), "longer than zero"),
        (math.nan, "finite number of seconds"),
        (math.inf, "finite number of seconds"),
        (-math.inf, "finite number of seconds"),
        (1e300, "finite number of seconds"),
        (10**30, "finite number of seconds"),
        # torch counts nanoseconds in 64 bits: it would not wait for ever, but not at all.
        (1e10, "at most 365 days"),
        (timedelta.max, "at most 365 days"),
        (True, "number of seconds or a timedelta"),
        ("0:40:00", "number of seconds or a timedelta"),
        ("300", "number of seconds or a timedelta"),
        (None, "number of seconds or a timedelta"),
        ([300], "number of seconds or a timedelta"),
    ],
)
def test_refused_durations(name: str, value: object, words: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be ")
    assert words in message
    assert message.endswith(f"got {value!r}.")


@given(seconds=st.floats(min_value=1e-6, max_value=LONGEST.total_seconds()))
def test_any_sensible_number_of_seconds_is_that_duration(seconds: float) -> None:
    assert check(timeout=seconds).timeout.total_seconds() == pytest.approx(seconds, abs=1e-6)


@given(value=st.one_of(st.floats(), st.integers(), st.timedeltas(), st.booleans(), st.none(), st.text()))
def test_any_duration_is_taken_or_refused_with_its_value(value: Any) -> None:
    try:
        duration = check(join_timeout=value).join_timeout
    except ValueError as error:
        assert "join_timeout" in str(error)  # noqa: PT017 - either outcome is right, but no other exception is
        assert repr(value) in str(error)  # noqa: PT017
    else:
        assert timedelta(0) < duration <= LONGEST


# ---- backend ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", None, 5, b"gloo", ["cpu:gloo"]])
def test_refused_backend_names(value: object) -> None:
    message = refusal(process_group_backend=value)
    assert message.startswith("process_group_backend must be 'auto' or ")
    assert "'cpu:gloo,cuda:nccl'" in message
    assert message.endswith(f"got {value!r}.")


# ---- module classes --------------------------------------------------------------------------------------------------

# With the value that the message shows: the item that is wrong, else the whole.
NOT_CLASSES = [
    ("", ""),
    ([""], ""),
    ([int], int),
    (int, int),
    ([None], None),
    ([["Block"]], ["Block"]),
    ({"Block": 1}, {"Block": 1}),
    ([Block, 7], 7),
    (True, True),
    (False, False),
    (1.5, 1.5),
    (1e6, 1e6),
    (math.nan, math.nan),
]


@pytest.mark.parametrize("name", ["wrap", "activation_checkpointing"])
@pytest.mark.parametrize(("value", "shown"), NOT_CLASSES)
def test_refused_module_classes(name: str, value: object, shown: object) -> None:
    message = refusal("fsdp", **{name: value})
    assert message.startswith(f"{name} must ")
    assert "module classes" in message or "torch.nn.Module classes" in message
    assert message.endswith(f"got {shown!r}.")


@pytest.mark.parametrize("name", ["wrap", "activation_checkpointing"])
def test_a_module_is_no_class(name: str) -> None:
    module = Block()
    for value in (module, [module]):
        assert repr(module) in refusal("fsdp", **{name: value})


@pytest.mark.parametrize("name", ["wrap", "activation_checkpointing"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Block", ("Block",)),
        (Block, (Block,)),
        ([Block, "torch.nn.Linear"], (Block, "torch.nn.Linear")),
        ((Block,), (Block,)),
        ({Block}, (Block,)),
        (frozenset({"Block"}), ("Block",)),
    ],
)
def test_one_class_or_many(name: str, value: object, expected: tuple[object, ...]) -> None:
    assert getattr(check("hsdp", **{name: value}), name) == expected


@pytest.mark.parametrize("value", [[], (), set()])
def test_an_empty_wrap_is_refused_but_no_checkpointing_is_none(value: Any) -> None:
    assert "Leave it out for the default blocks, or name module classes" in refusal("fsdp", wrap=value)
    assert check("fsdp", activation_checkpointing=value).activation_checkpointing == ()


# ---- numbers and switches --------------------------------------------------------------------------------------------


def test_wrap_by_size() -> None:
    assert check("fsdp", wrap=1).wrap == 1
    assert check("fsdp", wrap=10**12).wrap == 10**12


@pytest.mark.parametrize("value", [0, -1])
def test_refused_sizes(value: int) -> None:
    assert refusal("fsdp", wrap=value) == (f"wrap as a minimum number of parameters must be at least 1, got {value}.")


def test_a_size_that_is_no_whole_number_is_told_so() -> None:
    # `wrap=1e8` is what a user of FSDP1's size policy writes.
    assert refusal("fsdp", wrap=1e8) == (
        "wrap must be module classes or a whole number of parameters, got 100000000.0."
    )


@pytest.mark.parametrize("value", [True, False, 1, 2])
def test_reshard_after_forward(value: Any) -> None:
    assert check("fsdp", reshard_after_forward=value).reshard_after_forward is value


@pytest.mark.parametrize("value", [0, -1, 1.0, math.nan, math.inf, "True", [2]])
def test_refused_reshard_after_forward(value: object) -> None:
    assert refusal("fsdp", reshard_after_forward=value) == (
        f"reshard_after_forward must be True, False or the number of ranks to reshard to, got {value!r}."
    )


@pytest.mark.parametrize("value", [0.5, 1, 25, 1e3])
def test_bucket_cap_mb(value: float) -> None:
    assert check(bucket_cap_mb=value).ddp == {"bucket_cap_mb": value}


@pytest.mark.parametrize("value", [0, -25, math.nan, math.inf, -math.inf, True, "25", [25]])
def test_refused_bucket_cap_mb(value: object) -> None:
    assert refusal(bucket_cap_mb=value) == f"bucket_cap_mb must be a positive number of MiB, got {value!r}."


@pytest.mark.parametrize("value", ["no", "False", "", 0, 1, [], 1.0])
@pytest.mark.parametrize(
    ("sharding", "name"),
    [
        ("ddp", "broadcast_buffers"),
        ("ddp", "find_unused_parameters"),
        ("ddp", "gradient_as_bucket_view"),
        ("ddp", "static_graph"),
        ("fsdp", "cpu_offload"),
    ],
)
def test_a_switch_is_on_or_off(sharding: str, name: str, value: object) -> None:
    # "no" is true for Python: it would offload, silently.
    assert refusal(sharding, **{name: value}) == f"{name} must be True or False, got {value!r}."
