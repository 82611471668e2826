"""Traces of bodies on disk: what one process has traced, the next one reads.

    key     what is traced (the body's text, how its inputs look, what is asked of it), and all else
            that a trace depends on: versions, fxrl's files, settings, the chip
    file    the graph, a record a node: op, arguments, fake value with its sizes as expressions

It lies beside Inductor's cache of compiled graphs, and is off if that is off.

NOTE [Why not the graph pickler of torch.fx]: it makes every fake value from scratch, which takes
half as long as the trace (0.4 of 0.85 s for a layer of Qwen3 with LoRA, two cores, torch 2.13), and
on 2.11 it refuses a traced graph. Reading the same graph as here takes 0.15 s.

NOTE [Why not every graph]: the file must hold all that the trace gave. The key knows the code of
PyTorch's and fxrl's own ops only; that of others may change between processes. Records hold no
constants, no inner graphs, and no guards on sizes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

import fxrl
from fxrl.capture._torch import FakeTensor, FakeTensorMode, storage_of
from fxrl.compile._torch import (
    guards_of,
    inductor_cache_folder,
    inductor_settings,
    new_graph_module,
    size_of,
)
from fxrl.compile.bodies.attention import allowed
from fxrl.errors import first_line
from fxrl.files import write_bytes
from fxrl.ir.graph import OpOverload, Size
from fxrl.ir.region import body_text

log = logging.getLogger(__name__)
#: Namespaces of the ops whose code the key knows.
_KNOWN = ("aten", "prims", "fxrl")
#: What Python's own functions in a graph are of: indexing, and arithmetic of sizes.
_OWN = ("_operator", "math", "torch")


def cached_trace(
    body: fx.GraphModule,
    asked: Sequence[object],
    inputs: Sequence[Tensor],
    mode: FakeTensorMode,
    make: Callable[[], fx.GraphModule],
) -> fx.GraphModule:
    """The graph that ``make`` traces of a body in ``mode``, read from the cache if it is there.

    ``asked`` is, as text, what the trace depends on besides the body and its ``inputs``, whose
    symbols are the only ones of the mode. If ``make`` raises, nothing is kept.
    """
    if (folder := inductor_cache_folder()) is None or not _is_told(body):
        return make()
    looks = [(x.dtype, x.device, *map(str, x.shape), *map(str, x.stride())) for x in inputs]
    key = [body_text(body), *asked, looks, _program(), *_surroundings({x.device for x in inputs})]
    name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()
    file = folder / "fxrl" / name
    if (found := _read(file, mode)) is not None:
        return found
    gm = make()
    # A guard made before the trace counts, too: what is asked again adds none.
    if not guards_of(mode) and _is_told(gm):
        _write(file, gm.graph)
    return gm


# ---------------------------------------------------------------------------- the key
@cache
def _program() -> str:
    """Versions, and fxrl's files by what Python checks ``.pyc`` files with. Not those of
    ``passes``: what they did before a trace is in the body's text, and what they do after it is not
    kept."""
    root = Path(fxrl.__file__).parent
    told = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(root.rglob("*.py"))]
    return f"{torch.__version__} {hashlib.sha256(str(told).encode()).hexdigest()}"


def _surroundings(devices: Iterable[torch.device]) -> list[object]:
    """Which kernels a trace may choose, and the settings by which it does."""
    chips = [torch.cuda.get_device_name(d) for d in devices if d.type == "cuda"]
    cpu = torch.backends.cpu.get_cpu_capability()
    numbers = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return [sorted(chips), cpu, allowed(), numbers, inductor_settings()]


# ---------------------------------------------------------------------------- the file
def _is_told(gm: fx.GraphModule) -> bool:
    """Whether a graph's text and the records of its nodes hold all of it."""
    return all(map(_is_known, gm.graph.nodes))


def _is_known(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target.namespace in _KNOWN
    if node.op == "call_function":
        return cast(Any, node.target).__module__ in _OWN
    return node.op in ("placeholder", "output")


def _write(file: Path, graph: fx.Graph) -> None:
    """Several threads and processes may write the same."""
    stream = BytesIO()
    writer = _Writer(stream)
    try:
        for node in graph.nodes:
            meta = {name: value for name, value in node.meta.items() if name != "tensor_meta"}
            writer.dump((node.op, node.name, node.target, node.args, node.kwargs, meta))
        file.parent.mkdir(exist_ok=True)
        write_bytes(file, stream.getvalue(), work=f"{os.getpid()}-{threading.get_ident()}")
    except Exception as error:
        log.debug("a trace is not kept for the next process: %s", first_line(error))


def _read(file: Path, mode: FakeTensorMode) -> fx.GraphModule | None:
    if not file.exists():
        return None
    try:
        return new_graph_module({}, _Reader(BytesIO(file.read_bytes()), mode).read())
    except Exception as error:
        log.warning("%s is damaged, and made anew: %s", file, first_line(error))
        return None


class _Writer(pickle.Pickler):
    """Replaces what belongs to a graph, a mode or PyTorch by its name.

    Which values share memory is kept: Inductor reuses the memory of values that are dead.
    """

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._storages: dict[int, tuple[int, torch.dtype]] = {}

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if isinstance(value, fx.Node):
            return "node", value.name
        if isinstance(value, torch.SymInt):
            return "size", value.node.expr
        if isinstance(value, FakeTensor):
            storage = storage_of(value)
            as_first = len(self._storages), value.dtype
            number, dtype = self._storages.setdefault(storage, as_first)
            if dtype != value.dtype:
                raise pickle.PicklingError("memory is seen in two dtypes")
            look = tuple(value.shape), value.stride(), value.storage_offset()
            return "fake", number, *look, value.dtype, value.device
        if isinstance(value, OpOverload):
            return "op", str(value)
        return None


class _Reader(pickle.Unpickler):
    """Makes a new graph, with fake values of ``mode``."""

    def __init__(self, stream: BytesIO, mode: FakeTensorMode) -> None:
        super().__init__(stream)
        self._mode = mode
        self._nodes: dict[str, fx.Node] = {}
        self._sizes: dict[Any, Size] = {}
        self._storages: dict[int, Tensor] = {}

    def read(self) -> fx.Graph:
        """The graph, node by node: those that come later name it."""
        graph, op = fx.Graph(), ""
        while op != "output":
            op, name, target, args, kwargs, meta = self.load()
            node = self._nodes[name] = graph.create_node(op, target, args, kwargs, name)
            node.meta = meta
        return graph

    def persistent_load(self, told: tuple[Any, ...]) -> object:
        return getattr(self, f"_{told[0]}")(*told[1:])

    def _node(self, name: str) -> fx.Node:
        return self._nodes[name]

    def _size(self, expr: Any) -> Size:
        if expr not in self._sizes:
            self._sizes[expr] = size_of(self._mode, expr)
        return self._sizes[expr]

    def _op(self, name: str) -> object:
        return reduce(getattr, name.split("."), torch.ops)

    def _fake(
        self,
        storage: int,
        shape: Sequence[Size],
        stride: Sequence[Size],
        offset: Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        if (first := self._storages.get(storage)) is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            self._storages[storage] = made
        else:
            made = first.as_strided(shape, stride, offset)
        return FakeTensor(self._mode, made, device)
