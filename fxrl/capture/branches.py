"""``if kl > 1: ...``: a branch on a tensor's value is captured as it goes, and checked there.

Dynamo ends the graph at such a branch: inside of a model all that follows is cut off from the loss.
Here the code is followed one way, as Dynamo follows one type of each argument, and an op ends the
call where the value goes the other way (``fxrl.capture.checks``). The call then begins anew with a
capture of that way, which stays beside the first one. ``for expert in (chosen > 0).nonzero()`` is
followed likewise, for one count of rows: at first for all that there may be; and so is
``for i in range(0, n, 512)`` over the rows that a mask selects, at first for one round.

NOTE [Why a call may begin anew]: nothing has happened by then that anybody could see. Only branches
of the loss's first graph are followed; that graph is functional once it is rewritten, so buffers
are written when all of it has run, and Python's objects after that. The random generators are put
back, and what bodies have written that are checkpointed. A graph that runs as it was written, or
talks to other ranks, has no such branch in it.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from traceback import StackSummary
from types import CodeType

import torch
from torch import fx

from fxrl.capture import repeated
from fxrl.capture.checks import check, counted_rounds, counted_rows
from fxrl.ir.bodies import modules_of

_TURNS = 3  # a branch that turns more often decides anew at each call: Dynamo ends the graph there
_ALL_TURNS = 8  # so do those that a line of a loop, or of equal layers, has together
_MOST = 1000  # a loop that a tensor ends would be followed for ever
Place = tuple[CodeType | str, int]
Site = tuple[Place, int]


class Branches:
    """Which way the branches on tensors' values go, in the capture at hand.

    A branch is a place in the code and how often the trace came by there before: each round of a
    loop, and each layer, goes its own way.

    Attributes:
        met: where the branches stand that were followed and are not told of yet.
    """

    def __init__(self) -> None:
        self.met: list[StackSummary] = []
        self._likely: dict[Site, int] = {}  # in the order of their numbers
        self._taken: dict[Site, int] = {}  # what was found instead
        self._counts: dict[Place, int] = {}
        self._turns: Counter[Site | Place] = Counter()
        self._passed: Counter[Place] = Counter()
        self._of_layers: set[Place] = set()  # that were captured once, which may go their own ways
        self._trace: Callable[[], object] = lambda: None
        self._off = False

    @property
    def variant(self) -> Hashable:
        """What captures differ by."""
        left = frozenset(filter(self._is_left, self._likely))
        taken = frozenset(item for item in self._taken.items() if item[0] not in left)
        return taken, left, self._off

    @property
    def any_followed(self) -> bool:
        """Whether captures, that failed too, took a branch for what it likely is."""
        return bool(self._likely) and not self._off

    def follow(
        self,
        trace: object,
        place: Place,
        likely: int,
        where: Callable[[], StackSummary],
        *,
        once: bool = False,
    ) -> tuple[int, int] | None:
        """The number of a branch and what its value is taken for; None to end the graph there.

        Args:
            trace: which one asks: Dynamo often begins anew.
            place: code and offset of a jump; file and line of a loop over rows.
            likely: the value to begin with.
            where: tells its place in the user's code.
            once: whether it is one branch however often the trace comes by.
        """
        if self._trace() is not trace:
            self._trace, self._passed = weakref.ref(trace), Counter()
        site = place, 0 if once else self._passed[place]
        self._passed[place] += 1
        if self._off or self._passed[place] > _MOST or self._is_left(site):
            return None
        if site not in self._likely:
            self._likely[site] = self._counts.get(place, int(likely))
            self.met.append(stack := where())
            if any(frame.filename == repeated.__file__ for frame in stack):
                self._of_layers.add(place)
        return [*self._likely].index(site), self._taken.get(site, self._likely[site])

    def turn(self, number: int, count: int | None) -> None:
        """A value was not what it was taken for: it is the other one, or rows are so many."""
        site = [*self._likely][number]
        likely = self._likely[site]
        found = 1 - self._taken.get(site, likely) if count is None else count
        if count is not None:  # as many experts are chosen in one layer as in another
            self._counts.setdefault(site[0], count)
        self._taken[site] = found
        if found == likely:
            del self._taken[site]
        self._turns.update([site, site[0]])

    def learn(self, other: Branches) -> None:
        """What another way to capture has found of the loss's branches, which this one would find
        by a capture each. Numbers stay as they are."""
        known = {
            site: likely
            for site, likely in other._likely.items()
            if site not in self._likely and site[0] not in other._of_layers
        }
        self._likely |= known
        self._taken |= {site: other._taken[site] for site in known if site in other._taken}
        for site in known:
            self._turns |= Counter({one: other._turns[one] for one in (site, site[0])})

    def _is_left(self, site: Site) -> bool:
        return self._turns[site] > _TURNS or self._turns[site[0]] > _ALL_TURNS

    def leave(self) -> None:
        """Follow none of them any more: what was said of those that were met does not hold."""
        self._off = True
        self.met.clear()


class CannotBeginAnewError(Exception):
    """A graph that follows branches would run in a way in which its call cannot begin anew."""


def follows_branches(gm: fx.GraphModule) -> bool:
    """Whether a call of this graph may end at a branch."""
    return any(n.target in (counted_rows, counted_rounds) or _is_branch(n) for n in _calls(gm))


def has_checks(gm: fx.GraphModule) -> bool:
    """Whether it may end at a branch or where code would raise."""
    return any(n.target in (check, counted_rows, counted_rounds) for n in _calls(gm))


def _is_branch(call: fx.Node) -> bool:
    """Whether it is a check that has the number of a branch; other checks only raise."""
    return call.target is check and len(call.args) > 1 and call.args[1] is not None


def talks_to_ranks(gm: fx.GraphModule | None) -> bool:
    """Whether ops of it wait for other processes."""
    return gm is not None and any(
        "c10d" in getattr(node.target, "namespace", "") for node in _calls(gm)
    )


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (n for module in modules_of(gm) for n in module.graph.nodes if n.op == "call_function")


def random_states() -> list[torch.Tensor]:
    """States of PyTorch's generators: the CPU's, and those of GPUs in use."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else ())]


def random_state() -> Callable[[], None]:
    """Puts the random generators of Python and PyTorch back to where they are now."""
    python, (cpu, *gpus) = random.getstate(), random_states()

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)

    return restore
