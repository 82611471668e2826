"""``generate`` with a limit for each prompt: what is drawn up to there is the same."""

import pytest

from fxrl.engines import SamplingParams
from fxrl.engines.engine import PromptError
from fxrl.engines.torch.engine import TorchEngine, plan_microbatches
from fxrl.models import load_model

PROMPTS = [[5, 6, 7], [9] * 6, [11, 12]]
PARAMS = SamplingParams(n=2, max_tokens=9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return load_model("tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1", "float64", "cpu")


@pytest.mark.parametrize("only", [None, [0, 2]])
@pytest.mark.parametrize("batch", [65536, 15])
def test_a_limit_cuts_what_is_drawn_and_changes_nothing_else(model, only, batch):
    def drawn(**limits):
        engine = TorchEngine.from_tokenizer(*model, max_batch_tokens=batch)
        return engine.generate(PROMPTS, PARAMS, only=only, **limits)

    limits = [1, 9, 4]
    for whole, cut, limit in zip(drawn(), drawn(max_tokens=limits), limits, strict=True):
        for one, other in zip(whole, cut, strict=True):
            assert other.token_ids == one.token_ids[:limit]
            assert other.logprobs == pytest.approx(one.logprobs[:limit], abs=1e-12)
            assert other.finish_reason == "length"


def test_a_prompt_that_fits_by_its_own_limit_alone():
    """40 + 2 fit into 45, and 3 + 40; together they would need 40 + 40."""
    plan = plan_microbatches([40, 3], 2, [2, 40], 45, only=range(2), pad=True)
    assert [[(g.prompt, g.count) for g in batch] for batch in plan] == [[(0, 1)]] * 2 + [
        [(1, 1)]
    ] * 2
    with pytest.raises(PromptError, match="prompt 0 has 40 tokens and with max_tokens=6"):
        plan_microbatches([40, 3], 2, [6, 40], 45, only=range(2), pad=True)


@pytest.mark.parametrize("limits", [[0, 9, 9], [9, 9, 10], [9]])
def test_wrong_limits(model, limits):
    engine = TorchEngine.from_tokenizer(*model)
    with pytest.raises(PromptError, match="give each a number from 1"):
        engine.generate(PROMPTS, PARAMS, max_tokens=limits)
