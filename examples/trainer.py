"""GRPO from Python: a reward, a few rows, a callback that ends the run when it is good enough.

    python examples/trainer.py

A tiny random model learns to stop early: seconds on a CPU, no download. examples/config.md lists
every key of the configuration and what a reward gets; fxrl/rl/callbacks.py lists the events.
"""

from fxrl.rl import Callback, Trainer


def short(completions, completion_ids, **columns):
    """The fewer tokens, the better; 0 at the limit."""
    return [1.0 - len(ids) / 24 for ids in completion_ids]


class GoodEnough(Callback):
    """Ends the run, with the model saved, at a mean reward of ``least``."""

    def __init__(self, least):
        self.least = least

    def on_step_end(self, config, state, control, *, logs, **kwargs):
        if logs["reward"] is not None and logs["reward"] >= self.least:
            control.should_training_stop = True


ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
CONFIG = {
    "run_dir": "runs/trainer",
    "steps": 6,
    "prompts_per_step": 4,
    "model": {"lora": {"r": 8, "alpha": 16}},
    "sampling": {"max_tokens": 24},
    "optim": {"lr": 1e-2},
    "fxrl": {"min_saved_bytes": 0},  # rewrite however little it saves: the model is tiny
}


def main(config=CONFIG):
    """Trains; Ctrl-C stops after a step, and ``train(resume="")`` would go on there."""
    trainer = Trainer("tiny:qwen3", short, ROWS, config, callbacks=[GoodEnough(0.85)])
    return trainer.train(overwrite=True)


if __name__ == "__main__":
    result = main()
    print(f"{result.summary['steps']} steps, reward {result.summary['reward, last steps']:.2f}")
