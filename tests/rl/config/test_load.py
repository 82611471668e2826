"""Every mistake in one error; overrides; defaults."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from fxrl.errors import ConfigError
from fxrl.losses import FACTORIES
from fxrl.losses.options import accepted
from fxrl.rl.config import trl
from fxrl.rl.config.binding import dotted_names
from fxrl.rl.config.load import (
    as_table,
    config_of,
    differences,
    load_config,
    with_defaults,
)
from fxrl.rl.config.tables import TrainConfig


def problems(file, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_the_tree_is_read(config_file):
    config = load_config(config_file)
    assert config.steps == 4
    assert config.model.lora is not None
    assert config.model.lora.r == 4
    assert config.loss.options == {"beta": 0.05}
    assert config.reward.functions == ("length", "toy_rewards:even")
    assert config.run_dir == "runs/run"


def test_overrides_take_toml_values_and_bare_words(config_file):
    overrides = "run_dir=out/a|steps=7|optim.lr=1e-5|model.lora=none|sampling.top_k=3"
    overrides += "|optimize=true|optim.betas=[0.8, 0.9]|data.system=12|fxrl.gpu_memory=75GiB"
    config = load_config(config_file, overrides.split("|"))
    assert (config.run_dir, config.steps, config.optim.lr) == ("out/a", 7, 1e-5)
    assert config.model.lora is None
    assert config.sampling.top_k == 3
    assert config.optim.options == {"betas": [0.8, 0.9]}
    assert config.data.system == "12"
    assert config.fxrl.gpu_memory == "75GiB"
    assert config.optimize is True


def test_overrides_of_one_table_add_up(config_file):
    """The table that one gives, and a key of it."""
    loss = load_config(config_file, ["loss={name='dapo', beta=0.3}", "loss.epsilon=0.1"]).loss
    assert (loss.name, loss.options) == ("dapo", {"beta": 0.3, "epsilon": 0.1})


def test_an_int_is_a_float_but_not_the_other_way_nor_a_bool(config_file):
    assert load_config(config_file, ["optim.lr=1"]).optim.lr == 1.0
    assert problems(config_file, "steps=1.5") == ["steps=1.5 is not a whole number"]
    assert problems(config_file, "steps=true") == ["steps=True is not a whole number"]
    assert problems(config_file, "optimize=1") == ["optimize=1 is not true or false"]


def test_a_value_is_out_of_one_range(config_file):
    """The first that it is out of."""
    found = problems(config_file, "sampling.temperature=-1")
    assert found == ["sampling.temperature=-1.0 must be above 0"]


def test_all_mistakes_at_once_with_the_nearest_names(config_file):
    text = config_file.read_text()
    text = text.replace("save_every", "save_evry").replace("beta = 0.05", "betta = 0.05")
    text = text.replace("num_generations = 4", "num_generations = 0").replace("r = 4", "rank = 4")
    text = text.replace('"length",', '"lenth",').replace("lr = 1e-2", 'lr = "fast"\nmomentun = 1')
    config_file.write_text(text + '[fxrl]\nchunk_token = 3\non_miss = "shout"\n')
    found = problems(config_file, "seed=x", "learning_rate=1", "nonsense")
    expected = [
        "save_evry: no such key; did you mean 'save_every'?",
        "loss.betta: no such key; did you mean 'beta'?",
        "sampling.num_generations=0 is below 1",
        "model.lora.rank: no such key; did you mean 'model.lora.r'?",
        "reward.functions: 'lenth' is neither module:function nor built in; did you mean 'length'?",
        "optim.lr='fast' is not a number",
        "fxrl.chunk_token: no such key; did you mean 'fxrl.chunk_tokens'?",
        "fxrl.on_miss='shout' is not one of 'warn', 'error', 'ignore'",
        "seed='x' is not a whole number",
        "learning_rate: no such key; did you mean 'optim.lr'?",
        "'nonsense' is not an override; write key=value, such as optim.lr=1e-5",
    ]
    assert [line for line in expected if line not in found] == []
    assert any(line.startswith("optim.momentun: no such key") for line in found)
    assert any(line.startswith("reward.params.length: no such entry") for line in found)
    assert len(found) == len(expected) + 2


@pytest.mark.parametrize(
    ("beside", "here", "overrides", "found"),
    [
        (True, False, [], "beside"),
        (False, True, [], "here"),
        (True, True, [], "data.path='questions.jsonl' is "),
        (True, True, ["data.path=questions.jsonl"], "here"),
        (True, False, ["data.path=questions.jsonl"], "beside"),
        (False, True, ["data.path=~/questions.jsonl"], "here"),
        (False, False, [], "data.path='questions.jsonl' is not a file (looked for in "),
    ],
)
def test_paths_are_looked_for_beside_the_file_and_in_the_working_folder(
    config_file, monkeypatch, tmp_path, beside, here, overrides, found
):
    data, folder = config_file.with_name("questions.jsonl"), tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "questions.jsonl").write_text(data.read_text())
    for there, file in ((beside, data), (here, folder / "questions.jsonl")):
        if not there:
            file.unlink()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    if found in ("beside", "here"):
        path = Path(load_config(config_file, overrides).data.path).resolve()
        assert path.parent == (tmp_path if found == "beside" else folder)
    else:
        (line,) = problems(config_file, *overrides)
        assert line.startswith(found)
        assert str(tmp_path) in line
        assert str(folder) in line


def test_a_key_of_another_loss_is_not_proposed(config_file):
    """``beta`` is one that sft has not: what it has is said."""
    for override in ("loss.beta=0.1", "loss.betta=0.1"):
        key = override.partition("=")[0]
        found = problems(config_file, "loss={name='sft'}", override)
        (line,) = (line for line in found if line.startswith(f"{key}: "))
        assert line.startswith(f"{key}: no such key of 'sft'; known: ")
        assert "beta" not in line.partition("known")[2]


def test_ranges_are_checked_beside_a_table_that_is_wrong(config_file):
    """Also where that table has no default."""
    found = problems(config_file, "steps=-1", "model.lora=true", "sampling.max_tokens=0")
    starts = ("model.lora=True is not", "steps=-1 is below 1", "sampling.max_tokens=0 is below 1")
    assert all(any(line.startswith(start) for line in found) for start in starts), found


def test_keys_that_are_newer_than_a_table_have_their_defaults(config_file):
    """Or no checkpoint of an earlier fxrl could be resumed."""
    new = as_table(load_config(config_file))
    old = json.loads(json.dumps(new))
    for table, key in ((old, "disk_retries"), (old, "vllm"), (old["optim"], "options")):
        del table[key]
    assert differences(with_defaults(old, new), new) == []
    other = as_table(load_config(config_file, ["disk_retries=3"]))
    assert differences(with_defaults(old, other), other) == ["disk_retries: was 20, is 3"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.id=tiny:qwen9", "model.id: "),
        ("model.id=./nowhere", "model.id: "),
        ("model.device=gpu7", "model.device='gpu7'"),
        ("data.path=nowhere.jsonl", "data.path='nowhere.jsonl' is not a file"),
        ("data.reasoning_gym=gcd", "dataset, reasoning_gym, verifiers: give exactly one"),
        ("data.pattern='('", "no regular expression"),
        ("loss.name=grop", "did you mean 'grpo'?"),
        ("loss.beta=-1", "beta=-1"),
        ("loss.top_entropy_quantle=1", "did you mean 'top_entropy_quantile'?"),
        ("fxrl.passes=['recompte']", "did you mean 'recompute'? (there are open-loss-ch"),
        ("fxrl.inductor={max_autotun=true}", "did you mean 'max_autotune'?"),
        ("fxrl.pass_options={fp8-lora={recip='row'}}", "fxrl.pass_options: fp8-lora has no opt"),
        ("optim.name=adamv", "did you mean 'adam"),
        ("optim.weight_decay=abc", "optim.weight_decay='abc' is not a number"),
        ("optim.weight_decay=-1", "refuses {'weight_decay': -1}: Invalid weight_decay"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] is not a list of 2, each a number"),
        ("optim.fused=maybe", "optim.fused='maybe' is not true or false or none"),
        ("reward={functions=[]}", "reward.functions is empty"),
        ("reward.weights=[1]", "1 entries for 2 functions"),
        ("reward.functions=['nomodule:f']", "importing 'nomodule' failed"),
        ("reward.functions=['json:dumpz']", "did you mean 'dump"),
        ("reward.params.length.tarjet=3", "did you mean 'target'?"),
        ("optim.lr=nan", "optim.lr=nan is not a finite number"),
        ("sampling.temperature=0", "temperature=0.0 must be above 0"),
        ("engine=sglang", "is not one of 'torch', 'vllm'"),
        ("vllm.max_num_seq=3", "vllm.max_num_seq: no such key; did you mean 'vllm.max_num_seqs'?"),
        ("vllm.max_num_seqs=0", "vllm.max_num_seqs=0 is below 1"),
        ("vllm.engine_args={seed=3}", "vllm.engine_args: 'seed' is fxrl's own"),
        ("sampling.extra={presence_penalty=1}", 'set engine="vllm"'),
        ("reward.timeout_s=0", "reward.timeout_s=0.0 must be above 0"),
    ],
)
def test_one_wrong_value(config_file, override, words):
    told = "\n".join(problems(config_file, override))
    assert words in told
    assert "vllm.vllm" not in told


@pytest.mark.parametrize("other", ["engine=vllm", "model.sharded=true", "model.lora=none"])
def test_embeddings_on_the_host_are_frozen_and_the_trainers_own(config_file, other):
    told = problems(config_file, "model.offload_embeddings=true", other)
    assert any("offload_embeddings=true" in line for line in told)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["reward.wait=3"], ["reward.wait"]),  # its functions are given
        (["reward.weights=x"], ["reward.weights"]),
        (["data.pth=x.jsonl", "data.path=none"], ["data.pth"]),
        (["sampling.min_tokens=9", "sampling.max_tokens=x"], ["sampling.max_tokens"]),
        (["sampling.ignore_eos=1", "mask_truncated_completions=1"], None),
        (["model.quantization=fp8", "model.lora.rank=3"], ["model.lora.rank"]),
        (["epochs=1", "dynamic_sampling=refil"], ["dynamic_sampling"]),
        (["teacher.id=tiny:llama", "loss.name=3"], ["loss.name"]),
    ],
)
def test_no_default_is_judged_for_what_was_given(config_file, overrides, keys):
    """What the file holds, misspelled or of another type, is neither missing nor its default."""
    found = [re.split("[:=]", line)[0] for line in problems(config_file, *overrides)]
    assert found == (keys or [override.partition("=")[0] for override in overrides])


def test_a_misspelled_reward_is_no_missing_one(config_file):
    text = config_file.read_text()
    config_file.write_text(text.replace("functions =", "function ="))
    [line] = [line for line in problems(config_file) if "params" not in line]
    assert line == "reward.function: no such key; did you mean 'reward.functions'?"


def test_a_long_value_is_shown_in_part(config_file):
    deep = "[" * 3000 + "]" * 3000
    told = problems(config_file, "seed=" + "9" * 6000, f"data.params={deep}")
    assert len(told) == 2
    assert all(len(line) < 300 for line in told)


def test_missing_tables_are_named(tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("steps = 3\n")
    assert {line.partition(":")[0] for line in problems(file)} == {"model", "data"}
    file.write_text('steps = 3\nmodel.id = "tiny:llama"\ndata.reasoning_gym = "chain_sum"\n')
    [line] = problems(file)
    assert line.startswith("reward.functions is empty; name at least one")


@pytest.mark.parametrize("text", ["steps = ", "[a]\n[a]"])
def test_broken_toml(tmp_path, text):
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(file)


def test_no_file(tmp_path):
    file = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory") as found:
        load_config(file)
    assert str(found.value).count(str(file)) == 1, "said once"


def test_nothing_is_loaded_for_a_bad_config(config_file, monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("the run has begun"))
    from fxrl.rl.train import main

    assert main(str(config_file), ["stepz=3"], json=True) == 2


def test_differences_are_dotted(config_file):
    first = as_table(load_config(config_file))
    second = as_table(load_config(config_file, ["optim.lr=0.5", "steps=9"]))
    assert differences(first, second) == ["optim.lr: was 0.01, is 0.5", "steps: was 4, is 9"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("temperature=1", "did you mean 'sampling.temperature'?"),
        ("num_train_epochs=1", "did you mean 'epochs'?"),
        ("learning_rate=1", "did you mean 'optim.lr'?"),
        ("optim.learning_rte=1", "did you mean 'lr'?"),
        ("optim.num_generations=4", "did you mean 'sampling.num_generations'?"),
        ("loss.max_completion_length=4", "did you mean 'sampling.max_tokens'?"),
        ("num_generations=4", "did you mean 'sampling.num_generations'?"),
        ("max_completion_length=4", "did you mean 'sampling.max_tokens'?"),
        ("report_to=wandb", "did you mean 'log_to'?"),
        ("model=tiny:qwen3", "did you mean 'model.id'?"),
        ("optim=adamw", "did you mean 'optim.name'?"),
        ("model.lora=16", "is not a table or none; its keys are alpha, dropout, r, targets"),
        ("sampling.tops=1", "did you mean 'sampling.top_"),
        ("sampling.seed=4", "did you mean 'seed'?"),
        ("per_device_train_batch_size=4", "prompts_per_step counts a step's prompts"),
        ("deepspeed=ds.json", "torchrun --nproc-per-node N"),
        ("use_vllm=true", "engine = 'vllm'"),
    ],
)
def test_hints_go_by_meaning(config_file, override, words):
    told = problems(config_file, override)
    assert [line for line in told if words in line], told


def test_a_name_of_trl_is_a_key_here_or_has_an_answer():
    keys = {*dotted_names(TrainConfig)}
    keys |= {f"loss.{name}" for factory in FACTORIES.values() for name in accepted(factory)}
    keys |= {f"optim.{name}" for name in accepted(torch.optim.AdamW)}
    assert {key for key in trl.KEYS.values() if key not in keys} == set()
    assert not trl.KEYS.keys() & trl.INSTEAD.keys()


def test_every_field_of_trl_is_understood():
    trl_package = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl_package.GRPOConfig)}
    assert {name for name in fields if name not in trl.KEYS | trl.INSTEAD} == set()


def test_epochs_or_steps(config_file):
    assert load_config(config_file, ["epochs=2"]).epochs == 2.0
    config_file.write_text("epochs = 2\n" + config_file.read_text())
    assert problems(config_file) == ["steps, epochs: give one of them"]
    assert load_config(config_file, ["steps=7"]).epochs is None
    [line] = problems(config_file, "epochs=2", "dynamic_sampling=refill")
    assert "give steps" in line


def test_a_configuration_is_a_table_again(config_file):
    """What is written down has no object of Python in it, whatever the configuration holds."""

    def mine(completions, **columns):
        return [0.0] * len(completions)

    table = as_table(load_config(config_file))
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    tables = {"model": {"id": torch.nn.Linear(1, 1)}, "data": {"rows": rows}}
    config = config_of({**tables, "reward": {"functions": [mine]}}, "test", "runs/a")
    found = as_table(config)
    assert found["model"]["id"] == "Linear"
    assert found["reward"]["functions"][0].endswith("mine")
    assert found["data"]["rows"] == "2 rows"
    assert json.loads(json.dumps(table)) == table
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("overrides", "advantages", "scale_rewards"),
    [
        ((), "group", "group"),
        (("loss.name=rloo",), "leave_one_out", "group"),
        (("loss.name=dr_grpo",), "group", "none"),
        (("loss.name=rloo", "advantages=group"), "group", "group"),
        (("loss.name=dr_grpo", "scale_rewards=batch"), "group", "batch"),
        (("scale_rewards=none",), "group", "none"),
        (("loss.name=ppo",), None, None),
    ],
)
def test_advantages_are_the_losss_own(config_file, overrides, advantages, scale_rewards):
    config = load_config(config_file, overrides).settled()
    assert (config.advantages, config.scale_rewards) == (advantages, scale_rewards)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("engine=vllm", "sampling.top_p=0.95"), ["sampling.top_p=0.95: vLLM's log-probs count"]),
        (
            ("engine=vllm", "sampling.top_k=9", "sampling.min_tokens=2"),
            ["sampling.top_k=9, samp"],
        ),
        (("engine=vllm",), []),
        (("sampling.top_p=0.95",), []),
        (
            (
                "engine=vllm",
                "sampling.top_p=0.95",
                "loss.vllm_importance_sampling_mode=token_mask",
            ),
            [],
        ),
        (
            (
                "engine=vllm",
                "sampling.top_p=0.95",
                "loss.vllm_importance_sampling_correction=false",
            ),
            [],
        ),
    ],
)
def test_filters_that_a_correction_by_sequence_multiplies_are_told_of(config_file, overrides, told):
    found = list(load_config(config_file, overrides).warnings())
    assert [line[: len(start)] for line, start in zip(found, told, strict=True)] == told
