"""What `--help` shows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from isobatch.hydra_patches import NUMBERED


def own_folders(words: Sequence[str]) -> list[Path]:
    """The folder of choices that `--config-dir` names."""
    named = [(i, *word.partition("=")) for i, word in enumerate(words)]
    return [Path(value if equals else "".join(words[i + 1 : i + 2])) for i, option, equals, value in named
            if option in ("--config-dir", "-cd")]  # fmt: skip


def help_screen(conf: Path, program: str = "train.py", width: int = 112, own: Sequence[Path] = ()) -> str:
    """conf/hydra/help/isobatch.yaml with the groups and their choices filled in: those of `conf`, then a person's `own`."""
    lines = []
    found = [group for folder in (conf, *own) for group in folder.iterdir() if group.is_dir() and group.name != "hydra"]
    for name in sorted({group.name for group in found}):
        choices = []
        for group in (group for group in found if group.name == name):
            here = sorted(file.relative_to(group).with_suffix("").as_posix() for file in group.rglob("*.yaml"))
            choices += [choice for choice in here if choice not in choices]
        if name in NUMBERED:
            choices = [*(choice for choice in choices if not choice.isdigit()), "any positive integer"]
        if choices:
            lines += textwrap.wrap(f"{name:<13} {', '.join(choices)}", width, subsequent_indent=" " * 14)
    text = OmegaConf.create({"hydra": {"help": OmegaConf.load(conf / "hydra/help/isobatch.yaml")}}).hydra.help.template
    text = text.replace("$APP_CONFIG_GROUPS", "\n".join(f"  {line}" for line in lines) + "\n")
    if not program.endswith(".py"):  # the console script
        text = text.replace("python train.py", Path(program).name.ljust(len("python train.py")))
    return str(text).rstrip()
