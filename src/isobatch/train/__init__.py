"""The training: the loop over windows, the step, and all state that changes."""
