"""Rollouts without vLLM: tokens a second of fxrl's embedded engine beside Hugging Face generate.

The same model, prompts, temperature and number of tokens (EOS ends nothing); the same padding on
the left. ``TorchEngine`` also returns the log-probability of each sampled token; ``generate`` is
asked for none. Times are medians of whole calls, prefill included.

    fxrl bench generate
    fxrl bench generate --model /models/smollm2 --prompts 8 --samples 8 --tokens 256
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.lib import common

COLUMNS = ("variant", "model", "sequences", "tokens", "s", "s_min", "tokens_per_s", "error")
_PROMPT = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if fxrl's engine failed."""
    args = _arguments(argv)
    from fxrl.models import load_model

    model, tokenizer = load_model(args.model, args.dtype, args.device)
    gen = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    lengths = torch.randint(_PROMPT // 2, _PROMPT + 1, (args.prompts,), generator=gen).tolist()
    prompts = [torch.randint(0, vocab, (n,), generator=gen).tolist() for n in lengths]
    notes = [
        f"{args.prompts} prompts of {_PROMPT // 2} to {_PROMPT} random tokens, {args.samples} "
        f"completions each, temperature 1, {args.dtype} on {args.device}",
    ]
    results = common.results(args, "Rollouts without vLLM", COLUMNS, notes)
    count = args.prompts * args.samples
    same = {"model": args.model, "sequences": count, "tokens": args.tokens}
    for name, make in _VARIANTS.items():
        with results.row(variant=name, **same) as row:
            work = make(model, tokenizer, prompts, args)
            made = work()
            if made != count * args.tokens:
                raise RuntimeError(f"made {made} tokens, not {count * args.tokens}")
            fastest, ms, _ = common.spread_ms(work, args.device, warmup=0, repeats=args.repeats)
            row |= {"s": ms / 1e3, "s_min": fastest / 1e3}
            row |= {"tokens_per_s": count * args.tokens / ms * 1e3}
    results.finish()
    return int(results.failed("fxrl"))


def _fxrl(model: Any, tokenizer: Any, prompts: list[list[int]], args: Any) -> Callable[[], int]:
    from fxrl.engines.engine import SamplingParams
    from fxrl.engines.torch.engine import TorchEngine

    engine = TorchEngine.from_tokenizer(model, tokenizer)
    params = SamplingParams(n=args.samples, max_tokens=args.tokens, ignore_eos=True)
    return lambda: sum(
        len(sample.token_ids) for group in engine.generate(prompts, params) for sample in group
    )


def _hugging_face(
    model: Any, tokenizer: Any, prompts: list[list[int]], args: Any
) -> Callable[[], int]:
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    batch = {name: padded[name].to(args.device) for name in ("input_ids", "attention_mask")}

    def work() -> int:
        made = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=args.samples,
            min_new_tokens=args.tokens,
            max_new_tokens=args.tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        return made[:, batch["input_ids"].shape[1] :].numel()

    return work


_VARIANTS = {"fxrl TorchEngine": _fxrl, "Hugging Face generate": _hugging_face}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model", default="tiny:qwen3", help="id, folder or tiny:KIND (tiny:qwen3)"
    )
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    count = common.positive
    parser.add_argument("--prompts", type=count, default=4)
    parser.add_argument("--samples", type=count, default=4, help="completions of each prompt")
    parser.add_argument("--tokens", type=count, default=64, help="of each completion")
    parser.add_argument("--repeats", type=count, default=3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
