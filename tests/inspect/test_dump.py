"""A dump: what a person finds in it, and that it touches nothing of others."""

import json
import re
import resource
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from expecttest import assert_expected_inline

from fxrl.compile.bodies.variants import build_region
from fxrl.errors import ForeignFileError, MissingPackageError
from fxrl.inspect.dump import (
    DecompileError,
    DumpError,
    decompile,
    dynamo_bytecode,
    render,
    write_dump,
)
from fxrl.ir.bodies import clone
from fxrl.ir.capture_record import Capture, GraphBreak
from fxrl.ir.pipeline import Pipeline
from fxrl.ir.plan import Plan
from fxrl.ir.region import region_calls, regions_of
from fxrl.ir.remark import Remark, Report
from fxrl.passes import ChunkVocabRegion, FuseLinearLogprob
from tests.graphs import lowered_graph

APPLIED = Report.of(
    [Remark("applied", "fuse-linear-logprob", "gather", "loss.py:7", "no logits", "", 3 * 2**20)]
)
MISSED = Report.of(
    [Remark("missed", "chunk-vocab-region", "mm_1", "loss.py:9", "a | b escapes", "return less")]
)


def loss_fn(model, batch):
    return model(batch["hidden"]).abs().sum(-1).mean()


@cache
def captured():
    """A loss head that runs in tiles, and the one region that it became."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 32, bias=False))
    graph = lowered_graph(model, loss_fn, {"hidden": torch.randn(3, 5, 4)})
    pipeline = Pipeline((FuseLinearLogprob(), ChunkVocabRegion()))
    rewritten = pipeline.run(clone(graph), Plan())
    ((own, region),) = regions_of(rewritten.gm).items()
    kernels = {own: build_region(region, None)}
    for call in region_calls(rewritten.gm):
        call.update_arg(1, kernels[own].key)
    breaks = [GraphBreak("print in\nthe loss", "loss.py:3")]
    made = {"rewritten": rewritten, "kernels": kernels, "running": True, "graph_breaks": breaks}
    return Capture(0, graph, graph, pipeline, **made)


def capture(index=0, **changes):
    return replace(captured(), index=index, **changes)


def named(text):
    """A text in which the region has a short name, and this file no folder."""
    (own,) = captured().kernels
    return re.sub(r"\[\S*test_dump.py:\d+\]", "[test_dump.py]", text.replace(own, "3f9a"))


def tree(root):
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_text() for path in files}


def test_files(tmp_path):
    start = write_dump(tmp_path / "new" / "dump", [capture()], APPLIED + MISSED)
    assert start == tmp_path / "new" / "dump" / "index.md"
    files = tree(start.parent)
    assert_expected_inline(
        named("\n".join(sorted(files))),
        """\
capture_0/00_dynamo.py
capture_0/01_fuse-linear-logprob.after.txt
capture_0/01_fuse-linear-logprob.before.txt
capture_0/01_fuse-linear-logprob.diff
capture_0/02_chunk-vocab-region.after.txt
capture_0/02_chunk-vocab-region.before.txt
capture_0/02_chunk-vocab-region.diff
capture_0/aot/forward.py
capture_0/inputs.txt
capture_0/regions/3f9a/forward.txt
capture_0/regions/3f9a/vjp.txt
capture_0/report.jsonl
capture_0/report.txt
fxrl-dump.json
index.md
report.jsonl
report.txt""",
    )
    assert json.loads(files["report.jsonl"].splitlines()[1])["cure"] == "return less"
    assert "cure: return less" in files["report.txt"]


def test_diff():
    files = render([capture()], Report(), bytecode={})
    assert_expected_inline(
        named(files["capture_0/02_chunk-vocab-region.diff"]),
        """\
--- 02_chunk-vocab-region.before.txt
+++ 02_chunk-vocab-region.after.txt
@@ -1,10 +1,8 @@
 %model.0.weight = input : f32[32, 4]
 %b_hidden = input : f32[3, 5, 4]
-%t = aten.t.default(%model.0.weight) : f32[4, 32]
 %view = aten.view.default(%b_hidden, [15, 4]) : f32[15, 4]
-%mm = aten.mm.default(%view, %t) : f32[15, 32]
-%_unsafe_view = aten._unsafe_view.default(%mm, [3, 5, 32]) : f32[3, 5, 32]
-%abs_1 = aten.abs.default(%_unsafe_view) : f32[3, 5, 32]
-%sum_1 = aten.sum.dim_IntList(%abs_1, [-1]) : f32[3, 5]
-%mean = aten.mean.default(%sum_1) : f32[]
+%region_default = fxrl.region.default([%view, %model.0.weight], '3f9a', 131072, []) : (f32[15])
+%getitem = operator.getitem(%region_default, 0) : f32[15]
+%reshape_default = aten.reshape.default(%getitem, [3, 5]) : f32[3, 5]
+%mean = aten.mean.default(%reshape_default) : f32[]
 return %mean
""",
    )
    assert files["capture_0/01_fuse-linear-logprob.diff"] == ""


def test_index():
    report = APPLIED + MISSED
    files = render([capture()], report, bytecode={"f.0.py": "x"}, notes=["no depyf; cure: it"])
    assert_expected_inline(
        named(files["index.md"]),
        """\
# What fxrl did

Captures: 1. Rewrites applied: 1, missed: 1. Graph breaks: 1. Predicted to save 3 MiB at the peak.

All remarks: [report.txt](report.txt), for tools [report.jsonl](report.jsonl).

## How to read

1. The remarks of a capture say of every site what was done, or why nothing was and the cure.
2. Each pass of a capture has its graph before and after, and the difference: start with the diff.
   One value stands on one line, `%name = operator(operands) : dtype[shape]`; `s0`, `s1`, ... are
   dynamic sizes, `grad` marks an input that requires a gradient.
3. A region is a part of the graph that was outlined, with its own backward: `forward.txt` is what
   runs, `vjp.txt` computes its gradients, `generated/` is the code that was compiled from both.
4. `aot/` is what remains around the regions; `00_dynamo.py` is the program before any pass.

## Capture 0

The program as Dynamo delivered it: [00_dynamo.py](capture_0/00_dynamo.py); its remarks: [report.txt](capture_0/report.txt).

### Inputs

```
%model.0.weight = input : f32[32, 4]
%b_hidden = input : f32[3, 5, 4]
```

### Passes

| pass | applied | missed | saves | diff | graphs |
| --- | --- | --- | --- | --- | --- |
| fuse-linear-logprob | 0 | 1 | 0 B | no change | [before](capture_0/01_fuse-linear-logprob.before.txt), [after](capture_0/01_fuse-linear-logprob.after.txt) |
| chunk-vocab-region | 1 | 0 | 0 B | [diff](capture_0/02_chunk-vocab-region.diff) | [before](capture_0/02_chunk-vocab-region.before.txt), [after](capture_0/02_chunk-vocab-region.after.txt) |

### Remarks

- missed: fuse-linear-logprob @ 0:0/mm [test_dump.py]: aten.abs.default over the vocabulary is no part of a log-softmax
- applied: chunk-vocab-region @ 0:0/mm [test_dump.py]: logits [15 x 32] live in tiles of 131072 rows

### Graph breaks

- loss.py:3: print in the loss

### Regions

| region | sites | forward | backward | code |
| --- | --- | --- | --- | --- |
| `3f9a` | `getitem` | [forward](capture_0/regions/3f9a/forward.txt) | [vjp](capture_0/regions/3f9a/vjp.txt) | not compiled |

### Around the regions

- [forward.py](capture_0/aot/forward.py)

## Dynamo's bytecode

- [f.0.py](bytecode/f.0.py)
- no depyf; cure: it
""",  # noqa: E501
    )


def test_every_link_leads_to_a_file_and_every_file_has_a_link():
    captures = [capture(0), capture(1, graph_breaks=[])]
    files = render(captures, APPLIED, bytecode={"loss.0.py": "x"})
    links = set(re.findall(r"\]\(([^)]+)\)", files["index.md"]))
    assert links <= files.keys()
    unlinked = {path for path in files.keys() - links if not path.endswith("report.jsonl")}
    unlinked -= {"index.md", "capture_0/inputs.txt", "capture_1/inputs.txt"}  # shown in the page
    assert unlinked == {f"capture_{i}/01_fuse-linear-logprob.diff" for i in (0, 1)}  # empty


def test_nothing_captured(tmp_path):
    page = write_dump(tmp_path, [], Report()).read_text()
    assert "call the step on a batch first" in page


def test_a_graph_that_could_not_be_lowered():
    empty = torch.fx.symbolic_trace(lambda: 1)
    page = render([Capture(0, empty)], Report(), bytecode={})["index.md"]
    assert "### Inputs\n\nnone" in page
    assert "### Passes\n\nnone ran" in page
    assert "none: one graph holds it all" in page


def test_twice_is_once(tmp_path):
    write_dump(tmp_path, [capture()], APPLIED)
    first = tree(tmp_path)
    write_dump(tmp_path, [capture()], APPLIED)
    assert tree(tmp_path) == first


def test_a_second_dump_removes_only_its_own(tmp_path):
    write_dump(tmp_path, [capture(0), capture(1)], APPLIED)
    notes = tmp_path / "capture_1" / "regions" / "my notes.txt"
    notes.write_text("mine")
    write_dump(tmp_path, [capture(0)], APPLIED)
    assert notes.read_text() == "mine"
    assert [p for p in tree(tmp_path) if "capture_1" in p] == ["capture_1/regions/my notes.txt"]
    assert not (tmp_path / "capture_1" / "aot").exists()


def test_a_foreign_file_is_never_overwritten(tmp_path):
    (tmp_path / "index.md").write_text("mine")
    with pytest.raises(DumpError, match=r"index\.md; move them"):
        write_dump(tmp_path, [capture()], APPLIED)
    assert tree(tmp_path) == {"index.md": "mine"}


@pytest.mark.parametrize("name", ["capture_0", "capture_0/regions"])
def test_a_foreign_file_in_place_of_a_folder(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(DumpError, match="did not write"):
        write_dump(tmp_path, [capture()], APPLIED)
    assert tree(tmp_path) == {name: "mine"}


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "dump").write_text("mine")
    with pytest.raises(DumpError, match="is a file"):
        write_dump(tmp_path / "dump", [], Report())


def test_a_disk_that_takes_no_more(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(DumpError, match=r"/dump could not be written: File too large; a part"):
            write_dump(tmp_path / "dump", [capture()], APPLIED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert write_dump(tmp_path / "dump", [capture()], APPLIED).is_file(), "it is replaced"


def test_links_in_a_strangers_folder_are_not_followed(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "dump"
    outside.mkdir()
    root.mkdir()
    (outside / "precious").write_text("mine")
    (root / "a").symlink_to(outside)
    (root / "index.md").symlink_to(outside / "precious")
    for listed in ("a/precious", "index.md"):
        (root / "fxrl-dump.json").write_text(json.dumps({"files": [listed]}))
        with pytest.raises(ForeignFileError, match="is a link to"):
            write_dump(root, [capture()], APPLIED)
    assert tree(outside) == {"precious": "mine"}


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', '{"files": [3]}', '{"nothing": 1}'])
def test_a_damaged_list_of_files(tmp_path, text):
    (tmp_path / "fxrl-dump.json").write_text(text)
    with pytest.raises(DumpError, match="is damaged"):
        write_dump(tmp_path, [], Report())


@pytest.mark.parametrize("path", ["../precious", "/etc/precious", "a/../../precious"])
def test_a_list_that_points_outside_removes_nothing(tmp_path, path):
    root = tmp_path / "dump"
    root.mkdir()
    (tmp_path / "precious").write_text("mine")
    (root / "fxrl-dump.json").write_text(json.dumps({"files": [path]}))
    with pytest.raises(DumpError, match="outside its folder"):
        write_dump(root, [], Report())
    assert (tmp_path / "precious").read_text() == "mine"


def test_names_stay_inside_and_apart():
    bytecode = {"../../evil.py": "1", "a/b.py": "2", "a_b.py": "3", "A_B.py": "4", "..": "5"}
    files = render([capture()], Report(), bytecode=bytecode)
    assert not [path for path in files if ".." in path.split("/")]
    made = [text for path, text in files.items() if path.startswith("bytecode/")]
    assert sorted(made) == ["1\n", "2\n", "3\n", "4\n", "5\n"]
    assert len({path.lower() for path in files}) == len(files)


def broken(batch):
    doubled = batch["x"] * 2
    print(end="")  # a graph break
    return (doubled + batch["y"]).sum()


@pytest.fixture(scope="module")
def compiled():
    function = torch.compile(broken, backend="eager")
    function({"x": torch.ones(2), "y": torch.ones(2)})
    return function


depyf_reads = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="depyf 0.20 knows the bytecode of Python up to 3.11"
)


@pytest.mark.parametrize("kind", [pytest.param("py", marks=depyf_reads), "dis"])
def test_dynamo_bytecode(compiled, tmp_path, monkeypatch, kind):
    if kind == "py":
        pytest.importorskip("depyf")
    else:
        monkeypatch.setitem(sys.modules, "depyf", None)
    texts, reasons = dynamo_bytecode(compiled)
    first, second = texts
    assert first == f"broken.0.{kind}"
    assert second.startswith("torch_dynamo_resume_in_broken_at_")
    assert "__resume_at_" in texts[first]
    fresh = re.search(r"[0-9a-f]{8}_[0-9a-f]{4}_|0x[0-9a-f]{6}", "".join(texts.values()))
    assert not fresh, "a UUID or an address spoils diffs"
    assert bool(reasons) == (kind == "dis")
    page = write_dump(tmp_path, [], Report(), functions=[compiled]).read_text()
    assert f"(bytecode/broken.0.{kind})" in page
    assert (tmp_path / "bytecode" / second).read_text() == texts[second]


@depyf_reads
def test_decompile_is_runnable_source():
    pytest.importorskip("depyf")
    scope: dict = {}
    exec(decompile((lambda x: x * 2 + 1).__code__).replace("<lambda>", "f"), scope)
    made = next(value for name, value in scope.items() if not name.startswith("__"))
    assert made(3) == 7


def test_without_depyf_the_index_says_so(compiled, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "depyf", None)
    with pytest.raises(MissingPackageError, match="pip install depyf brings it"):
        decompile(broken.__code__)
    page = write_dump(tmp_path, [], Report(), functions=[compiled, compiled]).read_text()
    assert page.count("pip install depyf brings it") == 1


def test_what_depyf_cannot_read_is_named(monkeypatch):
    depyf = pytest.importorskip("depyf")

    def fail(code):
        raise NotImplementedError("CALL_X")

    monkeypatch.setattr(depyf, "decompile", fail)
    with pytest.raises(
        DecompileError, match="cannot decompile broken: NotImplementedError: CALL_X"
    ):
        decompile(broken.__code__)
