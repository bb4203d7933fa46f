"""What `task=` runs besides training; the plan is planner/."""
