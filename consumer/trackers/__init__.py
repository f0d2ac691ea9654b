"""Where a step's figures go: metrics.jsonl always, and the trackers that [trackers] names, which can neither stop nor slow training."""
