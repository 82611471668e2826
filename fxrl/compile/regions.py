"""From a Region to kernels: trace forward and vjp at compile time, compile each once.

Both graphs are traced over fake tensors in a shape environment of their own, the token count a
fresh symbol, so one body serves every batch. The vjp recomputes the forward inside; dead code
elimination then keeps only what the gradients need.

NOTE [Why at compile time]: inside an op's kernel the autograd dispatch keys are excluded, so a
vjp cannot be taken there.
NOTE [Why tracing "real" over fakes]: ``make_fx(tracing_mode="symbolic")`` over prepared fakes
re-wraps them and specialises the token dim to its hint on torch 2.11. Tracing over our own fakes
as they are is what AOTAutograd does, and works on every version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxrl.compile.inductor import InductorOptions, compile_body
from fxrl.core.region import InputSpec, Region
from fxrl.ops.region import RegionKernels, register, registered

#: The token count that tracing sees; any value of two or more gives the same graph.
_TRACE_ROWS = 64


class TracedRegion:
    """A region's two graphs, and what their inputs look like.

    Attributes:
        forward: graph of the inputs, returning a list of outputs.
        vjp: graph of the inputs and the output gradients; None without a gradient.
        grad_outputs: which outputs have an incoming gradient.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._mode = FakeTensorMode(
            shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=False
        )
        self._symbols: dict[str, torch.SymInt] = {}
        inputs = self._inputs()
        self.forward = self._trace(self._forward, inputs)
        outputs = _outputs_of(self.forward)
        self.grad_outputs = tuple(
            i for i, o in enumerate(outputs) if o.is_floating_point() or o.is_complex()
        )
        self.vjp: fx.GraphModule | None = None
        if any(spec.needs_grad for spec in region.inputs) and self.grad_outputs:
            grads = [self._like(outputs[i]) for i in self.grad_outputs]
            self.vjp = self._trace(self._vjp, [*self._inputs(), *grads])

    # -- fake inputs; every value gets a tensor of its own, for a mode traces one tensor as one value
    def _inputs(self) -> list[Tensor]:
        return [self._fake(spec) for spec in self.region.inputs]

    def _fake(self, spec: InputSpec) -> Tensor:
        example = spec.example
        sizes: list[Any] = [self._size(size) for size in example.shape]
        if spec.tiled:
            sizes[0] = self._symbol("rows")
            with self._mode:
                return torch.empty(sizes, dtype=example.dtype, device=example.device)
        strides = [self._size(stride) for stride in example.stride()]
        with self._mode:
            return torch.empty_strided(sizes, strides, dtype=example.dtype, device=example.device)

    def _like(self, value: Tensor) -> Tensor:
        with self._mode:
            return torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)

    def _symbol(self, name: str, example: int = _TRACE_ROWS) -> torch.SymInt:
        if name not in self._symbols:
            env = self._mode.shape_env
            assert env is not None
            source = ConstantSource(f"fxrl_{name}")
            symbol = env.create_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            size = env.create_symintnode(symbol, hint=example, source=source)
            assert isinstance(size, torch.SymInt)
            self._symbols[name] = size
        return self._symbols[name]

    def _size(self, size: Any) -> Any:
        """A size of the outer graph in this region's own symbols."""
        if isinstance(size, int):
            return size
        return self._translate(size.node.expr, size.node.hint)

    def _translate(self, expr: Any, example: int) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(str(expr), example)
        if expr.is_Add or expr.is_Mul:
            parts = [self._translate(part, example) for part in expr.args]
            total = parts[0]
            for part in parts[1:]:
                total = total + part if expr.is_Add else total * part
            return total
        return self._symbol(str(expr), example)

    # -- the two functions
    def _forward(self, *inputs: Tensor) -> list[Tensor]:
        return list(self.region.forward(*inputs))

    def _vjp(self, *values: Tensor) -> list[Tensor]:
        specs = self.region.inputs
        inputs, grads = values[: len(specs)], values[len(specs) :]
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
                return [torch.zeros_like(x) for x in wanted]
            found = torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        return [
            torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
        ]

    def _trace(self, function: Any, inputs: Sequence[Tensor]) -> fx.GraphModule:
        with self._mode, enable_python_dispatcher(), torch.no_grad():
            gm = make_fx(function)(*inputs)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm


def _outputs_of(gm: fx.GraphModule) -> list[Tensor]:
    (output,) = gm.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


def build_region(region: Region, options: InductorOptions | None) -> RegionKernels:
    """Trace, compile (``options`` None: run op by op) and register a region.

    A body that was built with the same options before is reused.
    """
    known = registered(region.id)
    if known is not None and known.options == options:
        return known
    traced = TracedRegion(region)
    forward: Any = traced.forward
    vjp: Any = traced.vjp
    generated: dict[str, str] = {}
    if options is not None:
        forward, generated["forward.py"] = compile_body(traced.forward, options)
        if traced.vjp is not None:
            vjp, generated["vjp.py"] = compile_body(traced.vjp, options)
    kernels = RegionKernels(
        region,
        forward,
        vjp,
        traced.grad_outputs,
        min_rows=1 if options is None else 2,
        options=options,
        traced=(traced.forward, traced.vjp),
        generated=generated,
    )
    register(kernels)
    return kernels
