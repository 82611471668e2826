"""A region's two graphs: the forward, and the vjp that recomputes it inside.

Both are traced over fake tensors in a shape environment of their own, sizes that vary as symbols,
so one body serves every batch. Dead code elimination then keeps only what the gradients need.

NOTE [Why tracing "real" over fakes]: ``make_fx(tracing_mode="symbolic")`` over prepared fakes
re-wraps them and specialises the token dim to its hint on torch 2.11. Tracing over our own fakes
as they are is what AOTAutograd does, and works on every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxrl.ir.graph import Size, hint
from fxrl.ir.region import InputSpec, Region
from fxrl.ir.sizes import BoundSizes

#: The row count that tracing sees; any value of two or more gives the same graph.
_TRACE_ROWS = 64


class TracedRegion:
    """A region's two graphs, and what their inputs look like.

    Attributes:
        mode: the fake mode of both graphs; its shape environment collects what they assume.
        forward: graph of the inputs, returning a list of outputs.
        vjp: graph of the inputs and the output gradients; None without a gradient.
        grad_outputs: which outputs have an incoming gradient.
    """

    def __init__(
        self, region: Region, sizes: Mapping[str, int] | None = None, *, decompose: bool = False
    ) -> None:
        """Trace a region for ``sizes`` (by name; see ``BoundSizes``) and all alike them.

        Args:
            decompose: a kept region's ops as Inductor's own, so that the cut sees what is cheap;
                otherwise they are eager's kernels and as exact.
        """
        self.region = region
        self.decompose = decompose
        self.mode = FakeTensorMode(
            shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=False
        )
        self.bound = BoundSizes(region.inputs)
        seen = self.bound.read([spec.example for spec in region.inputs])
        assumed = {n: max(2, hint(s)) for n, s in zip(self.bound.names, seen, strict=True)}
        assumed |= {"rows": _TRACE_ROWS} if region.tiled else {}
        self._symbols = {n: self._symbol(n, (sizes or assumed)[n]) for n in self.bound.names}
        inputs = self._inputs()
        self.forward = self._trace(self._forward, inputs)
        outputs = _outputs_of(self.forward)
        self.grad_outputs = tuple(
            i for i, o in enumerate(outputs) if o.is_floating_point() or o.is_complex()
        )
        self.vjp: fx.GraphModule | None = None
        if any(spec.needs_grad for spec in region.inputs) and self.grad_outputs:
            self._trace_backward([outputs[i] for i in self.grad_outputs])

    def _trace_backward(self, outputs: Sequence[Tensor]) -> None:
        grads = [self._like(output) for output in outputs]
        self.vjp = self._trace(self._vjp, [*self._inputs(), *grads])

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Whether what was traced (and compiled since) holds for these sizes."""
        values: dict[sympy.Symbol, sympy.Integer] = {}
        for name, size in self._symbols.items():
            if isinstance(size, int):
                if sizes[name] != size:
                    return False
            elif name in sizes:
                if sizes[name] < 2:  # what the symbol was assumed to be
                    return False
                values[size.node._expr] = sympy.Integer(sizes[name])
        env = self.mode.shape_env
        assert env is not None
        return all(guard.expr.xreplace(values) != sympy.false for guard in env.guards)

    # -- fake inputs; each a tensor of its own, for a mode traces one tensor as one value
    def _inputs(self) -> list[Tensor]:
        return [self._fake(spec) for spec in self.region.inputs]

    def _fake(self, spec: InputSpec) -> Tensor:
        example = spec.example
        sizes: list[Any] = [self.bound.evaluate(size, self._symbols) for size in example.shape]
        if spec.tiled:
            sizes[0] = self._symbols["rows"]
        strides = [self.bound.evaluate(stride, self._symbols) for stride in example.stride()]
        dtype, device = example.dtype, example.device
        with self.mode:
            if spec.tiled:
                return torch.empty(sizes, dtype=dtype, device=device)
            if self.region.keep and None in strides:
                # The call copies an input that has other strides than were traced; in the same
                # order, so that a view of it in the body stays one.
                order = sorted(range(len(sizes)), key=lambda d: -hint(example.stride()[d]))
                dense = torch.empty([sizes[d] for d in order], dtype=dtype, device=device)
                return dense.permute([order.index(d) for d in range(len(sizes))])
            known = [self._stride(*pair) for pair in zip(example.stride(), strides, strict=True)]
            return torch.empty_strided(sizes, known, dtype=dtype, device=device)

    def _stride(self, stride: Size, found: Size | None) -> Size:
        """A stride of the region's own where no dim tells it."""
        if found is None:
            name = str(stride)
            found = self._symbols.get(name) or self._fresh(name, max(2, hint(stride)))
            self._symbols[name] = found
        return found

    def _like(self, value: Tensor) -> Tensor:
        with self.mode:
            return torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)

    def _symbol(self, name: str, example: int) -> Size:
        """A size that varies; constant where it is 0 or 1, which no symbol stands for."""
        return example if example < 2 else self._fresh(name, example)

    def _fresh(self, name: str, example: int) -> Size:
        env = self.mode.shape_env
        assert env is not None
        source = ConstantSource(f"fxrl_{name}")
        symbol = env.create_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        size: Size = env.create_symintnode(symbol, hint=example, source=source)
        return size

    def number(self, size: Size, sizes: Mapping[str, int]) -> int:
        """What a size of these graphs is where the symbols are ``sizes``."""
        if isinstance(size, int):
            return size
        values = {
            symbol.node._expr: sympy.Integer(sizes[name])
            for name, symbol in self._symbols.items()
            if not isinstance(symbol, int) and name in sizes
        }
        return int(size.node.expr.xreplace(values))

    # -- the two functions
    def _forward(self, *inputs: Tensor) -> list[Tensor]:
        return list(self.region.forward(*inputs))

    def _vjp(self, *values: Tensor) -> list[Tensor]:
        count = len(self.region.inputs)
        return self._with_grads(values[:count], values[count:])[1]

    def _with_grads(
        self, inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, and the gradients of the inputs that need one."""
        specs = self.region.inputs
        with torch.enable_grad():
            live = [
                x.detach().requires_grad_(spec.needs_grad)
                for x, spec in zip(inputs, specs, strict=True)
            ]
            outputs = list(self.region.forward(*live))
            pairs = [
                (outputs[i], g)
                for i, g in zip(self.grad_outputs, grads, strict=True)
                if outputs[i].requires_grad
            ]
            wanted = [x for x in live if x.requires_grad]
            if not pairs:
                return outputs, [torch.zeros_like(x) for x in wanted]
            found = torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        return outputs, [
            torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
        ]

    def _trace(
        self, function: Any, inputs: Sequence[Any], decompositions: Any = None
    ) -> fx.GraphModule:
        # The body already holds the casts that autocast asked for where it was captured.
        with (
            self.mode,
            enable_python_dispatcher(),
            torch.no_grad(),
            torch._C._DisableAutocast(),
        ):
            gm = make_fx(function, decomposition_table=decompositions)(*inputs)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm


def _outputs_of(gm: fx.GraphModule) -> list[Tensor]:
    (output,) = gm.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]
