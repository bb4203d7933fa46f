"""Every reader of a run folder against one that somebody else made: limits, no code, nothing resolved, one line each."""

from __future__ import annotations

import ast
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import reseal, rewrite
from harness import BASE, plain, train
from omegaconf import OmegaConf

from isobatch import config as configuration
from isobatch import run, sweeps
from isobatch.checkpoint import archive, reading
from isobatch.checkpoint.folder import Damaged
from isobatch.errors import ConfigError
from isobatch.launch.outcome import RunFolder
from isobatch.logger import job_facts
from isobatch.report import read_runs
from isobatch.report.scan import Scan
from isobatch.report.table import tabulate
from isobatch.resume import saved_settings
from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.reading import (
    SIZE,
    Unreadable,
    lines,
    open_file,
    read_json,
    read_mapping,
    read_text,
    read_yaml,
    usable,
)
from isobatch.run_folder.rows import Standing, beyond
from isobatch.runtime.distributed import Ranks

SRC = Path(__file__).parents[2] / "src/isobatch"
CPU_S = 20  # of this process; what hangs takes minutes
TEXTS = ("summary.json", "plan.json", "config.yaml", "metrics.jsonl", ".hydra/overrides.yaml", ".hydra/hydra.yaml",
         ".hydra/config.yaml", "fingerprint.json", "checkpoints/last/manifest.json")  # fmt: skip


@contextmanager
def at_most(cpu_s: float = CPU_S) -> Iterator[None]:
    """Fail after so much time of the CPU: the load of the machine plays no part. A wait for a pipe ends by the real clock."""

    def ring(signum: int, frame: Any) -> None:
        raise AssertionError(f"took more than {cpu_s} s")

    before = signal.signal(signal.SIGPROF, ring), signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def settings_of(folder: Path) -> dict[str, Any]:
    """What Hydra is given of a run's settings, as it would have them."""
    saved = saved_settings.read(folder)
    assert all(line.isprintable() for line in saved.left_out.values())
    made = OmegaConf.create({"groups": saved.groups, "top": saved.top})
    return OmegaConf.to_container(made, resolve=True)  # type: ignore[return-value]


def readers(folder: Path) -> dict[str, Callable[[], Any]]:
    """Everything that reads the run in `folder`, as the program does. Each returns, or raises its one line."""
    files = RunFiles(folder, is_main=True)
    config = {**plain(*BASE), "resume": None}
    return {
        "resume=": lambda: settings_of(folder),
        "checkpoint": lambda: reading.read(folder),
        "report": lambda: tabulate(read_runs([folder])),
        "job facts": lambda: job_facts.read(folder),
        "sweep run again": lambda: sweeps.earlier(config, folder),
        "launcher": lambda: RunFolder(folder)._read(),
        "config": lambda: usable(folder, "config.yaml"),
        "completed": files.completed,
        "metrics of a restart": lambda: files.resume_metrics(Standing(3, 3, 144)),
        "rows of a logger": lambda: beyond(folder, Standing(1, 0, 48)),
    }


def read_all(folder: Path) -> dict[str, str]:
    """What each reader had to say: empty, or one line."""
    said = {}
    for name, reader in readers(folder).items():
        try:
            reader()
            said[name] = ""
        except (ConfigError, Damaged) as refusal:
            said[name] = str(refusal)
            assert said[name] and "\n" not in said[name] and len(said[name]) < 1000, name
    return said


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run folder, as Hydra and a training leave it."""
    folder = tmp_path_factory.mktemp("real") / "run"
    train(folder, *BASE, "epochs=null", "steps=3", "log_every=1", "eval_every=2")
    (folder / ".hydra").mkdir()
    (folder / ".hydra/overrides.yaml").write_text("- model=mlp\n- steps=3\n")
    (folder / ".hydra/hydra.yaml").write_text("hydra:\n  mode: RUN\n  job:\n    num: 0\n")
    (folder / ".hydra/config.yaml").write_text("steps: 3\n")
    (folder / "fingerprint.json").write_text('{"0/0": [["input", "ab"]]}')
    return folder


@pytest.fixture
def copy(real: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(real, tmp_path / "run")
    return tmp_path / "run"


def test_a_sound_folder_is_read_by_all(copy: Path) -> None:
    assert set(read_all(copy).values()) <= {""} | {v for v in read_all(copy).values() if "holds a job with" in v}
    assert settings_of(copy)["top"]["steps"] == 3 and settings_of(copy)["groups"]["model"]["width"] == 16


def replace(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "ring":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # takes no room on the disk
    elif kind == "line":
        path.write_bytes(b'{"step": 1, "train/loss": 1, "x": "' + b"x" * (8 << 20))


@pytest.mark.parametrize("kind", ["pipe", "folder", "ring", "device", "large", "line"])
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_small_regular_file_is_passed_over(copy: Path, name: str, kind: str) -> None:
    replace(copy / name, kind)
    with at_most():
        said = read_all(copy)
    if name == "config.yaml":
        assert "its config.yaml" in said["resume="]
    if name == "checkpoints/last/manifest.json":
        assert said["checkpoint"] == "", "the numbered name of the same checkpoint is whole"


BOMB = "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24))
MERGES = "a: &a {k: 1}\nb: &b {<<: [*a, *a]}\n"
DAMAGED = {
    "aliases": BOMB, "merge": MERGES, "code": "!!python/object/apply:os.mkdir [owned]\n", "deep": "[" * 5000,
    "deep blocks": "- " * 900 + "a\n", "tag": "a: !!timestamp 2001-01-01\n", "set": "!!set {a, b}\n",
    "many": "[" + "a," * 30_000 + "a]", "digits": f"a: {'9' * 200}\n", "sexagesimal": "a: 1" + ":59" * 10_000 + "\n",
    "long key": f"{'k' * 500}: 1\n", "zero": "\x00", "ring": "&a [*a]\n", "latin": "caf\udce9",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".yaml")])
@pytest.mark.parametrize("what", DAMAGED)
def test_yaml_that_grows_or_names_code_is_refused_by_every_reader(copy: Path, name: str, what: str) -> None:
    (copy / name).write_bytes(DAMAGED[what].encode("utf-8", "surrogateescape"))
    with at_most():
        said = read_all(copy)
        with pytest.raises(Unreadable):
            read_yaml(copy, name)
    if name == "config.yaml":
        assert f"resume={copy}: its config.yaml " in said["resume="]
    assert not (Path.cwd() / "owned").exists(), "code from the folder was run"


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 20 + "]" * 20, "9" * 200, '{"a": ' + "1" * 5000 + "}", '"\\ud800"', "{",
                                  "[" + "{}," * 60_000 + "0]", f'{{"{"k" * 500}": 1}}', "\ufeff1", ""])  # fmt: skip
def test_json_beyond_a_limit_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with at_most(), pytest.raises(Unreadable):
        read_json(tmp_path, "summary.json")


def test_numbers_and_dates_are_read_as_omegaconf_reads_them(tmp_path: Path) -> None:
    text = ("a: 1e-3\nb: 1.0e-05\nc: 2001-01-01\nd: [1, 1.5, true, null, yes, .inf, -3]\ne: 0x10\nf: '3'\ng: 1:30\nh: 1_000\n"
            "i: .5\nj: 012\nk: 1.\nl: '1e5'\nm: +1e+5\n")  # fmt: skip
    (tmp_path / "config.yaml").write_text(text)
    assert read_mapping(tmp_path, "config.yaml") == OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text(configuration.to_yaml(plain(*BASE)))
    assert read_mapping(tmp_path, "config.yaml") == plain(*BASE)


def test_text_is_utf8_of_a_limited_size_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * SIZE)
    (tmp_path / "b").symlink_to("a")
    assert len(read_text(tmp_path, "b")) == SIZE
    (tmp_path / "a").write_bytes(b"x" * (SIZE + 1))
    for name, problem in (("a", "larger than"), ("nowhere", "missing"), ("x\0y", "cannot be read"), (".", "no regular file")):
        with pytest.raises(Unreadable, match=problem):
            read_text(tmp_path, name)


def test_lines_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a\n" + b"x" * 50 + b"\nb\n" + b"y" * 10 + b"\nend")
    with open_file(tmp_path, "f") as file:
        assert list(lines(file, 10)) == [b"a\n", b"b\n", b"end"]


def test_a_row_after_a_line_of_any_length_is_found_where_it_lies(tmp_path: Path) -> None:
    row = b'{"step": %d, "train/loss": 0.5}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(row % 1 + b'{"x": "' + b"x" * (3 << 20) + b'"}\n' + row % 2 + b"x" * (2 << 20) + b"\n" + row % 3)
    with at_most(), path.open("rb") as file:
        scan = Scan(file)
        assert list(scan.steps) == [1, 2, 3]
        for step, offset in zip(scan.steps, scan.offsets, strict=True):
            file.seek(offset)
            assert json.loads(file.readline())["step"] == step


# checkpoints that are no larger than they look, and would take a machine's memory or its time


def shared(levels: int) -> list[Any]:
    value: list[Any] = ["x"]
    for _ in range(levels):
        value = [value, value]
    return value


def claim(path: Path) -> None:
    """An archive whose parts lie on top of each other: each of 2,000 names means the same megabyte."""
    import struct
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        made.writestr("a/data.pkl", b"\x80\x02}.")
        made.writestr("a/data/0", b"\0" * (1 << 20))
    data = path.read_bytes()
    at = data.rfind(b"PK\1\2")  # the directory entry of data/0, repeated under other names
    end = data.rfind(b"PK\5\6")
    entry, more = data[at:end], []
    for i in range(2000):
        name = f"a/data/{i + 1}".encode()
        more.append(entry[:28] + struct.pack("<H", len(name)) + entry[30:46] + name)
    directory = data[data.find(b"PK\1\2") : end] + b"".join(more)
    start = data.find(b"PK\1\2")
    tail = data[end : end + 8] + struct.pack("<HHII", 2002, 2002, len(directory), start) + b"\0\0"
    path.write_bytes(data[:start] + directory + tail)


def pickled(body: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import zipfile

        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
            made.writestr("a/data.pkl", b"\x80\x02" + body + b".")
            made.writestr("a/version", b"3\n")

    return write


LIST = b"]q\0(" + b"K\1" * 200_000 + b"e"
PAIRS = b"]q\0(" + b"K\1K\1\x86" * 50_000 + b"e"
STATES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shared lists": (lambda p: torch.save({"config": {"x": shared(25)}}, p), "stands in two places|it has no"),
    "copies of a list": (pickled(PAIRS + b"ccollections\nOrderedDict\nq\1" + b"h\1h\0\x85R" * 50_000), "calls a function"),
    "sizes of a list": (pickled(LIST + b"ctorch\nSize\nq\1h\1h\0\x85R"), "names torch Size"),
    "a tensor without data": (pickled(b"ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R"), "names torch Tensor"),
    "bytes of nothing": (pickled(b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R"), "names builtins bytearray"),
    "an empty stack": (pickled(b"R"), "takes what is not there"),
    "two pickles in one": (claim, "claims more bytes than it has"),
    "millions of lists": (pickled(b"(" + b"]" * (4 << 20) + b"t"), "more parts than its size allows"),
    "no archive": (lambda p: p.write_bytes(b"x" * 5000), "is no archive"),
    "nothing": (lambda p: p.write_bytes(b""), "is no archive"),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_grows_is_refused_at_once(tmp_path: Path, what: str) -> None:
    write, problem = STATES[what]
    path = tmp_path / "state.pt"
    write(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with at_most(), pytest.raises(Damaged, match=problem):
        reading.check_form(reading.safe_load(path))
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < 4 * path.stat().st_size + (128 << 20)


def test_shared_containers_and_tensors_are_named(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = copy / "checkpoints/last"

    def refused(change: Callable[[dict[str, Any]], Any], problem: str) -> None:
        caplog.clear()
        state = torch.load(copy / "checkpoints/step-3/state.pt", weights_only=True)
        change(state)
        (last / "state.pt").unlink()
        torch.save(state, last / "state.pt")
        reseal(last)
        with at_most():
            assert reading.read(copy).path.name in ("best", "step-3")
        assert problem in caplog.text

    refused(lambda s: s["config"].update(x=shared(25)), "config.x stands in two places")
    refused(lambda s: s["reducer"].update(x=shared(25)), "state.reducer.x stands in two places")
    refused(lambda s: s.update(more={}), "it has a section more, which no training state has")
    refused(lambda s: s["model"].update(x=torch.ones(8)[:4], y=next(iter(s["model"].values()))), "has the data of another")


def test_a_refused_checkpoint_of_hostile_size_costs_resume_no_time(copy: Path, tmp_path: Path) -> None:
    """The found case: 25 levels of shared lists made `resume=` hang, deaf to SIGTERM."""
    for name in ("last", "best", "step-3", "step-2"):
        if (copy / "checkpoints" / name).exists():
            rewrite(copy / "checkpoints" / name, lambda state: state["config"].update(x=shared(25)))
    config = plain(*BASE, "epochs=null", "steps=4") | {"resume": str(copy)}
    with at_most(), pytest.raises(ConfigError, match="none of its checkpoints is whole"):
        run.run_job(config, tmp_path / "out", Ranks())


def test_every_state_that_this_program_saves_passes(tmp_path: Path) -> None:
    """Dtypes with and without a storage class of their own, empty and shared tensors, all kinds of plain values."""
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64,
             torch.uint16, torch.float8_e4m3fn]  # fmt: skip
    tree = {"t": [torch.zeros(3).to(kind) for kind in kinds], "empty": torch.zeros(0), "scalar": torch.tensor(1.0),
            "values": [None, True, False, 1, -1, 300, 2**40, 10**20, 0.5, "text", "é" * 300, {}, [], {"a": {"b": [1]}}, {1: 2}],
            "many": {str(i): torch.ones(1) for i in range(300)}}  # fmt: skip
    torch.save(tree, tmp_path / "state.pt")
    archive.check(tmp_path / "state.pt")


# nothing that was read is resolved

SECRET = "hunter2-of-the-environment"
SPELLINGS = ["${oc.env:SECRET}", r"$\{oc.env:SECRET\}", "'${oc.env:SECRET}'", '"${oc.env:SECRET}"', "a${oc.env:SECRET}b",
             "[${oc.env:SECRET}]", "{a: ${oc.env:SECRET}}", "${oc.decode:${oc.env:SECRET}}", r"\\${oc.env:SECRET}",
             "${data.name}", "str('${oc.env:SECRET}')"]  # fmt: skip


@pytest.mark.parametrize("value", SPELLINGS)
def test_no_interpolation_that_a_run_holds_is_resolved(copy: Path, monkeypatch, value: str) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    config = plain(*BASE)
    for group, option in (("data", "root"), ("logger", "name"), ("model", "arch"), ("optimizer", "lr")):
        config[group][option] = value
    (copy / "config.yaml").write_text(json.dumps(config | {"seed": value, "max_grad_norm": [value]}))
    assert SECRET not in str(settings_of(copy)) and SECRET not in str(saved_settings.read(copy).left_out)
    for name in (".hydra/overrides.yaml", ".hydra/hydra.yaml"):
        (copy / name).write_text(json.dumps([f"data.root={value}"]))
    assert SECRET not in str((read_all(copy), job_facts.read(copy), tabulate(read_runs([copy])).rows))


def test_a_models_options_from_a_checkpoint_are_not_resolved(monkeypatch) -> None:
    """As a teacher's are: they never pass through the command line."""
    monkeypatch.setenv("SECRET", SECRET)
    with pytest.raises(ConfigError, match="holds an interpolation") as refusal:
        configuration.options("model", {**plain(*BASE)["model"], "kwargs": {"x": "${oc.env:SECRET}"}})
    assert SECRET not in str(refusal.value)


def test_what_a_terminal_would_obey_is_not_shown(copy: Path) -> None:
    (copy / "config.yaml").write_text('{"imports": ["\\u001b]0;owned\\u0007"], "model": {"name": "x", "\\u001b[2J": "${a}"}}')
    told = saved_settings.read(copy).left_out
    assert len(told) == 2 and all(line.isprintable() for line in told.values())
    assert str(ConfigError("a\x1b[1m", "\x1b[2J", "b\x07", "c")) == "a[1m=[2J: b; c"


def test_a_folder_of_damaged_checkpoints_is_not_read_to_its_end(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10, 200):
        (copy / f"checkpoints/step-{number}").mkdir()
    (copy / "checkpoints/last/manifest.json").unlink()
    with at_most(), pytest.raises(ConfigError, match="none of its checkpoints is whole"):
        reading.read(copy)
    assert len(caplog.records) <= reading.MAX_DAMAGED


def test_nothing_but_the_reader_opens_what_a_run_left() -> None:
    """YAML is parsed in one place (a loader that builds objects would be one word away), and JSON files are too."""
    loads = {
        "yaml": {"run_folder/reading.py", "hydra_patches/composing.py"},  # the second: of conf/, with OmegaConf's safe loader
        "json.loads": {
            "run_folder/reading.py", "run_folder/lock.py", "run_folder/rows.py",
            "resume/signature.py",  # metadata of weights, of limited length
            "launch/outcome.py", "launch/torchrun.py", "launch/last_folder.py", "launch/watchdog.py",
                "study.py", "logger/artifacts.py",  # between processes, as those before it
            "logger/weights_and_biases.py", "logger/wandb_process.py", "dashboard.py",
        },
    }  # fmt: skip
    for path in (p for p in SRC.rglob("*.py") if p.parent.name != "data"):  # what is trained on is no run folder
        name, tree = path.relative_to(SRC).as_posix(), ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(alias.name == "yaml" for alias in node.names):
                assert name in loads["yaml"], f"{name} parses YAML by itself: see run_folder/reading.py"
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"):
                assert name in loads["json.loads"], f"{name} parses JSON by itself: see run_folder/reading.py"
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "OmegaConf.load":
                conf = "cli/help_screen.py", "hydra_patches/composing.py"  # of conf/, as Hydra does itself
                assert name in conf, f"{name} loads YAML through OmegaConf: see run_folder/reading.py"
