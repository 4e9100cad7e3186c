"""What happens to a committed checkpoint's files without polytrain: a disk that lies, a person."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tests.crash.scenarios import RUN, Diary, Scenario

Damage = Literal["a byte flipped", "a manifest cut off", "a file removed"]


def damage_newest(scenario: Scenario, directory: Path, damage: Damage) -> None:
    """Damage the newest intact checkpoint of a case's run, if it has one and isn't over."""
    evidence = scenario.evidence(directory)
    newest = evidence.newest
    if newest is None or evidence.is_concluded:
        return
    root = Path(scenario.storage(directory), RUN, "checkpoints", newest.directory)
    file, manifest = root / min(newest.files), root / "polytrain-manifest.json"
    match damage:
        case "a byte flipped":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "a manifest cut off":
            manifest.write_bytes(manifest.read_bytes()[:-100])
        case "a file removed":
            file.unlink()
    Diary.of(directory).write("damaged", directory=newest.directory)
