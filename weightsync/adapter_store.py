"""The store of a run whose versions are adapters: folders that peft and SGLang load, and nothing of the model that they belong to.

<folder>/v2-7/adapter_model.safetensors, adapter_config.json, manifest.json
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from protocol.errors import ManifestError
from protocol.messages import Manifest
from weightsync.lora import ADAPTER_FILE, ADAPTER_SETTINGS
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore
from weightsync.version_files import Draft, draft_full

KIND = "adapter"


class AdapterStore(DirectoryStore):
    """See `DirectoryStore`. Versions are of kind adapter, in one file each."""

    def __init__(self, folder: str | os.PathLike[str], settings: bytes = b"") -> None:
        """`settings`: `adapter_config.json`; a reader needs none."""
        super().__init__(folder)
        self._settings = settings

    def write(self, snapshot: Snapshot) -> Manifest:
        """Make `snapshot`, tensors by peft's names, a version that anybody may read; see `VersionStore.write`."""
        draft = draft_full(snapshot, str(self.path(snapshot.version)), 1 << 62)
        tensors = tuple(dataclasses.replace(entry, file=ADAPTER_FILE) for entry in draft.manifest.tensors)
        return self._put(Draft(dataclasses.replace(draft.manifest, kind=KIND, tensors=tensors), {ADAPTER_FILE: snapshot.tensors}))

    def locate(self, manifest: Manifest) -> Path:
        """The folder to load, known to lie in this store. Raises: `ManifestError` for anything but an adapter; `VersionGone` if it is not there."""
        if manifest.kind != KIND or manifest.transport != "store":
            raise ManifestError(
                f"version {manifest.version} is {manifest.kind} by {manifest.transport}: this process takes adapters; the trainer and all engines need the "
                "same [lora] section"
            )
        return self._place(manifest)

    def _link_assets(self, folder: Path) -> None:
        self._write_file(folder / ADAPTER_SETTINGS, self._settings)
