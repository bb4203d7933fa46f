"""Going on with a run: what may change, and what its saved model is."""
