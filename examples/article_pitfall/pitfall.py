"""What three accumulation steps with a sampler for two processes do, beside the training that was meant."""

from __future__ import annotations

import torch

import isobatch

MICRO, EPOCHS = 4, 2


def order(replicas: int, pad: bool) -> list[int]:
    """One process's order of 16 samples that replays `replicas` processes: a batch of the first, one of the second, ..."""
    indices = list(range(16))
    if pad:  # as DistributedSampler does
        indices += indices[: -len(indices) % replicas]
    dealt = [indices[rank::replicas] for rank in range(replicas)]
    return [i for at in range(0, len(dealt[0]), MICRO) for mine in dealt for i in mine[at : at + MICRO]]


def accumulate(steps: int, batches: list[list[int]]) -> tuple[list[float], int]:
    """The article's loop: the weights at the end, and how many updates were made."""
    torch.manual_seed(0)
    rows = torch.rand(16, 16)
    layer = torch.nn.Linear(16, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    updates = 0
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches, 1):
            (layer(rows[batch]).sum() / steps).backward()
            if number % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
    return layer.weight[0].tolist(), updates


def main(folder: str = "outputs/article_pitfall") -> dict[str, tuple[list[float], int]]:
    two = order(2, pad=False)
    article = accumulate(3, [two[i : i + MICRO] for i in range(0, 16, MICRO)])
    result = isobatch.train(["experiment=article_pitfall", "threads=1", "log_weights=16", f"hydra.run.dir={folder}"])
    ours = [row for row in result.rows if "weights" in row][-1]["weights"], result.summary["updates"]
    return {"three steps, a sampler for two": article, "isobatch, three shards": ours}


if __name__ == "__main__":
    for name, (weights, updates) in main().items():
        print(f"{name:32} {updates} updates  {' '.join(f'{w:.6f}' for w in weights[:4])}")
