"""First weights of a timm model from a file, and the stem that ResNets have for small images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from isobatch.checkpoint.fitting import strip_prefixes
from isobatch.errors import ConfigError, reason
from isobatch.resume.signature import UNNAMED, Signature, order, other_classes, other_normalization
from isobatch.runtime.timm_import import timm

if TYPE_CHECKING:
    from isobatch.data import DataInfo

log = logging.getLogger("isobatch")

# where the weights of a run folder, or of one that task=export made, lie
INSIDE = ("checkpoints/best/model.safetensors", "checkpoints/last/model.safetensors", "export/model.safetensors",
          "model.safetensors")  # fmt: skip


def load_into(model: nn.Module, path: str, info: DataInfo) -> None:
    """Load the weights of the file or folder `path` into `model`, in torch's safe mode.

    The classifier is the one part that may differ. Made for other classes (of the same number too) it keeps its new weights;
    made for those of the data in another order, its outputs are put into the data's.

    Raises:
        ConfigError: no such file, or one that does not fit.
    """
    file = located(path)
    if file.suffix in (".npz", ".npy"):
        model.load_pretrained(str(file))  # type: ignore[operator]  # the formats of some ViTs' authors
        return
    try:
        read: dict[str, Any] = dict(timm.models.load_state_dict(str(file)))
    except Exception as error:
        said = reason(error, 120)
        raise unfit(path, f"cannot be read in torch's safe mode ({said})") from None
    current = model.state_dict()
    saved = strip_prefixes(read, current)  # timm strips each kind of prefix once
    named: Any = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    heads = tuple(f"{name}." for name in ((named,) if isinstance(named, str) else named))
    known, data = recorded(file), Signature.of(info)
    places = known and order(known, data)
    other = known is not None and places is None and other_classes(known, data)
    new = [k for k, v in current.items() if k.startswith(heads) and (other or k not in saved or shape(saved[k]) != v.shape)]
    for name in [k for k in saved if k.startswith(heads) and (k in new or k not in current)]:
        del saved[name]
    missing, extra = current.keys() - saved.keys() - set(new), saved.keys() - current.keys()
    if missing or extra:
        listed = ", ".join(sorted(missing or extra)[:3])
        raise unfit(path, f"{'lacks' if missing else 'also has'} {listed}")
    for name, tensor in saved.items():
        if shape(tensor) != current[name].shape:
            raise unfit(path, f"has {name} as {list(shape(tensor) or ())}, and here it is {list(current[name].shape)}")
    if places and places != sorted(places):
        moved = {k: v[places] for k, v in saved.items() if k.startswith(heads) and v.shape[:1] == (len(places),)}
        saved |= moved
        log.info("model: the classifier's outputs (%s) are put into the order of this data's classes", ", ".join(moved))
    model.load_state_dict(saved, strict=False)
    if new:
        log.info("model: the classifier (%s) is new%s, everything else comes from %s", ", ".join(new),
                 f" ({other})" if other else "", file)  # fmt: skip
    elif heads and not (known and known.named and data.named):
        log.info("model: %s", UNNAMED.format(file if data.named else "the data"))
    warn_of_normalization(known, info)


def recorded(file: Path) -> Signature | None:
    """What the file of weights says of its classes and images; None = nothing."""
    if file.suffix != ".safetensors":
        return None
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return Signature.from_metadata(opened.metadata())


def warn_of_normalization(weights: Signature | None, info: DataInfo) -> None:
    """Say so when a training begins with weights that know images of another kind: it works, and starts worse than it could."""
    if weights and len(weights.mean) in (1, info.in_chans) and (found := other_normalization(weights, Signature.of(info))):
        log.warning("model: %s: data.mean and data.std of the first weights would suit them better", found)


def located(path: str) -> Path:
    """The file of weights that `path` is or holds."""
    given = Path(path)
    for file in (given, *(given / inside for inside in INSIDE)):
        if file.is_file():
            return file
    raise ConfigError("model.checkpoint_path", path, "is neither a file of weights nor a run folder with checkpoints",
                      "set it to a .safetensors or .pth file, or to a run folder")  # fmt: skip


def unfit(path: str, problem: str) -> ConfigError:
    return ConfigError("model.checkpoint_path", path, problem, "set model.arch and model.kwargs to those of the file")


def shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def small_stem(model: nn.Module, arch: str) -> None:
    """Give a ResNet a 3x3 stem with stride 1 and no max pool, in place.

    Raises:
        ConfigError: it has no such stem.
    """
    stem = getattr(model, "conv1", None)
    if not isinstance(stem, nn.Conv2d) or not isinstance(getattr(model, "maxpool", None), nn.Module):
        raise ConfigError("model.small_stem", True, f"{arch} has no first convolution and max pool to replace",
                          "set model.small_stem=false, or choose a ResNet")  # fmt: skip
    model.conv1 = nn.Conv2d(stem.in_channels, stem.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm's ResNets begin
    model.maxpool = nn.Identity()
