"""TRL's trainers through a step: the numbers of TRL's own, the routes, and what is refused."""

import dataclasses
import os
import re
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import fxrl
from fxrl.engines import TorchEngine
from fxrl.errors import ConfigError, MissedRewriteError
from fxrl.models import load_model
from tests.forked import in_processes
from tests.rows import rows

pytest.importorskip("trl", reason="needs the extra trl")
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from PIL import Image
from trl.trainer.utils import add_fused_lm_head

import fxrl.integrations.trl as ours
from bench.trl_options import ARGS, DRAWN, ROWS, reward

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CONFIG = fxrl.Config(min_saved_bytes=0, compile_regions=False, on_miss="error")
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
ADAPTED = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
COMMON = ARGS | {"max_steps": 2}
OPTIONS = (Path(__file__).parents[2] / "examples" / "trl.md").read_text()
FXRL = {name: getattr(ours, f"Fxrl{name}Trainer") for name in ROWS}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL then sends no telemetry
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    model, tokenizer = load_model("tiny:qwen3:layers=1,hidden=32")
    return model.to(dtype), tokenizer


def make(name, folder, trainer=None, *, lora=True, adapted=False, engine=None, **options):
    """A trainer of one kind, TRL's own unless ``trainer`` says otherwise.

    With ``adapted`` the model has its adapter already, which TRL then copies for the reference.
    """
    model, tokenizer = tiny()
    if adapted:
        lora, model = False, get_peft_model(model, ADAPTED)
    online = name in ("GRPO", "RLOO")
    options = {**COMMON, **(DRAWN if online else {}), **options}
    args = getattr(trl, f"{name}Config")(str(folder), **options)
    given = {"reward_funcs": reward} if online else {}
    if trainer is not None:
        given["config"] = CONFIG
    if engine is not None:
        given["engine"] = engine(model, tokenizer)
    return (trainer or getattr(trl, f"{name}Trainer"))(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(ROWS[name]),
        processing_class=tokenizer,
        peft_config=LORA if lora else None,
        **given,
    )


def both(name, folder, **options):
    """TRL's own and fxrl's, each made and trained: they draw the same random numbers."""
    trainers = []
    for trainer in (None, FXRL[name]):
        trainers.append(make(name, folder / ("mine" if trainer else "theirs"), trainer, **options))
        trainers[-1].train()
    return trainers


def assert_same_runs(theirs, mine):
    """Every metric of every step, and the weights that come out."""
    logs = theirs.state.log_history[:-1], mine.state.log_history[:-1]
    for wanted, got in zip(*logs, strict=True):
        wanted, got = ({k: v for k, v in x.items() if "time" not in k} for x in (wanted, got))
        assert wanted.keys() == got.keys()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-6)
    weights = (dict(trainer.model.named_parameters()) for trainer in (mine, theirs))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


RUNS = {
    "GRPO, reference and entropy bonus": (
        "GRPO",
        {"num_iterations": 2, "steps_per_generation": 2, "entropy_coef": 0.01, "max_steps": 3},
    ),
    "RLOO": ("RLOO", {"beta": 0.0, "gradient_checkpointing": True}),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 16}),
    "SFT, completions": ("SFT", {"loss_type": "dft", "lora": False}),
    "DPO, reference without its adapter": ("DPO", {}),
    "DPO, reference in an adapter of its own": ("DPO", {"adapted": True}),
    "KTO, reference beforehand": ("KTO", {"precompute_ref_log_probs": True}),
}
SELDOM = ["RLOO", "SFT, completions", "DPO, reference without its adapter"]


@pytest.mark.parametrize("case", rows(RUNS, SELDOM))
def test_the_numbers_are_trls(case, tmp_path):
    name, options = RUNS[case]
    theirs, mine = both(name, tmp_path, **options)
    assert_same_runs(theirs, mine)
    first = mine.state.log_history[0]
    if "precompute_ref_log_probs" not in options:  # it batches other rows together
        for metric in ("kl", "rewards/margins", "rewards/chosen"):
            assert first.get(metric, 0.0) == 0.0, "policy and reference take one route"
    applied = {r.pass_name for r in mine.train_step.report.of_kind("applied")}
    assert "fuse-linear-logprob" in applied
    assert len(mine.train_step.captures) <= 3
    told = tmp_path / "mine" / "fxrl"
    assert fxrl.Plan.from_json((told / "plan.json").read_text()) == mine.train_step.plan
    report = (told / "report.txt").read_text()
    assert "fuse-linear-logprob" in report
    assert ("set aside" in report) == options.get("gradient_checkpointing", False)


def seeing():
    """A tiny LLaVA and its processor."""
    _, tokenizer = tiny()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    place = tokenizer.convert_tokens_to_ids("<image>")
    sides = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    eyes = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    eyes |= {"num_hidden_layers": 2, "projection_dim": 32}
    text = {"model_type": "qwen2", "vocab_size": len(tokenizer), "num_hidden_layers": 2}
    text |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
    text |= {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    config = transformers.LlavaConfig(
        vision_config=eyes | sides,
        text_config=text | sides | {"bos_token_id": None},
        image_token_index=place,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config), transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(Path(trl.__file__).parent / "chat_templates/llava_next.jinja").read_text(),
    )


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="Dynamo of 2.11 fails on the scatter of LLaVA's images (PendingUnbackedSymbolNotFound)",
)
def test_images_are_the_models_own_business(tmp_path):
    """A vision-language model with its processor: TRL's numbers, and the head is rewritten."""
    colours = [Image.new("RGB", (28, 28), (30 * i, 20, 90)) for i in range(8)]
    rows = [
        {
            "images": [colour],
            "prompt": [{"role": "user", "content": f"What is {i}?"}],
            "completion": [{"role": "assistant", "content": "red " * (1 + i % 3)}],
        }
        for i, colour in enumerate(colours)
    ]
    trainers = []
    for kind, given in ((trl.SFTTrainer, {}), (FXRL["SFT"], {"config": CONFIG})):
        model, processor = seeing()
        options = COMMON | {"max_length": None}
        args = trl.SFTConfig(str(tmp_path / kind.__name__), **options)
        data = Dataset.from_list(rows)
        named = {"train_dataset": data, "processing_class": processor, **given}
        trainers.append(kind(model=model, args=args, **named))
        trainers[-1].train()
    assert_same_runs(*trainers)
    applied = trainers[1].train_step.report.of_kind("applied")
    assert "fuse-linear-logprob" in {remark.pass_name for remark in applied}


def test_autocast_rounds_no_more_than_trl_does(tmp_path):
    """bf16: each run's distance from the float32 one; and places under accelerate's wrappers."""
    theirs, mine = both("SFT", tmp_path, bf16=True)
    exact = make("SFT", tmp_path / "exact")
    exact.train()
    weights = [
        torch.cat([p.flatten() for p in trainer.model.parameters() if p.requires_grad])
        for trainer in (theirs, mine, exact)
    ]
    far, near = ((weight - weights[2]).norm() for weight in weights[:2])
    assert near < 2 * far
    sites = [remark.site for remark in mine.train_step.report.remarks]
    assert any(site.startswith("0:base_model.model.lm_head/") for site in sites)
    assert not any("__closure__" in site for site in sites)


def test_the_line_of_trl_that_reads_logits_is_named(tmp_path):
    trainer = make("SFT", tmp_path, FXRL["SFT"], label_smoothing_factor=0.1)
    with pytest.raises(MissedRewriteError, match=r"trainer/sft_trainer\.py:\d+"):
        trainer.train()


def test_an_engine_draws_and_its_log_probs_are_corrected_for(tmp_path):
    def engine(model, tokenizer):
        return TorchEngine.from_tokenizer(model, tokenizer)

    options = {"loss_type": "cispo", "beta": 0.0}
    trainer = make("GRPO", tmp_path, FXRL["GRPO"], engine=engine, **options)
    trainer.train()
    for logs in trainer.state.log_history[:-1]:
        assert logs["sampling/sampling_logp_difference/max"] < 1e-5
        assert logs["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    drawer = trainer.vllm_generation
    assert drawer.engine.policy_version == 2
    with pytest.raises(fxrl.errors.FxrlError, match="standby"):
        drawer.engine.generate([[5]], drawer.params)
    _, ids, logps, _ = drawer.generate([[5, 6], [5, 6], [7], [7]], None, 2)
    assert [len(row) for row in ids] == [len(row) for row in logps]
    assert all(len(token) == 1 for row in logps for token in row)
    with pytest.raises(ConfigError, match="images"):
        drawer.generate([[5]], [["picture"]], 1)


# ---------------------------------------------------------------------------- the one call
def test_the_fused_call_is_trls():
    """Every field against TRL's own head, in float64, with and without the adapter."""
    model, _ = tiny(torch.float64)
    entries = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", *entries))
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    through = ours.ThroughStep(model, ours.TokenScores(entries, 0.7, True), CONFIG)
    ids = torch.randint(3, 250, (3, 9), generator=torch.manual_seed(1))
    labels = ids.masked_fill(torch.arange(9) < 4, -100)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = model(**inputs, labels=labels, fused_lm_head=True)
    got = through(**inputs, labels=labels, fused_lm_head=True)
    for name in ("loss", "log_probs", "entropy", "label_mask", *entries):
        torch.testing.assert_close(
            got[name].detach(), wanted[name].detach(), rtol=0, atol=3e-6, check_dtype=False
        )
    weights = [p for p in model.parameters() if p.requires_grad]
    scores = ours.TokenScores(entries, 0.7, True)(model, {"inputs": inputs, "labels": labels})
    mixed = [(s["log_probs"].exp() * s["entropy"]).sum() for s in (got, scores)]
    gradients = [torch.autograd.grad(value, weights) for value in mixed]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        again = through(**inputs, labels=labels, fused_lm_head=True)
        assert torch.equal(again.log_probs, got.log_probs), "the first ratio is exactly 1"
        with model.disable_adapter():
            bare = through(**inputs, labels=labels, fused_lm_head=True)
            theirs = model(**inputs, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(
        bare.log_probs, theirs.log_probs, rtol=0, atol=3e-6, check_dtype=False
    )
    assert not torch.allclose(bare.log_probs, got.log_probs, atol=1e-3)
    nothing = through(**inputs, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert nothing.log_probs.requires_grad
    assert not nothing.loss.item()
    assert isinstance(through, type(model))
    assert through.peft_config is model.peft_config


def test_prompt_learning_counts_its_virtual_tokens():
    model, _ = tiny()
    add_fused_lm_head(model, outputs=("log_probs",))
    model = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    through = ours.ThroughStep(model, ours.TokenScores(), CONFIG)
    ids = torch.randint(3, 250, (2, 6), generator=torch.manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    wanted, got = (call(**inputs, fused_lm_head=True) for call in (model, through))
    assert got.log_probs.shape == (2, 8)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=1e-5, atol=1e-5)


def test_logits_that_trl_asks_for_are_a_miss():
    model, _ = tiny()
    through = ours.ThroughStep(model, ours.TokenScores(), CONFIG)
    with pytest.raises(MissedRewriteError, match="label_smoothing_factor"):
        through(input_ids=torch.ones(1, 3, dtype=torch.int64))


# ---------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("SFT", {"use_liger_kernel": True}, "use_liger_kernel=True .* leave it out"),
        ("DPO", {"activation_offloading": True}, "host_memory"),
        ("GRPO", {"torch_compile": True}, "torch_compile=True"),
        ("GRPO", {"cast_lm_head_to_fp32": True, "bf16": True}, "under bf16 autocast.*bf16=False"),
        ("GRPO", {"use_vllm": True, "vllm_mode": "server"}, "vllm_mode='server'.*engine="),
        ("RLOO", {"vllm_max_model_length": 99}, "=99 says how TRL draws, .*engine's own options"),
        ("GRPO", {"cache_implementation": "static"}, "cache_implementation='static' says how"),
        ("GRPO", {"loss_type": "vespo"}, "sequence_mask.*token_truncate"),
        ("RLOO", {"use_transformers_continuous_batching": True}, "how TRL draws"),
    ],
)
def test_what_cannot_work_is_refused(name, options, words, tmp_path):
    def engine(model, tokenizer):
        return TorchEngine.from_tokenizer(model, tokenizer)

    drawn = engine if name in ("GRPO", "RLOO") else None
    with pytest.raises(ConfigError, match=words):
        make(name, tmp_path, FXRL[name], engine=drawn, **options)


def test_sharding_is_refused():
    parallel = SimpleNamespace(cp_enabled=True)
    accelerator = SimpleNamespace(parallelism_config=parallel)
    trainer = SimpleNamespace(
        accelerator=accelerator, is_fsdp_enabled=True, is_deepspeed_enabled=False
    )
    with pytest.raises(ConfigError, match=r"cp, FSDP: .*DistributedDataParallel"):
        ours._refuse_sharding(trainer)


def test_checkpointing_is_set_aside_in_a_copy(tmp_path):
    args = trl.SFTConfig(str(tmp_path), **COMMON | {"gradient_checkpointing": True})
    with warnings.catch_warnings(action="error"):  # it is TRL's default, so all would be warned
        judged = ours._judged(args)
    assert args.gradient_checkpointing
    assert not judged.gradient_checkpointing
    assert not getattr(judged, "activation_checkpointing", False)


def names_in(text):
    return re.findall(r"`(\w+)`", text)


def test_the_table_of_options_is_whole():
    """examples/trl.md names each option of each configuration once, and no other."""
    cells = [line.split("|")[1:3] for line in OPTIONS.splitlines() if line.startswith("| ")]
    start = cells.index([" of ", " options "])
    otherwise = [name for options, _ in cells[2:start] for name in names_in(options)]
    known = set()
    for kind in ROWS:
        fields = {field.name for field in dataclasses.fields(getattr(trl, f"{kind}Config"))}
        alike = [
            name
            for of, options in cells[start + 2 :]
            if of == " all five " or kind in of
            for name in names_in(options)
        ]
        assert sorted([*alike, *fields.intersection(otherwise)]) == sorted(fields)
        known |= fields
    assert sorted(otherwise) == sorted(known.intersection(otherwise))


def test_the_table_of_options_says_what_is_refused():
    """``test_what_cannot_work_is_refused`` has a case of each."""
    rows = [line.split("|")[1:3] for line in OPTIONS.splitlines() if line.startswith("| `")]
    found = {
        words: {name for options, what in rows if words in what for name in names_in(options)}
        for words in ("refused: ", "refused beside")
    }
    assert found["refused: "] >= ours._REFUSED.keys()
    assert found["refused beside"] == ours._HOW_TRL_DRAWS


def test_another_trl_is_named():
    """One whose method is gone, or begins otherwise."""
    for name in ("compute_policy_loss", "compute_loss"):
        words = rf"SFTTrainer.{name}\(self, policy, \.\.\.\).*tested: 1\.16\.0"
        with pytest.raises(ours.TRLVersionError, match=words):
            ours._check_method("SFTTrainer", name, "self", "policy")


# ---------------------------------------------------------------------------- two processes
def process(rank, port, folder, name):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CI": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    AcceleratorState._reset_state(reset_partial_state=True)  # it was the parent's, who is alone
    torch.set_num_threads(1)
    options = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "max_steps": 1}
    theirs, mine = both(name, Path(folder) / str(rank), **options)
    assert_same_runs(theirs, mine)
    assert isinstance(mine.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    weights = [p for p in mine.model.parameters() if p.requires_grad]
    torch.save(weights, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", rows(["SFT", "GRPO"], ["GRPO"]))
def test_gradients_are_reduced_between_processes(name, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_processes(process, port, str(tmp_path), name)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, one, other))
