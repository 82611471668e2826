"""The Hugging Face Trainer: the one changed line is ``fxrl.optimize`` in ``compute_loss``.

    python examples/hf_trainer.py

The step is made at the first call, of the model that the Trainer hands over: wrapped by
DistributedDataParallel where there are several processes. For TRL's trainers there are classes that
do this: ``fxrl.integrations.trl``.
"""

from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import fxrl
from fxrl.losses import sft
from fxrl.models import load_model

TEXTS = ["one and one is two", "two and two is four", "four and four is eight", "and so on and on"]


class FxrlTrainer(Trainer):
    """Next-token prediction through a step."""

    config, step = None, None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.step = self.step or fxrl.optimize(model, sft(), self.config)
        loss, _ = self.step({**inputs, "num_items_in_batch": num_items_in_batch})
        # The count is of all processes, and their gradients are averaged.
        return loss if num_items_in_batch is None else loss * self.accelerator.num_processes


def main(steps=6, config=None):
    """Trains; the loss of each step."""
    model, tokenizer = load_model("tiny:qwen3")
    args = TrainingArguments(
        "runs/hf_trainer", max_steps=steps, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = FxrlTrainer(
        model,
        args,
        train_dataset=[tokenizer(text) for text in TEXTS],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.config = config
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.step


if __name__ == "__main__":
    # Of a tiny model every rewrite saves little.
    losses, step = main(config=fxrl.Config(min_saved_bytes=0))
    print(step.report)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
