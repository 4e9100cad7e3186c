"""What a forked child of this process has of it, while both live."""

from __future__ import annotations

import os
from collections.abc import Iterable

from polytrain.linux.processes import OwnDescriptor
from polytrain.workers.processes.child import Child


def open_in_a_child(descriptors: Iterable[int]) -> list[int]:
    """Which of these descriptors a forked child has open."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        there = [each for each in descriptors if os.path.exists(f"/proc/self/fd/{each}")]
        os.write(writer, " ".join(map(str, there)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        return [int(each) for each in answer.read().split()]


def test_a_child_has_none_of_the_ends_of_a_worker_process() -> None:
    """It would keep the process from noticing the end of its agent, and the other way round."""
    child = Child(on_message=print, on_output=print)
    *channels, page = child.descriptors
    ours = [child._connection.fileno(), *(pipe.fileno() for pipe in child._readers.values())]
    assert open_in_a_child([*channels, *ours, page]) == [page]
    assert all(os.path.exists(f"/proc/self/fd/{each}") for each in (*channels, *ours, page))
    child.discard()
    assert not any(os.path.exists(f"/proc/self/fd/{each}") for each in (*channels, *ours, page))


def test_what_was_handed_over_or_closed_is_not_closed_in_a_child() -> None:
    """Its number may be that of another file by then."""
    closed, handed_over = (OwnDescriptor(os.open(os.devnull, os.O_RDONLY)) for _ in range(2))
    number, other = closed.fileno(), handed_over.detach()
    closed.close()
    again = os.open(os.devnull, os.O_RDONLY)
    assert again == number
    assert open_in_a_child([number, other]) == [number, other]
    os.close(again)
    os.close(other)
