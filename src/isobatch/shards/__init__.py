"""Several shards in one forward, each as if it were alone. docs/shards.md says how."""
