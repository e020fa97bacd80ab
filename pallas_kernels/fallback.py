"""Word of a slower way, once."""

import functools
import logging

logger = logging.getLogger(__name__)


@functools.cache
def say_once(operation: str, reason: str) -> None:
    """Logs that `operation` falls back to plain XLA, the first time for each reason."""
    logger.warning("%s falls back to plain XLA, which is slower: %s", operation, reason)
