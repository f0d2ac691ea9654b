"""Stand-in for soundfile: only audio endpoints need the real one."""

from absent import served

__getattr__ = served("soundfile")
