"""The W&B workspace of a project, as code: `python -m isobatch.dashboard ENTITY/PROJECT [--dry-run]`.

Needs `pip install 'isobatch[dashboard]'`. The panels read the keys that metrics.jsonl has, over `samples`, so that runs
of different batch sizes and hardware plans lie on one axis.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

# section -> panels; a panel is a title with the metrics of its lines (a regular expression stands for one per rank)
CURVES: dict[str, dict[str, Sequence[str] | str]] = {
    "Learning": {
        "training loss": ["train/loss"],
        "evaluation loss": ["eval/loss"],
        "accuracy": ["eval/accuracy", "eval/accuracy_top5"],
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/lr"],
    },
    "Speed and memory": {
        "samples per second": ["perf/samples_per_s"],
        "peak memory of each rank (MB)": "memory/rank.*",
    },
    "Precision": {
        "loss scale": ["train/loss_scale"],
        "skipped steps": ["train/skipped_steps"],
    },
}
# the same training under several hardware plans: what should be equal, and what should not
PLANS = {
    "best accuracy": "best/eval/accuracy",
    "best loss": "best/eval/loss",
    "samples per second, whole run": "perf/samples_per_s",
    "seconds of training": "time/train_s",
    "peak memory of rank 0 (MB)": "memory/rank0_mb",
}
PLAN_COLUMNS = ("plan/effective_batch", "plan/num_replicas", "plan/accumulation_steps")


def workspace(entity: str, project: str, name: str = "isobatch") -> Any:
    """The wandb_workspaces.Workspace; nothing is sent.

    Raises:
        ImportError: wandb-workspaces is not installed.
    """
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def curves(title: str, metrics: Sequence[str] | str) -> Any:
        if isinstance(metrics, str):
            return reports.LinePlot(title=title, x="samples", metric_regex=metrics)
        return reports.LinePlot(title=title, x="samples", y=list(metrics))

    sections = [
        workspaces.Section(name=section, panels=[curves(*panel) for panel in panels.items()], is_open=True)
        for section, panels in CURVES.items()
    ]
    bars = [reports.BarPlot(title=title, metrics=[metric]) for title, metric in PLANS.items()]
    parallel = reports.ParallelCoordinatesPlot(
        title="plans",
        columns=[reports.ParallelCoordinatesPlotColumn(metric=reports.Config(key)) for key in PLAN_COLUMNS]
        + [reports.ParallelCoordinatesPlotColumn(metric=reports.SummaryMetric(key))
           for key in ("perf/samples_per_s", "best/eval/accuracy")],
    )  # fmt: skip
    sections.append(workspaces.Section(name="Plan comparison", panels=[*bars, parallel], is_open=True))
    return workspaces.Workspace(
        entity=entity, project=project, name=name, sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="samples"),
    )  # fmt: skip


def spec(made: Any) -> dict[str, Any]:
    """What would be saved, as plain data."""
    # the only serialisation the library has; its name says that it may change
    text = made._to_model().model_dump_json(by_alias=True, exclude_none=True)
    return json.loads(text)  # type: ignore[no-any-return]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 1 not saved, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m isobatch.dashboard", description=__doc__.splitlines()[0])
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--name", default="isobatch", help="of the view (default: isobatch)")
    parser.add_argument("--dry-run", action="store_true", help="print the specification; needs no account")
    options = parser.parse_args(arguments)
    entity, _, project = options.project.partition("/")
    if not entity or not project or "/" in project:
        return refuse(f"{options.project!r} is not ENTITY/PROJECT; write for example my-team/isobatch")
    try:
        made = workspace(entity, project, options.name)
    except ImportError as error:
        return refuse(f"wandb-workspaces cannot be imported ({error}); pip install 'isobatch[dashboard]'")
    if options.dry_run:
        print(json.dumps(spec(made), indent=2))
        return 0
    from isobatch.logger import access

    if access.find_key() is None:  # else the library asks, or ends in a stack
        return refuse("no W&B key was found; set WANDB_API_KEY or run `wandb login`, or add --dry-run")
    try:
        made.save()
    except Exception as error:
        line = access.redacted(" ".join(str(error).split()))
        print(f"isobatch: the dashboard was not saved: {line}", file=sys.stderr)
        return 1
    print(made.url)
    return 0


def refuse(line: str) -> int:
    print(f"isobatch: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
