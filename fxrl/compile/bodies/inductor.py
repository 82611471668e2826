"""fxrl's own Inductor configuration, and the one place that calls Inductor.

The options are passed to each compile call and are never set globally: the user's own
torch.compile keeps its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, fx

from fxrl.capture._torch import FakeTensorMode
from fxrl.compile._torch import (
    inductor_compile,
    inductor_kinds,
    inductor_lower,
    inductor_source,
)
from fxrl.errors import ConfigError, nearest
from fxrl.options import misfit

#: Options for every region body, all spelled out so that global settings do not apply.
#: NOTE [Why all of them are off]: measured on an H200 for a loss head, an MLP and a decoder layer
#: of Qwen3-8B's shape (bench/results/region_flags_*.json), none pays: tuned Triton GEMMs lose
#: 20-38 % to cuBLAS and take 10-48 s to compile, coordinate descent gains under 0.5 % for 3-12 s,
#: and CUDA graphs gain nothing behind an op whose tiles vary.
_BODY_OPTIONS: dict[str, Any] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
    # NOTE [Why not]: ``standalone_compile`` asks for it, and then runs every kernel where it is
    # compiled, over tensors of the batch's size that no plan knows of.
    "triton.autotune_at_compile_time": False,
    # NOTE [Why not]: Inductor multiplies matrices of few columns in wider ones and returns a part,
    # so what adapters of rank 2 keep had four times the bytes that were planned, and strides that
    # the backward was not compiled for: every step failed there.
    "shape_padding": False,
    # NOTE [Why not]: kernels are to run in the graph's order, which the planner counts on. Inductor
    # picks one of four orders by predicted peaks that leave out what attention allocates inside:
    # for Qwen2.5-3B's layer at 8192 tokens it picked one that needs 642 MiB instead of 516. Its
    # locality pass moves the weights' gradients to the graph's end and keeps what they read until
    # then: 352 MiB in the backward of Qwen3-8B's layer at 8192 tokens.
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    # NOTE [Why not for small reads]: Inductor fuses kernels that read the same tensor, and keeps
    # what either reads until both can run; sizes that vary it does not weigh. In the backward of
    # experts, sharing one mask of 64 KiB kept two sums of 256 MiB each alive. So kernels whose
    # fusion saves less than 16 MiB of reads (5 us on an H200) stay apart: there the peak of 11 GiB
    # is 0.12 GiB lower and within 0.3 % of the plan, and no step is slower (67.6 ms without this
    # limit, 66.5 with it; dense layers 217 and 214).
    "score_fusion_memory_threshold": 16 << 20,
    # NOTE [Why roundings stay]: Inductor leaves out the roundings between fused ops. An adapter's
    # output after its first updates is far below half a unit, and eager's sum drops it. Without the
    # rounding it decides every tie, where two bf16 values have a sum half-way between two others,
    # all in the gradient's direction. Adam's first step at 1e-6 took a DPO margin to 696 nats (12
    # layers of Qwen3-8B's shape with random weights; 0.5 in eager mode, and the gradient allows
    # 31). ``bodies.trace`` marks the ops that round.
    "emulate_precision_casts": True,
}


@dataclass(frozen=True, slots=True)
class InductorOptions:
    """Inductor options of one kind of region."""

    # ``torch._inductor.config`` names -> values, on top of Inductor's defaults.
    options: tuple[tuple[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> InductorOptions:
        """fxrl's options for region bodies with the user's on top.

        Raises:
            ConfigError: Inductor has no option of a name, or the value is none of its kind.
        """
        _check(extra or {})
        return cls(tuple(sorted({**_BODY_OPTIONS, **(extra or {})}.items())))

    @property
    def need_aot(self) -> bool:
        """Whether they ask for something that only the way through AOTAutograd does: the user's own
        passes, CUDA graphs."""
        names = [name for name, value in self.options if value]
        return any(part in name for part in ("custom", "pre_grad", "cudagraphs") for name in names)


def _check(extra: Mapping[str, Any]) -> None:
    """Checked early: Inductor would only when a body is compiled, which may be never."""
    if not extra:
        return
    kinds, lines = inductor_kinds(), []
    for name, value in extra.items():
        kind = kinds.get(name)
        if name not in kinds:
            lines.append(
                f"inductor: {name!r} is no option of torch._inductor.config{nearest(name, kinds)}"
            )
        elif isinstance(kind, type) and not isinstance(value, kind):
            lines.append(f"inductor: {name}={misfit(kind, value)}")
    if lines:
        raise ConfigError("\n".join(lines))


Compiled = Callable[..., Sequence[Tensor]]
T = TypeVar("T")


def in_own_thread(build: Callable[[], T]) -> T:
    """Build something in a new thread, when called from the kernel of an op.

    NOTE [Why a thread]: an op's kernel runs with autograd's dispatch keys excluded, so that no vjp
    can be taken, and maybe inside of a mode. Both are states of the thread.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(build).result()


def begin_body(
    gm: fx.GraphModule, mode: FakeTensorMode, options: InductorOptions, *, decomposed: bool = False
) -> Callable[[], Compiled]:
    """Begin to compile a functional graph with Inductor; what is returned waits for the kernels,
    which other processes compile.

    Its placeholders carry fake values of ``mode``. Symbolic sizes stay symbolic; what Inductor
    assumes about them becomes guards of the mode's shape environment. ``decomposed``: the graph was
    traced with Inductor's decompositions.
    """
    given = gm, mode, dict(options.options)
    if decomposed and not options.need_aot:
        return inductor_lower(*given)
    compiled = inductor_compile(*given)
    return lambda: compiled


def generated_source(compiled: object) -> str:
    """The source that Inductor generated for a compiled body: the wrapper, kernels inside.

    NOTE [Why a walk]: the artifact keeps its code inside a chain of wrappers whose names change
    between versions of torch; the output code at the end of the chain is stable.
    """
    return "\n\n".join(sorted(set(_sources(compiled, set()))))


def _sources(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if (source := inductor_source(value)) is not None:
        yield source
        return
    inside = [*getattr(value, "__dict__", {}).values()]
    for cell in getattr(value, "__closure__", None) or ():
        try:
            inside.append(cell.cell_contents)
        except ValueError:  # a name that its function has not bound yet
            continue
    for item in inside:
        if callable(item):
            yield from _sources(item, seen)
