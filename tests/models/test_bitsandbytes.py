"""QLoRA over bitsandbytes' own weights: PEFT's adapters on what ``load_in_4bit`` makes."""

import pytest
import torch

import fxrl
from bench.lib import qwen
from fxrl.ir.plan import CutLayer, Plan
from tests.capture.mixer import outcome

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


def kl_loss(model, batch):
    """With the model without its adapter for a reference, as users write it."""

    def logps():
        logits = model(input_ids=batch["ids"]).logits[:, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, batch["ids"][:, 1:, None])[..., 0]

    with torch.no_grad(), model.disable_adapter():
        reference = logps()
    apart = logps() - reference
    return (apart.exp() - apart).mean() - (apart * batch["adv"]).mean()


@pytest.mark.parametrize(
    "cut",
    [CutLayer("products"), CutLayer("attention", "host", "host", 8)],
    ids=["kept", "on the host, in tiles"],
)
def test_layers_of_four_bits_are_planned_whole(cut):
    options = {"dtype": torch.float32, "rank": 4, "checkpointing": False, "bitsandbytes": True}
    model = qwen.make_model("tiny", "cpu", layers=3, **options)
    names = [f"0:base_model.model.model.layers.{i}" for i in range(3)]
    config = fxrl.Config(
        min_saved_bytes=0,
        on_miss="error",
        compile_regions=False,
        passes=("fuse-linear-logprob", "offload", "tile-tokens"),
    )
    step = fxrl.optimize(model, kl_loss, config, plan=Plan(dict.fromkeys(names, cut)))
    batch = {"ids": torch.randint(0, 1024, (2, 12)), "adv": torch.randn(2, 11)}
    wanted = outcome(lambda given: kl_loss(model, given), model, batch)
    got = outcome(step, model, batch)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # fp32, in other orders
    assert [step.plan.choices[name] for name in names] == [cut] * 3
    told = [remark.reason for remark in step.report.of_kind("applied")]
    assert told.count("layers.0 to layers.2 in 3 calls of 1 compiled body") == 2
