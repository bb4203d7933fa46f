"""CUDA graphs as the pretended device has them: operators written down while they are recorded, done again in a replay.

What is real about it: nothing happens while recording (memory that was there before gets its values back, generators their
state); a replay uses the very memory and the Python numbers of the recording, so what was not kept in place or was decided in
Python is as wrong as on a device; waiting for the device while recording raises. What is not: streams, the memory pool, time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pretended.machine import here
from pretended.streams import Stream
from pretended.watch import facts, tensors_in, written_by

# write running statistics without saying so in their schema: positions
SILENT = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
_RECORDING: list[Recorder] = []


class Graph:
    """torch.cuda.CUDAGraph."""

    made = 0

    def __init__(self, keep_graph: bool = False):
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.generators: list[Any] = []

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def pool(self) -> Any:
        return 0, 1

    def reset(self) -> None:
        self.operators = []

    @torch.no_grad()
    def replay(self) -> None:
        assert self.operators, "replayed before it was recorded"
        machine = here()
        launches, syncs = machine.launches.copy(), sum(machine.syncs.values())
        for func, args, kwargs, recorded in self.operators:
            given = {t.untyped_storage()._cdata for t in tensors_in(kwargs, tensors_in(args, []))}
            made = func(*args, **kwargs)
            with _disable_current_modes():
                for old, new in zip(tensors_in(recorded, []), tensors_in(made, []), strict=True):
                    if old.untyped_storage()._cdata not in given:
                        old.copy_(new)
        assert sum(machine.syncs.values()) == syncs
        machine.launches.clear()
        machine.launches.update(launches)
        machine.launches["graph"] += 1
        self.replays += 1


class Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.inside, self.before = graph, dict[int, Any](), dict[int, Any]()
        self.syncs = sum(here().syncs.values())

    def check(self) -> None:
        if sum(here().syncs.values()) != self.syncs:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        known = facts(func)
        given = tensors_in(kwargs, tensors_in(args, []))
        written = written_by(known, args, kwargs) + tensors_in([args[i] for i in SILENT.get(known.name, ())], [])
        with _disable_current_modes():
            for tensor in written:
                key = tensor.untyped_storage()._cdata
                if key not in self.inside and key not in self.before:
                    self.before[key] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        made = func(*args, **kwargs)
        self.check()
        storages = {t.untyped_storage()._cdata for t in given}
        for tensor in tensors_in(made, []):
            if tensor.untyped_storage()._cdata not in storages:
                self.inside[tensor.untyped_storage()._cdata] = tensor
        if here().on_gpu(tensor) if (tensor := next(iter(tensors_in(made, given)), None)) is not None else False:
            self.graph.operators.append((func, args, kwargs, made))
        return made


class Recording:
    """torch.cuda.graph."""

    def __init__(self, cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any):
        self.graph = cuda_graph

    def __enter__(self) -> None:
        assert not _RECORDING, "one at a time"
        machine = here()
        machine.wait_all("synchronize")
        self.launches = machine.launches.copy()
        self.states = [generator.get_state() for generator in machine.generators]
        self.recorder = Recorder(self.graph)
        _RECORDING.append(self.recorder)
        self.recorder.__enter__()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.recorder.__exit__(kind, *rest)
        _RECORDING.clear()
        machine = here()
        with _disable_current_modes():
            for storage, values in self.recorder.before.values():
                storage.copy_(values)
        for generator, state in zip(machine.generators, self.states, strict=True):
            generator.set_state(state)
        machine.launches.clear()
        machine.launches.update(self.launches)
        if kind is None:
            self.recorder.check()


@contextmanager
def recording_graphs() -> Iterator[list[Graph]]:
    """Inside `pretend`, torch.cuda has graphs; gives those that were made."""
    made: list[Graph] = []

    class Counted(Graph):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)

    capturing = lambda *_: bool(_RECORDING)  # noqa: E731
    with ExitStack() as stack:
        for where, name, value in (
            (torch.cuda, "CUDAGraph", Counted), (torch.cuda, "graph", Recording),
            (torch.cuda, "graph_pool_handle", lambda: (0, 1)), (torch.cuda, "is_current_stream_capturing", capturing),
            (Stream, "is_capturing", capturing),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, value))
        yield made
