"""The wire and the words every package shares: messages, versions, errors, configuration, Redis access. Imports nothing of ours."""
