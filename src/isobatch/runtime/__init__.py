"""What a process runs on: the ranks, the device, every seed, weights in parts, imports that take seconds."""
