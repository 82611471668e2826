"""Configurations and data files that are nearly right: what is wrong is told, or they work."""

import json
import random

import pytest

from fxrl.errors import FxrlError
from fxrl.models import tiny_tokenizer
from fxrl.rl.config.load import load_config
from fxrl.rl.data.questions import read_source
from fxrl.rl.errors import BadConfigError
from fxrl.rl.loop.data import read_questions

LONG = "9" * 5000
VALUES = [
    *("0", "-1", "1", "1e308", "-0.0", "nan", "-inf", str(2**63 - 1), str(2**63), LONG, f"-{LONG}"),
    *(
        "true",
        '""',
        '"x"',
        '"none"',
        '"\\u0000"',
        "'''\n'''",
        '"' + "x" * 5000 + '"',
        '"~nobody/x"',
    ),
    *("[]", "[[]]", "{}", '[{role = "user", content = "x"}]', '["x", 1]', "{a = {a = 1}}"),
    *("[" * 150 + "]" * 150, "[" * 5000 + "]" * 5000, ".".join("a" * 150) + " = 1"),
    *("1979-05-27T07:32:00Z", "07:32:00", "0x_", "\ud7ff", "\x00", "=", "["),
    *('"length.py:x"', '"a:b:c"', '":"', '"os:sep"', '"json:dumps"', '"../x.py:f"'),
]
KEYS = ["", "a", '""', "a.b", "steps", "model", "model.id", '"\\u0000"', "x" * 300, "optim.lr"]


def mutated(rng, text):
    """One or two lines of a TOML text with something else in them."""
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(lines))
        key, equals, value = lines[at].partition("=")
        kind = rng.choice(["value", "value", "value", "key", "double", "drop", "cut", "character"])
        if kind == "value" and equals:
            lines[at] = f"{key}= {rng.choice(VALUES)}"
        elif kind == "key":
            lines[at] = f"{rng.choice(KEYS)} ={value}"
        elif kind == "double":
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == "drop":
            lines[at] = ""
        elif kind == "cut":
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        else:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = (
                lines[at][:place] + rng.choice("\"'=[]{}.,#\\\x00é\u2028") + lines[at][place:]
            )
    return "\n".join(lines)


def test_500_configurations(config_file):
    text, rng, refused, raw = config_file.read_text(), random.Random(12), 0, []
    for number in range(500):
        config_file.write_text(mutated(rng, text))
        try:
            read_source(load_config(config_file).data)
        except FxrlError:
            refused += 1
        except Exception as error:
            raw.append(f"{number}: {error!r}"[:200])
    assert not raw
    assert 250 < refused < 490


ROWS = [
    None, True, 3, 1e999, "", " ", "x" * 9000, "\x00", "\u2028\u0085\ufeff", [], {}, [[]], [{}],
    [{"role": "user"}], [{"role": "user", "content": None}], [{"role": 3, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": "x"}], [{"role": "nobody", "content": ""}] * 3, [None], ["x"],
]  # fmt: skip
TEXTS = [
    "\ufeff",
    "\\ud800",
    "\\u12",
    LONG,
    "NaN",
    "[" * 200,
    "[" * 5000,
    "}",
    '"',
    ",",
    "\x00",
    "\r",
]


def mutated_rows(rng, rows):
    """The lines of a JSONL file, one or two of them with something else in them."""
    lines = [json.dumps(row) for row in rows]
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(lines))
        kind = rng.choice(["value", "value", "text", "text", "drop", "cut", "bytes"])
        if kind == "value":
            lines[at] = json.dumps(rows[at] | {rng.choice(["prompt", "answer"]): rng.choice(ROWS)})
        elif kind == "text":
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(TEXTS) + lines[at][place:]
        elif kind == "drop":
            lines[at] = json.dumps({"answer": 1})
        elif kind == "cut":
            lines[at] = lines[at][: rng.randrange(len(lines[at]))]
        else:
            lines[at] += "\udcff"  # a byte that is not UTF-8
    return "\n".join(lines).encode(errors="surrogateescape")


@pytest.mark.parametrize("chat", [True, False])
def test_500_data_files(config_file, chat):
    config = load_config(config_file, [f"data.chat={str(chat).lower()}"])
    questions = config_file.parent / "questions.jsonl"
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    rng, refused, raw = random.Random(12), 0, []
    for number in range(500):
        questions.write_bytes(mutated_rows(rng, rows))
        try:
            read_questions(config, tiny_tokenizer(), pytest.fail)
        except FxrlError:
            refused += 1
        except Exception as error:
            raw.append(f"{number}: {error!r}"[:200])
    assert not raw
    assert 100 < refused < 480


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "steps = 4\n[loss]\nbeta = 1\nbeta = [\n2]\n",
            ":4: not TOML: Cannot overwrite a value: beta = [",
        ),
        ("\nsteps = " + LONG, ":2: not TOML: Exceeds the limit (4300 digits)"),
        ("\nsteps = " + "[" * 5000, ":2: not TOML: more than 100 tables and lists in one another"),
        ("a = 1\n" + "[\n" * 200, ":2: not TOML"),
        ("steps = 9223372036854775808", "steps=9223372036854775808... is beyond 64 bits"),
        (f"{'.'.join('a' * 200)} = 1", "more than 100 tables and lists in one another"),
        (
            '[loss]\nname = "gropo"',
            "loss.name='gropo': no loss is called 'gropo'; did you mean 'grpo'?",
        ),
        ('[loss]\nname = "x.py:f"', "loss.name='x.py:f': 'x.py' is not a file"),
        ('[data]\ntemplate = "{a:>99999}"', "data.template='{a:>99999}' pads by more than 9999"),
    ],
)
def test_what_is_wrong_and_where(tmp_path, lines, said):
    (tmp_path / "run.toml").write_text(lines)
    with pytest.raises(BadConfigError) as told:
        load_config(tmp_path / "run.toml")
    assert said in str(told.value)


def test_a_byte_order_mark_is_no_mistake(config_file):
    config_file.write_bytes("\ufeff".encode() + config_file.read_bytes())
    assert load_config(config_file).steps == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.num_generations=4611686018427387904", "is above 1048576 completions a step"),
        ("fxrl.context_parallel=2 optimize=false", "which shares no sequence"),
        ("reward.timeout_s=inf", "reward.timeout_s=inf is not a finite number"),
        ("disk_wait_s=1e300", "disk_wait_s=1e+300 is outside"),
        ("sampling.temperature=inf", "sampling.temperature=inf is not a finite number"),
        ("model.lora.r=9223372036854775807", "model.lora.r=9223372036854775807 is outside"),
        ("num_iterations=2147483648", "num_iterations=2147483648 is outside [1, 1000]"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] is not a list of 2, each a number"),
        ("optim.weight_decay='x'", "optim.weight_decay='x' is not a number"),
        ("reward.params.length.target=0", "reward.params.length.target=0 is no number of tokens"),
        ("reward.params.length.target='x'", "reward.params.length.target='x' is no number"),
        ("reward.functions=['regex']", "reward.params.regex.pattern: missing; it has no default"),
        ("loss.epsilon=1e308", "loss.epsilon=1e+308 is beyond float32"),
        ("data.size=" + "9" * 5000, "data.size='9999"),
        ("steps=" + "[" * 5000, "steps='[[["),
    ],
)
def test_values_that_no_run_survives(config_file, override, said):
    with pytest.raises(BadConfigError) as told:
        load_config(config_file, override.split())
    assert said in str(told.value)


def test_an_override_reaches_into_tables_that_take_any_keys(config_file):
    config = load_config(config_file, ["reward.params.length.target=7", "optim.betas=[0.8, 0.9]"])
    assert config.reward.params == {"length": {"target": 7}}
    assert config.optim.options == {"betas": [0.8, 0.9]}
