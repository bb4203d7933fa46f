"""Whatever a model's constructor or switch raises is one line that names the key."""

from __future__ import annotations

from typing import Any

import pytest

import isobatch
from isobatch.config import options
from isobatch.data import DataInfo
from isobatch.errors import ConfigError

INFO = DataInfo("images", (3, 32, 32), 4)


@pytest.mark.parametrize(("node", "says"), [
    ({"arch": "dla46_c", "grad_checkpointing": True}, r"^model\.grad_checkpointing=True: dla46_c has no gradient"),
    ({"arch": "test_resnet", "kwargs": {"act_layer": "nope"}}, r"^model\.arch=test_resnet: timm could not build it \("),
    ({"arch": "test_resnet", "kwargs": {"nope": 1}}, r"^model\.arch=test_resnet: timm could not build it \(TypeError"),
])  # fmt: skip
def test_timms(node: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options("model", {"name": "timm", **node}).build(INFO)


def test_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(num_classes: int, in_chans: int) -> Any:
        return {}["layers"]

    isobatch.register("model", "broken_one", broken)
    with pytest.raises(ConfigError, match=r"^model\.name=broken_one: could not be built \(KeyError: 'layers', in .*refusals"):
        options("model", {"name": "broken_one"}).build(INFO)


def test_a_word_that_only_timms_encoders_would_read() -> None:
    kwargs = {"encoder_depth": 3, "decoder_channels": [8, 8, 4]}
    options("model", {"name": "smp", "kwargs": kwargs}).build(INFO)
    with pytest.raises(ConfigError, match=r"model\.kwargs=.*resnet18 does not read encoder_depht; it reads encoder_depth, "):
        options("model", {"name": "smp", "kwargs": {"encoder_depht": 3}}).build(INFO)
