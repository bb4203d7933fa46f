"""A saved state made to fit the model, optimizer and scaler that are there, or named as unfit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.checkpoint.folder import Damaged

if TYPE_CHECKING:
    from isobatch.precision.scaling import LossScaler
    from isobatch.train.state import TrainState

PREFIXES = ("module.", "_orig_mod.")
# counted per group by some of timm's optimizers, and what the schedule set last; the rest of a group are settings
GROUP_STATE = {"step", "lookahead_step", "lr"}


def bare(name: Any) -> Any:
    """A weight's name without what DataParallel, DDP and torch.compile put before it, in any nesting."""
    while isinstance(name, str) and name.startswith(PREFIXES):
        name = name[len(next(p for p in PREFIXES if name.startswith(p))) :]
    return name


def strip_prefixes(weights: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """`weights` under the names of `current`, where wrappers' prefixes are all that differs.

    Names are compared bare on both sides, since a model may itself have a part that is called `module`.
    """
    if weights.keys() == current.keys():
        return dict(weights)
    names = {bare(name): name for name in current}
    return {names.get(bare(name), bare(name)): tensor for name, tensor in weights.items()}


def fitted(state: TrainState, saved: dict[str, Any], notes: list[str], for_training: bool) -> dict[str, Any]:
    """`saved` as TrainState.load_state_dict takes it.

    Options of optimizer and scaler are those of the present config; only what training has changed is taken over.
    What the saved run did not have (a scaler, an EMA) is told in `notes`.

    Raises:
        Damaged: names, shapes or types do not fit.
    """
    model = fitted_weights(saved["model"], state.model.state_dict(), "model")
    ema = None
    if state.ema is not None:
        if saved["ema"]:
            ema = fitted_weights(saved["ema"], state.ema.module.state_dict(), "EMA")
        else:
            notes.append("the checkpoint has no EMA: the average starts from its weights")
    elif saved["ema"]:
        notes.append("the checkpoint's EMA is left out: ema=none")
    optimizer = fitted_optimizer(saved["optimizer"], state.optimizer) if for_training else state.optimizer.state_dict()
    reducer = saved["reducer"] if for_training or state.reducer is None else state.reducer.state_dict()
    return {**saved, "model": model, "ema": ema, "optimizer": optimizer, "reducer": reducer,
            "scaler": fitted_scaler(saved["scaler"], state.scaler, notes)}  # fmt: skip


def fitted_weights(saved: Mapping[str, Any], current: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    weights = strip_prefixes(saved, current)
    if not weights.keys() & current.keys():
        raise Damaged(f"none of its {len(weights)} {what} weights has a name of this model")
    missing, extra = current.keys() - weights.keys(), weights.keys() - current.keys()
    if missing or extra:
        listed = ", ".join(sorted(map(str, missing or extra))[:3])
        raise Damaged(f"its {what} weights {'lack' if missing else 'also have'} {listed}"[:160])
    for name, tensor in current.items():
        found = weights[name]
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            raise Damaged(f"{what} weight {name} is {_form(found)}, and here {_form(tensor)}")
        if found.is_floating_point() != tensor.is_floating_point() or found.is_complex():
            raise Damaged(f"{what} weight {name} has dtype {found.dtype}, and here {tensor.dtype}")
    return weights


def fitted_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    current = optimizer.state_dict()
    groups, entries = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(entries, dict) or not all(isinstance(g, dict) for g in groups):
        raise Damaged("its optimizer state is none")
    if [g.get("params") for g in groups] != [g["params"] for g in current["param_groups"]]:
        raise Damaged("its optimizer has other parameter groups")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [i for group in current["param_groups"] for i in group["params"]]
    shapes = {i: p.shape for i, p in zip(order, parameters, strict=True)}
    made = made_state(optimizer, order)
    for number, entry in entries.items():
        if number not in shapes or not isinstance(entry, dict):
            raise Damaged(f"its optimizer state {str(number)[:20]} belongs to no parameter")
        for name, value in entry.items():
            _check_entry(f"{number}.{name}"[:40], str(name), value, made.get(number, {}).get(name))
    _check_names(entries, optimizer, current["param_groups"], shapes)
    merged = []
    for group, now in zip(groups, current["param_groups"], strict=True):
        counted = {k: v for k, v in group.items() if k in GROUP_STATE and type(v) in (int, float, Tensor)}
        merged.append({**now, **counted})
    return {"state": entries, "param_groups": merged}


def _check_names(entries: dict[Any, Any], optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]],
                 shapes: dict[int, torch.Size]) -> None:  # fmt: skip
    """Parameters of one kind have state of the same names, or the next update would stumble over it."""
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    kinds: dict[tuple[int, int], set[str]] = {}
    for number, group in enumerate(groups):
        for i in group["params"]:
            names = set(entries.get(i, ()))
            if not names or any("row" in str(name) for name in names):  # no update yet; factored ones differ by size
                continue
            like = kinds.setdefault((number, len(shapes[i])), names)
            if names != like or (adam and not {"step", "exp_avg", "exp_avg_sq"} <= names):
                raise Damaged(f"its optimizer state of parameter {i} is incomplete")


def made_state(optimizer: torch.optim.Optimizer, order: list[int]) -> dict[int, dict[str, torch.Size]]:
    """Parameter's number -> name -> shape of the tensors that `optimizer` itself makes for it in a step, without data.

    Empty for an optimizer whose step needs data: what it is given is then taken as it is.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    blank = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in parameters]
    memo: dict[int, Any] = {id(p): b for p, b in zip(parameters, blank, strict=True)}
    memo |= {id(t): t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)}
    try:
        twin = copy.deepcopy(optimizer, memo)
        twin.state.clear()
        for group in twin.param_groups:
            group.update({key: False for key in ("fused", "capturable") if group.get(key)})
        for p in blank:
            p.grad = torch.empty_like(p)
        with warnings.catch_warnings(action="ignore"):
            twin.step()
        return {i: {str(k): v.shape for k, v in twin.state.get(b, {}).items() if isinstance(v, Tensor)}
                for i, b in zip(order, blank, strict=True)}  # fmt: skip
    except Exception:  # of every kind: somebody else's code on tensors without data
        return {}


def _check_entry(where: str, name: str, value: Any, shape: torch.Size | None) -> None:
    if name == "step":
        single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not (single or type(value) in (int, float)) or not 0 <= float(value) < 2**53:
            raise Damaged(f"its optimizer state {where} is no count")
    elif shape is not None and value is not None:
        if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
            raise Damaged(f"its optimizer state {where} is {_form(value)}, and this optimizer makes it {list(shape)}")
    elif isinstance(value, str):
        raise Damaged(f"its optimizer state {where} is text")


def fitted_scaler(saved: Mapping[str, Any], scaler: LossScaler, notes: list[str]) -> dict[str, Any]:
    if not scaler.is_enabled():
        if saved:
            notes.append("the checkpoint's loss scale is left out: this precision has none")
        return {}
    if not saved:
        notes.append(f"the checkpoint has no loss scale: it starts at {scaler.get_scale():g}")
        return {}
    scale, tracker = saved.get("scale"), saved.get("_growth_tracker")
    if type(scale) not in (int, float) or not 0 < scale < float("inf") or type(tracker) is not int or tracker < 0:  # type: ignore
        raise Damaged("its loss scale is none")
    return {"scale": float(scale), "_growth_tracker": tracker}  # type: ignore[arg-type]


def _form(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
