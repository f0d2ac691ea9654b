"""Stand-in: see the package."""

from absent import served

__getattr__ = served("IPython.display")
