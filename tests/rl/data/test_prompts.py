"""Rows to prompts and tokens."""

import pytest

from fxrl.errors import ConfigError
from fxrl.models import tiny_tokenizer
from fxrl.rl.config.load import load_config
from fxrl.rl.config.tables import DataConfig, Turn
from fxrl.rl.data.questions import PromptBuilder, question_text
from fxrl.rl.errors import DataError
from fxrl.rl.loop.data import read_questions

ROW = {"question": "Add: 3 + 4 =", "answer": 7, "metadata": {"expression": "3 + 4"}}


def config(**options):
    return DataConfig(reasoning_gym="chain_sum", **options)


def text(**options):
    return question_text(config(**options), "question", ROW)


def test_templates_read_columns_their_entries_and_groups_of_the_pattern():
    assert text() == "Add: 3 + 4 ="
    assert text(template="What is {metadata[expression]}?") == "What is 3 + 4?"
    found = text(template="{question} so {a}{b}", pattern=r": (?P<a>\d+) \+ (?P<b>\d+ )")
    assert found == "Add: 3 + 4 = so 34"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"template": "{nothing}"}, "it may name answer, metadata, question"),
        ({"template": "{", "pattern": None}, r"data\.template"),
        ({"template": "{a}", "pattern": "(?P<a>x)"}, "does not match the prompt"),
    ],
)
def test_templates_that_do_not_fit(options, words):
    with pytest.raises(DataError, match=words):
        text(**options)


def test_chat_turns_in_order():
    options = {"system": "Be brief.", "turns": (Turn("user", "hi"), Turn("assistant", "ho"))}
    builder = PromptBuilder(config(**options), "question", [ROW], tiny_tokenizer())
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    prompt = builder.prompt(ROW)
    assert [message["role"] for message in prompt] == roles
    assert [message["content"] for message in prompt][1:3] == ["Add: 3 + 4 =", "7"]
    decoded = builder.tokenizer.decode(builder.encode(prompt))
    assert decoded.endswith("Add: 3 + 4 =<|im_end|>\n<|im_start|>assistant\n")
    assert decoded.count("<|im_start|>") == 7


def test_a_conversation_as_prompt_is_kept():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk.append({"role": "user", "content": "c"})
    builder = PromptBuilder(config(system="s"), "question", [], tiny_tokenizer())
    assert builder.prompt({"question": talk}) == [{"role": "system", "content": "s"}, *talk]
    with pytest.raises(DataError, match="is no"):
        builder.prompt({"question": [{"role": "user"}]})
    with pytest.raises(DataError, match="a prompt is a text or chat messages"):
        builder.prompt({"question": 3})


def test_plain_text_without_chat():
    builder = PromptBuilder(config(chat=False), "question", [], tiny_tokenizer())
    assert builder.prompt(ROW) == "Add: 3 + 4 ="
    assert builder.tokenizer.decode(builder.encode("abc")) == "abc"


def test_a_tokenizer_without_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"data\.chat=false"):
        PromptBuilder(config(), "question", [], tokenizer)


def test_few_shot_without_answers_and_prompts_too_long():
    with pytest.raises(DataError, match="few_shot needs the column 'answer'"):
        PromptBuilder(config(), "question", [{"question": "a"}], tiny_tokenizer())
    builder = PromptBuilder(config(max_prompt_tokens=3), "question", [], tiny_tokenizer())
    assert len(builder.encode("abc")) == 3
    with pytest.raises(DataError, match=r"4 tokens, outside 1\.\.3"):
        builder.encode("abcd")


@pytest.mark.parametrize(
    "template",
    [
        "{answer.real.x}",
        "{question[0][5]}",
        "{metadata:>9}",
        "{answer:%Y}",
        "{0}",
        "{}",
        "{none:>5}",
    ],
)
def test_a_template_that_a_row_does_not_fit_is_told(template):
    row = ROW | {"none": None}
    with pytest.raises(DataError, match=r"data\.template=.*; it may name answer, metadata"):
        question_text(config(template=template), "question", row)


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ([], "column 'question' is empty"),
        ([{"role": "user", "content": None}], "content is None in a message; give a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content is .* in a message"),
        ([{"role": 3, "content": "x"}], "role is 3 in a message"),
        (["x"], "'x' is no {role, content} message"),
    ],
)
def test_messages_that_are_no_texts_are_told(talk, words):
    builder = PromptBuilder(config(), "question", [], tiny_tokenizer())
    with pytest.raises(DataError, match=words):
        builder.prompt({"question": talk})


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{ messages.x.y }}",
        "{% include 'x' %}",
    ],
)
def test_a_chat_template_that_fails_is_told(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    builder = PromptBuilder(config(), "question", [], tokenizer)
    with pytest.raises(DataError, match=r"its chat template fails with .* at the prompt .*Add: 3"):
        builder.encode(builder.prompt(ROW))


def test_a_row_of_a_file_is_named_by_its_line(config_file):
    (config_file.parent / "questions.jsonl").write_text(
        '{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": [{"role": "user", "content": 1}]}\n'
    )
    with pytest.raises(DataError, match=r"questions.jsonl:4: .*content is 1 in a message"):
        read_questions(load_config(config_file), tiny_tokenizer(), pytest.fail)


def test_colons_and_braces_of_a_template_are_its_own():
    template = '{{"q": {question!r}, "n": "{answer:>3}"}} Q: {question}'
    said = """{"q": 'Add: 3 + 4 =', "n": "  7"} Q: Add: 3 + 4 ="""
    assert text(template=template) == said


def test_a_conversation_ends_with_what_the_model_is_to_answer():
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    builder = PromptBuilder(config(), "question", [], tiny_tokenizer())
    with pytest.raises(DataError, match="column 'question' ends with the assistant's message"):
        builder.prompt({"question": talk})
    for role in ("user", "tool"):
        builder.prompt({"question": [*talk, {"role": role, "content": "and 3+3?"}]})


THINKING = "{{ messages[0].content }}{% if not enable_thinking | default(true) %}<think>{% endif %}"


def test_what_a_chat_template_reads_besides_the_messages():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING

    def encoded(**given):
        options = config(chat_template_kwargs=given)
        return tokenizer.decode(PromptBuilder(options, "q", [], tokenizer).encode(TALK))

    assert encoded() == encoded(enable_thinking=True) == "abc"
    assert encoded(enable_thinking=False) == "abc<think>"
    with pytest.raises(DataError, match="the model's chat template reads no 'enable_thinkin'"):
        encoded(enable_thinkin=False)
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.tokenize is fxrl's own"):
        config(chat_template_kwargs={"tokenize": True})


TALK = [{"role": "user", "content": "abc"}]
