"""Gives the parameters of an empty Hugging Face model their storages: vLLM's, or their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxrl.runtime.checkpoint_tensors import CheckpointTensors
from fxrl.runtime.fp8_linear import FP8_DTYPES, Fp8Linear, logical
from fxrl.runtime.fp8_sharing import find_scale, why_not_quantized
from fxrl.runtime.hf_skeleton import owner_of, parameter_groups
from fxrl.runtime.sharing_report import Binding, SharingRow
from fxrl.runtime.weight_layout import Placement, Proposal, plan_layout
from fxrl.runtime.weight_search import equal_bits, find_by_content

PACKED = (
    "vLLM has packed its weights for its CPU kernels (their shape is (0,)); there is nothing to "
    "share on a CPU: after training call engine.update_weights(...)"
)


class WeightBinder:
    """Binds every parameter once; ``rows``, ``bindings`` and ``mirrors`` say what came of it."""

    def __init__(
        self,
        vllm_model: nn.Module,
        model: nn.Module,
        checkpoint: CheckpointTensors,
        device: torch.device,
    ) -> None:
        self.vllm_model, self.model = vllm_model, model
        self.checkpoint, self.device = checkpoint, device
        named = dict(vllm_model.named_parameters(remove_duplicate=False))
        self.packed = any(value.numel() == 0 for value in named.values())
        self.tensors = {name: logical(value) for name, value in named.items()}
        wanted = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: value.shape for name, value in wanted.items()}
        self.plan: Mapping[str, Proposal] = plan_layout(vllm_model, self.tensors, shapes)
        self.taken: dict[tuple[int, int], str] = {}  # address range -> HF name
        self.rows: list[SharingRow] = []
        self.bindings: list[Binding] = []
        self.mirrors: dict[str, Tensor] = {}

    def bind_all(self, requires_grad: bool) -> None:
        """Every parameter, then the buffers that the checkpoint has."""
        linears = [n for n, m in self.model.named_modules() if type(m) is nn.Linear]
        why_no_fp8 = {f"{name}.weight": self._bind_fp8(name) for name in linears}
        for names in parameter_groups(self.model):
            module, attribute = owner_of(self.model, names[0])
            if getattr(module, attribute).is_meta:
                self._bind(names, requires_grad, why_no_fp8.get(names[0], ""))
        self._fill_buffers()

    def _bind(self, names: tuple[str, ...], requires_grad: bool, why_no_fp8: str) -> None:
        module, attribute = owner_of(self.model, names[0])
        wanted = getattr(module, attribute)
        reference = self.checkpoint.get(names, wanted.shape)
        if self.packed or why_no_fp8:
            place: Placement | str = why_no_fp8 or PACKED
        else:
            place = self._mirror(names, wanted, reference) or self._place(names, wanted, reference)
        if isinstance(place, Placement):
            value = place.view(self.tensors[place.name])
            self._record(names, module, attribute, place, value)
        else:
            value = reference.to(self.device, wanted.dtype, copy=True)
            nbytes = value.numel() * value.element_size()
            self.rows.append(SharingRow(names[0], "", None, nbytes, False, place, names[1:]))
        parameter = nn.Parameter(value, requires_grad)
        for name in names:
            owner, leaf = owner_of(self.model, name)
            setattr(owner, leaf, parameter)

    def _mirror(self, names: tuple[str, ...], wanted: Tensor, reference: Tensor) -> str:
        """Notes where vLLM has the same values in another dtype: fp32 master weights beside it.

        Returns:
            Why the parameter is copied; empty if there is no such place.
        """
        for name in names:
            for place in self.plan[name].placements:
                view = place.view(self.tensors[place.name])
                if view.dtype in (wanted.dtype, *FP8_DTYPES):
                    continue
                if not self._why_not_there(place, view, wanted) and equal_bits(view, reference):
                    self.mirrors |= dict.fromkeys(names, view)
                    return f"vLLM keeps it in {view.dtype}; rounded into it at each update"
        return ""

    def _place(self, names: tuple[str, ...], wanted: Tensor, reference: Tensor) -> Placement | str:
        """The first proposed place that holds the checkpoint's bytes, or why there is none."""
        reasons = []
        for name in names:
            proposal = self.plan[name]
            for place in proposal.placements:
                if not (why := self._why_not(place, wanted, reference)):
                    return place
                reasons.append(why)
            if not proposal.placements:
                reasons.append(proposal.reason)
        found = find_by_content(names[0], reference, wanted.dtype, self.tensors)
        if isinstance(found, str):
            return f"{reasons[0]}; {found}"
        return self._why_not(found, wanted, reference) or found

    def _why_not(self, place: Placement, wanted: Tensor, reference: Tensor) -> str:
        view = place.view(self.tensors[place.name])
        if view.dtype != wanted.dtype:
            return f"vLLM keeps {place.name} in {view.dtype}, the model in {wanted.dtype}"
        if why := self._why_not_there(place, view, wanted):
            return why
        if not equal_bits(view, reference):
            return f"vLLM's {place.name} holds other bytes than the checkpoint's tensor"
        return ""

    def _why_not_there(self, place: Placement, view: Tensor, wanted: Tensor) -> str:
        if view.device.type != self.device.type:
            return f"vLLM's {place.name} is on {view.device}, the model on {self.device}"
        if view.shape != wanted.shape:
            return f"vLLM's {place.name} gives {list(view.shape)}, not {list(wanted.shape)}"
        start, end = view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()
        for (low, high), other in self.taken.items():
            if start < high and low < end:
                return f"{place.name} is shared with {other} already, which is not tied to it"
        return ""

    def _bind_fp8(self, path: str) -> str:
        """Makes a linear layer an ``Fp8Linear`` if vLLM has its weight in FP8; why not, if so."""
        name = f"{path}.weight"
        place = next(iter(self.plan[name].placements), None)
        if self.packed or place is None or self.tensors[place.name].dtype not in FP8_DTYPES:
            return ""
        linear = self.model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        whole = self.tensors[place.name]
        view, found = place.view(whole), find_scale(self.vllm_model, whole, place)
        if isinstance(found, str):
            return found
        scale_name, scale = found
        reference = self.checkpoint.get([name], linear.weight.shape)
        if why := self._why_not_there(place, view, linear.weight):
            return why
        if why := why_not_quantized(view, scale, reference):
            return f"vLLM's {place.name}: {why}"
        module = Fp8Linear(view, scale, linear.bias, linear.weight.dtype).eval()
        parent, _, child = path.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)
        self._record((name,), module, "weight", place, module.weight)
        self._record_scale(f"{path}.weight_scale", scale_name, module, place)
        return ""

    def _record(
        self,
        names: tuple[str, ...],
        module: nn.Module,
        attribute: str,
        place: Placement,
        value: Tensor,
    ) -> None:
        nbytes, start = value.numel() * value.element_size(), value.data_ptr()
        self.taken[start, start + nbytes] = names[0]
        self.bindings.append(
            Binding(names[0], module, attribute, place.name, lambda own: place.view(logical(own)))
        )
        rows = (place.start, place.length)
        self.rows.append(SharingRow(names[0], place.name, rows, nbytes, True, place.how, names[1:]))

    def _record_scale(self, name: str, vllm_name: str, module: Fp8Linear, place: Placement) -> None:
        def view(_: Tensor) -> Tensor:
            weight = logical(self.vllm_model.get_parameter(place.name))
            found = find_scale(self.vllm_model, weight, place)
            return module.weight_scale.new_empty(0) if isinstance(found, str) else found[1].values

        values = module.weight_scale
        self.bindings.append(Binding(name, module, "weight_scale", vllm_name, view))
        nbytes, rows = values.numel() * values.element_size(), (0, values.shape[0])
        self.rows.append(SharingRow(name, vllm_name, rows, nbytes, True, "FP8 scales"))

    def _fill_buffers(self) -> None:
        """Persistent buffers (routing biases) are small, and the checkpoint's values count."""
        kept = self.model.state_dict().keys()
        for name, value in self.model.named_buffers():
            if name in kept and not name.endswith(".weight_scale"):
                stored = self.checkpoint.find_buffer(name)
                if stored is not None and stored.shape == value.shape:
                    value.copy_(stored)
