"""verl's engine through a step: its own forward over the same weights is the reference."""

import contextlib
import importlib
import importlib.metadata
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fxrl.errors import ConfigError, FxrlError
from fxrl.models import load_model

pytest.importorskip("verl", reason="needs the extra verl")
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

import fxrl.integrations.verl as ours

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
alone_here = pytest.mark.usefixtures("alone")

LENGTHS = [7, 5, 9, 4]
STEP = {"min_saved_bytes": 0, "compile_regions": False, "on_miss": "error"}


class Host(PlatformCUDA):
    """verl has no platform for machines without an accelerator."""

    device_name = "cpu"
    device_module = torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def empty_cache(self):
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    for part in load_model("tiny:qwen3:layers=1,hidden=32"):
        part.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def process(place, rank=0, ranks=1):
    """One of verl's workers, on a CPU."""
    set_platform(Host())
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    # verl 0.9 asks an installed trl for what left it at 1.0.
    with pytest.MonkeyPatch.context() as patch:
        patches = importlib.import_module("verl.models.transformers.monkey_patch")
        patch.setattr(patches, "is_trl_available", lambda: False)
        yield
    dist.destroy_process_group()


@pytest.fixture
def place():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def alone(place):
    with process(place):
        yield


def engine(home, *, precision="fp32", model=None, **options):
    given = {"lora_rank": 2, "target_modules": ["q_proj"]} | (model or {})
    attention = {"attn_implementation": "sdpa"}
    made = EngineRegistry.new(
        model_type="language_model",
        backend="fxrl",
        model_config=HFModelConfig(path=str(home), override_config=attention, **given),
        engine_config=ours.FxrlEngineConfig(
            mixed_precision={"param_dtype": precision},
            use_torch_compile=False,
            fxrl=STEP,
            **options,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    torch.manual_seed(2)
    for name, weight in made.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return made


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(**options):
    drawn = torch.manual_seed(1)

    tensors = {
        "input_ids": jagged(torch.randint(3, 250, (n,), generator=drawn) for n in LENGTHS),
        "position_ids": jagged(map(torch.arange, LENGTHS)),
        "loss_mask": jagged(map(torch.ones, LENGTHS)),
        "weight": jagged(torch.randn(n, generator=drawn) for n in LENGTHS),
    }
    fixed = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "calculate_entropy": True,
        "calculate_sum_pi_squared": True,
    }
    if not isinstance(options.get("temperature"), torch.Tensor):
        fixed["temperature"] = 0.9
    for name, value in options.items():
        (tensors if isinstance(value, torch.Tensor) else fixed)[name] = value
    return tensordict_utils.get_tensordict(tensors, fixed)


def loss(model_output, data, dp_group=None):
    values = [model_output[name].values() for name in ("log_probs", "entropy")]
    return (data["weight"].values() * (values[0].exp() + 0.1 * values[1])).sum(), {}


@alone_here
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_remove_padding": False},
        {"temperature": torch.tensor([0.7, 1.0, 1.3, 0.9])},
    ],
    ids=["packed", "padded", "a temperature each"],
)
def test_the_numbers_are_verls(options, home):
    mine = engine(home)
    got, wanted = (
        step(mine, batch(**options), loss, False)
        for step in (ours.FxrlEngineWithLMHead.forward_step, FSDPEngineWithLMHead.forward_step)
    )
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    outputs = got[1]["model_output"], wanted[1]["model_output"]
    assert outputs[0].keys() == outputs[1].keys() == {"log_probs", "entropy", "sum_pi_squared"}
    for name, values in outputs[1].items():
        assert torch.equal(outputs[0][name].offsets(), values.offsets())
        found = outputs[0][name].values()
        torch.testing.assert_close(found, values.values(), rtol=1e-5, atol=1e-5)
    weights = [p for p in mine.module.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(found[0], weights) for found in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    [step] = mine.steps.values()
    applied = {remark.pass_name for remark in step.report.of_kind("applied")}
    assert applied & {"fuse-linear-logprob", "chunk-vocab-region"}


@alone_here
def test_an_update_and_the_adapter_off(home):
    mine = engine(home, precision="bf16")
    with mine.eval_mode():
        before = mine.infer_batch(batch())["model_output"]["log_probs"].values()
        with mine.disable_adapter():
            bare = mine.infer_batch(batch())["model_output"]["log_probs"].values()
    assert not torch.allclose(before, bare, atol=1e-4)
    ratios = []

    def first_ratio(model_output, data, dp_group=None):
        ratios.append(model_output["log_probs"].values().detach())
        return loss(model_output, data)

    with mine.train_mode():
        told = mine.train_batch(batch(), first_ratio)
    assert torch.equal(torch.cat(ratios), before), "the first ratio is exactly 1"
    assert told["metrics"]["grad_norm"] > 0
    with mine.eval_mode():
        after = mine.infer_batch(batch())["model_output"]["log_probs"].values()
    assert not torch.equal(after, before)
    factors, config = mine.get_per_tensor_param(base_sync_done=True)
    assert len(list(factors)) == 2
    assert config["r"] == 2


@alone_here
def test_distillation_needs_the_logits(home):
    with pytest.raises(FxrlError, match=r"distillation_use_topk .* strategy=fsdp"):
        engine(home).forward_step(batch(distillation_use_topk=True), loss, False)


@alone_here
@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ({"use_fused_kernels": True}, {}, "use_fused_kernels.*loss head"),
        ({"use_liger": True}, {}, "use_liger"),
        ({"enable_activation_offload": True}, {}, "host_memory"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses"),
        ({}, {"fsdp_size": 2}, "whole on every rank"),
        ({}, {"offload_policy": True}, "param_offload"),
        ({}, {"precision": "fp16"}, "'fp16'; it takes bf16 or fp32"),
    ],
)
def test_what_cannot_work_is_refused(model, options, words, home):
    with pytest.raises(ConfigError, match=words):
        engine(home, model=model, **options)


def test_the_configuration_is_fxrls_own():
    with pytest.raises(ConfigError, match="gpu_memory"):
        ours.FxrlEngineConfig(fxrl={"gpu_memory": "much"})
    assert ours.FxrlEngineConfig().strategy == "fxrl"


def one_of_two(rank, place, home, folder):
    rank = int(rank)
    torch.set_num_threads(1)
    with process(place, rank, 2):
        torch.manual_seed(rank)  # adapters are drawn: rank 0's are everyone's
        mine = engine(home)
        weights = [p for p in mine.module.parameters() if p.requires_grad]
        start = [weight.detach().clone() for weight in weights]
        data = batch(weight=jagged(torch.full((n,), 1.0 + rank) for n in LENGTHS))
        with mine.train_mode(zero_grad_on_exit=False):
            mine.train_batch(data, loss)
        told = {"start": start, "end": weights, "gradients": [w.grad for w in weights]}
        torch.save(told, f"{folder}/{rank}.pt")


def test_gradients_are_averaged_between_processes(home, place, tmp_path):
    """The loss is linear in the weights of its tokens, which are 1 here and 2 there."""
    # Not spawned by name: verl's wheel brings a package ``tests`` of its own.
    calls = [[sys.executable, __file__, str(rank), place, home, tmp_path] for rank in range(2)]
    workers = [subprocess.Popen(call) for call in calls]
    assert [worker.wait(300) for worker in workers] == [0, 0]
    told = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name in ("start", "end", "gradients"):
        assert all(map(torch.equal, told[0][name], told[1][name])), name
    assert not any(map(torch.equal, told[0]["start"], told[0]["end"]))


def test_verl_finds_it():
    found = importlib.metadata.entry_points(group="verl.plugins")
    if not any(point.name == "fxrl" for point in found):
        pytest.skip("fxrl is not installed, only on the path")
    assert "fxrl.integrations.verl" in {point.value for point in found}


if __name__ == "__main__":
    one_of_two(*sys.argv[1:])
