"""The answers of `task=predict`: every sample once, in its order, whatever the number of ranks; rows are written as they
come in."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobatch import config as configuration
from isobatch.checks import as_option
from isobatch.config import Config
from isobatch.console import make_console
from isobatch.data import Split, unlabelled
from isobatch.data.feed import make_source
from isobatch.data.images import ImageOptions
from isobatch.data.samples import Request
from isobatch.errors import ConfigError, Stopped, reason
from isobatch.evaluate.views import averaged
from isobatch.launch.signals import STOP
from isobatch.planner.trial import is_out_of_memory
from isobatch.precision.forward import forward
from isobatch.resume import rebuild
from isobatch.resume.rebuild import Trained
from isobatch.resume.start import Resume, on_main
from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.summary import summarize
from isobatch.runtime import accelerator, hardware
from isobatch.runtime.distributed import Ranks, choose_device
from isobatch.runtime.randomness import ShardSeeder
from isobatch.runtime.trees import mapped
from isobatch.writer import About, Answered

USUAL_BATCH = 64  # where nothing is typed; never a function of the ranks, so that no bit depends on them
AT_ONCE = 8  # batches of a rank that meet in one exchange


class Job:
    """One prediction, as summary.json is told of it."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self.ranks, self.device, self.started = ranks, device, time.time()
        self.plan: dict[str, Any] = {}
        self.loop: Any = None


def predict(config: Config, run_dir: Path, ranks: Ranks) -> None:
    """Load the model, read the samples, write the answers. A collective.

    Raises:
        ConfigError: no trained weights, no samples, or samples that the model cannot take. Stopped: by a signal.
    """
    device = choose_device(ranks, config.device)
    job, resume, files = Job(ranks, device), Resume(config, run_dir, ranks), RunFiles(run_dir, ranks.is_main)
    lanes = config.parallel.lane_devices(device)
    config = dataclasses.replace(config, precision=resume.precision(device).settled(lanes, ranks))
    files.config(configuration.to_yaml(config.plain))
    hardware.set_up(config, ranks, device)
    with torch.random.fork_rng([]):
        trained = (rebuild.of_weights(config.model, config.plain["model"]) if resume.saved is None
                   else rebuild.of_run(resume.saved, config.checkpoint))  # fmt: skip
    options, split = samples(config, trained)
    about = About(trained.info.class_names, config.predict.top, len(split), trained.info.num_classes)
    console = make_console(ranks.is_main, len(split), len(split))
    console.plan(view(config, trained, options, split, ranks, device), [])
    made: list[Any] = []
    on_main(ranks, lambda: made.append(config.writer.build(run_dir, about)))
    began = time.monotonic()
    console.begin(0)
    try:
        answers = Predictor(dataclasses.replace(config, data=options), trained, split, ranks, device, lanes)
        for answered in answers:
            on_main(ranks, lambda some=answered: made[0].write(some))
            console.counted(answered.start + len(answered.names))
            if signum := ranks.agree(STOP.requested):
                raise Stopped(signum)
        on_main(ranks, lambda: made[0].close())
        ending = "completed"
    except BaseException:
        ending = "failed"
        raise
    finally:
        console.result({"state": ending}, str(run_dir))
    spent = max(time.monotonic() - began, 1e-9)
    summary = summarize(job, "completed", None) | {"samples": len(split), "perf": {"samples_per_s": len(split) / spent}}
    files.summary(summary)
    console.message(f"{len(split):,} samples in {run_dir}, {len(split) / spent:,.0f} samples/s")


def samples(config: Config, trained: Trained) -> tuple[Any, Split]:
    """(options of group `data` as they are used, the samples).

    Raises:
        ConfigError: there are none, or files cannot become what the model takes.
    """
    path, data, info = config.predict.path, config.data, trained.info
    if path is None:
        own = getattr(data, "unlabelled", None)
        split = own(config.seed) if own is not None else data.load(None, config.seed).eval
        if split.info is not None and split.tensors is None:  # pixels are normalised as the weights know them
            split.info = dataclasses.replace(info, shape=split.info.shape)
        return data, unlabelled.without_labels(split)
    if len(info.shape) != 3 or info.shape[0] not in (1, 3) or not (info.mean and info.std):
        raise ConfigError("predict.path", path, f"the weights ({trained.origin}) were not trained on images of files, but on "
                          "inputs as their data set gave them",
                          "register a data set that gives the same (data=custom)")  # fmt: skip
    options = as_files(data, trained)
    return options, unlabelled.load(path, options, dataclasses.replace(info, mean=tuple(options.mean), std=tuple(options.std)),
                                    config.predict.column)  # fmt: skip


def as_files(data: Any, trained: Trained) -> Any:
    """ImageOptions of how files are read for the model: as it was trained, but for what `data.*` states."""
    info = trained.info
    mean, std = (list(v) * info.in_chans if len(v) == 1 else list(v) for v in (info.mean, info.std))
    size: Any = info.shape[-1] if info.shape[-1] == info.shape[-2] else list(info.shape[-2:])
    known = {"image_size": size, "eval_size": as_option(info.eval_size), "crop_pct": info.crop_pct or 1.0,
             "interpolation": info.interpolation or "bilinear", "mean": mean, "std": std}  # fmt: skip
    stated = {field.name: getattr(data, field.name) for field in dataclasses.fields(ImageOptions) if hasattr(data, field.name)}
    if not isinstance(data, ImageOptions):  # of CIFAR or the like: what it says of itself concerns its own images
        stated = {key: value for key, value in stated.items() if key not in known}
    chosen = {**stated, **{key: value for key, value in known.items() if stated.get(key) is None}}
    return ImageOptions(**{**chosen, "in_chans": info.in_chans})


def view(config: Config, trained: Trained, options: Any, split: Split, ranks: Ranks, device: torch.device) -> dict[str, str]:
    """The plan in words."""
    of_run = "" if trained.step is None else f", step {trained.step}, {trained.which} weights"
    found = {"model": trained.origin + of_run}
    if config.predict.path is not None:
        size = options.eval_size or options.image_size
        shown = size if isinstance(size, int) else " x ".join(map(str, size))
        found["images"] = (f"{shown} px, crop {options.crop_pct:g}, {options.interpolation}, mean {_numbers(options.mean)}, "
                           f"std {_numbers(options.std)}")  # fmt: skip
    found["samples"] = f"{len(split):,} of {config.predict.path or f'data={config.data.name}'}"
    found["parallel"] = f"{ranks.world_size} process{'es' if ranks.world_size > 1 else ''} on {accelerator.name(device)}, " + (
        "each with the whole model")  # fmt: skip
    return found


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


class ByElement(NamedTuple):
    """Of each pixel or letter the class alone, (n, ...)."""

    classes: Tensor


class Predictor:
    """The answers in the order of the samples, as the main rank gets them; the others get rows without outputs.

    Batch i goes to rank i mod world size, there to its devices in turn.
    """

    def __init__(self, config: Config, trained: Trained, split: Split, ranks: Ranks, device: torch.device,
                 lanes: Sequence[torch.device]):  # fmt: skip
        self.config, self.trained, self.split, self.ranks, self.lanes = config, trained, split, ranks, lanes
        batch = config.batch
        micro = batch.micro if isinstance(batch.micro, int) else None
        self.size = batch.eval or micro or min(batch.effective or USUAL_BATCH, USUAL_BATCH)
        channels_last = hardware.wants_channels_last(config, device)
        layout = torch.channels_last if channels_last else torch.preserve_format
        model: Any = trained.network.to(device, memory_format=layout)  # type: ignore[call-overload]
        config.parallel.working_copy(config.precision, model, ranks.world_size)  # a level may change its dtype
        if config.compile:
            model.compile(dynamic=False, mode=None if config.compile is True else config.compile)
        self.models = nn.parallel.replicate(model, list(lanes), detach=True) if len(lanes) > 1 else [model]
        self.source = make_source(split, device, config, channels_last, ranks)
        self.seed = ShardSeeder(config.seed, list(lanes))

    def __iter__(self) -> Iterator[Answered]:
        """A collective, round by round."""
        n, size, world = len(self.split), self.size, self.ranks.world_size
        batches = -(-n // size)
        mine = range(self.ranks.rank, batches, world)
        requests = (Request(0, torch.arange(i * size, min((i + 1) * size, n))) for i in mine)
        stream = zip(mine, self.source.batches(requests), strict=True)
        try:
            with torch.no_grad():
                for first in range(0, batches, AT_ONCE * world):
                    here = [(i, self.answer(k, i, inputs)) for k, (i, (inputs, _)) in enumerate(islice(stream, AT_ONCE))]
                    gathered = self.ranks.gather_objects([(i, mapped(Tensor.cpu, self.asked(output))) for i, output in here])
                    parts = dict(pair for some in gathered or [] for pair in some)
                    for i in range(first, min(first + AT_ONCE * world, batches)):
                        yield self.answered(i, parts.get(i))
        finally:
            self.source.close()

    def answer(self, k: int, batch: int, inputs: Any) -> Any:
        """The output for the k-th batch of a round of this rank, number `batch` of all."""
        lane = k % len(self.lanes)
        if lane:
            inputs = mapped(lambda t: t.to(self.lanes[lane], non_blocking=True), inputs)
        self.seed.evaluation(0, batch)
        try:
            return averaged(lambda view: forward(self.models[lane], view, self.config.precision.evaluation(self.lanes[0])),
                            inputs, self.config.evaluate.views, self.trained.info.shape)  # fmt: skip
        except ConfigError:
            raise
        except Exception as error:
            if is_out_of_memory(error) or not isinstance(inputs, Tensor) or tuple(inputs.shape[1:]) == self.trained.info.shape:
                raise
            said = reason(error, 160)
            raise ConfigError("predict.path", self.config.predict.path, "the model cannot take inputs "
                              f"{list(inputs.shape[1:])}: it was trained on {list(self.trained.info.shape)} ({said})",
                              "give it inputs as in its training") from error  # fmt: skip

    def asked(self, outputs: Any) -> Any:
        """What the main rank gets of them: of the scores of every pixel the class alone, where the writer asks for no more."""
        return ByElement(self.classes(outputs)) if not self.config.writer.whole and self.by_element(outputs) else outputs

    def by_element(self, outputs: Any) -> bool:
        """Whether they are (n, classes, ...): scores of each pixel or letter."""
        count = self.trained.info.num_classes
        return isinstance(outputs, Tensor) and outputs.ndim > 2 and count > 1 and outputs.shape[1] == count

    def classes(self, outputs: Tensor) -> Tensor:
        """(n, ...) of scores (n, classes, ...), in as few bytes as hold them."""
        return outputs.argmax(1).to(torch.uint8 if self.trained.info.num_classes <= 256 else torch.int32)

    def answered(self, i: int, outputs: Any) -> Answered:
        numbers = range(i * self.size, min((i + 1) * self.size, len(self.split)))
        names = unlabelled.names_of(self.split, numbers) if self.ranks.is_main else [""] * len(numbers)
        if isinstance(outputs, ByElement):
            return Answered(numbers.start, names, None, None, outputs.classes)
        if self.by_element(outputs):
            return Answered(numbers.start, names, outputs, None, self.classes(outputs))
        classes = self.trained.info.num_classes
        scores = isinstance(outputs, Tensor) and outputs.ndim == 2 and classes and outputs.shape[1] == classes
        probable = Tensor.sigmoid if self.trained.info.labels == "several" else lambda logits: logits.softmax(1)
        return Answered(numbers.start, names, outputs, probable(outputs) if scores else None)
