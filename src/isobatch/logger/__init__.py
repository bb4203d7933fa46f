"""Group `logger`: where metrics go besides metrics.jsonl."""

from isobatch.logger.options import TABLE, WeightsAndBiases
from isobatch.logger.protocol import Logger, RunInfo
from isobatch.marks import Marks

__all__ = ["MARKS", "TABLE", "Logger", "RunInfo", "WeightsAndBiases"]

MARKS = Marks(resume="free")
