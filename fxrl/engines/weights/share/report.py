"""What of a model lies in vLLM's storages, what was copied and why; and whether it still does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fxrl.engines.engine import EngineError

_SHOWN = 5


class SharingError(EngineError):
    """An alias of vLLM's weights no longer is one."""


@dataclass(frozen=True, slots=True)
class SharingRow:
    """One tensor of the model (tied parameters are one).

    Attributes:
        name: of the HF parameter; tied ones have more names, see ``also``.
        vllm_name: of the vLLM parameter it lies in, "" if it was copied.
        rows: first row and number of rows there; ``None`` if it was copied.
        nbytes: its size.
        shared: one storage with vLLM, byte for byte what the checkpoint says.
        reason: how the place was found, or why the tensor has a storage of its own.
        also: the other names of a tied parameter.
    """

    name: str
    vllm_name: str
    rows: tuple[int, int] | None
    nbytes: int
    shared: bool
    reason: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """Which attribute of which module aliases what. (PEFT wraps such modules, it keeps them.)

    ``view`` makes what the attribute should be of vLLM's parameter.
    """

    name: str
    module: nn.Module
    attribute: str
    vllm_name: str
    view: Callable[[Tensor], Tensor]

    def tensor(self) -> Tensor:
        value = getattr(self.module, self.attribute)
        assert isinstance(value, Tensor)
        return value.detach()


@dataclass(frozen=True)
class SharingReport:
    """The result of ``share``.

    It keeps the vLLM model alive; drop it together with the engine.

    Attributes:
        rows: one for every tensor.
        warnings: what a user should know though it works.
        seconds: how long sharing took, the comparison with the checkpoint included.
        mirrors: for copied parameters that vLLM has in another dtype, by HF name: vLLM's values in
            the parameter's shape. ``mirrors[name].copy_(parameter)`` is an update.
    """

    rows: tuple[SharingRow, ...]
    warnings: tuple[str, ...]
    seconds: float
    mirrors: Mapping[str, Tensor] = field(repr=False)
    vllm_model: nn.Module = field(repr=False)
    bindings: tuple[Binding, ...] = field(repr=False)

    @property
    def shared_bytes(self) -> int:
        """Bytes that exist once, for vLLM and the trainer."""
        return sum(row.nbytes for row in self.rows if row.shared)

    @property
    def copied_bytes(self) -> int:
        """Bytes that exist twice."""
        return sum(row.nbytes for row in self.rows if not row.shared)

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the parameters that have a storage of their own: updates of these reach vLLM
        only if somebody copies them."""
        return tuple(n for row in self.rows if not row.shared for n in (row.name, *row.also))

    @property
    def complete(self) -> bool:
        """Whether every tensor is shared."""
        return all(row.shared for row in self.rows)

    def verify_again(self) -> None:
        """Checks that every alias still is one.

        Catches what breaks aliases without an error: ``model.to(...)``, a rebound ``.data``, an
        optimizer or FSDP that flattens parameters, vLLM replacing a parameter while it reloads.

        Raises:
            SharingError: names the first parameters and what is wrong with them.
        """
        faults = [f"{b.name}: {why}" for b in self.bindings if (why := self._why_no_alias(b))]
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise SharingError(
                f"{len(faults)} of {len(self.bindings)} shared weights are broken: "
                f"{'; '.join(faults[:_SHOWN])}{more}. Use the model no further: make it anew with "
                "share(), and update its parameters in place only"
            )

    def _why_no_alias(self, binding: Binding) -> str:
        path, _, leaf = binding.vllm_name.rpartition(".")
        owner = getattr(self.vllm_model.get_submodule(path), leaf, None)
        if not isinstance(owner, Tensor):
            return f"vLLM has dropped {binding.vllm_name}"
        here = binding.tensor()
        if owner.numel() == 0:
            return f"vLLM has packed {binding.vllm_name}"
        there = binding.view(owner)
        if here.data_ptr() != there.data_ptr():
            return "lies in another storage than vLLM's weight"
        if (here.shape, here.stride(), here.dtype) != (there.shape, there.stride(), there.dtype):
            return f"has shape {list(here.shape)}, strides {list(here.stride())}, {here.dtype}"
        return ""

    def __str__(self) -> str:
        shared, table = [row for row in self.rows if row.shared], Table(box=None, pad_edge=False)
        for column in ("weights", "tensors", "GiB", "why"):
            table.add_column(column, justify="right" if column in ("tensors", "GiB") else "left")
        for kind, rows in (("shared", shared), ("copied", [r for r in self.rows if not r.shared])):
            for reason, count in Counter(_any_layer(row.reason) for row in rows).most_common():
                alike = [row for row in rows if _any_layer(row.reason) == reason]
                size, example = sum(row.nbytes for row in alike), alike[0].name
                why = reason if kind == "shared" else f"{example}: {reason}"
                table.add_row(kind, str(count), f"{size / 2**30:.3f}", why)
        out = StringIO()
        console = Console(file=out, width=120, color_system=None)
        console.print(
            f"{len(shared)} of {len(self.rows)} tensors shared with vLLM, "
            f"{self.shared_bytes / 2**30:.3f} GiB; {self.copied_bytes / 2**30:.3f} GiB copied "
            f"({self.seconds:.1f} s)"
        )
        console.print(table)
        for warning in self.warnings:
            console.print(f"warning: {warning}")
        return out.getvalue().rstrip()


def _any_layer(reason: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", reason)
