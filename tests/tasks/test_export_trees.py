"""`task=export` of models that take more than one tensor of floats: trees, letters, `**x`; examples are the data set's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import train
from safetensors.torch import load_file
from torch import nn

import isobatch
from isobatch import data, loss, model
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.tasks import example_inputs, exporting

SHORT = ("logger=none", "threads=1", "epochs=null", "steps=1", "batch.effective=8", "batch.shard=8", "scheduler=constant",
         "metrics=none", "data=custom", "data.name=forms", "model=custom", "model.name=forms", "loss=custom",
         "loss.name=forms")  # fmt: skip


class Forms:
    """A number, a flag, features and an image, in a dict within a dict."""

    num_classes = 3

    def __init__(self, split: str, text: bool = False):
        self.more: dict[str, Any] = {"text": "words"} if text else {}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[Any, int]:
        features = torch.arange(5.0) + i
        inner = {"flag": torch.tensor(i % 2 == 0), "features": features}
        return {"word": i % 7, "inner": inner, "image": torch.full((3, 4, 4), 9 * i, dtype=torch.uint8), **self.more}, i % 3


class TakesAnything(nn.Module):
    def __init__(self, num_classes: int, in_chans: int):
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 6), nn.Linear(6 + 5 + 3, num_classes)

    def forward(self, **x: Any) -> dict[str, Any]:
        words = self.words(x["word"]) * x["inner"]["flag"].float()[:, None]
        scores = self.layer(torch.cat([words, x["inner"]["features"], x["image"].mean((2, 3))], 1))
        return {"scores": scores, "sums": (words, words.sum(1))}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    isobatch.register("data", "forms", Forms)
    isobatch.register("model", "forms", TakesAnything)
    isobatch.register("loss", "forms", lambda: lambda output, target: nn.functional.cross_entropy(output["scores"], target))
    yield
    for table in (data.TABLE, model.TABLE, loss.TABLE):
        del table["forms"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, *SHORT)
    return folder


def five() -> dict[str, Any]:
    return {"word": torch.tensor([3, 1, 0, 6, 2]), "image": torch.randn(5, 3, 4, 4),
            "inner": {"flag": torch.tensor([True, False, True, True, False]), "features": torch.randn(5, 5)}}  # fmt: skip


def test_a_dict_of_numbers_flags_and_images_and_a_model_that_takes_anything(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "save_onnx", lambda model, *rest: model)  # it takes seconds: the next test
    train(tmp_path, *SHORT, "task=export", f"resume={run}")
    facts = json.loads((tmp_path / "export/export.json").read_text())
    assert facts["input"] == {
        "word": {"shape": ["batch"], "dtype": "int64"},
        "inner": {"flag": {"shape": ["batch"], "dtype": "bool"}, "features": {"shape": ["batch", 5], "dtype": "float32"}},
        "image": {"shape": ["batch", 3, 4, 4], "dtype": "float32"}}  # fmt: skip
    assert facts["output"]["sums"][1] == {"shape": ["batch"], "dtype": "float32"}
    own = TakesAnything(3, 3)
    own.load_state_dict(load_file(tmp_path / "export/model.safetensors"))
    program, inputs = torch.export.load(tmp_path / "export/model.pt2").module(), five()
    with torch.no_grad():
        torch.testing.assert_close(program(**inputs), own(**inputs))


@pytest.mark.slow
def test_the_same_as_onnx(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    train(tmp_path, *SHORT, "task=export", f"resume={run}")
    inputs = five()
    fed = {"word": inputs["word"], "image": inputs["image"], **{f"inner_{key}": leaf for key, leaf in inputs["inner"].items()}}
    file = ReferenceEvaluator(str(tmp_path / "export/model.onnx"))
    found = file.run(None, {key: value.numpy() for key, value in fed.items()})
    program = torch.export.load(tmp_path / "export/model.pt2").module()
    torch.testing.assert_close(torch.tensor(found[0]), program(**inputs)["scores"].detach())


def test_what_no_program_can_take_is_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task=export: the inputs of data=forms hold text, .* make tensors of it"):
        train(tmp_path, *SHORT, "+data.kwargs.text=true", "task=export", f"resume={run}", "allow_contract_change=true")


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(5, 2)

    def forward(self, letters: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.letters(letters).mean(1)


def test_without_its_data_floats_of_the_recorded_shape_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    def gone(seed: int) -> Any:
        raise FileNotFoundError("no such folder")

    config: Any = SimpleNamespace(seed=0, data=SimpleNamespace(name="mine", examples=gone))
    with caplog.at_level("INFO", logger="isobatch"):
        examples = example_inputs.of(config, DataInfo("mine", (4,)))
    assert examples(3).shape == (3, 4) and examples(3).is_floating_point() and examples.one
    assert "data=mine cannot be read (FileNotFoundError: no such folder)" in caplog.text
    config.data.examples = lambda seed: lambda n: torch.arange(n * 4).view(n, 4) % 5
    assert example_inputs.of(config, DataInfo("mine", (4,)))(2).tolist() == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_inputs_have_the_order_and_the_names_of_the_models_parameters() -> None:
    network, one = Letters(), torch.zeros(2, 3, dtype=torch.int64)
    assert example_inputs.names_of(network, (one,)) == ["letters"]
    example_inputs.spell_out(network, (one, one))
    assert example_inputs.names_of(network, (one, one)) == ["input_0", "input_1"]
    assert network(one, one).shape == (2, 2)

    class Two(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a, b

    positional, named = example_inputs.ordered(Two(), {"b": {"c": one}, "a": one})
    assert positional == () and list(named) == ["a", "b"]
    assert example_inputs.names_of(Two(), {"b": {"c": one}, "a": one}) == ["a", "b_c"]
