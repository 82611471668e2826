"""Names of places in a graph that are the same in every run: capture, module path, op, occurrence.

    0:model.layers.3.mlp.up_proj/mm        the first product of that module in capture 0
    0:lm_head/mm#2                         the second one of the head
    0:loss/gather                          made by the loss itself, in no module

Reports, dumps, plans and ``verify`` speak of these names; names of graph values change with every
rewrite. They are given once, to the lowered graph; what a pass makes in a value's place keeps the
value's name with its metadata.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from fxrl.ir.bodies import graphs_of
from fxrl.ir.graph import reached

_KEY = "site"
_MODULES = re.compile(r"\.__dict__\['_modules'\]")
# So says Dynamo of modules whose parameters are lent, as ``torch.func.functional_call`` does.
_GETATTR = re.compile(r"getattr\(([^()]+), '(\w+)'\)")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def plain_path(where: str) -> str:
    """Dynamo's way to a module, without brackets: ``L['model'].layers[0]`` is ``layers.0``."""
    while (flat := _GETATTR.sub(r"\1.\2", where)) != where:  # the innermost first
        where = flat
    path = _ITEM.sub(r".\1", _MODULES.sub("", where)).replace("..", ".")
    return path.removeprefix(".").removeprefix("L.").removeprefix("model.")


def name_held(gm: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Name modules that the loss function holds, and those inside of them, as it does: ``names`` is
    Dynamo's source of each such module -> the name that the loss function has for it."""
    for graph in graphs_of(gm):
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            for key, (where, kind) in stack.items():
                way = max((way for way in names if where.startswith(way)), key=len, default=None)
                if way is not None:
                    stack = {**stack, key: (f"L.{names[way]}{where.removeprefix(way)}", kind)}
            if stack:
                node.meta["nn_module_stack"] = stack


def name_modules(gm: fx.GraphModule, names: Mapping[str, str], around: str) -> None:
    """Give modules of the model their own ``names``, by id. Dynamo has the ways by which it came to
    them: from where a graph begins inside of the model, such as ``L['self'].q_proj``, or through
    what the closure of an instance's own forward holds, as accelerate, TRL and layers captured once
    have it. Added as outer modules are the one with the id ``around``, in a method of which the
    graph begins, and those that hold the outermost module, in whose calls it begins."""
    ids = {name: key for key, name in names.items()}
    for graph in graphs_of(gm):
        for node in graph.nodes:
            own = {around: ("", None), **(node.meta.get("nn_module_stack") or {})}
            stack: dict[str, tuple[str, Any]] = {}
            for key, (where, kind) in own.items():
                name = names.get(key.partition("@")[0])
                parts = name.split(".") if name and not stack else []
                holders = [".".join(parts[:end]) for end in range(1, len(parts))]
                stack |= {ids[one]: (_of_model(one), None) for one in holders}
                where = _of_model(name) if name else where
                if where:
                    stack[key] = where, kind
            if stack:
                node.meta["nn_module_stack"] = stack


def _of_model(name: str) -> str:
    return f"L['model'].{name}"


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that made ``node``; ``loss`` for code in no module."""
    stack = node.meta.get("nn_module_stack") or {}
    return plain_path([*stack.values()][-1][0]) if stack else "loss"


def module_of(site: str) -> str:
    """The module path in a place's name: ``lm_head`` of ``0:lm_head/mm#2``."""
    return site.partition(":")[2].rpartition("/")[0]


def name_sites(gm: fx.GraphModule, where: str) -> None:
    """Name every call of a lowered graph, checkpointed bodies included, after ``where``: the number
    of the capture, or the id of the region whose body this is."""
    seen: Counter[str] = Counter()
    for graph in graphs_of(gm):
        for node in graph.nodes:
            if node.op == "call_function":
                name = f"{where}:{module_path(node)}/{_bare_name(node)}"
                seen[name] += 1
                node.meta[_KEY] = name if seen[name] == 1 else f"{name}#{seen[name]}"


def rename_site(node: fx.Node, path: str, own: str) -> None:
    """Name a copy of what the module at ``path`` made for the one at ``own``."""
    where, _, name = node.meta.get(_KEY, "").partition(":")
    if name.startswith((f"{path}.", f"{path}/")):
        node.meta[_KEY] = f"{where}:{own}{name.removeprefix(path)}"
    stack = {}
    for key, (module, kind) in (node.meta.get("nn_module_stack") or {}).items():
        plain = plain_path(module)
        inside = plain == path or plain.startswith(f"{path}.")
        stack[key] = (f"L['model'].{own}{plain.removeprefix(path)}" if inside else module, kind)
    node.meta["nn_module_stack"] = stack


def name_instead(node: fx.Node, replaced: fx.Node) -> None:
    """Name what a pass puts in place of a call as if the same module had called it: a head that is
    one product in some batches has one name in all of them."""
    path, _, name = replaced.meta.get(_KEY, "").rpartition("/")
    if not path:
        return
    wanted = f"{path}/{_bare_name(node)}{''.join(name.partition('#')[1:])}"
    if all(other.meta.get(_KEY) != wanted for other in node.graph.nodes):
        node.meta[_KEY] = wanted


def names_module(pattern: str, path: str) -> bool:
    """Whether a pattern of dotted names (``*`` matches anything) matches a module's path, a part of
    it, or a module around it."""
    return any(fnmatchcase(path, f"{a}{pattern}{b}") for a in ("", "*.") for b in ("", ".*"))


def site_name(node: fx.Node) -> str:
    """The name of a value; of one that a pass made from nothing, by the nearest that has one."""
    for near in reached([node], lambda near: (*near.all_input_nodes, *near.users)):
        if _KEY in near.meta:
            found: str = near.meta[_KEY]
            return found if near is node else f"{found}.{_bare_name(node)}"
    return node.name


def _bare_name(node: fx.Node) -> str:
    """``mm`` of ``aten.mm.default``, and of ``addmm``: which of them a Linear with a bias becomes
    depends on the rows of the batch."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    name = str(schema.name).rpartition("::")[2]
    return "mm" if name == "addmm" else name
