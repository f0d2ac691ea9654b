"""Every error rollstream raises, named after the boundary that was crossed.

::

    RollstreamError                     exit 1
    ├── ConfigError                     exit 2   the person must change something
    │   ├── IdentityMismatch                     the run exists with another dataset, tokenizer, seed, G or schema
    │   ├── RunExists / RunMissing               --new on an existing run, --resume on none
    │   ├── RedisUnreachable                     nothing answers at redis.url when a process starts
    │   └── UnsafeRedis                          evicting, or too old
    ├── Unavailable                     exit 75  try again later; nothing is wrong with the configuration
    │   ├── RedisUnavailable
    │   ├── EngineUnavailable
    │   └── StorageUnavailable
    ├── WireError
    │   ├── DecodeError                          truncated, oversized or hostile bytes; names the field
    │   └── SchemaTooNew                         written by a newer major version of rollstream; exit 2
    ├── LedgerError
    │   ├── SlotLost                             the slot expired or was given away; drop the group
    │   ├── Fenced                      exit 3   a newer trainer is attached; stop, and stay away
    │   ├── RunEnded                             the run drains; give slots back and end in good order
    │   ├── PayloadTooLarge                      over the bytes charged at reserve; a failed attempt
    │   ├── PayloadLost                          a leased payload is gone or damaged
    │   ├── StepOrder                            a step or chunk out of order: a bug in the caller
    │   ├── LedgerRegressed             exit 75  Redis lost writes it had acknowledged; the trainer re-asserts them
    │   └── ReplayGap                            the journal no longer has what a reader asks for
    ├── SampleFailed                             one generation failed; retry that sample on another engine
    │   └── SampleAborted                            its engine ended it on purpose, for an update or a stop; not a failed attempt
    └── WeightError
        ├── ManifestError                        a manifest or weight file that must not be loaded; names the tensor
        │   └── VersionGone                          its files were collected: look for a newer version
        ├── ApplyFailed                          an engine did not take a version; it is unfit until it does
        │   └── TransportFailed                  a fast path broke; the version itself may be fine by another
        └── Superseded                  exit 3   a newer process registered this engine id; stop, and stay away

Failure of one rollout is a value (`Reason`), not an exception through the producer.
"""

from __future__ import annotations

EXIT_DRAINED = 0
EXIT_FAULT = 1
EXIT_CONFIG = 2
EXIT_REPLACED = 3
"""Another process has this one's place: whoever starts it again takes the place back, and the other will answer in kind."""
EXIT_TRY_AGAIN = 75


class RollstreamError(Exception):
    """Base of all our errors; `exit_code` is what a daemon exits with when this ends it."""

    exit_code = EXIT_FAULT


class ConfigError(RollstreamError):
    """The person must change a file, a key or a command; the message says which and how."""

    exit_code = EXIT_CONFIG


class IdentityMismatch(ConfigError):
    """This run was created with another dataset, tokenizer, seed, group size or schema."""


class RunExists(ConfigError):
    """`--new` was asked for, and the run is already there."""


class RunMissing(ConfigError):
    """`--resume` was asked for, and there is no such run."""


class RedisUnreachable(ConfigError):
    """Nothing answers at redis.url when a process starts: a wrong address, or no server. Later outages are `RedisUnavailable`."""


class UnsafeRedis(ConfigError):
    """The Redis server would lose data silently (evicting policy) or is too old."""


class Unavailable(RollstreamError):
    """Something we depend on does not answer within its deadline. Trying again later is right."""

    exit_code = EXIT_TRY_AGAIN


class RedisUnavailable(Unavailable):
    """Redis did not answer within the deadline."""


class EngineUnavailable(Unavailable):
    """No engine answered within the deadline."""


class StorageUnavailable(Unavailable):
    """The spill or the blob store does not answer; nothing is known to be lost."""


class WireError(RollstreamError):
    """Bytes that cannot be understood."""


class DecodeError(WireError):
    """Truncated, oversized or hostile bytes; `field` names the place.

    Raises from every decoder in `protocol`; the caller drops the bytes and reports the field.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class SchemaTooNew(WireError):
    """Written by a newer major schema than this process reads. Upgrade this process."""

    exit_code = EXIT_CONFIG


class LedgerError(RollstreamError):
    """The ledger refused a request; the ledger is unchanged."""


class SlotLost(LedgerError):
    """The slot expired, was given back, or belongs to somebody else. The group is not stored."""


class Fenced(LedgerError):
    """A newer incarnation of the trainer is attached. This one must stop and change nothing."""

    exit_code = EXIT_REPLACED


class RunEnded(LedgerError):
    """The run is draining: no more slots are handed out."""


class PayloadTooLarge(LedgerError):
    """The payload is larger than the bytes charged at reserve. Counts as a failed attempt."""


class PayloadLost(LedgerError):
    """A leased group's payload is gone or does not match its digest."""

    def __init__(self, seq: int, problem: str) -> None:
        super().__init__(f"payload of group {seq}: {problem}")
        self.seq = seq


class StepOrder(LedgerError):
    """A step or chunk was asked for out of order. A bug in the caller, never retried."""


class LedgerRegressed(LedgerError):
    """Redis lost writes it had acknowledged, in a failover or a restart: a trainer re-asserts what it knows, everybody else tries again (rule R1)."""

    exit_code = EXIT_TRY_AGAIN


class ReplayGap(LedgerError):
    """What a reader of the journal asks for has left the retention. Start later, keep more with buffer.retention, or set buffer.spill."""


class SampleFailed(RollstreamError):
    """One generation did not give a usable rollout. Retry that sample on another engine."""


class SampleAborted(SampleFailed):
    """An engine ended one generation on purpose: it takes an update, or stops. Nothing is wrong with the sample; ask again, and count no failure."""


class WeightError(RollstreamError):
    """The weight channel refused something."""


class ManifestError(WeightError):
    """A manifest or a file it names must not be loaded; the message names the tensor."""


class VersionGone(ManifestError):
    """The files of a version are no longer there. Look for the newest version and prepare that."""


class ApplyFailed(WeightError):
    """An engine did not take a version. It stays unfit and unroutable until it does."""


class TransportFailed(ApplyFailed):
    """A way of moving weights broke before or while it was used. The version may be fine: take it from the store."""


class Superseded(WeightError):
    """A newer process registered this engine id, or holds its reconciler lock. This one must stop and change nothing."""

    exit_code = EXIT_REPLACED
