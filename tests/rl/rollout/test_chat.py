"""Chat templates of model families, read both ways: what is derived from each, and what is refused.

The templates are those that TRL ships for its own tests of tools.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from fxrl.models import tiny_tokenizer
from fxrl.rl.rollout.chat import Chat, ChatTemplateError

SPEC = importlib.util.find_spec("trl")
if SPEC is None or SPEC.origin is None:
    pytest.skip("TRL's chat templates are not there", allow_module_level=True)
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"

SCHEMA = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {
                "near": {"type": "integer", "description": "a place"},
                "word": {"type": "string", "description": "a word"},
            },
            "required": ["near", "word"],
        },
    },
}
ARGUMENTS = {"near": 7, "word": '<two> "words"'}
FUNCTION = {"name": "find", "arguments": ARGUMENTS}
ASKED = [{"role": "user", "content": "where?"}]

JSON = f"<tool_call>\n{json.dumps(FUNCTION)}\n</tool_call>"
TAGS = (
    "<tool_call>\n<function=find>\n<parameter=near>\n7\n</parameter>\n<parameter=word>\n"
    '<two> "words"\n</parameter>\n</function>\n</tool_call>'
)
BARE = json.dumps({"name": "find", "parameters": ARGUMENTS})
GLM = (
    "\n<tool_call>find\n<arg_key>near</arg_key>\n<arg_value>7</arg_value>\n<arg_key>word</arg_key>"
    '\n<arg_value><two> "words"</arg_value>\n</tool_call>'
)
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
MISTRAL_CALLS = f"[TOOL_CALLS] {json.dumps([FUNCTION])}"

TOLD = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>"
NEXT = "<|im_end|>\n<|im_start|>assistant\n"
LLAMA_TOLD = '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
LLAMA_NEXT = "<|start_header_id|>assistant<|end_header_id|>\n\n"

# name of the template: what its model writes, its stop token, and what follows an answered call
FAMILIES = {
    "qwen2_5": (JSON, "<|im_end|>", TOLD + NEXT),
    "qwen3": (JSON, "<|im_end|>", TOLD + NEXT),
    "qwen3_6": (TAGS, "<|im_end|>", TOLD + NEXT + "<think>\n"),
    "nemotron_3_nano": (TAGS, "<|im_end|>", TOLD + "\n" + NEXT + "<think>\n"),
    "llama3_1": (BARE, "<|eot_id|>", LLAMA_TOLD + LLAMA_NEXT),
    "glm4moe": (GLM, "<|observation|>", "\n<tool_response>\n42\n</tool_response><|assistant|>"),
    "mistral": (MISTRAL_CALLS, "</s>", "[TOOL_RESULTS] 42[/TOOL_RESULTS]"),
}


def chat_of(name, stop="<|im_end|>", **given):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": stop})
    tokenizer.bos_token = "<s>"
    file = TEMPLATES / f"{name}.jinja"
    tokenizer.chat_template = file.read_text() if file.is_file() else MISTRAL
    return Chat(tokenizer, {}, **given)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_and_answered(name):
    written, stop, follows = FAMILIES[name]
    chat = chat_of(name, stop)
    header = chat.render(ASKED, [SCHEMA], ask=True)
    thought = "I look.</think>\n\n" if header.rstrip().endswith("<think>") else ""
    prompt = chat.encode(header)

    def read(text, *, ended=True):
        return chat.parse(chat.encode(text), prompt, [SCHEMA], ended=ended)

    said = read(thought + written + stop)
    assert [one["function"] for one in said["tool_calls"]] == [FUNCTION]
    assert said["content"].strip() == ""
    if thought:
        assert said["reasoning_content"] == "I look."
    for text in ("Here.", written[: len(written) // 2]):
        plain = read(thought + text + stop)
        assert "tool_calls" not in plain
    assert read(thought + "Here." + stop)["content"] == "Here."
    answer = {"role": "tool", "name": "find", "tool_call_id": "call00000", "content": "42"}
    ids = chat.answered(said, [answer], chat.tokenizer.eos_token_id, [SCHEMA])
    assert chat.tokenizer.decode(ids) == follows


def test_several_calls_of_one_message():
    stop = FAMILIES["qwen3"][1]
    chat = chat_of("qwen3", stop)
    prompt = chat.encode(chat.render(ASKED, [SCHEMA], ask=True))
    said = chat.parse(chat.encode(f"Two: {JSON}\n{JSON}{stop}"), prompt, [SCHEMA], ended=True)
    assert [one["function"] for one in said["tool_calls"]] == [FUNCTION] * 2
    assert [one["id"] for one in said["tool_calls"]] == ["call00000", "call00001"]
    assert said["content"].strip() == "Two:"


REFUSED = {
    "gemma3": "leaves tool calls out",
    "gptoss": "neither JSON with a name and arguments nor tags",
    "lfm2_2_5": "rollout.response_template",
    "deepseekv3": "fails with TypeError",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_from_a_template_is_refused(name):
    with pytest.raises(ChatTemplateError, match=REFUSED[name]):
        chat_of(name)


def test_a_given_response_template_goes_first():
    field = {"open": "CALL", "content": "json", "repeats": True}
    field["transform"] = {"type": "function", "function": "{content}"}
    given = {"fields": {"tool_calls": field}, "start_anchor": "<|im_start|>assistant"}
    chat = chat_of("lfm2_2_5", response_template=given)
    said = chat.parse(chat.encode('CALL{"name": "find"}'), [], [], ended=False)
    assert said["tool_calls"][0]["function"] == {"name": "find", "arguments": {}}


def test_templates_that_cannot_go_on_are_refused():
    said = {"role": "assistant", "content": ""}
    answer = [{"role": "user", "content": "more"}]
    chat = chat_of("qwen3")
    eos = chat.tokenizer.eos_token_id
    with pytest.raises(ChatTemplateError, match="must end by a special token"):
        chat.answered(said, answer, chat.encode("é")[0], [])  # half a character
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="ends an assistant's turn neither by"):
        chat.answered(said, answer, eos, [])
    chat.tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ChatTemplateError, match="renders a question differently"):
        chat.answered(said, answer, eos, [])
