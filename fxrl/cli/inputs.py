"""From the command line's words to a model, a loss function, a ``Config`` and a random batch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxrl.config import Config, parse_bytes
from fxrl.errors import ConfigError, PlanError, did_you_mean, reason_of
from fxrl.ir.plan import Plan
from fxrl.ir.remark import format_bytes
from fxrl.losses import by_name, completion_logits, token_stats
from fxrl.losses.own_code import importable_from, load_function
from fxrl.models import (
    ModelError,
    build_from_config,
    fetch_smollm2,
    load_model,
    lora,
    offload_embeddings,
    tiny_config,
)
from fxrl.models.hf import why_no_hub
from fxrl.models.load import Source, find_file, read_config, resolve
from fxrl.models.quantized import Asked, Quantization, settled, skeleton_in_bits
from fxrl.models.sharded import shard_skeleton
from fxrl.models.tiny import parse_tiny
from fxrl.ops.dequantized import Format
from fxrl.planner.target import TARGETS, Target
from fxrl.rl.config.binding import Text, bind, merge_override, parse_override


def optimize_config(pairs: Iterable[str]) -> Config:
    """``["gpu_memory=75GiB", "chunk_tokens=8"]`` as a ``Config``."""
    problems: list[str] = []
    found = bind(Config, _table(pairs, problems), problems)
    if found is None or problems:
        raise ConfigError("--config: " + "; ".join(problems))
    return found


def loss_function(name: str, pairs: Iterable[str]) -> Callable[..., Any]:
    """``fxrl.losses.by_name``, with modules of the working folder in reach."""
    problems: list[str] = []
    values = {k: v.value if isinstance(v, Text) else v for k, v in _table(pairs, problems).items()}
    if problems:
        raise ConfigError("--loss-args: " + "; ".join(problems))
    with importable_from(Path.cwd()):
        return by_name(name, **values)


def _table(pairs: Iterable[str], problems: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for pair in pairs:
        if (parsed := parse_override(pair, problems)) is not None:
            merge_override(table, *parsed)
    return table


def empty_model(args: argparse.Namespace, *, as_trained: bool = False) -> nn.Module:
    """The model without weights (on ``meta``), in training mode, with LoRA if asked for;
    ``as_trained`` as ``fxrl train`` runs it, an adapter on bf16 weights under autocast."""
    config = _hf_config(args.model)
    bits, model = _quantization(args), build_from_config(config, args.dtype, "meta")
    how = settled(args.model, config, bits)
    if how is not None:
        place = Path(args.model).expanduser()
        model = skeleton_in_bits(model, place if place.is_dir() else None, how)
    model = _trainable(model, args)
    if getattr(args, "sharded", False):
        model = shard_skeleton(model, _sharing(args))
    for module in model.modules() if as_trained and args.lora and args.dtype == "bf16" else ():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = _Autocast
    return model


class _Autocast(nn.Linear):
    """What a linear layer does under autocast, of which ``meta`` tensors know nothing."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is None, "adapters have none"
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16())


def real_model(args: argparse.Namespace, on_progress: Callable[[str], None]) -> nn.Module:
    """The model with its weights on ``--device``, likewise."""
    device = check_device(args.device)
    bits = _quantization(args)
    model, _ = load_model(
        args.model, args.dtype, device, seed=args.seed, quantization=bits, on_progress=on_progress
    )
    return _trainable(model, args)


def _hf_config(model_id: str) -> Any:
    """The model's configuration alone; downloads no weights."""
    source = resolve(model_id)
    if source is Source.TINY:
        return tiny_config(*parse_tiny(model_id))
    if source is Source.CONFIG:
        return read_config(model_id)
    if source is Source.SMOLLM2:
        model_id = str(fetch_smollm2())
    if source is not Source.HUB:
        return read_config(Path(model_id).expanduser() / "config.json")
    no_hub = why_no_hub()
    try:
        file = find_file(model_id, "config.json", local=no_hub is not None)
    except (OSError, ValueError) as error:
        file, no_hub = None, no_hub or reason_of(error)
    if file is None:
        why = f"no such folder, and {no_hub}" if no_hub else "the repository has no config.json"
        raise ModelError(
            f"model {model_id!r}: {why}; its config.json is enough here: save it and give its path"
        )
    return read_config(file)


def check_device(name: str) -> torch.device:
    """``"cpu"``, ``"cuda"``, ``"cuda:1"`` as a device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device; use cpu or cuda") from error
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: there are {count} of them here; see `fxrl doctor`")
    return device


def _quantization(args: argparse.Namespace) -> Asked | None:
    """``--quantization``, which is of frozen weights."""
    asked: Format | None = args.quantization
    if args.quantize_embeddings and asked is None:
        raise ConfigError("--quantize-embeddings needs a format: add --quantization fp8 or nf4")
    if asked is not None and not args.lora:
        raise ConfigError(
            f"--quantization {asked} is of frozen weights, and without an adapter all are trained; "
            "add --lora RANK"
        )
    if asked is None or not args.quantize_embeddings:
        return asked
    return Quantization(asked, embeddings=True, head=True)


def sharing_gpus(args: argparse.Namespace) -> int:
    """How many of ``--gpus`` share a sequence: ``context_parallel`` of ``--config``."""
    sharing = optimize_config(args.config).context_parallel
    if args.gpus % sharing:
        raise ConfigError(
            f"context_parallel={sharing} lets {sharing} GPUs share each sequence, which does not "
            f"divide --gpus {args.gpus}; give a multiple of {sharing}"
        )
    return sharing


def _sharing(args: argparse.Namespace) -> int:
    """Ranks of which each has a part of the frozen weights."""
    if not args.lora:
        raise ConfigError(
            "--sharded is of frozen weights, and without an adapter all are trained; add "
            "--lora RANK"
        )
    if args.gpus == 1:
        raise ConfigError("--sharded shares weights out over GPUs, and there is one; add --gpus N")
    if args.rollout:
        raise ConfigError(
            f"--rollout {args.rollout}: vLLM needs the weights whole on each GPU; leave it or "
            "--sharded out"
        )
    gpus: int = args.gpus
    return gpus


def _trainable(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    model = lora(model, r=args.lora, seed=0) if args.lora else model
    if args.offload_embeddings:
        if getattr(args, "rollout", None):
            raise ConfigError(
                f"--rollout {args.rollout}: the embeddings are vLLM's, and lie on the GPU; leave "
                "it or --offload-embeddings out"
            )
        model = offload_embeddings(model)
    return model.train()


def planned_target(args: argparse.Namespace, held: int) -> Target:
    """``--target`` with the memory that the command line names, less ``held`` bytes that others
    hold throughout."""
    if (name := args.target.lower()) not in TARGETS:
        raise ConfigError(f"--target {args.target!r} is unknown{did_you_mean(name, TARGETS)}")
    found = TARGETS[name]
    named = [args.gpu_memory, optimize_config(args.config).gpu_memory, found.gpu_bytes]
    size = next(size for size in named if size is not None)
    left = parse_bytes(size, name="gpu_memory") - held
    if left <= 0:
        raise ConfigError(f"gpu_memory={size}: a sleeping engine holds {format_bytes(held)} of it")
    return replace(found, gpu_bytes=left)


def two_plans(files: list[str]) -> tuple[Plan, Plan]:
    """The plans in two files that ``fxrl plan --json`` wrote."""
    if len(files) != 2:
        raise ConfigError(f"fxrl plan diff takes two files, and got {len(files)}")
    first, second = map(_saved_plan, files)
    return first, second


def _saved_plan(file: str) -> Plan:
    try:
        return Plan.from_json(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"fxrl plan diff: {file} cannot be read: {why}") from error
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error


LOGP_STD = 0.1  # of old and reference log-probs around the policy's: some ratios get clipped


def make_batch(
    args: argparse.Namespace,
    model: nn.Module,
    device: str = "cpu",
    *,
    on_policy: bool = False,
    as_trained: bool = False,
) -> Any:
    """A random batch with every key that ``fxrl.losses`` reads (see ``fxrl/losses/batch.py``).

    Prompts are padded on the left and completions end early, by random amounts, so masks matter.

    Args:
        args: ``batch``, ``tokens``, ``completion``, ``make_batch``, perhaps ``seed``.
        model: gives the vocabulary, and with ``on_policy`` the log-probabilities.
        on_policy: let ``old_logps`` and ``ref_logps`` lie around the model's own, which takes an
            eager forward. The first sequence then has ratio 1, so that no loss, however tightly it
            clips, is without a gradient. Otherwise they lie around -log V, a random model's mean.
        as_trained: as ``fxrl train`` makes batches: padding behind completions, none elsewhere.
    """
    size, length = args.batch, args.tokens
    completion = args.completion or max(1, length // 2)
    if completion >= length:
        raise ConfigError(
            f"--completion {completion} must be below --tokens {length}: a completion has a prompt"
        )
    vocab = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if args.make_batch:
        with importable_from(Path.cwd()):
            made = load_function(args.make_batch)(size, length, completion, vocab)
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, made)
    random = torch.Generator().manual_seed(getattr(args, "seed", 0))
    pad = torch.randint(0, max(1, (length - completion) // 2), (size, 1), generator=random)
    ends = torch.randint(max(1, completion // 2), completion + 1, (size, 1), generator=random)
    place = torch.arange(length)
    real = place < length - completion + ends if as_trained else place >= pad
    batch = {
        "input_ids": torch.randint(0, vocab, (size, length), generator=random),
        "attention_mask": real.long(),
        "completion_mask": (torch.arange(completion) < ends).long(),
        "advantages": torch.randn(size, generator=random),
        "desirable": torch.arange(size) % 2,
        "kl": torch.tensor(0.1),
    }
    noise = LOGP_STD * torch.randn(2, size, completion, generator=random)
    noise[0, 0] = 0.0
    batch = {name: value.to(device) for name, value in batch.items()}
    around = _logps(model, batch, completion) if on_policy else torch.tensor(-math.log(vocab))
    old, ref = around.to(device) + noise.to(device)
    said = {"right_padded": True} if as_trained else {}
    return batch | {"old_logps": old, "ref_logps": ref} | said


def _logps(model: nn.Module, batch: dict[str, Tensor], completion: int) -> Tensor:
    """The model's log-probabilities of the completions, [B, C], eager and without gradient."""
    with torch.no_grad():
        logits, _ = completion_logits(model, batch, completion)
        return token_stats(logits, batch["input_ids"][:, -completion:]).logps.float()
