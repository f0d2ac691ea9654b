"""A run on a Ray cluster: its GPUs reserved in one placement group, its daemons as detached actors, scaled while it runs."""
