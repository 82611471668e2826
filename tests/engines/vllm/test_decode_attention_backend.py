"""The backend over doubles of vLLM's classes: which calls run ``decode``, and with what."""

import gc
import itertools
import types
import weakref

import pytest
import torch

from fxrl.engines.engine import EngineError
from fxrl.engines.vllm.decode_attention import make_backend


class Impl:
    alibi_slopes, sinks, attn_type, kv_cache_dtype = None, None, "decoder", "auto"
    num_heads, num_kv_heads, head_size, scale, logits_soft_cap = 4, 2, 8, 0.25, 0
    batch_invariant_enabled, sliding_window = False, (-1, -1)

    def __init__(self, **changes):
        self.__dict__ |= changes

    def forward(self, *args):
        return "theirs"


class Builder:
    _cudagraph_support = "always"

    def build(self, prefix, common, fast_build=False):
        return fast_build


class Backend:
    @staticmethod
    def get_kv_cache_shape(blocks, size, heads, dim):
        return (blocks, 2, size, heads, dim)

    @classmethod
    def supports_batch_invariance(cls):
        return True


class Scratch(list):
    """A list that can be referred to weakly."""


def backend(calls=None, max_rows=3):
    def decode(*args, **kwargs):
        calls.append((args, kwargs))
        args[6].fill_(1.0)
        return args[6]

    classes = (Backend, Impl, Builder)
    numbers = itertools.count()

    def schedule(*args, **kwargs):
        return next(numbers), args, kwargs

    return make_backend(
        *classes, "decode graphs", decode, schedule, lambda *heads: Scratch([heads]),
        max_rows=max_rows,
    )  # fmt: skip


def step(**changes):
    made = {
        "max_query_len": 1,
        "use_cascade": False,
        "causal": True,
        "sliding_window": None,
        "seq_lens": torch.tensor([5, 0], dtype=torch.int32),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
    }
    return types.SimpleNamespace(**(made | changes))


CACHE = torch.arange(3 * 2 * 16 * 2 * 8.0).view(3, 2, 16, 2, 8)


def forward(impl, metadata, dtype=torch.bfloat16, tokens=4, scale=None, cache=CACHE, layer=None):
    query = torch.zeros(tokens, 4, 8).to(dtype)
    output = torch.zeros(tokens, 32, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    return impl.forward(layer, query, None, None, cache, metadata, output, scale)


def test_a_decode_step_runs_ours_on_vllms_buffers():
    calls = []
    impl = backend(calls).get_impl_cls()()
    metadata = step()
    out = forward(impl, metadata)
    args, options = calls[0]
    query, k_cache, v_cache, table, lens, scale, output = args
    assert query.shape == output.shape == (2, 4, 8)
    assert k_cache.data_ptr() == CACHE.data_ptr()
    assert torch.equal(v_cache, CACHE[:, 1])
    assert table is metadata.block_table
    assert lens is metadata.seq_lens
    assert scale == 0.25
    _, scheduled, same = options.pop("schedule")
    assert options == {"window": 0, "softcap": 0.0, "workspace": [(4, 2, 8)]}
    assert same == {"window": 0, "workspace": [(4, 2, 8)]}
    assert all(map(torch.equal, scheduled, (query, k_cache, table, lens)))
    assert out[:2].eq(1).all()
    assert out[2:].eq(0).all()


def test_layers_of_a_step_share_its_schedule():
    calls = []
    made = backend(calls).get_impl_cls()
    plain, same, windowed, wider = made(), made(), made(sliding_window=(99, 0)), made(num_heads=8)
    wider.num_heads = 4  # of another workspace, but the same query here
    metadata, other = step(), step()
    tables = types.SimpleNamespace(**(metadata.__dict__ | {"block_table": other.block_table}))
    for impl, given in (
        (plain, metadata), (same, metadata), (windowed, metadata), (wider, metadata),
        (plain, other),  # the next step
        (plain, metadata), (same, metadata),  # another pass over the same metadata
        (same, tables),  # what was copied with other tables
    ):  # fmt: skip
        forward(impl, given)
    assert [call[1]["schedule"][0] for call in calls] == [0, 0, 1, 2, 3, 4, 4, 5]


def test_window_and_softcap_of_the_layer_and_of_the_step():
    calls = []
    impl = backend(calls).get_impl_cls()(sliding_window=(99, 0), logits_soft_cap=30)
    forward(impl, step())
    forward(impl, step(sliding_window=(-1, -1)))
    assert [c[1]["window"] for c in calls] == [100, 0]
    assert calls[0][1]["softcap"] == 30.0


def test_the_later_layout_of_the_cache(monkeypatch):
    calls = []
    monkeypatch.delattr(Backend, "get_kv_cache_shape")
    impl = backend(calls).get_impl_cls()()
    later = torch.arange(3 * 2 * 16 * 16.0).view(3, 2, 16, 16)  # blocks, heads, tokens, 2 D
    forward(impl, step(), cache=later)
    _, k_cache, v_cache, *_ = calls[0][0]
    assert torch.equal(k_cache[1, 5, 1], later[1, 1, 5, :8])
    assert torch.equal(v_cache[1, 5, 1], later[1, 1, 5, 8:])
    with pytest.raises(EngineError, match="heads of 8"):
        forward(impl, step(), cache=later[..., :8])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_cache_in_fp8_is_read_with_the_layers_scales(dtype):
    """vLLM keeps its bytes; queries come in FP8 or not."""
    calls = []
    impl = backend(calls).get_impl_cls()(kv_cache_dtype="fp8")
    layer = types.SimpleNamespace(
        _q_scale=torch.tensor(0.5), _k_scale=torch.tensor(2.0), _v_scale=torch.tensor(3.0)
    )
    held = (CACHE / 16).to(torch.float8_e4m3fn)
    out = forward(impl, step(), dtype, cache=held.view(torch.uint8), layer=layer)
    assert out.dtype == torch.bfloat16
    (query, k_cache, v_cache, *_), options = calls[0]
    assert query.dtype == dtype
    assert torch.equal(k_cache.float(), held[:, 0].float())
    assert torch.equal(v_cache.float(), held[:, 1].float())
    assert options["k_scale"] is layer._k_scale
    assert options["v_scale"] is layer._v_scale
    assert options.get("q_scale") is (layer._q_scale if dtype.itemsize == 1 else None)
    layer._k_scale = torch.ones(2)  # of each head
    assert forward(impl, step(), dtype, cache=held, layer=layer) == "theirs"


def test_layers_of_equal_heads_share_scratch():
    made = backend([]).get_impl_cls()
    assert made().fxrl_workspace is made().fxrl_workspace
    assert made().fxrl_workspace is not made(num_heads=8).fxrl_workspace


def test_scratch_goes_with_the_last_layer_although_the_class_stays():
    made = backend([]).get_impl_cls()
    layers = [made(), made()]
    gone = weakref.ref(layers[0].fxrl_workspace)
    del layers[0]
    gc.collect()
    assert gone() is made().fxrl_workspace
    layers.clear()
    gc.collect()
    assert gone() is None
    assert made().fxrl_workspace == [(4, 2, 8)]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_query_len": 2},
        {"use_cascade": True},
        {"causal": False},
        {"mm_prefix_range_tensor": torch.zeros(1)},
        {"rswa_prefix_lens": torch.zeros(1)},
        {"sliding_window": (9, 9)},
        {"seq_lens": torch.zeros(4, dtype=torch.int32)},
    ],
    ids=str,
)
def test_other_steps_are_vllms(changes):
    assert forward(backend([]).get_impl_cls()(), step(**changes)) == "theirs"


def test_other_calls_are_vllms():
    impl = backend([]).get_impl_cls()()
    assert forward(impl, None) == "theirs"
    assert forward(impl, step(), dtype=torch.float32) == "theirs"
    assert forward(impl, step(), scale=torch.ones(1)) == "theirs"
    assert forward(impl, step(), tokens=1) == "theirs"


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": torch.ones(4)},
        {"sinks": torch.ones(4)},
        {"attn_type": "encoder_only"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"head_size": 512},
        {"batch_invariant_enabled": True},
        {"dcp_world_size": 2},
    ],
    ids=str,
)
def test_other_layers_are_vllms(changes):
    assert forward(backend([]).get_impl_cls()(**changes), step()) == "theirs"


def test_graphs_are_of_decoding_only_and_its_schedule_is_left_out():
    made = backend([])
    builder = made.get_builder_cls()()
    assert builder._cudagraph_support == "decode graphs"
    common = types.SimpleNamespace(max_query_len=1, num_reqs=3)
    assert builder.build(0, common) is True
    assert builder.build(5, common) is False
    common.num_reqs = 4  # more rows than ours takes: FlashAttention's, with its schedule
    assert builder.build(0, common) is False
    common.num_reqs, common.max_query_len = 3, 2
    assert builder.build(0, common) is False
    assert made.get_name() == "CUSTOM"
    assert made.supports_batch_invariance() is False
