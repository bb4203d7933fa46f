"""The structure of the code, read from its imports: what lives where, and what may not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from isobatch.extend.registry import GROUPS

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "isobatch"
MODULES = sorted(SRC.rglob("*.py"))


def room(path: Path) -> str:
    """`reduction` for reduction/tree.py, `step` for step.py."""
    relative = path.relative_to(SRC)
    return relative.parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def own_modules() -> set[str]:
    return {module(path) for path in MODULES}


@cache
def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports when it runs; what only a type checker reads is left out."""
    found: set[str] = set()

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                continue  # an import is in no expression
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            inner = top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Import) and (top or not top_level_only):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.ImportFrom) and child.module and (top or not top_level_only):
                found.add(child.module)
                named = {f"{child.module}.{alias.name}" for alias in child.names}
                found.update(named if child.module == "isobatch" else named & own_modules())
            visit(child, inner)

    visit(parsed(path), True)
    return found


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_files_stay_small() -> None:
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 300}
    assert not long
    sizes = sorted(len(p.read_text().splitlines()) for p in MODULES)
    assert sizes[len(sizes) // 2] <= 200


def test_the_step_is_on_one_screen_and_knows_no_strategy() -> None:
    tree = ast.parse((SRC / "train" / "step.py").read_text())
    (step,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train_step"]
    assert step.end_lineno - step.lineno + 1 <= 50
    text = ast.unparse(tree)
    for name in ("ddp", "dp", "fsdp", "exact", "fast", "amp", "distributed", "all_reduce", "logging", "time"):
        assert not re.search(rf"\b{name}\b", text), f"step.py mentions {name}"


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("hydra", {"cli", "hydra_patches", "sweeps"}),
        ("omegaconf", {"config", "cli", "hydra_patches", "sweeps"}),
        ("wandb", {"logger", "dashboard"}),
        ("wandb_workspaces", {"dashboard"}),
        ("timm", {"runtime"}),
        ("pandas", set()),
        ("matplotlib", {"report", "evaluate"}),
        ("rich", {"console", "report"}),
        ("sklearn", {"data"}),
        ("pyarrow", {"writer"}),
        ("pickle", set()),
    ],
)  # fmt: skip
def test_each_library_has_its_rooms(package: str, rooms: set[str]) -> None:
    assert {room(p) for p in MODULES if package in packages(p)} <= rooms


@pytest.mark.parametrize("name", ["batch_plan", "compare", "report", "errors", "checks"])
def test_no_torch_in(name: str) -> None:
    for path in MODULES:
        if room(path) == name:
            assert "torch" not in packages(path), path


@pytest.mark.parametrize("group", GROUPS)
def test_groups_do_not_know_each_other(group: str) -> None:
    others = {f"isobatch.{g}" for g in GROUPS if g != group}
    for path in MODULES:
        if room(path) != group:
            continue
        known = {".".join(name.split(".")[:2]) for name in imports(path)} & others
        assert not known, f"{path.name} imports {known}"
        for forbidden in ("isobatch.run", "isobatch.train.loop", "isobatch.train.step", "isobatch.config", "isobatch.cli"):
            assert forbidden not in imports(path), f"{path.name} imports {forbidden}"


def module(path: Path) -> str:
    name = path.relative_to(SRC.parent).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


def reached(start: str) -> dict[str, str]:
    """Modules that `start` and what is in it import, and what those import: module -> who imports it."""
    graph = {module(path): imports(path) for path in MODULES}
    found: dict[str, str] = {}
    open_ends = [name for name in graph if name == start or name.startswith(f"{start}.")]
    while open_ends:
        importer = open_ends.pop()
        for name in graph[importer] & graph.keys():
            if name not in found:
                found[name] = importer
                open_ends.append(name)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_no_group_reaches_the_config_through_others(group: str) -> None:
    """Nor what starts, wires or drives a run: over as many arrows as there are."""
    above = ("config", "run", "cli", "launch", "tasks", "train.loop", "train.step", "resume.start", "planner")
    found = reached(f"isobatch.{group}")
    for room_above in above:
        at = [name for name in found if f"{name}.".startswith(f"isobatch.{room_above}.")]
        assert not at, f"{group} reaches {at[0]} through {found[at[0]]}"


def test_timm_is_imported_in_one_file() -> None:
    """It brings wandb and torchvision along, which runtime/timm_import.py keeps out."""
    assert [path.name for path in MODULES if "timm" in packages(path)] == ["timm_import.py"]


def test_no_yaml_loader_but_the_safe_ones() -> None:
    """The others make objects of what a file names: code of a foreign run folder would run."""
    for path in [*MODULES, ROOT / "train.py"]:
        tree = parsed(path)
        of_yaml = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} & {"yaml", "yaml.loader", "yaml.cyaml"}
        assert not of_yaml, f"{path} takes a loader by name"
        if "yaml" not in packages(path):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml":
                assert node.attr in ("safe_load", "SafeLoader", "YAMLError", "safe_dump"), f"{path}:{node.lineno} {node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) == "yaml":
                assert ast.unparse(node.args[1]) == "'CSafeLoader'", f"{path}:{node.lineno}"


def test_arrows_of_the_training_path() -> None:
    def inner(name: str) -> set[str]:
        return {n.removeprefix("isobatch.") for n in imports(SRC / f"{name}.py") if n.startswith("isobatch.")}

    def rooms(name: str) -> set[str]:
        return {n.split(".")[0] for n in inner(name)}

    assert inner("batch_plan") == {"errors"}
    assert not rooms("train/loop") & {"run", "config", "launch", "cli"}
    assert rooms("train/step") <= {"train", "data", "precision", "runtime", "reduction"}
    assert not rooms("train/state") & {"run", "config"} and not inner("train/state") & {"train.loop", "train.step"}


def test_what_a_task_is_like_stands_in_its_class_alone() -> None:
    """No `config.task == "train"` anywhere: a new task is one class and one line, and nothing else knows its name."""
    from isobatch.tasks import TABLE

    compared = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Attribute) and side.attr == "task" for side in (node.left, *node.comparators))
    ]
    assert compared == []
    assert list(TABLE) == ["train", "evaluate", "predict", "export", "plan", "replay", "lr_range"]
    for name, task in TABLE.items():
        assert task.name == name and task.built in ("nothing", "model", "plan", "loop")
        own = {"nothing": "alone", "model": "apply", "plan": None, "loop": "perform"}[task.built]
        assert {m for m in ("alone", "apply", "perform") if m in vars(type(task))} == ({own} if own else set())


def test_every_group_has_a_module_a_folder_and_a_table() -> None:
    from isobatch.config import TABLES
    from isobatch.hydra_patches.layers import OVERLAYS

    assert {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()} - {*OVERLAYS, "hydra"} == {*GROUPS}
    for group in GROUPS:
        assert (SRC / f"{group}.py").exists() or (SRC / group / "__init__.py").exists()
        files = sorted((ROOT / "conf" / group).glob("*.yaml"))
        assert files, f"conf/{group} is empty"
        for file in files:
            name = yaml.safe_load(file.read_text())["name"]
            assert name in TABLES[group] or name == "???", f"{file} names {name}"


def test_help_and_a_refusal_import_neither_torch_nor_anything_heavy() -> None:
    heavy = "torch", "timm", "wandb", "matplotlib", "torchvision", "sklearn", "rich", "numpy"
    ours = "import isobatch, sys; isobatch.train, isobatch.load, isobatch.read; import isobatch.cli.command"
    code = f"{ours}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_read_from_a_file_can_name_code() -> None:
    for path in [*MODULES, ROOT / "train.py", *ROOT.glob("conf/**/*.yaml")]:
        text = path.read_text()
        if path.parent.name != "hydra_patches":  # names the report's callback, in code
            assert "_target_" not in text.replace("not `_target_`", ""), path
        assert "weights_only=False" not in text.replace(" ", ""), path
        assert "pickle.load" not in text, path


def arrows(path: Path) -> set[str]:
    """Modules of ours that a file imports when it is imported, and those that it names in types alone."""
    ours = {module_name(other) for other in MODULES}
    found: set[str] = set()
    statements = ast.stmt | ast.ExceptHandler | ast.match_case  # an import is in no expression

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, statements) or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue  # a function: only when it is called: torch and what brings it are not paid for at a start
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.ImportFrom) and child.module:
                full = {f"{child.module}.{alias.name}" for alias in child.names}
                found.update(name if name in ours else child.module for name in full)
            visit(child)

    visit(parsed(path))
    return (found & ours) - {module_name(path)}


def module_name(path: Path) -> str:
    parts = ("isobatch", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_have_no_circle_not_even_in_types() -> None:
    graph = {module_name(path): arrows(path) for path in MODULES}
    assert sum(map(len, graph.values())) > 400
    while leaves := [name for name, needs in graph.items() if not needs]:
        for name in leaves:
            del graph[name]
        for needs in graph.values():
            needs.difference_update(leaves)
    assert not graph, "modules that are in a circle, or need one that is"


def test_the_map_in_the_readme_is_complete() -> None:
    """A room that nobody is told of is one that nobody looks into."""
    text = (ROOT / "README.md").read_text().partition("## Map of the code")[2].partition("\n## ")[0]
    told = set(re.findall(r"`([a-z_]+(?:\.py|/))", text))
    rooms = {path.name + ("/" if path.is_dir() else "") for path in SRC.iterdir() if not path.name.startswith("__")}
    assert rooms - {"conf/"} <= told, "rooms that the map leaves out"
    assert {name for name in told if name not in rooms} <= {"conf/"}, "rooms that are gone"


def test_nothing_is_any_where_the_groups_meet() -> None:
    """`go to definition` has to work from the config and from the step."""
    import dataclasses

    from isobatch.config import Config, Settings
    from isobatch.config.schema import NESTED
    from isobatch.train.step import Parts

    own = {field.name for field in dataclasses.fields(Config)} - {field.name for field in dataclasses.fields(Settings)}
    types = {name: Config.__annotations__[name] for name in own | {*NESTED}}
    types |= {field.name: field.type for field in dataclasses.fields(Parts)}
    assert "Any" not in types.values(), types


def test_the_names_in_a_run_folder_are_spelled_in_one_place() -> None:
    from isobatch.run_folder import layout

    names = {layout.PLAN, layout.METRICS, layout.SUMMARY, layout.LOG, layout.CHECKPOINTS, layout.MULTIRUN}
    for path in MODULES:
        if path.name != "layout.py":
            spelled = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)
                       and isinstance(node.value, str)}  # fmt: skip
            assert not spelled & names, path


def test_a_class_has_its_name_for_itself() -> None:
    """Two of one name are told apart by nobody who reads a signature."""
    found: dict[str, list[Path]] = {}
    for path in MODULES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_tests_lie_in_rooms_of_the_names_of_what_they_test() -> None:
    apart = {"chaos", "compat", "equivalence", "gpu", "pretended", "repository", "warm"}  # through all rooms, and beside them
    rooms = {path.stem for path in SRC.iterdir() if path.is_dir()}
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}
    assert {folder.name for folder in folders} <= rooms | apart
    assert all(folder.parent == ROOT / "tests" for folder in folders)
