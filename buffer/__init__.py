"""The staleness-aware buffer: ledger, batch journal, payload store, audit. Its public door is this module; `buffer.ledger` is the pure ledger."""

from buffer.audit import AuditSpill, read_audit
from buffer.client import ProducerBuffer, TrainerBuffer
from buffer.config import BufferConfig, StalenessGuard
from buffer.contract import Ledger
from buffer.redis_ledger import RedisLedger
from buffer.report import RunTotals, totals
from buffer.staleness import kept_tokens, token_mask
from buffer.witness import Witness, WitnessLine, read_witness

__all__ = [
    "AuditSpill",
    "BufferConfig",
    "Ledger",
    "ProducerBuffer",
    "RedisLedger",
    "RunTotals",
    "StalenessGuard",
    "TrainerBuffer",
    "Witness",
    "WitnessLine",
    "kept_tokens",
    "read_audit",
    "read_witness",
    "token_mask",
    "totals",
]
