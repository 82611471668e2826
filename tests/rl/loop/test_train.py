"""Whole runs of the tiny model: files, exact resume, interruption, failures."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fxrl.models import Quantization, load_model
from fxrl.rl.loop.trainer import TrainingLoop
from fxrl.rl.rollout import rollouter as rollout_module
from fxrl.rl.train import main
from tests.rows import rows

TIMES = ("time", "per_second")


def metrics(run_dir):
    """Lines of ``metrics.jsonl`` as text, without what measures time."""
    found = []
    for text in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        found.append(json.dumps({k: v for k, v in line.items() if not any(t in k for t in TIMES)}))
    return found


def train(file, run_dir, *overrides, resume=None):
    return main(str(file), [f"run_dir={run_dir}", *overrides], resume=resume, json=True)


def stop_after(monkeypatch, step, signum=signal.SIGINT):
    """Sends a real signal to this process at the end of step ``step``."""
    plain = TrainingLoop._step

    def signalled(self):
        result = plain(self)
        if self.done == step:
            os.kill(os.getpid(), signum)
        return result

    monkeypatch.setattr(TrainingLoop, "_step", signalled)


def test_a_run_writes_everything(config_file, capsys):
    extra = ("eval.size=2", "eval.every=2", "tensorboard=true", "loss.name=dapo")
    assert train(config_file, "out", *extra, "reward.functions=['length', 'exact']") == 0
    lines = [json.loads(text) for text in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    keys = "loss reward reward_std frac_reward_zero_std kl entropy completions/mean_length "
    keys += "completions/clipped_ratio grad_norm learning_rate num_tokens step_time epoch "
    keys += "tokens_per_second time/generate time/reward time/train rewards/length/mean nonfinite"
    for line in lines:
        assert set(keys.split()) <= line.keys()
        assert line["entropy"] > 0
        assert line["kl"] >= 0
    assert lines[0]["eval/initial_accuracy"] is not None
    assert [i for i, line in enumerate(lines, 1) if "eval/accuracy" in line] == [2, 4]
    assert lines[-1]["eval/majority_baseline"] in (0.5, 1.0)
    assert lines[-1]["num_tokens"] > lines[0]["num_tokens"] > 8 * 8
    events = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4]
    assert events[-1]["event"] == "summary"
    begun = next(i for i, e in enumerate(events) if e["event"] == "step")
    said = [e["text"] for e in events[:begun] if e["event"] == "message"]
    for begin in ("plan: ", "rollout: ", "update: micro-batches of up to "):
        (line,) = (text for text in said if text.startswith(begin))
        assert len(line) <= 80
    out = Path("out")
    assert "complete" in (out / "run.html").read_text()
    assert any((out / "tensorboard").iterdir())
    assert (out / "final" / "adapter_model.safetensors").is_file()
    assert (out / "final" / "tokenizer.json").is_file()
    for folder in (out / "final", *(out / "checkpoints").iterdir()):
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "who may read them"
    samples = [json.loads(text) for text in (out / "completions.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert {"step", "prompt", "completion", "reward", "advantage"} <= samples[0].keys()
    assert len(list((out / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    "extra",
    [
        ("seed=3",),
        ("model.lora=none", "num_iterations=2", "micro_batch_tokens=150", "optim.lr=1e-3"),
        ("model.lora.dropout=0.2", "optim.schedule=cosine", "optim.warmup_steps=1", "steps=4"),
    ],
    ids=["lora", "full, two updates a step", "dropout, cosine"],
)
def test_a_resumed_run_is_bit_identical(config_file, monkeypatch, extra):
    assert train(config_file, "whole", *extra) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(config_file, "parts", *extra) == 130
    assert len(metrics("parts")) == 3
    assert train(config_file, "parts", *extra, resume="") == 0
    assert metrics("parts") == metrics("whole")
    assert metrics("whole")[0] != metrics("whole")[3]
    assert saved_weights("parts") == saved_weights("whole")


def saved_weights(run_dir):
    [final] = sorted(Path(run_dir, "checkpoints").glob("step-*"))[-1:]
    [file] = final.glob("*.safetensors")
    return file.read_bytes()


def test_lines_after_the_last_checkpoint_are_written_once(config_file, monkeypatch):
    assert train(config_file, "whole") == 0

    class Killed(BaseException):
        """Like SIGKILL: nothing of ours gets to run."""

    plain = TrainingLoop._step

    def killed(self):
        if self.done == 3:
            raise Killed
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_step", killed)
        with pytest.raises(Killed):
            train(config_file, "parts")
    assert len(metrics("parts")) == 3  # step 3 is newer than the checkpoint of step 2
    with Path("parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')
    assert train(config_file, "parts", resume="") == 0
    assert metrics("parts") == metrics("whole")
    steps = [
        json.loads(t)["step"] for t in Path("parts/completions.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 1, 2, 2, 3, 3, 4, 4]


def test_more_steps_go_on(config_file):
    assert train(config_file, "out", "steps=2") == 0
    assert train(config_file, "out", "steps=3", resume="out") == 0
    assert len(metrics("out")) == 3
    assert train(config_file, "out", "steps=3", resume="") == 0  # nothing left to do
    assert len(metrics("out")) == 3


@pytest.mark.parametrize("every", rows([0, 2], [0]))
def test_raising_steps_later_is_the_same_run(config_file, every):
    extra = ("eval.size=2", f"eval.every={every}")
    assert train(config_file, "whole", *extra) == 0
    for steps, resume in ((1, None), (3, "")):
        assert train(config_file, "parts", *extra, f"steps={steps}", resume=resume) == 0
        assert "eval/accuracy" in json.loads(metrics("parts")[-1])
    assert train(config_file, "parts", *extra, resume="") == 0
    assert metrics("parts") == metrics("whole")


def test_a_finished_run_is_not_overwritten(config_file, capsys):
    assert train(config_file, "out", "steps=1") == 0
    assert train(config_file, "out", "steps=1") == 2
    assert "already holds a run" in capsys.readouterr().out
    assert train(config_file, "out", "steps=2", "optim.lr=5", resume="") == 2
    assert "optim.lr: was 0.01, is 5.0" in capsys.readouterr().out


def test_a_stop_gives_the_terminal_its_cursor_back_at_once(config_file, monkeypatch, capsys):
    """A second signal ends the process with no time to do it."""
    stop_after(monkeypatch, 1)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    assert main(str(config_file), ["run_dir=out"], json=False) == 130
    before, told, after = capsys.readouterr().out.partition("the run stops after this step")
    assert told
    assert "\x1b[?25l" in before, "a live view hides it"
    assert "\x1b[?25h" not in before
    assert "\x1b[?25h" in after.partition("resume")[0]


def test_sigterm_saves_too(config_file, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    stop_after(monkeypatch, 1, signal.SIGTERM)
    assert train(config_file, "out") == 143
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step-00000001"]
    assert signal.getsignal(signal.SIGTERM) is before


REWARD = """
from pathlib import Path
def picky(completions, trainer_state, prompts, answer, **columns):
    assert len(answer) == len(prompts) == len(completions)
    assert prompts[0][-1]["role"] == "user" and completions[0][0]["role"] == "assistant"
    if trainer_state.global_step == 3 and not Path("fixed").exists():
        raise RuntimeError("the third step")
    return [None if i < 4 else float(i) for i in range(len(completions))]
"""


def test_a_reward_that_raises_keeps_the_run(config_file, capsys):
    Path("picky_rewards.py").write_text(REWARD)
    extra = ("reward.functions=['picky_rewards:picky']", "reward.params={}", "save_every=0")
    assert train(config_file, "out", *extra) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["event"] == "error"
    assert "reward 'picky' raised RuntimeError('the third step')" in told["text"]
    assert "step 3 failed; the state before it is in out/checkpoints/step-00000002" in told["text"]
    Path("fixed").touch()
    assert train(config_file, "out", *extra, resume="") == 0
    assert train(config_file, "whole", *extra) == 0
    assert metrics("out") == metrics("whole")
    # None everywhere for the first prompt's completions: they count neither way
    line = json.loads(metrics("out")[0])
    assert line["reward"] == pytest.approx(5.5)


def test_nan_gradients_stop_the_run(config_file, capsys):
    Path("bad_losses.py").write_text(
        "def nan(model, batch):\n"
        "    ids = batch['input_ids']\n"
        "    return model(input_ids=ids).logits.sum() * float('nan')\n"
    )
    assert train(config_file, "out", "loss={name='bad_losses:nan'}", "max_nonfinite=2") == 1
    told = capsys.readouterr().out
    assert "step 1: loss or gradient was not finite, so an update was skipped (1 in a row" in told
    assert "not finite 2 updates in a row" in told
    [line] = metrics("out")
    assert json.loads(line)["loss"] is None
    assert json.loads(line)["nonfinite"] == 1.0
    assert torch.load("out/nonfinite-step-2.pt")["step"] == 2


def test_the_reference_is_the_untrained_model(config_file):
    """k3 with the policy itself as reference is 0, and grows as soon as the policy moves."""
    for run, extra in (("adapter", ()), ("copy", ("model.lora=none", "optim.lr=1e-3"))):
        assert train(config_file, run, *extra) == 0
        kl = [json.loads(line)["kl"] for line in metrics(run)]
        assert kl[0] == pytest.approx(0.0, abs=1e-9)
        assert min(kl[1:]) > 1e-7


def test_a_prompt_that_is_too_long_and_a_model_without_chat_template(config_file, capsys):
    assert train(config_file, "out", "data.max_prompt_tokens=5") == 2
    assert "data.max_prompt_tokens" in capsys.readouterr().out
    assert not Path("out").exists()
    assert train(config_file, "plain", "data.chat=false", "steps=1") == 0


def test_the_rich_view_in_a_log_file(config_file, capsys):
    assert main(str(config_file), ["run_dir=out", "steps=2"], resume=None, json=False) == 0
    out = capsys.readouterr().out
    assert "step 1/2  reward" in out
    assert "sample completions" in out
    assert "count to" in out
    assert "held-out" not in out


def test_group_advantages_reach_the_batch(config_file, monkeypatch):
    seen = []
    plain = rollout_module.group_advantages
    monkeypatch.setattr(
        rollout_module, "group_advantages", lambda *a: seen.append((a, plain(*a))) or seen[-1][1]
    )
    assert train(config_file, "out", "steps=1", "scale_rewards=none") == 0
    [((rewards, num, scale), advantages)] = seen
    assert (len(rewards), num, scale) == (8, 4, "none")
    expected = rewards.view(2, 4) - rewards.view(2, 4).mean(1, keepdim=True)
    torch.testing.assert_close(advantages, expected.reshape(-1))


OPTIMISED = ("optimize=true", "fxrl.compile_regions=false", "loss.beta=0")
TABLE = '{format="fp8", recipe="tensor", skip=["k_proj"]}'


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        ('{format="nf4", embeddings=true, head=true}', ("optimize=false",)),
        (TABLE, (*OPTIMISED, "fxrl.precision=fp8", "fxrl.pass_options.fp8-lora.heads=true")),
    ],
)
def test_a_run_over_quantised_weights(config_file, quantization, options):
    """Weights of 4 bits as they are; of 8 with their products in FP8, too."""
    extra = (f"model.quantization={quantization}", "steps=1", *options)
    assert train(config_file, "out", *extra, "model.id=tiny:qwen3:layers=1") == 0
    assert len(metrics("out")) == 1
    assert json.loads(metrics("out")[0])["grad_norm"] > 0


def test_a_run_from_a_quantised_checkpoint(config_file, capsys):
    """Its Linears are read as they are stored; the run resumes exactly, and its base is known."""
    how = Quantization("fp8", "block", skip=("k_proj",))
    model, tokenizer = load_model("tiny:qwen3:layers=1", "fp32", quantization=how)
    for part in (model, tokenizer):
        part.save_pretrained("held")
    held = ("model.id=held", "steps=3", "save_every=1")
    assert train(config_file, "whole", *held) == 0
    assert train(config_file, "parts", *held[:1], "steps=1", "save_every=1") == 0
    assert train(config_file, "parts", *held, resume="") == 0
    assert metrics("parts") == metrics("whole")
    first, second = (
        load_file(next(Path(run, "checkpoints", "step-00000003").rglob("adapter_model*")))
        for run in ("parts", "whole")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    adapter = next(Path("whole", "checkpoints", "step-00000003").rglob("adapter_model*")).parent
    tokenizer.save_pretrained(adapter)
    ids, (again, _) = torch.arange(3, 12)[None], load_model(adapter)
    assert not torch.equal(again(ids).logits, model(ids).logits)
    loaded = {name.removesuffix(".default.weight"): p for name, p in again.named_parameters()}
    for name, factor in first.items():
        path = name.removeprefix("base_model.model.").removesuffix(".weight")
        assert torch.equal(loaded[path], factor), path
    changed = load_model("tiny:qwen3:layers=1", "fp32", quantization="fp8")[0]
    changed.save_pretrained("held")
    capsys.readouterr()
    assert train(config_file, "parts", *held[:1], "steps=4", resume="") != 0
    assert "base model" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("model.lora=none", "is of frozen weights, and without an adapter all are trained"),
        ("engine=vllm", "is the trainer's own, and vLLM shares weights as it holds them"),
    ],
)
def test_quantisation_is_of_frozen_weights_and_the_trainers_own(config_file, capsys, other, why):
    assert train(config_file, "out", "model.quantization=int4", other) == 2
    assert f"quantization='int4' {why}" in "".join(capsys.readouterr())
