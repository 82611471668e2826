"""Write what every capture left behind as a folder that a person can read and diff.

    index.md                    start here
    report.txt, report.jsonl    all remarks
    capture_0/
        inputs.txt, 00_dynamo.py
        01_<pass>.before.txt, 01_<pass>.after.txt, 01_<pass>.diff
        regions/<id>/forward.txt, vjp.txt, generated/...
        aot/forward.py, backward.py
        report.txt, report.jsonl
    bytecode/                   Dynamo's, decompiled; disassembled where depyf cannot
    fxrl-dump.json              which files are fxrl's

NOTE [Why a list of our own files]
A dump is repeated into one folder, and a graph that is gone must not look alive: so files of the
last dump that this one does not write again are removed. Only ``fxrl-dump.json`` says which those
are; what it does not list belongs to someone else and is neither removed nor overwritten.
"""

from __future__ import annotations

import difflib
import dis
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from fxrl.capture._torch import cache_entries
from fxrl.compile.bodies.variants import CompiledRegion
from fxrl.compile.outer import aot_graphs
from fxrl.errors import FxrlError, MissingPackageError, optional
from fxrl.files import check_writable, refuse_links, write_text
from fxrl.ir.capture_record import Capture
from fxrl.ir.printer import print_graph
from fxrl.ir.region import Region, region_calls, regions_of
from fxrl.ir.remark import Report, format_bytes

_MANIFEST = "fxrl-dump.json"
_REPORT_WIDTH = 120
_HOW_TO_READ = """\
## How to read

1. The remarks of a capture say of every site what was done, or why nothing was and the cure.
2. Each pass of a capture has its graph before and after, and the difference: start with the diff.
   One value stands on one line, `%name = operator(operands) : dtype[shape]`; `s0`, `s1`, ... are
   dynamic sizes, `grad` marks an input that requires a gradient.
3. A region is a part of the graph that was outlined, with its own backward: `forward.txt` is what
   runs, `vjp.txt` computes its gradients, `generated/` is the code that was compiled from both.
4. `aot/` is what remains around the regions; `00_dynamo.py` is the program before any pass."""


class DumpError(FxrlError, OSError):
    """The folder cannot take a dump."""


def write_dump(
    directory: str | Path,
    captures: Sequence[Capture],
    report: Report,
    *,
    functions: Sequence[Callable[..., Any]] = (),
) -> Path:
    """Write a dump and return the path of its ``index.md``.

    Args:
        directory: made if it does not exist; files of an earlier dump in it are replaced,
            files of others stay as they are.
        functions: functions that ran under ``torch.compile``, whose Dynamo bytecode is
            decompiled. Where depyf is missing or fails, it is disassembled, and the index says why.

    Raises:
        DumpError: ``directory`` is a file or cannot be written, its list of files is damaged, or a
            file of someone else has a name that the dump needs. Nothing is written then. Or the
            disk is full, with a part written, which the next dump into it replaces.
        ForeignFileError: one of its files is reached through a link; nothing is written.
    """
    root = Path(directory)
    bytecode: dict[str, str] = {}
    notes: dict[str, None] = {}
    for function in functions:
        texts, reasons = dynamo_bytecode(function)
        bytecode |= texts
        notes |= dict.fromkeys(reasons)
    try:
        _write(root, render(captures, report, bytecode=bytecode, notes=[*notes]))
    except DumpError:
        raise
    except OSError as error:
        raise DumpError(
            f"{root} could not be written: {error.strerror}; a part of it may be there; free "
            "some space, or choose another"
        ) from error
    return root / "index.md"


def render(
    captures: Sequence[Capture],
    report: Report,
    *,
    bytecode: Mapping[str, str],
    notes: Sequence[str] = (),
) -> dict[str, str]:
    """The files of a dump, path with ``/`` -> text; touches no disk and no clock. ``bytecode``
    maps names of files to what is shown of it, ``notes`` tell in the index why it is not source."""
    files = _Files()
    parts = ["# What fxrl did", _summary(captures, report)]
    if not captures:
        parts.append("Nothing is captured yet: call the step on a batch first, then dump again.")
    else:
        parts.append(_HOW_TO_READ)
    parts += [_capture(files, capture) for capture in captures]
    shown = [files.add("bytecode", name, text) for name, text in sorted(bytecode.items())]
    told = _bullets([*map(_link, shown), *notes], "not part of this dump")
    parts.append(f"## Dynamo's bytecode\n\n{told}")
    _report(files, "", report)
    files.add("", "index.md", "\n\n".join(parts))
    return files.texts


class _Files:
    """Texts by path; names made safe, and unique whatever the file system thinks of case."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._taken: set[str] = set()

    def add(self, folder: str, name: str, text: str) -> str:
        path = self.path(folder, name)
        self.texts[path] = text if text.endswith("\n") or not text else f"{text}\n"
        return path

    def path(self, folder: str, name: str) -> str:
        safe = re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "_"
        path = PurePosixPath(folder, safe)
        number = 1
        while str(path).lower() in self._taken:
            number += 1
            path = path.with_name(f"{number}_{safe}")
        self._taken.add(str(path).lower())
        return str(path)


def _summary(captures: Sequence[Capture], report: Report) -> str:
    applied, missed = len(report.of_kind("applied")), len(report.of_kind("missed"))
    return (
        f"Captures: {len(captures)}. Rewrites applied: {applied}, missed: {missed}. "
        f"Graph breaks: {sum(len(capture.graph_breaks) for capture in captures)}. "
        f"Predicted to save {format_bytes(report.saved_bytes)} at the peak.\n\n"
        "All remarks: [report.txt](report.txt), for tools [report.jsonl](report.jsonl)."
    )


def _capture(files: _Files, capture: Capture) -> str:
    """Adds the files of a capture; its section of the index."""
    folder = files.path("", f"capture_{capture.index}")
    lines = print_graph(capture.dynamo).splitlines()
    inputs = "\n".join(line for line in lines if line[:1] == "%" and " = input" in line)
    files.add(folder, "inputs.txt", inputs)
    shown = f"```\n{inputs}\n```" if inputs else "none"
    dynamo = files.add(folder, "00_dynamo.py", _code(capture.dynamo))
    passes = _passes(files, folder, capture)
    regions = [*_regions(files, f"{folder}/regions", capture)]
    running = capture.rewritten.gm if capture.rewritten and capture.running else None
    # Made here, for people: the step itself may run without AOTAutograd's graphs.
    around = {} if running is None else aot_graphs(running)
    aot = [files.add(f"{folder}/aot", f"{n}.py", _code(graph)) for n, graph in around.items()]
    report = _report(files, folder, capture.report)
    breaks = (f"{one.source or 'unknown place'}: {one.reason}" for one in capture.graph_breaks)
    pass_heads = ("pass", "applied", "missed", "saves", "diff", "graphs")
    region_heads = ("region", "sites", "forward", "backward", "code")
    parts = [
        f"## Capture {capture.index}",
        f"The program as Dynamo delivered it: {_link(dynamo)}; its remarks: {_link(report)}.",
        f"### Inputs\n\n{shown}",
        f"### Passes\n\n{_table(pass_heads, passes) if passes else 'none ran'}",
        f"### Remarks\n\n{_bullets(map(str, capture.report.remarks), 'no pass found a site')}",
        f"### Graph breaks\n\n{_bullets(breaks, 'none: one graph holds it all')}",
        f"### Regions\n\n{_table(region_heads, regions) if regions else 'none'}",
        f"### Around the regions\n\n{_bullets(map(_link, aot), 'not compiled')}",
    ]
    return "\n\n".join(parts)


def _code(gm: fx.GraphModule) -> str:
    return str(gm.print_readable(print_output=False))


def _passes(files: _Files, folder: str, capture: Capture) -> list[Sequence[str]]:
    """Runs the passes again and adds the graphs ahead of each and behind it; their rows in the
    index."""
    rows: list[Sequence[str]] = []
    before = ""

    def watch(name: str, gm: fx.GraphModule, report: Report) -> None:
        nonlocal before
        after = print_graph(gm)
        if name:
            rows.append(_pass(files, folder, len(rows) + 1, name, before, after, report))
        before = after

    capture.replay(watch)
    return rows


def _pass(
    files: _Files, folder: str, number: int, name: str, before: str, after: str, report: Report
) -> Sequence[str]:
    """Adds the graphs of a pass; its row in the index."""
    title = f"{number:02d}_{name}"
    old = files.add(folder, f"{title}.before.txt", before)
    new = files.add(folder, f"{title}.after.txt", after)
    lines = difflib.unified_diff(
        before.splitlines(),
        after.splitlines(),
        PurePosixPath(old).name,
        PurePosixPath(new).name,
        lineterm="",
    )
    diff = files.add(folder, f"{title}.diff", "\n".join(lines))
    return (
        name,
        str(len(report.of_kind("applied"))),
        str(len(report.of_kind("missed"))),
        format_bytes(report.saved_bytes),
        _link(diff, "diff") if before != after else "no change",
        f"{_link(old, 'before')}, {_link(new, 'after')}",
    )


def _regions(files: _Files, folder: str, capture: Capture) -> Iterator[Sequence[str]]:
    """Adds the graphs and the code of each distinct region; their rows in the index."""
    if capture.rewritten is None:
        return
    graph = capture.rewritten.gm
    sites: dict[str, list[str]] = {}
    for call in region_calls(graph):
        region = call.meta["region"]
        names = [region.layer] if region.layer else [user.name for user in call.users]
        sites.setdefault(region.id, []).extend(names)
    for name, region in regions_of(graph).items():
        built: CompiledRegion | None = capture.kernels.get(name)
        yield _region(files, folder, name, dict.fromkeys(sites[name]), region, built)
        for inside, inner in built.inside.items() if built is not None else ():
            yield _region(files, folder, inside, [f"region {name}"], inner.region, inner)


def _region(
    files: _Files,
    folder: str,
    name: str,
    sites: Iterable[str],
    region: Region,
    built: CompiledRegion | None,
) -> Sequence[str]:
    """Adds a region as it was traced, or as the pass outlined it where it was not built; its row in
    the index."""
    folder = files.path(folder, name)
    graphs = [region.forward, None] if built is None else built.traced.graphs
    texts = ["" if graph is None else print_graph(graph) for graph in graphs]
    forward = files.add(folder, "forward.txt", texts[0])
    vjp = files.add(folder, "vjp.txt", texts[1]) if texts[1] else ""
    generated = {} if built is None else built.generated()
    code = [files.add(f"{folder}/generated", n, text) for n, text in generated.items()]
    return (
        f"`{name}`",
        ", ".join(f"`{site}`" for site in sites),
        _link(forward, "forward"),
        _link(vjp, "vjp") if vjp else "no gradient",
        ", ".join(map(_link, code)) or "not compiled",
    )


def _report(files: _Files, folder: str, report: Report) -> str:
    files.add(folder, "report.jsonl", report.to_json())
    return files.add(folder, "report.txt", report.table(_REPORT_WIDTH))


def _link(path: str, text: str = "") -> str:
    return f"[{text or PurePosixPath(path).name}]({path})"


def _bullets(items: Iterable[str], nothing: str) -> str:
    return "\n".join(f"- {' '.join(item.split())}" for item in items) or nothing


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = ((cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def check_folder(directory: str | Path) -> Path:
    """The folder, made if it does not exist."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise DumpError(f"{root} is a file, and a dump is a folder; choose another path")
    try:
        root.mkdir(parents=True, exist_ok=True)
        check_writable(root)
    except OSError as error:
        raise DumpError(f"{root} cannot be written: {error.strerror}; choose another") from error
    return root


def _write(root: Path, texts: Mapping[str, str]) -> None:
    old = _manifest(check_folder(root))
    for path in old | set(texts):
        refuse_links(root / path, root)
    foreign = [path for path in texts if path not in old and _in_the_way(root, path)]
    if foreign:
        raise DumpError(
            f"{root} has files that fxrl did not write, under names it needs: "
            f"{', '.join(foreign[:5])}; move them or dump into another folder"
        )
    # The list comes first, old and new: a dump that is cut short can still be cleaned up.
    _save_manifest(root, old | set(texts))
    for stale in sorted(old - set(texts)):
        _remove(root, stale)
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8", newline="\n")
    _save_manifest(root, set(texts))


def _in_the_way(root: Path, path: str) -> bool:
    """Whether the file exists, or a file stands where one of its folders must be."""
    folders = [root / parent for parent in PurePosixPath(path).parents]
    return (root / path).exists() or any(f.exists() and not f.is_dir() for f in folders)


def _manifest(root: Path) -> set[str]:
    """Paths that the last dump wrote."""
    file = root / _MANIFEST
    if not file.exists():
        return set()
    try:
        paths = json.loads(file.read_text(encoding="utf-8"))["files"]
        safe = all(not PurePosixPath(p).is_absolute() and ".." not in p.split("/") for p in paths)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(f"{file} is damaged ({error}); remove the folder and dump again") from error
    if not safe:
        raise DumpError(f"{file} lists files outside its folder; remove the folder and dump again")
    return set(paths)


def _save_manifest(root: Path, paths: set[str]) -> None:
    text = json.dumps({"files": sorted(paths)}, indent=1)
    write_text(root / _MANIFEST, text + "\n")  # whole, or the next dump would refuse the folder


def _remove(root: Path, path: str) -> None:
    """Remove a file of ours and the folders that it leaves empty."""
    (root / path).unlink(missing_ok=True)
    for folder in (root / path).parents:
        if folder == root or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()


# The UUIDs that Dynamo ends the names of compiled functions in, and addresses: both are others each
# time, and would spoil every diff.
_FRESH = re.compile(r"_[0-9a-f]{8}(?:_[0-9a-f]{4}){3}_[0-9a-f]{12}| at 0x[0-9a-f]+")
_RESUME = "__resume_at_"


class DecompileError(FxrlError):
    """Bytecode cannot be shown as source: depyf does not know it."""


def decompile(code: CodeType) -> str:
    """Python source of a code object, ending in a newline. Raises ``MissingPackageError`` without
    depyf, ``DecompileError`` if it fails on this code."""
    depyf = optional("depyf", "decompiling Dynamo's bytecode", "depyf")
    try:
        source = str(depyf.decompile(code))
    except Exception as error:  # depyf raises whatever its many bytecode handlers meet
        raise DecompileError(
            f"depyf cannot decompile {code.co_name}: {type(error).__name__}: {error}; "
            "cure: a depyf release that knows this Python version"
        ) from error
    return _FRESH.sub("", source).rstrip("\n") + "\n"


def dynamo_bytecode(function: Callable[..., Any]) -> tuple[dict[str, str], list[str]]:
    """What Dynamo made of a function that ran under ``torch.compile``: file name -> text, and why
    some of it is no source.

    One file per compiled variant of ``function`` (``loss_fn.0.py``, ...) and of each function that
    resumes after a graph break; none if Dynamo compiled nothing of it. What cannot be decompiled is
    disassembled: ``loss_fn.0.dis``.
    """
    texts: dict[str, str] = {}
    reasons: list[str] = []
    todo = [_plain(function)]
    seen: set[CodeType] = set()
    while todo:
        code, scope = todo.pop(0)
        if code in seen:
            continue
        seen.add(code)
        # Those of a step that is gone, as behind an explain(), have no code any more.
        alive = (entry for entry in cache_entries(code) if entry.code is not None)
        for index, entry in enumerate(alive):
            name = f"{code.co_name.strip('<>')}.{index}"
            try:
                texts[f"{name}.py"] = decompile(entry.code)
            except (MissingPackageError, DecompileError) as error:
                reasons.append(str(error))
                texts[f"{name}.dis"] = _FRESH.sub("", dis.Bytecode(entry.code).dis())
            resumed = (n for n in entry.code.co_names if n.startswith(_RESUME) and n in scope)
            todo += [_plain(scope[name]) for name in resumed]
    return texts, reasons


def _plain(function: Any) -> tuple[CodeType, dict[str, Any]]:
    """Code and globals of the user's function under a ``torch.compile`` wrapper and a bound method,
    and on torch 2.11 of what is made with its cells (``capture._dynamo.ends``)."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    if isinstance(function, partial):
        code, scope, *_ = function.args
        return code, scope
    plain: FunctionType = getattr(function, "__func__", function)
    return plain.__code__, plain.__globals__
