"""Cold start: seconds from the start of a process to the end of its first optimized step.

Each run is a new process. The first has empty Inductor and Triton cache folders (cold), the next
ones find what it left (warm). Region ids are content hashes, so the second process should find
every compiled body; the cache counters of Inductor say whether it did.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.lib.child import measured, tell

COLUMNS = (
    "variant",
    "device",
    "shape",
    "layers",
    "cache",
    "process_to_first_step_s",
    "imports_s",
    "model_s",
    "first_step_s",
    "capturing_s",
    "lowering_s",
    "planning_s",
    "compiling_s",
    "running_s",
    "first_step_cpu_s",
    "second_step_s",
    "cache_hits",
    "cache_misses",
    "cache_bypasses",
    "error",
)


#: What a first step imports.
_IMPORTS = """
import bench.lib.qwen, fxrl, peft, torch._inductor.compile_fx
import transformers.models.qwen3.modeling_qwen3
"""

#: What a step on a CPU is planned for.
_GPU_MEMORY = "75GiB"


def main() -> None:
    started = time.time()
    if "--child" in sys.argv:
        _child(started)
        return
    from bench.lib import common

    args = _arguments()
    notes = [
        "cold: empty TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR; warm: the folders as the cold "
        "process left them; cache_* count Inductor's FX graph cache",
        "capturing_s to running_s: parts of first_step_s, as fxrl's log tells them",
        "fxrl with min_saved_bytes=0, so that the tiny head is rewritten as well; on a CPU planned "
        f"for {_GPU_MEMORY}, and layers are compiled however small they are, as on a GPU",
        "first_step_cpu_s: of the process, where the clock of a busy machine tells little",
        f"GRPO step (forward and backward) of {args.rows} x {args.length} tokens, LoRA",
    ]
    results = common.results(args, "Cold start", COLUMNS, notes)
    with tempfile.TemporaryDirectory(prefix="fxrl-bytecode-") as bytecode:
        kept = _bytecode(bytecode)
        if kept:
            results.note("torch was installed without bytecode: it was made before all runs")
        for layers, variant in itertools.product(args.layers, args.variants):
            with tempfile.TemporaryDirectory(prefix="fxrl-cold-") as cache:
                for run in range(1 + args.warm):
                    row = {"variant": variant, "device": args.device, "shape": args.shape}
                    row |= {"layers": layers, "cache": "warm" if run else "cold"}
                    results.add(**row, **_in_process(args, variant, layers, cache, kept))
    results.finish()


def _bytecode(folder: str) -> dict[str, str]:
    """Variables for children that keep Python's bytecode in ``folder``, where it is of what a first
    step imports; none where it lies beside torch's sources.

    An image of a machine may be made without, or forbid to write any. Then each process compiles
    torch's sources anew, seconds that nobody waits for who installed torch by pip.
    """
    found = importlib.util.find_spec("torch._inductor.lowering")
    if not sys.dont_write_bytecode and found and found.cached and os.path.exists(found.cached):
        return {}
    kept = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", _IMPORTS], env=os.environ | kept, check=True)
    return kept


def _in_process(
    args: argparse.Namespace, variant: str, layers: int, cache: str, kept: dict[str, str]
) -> dict[str, Any]:
    environment = {**os.environ, **kept}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    environment |= {"TRITON_CACHE_DIR": f"{cache}/triton"}
    words = ["-m", "bench.cold_start", "--child", "--variants", variant]
    for name in ("device", "shape", "rows", "length", "attention"):
        words += [f"--{name}", str(getattr(args, name))]
    words += ["--layers", str(layers), "--spawned", repr(time.time())]
    return measured(words, environment=environment)


def _child(started: float) -> None:
    args = _arguments()
    import torch
    import transformers  # noqa: F401  (part of the import time that a user waits for)
    from torch._dynamo.utils import counters

    import fxrl
    from bench.lib import common, qwen
    from fxrl import losses

    imported = time.time()
    model = qwen.make_model(
        args.shape,
        args.device,
        layers=args.layers[0],
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
        rank=8,
    )
    completion = args.length // 2
    with qwen.attention(args.attention):
        batch = qwen.make_batch(
            model,
            device=args.device,
            tokens=args.rows * completion,
            completion=completion,
            prompt=args.length - completion,
        )
        loss_fn = losses.grpo(beta=0.0)
        common.synchronize(args.device)
        built = time.time()
        if args.variants[0] == "fxrl":
            step = fxrl.optimize(model, loss_fn, _config(args.device))
        elif args.variants[0] == "compile":
            compiled = torch.compile(loss_fn)
            step = lambda given: compiled(model, given)  # noqa: E731
        else:
            step = lambda given: loss_fn(model, given)  # noqa: E731
        run = qwen.backward_fn(step, batch)
        phases = _Phases()
        cpu_began = time.process_time()
        first_s = common.wall_s(run, args.device)
        first_cpu_s = time.process_time() - cpu_began
        seconds = phases.seconds()
        total_s = time.time() - args.spawned
        second_s = common.wall_s(run, args.device)
    counted = counters["inductor"]
    told = {
        "process_to_first_step_s": total_s,
        "imports_s": imported - started,
        "model_s": built - imported,
        "first_step_s": first_s,
        **seconds,
        "first_step_cpu_s": first_cpu_s,
        "second_step_s": second_s,
        "cache_hits": counted["fxgraph_cache_hit"],
        "cache_misses": counted["fxgraph_cache_miss"],
        "cache_bypasses": counted["fxgraph_cache_bypass"],
    }
    tell(told)


def _config(device: str) -> Any:
    """fxrl's, so that a CPU's first step takes the ways of a GPU's."""
    import fxrl

    if device == "cuda":
        return fxrl.Config(min_saved_bytes=0)
    return fxrl.Config(
        min_saved_bytes=0,
        gpu_memory=_GPU_MEMORY,
        pass_options={"outline-layers": {"least_hidden": {}}},
    )


class _Phases(logging.Handler):
    """Seconds of a first step by what fxrl says that it does; ``running`` is with the guards that
    Dynamo makes, and the backward."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._begun: list[tuple[str, float]] = []
        logger = logging.getLogger("fxrl")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._begun.append((record.getMessage().partition(" ")[0], time.time()))

    def seconds(self) -> dict[str, float]:
        """By column; a phase goes on until the next one begins."""
        found: dict[str, float] = {}
        for (name, begin), (_, end) in itertools.pairwise([*self._begun, ("", time.time())]):
            found[f"{name}_s"] = found.get(f"{name}_s", 0.0) + end - begin
        return found


def _arguments() -> argparse.Namespace:
    from bench.lib import common

    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", default=[2], type=common.numbers)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="tokens a row; half are completion")
    parser.add_argument("--warm", type=int, default=2, help="warm processes after the cold one")
    parser.add_argument("--attention", default="any", choices=("cudnn", "flash", "math", "any"))
    parser.add_argument("--variants", default="fxrl", type=common.words)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spawned", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
