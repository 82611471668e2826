"""``print_graph``: the one text form of a graph, shared by goldens, dumps and diffs.

One value a line, operands by name, type behind the colon:

    %hidden = input : f32[s0, 8] grad
    %logits = aten.mm.default(%hidden, %weight) : f32[s0, 97]
    return %logits

NOTE [Why an own printed form]
``fx.Graph.__str__`` shows no shapes and ``print_readable`` shows addresses of higher-order
functions, device and strides, and symbols that depend on hashes of Dynamo's internal names. A
golden test or a diff needs a text that changes only when the graph does: so there are no
addresses, no devices of values, and symbols are numbered in the order in which the text shows them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch import fx

from fxrl.ir.graph import OpOverload, example_of, held, inputs_of

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DYNAMO_NAME = re.compile(r"^[lg]_(?P<path>.*[^_])_+(?:_\d+)?$", re.IGNORECASE)
_PACKET = type(torch.ops.aten.mm)
_MODULE_STEP = re.compile(r"_+(?:modules|parameters|buffers)_+")


def print_graph(graph: fx.GraphModule | fx.Graph, *, device_numbers: bool = True) -> str:
    """``graph`` as stable text; submodules that it calls follow as ``@name:`` blocks.

    Types come from ``example_of``. Without ``device_numbers``
    operands say ``cuda`` for ``cuda:1``, as processes with a GPU each have the same graph.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return "\n".join(_Printer(device_numbers).lines(graph))


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bf16"``, ``torch.float8_e4m3fn`` -> ``"f8e4m3"``."""
    name = str(dtype).removeprefix("torch.")
    if dtype is torch.bool:
        return "b8"
    name = re.sub(r"^(b?)float", r"\1f", name)
    name = name.replace("uint", "u").replace("int", "i")
    name = re.sub(r"^complex", "c", name).replace("_", "")
    return re.sub(r"(e\dm\d)fn(?=$|x)", r"\1", name)


def input_name(name: str) -> str:
    """Dynamo's flattened name as a path: ``L_batch_input_ids_`` -> ``batch.input_ids``.

    ``L_self_modules_lm_head_parameters_weight_`` becomes ``self.lm_head.weight``. Dynamo writes
    every separator as ``_``, so only module steps and the leading ``batch`` can be told apart;
    anything else keeps its underscores. A name that is not Dynamo's is returned as it is.
    """
    if (match := _DYNAMO_NAME.match(name)) is None:
        return name
    path = _MODULE_STEP.sub(".", match["path"].strip("_"))
    return re.sub(r"^batch_+", "batch.", path)


class Symbols:
    """Numbers symbolic sizes by first use: backed ``s0``, unbacked ``u0``, floats ``f0``."""

    def __init__(self) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        self._counts: Counter[str] = Counter()

    def text(self, value: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """The expression of ``value`` in renamed symbols; a number as it is."""
        if isinstance(value, int):
            return str(value)
        expr = value.node.expr
        for symbol in sorted(expr.free_symbols, key=lambda s: (len(s.name), s.name)):
            if symbol not in self._renamed:
                kind = {"u": "u", "z": "f"}.get(symbol.name[0], "s")
                fresh = f"{kind}{self._counts[kind]}"
                self._counts[kind] += 1
                self._renamed[symbol] = sympy.Symbol(fresh, **symbol.assumptions0)
        return str(expr.xreplace(self._renamed))


class _Printer:
    def __init__(self, device_numbers: bool) -> None:
        self._symbols = Symbols()
        self._device_numbers = device_numbers

    def lines(self, graph: fx.Graph) -> list[str]:
        names = self._names(graph)
        lines = [self._line(node, names) for node in graph.nodes]
        for target, module in _called_graphs(graph).items():
            lines += ["", f"@{target}:"]
            lines += [f"  {line}" if line else "" for line in self.lines(module.graph)]
        return lines

    def _names(self, graph: fx.Graph) -> dict[fx.Node, str]:
        """Printed name of each node; a nicer name gives way where it would be ambiguous."""
        names = {node: node.name for node in graph.nodes}
        nicer = {}
        for node in inputs_of(graph):
            value = _value(node)
            is_symbol = isinstance(value, torch.SymInt) and value.node.expr.is_Symbol
            nicer[node] = self._symbols.text(value) if is_symbol else input_name(node.name)
        taken = Counter([*nicer.values(), *(n.name for n in graph.nodes if n not in nicer)])
        names.update({node: name for node, name in nicer.items() if taken[name] == 1})
        return names

    def _line(self, node: fx.Node, names: dict[fx.Node, str]) -> str:
        if node.op == "output":
            result = node.args[0]
            values = result if isinstance(result, tuple | list) else (result,)
            return f"return {', '.join(self.argument(value, names) for value in values)}"
        line = f"%{names[node]} = {self._expression(node, names)}"
        value = _value(node)
        if value is not None:
            line += f" : {self.type_of(value)}"
        if node.op in ("placeholder", "get_attr") and getattr(value, "requires_grad", False):
            line += " grad"
        return line

    def _expression(self, node: fx.Node, names: dict[fx.Node, str]) -> str:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr":
            return f"@{node.target}"
        args = [self.argument(arg, names) for arg in node.args]
        args += [f"{key}={self.argument(arg, names)}" for key, arg in node.kwargs.items()]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        callee = f"@{node.target}" if node.op == "call_module" else _callee(node.target)
        return f"{callee}({', '.join(args)})"

    def type_of(self, value: object) -> str:
        """``f32[s0, 97]`` for a tensor; the expression for a symbol; the type's name otherwise."""
        if isinstance(value, torch.Tensor):
            return f"{dtype_name(value.dtype)}[{', '.join(map(self._symbols.text, value.shape))}]"
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._symbols.text(value)
        if isinstance(value, tuple | list):
            return f"({', '.join(map(self.type_of, value))})"
        return "none" if value is None else type(value).__name__

    def argument(self, value: Any, names: Mapping[fx.Node, str]) -> str:
        """One operand; see ``constant`` for those that are no graph values."""
        if isinstance(value, fx.Node):
            return f"%{names[value]}"
        if isinstance(value, list | tuple):
            inner = ", ".join(self.argument(item, names) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, Mapping):
            items = (f"{key!r}: {self.argument(item, names)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self.argument(part, names) for part in parts)})"
        return self.constant(value)

    def constant(self, value: Any) -> str:
        """A literal operand, without addresses; floats exactly, by ``repr``."""
        if isinstance(value, torch.dtype):
            return dtype_name(value)
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.type_of(value)
        if value is Ellipsis:
            return "..."
        if callable(value):
            return _callee(value)
        if isinstance(value, torch.device) and not self._device_numbers:
            return value.type
        plain = isinstance(value, torch.device | torch.layout | torch.memory_format)
        return _ADDRESS.sub("", str(value) if plain else repr(value)).removeprefix("torch.")


def _value(node: fx.Node) -> Any:
    """What the node holds: a (fake) tensor, a symbol, a tuple of those, or None if unknown."""
    if (value := example_of(node)) is not None:
        return value
    value = held(node) if node.op == "get_attr" else None
    return value if isinstance(value, torch.Tensor) else None


def _called_graphs(graph: fx.Graph) -> dict[str, fx.GraphModule]:
    """Graph modules that ``graph`` calls or passes on, by path, in order of first use."""
    called: dict[str, fx.GraphModule] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            module = held(node)
            if isinstance(module, fx.GraphModule):
                called[str(node.target)] = module
    return called


def _callee(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload | _PACKET):
        return str(target)
    name = getattr(target, "__name__", None) or type(target).__name__
    module = getattr(target, "__module__", None) or "torch"
    if module.startswith(("torch._ops", "torch._higher_order_ops")):
        return f"higher_order.{name}"
    return f"{module.lstrip('_')}.{name}"
