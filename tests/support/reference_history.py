"""Historical embeddings by a dictionary that replays batches one by one, from whole samples, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

import featstore
from featstore.sampling.batch import Block

__all__ = ["PlainBatch", "Replay"]


@dataclass
class PlainBatch:
    """A batch by the reference.

    ``blocks`` are (sources, destinations, n_src, n_dst), outermost first; ``sources`` the nodes of the last one; ``pulled`` maps
    a node to the step of its last push.
    """

    ids: list[int]
    blocks: list[tuple[list[int], list[int], int, int]]
    sources: list[int]
    pulled: dict[int, int]
    pushed: list[int]


class Replay:
    """Decide on batches in the order of training; ``pushed`` is node to step, of what was merged."""

    def __init__(self, sampler: featstore.Sampler, nodes: Iterable[int], staleness: int) -> None:
        self.sampler, self.nodes, self.staleness = sampler, set(map(int, nodes)), staleness
        self.pushed: dict[int, int] = {}
        self.step = 0

    def batch(self, seeds: torch.Tensor, epoch: int, index: int) -> PlainBatch:
        """Return the batch of the next step, and commit it."""
        whole = self.sampler.sample(seeds, epoch=epoch, index=index)
        ids, last = whole.input_ids.tolist(), whole.blocks[-1]
        sources, pulled, pushed = ids[: last.n_src], dict[int, int](), list[int]()
        for position, node in enumerate(sources):
            when = self.pushed.get(node)
            if node not in self.nodes:
                continue
            if position >= len(seeds) and when is not None and self.step - when <= self.staleness:
                pulled[node] = when
            else:
                pushed.append(node)
        self.pushed |= dict.fromkeys(pushed, self.step)
        self.step += 1
        nodes = [node for node in sources if node not in pulled]
        blocks = [(last.src.tolist(), last.dst.tolist(), last.n_src, last.n_dst)]
        for block in reversed(whole.blocks[:-1]):
            blocks.append(_expanded(nodes, _drawn(block, ids)))
        return PlainBatch(nodes, blocks[::-1], sources, pulled, pushed)


def _drawn(block: Block, ids: list[int]) -> dict[int, list[int]]:
    """Return the neighbours that each node has drawn in a hop, in their order."""
    found: dict[int, list[int]] = {}
    for source, destination in zip(block.src.tolist(), block.dst.tolist(), strict=True):
        found.setdefault(ids[destination], []).append(ids[source])
    return found


def _expanded(nodes: list[int], drawn: dict[int, list[int]]) -> tuple[list[int], list[int], int, int]:
    """Return the block of a hop over ``nodes``, which new ones join in the order in which they appear."""
    number = {node: k for k, node in enumerate(nodes)}
    n_dst, src, dst = len(nodes), list[int](), list[int]()
    for k in range(n_dst):
        for each in drawn.get(nodes[k], []):
            if each not in number:
                number[each] = len(nodes)
                nodes.append(each)
            src.append(number[each])
            dst.append(k)
    return src, dst, len(nodes), n_dst
