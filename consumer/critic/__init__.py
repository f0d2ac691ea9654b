"""The critic of `trainer.advantage` gae: a model of what a rollout will be worth, trained beside the policy. docs/critic.md explains it; [critic]."""
