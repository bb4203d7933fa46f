"""TensorBoard event files in the run folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.logger.protocol import Logger, RunInfo, Table
from isobatch.run_folder.rows import name_of

if TYPE_CHECKING:
    from torch import nn

    from isobatch.logger.options import TensorBoard


class TensorBoardLogger(Logger):
    """Writes `<run folder>/tensorboard`; its steps are `samples`."""

    def __init__(self, options: TensorBoard, info: RunInfo):
        self.options, self.info = options, info
        self.folder = info.run_dir / "tensorboard"
        self.how_to_look = [f"tensorboard --logdir {self.folder}"]
        self._writer: Any = None
        self._watched = 0
        self._logged: Collection[tuple[int, str]] = ()

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        from torch.utils.tensorboard import SummaryWriter

        # what was written after the checkpoint that a run goes on from is written again
        purge = samples + 1 if samples else None
        self._logged = {name for name in logged if name[0] <= samples}  # but for an evaluation that the checkpoint lacks
        self._writer = SummaryWriter(str(self.folder), purge_step=purge, flush_secs=self.options.flush_s)
        self._writer.add_text("config", f"```json\n{json.dumps(dict(self.info.plain), indent=2, default=str)}\n```")
        self._writer.add_text("plan", "\n".join(f"- {key}: {value}" for key, value in plan.items()))

    def log(self, row: Mapping[str, Any]) -> None:
        if name_of(row) in self._logged:
            return
        for key, value in row.items():
            if key != "samples" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, row["samples"])

    def watch(self, row: Mapping[str, Any], model: nn.Module) -> None:
        if self.options.histograms == "none":
            return
        self._watched += 1
        if (self._watched - 1) % self.options.histograms_every == 0:
            from isobatch.logger.histograms import histograms

            for name, (counts, edges) in histograms(model, self.options.histograms).items():
                self._write_histogram(name, counts, edges, row["samples"])

    def _write_histogram(self, name: str, counts: list[int], edges: list[float], samples: int) -> None:
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        self._writer.add_histogram_raw(
            name, min=edges[0], max=edges[-1], num=sum(counts),
            sum=sum(n * x for n, x in zip(counts, middles, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(counts, middles, strict=True)),
            bucket_limits=edges[1:], bucket_counts=counts, global_step=samples,
        )  # fmt: skip

    def report(self, row: Mapping[str, Any], images: Mapping[str, Path], tables: Mapping[str, Table]) -> None:
        import numpy
        from PIL import Image

        for name, path in images.items():
            with Image.open(path) as picture:
                self._writer.add_image(name, numpy.asarray(picture.convert("RGB")), row["samples"], dataformats="HWC")
        for name, (columns, rows) in tables.items():
            lines = [" | ".join(map(str, line)) for line in (columns, ["---"] * len(columns), *rows)]
            self._writer.add_text(name, "\n".join(lines), row["samples"])

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._writer is None:
            return
        for metric, value in (summary.get("best") or {}).items():
            self._writer.add_scalar(f"best/{metric}", value, summary.get("samples") or 0)
        self._writer.close()
