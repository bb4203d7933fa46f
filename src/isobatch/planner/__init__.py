"""What a run will take before it starts: memory, the largest micro batch that fits, time on more replicas than are here.

`cost.py` is arithmetic, `trial.py` runs micro batches on a copy of the model, `memory.py` adds up, `micro.py` chooses
`batch.micro=auto`, `preview.py` is what a run calls. docs/planner.md has the method, its figures and its limits.
"""
