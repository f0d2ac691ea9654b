"""What the actors of a run are called: `role-index`, and `engine-index-node-rank` where one more machine has its part of an engine. Pure.

>>> role_of("engine-3-node-1"), index_of("engine-3-node-1"), rank_of("engine-3-node-1"), unit_of("engine-3-node-1")
('engine', 3, 1, 'engine-3')
>>> role_of("producer-7"), index_of("producer-7"), rank_of("producer-7"), unit_of("producer-7")
('producer', 7, 0, 'producer-7')
>>> members("engine-3", 2)
['engine-3', 'engine-3-node-1']
"""

from __future__ import annotations


def role_of(name: str) -> str:
    return name.partition("-")[0]


def index_of(name: str) -> int:
    return int(unit_of(name).partition("-")[2])


def rank_of(name: str) -> int:
    """Of the machine, in an engine over several; 0: the first, or the only one."""
    return int(name.rpartition("-node-")[2]) if "-node-" in name else 0


def unit_of(name: str) -> str:
    """The engine that the actor is a part of, by the name of its first one; who is no part of anything is that itself."""
    return name.partition("-node-")[0]


def members(unit: str, nodes: int) -> list[str]:
    """Everyone who makes up that engine, the first one first."""
    return [unit, *(f"{unit}-node-{rank}" for rank in range(1, nodes))]
