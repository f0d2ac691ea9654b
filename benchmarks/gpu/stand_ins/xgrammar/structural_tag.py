"""Stand-in: see the package."""

import xgrammar

__getattr__ = xgrammar.__getattr__
