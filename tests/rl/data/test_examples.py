"""Rows of every form as tokens: what is learned of them, and what is told of wrong ones."""

import pytest

from fxrl.errors import ConfigError
from fxrl.models import tiny_tokenizer
from fxrl.models.tiny import CHAT_TEMPLATE, EOS_ID
from fxrl.rl.config.load import config_of
from fxrl.rl.config.tables import DataConfig
from fxrl.rl.data.examples import ExampleBuilder
from fxrl.rl.errors import DataError
from fxrl.rl.loop.data import read_data

ASKED = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
USER, TOLD = {"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}
TWO = [USER, TOLD, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes."}]
MARKED = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
FORGETS = (  # earlier answers, as some do with their reasoning
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}|{% endif %}"
    "{% endfor %}"
)


def builder(form="sequences", template=CHAT_TEMPLATE, **data):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return ExampleBuilder(DataConfig(rows=(), **data), form, "prompt", tokenizer)


def shown(made, row):
    """What stands before the first token that is learned, and what is learned."""
    mask = row.per_token["completion_mask"]
    learned = [token for token, counts in zip(row.completion, mask, strict=True) if counts]
    assert mask[0] == mask[-1] == 1
    decode = made.tokenizer.decode
    return decode(list(row.prompt)), decode(learned)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED], ids=["pieces", "by the template"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "How?", "completion": "So."}, (ASKED, "So.<|im_end|>")),
        ({"prompt": [USER], "completion": [TOLD]}, (ASKED, "So.<|im_end|>")),
        ({"messages": [USER, TOLD]}, (ASKED, "So.<|im_end|>")),
        ({"messages": TWO}, (ASKED, "So.<|im_end|>Yes.<|im_end|>")),
        ({"prompt": TWO[:3], "completion": TWO[3:]}, (None, "Yes.<|im_end|>")),
        ({"text": "So it is."}, ("S", "o it is.<|im_end|>")),
    ],
)
def test_sequences(template, row, expected):
    made = builder(template=template)
    [found] = made.unit(row)
    before, learned = shown(made, found)
    assert learned == expected[1]
    assert expected[0] in (before, None)


def test_the_prompt_is_what_a_rollout_is_asked_with():
    made = builder(system="Be brief.")
    [row] = made.unit({"prompt": "How?", "completion": "So."})
    assert list(row.prompt) == made._chat.encode(made._chat.prompt({"prompt": "How?"}))


def test_bare_texts_and_all_tokens():
    made = builder(chat=False)
    [row] = made.unit({"prompt": "How?", "completion": " So."})
    assert shown(made, row) == ("How?", " So.<|im_end|>")
    assert row.completion[-1] == EOS_ID
    [row] = builder(train_on="all").unit({"messages": [USER, TOLD]})
    assert sum(row.per_token["completion_mask"]) == len(row.completion) == sum(row.lengths) - 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How?", "chosen": "So.", "rejected": "No."},
        {"prompt": [USER], "chosen": [TOLD], "rejected": [TOLD | {"content": "No."}]},
        {"chosen": [USER, TOLD], "rejected": [USER, TOLD | {"content": "No."}]},
    ],
)
def test_pairs(row):
    made = builder("pairs")
    found = [shown(made, one) for one in made.unit(row)]
    assert found == [(ASKED, "So.<|im_end|>"), (ASKED, "No.<|im_end|>")]


def test_labels_and_own_names_of_columns():
    made = builder("labelled", columns={"completion": "output", "label": "good"})
    [row] = made.unit({"prompt": "How?", "output": "So.", "good": False})
    assert row.per_row == {"desirable": 0.0}


@pytest.mark.parametrize(
    ("form", "data", "row", "words"),
    [
        ("sequences", {}, {"question": "a"}, r"columns question; .* messages, or prompt and comp"),
        ("pairs", {}, {"prompt": "a", "completion": "b"}, "prompt and chosen and rejected, or"),
        ("pairs", {}, {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ("pairs", {}, {"chosen": "b", "rejected": "c"}, "it has no prompt"),
        ("pairs", {}, {"chosen": [TOLD], "rejected": [USER]}, "begin with different messages"),
        ("pairs", {}, {"prompt": "a", "chosen": [TOLD], "rejected": [USER]}, "its prompt is a tex"),
        ("labelled", {}, {"prompt": "a", "completion": "b", "label": "yes"}, "'label' is 'yes'"),
        ("sequences", {}, {"messages": [USER]}, "nothing to learn"),
        ("sequences", {}, {"messages": [{"role": "user"}]}, "is no {role, content} message"),
        ("sequences", {}, {"messages": "How?"}, "messages need the chat template"),
        ("sequences", {"chat": False}, {"messages": TWO}, "data.chat=true"),
        ("sequences", {"max_length": 10}, {"messages": TWO}, r"above data.max_length=10"),
        ("sequences", {}, {"text": ""}, "give a text"),
        ("sequences", {"template": FORGETS}, {"messages": TWO}, "before message 4 otherwise"),
    ],
)
def test_what_is_wrong_with_a_row(form, data, row, words):
    template = data.pop("template", CHAT_TEMPLATE)
    with pytest.raises(DataError, match=words):
        builder(form, template, **data).unit(row)


def read(said, loss="sft", rows=(), **tables):
    table = {"model": {"id": "tiny:qwen3"}, "loss": {"name": loss}, **tables}
    table["data"] = {"rows": list(rows), **table.get("data", {})}
    return read_data(config_of(table, "a", "runs/a"), tiny_tokenizer(), said.append)


def test_held_out_rows_are_of_other_prompts():
    """The same question with another answer would tell what is held out."""
    rows = [{"prompt": f"{i % 4}?", "completion": f"{i}"} for i in range(12)]
    data = read([], rows=rows, eval={"size": 1})
    assert (len(data.split.train), len(data.split.held_out)) == (9, 1)
    asked = {bytes(unit[0].prompt) for unit in data.split.train}
    assert bytes(data.split.held_out[0][0].prompt) not in asked


def test_unusable_rows_are_skipped_and_counted():
    said = []
    rows = [{"text": "good"}, {"words": "bad"}]
    with pytest.raises(DataError, match=r"1 of 2 rows are unusable:\n  data.rows: row 2: it has"):
        read(said, rows=rows)
    data = read(said, rows=rows, data={"unusable_rows": "skip"})
    assert len(data.split.train) == 1
    assert "1 of 2 rows are unusable and left out" in said[0]


@pytest.mark.parametrize(
    ("loss", "tables", "words"),
    [
        ("grpo", {}, "reward.functions is empty"),
        ("sft", {"sampling": {"top_k": 3}}, "sampling=.* is of prompts and their completions"),
        ("dpo", {"reward": {"functions": ["length"], "params": {}}}, "reward=.* of prompts and th"),
        ("dpo", {"data": {"few_shot": 1}}, "data.few_shot=1 is of prompts"),
        ("dpo", {"data": {"form": "sequences"}}, "loss.name='dpo' reads pairs; leave it out"),
        ("dpo", {"data": {"train_on": "all"}}, "data.train_on='all' is of sequences"),
        ("grpo", {"data": {"max_length": 9}}, "data.max_length=9 is of given answers"),
        ("grpo", {"precompute_ref_log_probs": True}, "precompute.* is of given answers"),
        ("sft", {"precompute_ref_log_probs": True}, "loss.name='sft' compares with no reference"),
        ("kto", {"engine": "vllm"}, "engine='vllm' is of prompts"),
        ("sft", {"assistant_only_loss": True}, "did you mean 'data.train_on'"),
    ],
)
def test_what_does_not_go_with_a_form(loss, tables, words):
    rows = [{"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d", "label": True}]
    with pytest.raises(ConfigError, match=words):
        read([], loss, rows, **tables)
