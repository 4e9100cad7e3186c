"""Which GPUs workers see; no GPU is needed to decide that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polytrain_plugins import Member, Offer, World
from polytrain_torch.devices import offered, own_device, seen_by


def member(rank: int, *, node: int, local: int, gpus: int = 1) -> Member:
    return Member(
        rank=rank,
        world_size=4,
        local_rank=local,
        local_world_size=2,
        node_rank=node,
        node_count=2,
        host="127.0.0.1",
        cpus=1,
        gpus=gpus,
    )


MEMBERS = tuple(member(rank, node=rank // 2, local=rank % 2) for rank in range(4))


def world(rank: int, visible: Sequence[str]) -> World:
    """Two nodes, two workers on each, and what Ray shows to each of the four."""
    return World(
        attempt=0,
        me=MEMBERS[rank],
        members=MEMBERS,
        offers=tuple(Offer(details={"gpus": gpus}) for gpus in visible),
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (["3", "0", "1", "2"], [("3,0", 0), ("3,0", 1), ("1,2", 0), ("1,2", 1)]),
        (["0,1", "2,3", "4,5", "6,7"], [("0,1,2,3", 0), ("0,1,2,3", 2), ("4,5,6,7", 0)]),
        (["5", "5", "GPU-a", "GPU-b"], [("5", 0), ("5", 0), ("GPU-a,GPU-b", 0)]),
        (["", "", "", ""], [(None, 0), (None, 1), (None, 0), (None, 1)]),
    ],
    ids=["one each", "two each", "one for two", "not assigned"],
)
def test_workers_see_all_of_their_node(
    visible: list[str], expected: list[tuple[str | None, int]]
) -> None:
    assert [seen_by(world(rank, visible)) for rank in range(len(expected))] == expected


def test_workers_tell_what_ray_has_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert offered(MEMBERS[0]) == {"gpus": "2,5"}
    assert offered(member(0, node=0, local=0, gpus=0)) == {}


def test_a_torch_without_gpu_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(RuntimeError, match=r"on 127\.0\.0\.1 is built for CPUs only"):
        own_device(world(0, ["0"] * 4))
