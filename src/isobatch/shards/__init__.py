"""Several shards in one forward, each as if it were alone. The training runs them one after another so far."""
