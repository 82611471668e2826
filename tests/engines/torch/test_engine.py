"""TorchEngine on tiny float64 models: every number against one full, unpadded forward."""

import itertools

import pytest
import torch

from fxrl.engines.engine import Engine, EngineError, PromptError, SamplingParams
from fxrl.engines.torch.engine import TorchEngine
from fxrl.engines.torch.sampling import SamplingError
from fxrl.models import TINY_KINDS, load_model, lora

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [77, 78, 79, 80, 81]]
EOS = 2


def tiny(kind="qwen3", **engine):
    model, tokenizer = load_model(f"tiny:{kind}", "fp64")
    return TorchEngine.from_tokenizer(model, tokenizer, **engine), model


def likely_eos(model, by=3.0):
    """Makes EOS frequent, so that completions end at different steps."""
    head = model.get_output_embeddings()
    head.register_forward_hook(
        lambda module, args, logits: logits + by * (torch.arange(logits.shape[-1]) == EOS)
    )


@torch.no_grad()
def recomputed(model, completion, temperature=1.0):
    """Log-probabilities [C] of the completion's tokens by one forward over all tokens."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    logits = model(input_ids=ids).logits[0] / temperature
    num_new = len(completion.token_ids)
    return logits.log_softmax(-1)[-num_new - 1 : -1].gather(1, ids[0, -num_new:, None])[:, 0]


def atol_of(model):
    """Transformers' eager attention takes its softmax in float32, in a float64 model too."""
    return 5e-6 if model.config._attn_implementation == "eager" else 1e-9


def assert_logprobs_match(model, groups, temperature=1.0, atol=1e-9):
    for group in groups:
        for completion in group:
            found = torch.tensor(completion.logprobs, dtype=torch.float64)
            expected = recomputed(model, completion, temperature).to(torch.float64)
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_logprobs_equal_a_full_forward_for_every_architecture(kind):
    """40 + 9 tokens: past the sliding window (32) of those that have one."""
    engine, model = tiny(kind)
    likely_eos(model, 1.5)
    groups = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=40, seed=1))
    assert_logprobs_match(model, groups, atol=atol_of(model))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32}),
    ],
)
def test_models_that_take_no_positions(kind, sizes):
    """A state for each layer in place of keys and values; positions that count from the left."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=96, pad_token_id=0, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    engine = TorchEngine(model, eos_token_ids=EOS, pad_token_id=0)
    groups = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=12, seed=1))
    assert_logprobs_match(model, groups, atol=1e-5)


def marked(model, is_marked):
    """Embeddings that differ at the places of a batch's row which ``is_marked(place, length)``."""

    def hook(module, args, out):
        length = out.shape[1]
        marks = [float(is_marked(place, length)) for place in range(length)]
        return out + torch.tensor(marks, dtype=out.dtype)[:, None]

    model.get_input_embeddings().register_forward_hook(hook)


def test_a_model_that_counts_padding_gets_none(caplog):
    """It takes positions and a mask, but its first token is the batch's first."""
    engine, model = tiny()
    marked(model, lambda place, length: place == 0 and length > 1)
    for _ in range(2):
        groups = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=12, seed=1))
        assert_logprobs_match(model, groups)
    (told,) = caplog.messages
    assert "cache and padding are" in told
    assert "no batch is padded from now on" in told


def test_a_cache_that_disagrees_with_the_forward_is_told(caplog):
    engine, model = tiny()
    marked(model, lambda place, length: length == 1)
    engine.generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=12, seed=1))
    (told,) = caplog.messages
    assert "drawn with its cache are" in told
    assert "another policy than the one that is trained" in told


def test_padding_is_tried_again_on_rows_twice_as_long(monkeypatch):
    """A window may be longer than the first batch; trying every batch would cost a forward each."""
    engine, _ = tiny()
    scored, score = [], engine._lm.score
    monkeypatch.setattr(
        engine._lm, "score", lambda ids, n: scored.append(len(ids)) or score(ids, n)
    )
    for tokens in (4, 4, 12, 40):
        params = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
        engine.generate(PROMPTS, params)
    assert scored == [5 + 4, 5 + 40]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_eager_attention_survives_prompts_of_different_lengths(kind, dtype):
    """A padding token sees no other: its attention row must not turn the real ones to NaN."""
    model, tokenizer = load_model(f"tiny:{kind}", dtype)
    model.set_attn_implementation("eager")
    engine = TorchEngine.from_tokenizer(model, tokenizer)
    groups = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=40, seed=1))
    assert_logprobs_match(model, groups, atol=1e-4 if dtype == "fp32" else atol_of(model))


def test_logprobs_are_at_the_sampling_temperature_and_before_the_filters():
    engine, model = tiny()
    params = SamplingParams(n=3, temperature=0.6, top_k=9, top_p=0.8, min_p=0.02, max_tokens=12)
    assert_logprobs_match(model, engine.generate(PROMPTS, params), temperature=0.6)


def test_rows_that_end_early_are_dropped_and_change_nothing_for_the_others():
    engine, model = tiny()
    likely_eos(model)
    groups = engine.generate(PROMPTS, SamplingParams(n=8, max_tokens=30, seed=3))
    lengths = {len(c.token_ids) for group in groups for c in group}
    assert len(lengths) > 5, "the test needs completions of many lengths"
    assert_logprobs_match(model, groups)
    for completion in itertools.chain(*groups):
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
        assert EOS not in completion.token_ids[:-1]
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 30


def test_a_completion_does_not_depend_on_how_the_request_is_cut():
    engine, model = tiny()
    likely_eos(model)
    params = SamplingParams(n=5, max_tokens=20, seed=7)
    whole = engine.generate(PROMPTS, params)
    engine.max_batch_tokens = 3 * 29
    cut = engine.generate(PROMPTS, params)
    assert [[c.token_ids for c in g] for g in cut] == [[c.token_ids for c in g] for g in whole]
    assert [[c.prompt_token_ids for c in g] for g in cut] == [[tuple(p)] * 5 for p in PROMPTS]


def test_greedy_is_the_argmax_of_a_full_forward():
    engine, model = tiny("llama")
    for [completion] in engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10)):
        ids = list(completion.prompt_token_ids)
        for token in completion.token_ids:
            with torch.no_grad():
                assert model(input_ids=torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)


def test_engine_generator_moves_on_and_its_state_brings_it_back():
    engine, _ = tiny(seed=11)
    params = SamplingParams(n=2, max_tokens=8)
    first = engine.generate(PROMPTS, params)
    engine.update_weights(policy_version=4)
    state = engine.state_dict()
    second = engine.generate(PROMPTS, params)
    assert first[0][0].token_ids != second[0][0].token_ids

    other, _ = tiny(seed=99)
    other.load_state_dict(state)
    assert other.generate(PROMPTS, params) == second  # bit for bit, policy version included
    assert second[0][0].policy_version == 4


@pytest.mark.parametrize("shares", [([0, 2], [1]), ([], [2, 1, 0])])
def test_engines_share_a_call_and_draw_what_one_would(shares):
    params = SamplingParams(n=2, max_tokens=6)
    one, _ = tiny(seed=4)
    whole, after = one.generate(PROMPTS, params), one.generate(PROMPTS, params)
    for share in shares:
        engine, _ = tiny(seed=4)
        finished = []
        groups = engine.generate(
            PROMPTS, params, only=share, on_finished=lambda i, _, to=finished: to.append(i)
        )
        assert sorted(finished) == sorted(share)
        for number, group in enumerate(groups):
            ids = [one.token_ids for one in whole[number]] if number in share else []
            assert [one.token_ids for one in group] == ids
        again = engine.generate(PROMPTS, params)  # the generator is where one engine's is
        assert [[c.token_ids for c in g] for g in again] == [
            [c.token_ids for c in g] for g in after
        ]


def test_a_seeded_call_repeats_and_leaves_the_engine_generator_alone():
    engine, _ = tiny()
    params = SamplingParams(n=2, max_tokens=8, seed=5)
    before = engine.state_dict()["generator"]
    assert engine.generate(PROMPTS, params) == engine.generate(PROMPTS, params)
    assert engine.state_dict()["generator"].equal(before)
    torch_state = torch.get_rng_state()
    engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    assert torch.get_rng_state().equal(torch_state), "the global generator must not move"


def test_stop_tokens_ignore_eos_and_min_tokens():
    engine, model = tiny()
    likely_eos(model, 50.0)
    [[now]] = engine.generate([[5]], SamplingParams(max_tokens=6))
    assert (now.token_ids, now.finish_reason) == ((EOS,), "stop")
    [[on]] = engine.generate([[5]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert (on.token_ids, on.finish_reason) == ((EOS,) * 6, "length")
    [[late]] = engine.generate([[5]], SamplingParams(max_tokens=6, min_tokens=4))
    assert len(late.token_ids) == 5
    assert late.token_ids[-1] == EOS
    assert EOS not in late.token_ids[:4]
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[EOS])
    [[own]] = engine.generate([[5]], params)
    assert (own.token_ids, own.finish_reason) == ((EOS,), "stop")
    assert_logprobs_match(model, [[late]])


def test_modes_gradients_and_training_survive():
    """A module that the user holds in eval mode stays there; weights get their gradient."""
    engine, model = tiny()
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()

    def broken(module, args, logits):
        return logits * float("nan")

    handle = model.get_output_embeddings().register_forward_hook(broken)
    with pytest.raises(SamplingError):
        engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    handle.remove()
    assert [module.training for module in model.modules()] == modes


def test_generating_inside_a_callers_autocast_leaves_its_gradients_whole():
    model, tokenizer = load_model("tiny:qwen3", "fp32")
    engine = TorchEngine.from_tokenizer(model, tokenizer)
    with torch.autocast("cpu", torch.bfloat16):
        engine.generate(PROMPTS, SamplingParams(max_tokens=2))
        model(input_ids=torch.tensor([PROMPTS[0]])).logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_of_its_own():
    model, tokenizer = load_model("tiny:qwen3", "fp32")
    dtypes = []
    engine = TorchEngine.from_tokenizer(model, tokenizer, autocast=torch.bfloat16)
    model.get_output_embeddings().register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    assert set(dtypes) == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


def test_a_lora_wrapped_model_samples_from_the_adapted_weights():
    engine, base = tiny()
    wrapped = lora(base, r=4, seed=0, fp32_adapter=False)
    engine = TorchEngine(wrapped, eos_token_ids=EOS, pad_token_id=0)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    groups = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=10, seed=1))
    assert_logprobs_match(wrapped, groups)
    with wrapped.disable_adapter():
        away = recomputed(wrapped, groups[0][0]) - torch.tensor(groups[0][0].logprobs)
    assert away.abs().max() > 1e-2, "the adapter must matter for this test to say anything"


def test_gradient_checkpointing_does_not_switch_the_cache_off():
    engine, model = tiny()
    model.gradient_checkpointing_enable()
    model.train()
    assert_logprobs_match(model, engine.generate(PROMPTS, SamplingParams(max_tokens=6, seed=0)))


def test_standby_wake_and_close():
    engine, _ = tiny()
    params = SamplingParams(max_tokens=1)
    with engine.standby():
        with pytest.raises(EngineError, match=r"standby; leave its block or call wake\(\)"):
            engine.generate(PROMPTS, params)
        with pytest.raises(EngineError, match="standby"), engine.standby():
            pass
        engine.wake()
        engine.generate(PROMPTS, params)
    engine.generate(PROMPTS, params)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(PROMPTS, params)


def test_prompts_that_cannot_be_run_are_refused():
    engine, _ = tiny()
    params = SamplingParams(max_tokens=4)
    assert engine.generate([], params) == []
    for prompts, message in [
        ([[5], []], "prompt 1 is empty"),
        ([[5, 320]], "prompt 0 holds token id 320, outside the model's 320 embeddings"),
        ([[-1]], "token id -1"),
        ([[5] * 1021], "more than the model's 1024 positions; shorten"),
    ]:
        with pytest.raises(PromptError, match=message):
            engine.generate(prompts, params)
    engine.max_batch_tokens = 10
    with pytest.raises(PromptError, match="max_batch_tokens=10"):
        engine.generate([[5] * 7], params)


def test_versions_only_grow():
    engine, _ = tiny()
    assert isinstance(engine, Engine)
    engine.update_weights(policy_version=1)
    engine.update_lora(policy_version=2)
    for update in (engine.update_weights, engine.update_lora):
        with pytest.raises(EngineError, match="policy_version=1 is older"):
            update(policy_version=1)
    assert engine.policy_version == 2


def test_a_model_without_a_cache_is_refused():
    class NoCache(torch.nn.Linear):
        config = None

    with pytest.raises(EngineError, match=r"NoCache.forward takes none of past_key_values"):
        TorchEngine(NoCache(2, 2), eos_token_ids=EOS, pad_token_id=0)


def test_a_model_that_keeps_no_cache_is_refused():
    model, _ = load_model("tiny:qwen3")
    body = model.model.forward
    model.model.forward = lambda use_cache, **others: body(use_cache=False, **others)
    engine = TorchEngine(model, eos_token_ids=EOS, pad_token_id=0)
    with pytest.raises(EngineError, match="gives no cache back"):
        engine.generate(PROMPTS, SamplingParams(max_tokens=1))


def test_state_without_a_generator_is_refused():
    engine, _ = tiny()
    with pytest.raises(EngineError, match="lacks generator, policy_version"):
        engine.load_state_dict({})


def test_eos_ids_of_tokenizer_and_generation_config_both_count():
    model, tokenizer = load_model("tiny:qwen3")
    model.generation_config.eos_token_id = [7, 9]
    assert TorchEngine.from_tokenizer(model, tokenizer).eos_token_ids == {EOS, 7, 9}
