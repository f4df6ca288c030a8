"""Read the pickle of a `.metadata` and run nothing that it names.

Python's unpickler is a machine whose instructions call functions and set attributes. To allow only some names is not
enough: it then still sets attributes of the allowed classes and functions themselves, makes room for two billion
memorised objects because one instruction says so, and hashes a tuple nested a million deep, which ends the process. So
this is a machine of its own, with the instructions that pickles of plain records need:

- a name that is not in its table is refused by its name, before anything is imported;
- a call reaches a function that was written for it, which checks its arguments;
- only a new object of a known class can be given a state, once, and only after that was checked;
- dictionaries are kept as lists of pairs, so that nothing is hashed that was not checked;
- all work is bounded by the length of the pickle, however often a part refers to another.
"""

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_air.checkpoint.pickle_names import named_globals
from lightning_air.checkpoint.untrusted import DamagedCheckpointError, UnsafeCheckpointError, shown

HIGHEST_PROTOCOL = 5

_MAX_NESTED_MARKS = 100
_STOP = ord(".")
_MEMOIZE = 0x94
_BINGET = ord("h")
_LONG_BINGET = ord("j")
_BININT1 = ord("K")
_BININT2 = ord("M")
_EMPTY_TUPLE = ord(")")


class Pairs(list[tuple[object, object]]):
    """A dictionary of the pickle: its keys and values, in order, and not yet hashed."""

    __slots__ = ()


@dataclass(frozen=True)
class Function:
    """What a pickle may call: `make` gets the arguments as they are, checks them and returns the result."""

    make: Callable[[tuple[object, ...]], object]


@dataclass(frozen=True)
class Record:
    """A class that a pickle may make objects of.

    Attributes:
        cls: It has an `object`'s own `__new__`.
        fill: Gets a new object and its state, checks the state and sets what it checked, in containers of its own: the
            pickle can still change those that it was given.
        needs_state: Whether an object without a state is none.
    """

    cls: type
    fill: Callable[[Any, object], None]
    needs_state: bool = True


def unpickle(data: bytes, names: Mapping[tuple[str, str], object]) -> object:
    """Return the object that a pickle of protocol 2 to 5 holds; its dictionaries are `Pairs`.

    Args:
        data: The whole pickle.
        names: What may be named, by module and qualified name: a `Function`, a `Record`, or a constant.

    Raises:
        UnsafeCheckpointError: If it names anything else, or does something that no plain record needs. The message
            starts with a verb: what the file does.
        DamagedCheckpointError: If it is no whole pickle of this kind.
    """
    machine = _Machine(data, names)
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise DamagedCheckpointError(f"is no whole pickle: it breaks off or is altered at byte {machine.at}") from error


class _Machine:
    """One run. `at` is the place of the next byte to read."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], object]) -> None:
        self.at = 0
        self._data = data
        self._names = names
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._unfilled: dict[int, tuple[Record, object]] = {}
        self._visits = len(data)

    def run(self) -> object:
        # The six commonest of about a hundred instructions per tensor stand here: that halves the time.
        data, at, stack, memo, from_bytes = self._data, 0, self._stack, self._memo, int.from_bytes
        while (code := data[at]) != _STOP:
            at += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _BININT2:
                stack.append(from_bytes(data[at : at + 2], "little"))
                at += 2
            elif code == _EMPTY_TUPLE:
                stack.append(())
            else:
                self.at = at
                _INSTRUCTIONS.get(code, _Machine.refuse)(self)
                at = self.at
        self.at = at + 1
        return self.result()

    def result(self) -> object:
        is_filled = not any(record.needs_state for record, _ in self._unfilled.values())
        if self.at != len(self._data) or len(self._stack) != 1 or self._marks or not is_filled:
            raise DamagedCheckpointError("is no whole pickle: something is left over at its end")
        return self._stack.pop()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> bytes:
        start = self.at
        self.at += num_bytes
        if self.at > len(self._data):
            raise IndexError
        return self._data[start : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def line(self) -> str:
        end = self._data.find(b"\n", self.at)
        if end < 0:
            raise IndexError
        line = self._data[self.at : end]
        self.at = end + 1
        return line.decode()

    def since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def visit(self, num_items: int) -> None:
        """Count the work on containers: each item took a byte of the pickle, so only shared ones exceed its length."""
        self._visits -= num_items
        if self._visits < 0:
            raise UnsafeCheckpointError(
                "uses one part so often that reading it would take out of all proportion to its size. Do not use this "
                "checkpoint."
            )

    # ---- refusing ----------------------------------------------------------------------------------------------------

    def refused_names(self) -> list[str]:
        names = (name.rpartition(".") for name in named_globals(self._data))
        return [f"{module}.{name}" for module, _, name in names if (module, name) not in self._names]

    def refuse(self) -> None:
        code = self._data[self.at - 1]
        opcode = next((each for each in pickletools.opcodes if each.code == chr(code)), None)
        does = (
            f"uses the pickle instruction {opcode.name}" if opcode else f"has {code:#04x} where an instruction is due"
        )
        names = self.refused_names()
        also = f", and names {', '.join(map(shown, names))}" if names else ""
        raise UnsafeCheckpointError(
            f"{does}, which no checkpoint's metadata needs{also}. It is damaged, or was made to run code: do not use "
            "this checkpoint."
        )

    # ---- instructions ------------------------------------------------------------------------------------------------

    def proto(self) -> None:
        protocol = self.byte()
        if protocol > HIGHEST_PROTOCOL:
            raise DamagedCheckpointError(f"is a pickle of protocol {protocol}; known are 2 to {HIGHEST_PROTOCOL}")

    def frame(self) -> None:
        self.take(8)

    def mark(self) -> None:
        if len(self._marks) == _MAX_NESTED_MARKS:
            raise UnsafeCheckpointError("is nested deeper than any checkpoint's metadata. Do not use this checkpoint.")
        self._marks.append(len(self._stack))

    def name_in_line(self) -> None:
        self.look_up(self.line(), self.line())

    def name_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(module) is not str or type(name) is not str:
            raise DamagedCheckpointError(f"names {shown(module)} and {shown(name)} where texts are due")
        self.look_up(module, name)

    def look_up(self, module: str, name: str) -> None:
        found = self._names.get((module, name))
        if found is None:
            names = dict.fromkeys([f"{module}.{name}", *self.refused_names()])
            raise UnsafeCheckpointError(
                f"names {', '.join(map(shown, names))}, which no checkpoint's metadata needs: to load it may run code. "
                "Do not use this checkpoint, and find out who wrote it. If it was a newer torch, update lightning_air."
            )
        self._stack.append(found)

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Function or type(arguments) is not tuple:
            raise UnsafeCheckpointError(
                f"calls {_called(function)}, which is nothing to call. Do not use this checkpoint."
            )
        for argument in arguments:
            if isinstance(argument, tuple | str):
                self.visit(len(argument))
        self._stack.append(function.make(arguments))

    def new_object(self) -> None:
        arguments, record = self._stack.pop(), self._stack.pop()
        if type(record) is not Record or arguments != ():
            raise UnsafeCheckpointError(f"makes an object of {_called(record)}. Do not use this checkpoint.")
        made: object = object.__new__(record.cls)
        # The object stays alive in the entry, so that its id is no other's meanwhile.
        self._unfilled[id(made)] = record, made
        self._stack.append(made)

    def fill(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        entry = self._unfilled.pop(id(target), None)
        if entry is None:
            raise UnsafeCheckpointError(
                f"sets the state of {_called(target)}, which is no new object. Do not use this checkpoint."
            )
        if type(state) is Pairs:
            # Not the texts: a file's long name is rightly shared by all that lies in the file.
            self.visit(len(state))
            for _, value in state:
                if type(value) is list or type(value) is Pairs:
                    self.visit(len(value))
        entry[0].fill(target, state)

    def append(self) -> None:
        item = self._stack.pop()
        self.the_list().append(item)

    def append_all(self) -> None:
        items = self.since_mark()
        self.the_list().extend(items)

    def the_list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            raise UnsafeCheckpointError(f"appends to {shown(target)}. Do not use this checkpoint.")
        return target

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.pairs().append((key, value))

    def set_items(self) -> None:
        items = self.since_mark()
        if len(items) % 2:
            raise DamagedCheckpointError("is no whole pickle: a key has no value")
        self.pairs().extend(zip(items[::2], items[1::2], strict=True))

    def pairs(self) -> Pairs:
        target = self._stack[-1]
        if type(target) is not Pairs:
            raise UnsafeCheckpointError(f"sets items of {shown(target)}. Do not use this checkpoint.")
        return target

    def make_tuple(self) -> None:
        self._stack.append(tuple(self.since_mark()))

    def tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def tuple2(self) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def tuple3(self) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def memorise_at(self, index: int) -> None:
        if index != len(self._memo):  # a pickler counts; anything else asks for memory that it does not fill
            raise UnsafeCheckpointError(
                f"memorises object {index} as number {len(self._memo)}. It is damaged or hostile."
            )
        self._memo.append(self._stack[-1])

    def text(self, num_bytes: int) -> None:
        self._stack.append(self.take(num_bytes).decode("utf-8"))

    def push(self, value: object) -> None:
        self._stack.append(value)


def _called(value: object) -> str:
    return value.cls.__qualname__ if isinstance(value, Record) else shown(value)


# The order of a pickle's bytes: https://docs.python.org/3/library/pickletools.html
_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("c"): _Machine.name_in_line,
    0x93: _Machine.name_on_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.new_object,
    ord("b"): _Machine.fill,
    ord("a"): _Machine.append,
    ord("e"): _Machine.append_all,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("t"): _Machine.make_tuple,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("q"): lambda machine: machine.memorise_at(machine.byte()),
    ord("r"): lambda machine: machine.memorise_at(machine.uint32()),
    0x8C: lambda machine: machine.text(machine.byte()),
    ord("X"): lambda machine: machine.text(machine.uint32()),
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("J"): lambda machine: machine.push(int.from_bytes(machine.take(4), "little", signed=True)),
    0x8A: lambda machine: machine.push(int.from_bytes(machine.take(machine.byte()), "little", signed=True)),
    ord("]"): lambda machine: machine.push([]),
    ord("}"): lambda machine: machine.push(Pairs()),
}
