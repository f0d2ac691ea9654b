"""`rollstream up`: everything of a run on this machine, started, watched, restarted and stopped in order."""
