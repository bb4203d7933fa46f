"""A run's model as files that other programs load, each of them loaded again and compared before it counts.

    export/model.safetensors  the weights; with config.json a folder for timm.create_model("local-dir:RUN/export")
    export/model.pt2          torch.export, for any batch size; needs neither this program nor the model's source
    export/model.onnx         where onnx and onnxscript are installed
    export/export.json        what goes in and what comes out

Needs the checkpoint alone; of a data set of the user's own its first samples too (example_inputs.py). What is read is data:
names reach classes through the tables, weights are tensors.
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
from isobatch.checks import sides
from isobatch.config import Config
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.resume import rebuild
from isobatch.resume.signature import Signature
from isobatch.run_folder.files import write_json
from isobatch.runtime.trees import Tree, call, tensors
from isobatch.tasks import example_inputs
from isobatch.tasks.example_inputs import ExampleInputs

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
    examples = example_inputs.of(config, info)
    weights = save_weights(model, node, info, folder)
    example_inputs.spell_out(model, examples(1))
    with quietly(node, "cannot be called on inputs of its data set", folder):
        output = answer(model, examples, 1)
    facts = {"checkpoint": str(saved.path), "step": saved.step, "weights": which, "model": node,
             "input": examples.described(), "output": example_inputs.forms(output), "classes": list(info.class_names),
             "largest_difference": {}}  # fmt: skip
    if isinstance(examples(1), Tensor):
        facts["input"] |= {"mean": list(info.mean), "std": list(info.std)}
    checked = {"model.safetensors": weights, "model.pt2": save_program(model, node, examples, folder)}
    missing = [name for name in ONNX if importlib.util.find_spec(name) is None]
    if missing:
        log.info("export: no model.onnx, because of missing packages (%s): pip install 'isobatch[onnx]'", " and ".join(missing))
    else:
        checked["model.onnx"] = save_onnx(model, node, examples, folder)
    facts["largest_difference"] = {name: agrees(model, examples, again, folder / name) for name, again in checked.items()}
    write_json(folder / "export.json", facts)
    log.info("export: %s weights of step %d as %s in %s", which, saved.step, ", ".join(checked), folder)
    return folder


@torch.no_grad()
def answer(model: Callable[..., Any], examples: ExampleInputs, batch: int) -> Tree:
    return call(model, examples(batch))


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
        normalise["test_input_size"] = [info.in_chans, *sides(info.eval_size)]
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


def save_program(model: nn.Module, node: dict[str, Any], examples: ExampleInputs, folder: Path) -> Callable[..., Any]:
    """model.pt2 by torch.export, with a free batch size; loaded again."""
    path = folder / "model.pt2"
    with quietly(node, "torch.export cannot trace it", folder):
        inputs = examples(2)
        positional, named = example_inputs.ordered(model, inputs)
        free = example_inputs.free_batch(model, inputs)
        program = torch.export.export(model, positional, named, dynamic_shapes=free)
        torch.export.save(program, path)
        loaded: Callable[..., Any] = torch.export.load(path).module()  # this program's own file, written a moment ago
        return loaded


def save_onnx(model: nn.Module, node: dict[str, Any], examples: ExampleInputs, folder: Path) -> Callable[..., Any]:
    """model.onnx, loaded by onnxruntime if it is there, else by onnx's own evaluator.

    Input `images` and output `logits` of a model with one of each; else inputs have the names of the model's parameters.
    """
    path = folder / "model.onnx"
    with quietly(node, "it cannot be written as ONNX", folder):
        inputs = examples(2)
        positional, named = example_inputs.ordered(model, inputs)
        names = ["images"] if examples.one else example_inputs.names_of(model, inputs)
        outputs = ["logits"] if isinstance(answer(model, examples, 2), Tensor) else None
        program: Any = torch.onnx.export(
            model, positional, kwargs=named, dynamo=True, verbose=False, input_names=names, output_names=outputs,
            dynamic_shapes=example_inputs.free_batch(model, inputs),
        )  # fmt: skip
        program.save(path)
        if importlib.util.find_spec("onnxruntime"):
            import onnxruntime

            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        else:
            from onnx.reference import ReferenceEvaluator

            session = ReferenceEvaluator(str(path))

    def again(*positional: Any, **named: Any) -> list[Tensor]:
        leaves = tensors(example_inputs.ordered(model, named or positional))
        fed = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
        return [torch.as_tensor(value) for value in session.run(None, fed)]

    return again


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


def agrees(model: nn.Module, examples: ExampleInputs, again: Callable[..., Any], path: Path) -> float:
    """The largest difference between what the file and the model answer.

    Raises:
        ConfigError: it is more than rounding.
    """
    largest = 0.0
    for batch in BATCHES:
        expected, found = (tensors(answer(made, examples, batch)) for made in (model, again))
        same = len(found) == len(expected)
        for one, other in zip(found, expected, strict=same):
            same &= one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4)
            if same and one.numel():
                largest = max(largest, float((one.double() - other.double()).abs().max()))
        if not same:
            raise ConfigError("task", "export", f"{path} answers otherwise than the model on a batch of {batch}",
                              "do not use it, and report the model") from None  # fmt: skip
    return largest
