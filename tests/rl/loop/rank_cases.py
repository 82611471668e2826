"""Groups of ranks, each a few processes that are forked when all is imported; says JSON of each.

``python rank_cases.py FOLDER`` is run once by ``test_ranks.py``, which judges what it says. A group
is what torchrun makes: processes with ``RANK``, ``WORLD_SIZE`` and a place to meet.
"""

import copy
import functools
import json
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from fxrl import Config, distributed, optimize
from fxrl.distributed import RankError, Ranks, joined
from fxrl.losses import FACTORIES, loss_info
from fxrl.rl import train, trainer  # noqa: F401  # imported before the fork
from fxrl.rl.config.named import build_loss
from fxrl.rl.config.tables import LossConfig
from fxrl.rl.loop import gradients
from fxrl.rl.loop.updater import Updater

LOSSES = sorted(FACTORIES.keys() - {"ppo", "dpo", "kto", "sft", "distill", "reward_model"})
LAYOUTS = ("right", "left", "packed")
TINY = "tiny:llama:layers=1,hidden=16,heads=2,kv_heads=1"


def group(size, work, *arguments):
    """Runs ``work(*arguments)`` on ``size`` ranks.

    Returns:
        Each one's exit code (negative: the signal that killed it; after a minute that is ours), and
        what it wrote to stdout and stderr.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forking = multiprocessing.get_context("fork")
    processes = [
        forking.Process(target=_rank, args=(rank, size, port, work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    said = [Path(f"said-{rank}").read_text() for rank in range(size)]
    return {"codes": [process.exitcode for process in processes], "said": said}


def _rank(rank, size, port, work, arguments):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    file = os.open(f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        code = work(*arguments)
    except Exception:  # pytest's own stderr would take it along
        os.write(file, traceback.format_exc().encode())
        code = 1
    sys.exit(code)


# -- updates: every loss and layout, whatever is dealt to whom


def rows_of(layout, seed=0):
    """Seven rows off-policy: [1, T] tensors each, by the keys of ``fxrl.losses.batch``."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [(3, 1), (2, 6), (5, 2), (1, 5), (4, 3), (2, 3), (3, 4)]
    width = max(map(sum, lengths))
    found = []
    for prompt, drawn in lengths:
        ids = torch.randint(3, 60, (1, width), generator=draw)
        place = torch.arange(width)[None]
        pad = width - prompt - drawn if layout == "left" else 0
        sampled = (place >= pad + prompt) & (place < pad + prompt + drawn)
        advantages = torch.randn(1, generator=draw, dtype=torch.float64)
        extra = {"attention_mask": ((place >= pad) & (place < pad + prompt + drawn)).long()}
        if layout == "right":
            extra["right_padded"] = True
        if layout == "packed":  # what is left of the row is another sequence
            start = prompt + drawn
            sampled |= place >= start + 1
            advantages = torch.where(place < start, advantages, -advantages)[:, 1:]
            extra = {"position_ids": torch.where(place < start, place, place - start)}
        logps = -1.0 - torch.rand(1, width - 1, generator=draw, dtype=torch.float64)
        found.append(
            {
                "input_ids": ids,
                "completion_mask": sampled[:, 1:].double(),
                "advantages": advantages,
                "old_logps": logps - 2.0,
                "rollout_logps": logps,
                "ref_logps": logps + 0.1,
                **extra,
            }
        )
    num_items = sum(row["completion_mask"].sum() for row in found)
    return [row | {"num_items_in_batch": num_items} for row in found]


def joined_rows(rows):
    """One batch of them."""
    first, *_ = rows
    shared = ("right_padded", "num_items_in_batch")
    return {k: first[k] if k in shared else torch.cat([row[k] for row in rows]) for k in first}


class Output(NamedTuple):
    logits: torch.Tensor


class Means(torch.nn.Module):
    """A small causal model in float64: a token sees the mean of what is before it in its sequence;
    one weight is used by no loss."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 8, dtype=torch.float64)
        self.lm_head = torch.nn.Linear(8, 64, dtype=torch.float64)
        self.unused = torch.nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, input_ids, attention_mask=None, position_ids=None, logits_to_keep=0, **_):
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        place = seen.cumsum(1) if position_ids is None else position_ids + 1
        order = torch.arange(input_ids.shape[1])
        near = (order <= order[:, None]) & (order > order[:, None] - place[..., None])
        weights = near.double() * seen[:, None] / place.clamp(min=1)[..., None]
        hidden = torch.tanh(weights @ self.table(input_ids))
        return Output(self.lm_head(hidden[:, -logits_to_keep:]))


DEALT = {2: [[[1, 3], [4]], [[0, 2, 5, 6]]], 4: [[[1], [3, 4]], [[0, 2]], [], [[5, 6]]]}
"""Rank by rank, micro-batch by micro-batch; of four ranks one has nothing."""


def updater_of(model, loss, ranks, *, how=""):
    options = {} if loss in ("reinforce", "rloo") else {"beta": 0.1}
    loss_fn = build_loss(loss, options, temperature=0.9, max_tokens=6)
    step = lambda batch: loss_fn(model, batch)  # noqa: E731
    if how == "optimized":
        config = Config(compile_regions=False, min_saved_bytes=0, on_miss="error")
        step = optimize(model, loss_fn, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    kind = LossConfig(loss)
    told = {"info": loss_info(loss_fn), "ranks": ranks}
    told["context_parallel"] = 2 if how == "shared" else 1
    return Updater(step, parameters, optimizer, schedule, kind, 1.0, 2, Path(), **told)


def far(ours, theirs):
    """The largest difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def updates():
    """Three optimizer steps of this group, of one rank with the same micro-batches, and of one
    with a single batch of everything; how far they are apart goes into ``updates-SIZE.json``."""
    torch.manual_seed(0)
    model, found = Means(), {}
    with joined() as ranks:
        found["overlapped"] = overlapped(ranks)
        # Each loss in one layout of four ranks, and in the next one of two.
        turn = 1 if ranks.size == 2 else 0
        cases = [(loss, LAYOUTS[(i + turn) % 3], "") for i, loss in enumerate(LOSSES)]
        if ranks.size == 2:
            cases += [("dapo", "right", "optimized")]
        else:  # two ranks each have the same micro-batches, as ranks that share sequences do
            cases += [(loss, "right", "shared") for loss in ("gspo", "dapo")]
        for loss, layout, how in cases:
            rows = rows_of(layout)
            plan = DEALT[2 if how == "shared" else ranks.size]
            cut = [[joined_rows([rows[i] for i in one]) for one in each] for each in plan]
            alike = [batch for each in cut for batch in each]
            own = cut[ranks.rank * len(plan) // ranks.size]
            ways = [(ranks, own), (Ranks(), alike), (Ranks(), [joined_rows(rows)])]
            results = []
            for who, batches in ways if ranks.primary else ways[:1]:
                copied = copy.deepcopy(model)
                # What it is compared with is eager and alone.
                updater = updater_of(copied, loss, who, how=how if who is ranks else "")
                updater.backward(batches)
                grads = [p.grad.clone() for p in updater.parameters if p.grad is not None]
                metrics = [updater.update(batches, n) for n in range(3)]
                results.append((grads, metrics, updater.parameters))
            if ranks.primary:
                ours, same, one = results
                found[f"{loss} {layout} {how}".strip()] = {
                    "gradient": far(ours[0], one[0]),
                    "largest": max(float(grad.abs().max()) for grad in ours[0]),
                    "weights": far(ours[2], one[2]),
                    "metrics": [ours[1], same[1], one[1]],
                }
        if ranks.primary:
            Path(f"updates-{ranks.size}.json").write_text(json.dumps(found))


class Twice(torch.nn.Module):
    """Layers of which the first is unused and the second runs twice; checkpointed, its gradients
    come in two backwards of their own, of which each is accumulated."""

    def __init__(self, *, checkpointed):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=float) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in (*self.layers[1:], self.layers[1]):
            run = functools.partial(checkpoint, layer, use_reentrant=True)
            x = (run if self.checkpointed else layer)(x).tanh()
        return x.sum()


def overlapped(ranks):
    """Of two models: how many buckets the backward began, whether one was stale, and how far their
    sums are from those of one rank; the last rank of four runs none."""
    found = {}
    gradients.EARLY_BYTES = 160  # a layer's weight and bias
    for name in ("layers", "checkpointed"):
        torch.manual_seed(1)
        model = Twice(checkpointed=name == "checkpointed")
        inputs = torch.randn(3, 2, 3, 4, dtype=float).requires_grad_()
        running = range(min(3, ranks.size))
        parameters = list(model.parameters())
        summed, begun, stale = gradients.GradientSum(parameters, ranks), 0, False
        if ranks.rank in running:
            model(inputs[ranks.rank, 0]).backward()
            with summed.early():
                loss = model(inputs[ranks.rank, 1])
                loss.backward()
                begun = summed._begun
                stale = any(bucket.stale for bucket in summed._buckets)
        summed.finish()
        sums = [p.grad for p in parameters]
        model.zero_grad()
        for rank in running:
            for part in (0, 1):
                model(inputs[rank, part]).backward()
        assert sums[0] is parameters[0].grad is None
        one = [p.grad for p in parameters[2:]]
        found[name] = {"begun": begun, "stale": stale, "apart": far(sums[2:], one)}
    gradients.EARLY_BYTES = 25 * 2**20
    return found


def late():
    """Rank 1 never comes to a meeting, and hears of it."""
    try:
        with joined() as ranks:
            distributed.PATIENCE_S = 0.0
            if ranks.primary:
                ranks.gather("here")
            while True:
                ranks._lobby.look()
    except RankError as error:
        print(error)


# -- whole runs

CONFIG = f"""
steps = 3
save_every = 2
prompts_per_step = 2
tensorboard = false
optimize = false
disk_wait_s = 0
micro_batch_tokens = 40

[model]
id = "{TINY}"
device = "cpu"
dtype = "float64"
lora = {{ r = 2, alpha = 8 }}

[data]
path = "questions.jsonl"

[eval]
size = 3

[reward]
functions = ["length", "toy:even", "toy:ranked"]
params = {{ length = {{ target = 4 }} }}

[loss]
name = "dapo"
beta = 0.05

[sampling]
num_generations = 3
max_tokens = 6

[optim]
lr = 1e-2
"""

TOY = """
import os, signal
import torch
def even(completions, completion_ids, trainer_state, **columns):
    how, step = os.environ.get("HURT", "") + " " + os.environ["RANK"], trainer_state.global_step
    if (how, step) in (("kill 1 1", 2), ("kill 0 0", 2)):
        os.kill(os.getpid(), signal.SIGKILL)
    if (how, step) == ("interrupt 1", 1):
        os.kill(os.getpid(), signal.SIGINT)
    if (how, step) == ("raise 1", 2):
        raise ValueError("no such judge")
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]

def ranked(completions, completion_ids, **columns):
    order = sorted(range(len(completion_ids)), key=lambda i: completion_ids[i])
    return [order.index(i) / len(order) for i in range(len(order))]

def flat(completions, **columns):
    return [0.0] * len(completions)

def tight(beta=0.0):
    def loss(model, batch):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return model(input_ids=batch["input_ids"]).logits.square().mean()

    return loss
"""


def run(run_dir, *overrides, resume=None):
    """``fxrl train``, with rewards by group alone where they may hurt a single rank."""
    return train.main("run.toml", [f"run_dir={run_dir}", *overrides], resume=resume)


def resumed(run_dir, *overrides):
    return run(run_dir, *overrides, resume="")


def hurt(how, run_dir, *overrides):
    """The same, in a group to which something happens."""
    os.environ["HURT"] = how
    if how == "data" and os.environ["RANK"] == "1":
        overrides = (*overrides, "data.path=others.jsonl")
    early = ('reward.functions=["toy:even"]', "reward.params={}", "reward.per_group=true")
    return run(run_dir, *early, *overrides)


def result(run_dir):
    """Metrics but for times, and how the trained weights are to be found."""
    lines = [json.loads(t) for t in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    own = ("time", "per_s", "ranks/", "engine/")
    kept = [{k: v for k, v in line.items() if not any(o in k for o in own)} for line in lines]
    files = Path(run_dir, "final").glob("*.safetensors")
    return kept, {name: value for file in files for name, value in load_file(file).items()}


def compare(first, second):
    (lines, weights), (others, theirs) = result(first), result(second)
    return {
        "metrics": [lines, others],
        "weights": far(weights.values(), [theirs[name] for name in weights]),
    }


def main(folder):
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    Path("run.toml").write_text(CONFIG)
    Path("toy.py").write_text(TOY)
    rows = [f'{{"prompt": "{"so " * (i % 4)}count to {i}", "answer": "{i}"}}\n' for i in range(12)]
    Path("questions.jsonl").write_text("".join(rows))
    Path("others.jsonl").write_text("".join(reversed(rows)))
    # What is imported late is imported here; but autograd's threads would not live through a fork.
    os.environ["RANK"] = "0"
    idle = ("reward.params={}", 'reward.functions=["toy:flat"]', 'dynamic_sampling="drop"')
    train.main("run.toml", ["run_dir=warm", *idle, "steps=1"])
    found = {"updates": {size: group(size, updates) for size in (2, 4)}}
    full = ("model.lora=none", "num_iterations=2", "steps=2")
    groups = found["runs"] = {
        "one": group(1, run, "one"),
        "two": group(2, run, "several", "steps=2"),
        "four": group(4, resumed, "several"),
        "full one": group(1, run, "full-one", *full),
        "full two": group(2, run, "full-several", *full[:2], "steps=1"),
        "full four": group(4, resumed, "full-several", *full),
    }
    short = ("steps=1", "eval.size=0", "loss.beta=0.0")
    critic = ("steps=2", "loss.name=ppo", "loss.kl_coef=0.1", "loss.lam=0.9", "num_iterations=2")
    critic += ("prompts_per_step=1",)  # one rank draws all, and of four one trains on nothing
    groups["critic one"] = group(1, run, "critic-one", *critic)
    groups["critic four"] = group(4, run, "critic", *critic)
    shared = ("optimize=true", "fxrl.context_parallel=2", "fxrl.compile_regions=false")
    groups["pairs one"] = group(1, run, "pairs-one", *short)
    groups["pairs two"] = group(2, run, "pairs", *short, *shared, "fxrl.min_saved_bytes=0")
    groups["of three"] = group(2, run, "three", *short, shared[0], "fxrl.context_parallel=3")
    found["lora"] = compare("several", "one")
    found["pairs"] = compare("pairs", "pairs-one")
    found["critic"] = compare("critic", "critic-one")
    found["full"] = compare("full-several", "full-one")
    tight = ("loss.name=toy:tight", shared[0], "fxrl.context_parallel=2", *shared[2:])
    groups["shared memory"] = group(2, hurt, "memory", "shared-memory", *short, *tight)
    groups["late"] = group(2, late)
    for how in ("raise", "memory", "kill 1", "kill 0", "interrupt", "data"):
        extra = ("loss.name=toy:tight",) if how == "memory" else ()
        groups[how] = group(2, hurt, how, how.replace(" ", "-"), *extra)
    for how in ("raise", "kill 1"):  # each rank has a part of the optimizer
        name = f"full {how}"
        groups[name] = group(2, hurt, how, name.replace(" ", "-"), "model.lora=none")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
