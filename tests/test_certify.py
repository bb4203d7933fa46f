"""`isobatch certify`: a certificate holds for its run alone, and only as it was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import BASE, train
from report_runs import write_run

from isobatch.certify import facts, main, seal, unlike
from isobatch.checkpoint.folder import STATE, WEIGHTS, CheckpointFolder, HashedFile


def written(run: Path, file: Path, **changed: object) -> Path:
    about = {"run": facts(run), "holds": True, "verdict": "steps 1 to 2 reproduce here", **changed}
    file.write_text(json.dumps({**about, "seal": seal(about)}))
    return file


def test_a_certificate_is_of_one_run_and_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [2.0, 1.0])
    file = written(run, tmp_path / "certificate.json")

    def checked() -> tuple[int, str]:
        code = main(["--check", str(file), str(run)])
        return code, "".join(capsys.readouterr())

    assert checked() == (0, f"{file} is of {run}: steps 1 to 2 reproduce here\n")
    written(run, file, holds=False)
    assert checked()[0] == 1
    file.write_text(file.read_text().replace("false", "true"))
    assert checked() == (1, f"{file} is not as it was written: its seal is of something else\n")
    written(run, file)
    (run / "metrics.jsonl").write_text("")
    code, said = checked()
    assert code == 1 and "has changed since: metrics.jsonl" in said
    for other in ({}, {"run": {}, "holds": True, "verdict": ""}, {"run": facts(run)},
                  {"run": facts(run), "holds": "no", "verdict": "of nothing"}):  # fmt: skip
        file.write_text(json.dumps({**other, "seal": seal(other)}))
        assert checked() == (2, f"{file} is no certificate\n")
    assert main(["--check", str(file), str(tmp_path)]) == 2


def test_a_damaged_checkpoint_is_seen_and_not_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [2.0, 1.0])

    def save(name: str, words: bytes) -> None:
        folder = CheckpointFolder(run / "checkpoints")
        part = folder.begin()
        entries = {}
        for file in (STATE, WEIGHTS):
            with HashedFile(part / file) as written:
                written.write(words)
            entries[file] = written.entry()
        folder.publish(part, 1, entries, [name])

    save("last", b"as it was")
    about = {"run": facts(run, 1), "replay": {"from": 1}, "holds": True, "verdict": "step 2 reproduces here"}
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps({**about, "seal": seal(about)}))
    arguments = ["--check", str(file), str(run)]
    assert main(arguments) == 0
    (run / "checkpoints" / "last" / STATE).write_bytes(b"as it is!")
    assert main(arguments) == 1 and "checkpoints/last is damaged (" in capsys.readouterr().out
    assert main([str(run), "--out", str(tmp_path / "new.json")]) == 2
    assert "checkpoints/last is damaged (" in capsys.readouterr().err and not (tmp_path / "new.json").exists()
    save("last", b"as it was")
    assert main(arguments) == 0
    shutil.rmtree(run / "checkpoints" / "step-1")
    assert main(arguments) == 1 and "has changed since: checkpoints/step-1/manifest.json" in capsys.readouterr().out


def test_an_evaluation_on_another_machine_may_be_off_by_rounding() -> None:
    near = {"here": {"eval/loss": 1.0, "eval/accuracy": 0.5}, "recorded": {"eval/loss": 1.0001, "eval/accuracy": 0.6},
            "differ": ["eval/loss", "eval/accuracy"]}  # fmt: skip
    far = {**near, "recorded": {"eval/loss": 1.1, "eval/accuracy": 0.6}}
    alike: dict[str, Any] = {"to_the_bit": True, "identity": []}
    assert unlike(near, alike) == near["differ"]
    for replay in ({"to_the_bit": False, "identity": []}, {"to_the_bit": True, "identity": [{"key": "device"}]}):
        assert unlike(near, replay) == [] and unlike(far, replay) == ["eval/loss"]


@pytest.mark.slow
def test_a_run_is_certified_and_one_that_was_changed_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = tmp_path / "run", tmp_path / "certificate.json"
    train(run, *BASE, "epochs=null", "steps=4", "log_every=1", "eval_every=2", "checkpoint.every=2", "batch.micro=12",
          "batch.shard=null", "reduction=exact")  # fmt: skip
    assert main([str(run), "--out", str(file), "--steps", "2"]) == 0
    assert "certified: steps 3 to 4 reproduce here to the bit" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["evaluation"]["recorded"] and not found["evaluation"]["differ"] and found["replay"]["to_the_bit"]
    assert main(["--check", str(file), str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] == 4 and "train/loss" in row:
            row["train/loss"] *= 0.9
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--check", str(file), str(run)]) == 1
    assert main([str(run), "--out", str(file), "--steps", "2"]) == 1
    assert "not certified" in capsys.readouterr().out and not json.loads(file.read_text())["holds"]
