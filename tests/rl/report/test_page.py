"""``run.html``: what it shows, of whom it believes nothing, and that a browser opens it."""

import json
import re
import shutil
import subprocess
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.cli import main
from fxrl.errors import ForeignFileError, FxrlError
from fxrl.files import replacing
from fxrl.rl.report import page
from fxrl.rl.report.page import SAMPLE_BYTES, write_page

EVIL = "</script><script>document.title='taken'</script>"
EVIL += """<img src=x onerror="document.title='x'">'&"""
PHASES = {"time/generate": 0.3, "time/train": 0.2, "time/score": 0.05, "time/wake": 0.0001}


class Page(HTMLParser):
    """What a reader of the page sees: text, elements, and what would be loaded."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.loads = [], [], []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset")]
        self.words += [value for name, value in attributes if name == "aria-label"]

    def handle_data(self, data):
        self.words.append(data)


def a_run(folder, records=(), samples=(), **files):
    folder.mkdir(exist_ok=True)
    for name, lines in (("metrics", records), ("completions", samples)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    for name, table in files.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    return folder


def page_of(folder):
    return Page(write_page(folder).read_text(encoding="utf-8"))


def test_a_run_writes_its_page_at_a_checkpoint_and_at_the_end(config_file, capsys):
    """At step 3 the page of the checkpoint of step 2 is there: a running run has one."""
    reward = "import pathlib\ndef even(completions, trainer_state, **columns):\n"
    reward += "    page = pathlib.Path('out/run.html')\n"
    reward += "    if trainer_state.global_step == 3:\n"
    reward += "        pathlib.Path('seen').write_text(page.read_text())\n"
    reward += "    return [len(c) % 3 for c in completions]\n"
    functions = '["length", "page_rewards:even"]'
    (config_file.parent / "page_rewards.py").write_text(reward)
    assert main(["train", str(config_file), "run_dir=out", f"reward.functions={functions}"]) == 0
    running = Page((config_file.parent / "seen").read_text())
    page = Page((config_file.parent / "out" / "run.html").read_text())
    assert "2 of 4 steps, running, stopped or failed" in running.text
    assert "4 of 4 steps, complete" in page.text
    for words in ("reward", "KL to the reference", "entropy", "completion length", "drift"):
        assert words in page.text, words
    for words in ("seconds of a step, by part", "memory, train", "Plan and measurement"):
        assert words in page.text, words
    for words in ("Sample completions", "count to", "sampling.num_generations", "torch"):
        assert words in page.text, words
    assert page.loads == []
    capsys.readouterr()
    assert main(["report-run", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": "out/run.html"}


def test_the_rewrite_report_and_the_plan_beside_what_was_measured(tmp_path):
    records = [
        {"step": n, "reward": 0.1, "padding/micro_batches": 4, "memory/peak_bytes": 3 * 2**30}
        | {"time/train": 2.0, "time/generate": 1.0}
        for n in (1, 2, 3)
    ]
    remark = {"kind": "missed", "pass_name": "tile-tokens", "site": "0:mm", "source": "a.py:3"}
    remark |= {"reason": "nothing is wider", "cure": "do this", "saved_bytes": 2**20}
    notes = {"plan": {"peak_gpu_bytes": 4 * 2**30, "step_seconds": 0.4}, "report": [remark]}
    notes |= {"memory": {"generate": 5 * 2**30, "train": 3 * 2**30}}
    text = page_of(a_run(tmp_path, records, run=notes)).text
    assert "memory, generate - 5.00 GiB" in text
    assert "memory, train 4.00 GiB 3.00 GiB" in text
    assert "memory of a step, most [GiB]" in text
    assert "training on a micro-batch, median 0.4 s 0.5 s" in text
    for words in ("missed", "tile-tokens", "nothing is wider", "cure: do this", "1 MiB", "a.py:3"):
        assert words in text
    text = page_of(a_run(tmp_path, records, run=notes | {"plan": {}})).text
    assert "measured memory, generate 5.00 GiB memory, train 3.00 GiB" in text
    assert "planned measured" not in text, "no column of dashes"


def test_a_bar_that_is_cut_says_how_high_it_is(tmp_path):
    """The first step compiles for a minute; the others must still be seen, and it must not lie."""
    records = [{"step": n, **PHASES, "step_time": 0.55} for n in range(1, 401)]
    records[0] |= {"time/train": 80.0}
    text = page_of(a_run(tmp_path, records)).text
    assert "Higher than the picture, marked by a triangle: step 1 (80.4 s)." in text
    assert "train, median 0.2 s" in text
    assert "wake" not in text, "a part that is never a percent of the step"
    assert "400 of ? steps" in text
    below = [{"step": n, "time/train": -1.0} for n in range(4)]
    assert "seconds of a step, by part" in page_of(a_run(tmp_path, below)).text
    few = page_of(a_run(tmp_path, records[:2])).text
    assert "Higher than" not in few


def test_completions_are_text(tmp_path):
    sample = {"step": 1, "question": EVIL, "completion": EVIL, "reward": EVIL, f"rewards/{EVIL}": 1}
    turns = [{"role": EVIL, "content": EVIL, "tool_calls": [EVIL]}, EVIL, {"role": 1}] * 30
    record = {"step": 1, "reward": 0.5, f"rewards/{EVIL}/mean": 1.0, "rewards/b/mean": 0.1}
    remark = {"kind": "applied", "reason": EVIL, "site": EVIL, "saved_bytes": EVIL}
    notes = {"versions": {EVIL: EVIL}, "outlook": [EVIL], "report": [remark]}
    config = {"steps": EVIL, "model": {"id": EVIL}, EVIL: [EVIL]}
    samples = [sample, sample | {"turns": turns}]
    page = page_of(a_run(tmp_path / "run", [record], samples, run=notes, config=config))
    assert page.elements.count("script") == 1
    assert "img" not in page.elements
    assert page.text.count("document.title='taken'") >= 7 + 3 * 14
    assert "(50 more turns)" in page.text


def test_a_long_run_stays_a_small_file(tmp_path):
    records = [
        {"step": n, "reward": n / 7, "kl": n % 11, **PHASES, "eval/accuracy": 0.5}
        | {f"rewards/r{k}/mean": (n * k) % 13 for k in range(8)}
        for n in range(1, 3001)
    ]
    samples = [{"step": n, "completion": "<" * 3000, "reward": 1.0} for n in range(1, 3001)]
    path = write_page(a_run(tmp_path, records, samples))
    page = Page(path.read_text())
    assert path.stat().st_size < 1_000_000
    assert "step 1: rewards" in page.text
    assert "step 3000: rewards" in page.text
    assert "(1000 more characters)" in page.text
    assert "Each point is the mean of 13 steps." in page.text
    assert page.text.count("more characters") * 2000 * len("&lt;") < 2 * SAMPLE_BYTES


numbers = st.integers(-(10**400), 10**400) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=9),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=5), some),
    max_leaves=6,
)
keys = st.sampled_from(["step", "reward", "time/train", "rewards/a/mean", "completion", "question"])
note_keys = st.sampled_from(["report", "plan", "versions", "outlook", "memory", "model"])
tables = st.dictionaries(keys, values) | values
bad_lines = st.lists(tables.map(json.dumps) | st.text(max_size=9), max_size=4).map("\n".join)
bad_files = (st.dictionaries(note_keys, values) | values).map(json.dumps) | st.text(max_size=9)


@settings(max_examples=60)
@given(metrics=bad_lines, completions=bad_lines, config=bad_files, notes=bad_files)
def test_a_strangers_folder_gives_a_page_or_an_error_of_fxrl(
    tmp_path_factory, metrics, completions, config, notes
):
    folder = tmp_path_factory.getbasetemp() / "strange"
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("metrics.jsonl", '{"step": 1, "reward": 1.0}\n' + metrics),
        ("completions.jsonl", completions),
        ("config.json", config),
        ("run.json", notes),
    ):
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert Page(write_page(folder).read_text(encoding="utf-8")).elements.count("script") == 1


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert main(["report-run", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is no folder" in capsys.readouterr().err
    with pytest.raises(FxrlError, match="holds no metrics"):
        write_page(tmp_path)


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = a_run(tmp_path / "run", [{"step": 1}])
    (folder / "run.html").symlink_to(outside)
    with pytest.raises(ForeignFileError, match=r"run\.html is a link"):
        write_page(folder)
    assert outside.read_text() == "mine"
    (folder / "run.html").unlink()
    outside.write_text('{"secret": "of the reader"}')
    (folder / "config.json").symlink_to(outside)
    assert "of the reader" not in page_of(folder).text


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def test_a_browser_opens_it(tmp_path):
    """The page's own script runs under its policy and reads the charts; no other script does."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    records = [{"step": n, "reward": n / 4, **PHASES} for n in range(1, 5)]
    sample = {"step": 4, "question": EVIL, "completion": EVIL, "reward": 1.0}
    path = write_page(a_run(tmp_path / "run", records, [sample], config={"model": {"id": EVIL}}))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("&lt;/script&gt;")
    page = Page(done.stdout)
    assert "step 4: reward ± spread in a group 1" in page.text
    assert page.elements.count("script") == 1
    assert page.elements.count("figure") == 2


def test_report_run_does_not_disturb_the_run_that_writes_its_page(tmp_path, capsys):
    folder = a_run(tmp_path / "run", [{"step": 1}])
    with replacing(folder / "run.html") as page:
        assert main(["report-run", str(folder)]) == 0
        page.write(b"by the run")
    assert (folder / "run.html").read_bytes() == b"by the run"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def peak_of_page(folder):
    tracemalloc.start()
    write_page(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_page_takes_no_more_memory_than_it_shows(tmp_path):
    """It is written at every checkpoint; a long run's completions do not fit into memory."""
    samples = [{"step": n // 4, "completion": "x" * 20_000} for n in range(1000)]
    folder = a_run(tmp_path / "run", [{"step": 249}], samples)
    assert peak_of_page(folder) < (folder / "completions.jsonl").stat().st_size / 4


def test_numbers_take_about_as_much_memory_as_their_text(tmp_path):
    """Of a run of many steps; and of a stranger's, whose steps all measure something else."""
    alike = [{"step": n} | {f"m{k}": n + k / 7 for k in range(60)} for n in range(600)]
    others = [{"step": n} | {f"{n} and {k}": 0.1 for k in range(20)} for n in range(600)]
    for records, times in ((alike, 1), (others, 32)):
        folder = a_run(tmp_path / "run", records)
        assert peak_of_page(folder) < times * (folder / "metrics.jsonl").stat().st_size


def test_lines_of_one_colour_are_told_apart_in_the_legend():
    """As the chart draws them: the thin one of a step beside the mean of several, a dashed one."""
    css = (Path(page.__file__).parent / "page.css").read_text()
    drawn = set(re.findall(r"\.line\.(\w+)", css))
    assert drawn >= {"thin", "dashed"}
    assert drawn <= set(re.findall(r"\.legend i\.(\w+)", css))
