"""The engine's own schedules (`native_facts.schedule`) as messages, placed in time by what each
step has to wait for; and their costs, counted."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxring._src import native_facts


class Hop(NamedTuple):
    """A message: leaves `source` in step `left` and is taken by `target` in step `came`."""

    source: int
    target: int
    left: int
    came: int
    offset: int
    is_sum: bool


def hops(
    collective: str, algorithm: str, ranks: int = 4, per_host: int | None = None, blocks: int = 0
) -> list[Hop]:
    """The messages of a call whose operand is `blocks` elements (one for each rank)."""
    count = blocks or ranks
    steps = native_facts.schedule(
        collective=collective,
        algorithm=algorithm,
        world_size=ranks,
        ranks_per_host=per_host or ranks,
        count=count,
        chunk_elements=count,
    )
    return played(steps)


def played(steps: Sequence[Sequence[Any]]) -> list[Hop]:
    """Runs all ranks' steps: a step begins after its channel's previous one, and after what it
    takes has been sent; it then lasts one unit if it sends or takes anything."""
    todo = {}
    for rank, of_rank in enumerate(steps):
        for channel, *rest in of_rank:
            todo.setdefault((rank, channel), collections.deque()).append(rest)
    clock = dict.fromkeys(todo, 0)
    wires: dict[tuple[int, int, int], collections.deque[int]] = collections.defaultdict(
        collections.deque
    )
    found: list[Hop] = []
    moved = True
    while moved:
        moved = False
        for (rank, channel), queue in todo.items():
            while queue and all(wires[s, rank, channel] for s in queue[0][0]):
                sources, targets, offset, _, is_sum = queue.popleft()
                came = [wires[s, rank, channel].popleft() for s in sources]
                now = max([clock[rank, channel], *(left + 1 for left in came)])
                for source, left in zip(sources, came, strict=True):
                    found.append(Hop(source, rank, left, now, offset, is_sum))
                for target in targets:
                    wires[rank, target, channel].append(now)
                clock[rank, channel] = now
                moved = True
    assert not any(todo.values()), "a step waits for what nobody sends"
    return found


def depth(messages: Sequence[Hop]) -> int:
    """Hops one after another, from the first to the last."""
    return max((hop.came for hop in messages), default=0)


def costs(collective: str, algorithms: Sequence[str], ranks: int, per_host: int) -> list[dict]:
    """Hops and bytes of 1 MiB of float32 a rank, counted from the schedule."""
    rows = []
    for algorithm in algorithms:
        run = native_facts.simulate(
            collective=collective,
            algorithm=algorithm,
            world_size=ranks,
            ranks_per_host=per_host,
            count=1 << 18,
            element_bytes=4,
            wire_bytes=4,
            chunk_bytes=1 << 30,
            within=(0.0, 0.0),
            between=(0.0, 0.0),
            reduce_s_per_byte=0.0,
            hops=True,
        )
        rows.append({"algorithm": algorithm, **run})
    return rows
