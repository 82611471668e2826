"""The plan: for each site a choice, made before any graph is changed.

Passes ask the plan and obey. Until sizes and costs are planned, a plan holds the rules that the
configuration gives: what a rewrite must save to be worth it, and how many rows a tile has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fxrl.config import Config, parse_bytes
from fxrl.ir.remark import format_bytes


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the site as it is, for a reason that the report repeats."""

    reason: str


@dataclass(frozen=True, slots=True)
class Chunks:
    """Run the region in tiles of ``tokens`` rows; 0 lets the tile's bytes decide.

    A fused head may leave ``skip_tolerance`` of a token's gradient out (``Config`` says of what).
    """

    tokens: int = 0
    skip_tolerance: float = 0.0


Choice = Keep | Chunks

#: Hidden values (tokens x width) of a layer, by device, from where compiling the layer pays. A tiny
#: model would wait longer for the compiler than for all its steps; on a CPU a layer's time is its
#: matrix products', which no compiler makes faster. ``meta`` stands for a CPU.
_LEAST_HIDDEN = {"cpu": 2**24, "meta": 2**24, "cuda": 2**20}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do at each site.

    Attributes:
        choices: ``(pass name, site)`` -> choice; a site that is not listed follows the rules below.
        chunk_tokens: rows per tile, 0 to let the tile's bytes decide.
        min_saved_bytes: sites predicted to save less are kept.
        switched_off: sites that every pass keeps, whatever the rest says.
        least_hidden: device type -> hidden values of a layer below which it runs op by op.
        compile_regions: whether region bodies will be compiled.
        head_skip_tolerance: as in ``Config``.
    """

    choices: Mapping[tuple[str, str], Choice] = field(default_factory=dict)
    chunk_tokens: int = 0
    min_saved_bytes: int = 0
    switched_off: frozenset[str] = frozenset()
    least_hidden: Mapping[str, int] = field(default_factory=dict)
    compile_regions: bool = True
    head_skip_tolerance: float = 0.0

    @classmethod
    def from_config(cls, config: Config) -> Plan:
        """The plan that a configuration asks for; a pass that it names works at every size."""
        named = "recompute" in (config.passes or ())
        return cls(
            {},
            config.chunk_tokens or 0,
            parse_bytes(config.min_saved_bytes),
            least_hidden={} if named else dict(_LEAST_HIDDEN),
            compile_regions=named or config.compile_regions,
            head_skip_tolerance=config.head_skip_tolerance,
        )

    def without(self, sites: frozenset[str]) -> Plan:
        """The same plan with every pass told to keep ``sites``."""
        return replace(self, switched_off=self.switched_off | sites)

    def choice_for(self, pass_name: str, site: str, saved_bytes: int | None) -> Choice:
        """The choice for a site whose rewrite is predicted to save ``saved_bytes``.

        None: the rewrite is not about memory, so the threshold does not apply.
        """
        if site in self.switched_off:
            return Keep("it is switched off")
        chosen = self.choices.get((pass_name, site))
        if chosen is not None:
            return chosen
        if saved_bytes is not None and saved_bytes < self.min_saved_bytes:
            return Keep(
                f"it would save {format_bytes(saved_bytes)}, below "
                f"min_saved_bytes={format_bytes(self.min_saved_bytes)}"
            )
        return Chunks(self.chunk_tokens, self.head_skip_tolerance)

    def __str__(self) -> str:
        tile = self.chunk_tokens or "by bytes"
        lines = [f"rows per tile: {tile}; keep below {format_bytes(self.min_saved_bytes)}"]
        if self.head_skip_tolerance:
            lines.append(f"a frozen head may leave out {self.head_skip_tolerance:g} of a gradient")
        lines += [f"{name} @ {site}: {choice}" for (name, site), choice in self.choices.items()]
        return "\n".join(lines)
