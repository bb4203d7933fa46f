"""`sweep.dry_run=true`: the jobs of a sweep with their plans and what they would cost. Nothing is trained or written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals

from isobatch import config as configuration
from isobatch import hydra_patches, sweeps, tasks
from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.config import Config, marked
from isobatch.config.tables import MARKS
from isobatch.console import make_console
from isobatch.console.streams import to_stderr
from isobatch.errors import ConfigError
from isobatch.run_folder import layout
from isobatch.run_folder.reading import Unreadable, read_mapping, usable
from isobatch.runtime.distributed import ranks_from_environment
from isobatch.sweeps.slots import deal, gpu_names

HEAD = ("job", "effective", "micro", "replicas", "accum.", "updates", "samples", "about", "state", "settings")
STATES = {"new": "new", "skip": "complete", "go on": "goes on", "again": "runs again"}


@dataclass(frozen=True)
class Cost:
    """Of one job; None = not known before it starts. `seconds` without starting up and evaluating."""

    effective: int | None
    micro: int | None
    replicas: int | None
    accumulation: int | None
    updates: int
    samples: int
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        known = (self.effective, self.micro, self.replicas, self.accumulation)
        return (*("?" if n is None else str(n) for n in known), f"{self.updates:,}", f"{self.samples:,}", clock(self.seconds))


class DryRun:
    """A launcher that lists."""

    def __init__(self, hydra_context: Any, config: Any, parallel_jobs: int):
        self.loader, self.config = hydra_context.config_loader, config
        self.folder = Path(str(config.hydra.sweep.dir)).absolute()
        self.gpus = len(deal(parallel_jobs)[0].gpus) if parallel_jobs > 1 else len(gpu_names())
        self.estimate = Estimate(self.gpus, self.folder)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Print the table; SystemExit(2) when a job would be refused."""
        setup_globals()
        rows, refused, costs = [], [], []
        listed = [filter_overrides(overrides) for overrides in job_overrides]
        shared = set.intersection(*map(set, listed)) if len(listed) > 1 else set()
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            settings = " ".join(word for word in listed[number - initial_job_idx] if word not in shared)
            try:
                plain, run_dir = self.job(number, list(overrides))
                word, _ = sweeps.earlier(plain, run_dir)
                cost = self.estimate(configuration.load(plain))
            except ConfigError as refusal:
                rows.append((str(number), *["-"] * 7, "refused", settings))
                refused.append(f"job {number} would be refused: {refusal}")
                continue
            rows.append((str(number), *cost.cells(), STATES[word], settings))
            if word != "skip":
                costs.append(cost)
        make_console(True, 1, 1).table(HEAD, rows)
        print(total(costs, len(rows)), flush=True)
        for line in refused:
            to_stderr(f"isobatch: {line}")
        self.tidy()
        if refused:
            raise SystemExit(ConfigError.exit_code)
        return [JobReturn(overrides=list(o), status=JobStatus.COMPLETED) for o in job_overrides]

    def job(self, number: int, overrides: list[str]) -> tuple[dict[str, Any], Path]:
        """The job's resolved config and its folder, which need not be there: what Hydra's launcher does before a job."""
        config = self.loader.load_sweep_config(self.config, overrides)
        config.hydra.job.id, config.hydra.job.num = str(number), number
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            run_dir = self.folder / str(config.hydra.sweep.subdir)
            return configuration.plain_config(hydra_patches.without_hydra(config), Path.cwd(), overrides), run_dir
        finally:
            HydraConfig.instance().cfg = before

    def tidy(self) -> None:
        """Take back the folder that was made for this launch; it holds the sweeper's note of the command at most."""
        if self.folder in hydra_patches.STAMP.made:
            hydra_patches.STAMP.release()


class Estimate:
    """Plans of configs from integers; a dataset's size is found once for all jobs that share it."""

    def __init__(self, gpus: int, folder: Path):
        self.gpus, self.sizes = gpus, dict[str, int]()
        self.rates = measured(folder)

    def __call__(self, config: Config) -> Cost:
        """Raises ConfigError where a run would, as far as integers can tell."""
        task = tasks.of(config)
        if task.reads_data:
            configuration.check_inputs(config)
        replicas = self.replicas(config.parallel)
        micro = config.batch.micro
        if micro == "auto":  # found by trying; the windows do not depend on it
            batch = resolve_batch(config.batch.effective, None, None, replicas, config.batch.shard)
        else:
            batch = resolve_batch(config.batch.effective, micro, config.accumulation.steps, replicas, config.batch.shard)
        config = config.debug.on(config, batch.effective)
        plan = BatchPlan(batch, config.sampler.order_size(self.size(config)), config.sampler.tail)
        updates = config.steps or (config.epochs or 0) * plan.windows_per_epoch
        if not task.trains:
            updates = 0
        samples = plan.samples_before(updates)
        rate = self.rates.get(rated(config.plain))
        open_ = micro == "auto"
        return Cost(batch.effective, None if open_ else batch.micro, replicas, None if open_ else batch.accumulation_steps,
                    updates, samples, samples / rate if rate else None)  # fmt: skip

    def replicas(self, options: Any) -> int:
        """As launch and the strategies will find it."""
        ranks = ranks_from_environment()
        if ranks.world_size > 1:
            return ranks.world_size
        listed = getattr(options, "devices", None)
        return options.known_replicas or (len(listed) if listed else max(1, self.gpus))

    def size(self, config: Config) -> int:
        """Training samples. Options that state their number of `samples` are taken at their word, others are loaded."""
        stated = getattr(config.data, "samples", None)
        if isinstance(stated, int):
            return stated
        key = json.dumps(config.plain["data"], sort_keys=True, default=str)
        if key not in self.sizes:
            self.sizes[key] = len(config.data.load(None, config.seed).train)
        return self.sizes[key]


def rated(plain: Mapping[str, Any]) -> str:
    decisive = {key: value for key, value, marks in marked.options(plain) if marks.speed}
    names = {group: (plain.get(group) or {}).get("name") for group, marks in MARKS.items() if marks.speed}
    return json.dumps([decisive, names], sort_keys=True, default=str)


def measured(folder: Path) -> dict[str, float]:
    """Samples per second of the finished jobs in a sweep's folder, by what decides them."""
    found: dict[str, float] = {}
    for path in sorted(folder.glob("*/summary.json")):
        try:
            rate = read_mapping(path.parent, path.name)["perf"]["samples_per_s"]
        except (Unreadable, KeyError, TypeError):
            continue
        config = usable(path.parent, layout.CONFIG) if isinstance(rate, (int, float)) and rate > 0 else None
        if config is not None:
            found[rated(config)] = float(rate)
    return found


def total(costs: Sequence[Cost], jobs: int) -> str:
    seconds = [cost.seconds for cost in costs if cost.seconds is not None]
    about = f", about {clock(sum(seconds))} one after another" if seconds and len(seconds) == len(costs) else ""
    return (f"{jobs} job(s), {len(costs)} to run: {sum(c.samples for c in costs):,} samples in "
            f"{sum(c.updates for c in costs):,} updates{about}. Nothing was run (sweep.dry_run)")  # fmt: skip


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
