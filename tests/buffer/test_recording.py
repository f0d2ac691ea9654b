from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.recording import Recording, RecordingAbout
from protocol.codec import decode, digest
from protocol.errors import DecodeError, ReplayGap, SchemaTooNew
from protocol.frames import write_frame
from protocol.messages import GroupHeader
from protocol.objects import FolderStore, ObjectStore, object_store

from .conftest import IDENTITY, settings
from .recorded import a_group, a_step, same_step


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return object_store(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}", key="buffer.spill")


def test_a_step_reads_back_as_it_was_written(store: ObjectStore) -> None:
    written = a_step(3)
    Recording(store).write_step(written)
    assert same_step(Recording(store).read_step(3), written)


def test_the_newest_incarnation_s_step_is_the_one_that_is_read(store: ObjectStore) -> None:
    recording = Recording(store)
    for incarnation in (2, 10, 9):
        recording.write_step(a_step(3, incarnation))
    recording.write_step(a_step(1))
    assert recording.steps() == [1, 3]
    assert recording.read_step(3).incarnation == 10


def test_steps_are_found_over_a_million(store: ObjectStore) -> None:
    recording = Recording(store)
    steps = [999, 1000, 999_999_999, 1_000_000_000, 12_345_678_901]
    for step in steps:
        recording.write_step(a_step(step))
    assert recording.steps() == steps
    assert [recording.read_step(step).step for step in steps] == steps


def test_a_step_that_is_not_there_is_a_gap_that_says_what_is(store: ObjectStore) -> None:
    recording = Recording(store)
    with pytest.raises(ReplayGap, match=r"step 4 is not recorded in .*; recorded are none"):
        recording.read_step(4)
    for step in (1, 2, 3, 7):
        recording.write_step(a_step(step))
    with pytest.raises(ReplayGap, match="recorded are 1 to 3, 7"):
        recording.read_step(4)


def test_payloads_of_a_step_are_found_without_reading_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(FolderStore):
        read_bytes = 0

        def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            found = super().read(name, start, stop)
            self.read_bytes += len(found)
            return found

    monkeypatch.setattr("buffer.record_file._HEAD_BYTES", 64)
    store = Counting(tmp_path)
    recording, step = Recording(store), a_step(3, seqs=((0, 1), tuple(range(2, 40))))
    recording.write_step(step)
    whole = (tmp_path / "steps/000000/000000003-000001").stat().st_size
    header = step.chunks[1].headers[5]
    assert recording.find(3, [header]) == {(header.seq, header.token): step.payloads[1][5]}
    assert store.read_bytes == whole - sum(h.payload_bytes + 5 for chunk in step.chunks for h in chunk.headers) + header.payload_bytes + 5
    assert recording.find(3, [a_group(77)[1].header]) == {}
    assert recording.find(4, [header]) == {}


def test_a_payload_that_the_newest_incarnation_lost_is_found_in_an_older_one(store: ObjectStore) -> None:
    recording, old, new = Recording(store), a_step(3, 1), a_step(3, 2)
    recording.write_step(old)
    recording.write_step(dataclasses.replace(new, payloads=((b"", new.payloads[0][1]), new.payloads[1])))
    headers = new.chunks[0].headers
    assert list(recording.find(3, headers).values()) == [new.payloads[0][1], old.payloads[0][0]]
    assert recording.read_step(3).payloads[0][0] == b"", "what was lost before it was recorded is told as such"


def test_groups_come_back_once_each_in_the_order_they_were_written(store: ObjectStore) -> None:
    groups = [a_group(seq)[1] for seq in (5, 3, 9, 4)]
    Recording(store).write_groups(groups[:2])
    later = Recording(store)
    later.write_groups(groups[1:3])
    later.write_groups([])
    later.write_groups(groups[3:])
    again = a_group(5, token="other")[1]
    later.write_groups([again])
    found = list(Recording(store).groups())
    assert [(group.header, group.payload) for group in found] == [(group.header, group.payload) for group in [*groups, again]]


def test_what_a_recording_is_from_is_told(store: ObjectStore) -> None:
    recording = Recording(store)
    with pytest.raises(ReplayGap, match=r"is no recording: it has no about.json"):
        recording.about()
    about = RecordingAbout(run="demo", identity=IDENTITY, settings=settings(retention=3))
    recording.describe(about)
    assert recording.about() == about


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"run": 1}', b'{"run": "r", "identity": 3, "settings": {}}', b'{"run":"r","identity":{},"settings":{"spill":1}}']
)
def test_an_account_that_is_none_is_a_decode_error(store: ObjectStore, text: bytes) -> None:
    store.write("about.json", [text])
    with pytest.raises(DecodeError):
        Recording(store).about()


def test_payloads_that_are_not_those_of_the_headers_are_not_recorded(store: ObjectStore) -> None:
    step, group = a_step(3), a_group(1)[1]
    for payloads in (((b"x", b"y"), step.payloads[1]), (step.payloads[0],), ((step.payloads[0][0],), step.payloads[1])):
        with pytest.raises(ValueError, match="step 3: the payloads are not those"):
            Recording(store).write_step(dataclasses.replace(step, payloads=payloads))
    with pytest.raises(ValueError, match="not the one of its header"):
        Recording(store).write_groups([dataclasses.replace(group, payload=b"x")])
    assert store.names() == []


def test_a_recorded_object_is_plain_messagepack_and_payloads_lie_in_it_as_they_are(tmp_path: Path) -> None:
    step = a_step(3)
    Recording(FolderStore(tmp_path)).write_step(step)
    data = (tmp_path / "steps/000000/000000003-000001").read_bytes()
    index, check, *payloads = _values(data)
    assert check == digest(index).encode()
    assert tuple(payloads) == (*step.payloads[0], *step.payloads[1])
    body = msgpack.unpackb(index)
    assert (body["message"], body["step"], body["sizes"]) == ("recorded_step", 3, [len(payload) for payload in payloads])
    assert decode(GroupHeader, msgpack.unpackb(body["chunks"][0])["headers"][1]) == step.chunks[0].headers[1]


def test_payloads_are_handed_to_the_store_uncopied(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(type(store), "write", lambda _self, _name, parts: handed.extend(parts))
    step = a_step(3)
    Recording(store).write_step(step)
    assert all(any(part is payload for part in handed) for chunk in step.payloads for payload in chunk)


# -- damage ------------------------------------------------------------------------------------------------------------------------------------


def _values(data: bytes) -> list[bytes]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return list(unpacker)


NAME = "steps/000000/000000003-000001"


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_found_and_its_place_is_named(tmp_path: Path, at: int, flip: int) -> None:
    store, step = FolderStore(tmp_path), a_step(3)
    Recording(store).write_step(step)
    data = bytearray(store.read(NAME))
    data[at % len(data)] ^= flip
    store.write(NAME, [bytes(data)])
    with pytest.raises(DecodeError, match=NAME):
        Recording(store).read_step(3)
    headers = [header for chunk in step.chunks for header in chunk.headers]
    payloads = [payload for chunk in step.payloads for payload in chunk]
    found = Recording(store).find(3, headers)
    assert all(found[header.seq, header.token] == payload for header, payload in zip(headers, payloads, strict=True) if (header.seq, header.token) in found)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_an_object_that_was_cut_short_is_found(store: ObjectStore, share: float) -> None:
    Recording(store).write_step(a_step(3))
    data = store.read(NAME)
    store.write(NAME, [data[: int(len(data) * share)]])
    with pytest.raises(DecodeError, match=NAME):
        Recording(store).read_step(3)
    assert len(Recording(store).find(3, a_step(3).chunks[0].headers)) in (0, 1, 2)


def test_groups_that_were_damaged_name_the_object_and_the_group(store: ObjectStore) -> None:
    recording = Recording(store)
    recording.write_groups([a_group(4)[1], a_group(6)[1]])
    (name,) = store.names()
    data = bytearray(store.read(name))
    data[-1] ^= 1
    store.write(name, [bytes(data)])
    reading = recording.groups()
    assert next(reading).header.seq == 4
    with pytest.raises(DecodeError, match=f"{name}: payload of group 6: .* do not match digest"):
        next(reading)


def _forged(kind: str, body: dict[str, object]) -> bytes:
    frame = write_frame(kind, body)
    return b"\xc6" + len(frame).to_bytes(4, "big") + frame + b"\xc6\x00\x00\x00\x20" + digest(frame).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\xc6\xff\xff\xff\xff",
        b"\x93\x01\x02\x03",
        _forged("recorded_step", {}),
        _forged("recorded_step", {"sizes": "x"}),
        _forged("recorded_step", {"sizes": [-1]}),
        _forged("recorded_step", {"sizes": []}),
        _forged("recorded_step", {"sizes": [5], "step": 3, "incarnation": 1, "digest": "", "at": 0, "chunks": []}),
        _forged("recorded_step", {"sizes": [], "step": float("inf"), "incarnation": 1, "digest": "", "at": 0, "chunks": []}),
        _forged("recorded_step", {"sizes": [], "step": 3, "incarnation": 1, "digest": "", "at": 0, "chunks": [b"x"]}),
        _forged("recorded_step", {"sizes": [], "step": 3, "incarnation": 1, "digest": "", "at": 0, "chunks": [3]}),
        _forged("recorded_groups", {"sizes": [], "headers": []}),
    ],
)
def test_hostile_objects_are_decode_errors_that_name_them(store: ObjectStore, data: bytes) -> None:
    store.write(NAME, [data])
    with pytest.raises(DecodeError, match=NAME):
        Recording(store).read_step(3)
    assert Recording(store).find(3, a_step(3).chunks[0].headers) == {}


@pytest.mark.parametrize("body", [{"headers": []}, {"headers": [b"x"], "sizes": [1]}, {"headers": [1], "sizes": [1]}, {"headers": 3, "sizes": [1]}])
def test_hostile_groups_are_decode_errors_that_name_them(store: ObjectStore, body: dict[str, object]) -> None:
    name = "groups/000000/000000001-aa"
    store.write(name, [_forged("recorded_groups", body)])
    with pytest.raises(DecodeError, match=name):
        list(Recording(store).groups())


def test_a_newer_major_says_to_upgrade(store: ObjectStore) -> None:
    frame = msgpack.packb({"schema": [2, 0], "message": "recorded_step", "sizes": []})
    store.write(NAME, [b"\xc6" + len(frame).to_bytes(4, "big") + frame + b"\xc6\x00\x00\x00\x20" + digest(frame).encode()])
    with pytest.raises(SchemaTooNew, match="upgrade"):
        Recording(store).read_step(3)


def test_what_else_lies_in_the_folder_is_left_alone(store: ObjectStore) -> None:
    recording = Recording(store)
    recording.write_step(a_step(3))
    for name in ("steps/notes.txt", "steps/000000/readme", "groups/x", "other/000000/000000004-000001"):
        store.write(name, [b"mine"])
    assert recording.steps() == [3]
    assert list(recording.groups()) == []
