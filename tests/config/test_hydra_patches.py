"""`accumulation=5`, run folders, and the help screen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from isobatch import config as configuration
from isobatch import hydra_patches
from isobatch.cli.command import check_dashes
from isobatch.cli.help_screen import help_screen, own_folders
from isobatch.config import plain_config
from isobatch.errors import ConfigError
from isobatch.hydra_patches import composing


@pytest.fixture
def patches() -> Iterator[None]:
    with hydra_patches.active():
        yield


def composed(*overrides: str) -> dict[str, object]:
    with hydra_patches.active(), initialize_config_dir(str(configuration.conf_folder()), version_base="1.3"):
        return configuration.resolved(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(("choice", "steps"), [("5", 5), ("3", 3), ("17", 17), ("'2'", 2), ("auto", None)])
def test_every_positive_integer_is_a_choice(choice: str, steps: int | None) -> None:
    plain = composed(f"accumulation={choice}")
    assert plain["accumulation"] == {"name": "accumulation", "steps": steps}
    assert configuration.load(plain).accumulation.steps == steps


@pytest.mark.parametrize("choice", ["0", "-1", "1.5", "x", "true"])
def test_anything_else_composes_and_is_then_refused_so_that_a_sweep_can_go_on(choice: str) -> None:
    plain = composed(f"accumulation={choice}")
    with pytest.raises(ConfigError, match=rf"(?i)accumulation\.steps={choice}: is not a positive integer"):
        configuration.load(plain)


def test_the_jobs_of_a_sweep_read_a_file_once() -> None:
    composed()
    before = composing.parsed.cache_info()
    composed("seed=5")
    assert composing.parsed.cache_info().misses == before.misses and composing.parsed.cache_info().hits > before.hits


def test_sweeps_keep_their_plain_spelling(patches: None) -> None:
    parse = OverridesParser.create().parse_override
    assert list(parse("accumulation=1,5,auto").sweep_string_iterator()) == ["1", "5", "auto"]
    assert list(parse("accumulation=range(1,4)").sweep_string_iterator()) == ["1", "2", "3"]
    assert parse("seed=5").value() == 5


def test_two_launches_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now() -> Clock:
            return Clock()

        def strftime(self, form: str) -> str:
            return "2030-01-01/00-00-00"

    monkeypatch.setattr(hydra_patches.folders, "datetime", Clock)
    stamps = [hydra_patches.Stamp(), hydra_patches.Stamp(), hydra_patches.Stamp()]
    for stamp in stamps[:2]:
        stamp.claiming = True
    folder = tmp_path / "outputs"
    names = [Path(stamp(str(folder))).relative_to(folder).as_posix() for stamp in stamps]
    assert names == ["2030-01-01/00-00-00", "2030-01-01/00-00-00-2", "2030-01-01/00-00-00"]
    assert stamps[0](str(folder)) == str(folder / names[0])
    assert sorted(p.name for p in (folder / "2030-01-01").iterdir()) == ["00-00-00", "00-00-00-2"]
    stamps[0].release(used=folder / names[0] / "0")
    stamps[1].release()  # its folder was for nothing
    assert [p.name for p in (folder / "2030-01-01").iterdir()] == ["00-00-00"]
    stamps[0].release()
    assert not folder.exists()


def test_input_paths_are_those_of_the_folder_typed_in(tmp_path: Path) -> None:
    with hydra_patches.active(), initialize_config_dir(str(configuration.conf_folder()), version_base="1.3"):
        cfg = compose("config", overrides=["+data.root=./photos", "resume=../old"])
    plain = plain_config(cfg, tmp_path / "here")
    assert plain["data"]["root"] == str(tmp_path / "here/photos")
    assert plain["resume"] == str(tmp_path / "old")


def test_a_missing_value_is_refused_by_its_key() -> None:
    with hydra_patches.active(), initialize_config_dir(str(configuration.conf_folder()), version_base="1.3"):
        missing = compose("config", overrides=["+data.extra=???"])
        dangling = compose("config", overrides=["+data.extra=${nowhere}"])
    with pytest.raises(ConfigError, match=r"^data\.extra=\?\?\?: "):
        plain_config(missing, Path())
    with pytest.raises(ConfigError, match=r"^data\.extra="):
        plain_config(dangling, Path())


def test_dashes_are_refused_with_the_word_to_write() -> None:
    check_dashes(["optimizer.lr=0.1", "--cfg=job", "-m", "--help"])
    with pytest.raises(ConfigError, match=r"^--optimizer\.lr=0\.1: settings have no dashes; write optimizer\.lr=0\.1$"):
        check_dashes(["--optimizer.lr=0.1"])


def test_the_help_screen_lists_every_group_and_fits_one() -> None:
    conf = configuration.conf_folder()
    screen = help_screen(conf)
    for group in configuration.TABLES:
        assert f"\n  {group} " in screen
    assert "any positive integer" in screen
    assert sum("train.py" in line for line in screen.splitlines()) >= 5
    assert len(screen.splitlines()) <= 50
    assert max(map(len, screen.splitlines())) <= 120
    assert "\n  " + "isobatch".ljust(16) + "-m" in help_screen(conf, "/somewhere/bin/isobatch")


def test_composing_and_checking_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from isobatch.cli import command\n"
        "from isobatch.cli.help_screen import help_screen; from isobatch import config, hydra_patches\n"
        "hydra_patches.install()\n"
        "from hydra import compose, initialize_config_dir\n"
        "with initialize_config_dir(str(config.conf_folder()), version_base='1.3'): c = compose('config')\n"
        "config.load(config.plain_config(c, Path())); help_screen(config.conf_folder())\n"
        "heavy = {'torch', 'timm', 'torchvision', 'wandb', 'matplotlib', 'sklearn', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_an_input_path_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.root=a{60}: is no path: File name too long; set data\.root"):
        plain_config(OmegaConf.create({"data": {"root": 5_000 * "a"}}), tmp_path)


def test_a_text_in_the_place_of_a_group_is_left_to_the_groups_own_refusal(tmp_path: Path) -> None:
    given: dict[str, object] = {"loss": {"name": "distill", "teacher": "runs/first"}, "data": 3}
    assert plain_config(OmegaConf.create(given), tmp_path) == given


def test_the_help_screen_lists_the_choices_of_a_folder_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/fruit.yaml").touch()
    conf = configuration.conf_folder()
    for words in (["--help", "--config-dir", "own"], ["-cd=own", "--help"]):
        screen = help_screen(conf, own=[tmp_path / folder for folder in own_folders(words)])
        assert " ".join(screen.split("experiment")[1].split()).split(" logger ")[0].endswith("strategies, fruit")


FOREIGN = """
import sys
sys.argv[1:] = ["-m", "a=5,6", "accumulation=x", "hydra.sweep.dir=sweep"]
import isobatch.cli, hydra
from pathlib import Path
from omegaconf import OmegaConf
Path("conf/accumulation").mkdir(parents=True)
Path("conf/accumulation/x.yaml").write_text("mine: 1")
Path("conf/config.yaml").write_text("defaults: [{accumulation: x}]\\na: 1\\nsteps: 2\\nepochs: 3")

@hydra.main(version_base="1.3", config_path=str(Path("conf").absolute()), config_name="config")
def main(cfg):
    print("job", OmegaConf.to_container(cfg))

if not OmegaConf.has_resolver("stamp"): main()
"""


def test_a_program_that_imports_this_one_keeps_its_own_hydra(tmp_path: Path) -> None:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    done = subprocess.run([sys.executable, "foreign.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "job {'accumulation': {'mine': 1}, 'a': 6, 'steps': 2, 'epochs': 3}" in done.stdout


def test_hydra_is_given_back_after_a_command_and_kept_between_nested_ones() -> None:
    methods = {key: key[0].__dict__[key[1]] for key in hydra_patches.METHODS}

    def state() -> tuple[bool, bool]:
        same = all(cls.__dict__[name] is methods[cls, name] for cls, name in methods)
        return same, OmegaConf.has_resolver("stamp")

    assert not OmegaConf.has_resolver("stamp")
    with hydra_patches.active():
        with hydra_patches.active():
            assert state() == (False, True)
        assert state() == (False, True) and composed("accumulation=5")["accumulation"]["steps"] == 5
    assert state() == (True, False)
