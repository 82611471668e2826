"""Log-probabilities of the reference, once for all rows before the first step.

They take the way of those of a step: as many rows at a time, in micro-batches as large, through the
same train step. What the reference said is in ``run_dir``, from where a resumed run has it bit for
bit. In bf16 a row's numbers may differ in their last places from those that it gets beside other
rows, so the first loss of DPO is ln 2 but for these.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fxrl.files import write_bytes
from fxrl.rl.data.examples import Examples, Unit
from fxrl.rl.data.questions import Split
from fxrl.rl.errors import CheckpointError
from fxrl.rl.loop.build import RunParts
from fxrl.rl.loop.fingerprint import changes, of_tensors, of_tokens
from fxrl.rl.loop.iteration import scored_batches
from fxrl.rl.report.progress import Say, told
from fxrl.rl.types import Experience, TokenRow

FILE = "ref_log_probs.safetensors"


def precompute(parts: RunParts) -> None:
    """Give the rows of ``parts`` their ``ref_logps``, and drop the reference if nothing else needs
    it. All ranks call it, while the weights are still those that training starts from.

    Raises ``CheckpointError`` if the file in ``run_dir`` is damaged or belongs to another model or
    other rows, ``OSError`` if it cannot be written.
    """
    data, reporter = parts.data, parts.reporter
    path = Path(parts.config.run_dir) / FILE
    assert isinstance(data, Examples)
    rows = [row for unit in _units(data) for row in unit]
    made_of = _made_of(parts, rows)
    found = _read(path, made_of) if parts.ranks.primary and path.is_file() else None
    found = parts.ranks.broadcast(found)
    if found is None:
        what = f"scoring {len(rows)} rows by the reference"
        with reporter.stage(what) as say, told("fxrl", say):
            found = _scored(parts, say)
        if parts.ranks.primary:
            _write(path, made_of, found)
        reporter.message(f"the reference's log-probs of {len(rows)} rows are in {path}")
    else:
        reporter.message(f"the reference's log-probs of {len(rows)} rows are from {path}")
    pieces = torch.split(found, [len(row.completion) for row in rows])
    each = iter(
        row._replace(per_token={**row.per_token, "ref_logps": array("d", piece.tolist())})
        for row, piece in zip(rows, pieces, strict=True)
    )
    train, held_out = (
        tuple(tuple(itertools.islice(each, len(unit))) for unit in units)
        for units in (data.split.train, data.split.held_out)
    )
    parts.data = parts.source = dataclasses.replace(data, split=Split(train, held_out))
    if parts.scorers.mismatched is None:
        parts.scorers.reference = None


def _units(data: Examples) -> tuple[Unit, ...]:
    return (*data.split.train, *data.split.held_out)


def _scored(parts: RunParts, say: Say) -> Tensor:
    """Log-probabilities of all rows, concatenated, one per token of a completion."""
    data = parts.data
    assert isinstance(data, Examples)
    scorers, units = dataclasses.replace(parts.scorers, mismatched=None), _units(data)
    alone = dataclasses.replace(parts, scorers=scorers)
    found: list[Tensor] = []
    for start in range(0, len(units), data.per_step):
        say(f"{len(found)} of {len(units) * data.rows_each} rows")
        rows = [row for unit in units[start : start + data.per_step] for row in unit]
        numbered = [
            row._replace(per_row={**row.per_row, "place": place}) for place, row in enumerate(rows)
        ]
        experience = Experience(numbered, {}, 0, 0, unit=data.rows_each)
        batches, _ = scored_batches(alone, experience, say, train=False)
        own = (one for batch in batches for one in _cut(batch, rows))
        merged = dict(parts.ranks.every(own, parts.config.fxrl.context_parallel))
        found += [merged[place] for place in range(len(rows))]
    return torch.cat(found)


def _cut(batch: dict[str, Tensor], rows: Sequence[TokenRow]) -> Iterator[tuple[int, Tensor]]:
    """Each row's place and values, of a micro-batch."""
    logps = batch["ref_logps"].cpu()
    skipped = batch["input_ids"].shape[1] - logps.shape[1]
    for place, values in zip(map(int, batch["place"].tolist()), logps, strict=True):
        start = len(rows[place].prompt) - skipped
        yield place, values[start : start + len(rows[place].completion)].clone()


# ---------------------------------------------------------------------------- the file
def _made_of(parts: RunParts, rows: Sequence[TokenRow]) -> dict[str, str]:
    """What the numbers depend on; the rows' tokens say data, template and tokenizer."""
    model = parts.config.model
    return {
        "rows": of_tokens(rows),
        "base model": parts.fingerprints["base model"],
        "dtype": f"{model.dtype}, autocast {model.autocast}, quantization {model.quantization}",
    }


def _write(path: Path, made_of: dict[str, str], found: Tensor) -> None:
    about = {"made of": json.dumps(made_of), "values": of_tensors([("ref_logps", found)])}
    write_bytes(path, safetensors.torch.save({"ref_logps": found}, about))


def _read(path: Path, made_of: dict[str, str]) -> Tensor:
    again = f"remove {path} to have them computed anew, by the model as it is before training"
    try:
        with safetensors.safe_open(path, "pt") as file:
            about, found = file.metadata(), torch.as_tensor(file.get_tensor("ref_logps"))
        before = json.loads(about["made of"])
        whole = about["values"] == of_tensors([("ref_logps", found)])
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {again}") from error
    if not whole:
        raise CheckpointError(f"{path} is damaged: its values are not those written; {again}")
    if lines := changes(before, made_of):
        raise CheckpointError(f"{path} holds another run's log-probs:\n  {lines}\n{again}")
    return found
