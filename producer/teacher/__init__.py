"""A model that says of every sampled token how likely it finds it: its logprobs travel with the group, for on-policy distillation."""
