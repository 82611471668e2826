"""``fxrl train --resume``: where it goes on, what it refuses, and what is never lost."""

import io
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from fxrl.rl.loop import checkpoint, store
from fxrl.rl.loop.trainer import TrainingLoop
from fxrl.rl.train import main
from tests.rl.loop.test_train import metrics, stop_after

EVERY = "--every-kill"
OTHER_REWARD = """
def even(completions, completion_ids, **columns):
    return [0.0 for ids in completion_ids]
"""


def train(file, run_dir, *overrides, **how):
    return main(str(file), [f"run_dir={run_dir}", "save_every=1", *overrides], json=True, **how)


def said(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def names(run_dir):
    return [place.name for place in store.list_places(Path(run_dir))]


def at(step, run_dir="out"):
    return Path(run_dir, "checkpoints", f"step-{step:08d}")


def weights(path):
    [file] = Path(path).glob("*.safetensors")
    return file.read_bytes()


def test_going_back_begins_a_branch_that_resume_goes_on_with(config_file, monkeypatch, capsys):
    many = ("keep_checkpoints=9",)
    assert train(config_file, "out", *many) == 0
    abandoned = {path: weights(path) for path in Path("out/checkpoints").iterdir()}
    lines = Path("out/metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        again = ("keep_checkpoints=1", "optim.max_grad_norm=1.0")
        assert train(config_file, "out", *again, resume=str(at(2))) == 130
    assert all(weights(path) == found for path, found in abandoned.items())
    assert names("out")[-1] == "step-00000003-branch-2"
    assert Path("out/metrics-branch-1.jsonl").read_bytes() == lines
    assert train(config_file, "out", *many, resume="") == 0
    assert "resumed at step 3" in capsys.readouterr().out
    assert names("out")[-1] == "step-00000004-branch-2"
    manifests = [store.read_manifest(path) for path in checkpoint.list_checkpoints(Path("out"))]
    assert [m.parent for m in manifests if m.branch == 1] == [None, *names("out")[:3]]
    assert manifests[-1].parent == "step-00000003-branch-2"
    assert len(metrics("out")) == 4


def test_a_branch_stands_before_its_first_step(config_file, monkeypatch, capsys):
    """Whoever goes back and is killed at once does not find the abandoned branch again."""
    assert train(config_file, "out", "keep_checkpoints=9") == 0
    whole = metrics("out")

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "run", killed)
        with pytest.raises(Killed):
            train(config_file, "out", resume=str(at(1)))
    assert train(config_file, "out", resume="") == 0
    assert (
        "resumed at step 1 from out/checkpoints/step-00000001-branch-2" in capsys.readouterr().out
    )
    assert metrics("out") == whole
    # The tip of the abandoned branch: a third one, with the lines that led there.
    assert train(config_file, "out", "steps=5", resume=str(at(4))) == 0
    assert names("out")[-1] == "step-00000005-branch-3"
    assert metrics("out")[:4] == whole


def test_a_checkpoint_of_another_run_begins_a_branch_too(config_file):
    assert train(config_file, "out") == 0
    assert train(config_file, "new", "steps=1") == 0
    assert train(config_file, "new", resume=str(at(3))) == 0
    assert metrics("new") == metrics("out")[3:]
    assert len(Path("new/metrics-branch-1.jsonl").read_text().splitlines()) == 1
    assert names("new") == ["step-00000001", "step-00000003-branch-2", "step-00000004-branch-2"]
    first = Path("new/checkpoints/step-00000003-branch-2")
    assert store.read_manifest(first).parent == str(at(3).absolute())


def test_damage_is_named_and_the_sound_one_is_taken_when_asked_for(config_file, capsys):
    assert train(config_file, "out", "keep_checkpoints=9") == 0
    whole = metrics("out")
    for step, name in ((4, "optimizer.pt"), (3, "adapter_model.safetensors")):
        content = bytearray((at(step) / name).read_bytes())
        content[len(content) // 2] ^= 1
        (at(step) / name).write_bytes(content)
    capsys.readouterr()
    assert train(config_file, "out", resume="") == 2
    text = said(capsys)[-1]["text"]
    assert "step-00000004 is damaged: optimizer.pt has other bytes" in text
    assert f"the newest sound one is {at(2).absolute()}; --resume=sound goes on there" in text
    assert train(config_file, "out", resume=str(at(3))) == 2
    assert "adapter_model.safetensors has other bytes" in said(capsys)[-1]["text"]
    assert train(config_file, "out", resume="sound") == 0
    told = [event.get("text", "") for event in said(capsys)]
    assert any("step-00000003 is damaged" in text for text in told)
    assert any("resumed at step 2" in text for text in told)
    assert metrics("out") == whole
    assert names("out")[-1] == "step-00000004-branch-2"
    assert at(4).is_dir(), "the damaged one is kept for whoever wants to look at it"


class Killed(BaseException):
    """As SIGKILL: nothing that comes after it does anything."""


def killing(monkeypatch, folder, number):
    """From the ``number``-th call of the system that changes something in ``folder`` on, none does
    anything any more."""
    calls = []

    def watched(plain):
        def call(what, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            reads = plain is io.open and (args or ("r",))[0].startswith("r")
            if f"{folder}/" in path and not path.endswith(".lock") and not reads:
                calls.append(path)
                if len(calls) >= number:
                    raise Killed
            return plain(what, *args, **kwargs)

        return call

    for module, name in [(os, n) for n in ("mkdir", "replace", "fsync", "rmdir")] + [(io, "open")]:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return calls


def test_a_run_that_is_killed_goes_on_bit_for_bit(config_file, monkeypatch, request):
    with monkeypatch.context() as patch:
        calls = killing(patch, "whole", 10**9)
        assert train(config_file, "whole", "steps=3") == 0
    assert len(calls) > 60
    every = request.config.getoption(EVERY)
    for number in range(2, len(calls) + 1, 1 if every else len(calls) // 6):
        run = f"killed-{number}"
        with monkeypatch.context() as patch:
            killing(patch, run, number)
            with pytest.raises(Killed):
                train(config_file, run, "steps=3")
        resume = "" if Path(run, "config.json").exists() else None
        assert train(config_file, run, "steps=3", resume=resume) == 0
        assert metrics(run) == metrics("whole"), number
        assert weights(at(3, run)) == weights(at(3, "whole")), number


def in_a_fork(work, seconds=0.0):
    """Whether a process was killed before it was done with ``work``, and its seconds on a CPU.

    It ends, as by SIGKILL, after so many of them: a busy machine changes nothing.
    """
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which nobody here handles
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status, used = os.wait4(child, 0)
    assert status in (0, signal.SIGPROF), status
    return status != 0, used.ru_utime + used.ru_stime


def moments(seconds, request):
    """Of a run, at which it is killed."""
    chance = random.Random(12)
    return [
        chance.uniform(0, seconds) for _ in range(100 if request.config.getoption(EVERY) else 3)
    ]


def test_a_process_that_is_killed_at_any_moment_goes_on_bit_for_bit(config_file, request):
    assert train(config_file, "whole", "steps=3") == 0
    _, whole = in_a_fork(lambda: train(config_file, "again", "steps=3"))
    killed = 0
    for number, seconds in enumerate(moments(whole, request)):
        run = f"killed-{number}"
        killed += in_a_fork(lambda run=run: train(config_file, run, "steps=3"), seconds)[0]
        resume = "" if Path(run, "config.json").exists() else None
        assert train(config_file, run, "steps=3", resume=resume) == 0
        assert metrics(run) == metrics("whole"), number
        assert weights(at(3, run)) == weights(at(3, "whole")), number
    assert killed


def test_what_a_kill_left_of_a_deletion_goes_even_if_no_step_is_left(config_file):
    assert train(config_file, "out", "steps=3", "keep_checkpoints=3") == 0
    (at(1) / "state.pt").unlink()
    at(1).rename(at(1).with_name(f".deleting-{at(1).name}"))
    assert train(config_file, "out", "steps=3", "keep_checkpoints=1", resume="") == 0
    assert [path.name for path in Path("out/checkpoints").iterdir()] == [at(3).name]


def test_no_sound_checkpoint(config_file, capsys):
    assert train(config_file, "out", "steps=1") == 0
    (at(1) / "state.pt").unlink()
    (at(1) / "notes.txt").write_text("mine")
    for resume, text in (("", "no other is there"), ("sound", "has no checkpoint that is sound")):
        assert train(config_file, "out", resume=resume) == 2
        told = said(capsys)[-1]["text"]
        assert text in told
    assert train(config_file, "out", resume="") == 2
    told = said(capsys)[-1]["text"]
    assert "state.pt is missing; notes.txt is none of its files" in told


def test_a_checkpoint_without_a_manifest_is_refused(config_file, capsys):
    assert train(config_file, "out", "steps=1") == 0
    (at(1) / "manifest.json").unlink()
    assert train(config_file, "out", resume="") == 2
    assert "has no manifest.json" in said(capsys)[-1]["text"]


def test_a_run_dir_that_is_mistyped_starts_nothing(config_file, capsys):
    assert train(config_file, "smollm2", "steps=1") == 0
    for resume in ("", "sound"):
        assert train(config_file, "smolm2", resume=resume) == 2
        assert "did you mean 'smollm2'?" in said(capsys)[-1]["text"]
    assert not Path("smolm2").exists()
    assert train(config_file, "elsewhere/out", resume="") == 2
    assert not Path("elsewhere").exists()


def test_a_run_that_made_no_step_leaves_its_run_dir_free(config_file, monkeypatch, capsys):
    good = Path("toy_rewards.py").read_text()
    Path("toy_rewards.py").write_text("def even(completions, **columns):\n    return [1 / 0]\n")
    sys.modules.pop("toy_rewards", None)
    assert train(config_file, "out", "seed=3") == 1
    Path("toy_rewards.py").write_text(good)
    del sys.modules["toy_rewards"]
    assert train(config_file, "out") == 0
    assert train(config_file, "whole") == 0
    assert metrics("out") == metrics("whole")
    assert names("out") == names("whole")
    assert weights(at(4)) == weights(at(4, "whole"))
    base = Path("model", "model.safetensors")
    assert (Path("out") / base).read_bytes() == (Path("whole") / base).read_bytes()


def test_what_a_run_is_made_of_is_compared(config_file, monkeypatch, capsys):
    assert train(config_file, "out", "steps=1") == 0
    lines = Path("questions.jsonl").read_text()
    Path("questions.jsonl").write_text(lines.replace("count to 3", "count to 33"))
    Path("toy_rewards.py").write_text(OTHER_REWARD)
    monkeypatch.delitem(sys.modules, "toy_rewards")
    assert train(config_file, "out", "steps=2", resume="") == 2
    text = said(capsys)[-1]["text"]
    assert "\n  data: was 8 rows, SHA-256 " in text
    assert "\n  reward even: was toy_rewards.py and 0 files it uses, SHA-256 " in text
    assert "reward length" not in text
    assert "--accept-changes" in text
    assert len(metrics("out")) == 1
    assert train(config_file, "new", accept_changes=True) == 2
    assert "--accept-changes says nothing without --resume" in said(capsys)[-1]["text"]
    assert train(config_file, "out", "steps=2", resume="", accept_changes=True) == 0
    assert train(config_file, "out", "steps=2", resume="") == 0, "it is known from here on"


def test_a_replaced_base_model_is_noticed(config_file, capsys):
    """The same folder's name, another model: one weight of it."""
    from safetensors.torch import load_file, save_file

    assert train(config_file, "first", "steps=1") == 0
    shutil.move("first/model", "base")
    folder = ("model.id=./base", "steps=1")
    assert train(config_file, "out", *folder) == 0
    template = Path("base/chat_template.jinja")
    template.write_text(template.read_text() + " ")
    values = load_file("base/model.safetensors")
    next(iter(values.values())).view(-1)[5] += 1e-3
    save_file(values, "base/model.safetensors", metadata={"format": "pt"})
    assert train(config_file, "out", *folder, "steps=2", resume="") == 1
    text = said(capsys)[-1]["text"]
    assert "base model: was " in text
    assert "tokenizer: was SHA-256 " in text


def resign(path):
    """As a stranger would who wants his files taken for sound ones."""
    manifest = store.read_manifest(path)
    files = {name: store._record(path, name) for name in manifest.files}
    new = store.Manifest(manifest.step, manifest.branch, manifest.parent, files)
    (path / "manifest.json").write_text(new.render())


def test_hyper_parameters_come_from_the_configuration(config_file):
    assert train(config_file, "out", "steps=2", "optim.schedule=constant") == 0
    file = at(2) / "optimizer.pt"
    saved = torch.load(file)
    for group in saved["optimizer"]["param_groups"]:
        group |= {"lr": 123.0, "initial_lr": 123.0, "betas": (0.0, 0.0), "weight_decay": 9.0}
    saved["schedule"] |= {"base_lrs": [123.0], "_last_lr": [123.0]}
    torch.save(saved, file)
    resign(at(2))
    assert train(config_file, "out", resume="") == 0
    assert train(config_file, "whole") == 0
    assert metrics("out") == metrics("whole")
    assert weights(at(4)) == weights(at(4, "whole"))


def broken(path):
    """(file, what is wrong, damage) that a stranger may have put there, with a right manifest."""

    def trainer(**changes):
        file = path / "trainer.json"
        values = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    def tensors(name, change):
        values = torch.load(path / name)
        change(values)
        torch.save(values, path / name)

    def first(values):
        return values["optimizer"]["state"][0]

    yield "trainer.json", lambda: (path / "trainer.json").write_text("[]")
    yield "trainer.json", lambda: (path / "trainer.json").write_text("{}")
    yield "trainer.json", lambda: (path / "trainer.json").write_text("[" * 100_000)
    yield "trainer.json", lambda: (path / "trainer.json").write_bytes(b"\xff{}")
    yield "trainer.json", lambda: trainer(step=-3)
    yield "trainer.json", lambda: trainer(step=2.0)
    yield "trainer.json", lambda: trainer(step=2)
    yield "trainer.json", lambda: trainer(position=10**400)
    yield "trainer.json", lambda: trainer(position=None)
    yield "trainer.json", lambda: trainer(config={})
    yield "trainer.json", lambda: trainer(config={"model": {"dtype": "auto"}})
    yield "trainer.json", lambda: trainer(config={"model": {"dtype": [], "autocast": None}})
    yield "trainer.json", lambda: trainer(initial={"eval/initial_accuracy": {}})
    yield "trainer.json", lambda: trainer(fingerprints=[])
    yield "optimizer.pt", lambda: torch.save({}, path / "optimizer.pt")
    yield "optimizer.pt", lambda: torch.save([], path / "optimizer.pt")
    yield "optimizer.pt", lambda: (path / "optimizer.pt").write_bytes(b"")
    yield "optimizer.pt", lambda: tensors("optimizer.pt", lambda v: v["optimizer"]["state"].clear())
    yield "optimizer.pt", lambda: tensors("optimizer.pt", lambda v: first(v).pop("exp_avg"))
    yield (
        "optimizer.pt",
        lambda: tensors("optimizer.pt", lambda v: first(v).update(exp_avg=torch.ones(3, 5))),
    )
    yield "optimizer.pt", lambda: tensors("optimizer.pt", lambda v: first(v).update(step="7"))
    yield (
        "optimizer.pt",
        lambda: tensors("optimizer.pt", lambda v: v["optimizer"]["state"].update({99: {}})),
    )
    yield "optimizer.pt", lambda: tensors("optimizer.pt", lambda v: v["names"].append([]))
    yield "optimizer.pt", lambda: tensors("optimizer.pt", lambda v: v["names"].pop())
    yield (
        "optimizer.pt",
        lambda: tensors("optimizer.pt", lambda v: v["schedule"].update(last_epoch=-4)),
    )
    yield "state.pt", lambda: tensors("state.pt", lambda v: v["random"].update(numpy=("MT", [])))
    yield "state.pt", lambda: tensors("state.pt", lambda v: v["random"].update(python=(3, (1,), 0)))
    yield "state.pt", lambda: tensors("state.pt", lambda v: v.pop("engine"))
    yield (
        "state.pt",
        lambda: tensors("state.pt", lambda v: v["engine"].update(generator=torch.ones(3))),
    )


def test_no_checkpoint_brings_a_traceback(config_file, capsys):
    assert train(config_file, "out", "steps=1") == 0
    sound = {file.name: file.read_bytes() for file in at(1).iterdir()}
    count = len(list(broken(at(1))))
    for index in range(count):
        name, damage = list(broken(at(1)))[index]
        damage()
        assert train(config_file, "out", "steps=2", resume="") == 2
        assert f"is damaged: {name}" in said(capsys)[-1]["text"]
        resign(at(1))
        assert train(config_file, "out", "steps=2", resume="") in (1, 2)
        assert name in said(capsys)[-1]["text"], index
        for file, content in sound.items():
            (at(1) / file).write_bytes(content)
    assert train(config_file, "out", "steps=2", resume="") == 0


def test_a_model_whose_files_name_its_weights_otherwise(config_file):
    """Transformers fuses Mixtral's experts and saves them apart; the fused ones are kept too."""
    import transformers

    extra = ("model.id=tiny:mixtral:layers=1", "model.lora=none", "optim.lr=1e-3", "steps=2")
    assert train(config_file, "whole", *extra) == 0
    assert train(config_file, "out", *extra, "steps=1") == 0
    assert train(config_file, "out", *extra, resume="") == 0
    for name in ("model.safetensors", "trainable.safetensors"):
        assert (at(2) / name).read_bytes() == (at(2, "whole") / name).read_bytes()
    index = json.loads((at(2) / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model.safetensors"}
    assert any(".experts.1." in name for name in index)
    assert transformers.AutoModelForCausalLM.from_pretrained(at(2)) is not None


@pytest.mark.parametrize("kind", ["adapter", "all"])
def test_every_checkpoint_is_one_of_peft_or_transformers(config_file, kind):
    import peft
    import transformers

    extra = ("model.gradient_checkpointing=true",)
    extra += () if kind == "adapter" else ("model.lora=none", "optim.lr=1e-3")
    assert train(config_file, "out", "steps=1", *extra) == 0
    held = {}
    plain = TrainingLoop.resume

    def resume(self, path, **how):
        plain(self, path, **how)
        held.update({n: p.clone() for n, p in checkpoint.trainable(self.parts.model).items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "resume", resume)
        assert train(config_file, "out", "steps=1", *extra, resume="") == 0
    if kind == "adapter":
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(at(1))
        assert peft.PeftConfig.from_pretrained(at(1)).base_model_name_or_path
        assert peft.PeftConfig.from_pretrained("out/final").base_model_name_or_path
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(at(1))
        assert transformers.AutoTokenizer.from_pretrained(at(1)) is not None
        for folder in (at(1), "out/final"):  # training goes without, whoever loads it does not
            assert transformers.AutoConfig.from_pretrained(folder).use_cache is True
    found = dict(loaded.named_parameters())
    assert held
    for name, value in held.items():
        assert torch.equal(found[name], value), name
    assert not (at(1) / "trainable.safetensors").exists(), "the weights are written once"
