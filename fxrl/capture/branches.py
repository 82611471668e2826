"""``if kl > 1: ...``: a branch on a tensor's value is captured as it goes, and checked there.

Dynamo ends the graph at such a branch: inside of a model all that follows is cut off from the loss.
Here the code is followed one way, as Dynamo follows one type of each argument, and an op ends the
call where the value goes the other way (``fxrl.capture.checks``). The call then begins anew with a
capture of that way, which stays beside the first one.

NOTE [Why a call may begin anew]: nothing has happened by then that anybody could see. Only branches
of the loss's first graph are followed; that graph is functional once it is rewritten, so buffers
are written when all of it has run, and Python's objects after that. The random generators are put
back. A graph that runs as it was written, or talks to other ranks, has no such branch in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from traceback import StackSummary
from types import CodeType

import torch
from torch import fx

from fxrl.capture.checks import check
from fxrl.ir.graph import modules_of

_TURNS = 3  # a branch that turns more often decides anew at each call: Dynamo ends the graph there
_MOST = 1000  # a loop that a tensor ends would be followed for ever
Site = tuple[CodeType, int]


class Branches:
    """Which way the branches on tensors' values go, in the capture at hand.

    Attributes:
        met: where each branch that was followed stands, by its number.
    """

    def __init__(self) -> None:
        self.met: list[StackSummary] = []
        self._sites: list[Site] = []
        self._turned: set[Site] = set()
        self._turns: Counter[Site] = Counter()
        self._followed, self._off = 0, False

    @property
    def variant(self) -> Hashable:
        """What captures differ by."""
        left = frozenset(site for site in self._sites if self._turns[site] > _TURNS)
        return frozenset(self._turned) - left, left, self._off

    def begin(self) -> None:
        """A trace may begin."""
        self._followed = 0

    def follow(
        self, site: Site, likely: bool, where: Callable[[], StackSummary]
    ) -> tuple[int, bool] | None:
        """The number of a branch and what its value is taken for; None to end the graph there.

        Args:
            site: code and offset of the jump.
            likely: the value to begin with.
            where: tells its place in the user's code.
        """
        self._followed += 1
        if self._off or self._turns[site] > _TURNS or self._followed > _MOST:
            return None
        if site not in self._sites:
            self._sites.append(site)
            self.met.append(where())
        return self._sites.index(site), likely != (site in self._turned)

    def turn(self, number: int) -> None:
        """A value was not what it was taken for."""
        site = self._sites[number]
        self._turned ^= {site}
        self._turns[site] += 1

    def leave(self) -> None:
        """Follow none of them any more."""
        self._off = True


class CannotBeginAnewError(Exception):
    """A graph that follows branches would run in a way in which its call cannot begin anew."""


def follows_branches(gm: fx.GraphModule) -> bool:
    """Whether a call of this graph may end at a branch."""
    return any(node.args[1:] for node in _calls(gm) if node.target is check)


def talks_to_ranks(gm: fx.GraphModule | None) -> bool:
    """Whether ops of it wait for other processes."""
    return gm is not None and any(
        "c10d" in getattr(node.target, "namespace", "") for node in _calls(gm)
    )


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (n for module in modules_of(gm) for n in module.graph.nodes if n.op == "call_function")


def random_states() -> list[torch.Tensor]:
    """Those of PyTorch's generators: the CPU's, and of GPUs that are in use."""
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
