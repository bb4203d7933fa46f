"""apex's ladder on plain torch.

Each class answers: what does the forward run on (`working_copy`), what is autocast (`autocast` in training,
`evaluation` and `teacher` for networks that do not train), and is the loss scaled (`scaler`). Levels with master
weights keep the model itself in fp32 and compute on a half copy of it; optimizer, EMA, clipping and checkpoints only see the
model itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice
from isobatch.errors import ConfigError
from isobatch.precision.scales import SCALE, check_scale, describe_scale, parse_scale

if TYPE_CHECKING:
    import torch
    from torch import nn

    from isobatch.precision.masters import WorkingCopy
    from isobatch.precision.scaling import LossScaler
    from isobatch.runtime.distributed import Ranks

SWITCH = "keep_batchnorm_fp32"


@dataclass(frozen=True)
class Full:
    """fp32 (apex O0); `tf32` lets CUDA matmuls and convolutions round their inputs to tf32.

    Args:
        tf32: null = torch's own setting: convolutions may, matmuls may not; true: both may; false: neither.
    """

    name: str = "full"
    tf32: bool | None = None

    def setup(self) -> None:
        """Set torch's matmul precision for this process: said explicitly, so that no earlier job's setting leaks in."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = bool(self.tf32)
        torch.backends.cudnn.allow_tf32 = self.tf32 is not False

    def as_begun(self, scaled: bool, device: torch.device) -> dict[str, Any]:
        """Options that are left to the machine and meant something else when a run began: what they were then.

        Args:
            scaled: a loss scale was saved.
        """
        return {}

    def settled(self, devices: list[torch.device], ranks: Ranks) -> Full:
        """These options with what is left to the machine decided alike for all `devices` of all ranks. A collective."""
        return self

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of matmuls and convolutions."""
        import torch

        return torch.float32

    def half_compute(self, device: torch.device) -> bool:
        """Whether matmuls and convolutions run in a 16-bit type, on tensor cores where there are any."""
        return self.compute_dtype(device).itemsize == 2

    def on_tensor_cores(self, device: torch.device) -> bool:
        """Whether convolutions do: in a 16-bit type or in tf32."""
        from isobatch.runtime.accelerator import tf32

        return device.type == "cuda" and (self.half_compute(device) or (self.tf32 is not False and tf32(device)))

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around the training forward."""
        return nullcontext()

    def evaluation(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward of the model itself or its average, in evaluation."""
        return self.autocast(device)

    def teacher(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward of an fp32 network that does not train."""
        return self.autocast(device)

    def scaler(self, device: torch.device) -> LossScaler:
        from isobatch.precision.scaling import LossScaler

        return LossScaler(None)

    def gather_dtype(self) -> torch.dtype | None:
        """The dtype in which fp32 weights that are spread over ranks are gathered for a forward; None: their own."""
        return None

    def working_copy(self, model: nn.Module, gathered: bool = False) -> WorkingCopy:
        """What the forward runs on. Called before the optimizer is built, because it may change `model`'s dtype.

        Args:
            gathered: the strategy gathers the weights for each forward, in `gather_dtype`.
        """
        from isobatch.precision.masters import SameModel

        return SameModel(model)

    def describe(self, device: torch.device) -> str:
        if self.tf32:
            return "fp32 with tf32 matmuls"
        return "fp32" if not self.on_tensor_cores(device) else (
            "fp32, convolutions in tf32 as torch has it (precision.tf32=false: full fp32, slower; precision=tf32: matmuls too)"
        )  # fmt: skip


@dataclass(frozen=True)
class Autocast(Full):
    """amp (apex O1) and bf16: fp32 weights, torch.autocast around the forward.

    Args:
        dtype: `auto` is bfloat16, but float16 on CUDA cards without it (compute capability below 8).
        loss_scale: `auto` = 65536, dynamic, where the dtype is float16; a number to start from; `static:<n>`; null.
        growth_factor, growth_interval: the scale grows after so many good updates in a row.
        backoff_factor: the scale is multiplied with it when an update is withheld.
        min_loss_scale: an update withheld at this scale ends the run with advice.
        cache_enabled: autocast keeps the half weights of a forward.
        keep_batchnorm_fp32: apex's switch, which has no meaning here: autocast leaves the weights alone.
    """

    name: str = "autocast"
    dtype: str = "auto"
    loss_scale: Any = "auto"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_loss_scale: float = 1.0
    cache_enabled: bool = True
    keep_batchnorm_fp32: bool | None = None

    def __post_init__(self) -> None:
        choice("precision.dtype", self.dtype, ("auto", "float16", "bfloat16"))
        if self.keep_batchnorm_fp32 is not None:
            raise ConfigError(f"precision.{SWITCH}", self.keep_batchnorm_fp32,
                              "is a switch of levels with half weights; under autocast all weights are fp32",
                              "set it to null, or use precision=O3")  # fmt: skip
        check_scale(self)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        import torch

        if self.dtype == "auto":
            from isobatch.runtime.accelerator import tensor_cores

            return torch.float16 if device.type == "cuda" and not tensor_cores(device) else torch.bfloat16
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def half_compute(self, device: torch.device) -> bool:
        return True

    def as_begun(self, scaled: bool, device: torch.device) -> dict[str, Any]:
        # what auto meant on every card once, and means on some; its loss scale goes on too
        return {"dtype": "float16"} if self.dtype == "auto" and scaled and device.type == "cuda" else {}

    def settled(self, devices: list[torch.device], ranks: Ranks) -> Full:
        wanted = {str(self.compute_dtype(device)) for device in devices}
        if self.dtype == "auto" and ranks.agree(int("torch.float16" in wanted)):
            return replace(self, dtype="float16")
        return self

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        import torch

        return torch.autocast(device.type, dtype=self.compute_dtype(device), cache_enabled=self.cache_enabled)

    def scaler(self, device: torch.device) -> LossScaler:
        from isobatch.precision.scaling import LossScaler

        initial, dynamic = parse_scale(self.loss_scale)
        if _name(self.compute_dtype(device)) != "float16":
            initial = None  # the range of bf16 is that of fp32; a scale was asked for only where dtype=auto finds fp16
        return LossScaler(initial, self.growth_factor, self.backoff_factor, self.growth_interval, self.min_loss_scale,
                          dynamic)  # fmt: skip

    def describe(self, device: torch.device) -> str:
        text = f"fp32 weights, {_name(self.compute_dtype(device))} autocast, {describe_scale(self, device)}"
        if self.dtype == "auto" and device.type == "cpu":
            text += " (fp16 is for CUDA; precision.dtype=float16 forces it, 25 to 50 times slower)"
        elif self.dtype == "auto":
            has_it = str(self.compute_dtype(device)) == "torch.bfloat16"
            text += " (this device has bf16; precision.dtype=float16: fp16 with a loss scale)" if has_it else (
                    " (this device has no bf16)")  # fmt: skip
        return text


@dataclass(frozen=True)
class MasterWeights(Autocast):
    """O2 and bf16_pure: a half copy of the model computes, batch norm and everything the optimizer updates is fp32.

    No autocast in training: inputs are cast to half, outputs to fp32. Evaluation runs the fp32 masters (or their
    average) under autocast in the same dtype.
    """

    name: str = "master"
    dtype: str = "float16"
    keep_batchnorm_fp32: bool | None = True

    def __post_init__(self) -> None:
        choice("precision.dtype", self.dtype, ("float16", "bfloat16"))
        if self.keep_batchnorm_fp32 is not True:
            raise ConfigError(f"precision.{SWITCH}", self.keep_batchnorm_fp32,
                              "master weights (O2, bf16_pure) share batch norm's fp32 layers with the half copy",
                              f"set precision.{SWITCH}=true, or use precision=O3")  # fmt: skip
        check_scale(self)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()

    def evaluation(self, device: torch.device) -> AbstractContextManager[Any]:
        return super().autocast(device)

    teacher = evaluation

    def gather_dtype(self) -> torch.dtype | None:
        import torch

        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def working_copy(self, model: nn.Module, gathered: bool = False) -> WorkingCopy:
        import torch

        from isobatch.precision.masters import HalfCopy, SameModel

        if gathered:
            return SameModel(model)
        return HalfCopy(model, getattr(torch, self.dtype))

    def describe(self, device: torch.device) -> str:
        return f"{self.dtype} copy of fp32 master weights, {describe_scale(self, device)}"


@dataclass(frozen=True)
class PureHalf(MasterWeights):
    """O3: the model itself is half, and the optimizer updates half weights. No loss scale, no autocast.

    keep_batchnorm_fp32: leave the layers with running statistics in fp32.
    """

    name: str = "half"
    loss_scale: Any = None
    keep_batchnorm_fp32: bool | None = False

    def __post_init__(self) -> None:
        choice("precision.dtype", self.dtype, ("float16", "bfloat16"))
        choice(f"precision.{SWITCH}", self.keep_batchnorm_fp32, (False, True))
        if self.loss_scale is not None:
            raise ConfigError(f"precision.{SCALE}", self.loss_scale,
                              "pure half (O3) has no fp32 gradients in which a scale could be undone",
                              "set precision.loss_scale=null, or use precision=O2")  # fmt: skip
        check_scale(self)

    def evaluation(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()

    def teacher(self, device: torch.device) -> AbstractContextManager[Any]:
        return super().evaluation(device)

    def gather_dtype(self) -> torch.dtype | None:
        return None

    def working_copy(self, model: nn.Module, gathered: bool = False) -> WorkingCopy:
        import torch

        from isobatch.precision.masters import HalfModel

        return HalfModel(model, getattr(torch, self.dtype), bool(self.keep_batchnorm_fp32))

    def describe(self, device: torch.device) -> str:
        norms = "fp32" if self.keep_batchnorm_fp32 else "half"
        return f"pure {self.dtype}: weights and updates too, batch norm in {norms}, no loss scale"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
