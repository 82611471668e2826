"""The ops of each layer of a captured graph: its regions, and what runs op by op between them.

    [..., region of layer 0, ops, region of layer 0, ops, region of layer 1, ...]
          |---------- layer 0 -----------------------|    |------- layer 1 ...

A layer that several forwards of a loss run has a stretch in each. Of the ops behind the last layer
of a forward, those belong to it that equal layers have behind them, too.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import fx

from fxrl.ir.graph import base_of, is_call, is_loss_head, readers_of
from fxrl.ir.region import region_calls


@dataclass(frozen=True, slots=True)
class Stretch:
    """A layer in one forward."""

    layer: str  # its name
    calls: tuple[fx.Node, ...]  # its regions, in order
    nodes: tuple[fx.Node, ...]  # its ops, in order
    # Values made before it that only it needs: no later op reads them, and of the earlier ones only
    # those of the layer that made them.
    given: frozenset[fx.Node]


def stretches_of(gm: fx.GraphModule, layers: Collection[str]) -> Iterator[Stretch]:
    """The stretches of layers that are regions, in order."""
    ops = [node for node in gm.graph.nodes if node.op == "call_function"]
    place = {node: index for index, node in enumerate(ops)}
    runs: list[list[fx.Node]] = []  # the regions of one layer in one forward
    for call in region_calls(gm):
        if call.graph is gm.graph and (layer := call.meta["region"].layer) in layers:
            if not runs or runs[-1][0].meta["region"].layer != layer:
                runs.append([])
            runs[-1].append(call)
    begins = [place[run[0]] for run in runs]
    ends = [*begins[1:], len(ops)][: len(runs)]
    behind = [ops[place[run[-1]] + 1 : end] for run, end in zip(runs, ends, strict=True)]
    before: tuple[fx.Node, ...] = ()
    for run, begin, tail in zip(runs, begins, _tails(runs, behind), strict=True):
        nodes = tuple(ops[begin : place[run[-1]] + 1 + tail])
        given = frozenset(_own(nodes, before, place))
        yield Stretch(run[0].meta["region"].layer, tuple(run), nodes, given)
        before = nodes


def _tails(runs: Sequence[Sequence[fx.Node]], behind: Sequence[Sequence[fx.Node]]) -> list[int]:
    """For each layer, the number of ops behind its regions that belong to it."""
    kinds = [tuple(call.meta["region"].id_without_grads for call in run) for run in runs]
    last = len(runs) - 1
    found = []
    for number, (kind, rest) in enumerate(zip(kinds, behind, strict=True)):
        others = [behind[n] for n, k in enumerate(kinds) if k == kind and n != number]
        if others:
            found.append(min(_same(rest, other) for other in others))
        elif number < last and not any(map(is_loss_head, rest)):
            found.append(len(rest))
        else:
            found.append(len([*takewhile(lambda n: is_call(n, operator.getitem), rest)]))
    return found


def _same(ops: Sequence[fx.Node], others: Sequence[fx.Node]) -> int:
    """The length of the common beginning of two sequences of ops."""
    pairs = zip(ops, others, strict=False)
    return len([*takewhile(lambda pair: pair[0].target == pair[1].target, pairs)])


def _own(
    nodes: Sequence[fx.Node], before: Sequence[fx.Node], place: dict[fx.Node, int]
) -> Iterator[fx.Node]:
    """Values made ahead of ``nodes`` that are theirs (``Stretch.given``)."""
    inside, known = {*nodes}, {*nodes, *before}
    for value in {base_of(arg) for node in nodes for arg in node.all_input_nodes} - inside:
        if value not in place:
            continue
        readers = {*readers_of(value)}
        if readers <= inside or (value in known and readers <= known):
            yield value
