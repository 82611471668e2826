"""README.md and the guides in examples/: tables up to date, commands and links, an example that
runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from bench import readme
from fxrl.cli import parse

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("examples/*.md")), ROOT / "bench/RESULTS.md"]


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands() -> list[list[str]]:
    found = [block for page in PAGES for block in blocks("sh", page)]
    lines = [line.split("#")[0] for block in found for line in block.splitlines()]
    parts = [part for line in lines for part in line.split("&&")]
    return [shlex.split(part) for part in parts if part.strip()]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tables_are_up_to_date(capsys):
    assert readme.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("words", [c for c in commands() if c[0] == "fxrl"], ids=" ".join)
def test_fxrl_commands_parse_and_their_files_exist(words):
    args = parse(words[1:])
    if args.handler == "train" and args.config.startswith("examples/"):
        assert (ROOT / args.config).is_file()


def test_the_two_first_commands():
    job, tests = blocks("sh")[:2]
    assert len(job.splitlines()) == len(tests.splitlines()) == 1
    assert "fxrl train examples/smollm2.toml" in job
    assert tests.rstrip().endswith("pytest")


def test_files_it_names_exist():
    named = re.findall(
        r"`((?:fxrl|passes|tests|bench|examples|\.ci)/[\w./-]*)`", README.read_text()
    )
    assert len(named) > 10
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), anchor


def test_the_vllm_example_is_python():
    (example,) = blocks("python", ROOT / "examples/rollouts.md")
    compile(example, "rollouts.md", "exec")  # tests/engines/vllm/test_engine.py runs its calls


def test_example_runs():
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    scope = {}
    torch.manual_seed(0)
    exec(compile(example, "README.md", "exec"), scope)
    assert torch.isfinite(scope["loss"])
    applied = scope["step"].report.of_kind("applied")
    (head,) = (remark for remark in applied if remark.pass_name == "fuse-linear-logprob")
    assert head.saved_bytes > 0
    assert "logits [260 x 320]" in head.reason  # sizes as numbers: batches of 4 x 65 ids
    eager = scope["loss_fn"]
    torch.testing.assert_close(scope["step"](scope["batch"]), eager(scope["model"], scope["batch"]))


def write(folder, name="a.json", **changes):
    record = {
        "title": "Head",
        "command": "python -m bench.head",
        "machine": "CPU",
        "versions": {"torch": "2.13.0", "obscure": "1"},
        "date": "2026-01-02",
        "columns": ["variant", "peak_mib", "error"],
        "rows": [["eager", 1950.0, None], ["fxrl|x", 1.0 / 3, None]],
        "notes": ["N=2048"],
    }
    (folder / name).write_text(json.dumps(record | changes))


def test_results_table(tmp_path):
    write(tmp_path)
    assert readme.results(tmp_path) == (
        "### Head\n\n"
        "| variant | peak mib |\n| --- | --- |\n| eager | 1950 |\n| fxrl\\|x | 0.3333 |\n\n"
        "CPU, torch 2.13.0, 2026-01-02; `python -m bench.head`\n\n- N=2048"
    )
    write(tmp_path, readme={"columns": ["variant"]}, notes=[])
    assert "peak" not in readme.results(tmp_path)
    write(tmp_path, readme={"where": {"variant": ["eager"]}})
    assert "0.3333" not in readme.results(tmp_path)
    assert "1950" in readme.results(tmp_path)
    write(tmp_path, readme=False)
    assert readme.results(tmp_path) == "Nothing is measured yet."


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": [["eager"]]}, "1 of 3 columns"),
        ({"readme": {"columns": ["peak"]}}, "readme.columns"),
        ({"readme": {"where": {"peak": [1]}}}, "readme.where"),
    ],
)
def test_bad_results(tmp_path, changes, says):
    write(tmp_path, **changes)
    with pytest.raises(readme.ReadmeError, match=says):
        readme.results(tmp_path)


def test_missing_key(tmp_path):
    (tmp_path / "b.json").write_text('{"title": "x"}')
    with pytest.raises(readme.ReadmeError, match=r"b\.json lacks command, machine"):
        readme.results(tmp_path)


def test_fill_needs_both_marks():
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb"
    made = readme.fill(text, {"x": lambda: "new"})
    assert made == text.replace("old", "new")
    assert readme.fill(made, {"x": lambda: "new"}) == made
    with pytest.raises(readme.ReadmeError, match="begin y"):
        readme.fill(text, {"y": lambda: ""})
