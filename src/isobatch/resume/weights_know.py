"""What the weights that a model begins with know of images and classes: read from their file, or from timm's list.

An evaluation or a training that states nothing of its own takes size, crop, interpolation, mean and std from here, since
weights that see other images than they were trained on answer worse, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isobatch.checks import as_option
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.resume.signature import UNNAMED, Signature, order, other_classes

INTERPOLATIONS = ("bilinear", "bicubic")  # that images are resized with here


@dataclass(frozen=True)
class Known:
    """
    Args:
        signature: of the weights; what is not known is empty.
        origin: whose they are, in words. file: where they lie, None = timm's own.
        told: what of it cannot be done here, a line each.
    """

    signature: Signature
    origin: str
    file: Path | None = None
    told: tuple[str, ...] = ()

    def info(self) -> DataInfo:
        return info_of(self.signature, "weights")

    def settings(self) -> dict[str, Any]:
        """As options of group `data`, as far as they are known."""
        known = self.signature
        height, width = known.input_shape[1:] if len(known.input_shape) == 3 else (None, None)
        found: dict[str, Any] = {"image_size": height if height == width else [height, width],
                                 "eval_size": as_option(known.eval_size),
                                 "crop_pct": known.crop_pct, "interpolation": known.interpolation}  # fmt: skip
        if known.mean and known.std:
            found |= {"mean": list(known.mean), "std": list(known.std)}
        return {key: value for key, value in found.items() if value is not None}


def info_of(known: Signature, name: str) -> DataInfo:
    return DataInfo(name, known.input_shape, known.num_classes, known.mean, known.std, known.class_names,
                    known.eval_size, known.crop_pct, known.interpolation, (), known.labels, known.outputs)  # fmt: skip


def of(model: Any, for_evaluation: bool) -> Known | None:
    """Of the weights that the options of group `model` name; None = they name none.

    Args:
        for_evaluation: no training follows: the size and crop that the weights were tested with.
    """
    if path := getattr(model, "checkpoint_path", None):
        return of_file(path, model, for_evaluation)
    return of_timm(model.arch, model.kwargs, for_evaluation) if getattr(model, "pretrained", False) else None


def of_saved(plan: Mapping[str, Any], run: Any) -> Known | None:
    """Of a run, by the facts in one of its checkpoints."""
    known = Signature.read(plan)
    return None if known is None else Known(known, str(run))


def of_timm(arch: str, kwargs: Mapping[str, Any], for_evaluation: bool) -> Known | None:
    """Of timm's pretrained weights for `arch`."""
    from isobatch.runtime.timm_import import timm

    listed = timm.models.get_pretrained_cfg(arch, allow_unregistered=False) if timm.is_model(arch.split(".")[0]) else None
    cfg: dict[str, Any] = {**(listed.to_dict() if listed else {}), **dict(kwargs.get("pretrained_cfg_overlay") or {})}
    if not cfg:
        return None
    size, crop = cfg.get("input_size"), cfg.get("crop_pct")
    if for_evaluation:
        size, crop = cfg.get("test_input_size") or size, cfg.get("test_crop_pct") or crop
    if isinstance(asked := kwargs.get("img_size"), int) and size:
        size = (size[0], asked, asked)
    told, interpolation, mode = [], cfg.get("interpolation"), cfg.get("crop_mode") or "center"
    if interpolation not in INTERPOLATIONS:
        told += [f"they were trained with interpolation {interpolation}, and here it is bicubic"] if interpolation else []
        interpolation = "bicubic"
    if mode != "center":
        told.append(f"they were tested with crop_mode {mode}, and here the center is cut out")
    tag = f".{cfg['tag']}" if cfg.get("tag") and "." not in arch else ""
    known = Signature((), int(cfg.get("num_classes") or 0), tuple(cfg.get("mean") or ()), tuple(cfg.get("std") or ()),
                      tuple(size or ()), None, None if crop is None else float(crop), interpolation)  # fmt: skip
    return Known(replace(known, class_names=imagenet_names(cfg)), f"timm's {arch}{tag}", None, tuple(told))


def imagenet_names(cfg: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes in words, of the label sets that timm describes; () = it describes none like that."""
    from isobatch.runtime.timm_import import timm

    names = cfg.get("label_names")
    if isinstance(names, list | tuple) and len(names) == cfg.get("num_classes"):
        return tuple(map(str, names))
    subset = timm.data.infer_imagenet_subset(dict(cfg))
    if subset is None:
        return ()
    about = timm.data.ImageNetInfo(subset)
    return tuple(about.index_to_description(i) for i in range(about.num_classes()))


def of_file(path: str, model: Any, for_evaluation: bool) -> Known:
    """Of a file of weights or a folder that holds one (see first_weights.located).

    Where it says nothing of itself, timm's settings for the architecture stand in, and its tensors tell how many classes and
    channels it knows.
    """
    from isobatch.resume.first_weights import located, recorded

    file = located(path)
    if (known := recorded(file)) is not None:
        return Known(known, str(path), file)
    listed = of_timm(model.arch, model.kwargs, for_evaluation) if hasattr(model, "arch") else None
    classes, channels = counts(file, model)
    if listed is None:
        return Known(Signature(num_classes=classes), str(path), file)
    shape = listed.signature.input_shape
    told = f"{file} does not say which images it was trained on: timm's settings for {model.arch} stand in"
    known = replace(listed.signature, class_names=(), num_classes=classes, input_shape=(channels, *shape[1:]))
    return Known(known, str(path), file, (told, *listed.told))


def check_answers(model: Any, info: DataInfo) -> list[str]:
    """Whether the first weights answer for the classes of the data, where nothing is trained. Returns lines for a person.

    Raises:
        ConfigError: they know others, so that their classifier would be drawn at random.
    """
    known = of(model, True)
    if known is None:
        return []
    key = "model.checkpoint_path" if known.file else "model.pretrained"
    value = model.checkpoint_path if known.file else True
    data = Signature.of(info)
    places = order(known.signature, data) if known.file else None
    if known.file is None:  # their names are words of timm's, for people
        known = replace(known, signature=replace(known.signature, class_names=()))
    if problem := None if places else other_classes(known.signature, data):
        raise ConfigError(key, value, f"data={info.name}: {problem}: the classifier would be drawn at random",
                          "evaluate on data of the same classes, or finetune first (task=train)")  # fmt: skip
    return [] if known.signature.named and data.named else [UNNAMED.format(known.origin)]


def counts(file: Path, model: Any) -> tuple[int, int]:
    """(classes, input channels) by the shapes of a timm model's classifier and first layer; 0 classes = not to be told."""
    from isobatch.checkpoint.fitting import bare
    from isobatch.runtime.timm_import import timm

    listed = timm.models.get_pretrained_cfg(model.arch, allow_unregistered=False) if hasattr(model, "arch") else None
    if listed is None or file.suffix in (".npz", ".npy"):
        return 0, 3
    try:
        found = {bare(name): tensor for name, tensor in timm.models.load_state_dict(str(file)).items()}
    except Exception:  # whoever loads it says what is wrong with it
        return 0, 3

    def first(named: Any, axis: int, default: int) -> int:
        for name in (named,) if isinstance(named, str) else named or ():
            shape = getattr(found.get(f"{name}.weight"), "shape", ())
            if len(shape) > axis:
                return int(shape[axis])
        return default

    return first(listed.classifier, 0, 0), first(listed.first_conv, 1, 3)
