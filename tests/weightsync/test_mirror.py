"""A mirror has the newest version whole, whatever it had before, whatever is damaged, and whoever was killed while making it."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync.store
from protocol.errors import ApplyFailed, ManifestError, TransportFailed, VersionGone
from protocol.failpoints import VARIABLE, Failpoint
from protocol.messages import Manifest
from protocol.versions import Version
from tests.weightsync.places import BUCKET, KINDS, Place, place_of, raw, weights
from weightsync.control import EngineControl
from weightsync.fallback import Transports
from weightsync.mirror import Mirror
from weightsync.safetensors_file import open_model
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore, VersionStore
from weightsync.transports.relay import RelayTransport

DEADLINE_S = 60.0


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, model_path: Path) -> Iterator[Place]:
    with place_of(request.param, tmp_path, model_path) as one:
        yield one


@pytest.fixture
def versions(place: Place) -> VersionStore:
    return place.open()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "relay"


def chain(store: VersionStore, last: int) -> list[Manifest]:
    """Version 1:0 whole, 1:1 to 1:last as deltas."""
    found = [store.write(weights(0))]
    for n in range(1, last + 1):
        found.append(store.write_delta(weights(n), found[-1], weights(n - 1).tensors))
    assert [one.kind for one in found] == ["full", *["delta"] * last]
    return found


def holds(path: Path, snapshot: Snapshot) -> None:
    with open_model(path) as tensors:
        assert {name: bytes(one.data) for name, one in tensors.items()} == raw(snapshot)
    assert (path / "config.json").read_text() == "{}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


async def test_a_version_is_whole_here_whether_it_was_published_whole_or_as_deltas(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 4)
    mirror = Mirror(folder, place.open(writer=False), bucket_bytes=BUCKET)
    for n in (0, 1, 3, 4):  # 1:2 and 1:3 in one go
        path = await mirror.ensure(made[n], deadline_s=DEADLINE_S)
        holds(path, weights(n))
        assert path.parent == (Path(place.where) if place.kind == "memory" and n == 0 else folder)
        assert mirror.newest == Version(1, n)
    assert (mirror.totals.deltas, mirror.totals.fulls) == (3, 0 if place.kind == "memory" else 1)
    from_full = made[0].total_bytes
    assert mirror.totals.fetched_bytes == from_full + sum(one.total_bytes for one in made[1:])
    assert {path.name for path in folder.glob("v*")} == {"v1-3", "v1-4"}


async def test_what_is_here_is_not_made_again(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 2)
    first, second = (Mirror(folder, place.open(writer=False)) for _ in range(2))
    path = await first.ensure(made[2], deadline_s=DEADLINE_S)
    stamp = path.stat().st_ino
    assert await second.ensure(made[2], deadline_s=DEADLINE_S) == path
    assert await first.ensure(made[2], deadline_s=DEADLINE_S) == path
    assert (path.stat().st_ino, second.totals.deltas, first.totals.deltas) == (stamp, 0, 1)


async def test_a_version_of_the_same_name_from_an_earlier_run_is_replaced(place: Place, versions: VersionStore, folder: Path):
    other = DirectoryStore(folder)
    other.write(dataclasses.replace(weights(7), version=Version(1, 0)))
    other.write(dataclasses.replace(weights(8), version=Version(1, 1)))
    made = chain(versions, 1)
    mirror = Mirror(folder, place.open(writer=False))
    holds(await mirror.ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    holds(await mirror.ensure(made[0], deadline_s=DEADLINE_S), weights(0))


async def test_a_damaged_copy_is_found_and_made_anew(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 2)
    mirror = Mirror(folder, place.open(writer=False))
    path = await mirror.ensure(made[1], deadline_s=DEADLINE_S)
    flip(path / "model.safetensors")
    holds(await mirror.ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    flip(path / "model.safetensors")
    holds(await mirror.ensure(made[2], deadline_s=DEADLINE_S), weights(2))  # from the full version in the store: the base here is not what it should be
    assert mirror.totals.fetched_bytes >= 3 * made[0].total_bytes
    assert not (folder / "v1-1").exists()
    assert not list(folder.glob(".tmp-*"))


async def test_a_gap_in_the_chain_is_gone_and_the_next_whole_version_heals_it(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 3)
    mirror = Mirror(folder, place.open(writer=False))
    versions.delete(Version(1, 1))
    with pytest.raises(VersionGone, match="1:1"):
        await mirror.ensure(made[3], deadline_s=DEADLINE_S)
    assert not list(folder.glob("v*"))
    whole = versions.write(weights(4))
    holds(await mirror.ensure(whole, deadline_s=DEADLINE_S), weights(4))
    last = versions.write_delta(weights(5), whole, weights(4).tensors)
    holds(await mirror.ensure(last, deadline_s=DEADLINE_S), weights(5))


async def test_a_copy_here_bridges_a_gap_that_lies_before_it(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 3)
    mirror = Mirror(folder, place.open(writer=False))
    await mirror.ensure(made[2], deadline_s=DEADLINE_S)
    versions.delete(Version(1, 1))
    versions.delete(Version(1, 0))
    holds(await mirror.ensure(made[3], deadline_s=DEADLINE_S), weights(3))


@pytest.mark.parametrize("place", ["directory", "memory", "objects"], indirect=True)
async def test_a_damaged_delta_is_refused_by_the_name_of_its_tensor_and_costs_no_copy(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 2)
    mirror = Mirror(folder, place.open(writer=False))
    await mirror.ensure(made[1], deadline_s=DEADLINE_S)
    flip(place.path(made[2], "delta.safetensors"))
    with pytest.raises(ManifestError, match=r"delta of tensor model\.\S+ .*damaged"):
        await mirror.ensure(made[2], deadline_s=DEADLINE_S)
    holds(await mirror.ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    assert {path.name for path in folder.iterdir()} == {".lock", "v1-1"}


@pytest.mark.parametrize("place", ["directory", "memory", "objects"], indirect=True)
async def test_a_damaged_full_version_is_refused_by_the_name_of_its_tensor(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 0)[0]
    flip(place.path(made, made.tensors[0].file))
    with pytest.raises(ManifestError, match=r"tensor model\.\S+ has checksum"):
        await Mirror(folder, place.open(writer=False)).ensure(made, deadline_s=DEADLINE_S)
    assert not list(folder.glob("v*"))


BAD_DELTAS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "parent's digest": (lambda one: dataclasses.replace(one, parent="0" * 32), "another parent"),
    "parent": (lambda one: dataclasses.replace(one, parent_version=Version(1, 0)), "another parent"),
    "no parent": (lambda one: dataclasses.replace(one, parent_version=None), "a delta has one"),
    "itself": (lambda one: dataclasses.replace(one, parent_version=one.version), "is not older"),
    "checksum": (
        lambda one: dataclasses.replace(one, tensors=tuple(dataclasses.replace(entry, checksum="0" * 16) for entry in one.tensors)),
        r"tensor model\.",
    ),
    "shape": (
        lambda one: dataclasses.replace(one, tensors=(dataclasses.replace(one.tensors[0], shape=(50, 30)), *one.tensors[1:])),
        r"tensor model\.embed\.weight as BF16 \[50, 30\], expected BF16 \[100, 15\]",
    ),
    "type": (
        lambda one: dataclasses.replace(one, tensors=(dataclasses.replace(one.tensors[0], dtype="X8"), *one.tensors[1:])),
        r"tensor model\.embed\.weight has dtype 'X8'",
    ),
    "missing": (lambda one: dataclasses.replace(one, tensors=one.tensors[:-1]), r"has no tensor model\.steps"),
    "outside": (
        lambda one: dataclasses.replace(one, tensors=(dataclasses.replace(one.tensors[0], file="../x"), *one.tensors[1:])),
        r"tensor model\.embed\.weight is said to lie in '\.\./x'",
    ),
}


@pytest.mark.parametrize("which", BAD_DELTAS)
async def test_a_bad_delta_is_refused_and_what_was_here_stays(place: Place, versions: VersionStore, folder: Path, which: str):
    made = chain(versions, 2)
    change, words = BAD_DELTAS[which]
    mirror = Mirror(folder, place.open(writer=False))
    before = await mirror.ensure(made[1], deadline_s=DEADLINE_S)
    with pytest.raises(ManifestError, match=words):
        await mirror.ensure(change(made[2]), deadline_s=DEADLINE_S)
    holds(before, weights(1))
    assert not list(folder.glob(".tmp-*"))
    holds(await mirror.ensure(made[2], deadline_s=DEADLINE_S), weights(2))


async def test_one_process_works_and_the_others_wait_for_it_to_their_deadline(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 1)
    folder.mkdir()
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    mirror = Mirror(folder, place.open(writer=False))
    with pytest.raises(TimeoutError):
        await mirror.ensure(made[1], deadline_s=0.05)
    waiting = asyncio.create_task(mirror.ensure(made[1], deadline_s=DEADLINE_S))
    await asyncio.sleep(0)
    os.close(handle)
    holds(await waiting, weights(1))


async def test_a_holder_that_is_stopped_is_not_waited_for_for_ever(place: Place, versions: VersionStore, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weightsync.mirror.PATIENCE_S", 0.05)
    made = chain(versions, 1)
    folder.mkdir()
    (folder / ".tmp-of-the-holder").mkdir()
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    holds(await Mirror(folder, place.open(writer=False)).ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    assert (folder / ".tmp-of-the-holder").is_dir(), "it may go on"
    os.close(handle)


async def test_what_was_right_is_known_of_the_last_few_versions_only(place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weightsync.mirror._MOST_RIGHT", 2)
    store = place.open()
    made = [store.write(weights(n)) for n in range(4)]
    mirror = Mirror(folder, place.open(writer=False), keep=4)
    for manifest in (*made, *made):
        holds(await mirror.ensure(manifest, deadline_s=DEADLINE_S), weights(manifest.version.n))
        assert len(mirror._right) <= 2
    assert not mirror._right or max(mirror._right) == Version(1, 3)


async def test_many_at_once_make_it_once(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 3)
    mirrors = [Mirror(folder, place.open(writer=False)) for _ in range(6)]
    paths = await asyncio.gather(*(mirror.ensure(made[3], deadline_s=DEADLINE_S) for mirror in mirrors))
    assert set(paths) == {folder / "v1-3"}
    assert sum(mirror.totals.deltas for mirror in mirrors) == 1
    holds(paths[0], weights(3))


async def test_given_up_it_frees_the_lock_and_leaves_nothing(versions: VersionStore, place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch):
    made = chain(versions, 1)
    store = place.open(writer=False)
    loop, reached = asyncio.get_running_loop(), asyncio.Event()
    real = store.open

    def slow(manifest: Manifest) -> Any:
        if manifest.kind == "delta":
            loop.call_soon_threadsafe(reached.set)
        return real(manifest)

    monkeypatch.setattr(store, "open", slow)
    task = asyncio.create_task(Mirror(folder, store).ensure(made[1], deadline_s=DEADLINE_S))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    holds(await Mirror(folder, place.open(writer=False)).ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    assert not list(folder.glob(".tmp-*"))


# -- kills ---------------------------------------------------------------------------------------------------------------------------------------

_RELAY = """
import asyncio, os, sys
from pathlib import Path
from protocol.failpoints import arm
from protocol.versions import Version
from tests.weightsync.places import Place
from weightsync.mirror import Mirror
kind, where, model, folder, n = sys.argv[1:]
store = Place(kind, where, Path(model)).open(writer=False)
arm(os.environ)
print("making", flush=True)
asyncio.run(Mirror(folder, store).ensure(store.manifest(Version(1, int(n))), deadline_s=60))
"""


@pytest.mark.faults
@pytest.mark.parametrize("place", ["directory", "objects"], indirect=True)
@pytest.mark.parametrize("edge", [Failpoint.RELAY_READ, Failpoint.RELAY_WRITTEN, Failpoint.RELAY_RENAMED])
@pytest.mark.parametrize("n", [0, 2])
async def test_a_relay_killed_in_the_middle_leaves_its_work_to_the_next(
    place: Place, versions: VersionStore, model_path: Path, folder: Path, edge: Failpoint, n: int
):
    made = chain(versions, 2)
    environ = {**os.environ, VARIABLE: edge, "PYTHONPATH": "."}
    command = [sys.executable, "-c", _RELAY, place.kind, place.where, str(model_path), str(folder), str(n)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "making\n"), ended.stderr
    there = folder / f"v1-{n}"
    assert there.exists() == (edge is Failpoint.RELAY_RENAMED)
    mirror = Mirror(folder, place.open(writer=False))
    holds(await mirror.ensure(made[n], deadline_s=DEADLINE_S), weights(n))
    assert (mirror.totals.deltas + mirror.totals.fulls == 0) == (edge is Failpoint.RELAY_RENAMED)
    holds(await mirror.ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    assert not list(folder.glob(".tmp-*"))


# -- which copies stay ---------------------------------------------------------------------------------------------------------------------------


async def test_copies_that_engines_hold_stay_and_the_others_go(rig: Any, store: DirectoryStore, folder: Path):
    await rig.attach(1, 20)
    made = chain(store, 6)
    mirror = Mirror(folder, store, rig.channel, keep=1)
    for manifest in made[:3]:
        await rig.channel.publish(manifest, 1)
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await mirror.ensure(made[1], deadline_s=DEADLINE_S)
    await rig.registry.ack("e0", "b1", Version(1, 1))
    await mirror.ensure(made[2], deadline_s=DEADLINE_S)
    assert {path.name for path in folder.glob("v*")} == {"v1-1", "v1-2"}
    for n in (3, 4):
        await rig.channel.publish(made[n], 1)
        await mirror.ensure(made[n], deadline_s=DEADLINE_S)
    assert {path.name for path in folder.glob("v*")} == {"v1-1", "v1-4"}
    await rig.registry.leave("e0", "b1")
    await rig.channel.publish(made[5], 1)
    await mirror.ensure(made[5], deadline_s=DEADLINE_S)
    assert {path.name for path in folder.glob("v*")} == {"v1-5"}


async def test_newer_copies_of_a_run_before_this_one_do_not_push_out_what_is_needed(rig: Any, store: DirectoryStore, folder: Path):
    await rig.attach(1, 20)
    made = chain(store, 2)
    old = DirectoryStore(folder)
    for n in (8, 9):
        old.write(weights(n))
    mirror = Mirror(folder, store, rig.channel, keep=1)
    for n in range(3):
        await rig.channel.publish(made[n], 1)
        holds(await mirror.ensure(made[n], deadline_s=DEADLINE_S), weights(n))
    assert {path.name for path in folder.glob("v*")} == {"v1-2"}


class Overtaken:
    """A channel whose newest version is read before one more is published, which another process of the machine copies at once."""

    def __init__(self, newest: Version, then: Callable[[], Awaitable[object]]) -> None:
        self._newest, self._then = newest, then

    async def newest_version(self) -> Version:
        await self._then()
        return self._newest

    async def pinned(self) -> frozenset[Version]:
        return frozenset()


async def test_a_copy_of_a_version_published_meanwhile_is_not_taken_for_one_of_a_run_before(place: Place, versions: VersionStore, folder: Path):
    made = chain(versions, 2)
    other = Mirror(folder, place.open(writer=False))
    channel: Any = Overtaken(Version(1, 1), lambda: other.ensure(made[2], deadline_s=DEADLINE_S))
    await Mirror(folder, place.open(writer=False), channel).ensure(made[1], deadline_s=DEADLINE_S)
    holds(folder / "v1-2", weights(2))
    assert (await other.ensure(made[2], deadline_s=DEADLINE_S), other.totals.deltas) == (folder / "v1-2", 1)


async def test_a_copy_that_goes_while_it_is_looked_at_is_made_again(place: Place, versions: VersionStore, folder: Path, monkeypatch: pytest.MonkeyPatch):
    made = chain(versions, 1)
    await Mirror(folder, place.open(writer=False)).ensure(made[1], deadline_s=DEADLINE_S)
    goes = iter([True])
    check = weightsync.store.check_tensors

    def checked(manifest: Manifest, tensors: Any) -> None:
        check(manifest, tensors)
        if next(goes, False):
            DirectoryStore(folder).delete(manifest.version)

    monkeypatch.setattr(weightsync.store, "check_tensors", checked)
    mirror = Mirror(folder, place.open(writer=False))
    holds(await mirror.ensure(made[1], deadline_s=DEADLINE_S), weights(1))
    assert mirror.totals.deltas == 1


# -- the transport -------------------------------------------------------------------------------------------------------------------------------


async def test_an_engine_takes_the_copy(rig: Any, store: DirectoryStore, folder: Path):
    made = chain(store, 2)
    async with rig.server("b1") as server:
        transport = RelayTransport(Mirror(folder, store), EngineControl(rig.session, server.url))
        assert transport.name == "delta"
        with pytest.raises(VersionGone):
            await transport.apply(made[2], deadline_s=DEADLINE_S)
        await transport.prepare(made[2], deadline_s=DEADLINE_S)
        await transport.apply(made[2], deadline_s=DEADLINE_S)
        assert (server.version, server.digest) == ("1:2", made[2].digest)
        with pytest.raises(VersionGone):
            await transport.apply(made[1], deadline_s=DEADLINE_S)
        server.stage.append("refuse")
        with pytest.raises(ApplyFailed):
            await transport.apply(made[2], deadline_s=DEADLINE_S)
        await transport.aclose()


async def test_a_machine_without_room_is_a_broken_transport_and_a_bad_version_is_not(rig: Any, store: DirectoryStore, folder: Path):
    made = chain(store, 1)
    control = EngineControl(rig.session, "http://127.0.0.1:1")
    folder.parent.joinpath("file").write_text("")
    with pytest.raises(TransportFailed, match="cannot be copied"):
        await RelayTransport(Mirror(folder.parent / "file", store), control).prepare(made[1], deadline_s=DEADLINE_S)
    with pytest.raises(TransportFailed, match=r"not within 0\.0 s"):
        await RelayTransport(Mirror(folder, store), control).prepare(made[1], deadline_s=0.0)
    with pytest.raises(ManifestError, match="another parent"):
        await RelayTransport(Mirror(folder, store), control).prepare(dataclasses.replace(made[1], parent="0" * 32), deadline_s=DEADLINE_S)


@pytest.mark.parametrize("place", ["directory", "url"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "delta"])
async def test_where_there_is_no_room_nothing_is_left_and_the_transport_says_so(rig: Any, place: Place, versions: VersionStore, tiny_disk: Path, kind: str):
    def large(n: int) -> Snapshot:
        return Snapshot(version=Version(1, n), tensors={"w": TensorBytes(dtype="U8", shape=(400_000,), data=bytes([n]) + bytes(399_999))})

    manifest = versions.write(large(0))
    if kind == "delta":
        manifest = versions.write_delta(large(1), manifest, large(0).tensors)
    assert manifest.kind == kind
    transport = RelayTransport(Mirror(tiny_disk / "relay", place.open(writer=False)), EngineControl(rig.session, "http://127.0.0.1:1"))
    if kind == "full" and isinstance(versions, DirectoryStore):  # an engine can load it from where it is
        await transport.prepare(manifest, deadline_s=DEADLINE_S)
    else:
        with pytest.raises(TransportFailed, match="No space left"):
            await transport.prepare(manifest, deadline_s=DEADLINE_S)
    assert {path.name for path in (tiny_disk / "relay").iterdir()} == {".lock"}


def big(n: int) -> Snapshot:
    """400 kB, of which a step changes one byte in a thousand."""
    content = bytearray(400_000)
    content[: 400 * n] = b"\1" * 400 * n
    return Snapshot(version=Version(1, n), tensors={"w": TensorBytes(dtype="U8", shape=(400_000,), data=bytes(content))})


def unwritable(tmp_path: Path, tiny_disk: Path, which: str) -> Path:
    """A folder that root cannot write copies to either."""
    if which == "full":
        return tiny_disk / "relay"
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "relay"


@pytest.mark.parametrize("which", ["full", "under a file"])
async def test_an_engine_whose_machine_cannot_hold_copies_takes_them_from_beside_the_store_and_comes_back_when_it_can(
    rig: Any, tmp_path: Path, store: DirectoryStore, tiny_disk: Path, which: str, caplog: pytest.LogCaptureFixture
):
    made = [store.write(big(0))]
    made += [store.write_delta(big(n), made[-1], big(n - 1).tensors) for n in (1,)]
    folder, beside = unwritable(tmp_path, tiny_disk, which), store.folder / "copies-here"
    async with rig.server("b1") as server:
        control = EngineControl(rig.session, server.url)
        transport = RelayTransport(Mirror(folder, store), control, spare=Mirror(beside, store))
        for manifest, place in ((made[1], beside / "v1-1"), (made[0], store.folder / "v1-0"), (made[1], beside / "v1-1")):
            with caplog.at_level("WARNING"):
                await transport.prepare(manifest, deadline_s=DEADLINE_S)
            await transport.apply(manifest, deadline_s=DEADLINE_S)
            assert (server.bodies[-1]["model_path"], server.version, server.digest) == (str(place), str(manifest.version), manifest.digest)
            assert transport.name == "store"
        assert len([line for line in caplog.messages if "cannot be copied" in line]) == 1, "a log is told once, not at every version"
        if which == "under a file":
            folder.parent.unlink()
            await transport.prepare(made[1], deadline_s=DEADLINE_S)
            await transport.apply(made[1], deadline_s=DEADLINE_S)
            assert (server.bodies[-1]["model_path"], transport.name) == (str(folder / "v1-1"), "delta")
    assert {path.name for path in store.folder.glob("v*")} == {"v1-0", "v1-1"}, "the store itself is as it was"
    assert store.sweep(2, [one.version for one in made]) == ()


async def test_with_no_room_anywhere_it_says_both_places(rig: Any, tmp_path: Path, store: DirectoryStore, tiny_disk: Path):
    whole = store.write(big(0))
    changed = store.write_delta(big(1), whole, big(0).tensors)
    (tmp_path / "file").write_text("")
    control = EngineControl(rig.session, "http://127.0.0.1:1")
    transport = RelayTransport(Mirror(tiny_disk / "a", store), control, spare=Mirror(tmp_path / "file" / "b", store))
    with pytest.raises(TransportFailed, match=r"cannot be copied to .*/a: .*No space left.*; nor to .*/b: "):
        await transport.prepare(changed, deadline_s=DEADLINE_S)


async def test_an_update_past_a_full_folder_is_recorded_as_the_store_s_and_the_engine_has_no_trouble(rig: Any, store: DirectoryStore, tiny_disk: Path):
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        spare = Mirror(store.folder / "copies-here", store, rig.channel)
        reconciler._transports = Transports(
            None, RelayTransport(Mirror(tiny_disk / "relay", store, rig.channel), EngineControl(rig.session, server.url), spare=spare)
        )
        async with rig.running(reconciler):
            parent = None
            for n in range(3):
                await rig.attach(1, n)
                parent = store.write(big(0)) if parent is None else store.write_delta(big(n), parent, big(n - 1).tensors)
                await rig.channel.publish(parent, 1)
                await rig.serves("e0", f"1:{n}")
                assert server.digest == parent.digest
            assert reconciler.totals.trouble == ""
    assert [one["transport"] for one in await rig.events("applied")] == ["store"] * 3


async def test_an_engine_that_cannot_be_brought_to_a_version_by_any_way_says_why_and_goes_on_with_what_it_has(rig: Any, store: DirectoryStore, tiny_disk: Path):
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        reconciler._transports = Transports(None, RelayTransport(Mirror(tiny_disk / "relay", store, rig.channel), EngineControl(rig.session, server.url)))
        async with rig.running(reconciler):
            await rig.attach(1, 0)
            whole = store.write(big(0))
            await rig.channel.publish(whole, 1)
            await rig.serves("e0", "1:0")
            await rig.attach(1, 1)
            await rig.channel.publish(store.write_delta(big(1), whole, big(0).tensors), 1)
            async with asyncio.timeout(100):
                while not reconciler.totals.trouble:
                    await asyncio.sleep(0.01)
            assert "No space left" in reconciler.totals.trouble
            assert "prepare 1:1" in reconciler.totals.trouble
            await rig.serves("e0", "1:0")
            await rig.attach(1, 2)
            await rig.channel.publish(store.write(big(2)), 1)  # the next whole version lies in the store, and needs no copy
            await rig.serves("e0", "1:2")
            assert reconciler.totals.trouble == ""


async def test_a_full_disk_gives_up_copies_that_are_only_kept(rig: Any, store: DirectoryStore, tiny_disk: Path):
    """Room for two: the one that an engine has, and the next."""

    def small(n: int) -> Snapshot:
        content = bytearray(60_000)
        content[:n] = b"\1" * n
        return Snapshot(version=Version(1, n), tensors={"w": TensorBytes(dtype="U8", shape=(60_000,), data=bytes(content))})

    mirror = Mirror(tiny_disk / "relay", store, rig.channel, keep=8)
    parent = None
    for n in range(5):
        parent = store.write(small(0)) if parent is None else store.write_delta(small(n), parent, small(n - 1).tensors)
        await rig.attach(1, n)
        await rig.channel.publish(parent, 1)
        if n:
            holds_small = await mirror.ensure(parent, deadline_s=DEADLINE_S)
            with open_model(holds_small) as tensors:
                assert bytes(tensors["w"].data) == bytes(small(n).tensors["w"].data)
    assert mirror.totals.deltas == 4
    assert len(list((tiny_disk / "relay").glob("v*"))) < 4
