"""A run's model as files that other programs load, each of them loaded again and compared before it counts.

    export/model.safetensors  the weights; with config.json a folder for timm.create_model("local-dir:RUN/export")
    export/model.pt2          torch.export, for any batch size; needs neither this program nor the model's source
    export/model.onnx         where onnx and onnxscript are installed
    export/export.json        what goes in and what comes out

Needs the checkpoint alone, no data. What is read is data: names reach classes through the tables, weights are tensors.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.checkpoint import read
from isobatch.config import Config
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.resume import rebuild
from isobatch.resume.signature import Signature
from isobatch.run_folder.files import write_json

log = logging.getLogger("isobatch")

BATCHES = (1, 3)  # sizes on which an exported file has to answer as the model does
ONNX = ("onnx", "onnxscript")


def export(config: Config, run_dir: Path) -> Path:
    """Export the checkpoint that `resume`, checkpoint.load and checkpoint.weights name; returns the folder.

    Raises:
        ConfigError: it is not there, its model cannot be built or traced, or an exported file answers otherwise.
    """
    saved = read(Path(str(config.resume)), config.checkpoint.load)
    trained = rebuild.of_run(saved, config.checkpoint)
    model, info, node, which = trained.network, trained.info, trained.node, trained.which
    folder = run_dir / "export"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"checkpoint": str(saved.path), "step": saved.step, "weights": which, "model": node,
             "input": {"shape": ["batch", *info.shape], "dtype": "float32", "mean": list(info.mean), "std": list(info.std)},
             "output": {"shape": ["batch", *answer(model, info, 1).shape[1:]]}, "classes": list(info.class_names),
             "largest_difference": {}}  # fmt: skip
    checked = {"model.safetensors": save_weights(model, node, info, folder),
               "model.pt2": save_program(model, node, info, folder)}  # fmt: skip
    missing = [name for name in ONNX if importlib.util.find_spec(name) is None]
    if missing:
        log.info("export: no model.onnx, because of missing packages (%s): pip install 'isobatch[onnx]'", " and ".join(missing))
    else:
        checked["model.onnx"] = save_onnx(model, node, info, folder)
    facts["largest_difference"] = {name: agrees(model, info, again, folder / name) for name, again in checked.items()}
    write_json(folder / "export.json", facts)
    log.info("export: %s weights of step %d as %s in %s", which, saved.step, ", ".join(checked), folder)
    return folder


def example(info: DataInfo, batch: int) -> Tensor:
    """(batch, *shape) normal numbers, the same at every call."""
    return torch.randn(batch, *info.shape, generator=torch.Generator().manual_seed(batch))


@torch.no_grad()
def answer(model: Callable[[Tensor], Any], info: DataInfo, batch: int) -> Tensor:
    output = model(example(info, batch))
    if not isinstance(output, Tensor):
        raise ConfigError("model.name", type(model).__name__, "returns more than one tensor", "export it in your own code")
    return output


def save_weights(model: nn.Module, node: dict[str, Any], info: DataInfo, folder: Path) -> Callable[[Tensor], Any]:
    """model.safetensors, and for timm's models the config.json that names the architecture. Returns the model loaded again."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path,
              metadata={"format": "pt", **Signature.of(info).metadata()})  # fmt: skip
    if node["name"] != "timm" or node.get("small_stem"):
        return rebuild.network(node, info, load_file(path))
    from isobatch.runtime.timm_import import timm

    own: Any = getattr(model, "pretrained_cfg", {})
    # all that timm's resolve_data_config reads, since it has defaults of its own for what is missing
    normalised = len(info.mean) == info.in_chans
    normalise: dict[str, Any] = {
        "mean": list(info.mean) if normalised else [0.0] * info.in_chans,
        "std": list(info.std) if normalised else [1.0] * info.in_chans,
        "crop_pct": 1.0 if info.crop_pct is None else info.crop_pct, "crop_mode": "center",
        "interpolation": info.interpolation or "bilinear",
    }  # fmt: skip
    if info.eval_size is not None:
        normalise["test_input_size"] = [info.in_chans, info.eval_size, info.eval_size]
    write_json(folder / "config.json", {
        "architecture": str(node["arch"]).split(".")[0], "num_classes": info.num_classes,
        "num_features": int(getattr(model, "num_features", 0)), "label_names": list(info.class_names) or None,
        "model_args": {**node.get("kwargs", {}), "in_chans": info.in_chans},
        "pretrained_cfg": {"input_size": list(info.shape), "fixed_input_size": bool(own.get("fixed_input_size", False)),
                           "num_classes": info.num_classes, "classifier": own.get("classifier"),
                           "first_conv": own.get("first_conv"), **normalise},
    })  # fmt: skip
    with quietly(node, "timm cannot make it from a folder", folder):
        loaded: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
        return loaded.eval()


def save_program(model: nn.Module, node: dict[str, Any], info: DataInfo, folder: Path) -> Callable[[Tensor], Any]:
    """model.pt2 by torch.export, with a free batch size; loaded again."""
    path = folder / "model.pt2"
    with quietly(node, "torch.export cannot trace it", folder):
        free = {0: torch.export.Dim("batch", min=1)}
        program = torch.export.export(model, (example(info, 2),), dynamic_shapes=(free,))
        torch.export.save(program, path)
        loaded: Callable[[Tensor], Any] = torch.export.load(path).module()  # this program's own file, written a moment ago
        return loaded


def save_onnx(model: nn.Module, node: dict[str, Any], info: DataInfo, folder: Path) -> Callable[[Tensor], Any]:
    """model.onnx (input `images`, output `logits`); loaded by onnxruntime if it is there, else by onnx's own evaluator."""
    path = folder / "model.onnx"
    with quietly(node, "it cannot be written as ONNX", folder):
        program: Any = torch.onnx.export(
            model, (example(info, 2),), dynamo=True, verbose=False, input_names=["images"], output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )  # fmt: skip
        program.save(path)
        if importlib.util.find_spec("onnxruntime"):
            import onnxruntime

            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        else:
            from onnx.reference import ReferenceEvaluator

            session = ReferenceEvaluator(str(path))
    return lambda inputs: torch.as_tensor(session.run(None, {"images": inputs.numpy()})[0])


@contextmanager
def quietly(node: dict[str, Any], problem: str, folder: Path) -> Iterator[None]:
    """Around somebody else's code: what it logs and warns of is dropped, and whatever it raises becomes one line."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        key = "model.arch" if "arch" in node else "model.name"
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
        raise ConfigError(key, node[key[6:]], f"{problem} ({type(error).__name__}: {said})",
                          f"load {folder / 'model.safetensors'} into the model's own class") from None  # fmt: skip
    finally:
        logging.disable(before)


def agrees(model: nn.Module, info: DataInfo, again: Callable[[Tensor], Any], path: Path) -> float:
    """The largest difference between what the file and the model answer.

    Raises:
        ConfigError: it is more than rounding.
    """
    largest = 0.0
    for batch in BATCHES:
        expected, found = answer(model, info, batch), answer(again, info, batch)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
            raise ConfigError("task", "export", f"{path} answers otherwise than the model on a batch of {batch}",
                              "do not use it, and report the model") from None  # fmt: skip
        largest = max(largest, float((found - expected).abs().max()))
    return largest
