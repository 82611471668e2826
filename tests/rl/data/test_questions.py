"""Sources, the held-out split, the order of questions."""

import gzip
import json
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxrl.errors import ConfigError
from fxrl.models import tiny_tokenizer
from fxrl.rl.config.load import load_config
from fxrl.rl.config.tables import DataConfig, EvalConfig
from fxrl.rl.data.questions import (
    PromptStream,
    majority_baseline,
    read_file,
    read_source,
    split_rows,
)
from fxrl.rl.errors import DataError
from fxrl.rl.loop.data import read_questions


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_jsonl_keeps_all_columns_and_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "x": [1]}\n\n{"prompt": "b", "x": null}\n')
    rows = read_source(DataConfig(path=str(path))).rows
    assert rows == ({"prompt": "a", "x": [1]}, {"prompt": "b", "x": None})


def nested(depth):
    return '{"prompt": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops}", r"not JSON \(.*\); write one object a line, \{\.\.\.\}, or a \.csv file"),
        ("oops", r"not JSON \(Expecting value: column 1 \(char 0\)\)"),
        ("[1]", "list where an object must be; write each object of the list on a line of its own"),
        ("[", r"not JSON \(.*\); write each object of the list on a line of its own"),
        ('{"prompt": "half of \\ud83d"}', r"\\ud83d alone is half a character"),
        ('{"\\udc00": "in a name"}', r"\\udc00 alone is half a character"),
        ('{"prompt": ' + "9" * 5000 + "}", r"not JSON \(Exceeds the limit \(4300 digits\)"),
        (nested(200), "more than 100 tables and lists in one another"),
        (nested(50_000), "more than 100 tables and lists in one another"),
    ],
)
def test_jsonl_names_the_bad_line(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n{{"prompt": "b"}}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {words}"):
        read_file(tmp_path / "a.jsonl")


def test_jsonl_may_hold_any_character_a_bom_and_windows_line_ends(tmp_path):
    texts = ["a\u2028b", "c\u0085d", "e\x0bf\x0cg\x1ch", "\U0001f600"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    lines = [line.replace("\\u000b", "\x7f") for line in lines] + ['{"prompt": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    found = [row["prompt"] for row in read_source(DataConfig(path=str(tmp_path / "a.jsonl"))).rows]
    assert found[:2] == texts[:2]
    assert found[3:] == ["\U0001f600"] * 2


@pytest.mark.parametrize("name", ["a.csv", "a.CSV"])
def test_csv_has_texts(name, tmp_path):
    path = tmp_path / name
    path.write_bytes('\ufeffprompt,answer\r\n"a ""b"",\nc",007\r\n\r\nd,\r\n'.encode())
    source = read_source(DataConfig(path=str(path)))
    assert source.rows == ({"prompt": 'a "b",\nc', "answer": "007"}, {"prompt": "d", "answer": ""})
    assert source.places == (f"{path}:3", f"{path}:5")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt,answer\na,b\nc\n", r"a\.csv:3: not CSV: 1 cells under 2 columns"),
        ('prompt\n"a" b\n', r"a\.csv:2: not CSV: ',' expected after '\"'"),
        ("prompt;answer\na;b\n", r"a\.csv:1: not CSV: 'prompt;answer' is one column; separate by"),
        ("prompt\tanswer\na\tb\n", r"separate by commas, not '\\t'"),
        ("", "no rows"),
    ],
)
def test_csv_names_the_bad_line(tmp_path, text, words):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        read_source(DataConfig(path=str(tmp_path / "a.csv")))


def test_a_missing_prompt_column_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", {"question": "a"})
    with pytest.raises(DataError, match=r"a.jsonl:1 has no column 'prompt'"):
        read_source(DataConfig(path=path))


def test_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        read_source(DataConfig(path=str(tmp_path / "a.jsonl")))


def test_reasoning_gym_scores_its_own_answers():
    pytest.importorskip("reasoning_gym")
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = read_source(DataConfig(reasoning_gym="chain_sum", params=params, size=5))
    assert source.prompt == "question"
    assert source.score is not None
    for row in source.rows:
        assert source.score(row["answer"], row) == 1.0
        assert source.score("no number", row) < 0.5


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [("chain_sun", {}, "did you mean 'chain_sum'?"), ("gcd", {"min_numbrs": 2}, "refuses them")],
)
def test_reasoning_gym_mistakes(name, params, words):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=words.replace("?", "\\?")):
        read_source(DataConfig(reasoning_gym=name, params=params, size=2))


GYM = """
from types import SimpleNamespace
factory = SimpleNamespace(DATASETS=["sums"])
def create_dataset(name, size, seed):
    return [{"question": f"{n} + 1 {seed is 0}"} for n in range(size)]
"""


def test_what_python_says_of_reasoning_gyms_source_is_not_the_users(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(read_source(DataConfig(reasoning_gym="sums", size=2)).rows) == 2
    del sys.modules["reasoning_gym"]
    assert not [str(one.message) for one in told]


def test_a_dataset_folder_of_hugging_face(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "train.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    rows = read_source(DataConfig(dataset=str(tmp_path), size=1)).rows
    assert rows == ({"prompt": "a", "answer": 1},)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=60),
    st.integers(0, 4),
    st.integers(0, 2),
    st.integers(0, 5),
)
def test_no_text_is_in_two_parts_of_the_split(questions, num_held_out, num_shots, seed):
    rows = [{"q": q, "id": i} for i, q in enumerate(questions)]
    options = {"num_held_out": num_held_out, "num_shots": num_shots, "seed": seed}
    if len(set(questions)) <= num_held_out + num_shots:
        with pytest.raises(DataError, match="too few"):
            split_rows(rows, lambda row: str(row["q"]), **options)
        return
    split = split_rows(rows, lambda row: str(row["q"]), **options)
    texts = [{row["q"] for row in part} for part in (split.train, split.held_out, split.shots)]
    assert sum(map(len, texts)) == len(set(questions))
    assert len(texts[1]) == len(split.held_out) == num_held_out
    assert len(texts[2]) == len(split.shots) == num_shots
    assert split == split_rows(rows, lambda row: str(row["q"]), **options)


@given(st.integers(1, 9), st.lists(st.integers(1, 7), max_size=6), st.integers(0, 9))
def test_the_stream_covers_each_epoch_once_and_resumes_from_its_position(num, sizes, seed):
    stream = PromptStream(num, seed)
    taken = [i for size in sizes for i in stream.take(size)]
    assert stream.position == len(taken) == sum(sizes)
    for start in range(0, len(taken) - num + 1, num):
        assert sorted(taken[start : start + num]) == list(range(num))
    resumed = PromptStream(num, seed)
    resumed.position = sum(sizes)
    assert resumed.take(2 * num) == stream.take(2 * num)


def test_seeds_give_other_orders_and_shuffle_can_be_off():
    assert PromptStream(50, 0).take(50) != PromptStream(50, 1).take(50)
    assert PromptStream(3, 0, shuffle=False).take(5) == [0, 1, 2, 0, 1]


def test_majority_baseline():
    rows = [{"answer": a} for a in (1, 1, 2, 3)]
    assert majority_baseline(rows, "answer") == 0.5
    assert majority_baseline(rows, "label") is None


def test_held_out_questions_of_their_own_are_not_trained_on(config_file):
    lines = ['{"prompt": "count to 3", "answer": "0"}', '{"prompt": "new", "answer": "1"}']
    Path("test.jsonl").write_text("\n".join([*lines, '{"prompt": "more"}', ""]))
    said = []

    def read(*overrides):
        config = load_config(config_file, ["eval.path=test.jsonl", *overrides])
        return read_questions(config, tiny_tokenizer(), said.append)

    found = read()
    assert [row["prompt"] for row in found.split.held_out] == ["count to 3", "new", "more"]
    assert [row["prompt"] for row in found.split.train] == [
        f"count to {i}" for i in range(8) if i != 3
    ]
    assert said == ["data: 1 of 8 rows ask what [eval] or an example asks, and are left out"]
    assert [row["prompt"] for row in read("eval.size=1").split.held_out] == ["count to 3"]
    plain = read_questions(load_config(config_file), tiny_tokenizer(), said.append)
    assert found.fingerprints.keys() - plain.fingerprints.keys() == {"eval data"}
    Path("test.jsonl").write_text('\n{"prompt": "%s"}' % ("x" * 60))
    with pytest.raises(DataError, match=r"test\.jsonl:2: .* outside 1\.\.40"):
        read("data.max_prompt_tokens=40")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["eval.path=no.jsonl"], "eval.path='no.jsonl' is not a file"),
        (["eval.path=questions.jsonl", "eval.dataset=a/b"], "give one of them"),
        (["eval.split=test"], "give eval.dataset or data.dataset"),
        (
            ["eval.dataset=a/b", "data.path=none", "data.reasoning_gym=chain_sum"],
            "makes the held-out questions itself",
        ),
    ],
)
def test_sources_of_held_out_questions_that_do_not_go(config_file, options, words):
    with pytest.raises(ConfigError, match=words):
        load_config(config_file, options)


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({"split": "test"}, ("a/b", "main", "test")),
        ({"subset": "hard"}, ("a/b", "hard", "test")),
        ({"dataset": "c/d"}, ("c/d", None, "test")),
        ({"dataset": "c/d", "subset": "x", "split": "dev"}, ("c/d", "x", "dev")),
    ],
)
def test_another_split_or_another_dataset(options, source):
    data = DataConfig(dataset="a/b", subset="main", size=5)
    found = EvalConfig(size=3, **options).source(data)
    assert (found.dataset, found.subset, found.split) == source
    assert found.size == 3
    assert EvalConfig(size=3).source(data) is None


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        (
            gzip.compress(b"{}", mtime=0),
            r"compressed by gzip: unpack it, or name a folder .*data.dataset",
        ),
        (b"PAR1\xe0", "it is Parquet: write it as JSONL, or name a folder"),
        (b"PK\x03\x04\xff", "a zip archive or a spreadsheet"),
        ('{"prompt": "x"}'.encode("utf-16"), "save it as UTF-8"),
        (b'{"prompt": "\xe9"}', "save it as UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_known_by_its_first_bytes(data, cure, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_bytes(data)
    with pytest.raises(DataError, match=rf"q.jsonl: cannot be read as UTF-8 text \(.*\); .*{cure}"):
        read_file(file)
