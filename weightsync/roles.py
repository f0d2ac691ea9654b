"""Under which names the processes of the weight channel announce themselves, and when an open line between two of them counts as dead."""

from __future__ import annotations

WEIGHT_SERVER = "weight-server"
RELAY = "relay"
HEARTBEAT_S = 5.0
"""How long either side of a line may be silent, give or take half of it."""
