"""Which variables a function's code reads, and where it is when it does."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType

_SUPPRESSES = ("suppress", "swallow", "ignore", "catch", "raises")
"""Parts of names of context managers that suppress errors. Others aren't expected to."""

_VARIABLES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_GLOBAL", "LOAD_DEREF")

_CACHE = dis.opmap["CACHE"]


def instruction_of(frame: FrameType) -> int:
    """Return the offset of the instruction that a frame is at.

    After some rounds of a loop the interpreter replaces an instruction by one for the types that it
    has met. `frame.f_lasti` may then point into the cache behind it.
    """
    at, code = frame.f_lasti, frame.f_code.co_code
    while at > 0 and code[at] == _CACHE:
        at -= 2
    return at


@functools.cache
def read_after(
    code: CodeType,
    at: int,
    *,
    is_over: bool = False,
    never_empty: frozenset[int] = frozenset(),
) -> frozenset[str]:
    """Return the local variables that code reads after an instruction, before it sets them.

    Args:
        code: a function's code.
        at: the instruction's offset: a call, or a `for` that gets its next item.
        is_over: whether the `for` gets none.
        never_empty: the offsets in `functions_of_loops` of those that always get an item.
    """
    instructions = _instructions(code)
    number_of, following, live = _flow(code, never_empty)
    number = max(number for offset, number in number_of.items() if offset <= at)
    nexts = following[number]
    if instructions[number].opname == "FOR_ITER":
        exit_ = number_of[instructions[number].argval]
        nexts = {exit_} if is_over else nexts - {exit_}
    # Closures may read theirs at any time.
    return frozenset[str]().union(code.co_cellvars, code.co_freevars, *(live[n] for n in nexts))


@functools.cache
def _flow(
    code: CodeType, never_empty: frozenset[int]
) -> tuple[Mapping[int, int], Sequence[set[int]], Sequence[frozenset[str]]]:
    """Return how a function's instructions follow each other, and what is read from each on.

    Returns:
        offset → number of the instruction; the numbers of those that may follow each; and the
        local variables that are read from each on, before they are set.
    """
    instructions = _instructions(code)
    number_of = {each.offset: number for number, each in enumerate(instructions)}
    following = [_following(each, number, number_of) for number, each in enumerate(instructions)]
    names = " ".join(code.co_names + code.co_varnames + code.co_freevars).lower()
    if not any(part in names for part in _SUPPRESSES):
        for number in _ends_after_suppression(instructions):
            following[number] = {number + 1}
    for offset in never_empty:
        # Past FOR_ITER, which ends the loop, into its body. Large ones have a prefix.
        number = number_of[offset] + 1
        while instructions[number].opname != "FOR_ITER":
            number += 1
        following[number_of[offset]] = {number + 1}
    for begin, end, handler, *_ in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]  # only newer stubs have it
        for offset in range(begin, end, 2):
            if offset in number_of:
                following[number_of[offset]].add(number_of[handler])
    uses = [_uses(each) for each in instructions]
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    has_changed = True
    while has_changed:
        has_changed = False
        for number in reversed(range(len(instructions))):
            after = frozenset[str]().union(*(live[each] for each in following[number]))
            reads, writes = uses[number]
            now = reads | (after - writes)
            if now != live[number]:
                live[number], has_changed = now, True
    return number_of, following, live


def _ends_after_suppression(instructions: Sequence[dis.Instruction]) -> Iterator[int]:
    """Yield the numbers of the jumps to code that runs once a `with` has suppressed an error."""
    is_asked = False
    for number, each in enumerate(instructions):
        is_asked |= each.opname == "WITH_EXCEPT_START"
        if is_asked and each.opname.startswith("POP_JUMP"):
            yield number
            is_asked = False


@functools.cache
def functions_of_loops(code: CodeType) -> Mapping[int, tuple[str, ...]]:
    """Return the functions whose results `for` loops go through, as names around the dots.

    They are keyed by the offset of the instruction that begins the loop. Only calls with variables
    and constants as their arguments are found: `for x in module.function(y):`.
    """
    found = {}
    before: list[dis.Instruction] = []
    for each in _instructions(code):
        if each.opname == "FOR_ITER" and len(before) > 1 and before[-1].opname == "GET_ITER":
            names = _called(before[:-1])
            if names:
                found[before[-1].offset] = names
        if each.opname not in ("PRECALL", "PUSH_NULL", "EXTENDED_ARG"):
            before.append(each)
    return found


def _called(instructions: Sequence[dis.Instruction]) -> tuple[str, ...]:
    """Return the names of the function that is called last, if its arguments are so simple."""
    *before, call = instructions
    if call.opname != "CALL" or call.arg is None:
        return ()
    function = before[: len(before) - call.arg]
    if any(each.opname not in (*_VARIABLES, "LOAD_CONST") for each in before[len(function) :]):
        return ()
    names: tuple[str, ...] = ()
    for each in reversed(function):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (each.argval, *names)
        else:
            return (each.argval, *names) if each.opname in _VARIABLES else ()
    return ()


@functools.cache
def body_after(code: CodeType, at: int) -> range | None:
    """Return the offsets of a `for` loop that gets its next item at an instruction.

    It is None if the instruction is another one.
    """
    each = [each for each in _instructions(code) if each.offset <= at][-1]
    return range(each.offset, each.argval) if each.opname == "FOR_ITER" else None


@functools.cache
def names_in_iterable(code: CodeType, at: int) -> frozenset[str]:
    """Return the names in the expression that a `for` loop goes through.

    They are empty if the instruction isn't where such a loop gets its next item.
    """
    before = [each for each in _instructions(code) if each.offset <= at]
    if before[-1].opname != "FOR_ITER":
        return frozenset()
    while before and before.pop().opname != "GET_ITER":
        pass
    names, values = set(), 0
    while before and values != 1:
        each = before.pop()
        argument = each.arg if each.opcode >= dis.HAVE_ARGUMENT else None
        values += dis.stack_effect(each.opcode, argument, jump=False)
        if each.opname.startswith("LOAD") and isinstance(each.argval, str):
            names.add(each.argval)
    return frozenset(names)


@functools.cache
def loops_of(code: CodeType) -> tuple[range, ...]:
    """Return the offsets of each `for` and `while` loop, from its begin to a jump back there."""
    return tuple(
        range(each.argval, each.offset + 1)
        for each in _instructions(code)
        if "JUMP" in each.opname and "BACKWARD" in each.opname
    )


@functools.cache
def targets_around(
    code: CodeType, at: int, *, endless: frozenset[int] = frozenset()
) -> tuple[frozenset[str], ...]:
    """Return the variables that each `for` loop around an instruction sets, innermost loop first.

    If that one gets its next item at the instruction, those are left out of it that the code never
    reads: what it goes through knows its own place. So are those of an endless loop, which nothing
    depends on. In a loop around another one, those of the ones inside are left out.

    Args:
        code: a function's code.
        at: the instruction's offset.
        endless: the offsets in `functions_of_loops` of those that never end by themselves.
    """
    instructions = _instructions(code)
    read = frozenset[str]().union(*(_uses(each)[0] for each in instructions))
    around = [
        number
        for number, each in enumerate(instructions)
        if each.opname == "FOR_ITER" and each.offset <= at < each.argval
    ]
    loops: list[frozenset[str]] = []
    inside: set[str] = set()
    for number in reversed(around):
        found: set[str] = set()
        for other in instructions[number + 1 :]:
            if not other.opname.startswith(("STORE_FAST", "UNPACK", "STORE_DEREF", "CACHE")):
                break
            found |= _uses(other)[1]
        begin = next(each for each in instructions[number::-1] if each.opname == "GET_ITER")
        fetches_here = not loops and body_after(code, at) is not None
        own = found if fetches_here else found - inside
        loops.append(frozenset(own & read if fetches_here or begin.offset in endless else own))
        inside |= found
    return tuple(loops)


def _following(each: dis.Instruction, number: int, number_of: Mapping[int, int]) -> set[int]:
    name = each.opname
    found: set[int] = set()
    if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
        found.add(number_of[each.argval])
    if name == "RETURN_GENERATOR" or not name.startswith(
        ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
    ):
        found.add(number + 1)
    return {one for one in found if one < len(number_of)}


def _uses(each: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the local variables that an instruction reads, and those that it sets."""
    name = each.opname
    if "FAST" not in name and "DEREF" not in name:
        return frozenset(), frozenset()
    names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - {names[0]}, frozenset(names[:1])
    if name.startswith(("STORE", "DELETE")):
        return frozenset(), frozenset(names)
    return frozenset(names), frozenset()


@functools.cache
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the global variables that code reads or sets, each once."""
    if not code.co_names:
        return ()
    uses = (each for each in _instructions(code) if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    return tuple(dict.fromkeys(each.argval for each in uses))


@functools.cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return a function's instructions. It takes milliseconds, in each attempt's first steps."""
    return tuple(dis.get_instructions(code))
