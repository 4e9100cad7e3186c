"""Tries the connections between nodes, by an actor on each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayTaskError

from polytrain.policy.links import FailedLink, targets
from polytrain.workers.agents.link_end import Listening


async def failed_links(
    ends: Sequence[Any], hosts: Sequence[str], *, timeout_s: float
) -> list[FailedLink]:
    """Have the nodes connect to each other, all at the same time; return what failed.

    Args:
        ends: an actor on each node, with the methods of `LinkEnd`.
        hosts: the nodes' addresses.
        timeout_s: seconds that a connection may take.

    Raises:
        RayError: an actor is gone.
    """
    try:
        answers = await asyncio.gather(*(_listening(end) for end in ends))
        failed = [
            FailedLink(source=host, target=host, reason=answer)
            for host, answer in zip(hosts, answers, strict=True)
            if isinstance(answer, str)
        ]
        tried = [
            [other for other in others if isinstance(answers[other], Listening)]
            for others in targets(len(ends))
        ]
        reached = await asyncio.gather(
            *(
                end.reach.remote([answers[other] for other in others], timeout_s)
                for end, others in zip(ends, tried, strict=True)
            )
        )
    finally:
        for end in ends:
            end.stop_listening.remote()
    failed += [
        FailedLink(source=hosts[node], target=hosts[other], reason=reason)
        for node, reasons in enumerate(reached)
        for other, reason in zip(tried[node], reasons, strict=True)
        if reason
    ]
    return failed


async def _listening(end: Any) -> Listening | str:
    try:
        listening: Listening = await end.listen.remote()
    except RayTaskError as error:
        return str(getattr(error.cause, "strerror", None) or error.cause)
    return listening
