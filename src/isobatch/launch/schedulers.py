"""Tasks of SLURM's srun and of mpirun as ranks: under the names that torchrun uses, which everything else reads."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from isobatch.errors import ConfigError
from isobatch.launch import meeting

# (rank, size, rank on the node, size on the node)
NAMES = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def join(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where a launcher's own variables say
    that this is one of several tasks and nobody has set RANK.

    Raises:
        ConfigError: tasks on several nodes, and nothing says where the first one is.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    found = next((names for names in NAMES if started_by(names, environ)), None)
    if found is None:
        return
    rank, size, local, local_size = (environ.get(name, "") for name in found)
    per_node = re.match(r"\d+", local_size)
    alone = found[0] == "SLURM_PROCID" and environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")) == "1"
    environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local or rank)
    environ["LOCAL_WORLD_SIZE"] = size if alone else per_node[0] if per_node else size
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if "MASTER_ADDR" not in environ:
        if environ["LOCAL_WORLD_SIZE"] == size:
            environ["MASTER_ADDR"] = "127.0.0.1"
        elif found[0] == "SLURM_PROCID" and nodes:
            environ["MASTER_ADDR"] = first_node(nodes)
        else:
            raise ConfigError("MASTER_ADDR", None, f"{size} tasks on several nodes do not say where the first one is",
                              "set MASTER_ADDR to the node of rank 0, for all of them")  # fmt: skip
    if "MASTER_PORT" not in environ:  # two jobs on one node must not meet: the port follows from the job
        job = "/".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID"))
        job = job if job.strip("/") else str(os.getppid()) if environ["LOCAL_WORLD_SIZE"] == size else nodes
        meeting.by_job(job, environ)


def started_by(names: tuple[str, ...], environ: MutableMapping[str, str]) -> bool:
    """Whether this process is one of several tasks under these names."""
    rank, size = environ.get(names[0], ""), environ.get(names[1], "")
    if names[0] == "SLURM_PROCID":
        size = environ.get("SLURM_STEP_NUM_TASKS", size)
        # a batch script itself has these too: it is no step, and the tasks that it may start are not there yet
        if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and rank in ("", "0"):
            return False
    return rank.isdecimal() and size.isdecimal() and int(size) > 1


def first_node(nodes: str) -> str:
    """The first name of a list as SLURM writes it: `gpu[03-05,7],login` -> gpu03."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return nodes.partition(",")[0]
    inside, _, after = rest.partition("]")
    return name + re.split("[-,]", inside)[0] + re.split(r"[,\[]", after)[0]
