"""Group `logger`: where metrics go besides metrics.jsonl."""

from isobatch.logger.options import TABLE, WeightsAndBiases
from isobatch.logger.protocol import SCHEME, Logger, RunInfo
from isobatch.marks import Marks

__all__ = ["MARKS", "SCHEME", "TABLE", "Logger", "RunInfo", "WeightsAndBiases"]

MARKS = Marks(resume="free")
