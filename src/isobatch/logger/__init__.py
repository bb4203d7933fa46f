"""Group `logger`: where metrics go besides metrics.jsonl."""

from isobatch.logger.options import TABLE, WeightsAndBiases
from isobatch.logger.protocol import Logger, RunInfo

__all__ = ["TABLE", "Logger", "RunInfo", "WeightsAndBiases"]
