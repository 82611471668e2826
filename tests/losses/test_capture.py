"""torch.compile captures every loss in one graph, whatever its settings, for all shapes."""

import pytest
import torch
from loss_models import LANGUAGE, TokenValues, ToyLM, loss_of, random_batch

from fxrl import losses
from fxrl.capture.dynamic import mark_batch
from tests.rows import rows

EVERYTHING = {
    "beta": 0.1,
    "entropy_coef": 0.01,
    "temperature": 0.7,
    "off_policy_mask_threshold": 0.1,
    "top_entropy_quantile": 0.8,
}
CASES = [(name, {}) for name in LANGUAGE]
CASES += [("grpo", EVERYTHING), ("ppo", EVERYTHING | {"delta": 3.0})]
CASES += [("grpo", {"beta": 0.1, "kl_estimator": k}) for k in ("k1", "k2")]
CASES += [("dapo", {"vllm_importance_sampling_mode": "token_truncate"})]
CASES += [("gspo", {"importance_sampling_level": "sequence_token"})]
SHAPES = ((4, 3, 5), (6, 8, 9), (8, 4, 7))  # sequences, prompt, completion


ON_POLICY = [("grpo", {}), ("grpo", EVERYTHING), ("ppo", {})]
ROWS = [(*case, False) for case in CASES] + [(*case, True) for case in ON_POLICY]
#: Of these each line is another one's, or they are captured together: the GRPO family is, where
#: ranks share sequences (tests/compile/test_context_parallel.py).
SELDOM = [("grpo", {}, True), ("grpo", EVERYTHING, False)]
SELDOM += [("grpo", {"beta": 0.1, "kl_estimator": "k1"}, False)]
SELDOM += [(name, {}, False) for name in ("bnpo", "cispo", "dapo", "dr_grpo", "gspo", "luspo")]
SELDOM += [(name, {}, False) for name in ("ppo", "sapo")]


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_setting_that_was_another_one_before(name):
    """Dynamo makes a symbol of such a float, which has no text."""
    torch._dynamo.reset()
    model = ToyLM().double()
    step = torch.compile(lambda loss, batch: loss(model, batch), fullgraph=True, backend="eager")
    for beta in (0.1, 0.2, 0.3):
        batch, _ = random_batch(1, 2, 3, 4)
        loss_fn = losses.by_name(name, beta=beta)
        torch.testing.assert_close(step(loss_fn, batch)[0], loss_fn(model, batch)[0])


@pytest.mark.parametrize("row", rows(ROWS, SELDOM), ids=str)
def test_one_graph_without_breaks(row):
    name, kw, on_policy = row
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = ToyLM(value_head=True).double()
    if name == "ppo" and on_policy:
        model.value_model = TokenValues().double()
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm.graph)
        return gm.forward

    loss_fn = loss_of(name, **kw)
    # Settings are constants of the graph, not inputs: specialize_float, as fxrl captures.
    with torch._dynamo.config.patch(specialize_float=True):
        step = torch.compile(lambda batch: loss_fn(model, batch), fullgraph=True, backend=backend)
        for batch_size, prompt, completion in SHAPES:
            batch, _ = random_batch(1, batch_size, prompt, completion)
            if on_policy:
                del batch["old_logps"], batch["rollout_logps"]
            batch["num_items_in_batch"] = torch.tensor(11)
            mark_batch(batch)  # as a step does
            loss, metrics = step(batch)
            expected, expected_metrics = loss_fn(model, batch)
            torch.testing.assert_close(loss, expected)
            assert metrics.keys() == expected_metrics.keys()
            torch.testing.assert_close(metrics, expected_metrics)
            loss.backward()
    assert len(graphs) == 1
    targets = {str(node.target) for node in graphs[0].nodes}
    assert not targets & {"item", "tolist", "nonzero"}
