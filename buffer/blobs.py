"""Large extras of groups (routed experts, multimodal features) outside Redis: the header says where, and what their bytes must be.

    <run>/<seq>-<attempt>-<token>/<extra>      written before the group is put, by the owner of the slot; deleted when the ledger lets go of the group

A blob is durable before the ledger hears of its group, so a group that is READY has all of its blobs. The ledger names the folders to delete (`Ledger.sweep`):
of groups that are retried, dead or freed, and of slots that ended without a put, but not of groups that a recording refers to. All of it blocks.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from protocol.arrays import Array, pack, unpack
from protocol.codec import digest
from protocol.errors import ConfigError, DecodeError, PayloadLost
from protocol.messages import Attempt, BlobRef, GroupHeader, RolloutGroup, Seq, SlotToken
from protocol.objects import ObjectStore

_LONGEST_NAME = 120
_MARK = "claimed"


class BlobStore:
    """Blobs of one run."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run

    @property
    def url(self) -> str:
        return self._store.url

    def folder(self, seq: Seq, attempt: Attempt, token: SlotToken) -> str:
        """The prefix of everything an attempt has written."""
        return f"{self._run}/{seq}-{attempt}-{token}/"

    def claim(self) -> None:
        """Say that this is where the run's blobs lie: for whoever makes the run. Raises: `OSError`."""
        self._store.write(f"{self._run}/{_MARK}", [b""])

    @property
    def mark(self) -> str:
        """The place of what `claim` writes."""
        return f"{self.url}/{self._run}/{_MARK}"

    def claimed(self) -> bool:
        """Whether somebody has said that the run's blobs lie here. Raises: `OSError`."""
        return bool(self._store.names(f"{self._run}/{_MARK}"))

    def check(self) -> None:
        """Raises: `ConfigError` unless this process can write where the run's trainer looks for blobs."""
        probe = f"{self._run}/probe-{secrets.token_hex(8)}"
        try:
            marked = self.claimed()
            self._store.write(probe, [b""])
            self._store.delete(probe)
        except OSError as problem:
            raise ConfigError(f"buffer.blobs of the run: {problem}; make it writable from here") from problem
        if not marked:
            raise ConfigError(
                f"buffer.blobs of the run is {self.url} here, which is not what its trainer sees: use a folder that all machines share, or an fsspec URL"
            )

    def put(self, seq: Seq, attempt: Attempt, token: SlotToken, group: RolloutGroup, *, least_bytes: int) -> tuple[RolloutGroup, Mapping[str, BlobRef]]:
        """The group without its extras of at least `least_bytes`, and where those are: durable now. Raises: `OSError`; none of them is there then."""
        large = {name: array for name, array in group.extras.items() if array.nbytes >= least_bytes}
        if not large:
            return group, {}
        folder = self.folder(seq, attempt, token)
        try:
            blobs = {name: self._write(folder + _object_name(name), array) for name, array in large.items()}
        except OSError:
            with contextlib.suppress(OSError):  # what cannot be deleted now goes when the ledger lets go of the slot
                for name in large:
                    self._store.delete(folder + _object_name(name))
            raise
        return replace(group, extras={name: array for name, array in group.extras.items() if name not in large}), blobs

    def restore(self, header: GroupHeader, group: RolloutGroup) -> RolloutGroup:
        """The group with its large extras, read-only views of what was read.

        Raises: `PayloadLost` if a blob is gone or damaged; `OSError` if the store does not say.
        """
        if not header.blobs:
            return group
        return replace(group, extras={**group.extras, **{name: self._restored(header, name, blob) for name, blob in header.blobs.items()}})

    def delete(self, name_prefix: str) -> None:
        """Everything whose name begins so."""
        for name in self._store.names(name_prefix):
            self._store.delete(name)

    def _write(self, name: str, array: Array) -> BlobRef:
        wire = pack(array)
        data = wire["data"]
        assert isinstance(data, memoryview)
        self._store.write(name, [data])
        return BlobRef(name=name, dtype=str(wire["dtype"]), shape=array.shape, bytes=data.nbytes, digest=digest(data))

    def _restored(self, header: GroupHeader, name: str, blob: BlobRef) -> Array:
        try:
            data = self._store.read(blob.name)
            if len(data) != blob.bytes or digest(data) != blob.digest:
                raise PayloadLost(header.seq, f"blob {blob.name} of extra {name!r}: {len(data)} bytes do not match digest {blob.digest}")
            return unpack({"dtype": blob.dtype, "shape": list(blob.shape), "data": data}, f"extras.{name}")
        except FileNotFoundError as problem:
            raise PayloadLost(header.seq, f"blob {blob.name} of extra {name!r} is gone") from problem
        except DecodeError as problem:
            raise PayloadLost(header.seq, f"blob {blob.name} of extra {name!r}: {problem}") from problem


def _object_name(extra: str) -> str:
    """One segment for any name of an extra: percent-encoded, and cut at the end where a digest tells long ones apart."""
    text = quote(extra, safe="").replace("~", "%7E") or "%"
    if text.startswith("."):
        text = f"%2E{text[1:]}"
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}-{digest(extra.encode())}"
