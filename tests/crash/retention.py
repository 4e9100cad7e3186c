"""Which checkpoints must still be there, worked out from what was told of commits."""

from __future__ import annotations

from tests.crash.scenarios import KEPT, Diary


def survivors(diary: Diary, *, scored: bool) -> set[str]:
    """Directories of those that no commit so far has made expendable.

    Args:
        diary: tells of commits, and of those that were damaged from outside.
        scored: whether the best are kept rather than the newest.
    """
    # By score, and in the order of the commits where that doesn't decide.
    alive: dict[str, tuple[float, int]] = {}
    for number, entry in enumerate(diary.entries("committed", "damaged")):
        directory = entry["directory"]
        if entry["what"] == "damaged":
            alive.pop(directory, None)
            continue
        alive[directory] = (entry["score"] if scored else 0, number)
        best = sorted(alive, key=lambda name: alive[name], reverse=True)[:KEPT]
        alive = {name: alive[name] for name in alive if name in best or name == directory}
    return set(alive)
