"""Reading: the same batches whoever reads them, generators left alone, failures in one line, no process left."""

from __future__ import annotations

import io
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image, UnidentifiedImageError

from isobatch.data.base import DataInfo, Split
from isobatch.data.device import ToDevice
from isobatch.data.feed import Request
from isobatch.data.loader import WorkerSource, choose_workers
from isobatch.data.samples import Samples, error_line, stacked
from isobatch.errors import JobFailed

CPU = torch.device("cpu")


class Draws:
    """Every sample is three draws, one from each generator; some indices cannot be read."""

    def __init__(self, n: int = 16, broken: tuple[int, ...] = (), error: type[Exception] = OSError):
        self.n, self.broken, self.error = n, broken, error

    def __len__(self) -> int:
        return self.n

    def describe(self, index: int) -> str:
        return f"/photos/{index}.jpg"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.broken:
            raise self.error("image file is truncated")
        draws = [torch.rand((), dtype=torch.float64).item(), numpy.random.rand(), random.random()]
        return torch.tensor(draws, dtype=torch.float64), index


def source(workers: int, dataset: Any = None, seed: int = 0, replaces: bool = False, persistent: bool = True) -> WorkerSource:
    split = Split(dataset or Draws())
    return WorkerSource(Samples(split, seed, replaces), ToDevice(CPU, None, False), workers, persistent)


def requests(*epochs: int, size: int = 4, n: int = 16) -> Iterator[Request]:
    for epoch in epochs:
        for start in range(0, n, size):
            yield Request(epoch, torch.arange(start, start + size))


def read(reader: WorkerSource, *epochs: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*reader.batches(requests(*epochs, size=size)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def states() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()  # type: ignore[misc]
    return torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()


@pytest.mark.parametrize(("workers", "persistent", "size"), [(1, True, 4), (2, False, 8), (4, True, 2)])
def test_batches_do_not_depend_on_who_reads_them(workers: int, persistent: bool, size: int) -> None:
    before, there = states(), multiprocessing.active_children()  # another test's may still be ending
    alone, several = source(0), source(workers, persistent=persistent)
    try:
        inputs, targets = read(alone, 0, 1)
        assert targets.tolist() == [*range(16), *range(16)]
        assert len(set(inputs.flatten().tolist())) == inputs.numel(), "two draws are equal"
        for epochs in ((0, 1), (1,), (0,)):  # again: an evaluation runs more than once
            expected = torch.cat([inputs[16 * e : 16 * e + 16] for e in epochs])
            assert read(several, *epochs, size=size)[0].equal(expected)
        assert not read(source(0, seed=1), 0)[0].equal(inputs[:16])
        assert states() == before, "the training process's generators were touched"
    finally:
        several.close()
    assert set(multiprocessing.active_children()) <= set(there)


def test_closing_in_the_middle_leaves_no_process() -> None:
    there = multiprocessing.active_children()
    reader = source(2)
    batches = reader.batches(requests(*range(50)))
    next(batches)
    workers = list(reader.iterator._workers)
    assert len(workers) == 2 and all(w.is_alive() for w in workers)
    reader.close()
    reader.close()
    assert not any(w.is_alive() for w in workers) and set(multiprocessing.active_children()) <= set(there)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_in_one_line(workers: int) -> None:
    reader = source(workers, Draws(broken=(5,)))
    try:
        with pytest.raises(JobFailed) as failure:
            read(reader, 0)
    finally:
        reader.close()
    line = str(failure.value)
    assert line == "data: sample 5 (/photos/5.jpg) could not be read: OSError: image file is truncated"
    assert "in __getitem__" in str(failure.value.__cause__), "who wrote the dataset sees where"


def test_what_is_said_of_a_damaged_image_holds_no_address() -> None:
    with pytest.raises(UnidentifiedImageError, match="object at 0x") as raised:
        Image.open(io.BytesIO(b"junk"))
    assert error_line(raised.value) == "cannot identify image file"


@pytest.mark.parametrize("workers", [0, 2])
def test_replace_takes_the_next_sample_and_says_so(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    reader = source(workers, Draws(broken=(5, 6, 15)), replaces=True)
    try:
        assert read(reader, 0, 1)[1].tolist() == [*range(5), 7, 7, *range(7, 15), 0] * 2
        assert len(reader.replaced) == 3
    finally:
        reader.close()
    named = [r.message for r in caplog.records]
    assert len(named) == 3 and "/photos/5.jpg" in named[0], "each file once, not once per epoch"
    with pytest.raises(JobFailed, match="TypeError"):  # a mistake in the program is no damaged file
        read(source(0, Draws(broken=(5,), error=TypeError), replaces=True), 0)
    with pytest.raises(JobFailed, match="truncated"):  # nothing is left to replace it by
        read(source(0, Draws(broken=tuple(range(16))), replaces=True), 0)


def test_what_a_dataset_returns_is_stacked_or_refused() -> None:
    from PIL import Image

    assert stacked([3, 4]).dtype == torch.int64 and stacked([0.5]).dtype == torch.float32
    assert stacked([numpy.zeros(3), numpy.ones(3)]).shape == (2, 3)
    assert stacked([Image.new("RGB", (5, 4))] * 2).shape == (2, 3, 4, 5)
    assert stacked([Image.new("L", (5, 4))]).shape == (1, 1, 4, 5)

    class Mapping(Draws):
        def __getitem__(self, index: int) -> Any:
            return {"image": 1}

    with pytest.raises(JobFailed, match=r"sample 0 .*\(input, target\), this one returned dict"):
        read(source(0, Mapping()), 0)


def test_uint8_images_are_normalised_on_the_device() -> None:
    info = DataInfo("x", (3, 2, 2), 2, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    pixels = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    for channels_last in (False, True):
        out = ToDevice(CPU, info, channels_last).normalized(pixels)
        assert out[0, :, 0, 0].tolist() == pytest.approx([-1.0, 3.0, 0.2], abs=1e-6)
        assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert ToDevice(CPU, None, False).normalized(pixels)[0, :, 0, 0].tolist() == pytest.approx([0, 1, 0.2])


def test_workers_follow_from_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.runtime.cores.usable", lambda: 16)
    assert choose_workers(3, True, True, 1) == 3 and choose_workers(0, False, True, 1) == 0
    assert choose_workers(None, True, False, 1) == 0 and choose_workers(None, True, True, 4) == 3
    assert choose_workers(None, False, True, 4) == 3 and choose_workers(None, False, False, 1) == 8
    assert choose_workers(None, False, True, 64) == 1


def private(pid: int) -> int:
    """Bytes that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private"))


@pytest.mark.slow
def test_workers_keep_nothing_of_the_epochs_they_have_read() -> None:
    """1,000 epochs of 32 JPEGs: 19.1 MB a worker after 100, 19.5 after 1,000. A kilobyte a sample kept would be 4 MB here."""
    reader = source(2)
    read(reader, *range(50))
    workers = [worker.pid for worker in reader.iterator._workers]
    before = [private(pid) for pid in workers]
    read(reader, *range(50, 550))
    assert [worker.pid for worker in reader.iterator._workers] == workers
    grown = [private(pid) - was for pid, was in zip(workers, before, strict=True)]
    reader.close()
    assert max(grown) < 2 << 20, grown
