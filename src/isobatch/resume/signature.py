"""What the numbers that go into a model and come out of it stand for: kept with its weights, compared where they meet data.

Without it a class that was renamed moves every label behind it to another output, and a model that was trained on other
normalised images answers at random; both without an error, since every shape fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data import DataInfo

KEY = "isobatch"  # in the metadata of a safetensors file
LARGEST = 1 << 24  # characters of it that are read
SHOWN = 8  # class names of a list that a message shows
UNNAMED = "{} does not say which class each output stands for: they are taken to be in the same order"


@dataclass(frozen=True)
class Signature:
    """
    Args:
        class_names: one per output, in order; () = the outputs are numbers, or nobody has named them.
        num_classes: 0 = the outputs are numbers.
        mean, std: per channel, what images in 0 .. 1 were normalised with; () = inputs as the data set gives them.
        input_shape: of one input in training, (C, H, W) for images.
        eval_size, crop_pct, interpolation: how an evaluation cuts its images out; None = they are taken as they are.
        labels, outputs: see DataInfo.
    """

    class_names: tuple[str, ...] = ()
    num_classes: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    input_shape: tuple[int, ...] = ()
    eval_size: int | tuple[int, int] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    labels: str = "one"
    outputs: int = 0

    @classmethod
    def of(cls, info: DataInfo) -> Signature:
        return cls(info.class_names, info.num_classes, info.mean, info.std, info.shape,
                   info.eval_size, info.crop_pct, info.interpolation, info.labels, info.outputs)  # fmt: skip

    @classmethod
    def of_pretrained(cls, model: Any) -> Signature:
        """Of timm's pretrained weights, whose classes have no names here."""
        known = getattr(model, "pretrained_cfg", None) or {}
        mean, std, shape = (tuple(known.get(key) or ()) for key in ("mean", "std", "input_size"))
        return cls((), int(known.get("num_classes") or 0), mean, std, shape)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Signature | None:
        """From plain data that anybody may have written; None where it does not say which classes there are."""
        names, classes = facts.get("class_names"), facts.get("num_classes")
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names) or type(classes) is not int:
            return None
        found: dict[str, Any] = {"class_names": tuple(names), "num_classes": classes}
        for key, kind in (("mean", float | int), ("std", float | int), ("input_shape", int)):
            values = facts.get(key)
            if isinstance(values, list | tuple) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
                found[key] = tuple(values)
        if len(found.get("mean", ())) != len(found.get("std", ())) or not all(x > 0 for x in found.get("std", ())):
            found["mean"] = found["std"] = ()
        side = facts.get("eval_size")
        if isinstance(side, list | tuple) and len(side) == 2 and all(type(n) is int and n > 0 for n in side):
            found["eval_size"] = (side[0], side[1])
        for key, one in (("eval_size", int), ("crop_pct", float), ("interpolation", str), ("labels", str), ("outputs", int)):
            if type(facts.get(key)) is one:
                found[key] = facts[key]
        return cls(**found)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None) -> Signature | None:
        """From the metadata of a safetensors file; None where it holds none."""
        text = (metadata or {}).get(KEY, "")
        try:
            facts = json.loads(text) if 0 < len(text) <= LARGEST else None
        except (ValueError, RecursionError):
            return None
        return cls.read(facts) if isinstance(facts, dict) else None

    def facts(self) -> dict[str, Any]:
        """Plain data that `read` takes."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def metadata(self) -> dict[str, str]:
        return {KEY: json.dumps(self.facts())}

    @property
    def named(self) -> bool:
        """Whether it is known what each output stands for."""
        return bool(self.class_names) or self.num_classes == 0


def compare(before: Mapping[str, Any], now: Mapping[str, Any], options: Any, run: Path, allow: bool,
            evaluates: bool) -> list[str]:  # fmt: skip
    """Whether the outputs of a run's weights stand for the classes of the data that they meet, and its images are those that
    they know. Returns lines for a person.

    Args:
        before, now: facts of the run and of this data. options: group `data`, to name a setting. run: whose weights they are.
        allow: say so, where it would be refused. evaluates: no training follows, so another way to cut images is told too.
    Raises:
        ConfigError: other classes, the same in another order, or images that are normalised otherwise.
    """
    weights, data = Signature.read(before), Signature.read(now)
    assert data is not None
    if weights is None:
        return [UNNAMED.format(run)] if data.num_classes else []
    key = next((f"data.{name}" for name in ("root", "path") if getattr(options, name, None)), "data.name")
    said = [] if weights.named and data.named else [UNNAMED.format("the data" if weights.named else run)]
    found = [
        (
            key,
            getattr(options, key[5:]),
            other_classes(weights, data),
            f"take the same classes; for new ones begin with model.checkpoint_path={run}, which makes a new classifier",
        )
    ]
    mean = ("data.mean", list(data.mean)) if hasattr(options, "mean") else found[0][:2]
    found.append((*mean, other_normalization(weights, data),
                  f"set data.mean={_typed(weights.mean)} data.std={_typed(weights.std)}"))  # fmt: skip
    for setting, value, problem, way_out in found:
        if problem and not allow:
            raise ConfigError(setting, value, f"{problem} ({run})", f"{way_out}, or set allow_contract_change=true")
        if problem:
            said.append(f"contract changed: {problem}; inputs and outputs are taken as they stand")
    if evaluates:
        said += [f"evaluated with {name} {shown(b)}, trained with {shown(a)}"
                 for name in ("input_shape", "eval_size", "crop_pct", "interpolation")
                 if (a := getattr(weights, name)) != (b := getattr(data, name)) and (a or name == "eval_size")]  # fmt: skip
    return said


def other_classes(weights: Signature, data: Signature) -> str | None:
    """How the classes of `data` differ from those that `weights` know, in words; None = they do not, as far as is known."""
    if weights.num_classes != data.num_classes:
        return f"it has {_count(data)}, and the weights know {_count(weights)}"
    if not (weights.class_names and data.class_names) or weights.class_names == data.class_names:
        return None
    theirs, ours = set(weights.class_names), set(data.class_names)
    if theirs == ours:
        return f"its classes come in the order {_listed(data.class_names)}, and those of the weights in the order " + _listed(
            weights.class_names)  # fmt: skip
    new, gone = ([n for n in a if n not in b] for a, b in ((data.class_names, theirs), (weights.class_names, ours)))
    return f"its classes are {_listed(data.class_names, new)}, and those of the weights {_listed(weights.class_names, gone)}"


def order(weights: Signature, data: Signature) -> list[int] | None:
    """Outputs of the weights in the order of the data's classes: output k of the result is `order[k]` of the weights.

    None where the classes are not the same, or not known by name.
    """
    if not weights.class_names or sorted(weights.class_names) != sorted(data.class_names):
        return None
    place = {name: i for i, name in enumerate(weights.class_names)}
    return [place[name] for name in data.class_names] if len(place) == len(weights.class_names) else None


def other_normalization(weights: Signature, data: Signature) -> str | None:
    """How images would reach the weights otherwise than they know them, in words; None = alike, or not known."""
    if not (weights.mean and data.mean) or (alike(weights.mean, data.mean) and alike(weights.std, data.std)):
        return None
    return (f"images are normalised with mean {_numbers(data.mean)} and std {_numbers(data.std)}, and the weights know "
            f"{_numbers(weights.mean)} and {_numbers(weights.std)}")  # fmt: skip


def alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two means or deviations are the same but for rounding; one number stands for all channels."""
    n = max(len(a), len(b))
    wide = [tuple(x) * n if len(x) == 1 else tuple(x) for x in (a, b)]
    return len(wide[0]) == len(wide[1]) and all(abs(p - q) <= 1e-6 for p, q in zip(*wide, strict=True))


def _count(signature: Signature) -> str:
    return f"{signature.num_classes} classes" if signature.num_classes else "no classes but numbers"


def _listed(names: Sequence[str], first: Sequence[str] = ()) -> str:
    """The names, of many those that matter (`first`) and how many there are."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    shown = list(first[:SHOWN]) or list(names[:SHOWN])
    return f"{', '.join(shown)}, ... ({len(names)})"


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:g}" for v in values) + "]"


def _typed(values: Sequence[float]) -> str:
    """As a person types it, without blanks."""
    return "[" + ",".join(f"{v:.10g}" for v in values) + "]"


def shown(value: Any) -> str:
    if isinstance(value, list):
        return _numbers(value)
    return "null" if value is None else "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
