"""`rollstream engine | relay | weight-server` as they are, but that a way that broke is tried again soon, or no round would see it used again."""

from __future__ import annotations

import sys

from deploy.cli import main as rollstream
from weightsync import fallback

_SOON_S = 0.5


def main() -> int:
    fallback.FIRST_PAUSE_S = fallback.LONGEST_PAUSE_S = _SOON_S
    return rollstream()


if __name__ == "__main__":
    sys.exit(main())
