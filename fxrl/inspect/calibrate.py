"""How near products in FP8 come to those in full, and the options that leave those that are far.

A weight's rounding is known before it is used; that of rows and of their gradients only a batch
tells. So nothing is decided by them while a model is trained: ``TrainStep.calibrate`` makes a
``Config`` once, which then holds from the first step on, in every run that is given it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple

from fxrl.config import Config
from fxrl.errors import ConfigError
from fxrl.inspect.emulate import Emulation
from fxrl.inspect.evaluate import evaluate, named_trainable
from fxrl.ir.site import module_of
from fxrl.ops.rounded import RoundedWeight

#: The cosine of a product, and of its rows' gradient, below which it counts as far.
LEAST_COSINE = 0.999
_PASS = "fp8-lora"  # whose options these are


class Nearness(NamedTuple):
    """Cosines of a product in FP8 and of its rows' gradient with those in full, on the very same
    rows; 1 where there was none."""

    site: str
    product: float
    gradient: float
    widened: bool  # whether that gradient is of the widened weight already

    @property
    def module(self) -> str:
        """The path of the module that multiplies."""
        return module_of(self.site)


def nearness(weights: Iterable[RoundedWeight]) -> list[Nearness]:
    """What an ``Emulation`` saw of these weights, those left out that nothing was multiplied by."""
    found = []
    for weight in weights:
        seen = [weight.seen.cosine(what) for what in ("product", "gradient")]
        if any(cosine is not None for cosine in seen):
            product, gradient = (1.0 if cosine is None else cosine for cosine in seen)
            found.append(Nearness(weight.site, product, gradient, weight.gradient == "bf16"))
    return found


def nearness_in(step: Any, batch: Any) -> list[Nearness]:
    """That of every product of a ``TrainStep`` on a batch, behind those that it rounds, too.

    The step runs once and, with every product made twice, eager; all that they touch is put back.
    """
    model, loss_fn = step.model, step.loss_fn
    params = named_trainable(model, loss_fn)
    evaluate(step, model, params, batch)
    weights = [weight for one in step.captures if one.running for weight in one.rounded()]
    with Emulation(weights):
        evaluate(partial(loss_fn, model), model, params, batch)
    return nearness(weights)


def options_for(near: Iterable[Nearness], least: float) -> dict[str, list[str]]:
    """The options of ``fp8-lora`` under which no product is farther: those that are far stay as
    they are, and where only the gradient is far it alone is made in the model's dtype."""
    skip, wide = set(), set()
    for one in near:
        if one.product < least or (one.gradient < least and one.widened):
            skip.add(one.module)
        elif one.gradient < least:
            wide.add(one.module)
    named = {"skip": sorted(skip), "wide_gradients": sorted(wide - skip)}
    return {option: modules for option, modules in named.items() if modules}


def in_words(near: Sequence[Nearness]) -> list[str]:
    """In words, with the ``Config`` under which those that are far are not."""
    if not near:
        return []
    cosines = [min(one.product, one.gradient) for one in near]
    said = f"{len(near)} products in FP8: cosine with those in full {min(cosines):.4f} at the least"
    said = f"{said}, {median_low(cosines):.4f} in the middle"
    if not (options := options_for(near, LEAST_COSINE)):
        return [said]
    count = sum(cosine < LEAST_COSINE for cosine in cosines)
    cure = f"Config(pass_options={{{_PASS!r}: {options}}})"
    return [said, f"{count} of them are below {LEAST_COSINE}; with {cure} these are not"]


def calibrated(step: Any, batch: Any, least: float) -> Config:
    """A ``TrainStep``'s ``Config``, with options that leave the products farther than ``least``."""
    config: Config = step.config
    if config.precision != "fp8":
        raise ConfigError(
            f"precision={config.precision!r}: only products in FP8 are calibrated; make the step "
            "with fxrl.Config(precision='fp8')"
        )
    if not 0 < least <= 1:
        raise ConfigError(f"least_cosine={least!r} is no cosine in (0, 1], such as {LEAST_COSINE}")
    asked = dict(config.pass_options or {})
    options = dict(asked.get(_PASS, {}))
    for option, modules in options_for(nearness_in(step, batch), least).items():
        options[option] = [*options.get(option, ()), *modules]
    return replace(config, pass_options=asked | {_PASS: options}) if options else config
