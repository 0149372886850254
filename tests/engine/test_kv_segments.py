"""KV blocks on disk: what is written is found again, and what is damaged, cut or foreign is skipped and counted."""

from __future__ import annotations

import os
import stat
import time
from array import array
from pathlib import Path

import pytest

from penstock.core import hashing
from penstock.engine.kv_disk.segment import HEADER, BlockLayout
from penstock.engine.kv_disk.store import RETRY, TOUCH, SegmentStore, StoredBlock

LAYOUT = BlockLayout(b"f" * 16, block_size=4, groups=1, block_bytes=64)
OTHER = LAYOUT._replace(fingerprint=b"g" * 16)
PLENTY = 1 << 40
ROOT = hashing.root("")


class Clock:
    def __init__(self) -> None:
        self.time = 1e9

    def __call__(self) -> float:
        return self.time


def chain(seed: int, blocks: int = 3) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """Returns the hash, the parent, the tokens and the contents of the blocks of one prompt."""
    tokens = [seed * 1000 + i for i in range(blocks * LAYOUT.block_size)]
    hashes = hashing.chain("", tokens, LAYOUT.block_size)
    parents = [ROOT, *hashes]
    packed = [array("i", tokens[at : at + LAYOUT.block_size]).tobytes() for at in range(0, len(tokens), 4)]
    contents = [bytes((seed + index + byte) % 256 for byte in range(LAYOUT.block_bytes)) for index in range(blocks)]
    return list(zip(hashes, parents, packed, contents, strict=False))


def opened(
    folder: Path, layout: BlockLayout = LAYOUT, limit: int = 1 << 20, clock: Clock | None = None
) -> SegmentStore:
    store = SegmentStore(folder, layout, limit, now=clock or Clock(), free=lambda _: PLENTY)
    store.open()
    return store


def write(store: SegmentStore, seed: int, blocks: int = 3) -> None:
    for hash, parent, tokens, contents in chain(seed, blocks):
        assert store.append(hash, parent, tokens, [contents])


def found(store: SegmentStore, seed: int, blocks: int = 3) -> list[StoredBlock]:
    hashes, _, tokens, _ = zip(*chain(seed, blocks), strict=True)
    return store.find(ROOT, hashes, tokens)


def contents_of(store: SegmentStore, block: StoredBlock) -> bytes | None:
    target = bytearray(LAYOUT.block_bytes)
    return bytes(target) if store.read(block, [memoryview(target)]) else None


def restored(store: SegmentStore, seed: int, blocks: int = 3) -> int:
    """Returns how many blocks of a prompt could be read, each with its own contents and no other."""
    chained, count = chain(seed, blocks), 0
    for block, (*_, contents) in zip(found(store, seed, blocks), chained, strict=False):
        read = contents_of(store, block)
        if read is None:
            break
        assert read == contents
        count += 1
    return count


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_blocks_are_found_by_the_next_server(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    write(store, 2)
    assert restored(store, 1) == restored(store, 2) == 3
    store.close()
    again = opened(tmp_path)
    assert (len(again), again.skipped.total()) == (6, 0)
    assert restored(again, 1) == restored(again, 2) == 3
    assert restored(again, 3) == 0
    write(again, 3)
    assert len(segments(tmp_path)) == 1  # what was begun is filled


def test_files_are_private(tmp_path: Path) -> None:
    write(opened(tmp_path / "kv"), 1)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_tokens_count_and_not_the_hash_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    hashes, parents, tokens, _ = zip(*chain(1), strict=True)
    other = (tokens[0], tokens[2], tokens[1])
    assert len(store.find(ROOT, hashes, other)) == 1
    assert store.find(hashing.root("salt"), hashes, tokens) == []
    assert store.find(parents[1], hashes[1:], tokens[1:]) != []
    assert store.find(parents[2], hashes[1:], tokens[1:]) == []


@pytest.mark.parametrize("group", [0, 1])
def test_a_windowed_block_may_be_missing(tmp_path: Path, group: int) -> None:
    layout = LAYOUT._replace(groups=2)
    hash, parent, tokens, contents = chain(1)[0]
    store = opened(tmp_path, layout)
    assert store.append(hash, parent, tokens, [contents if each == group else None for each in range(2)])
    store.close()
    again = opened(tmp_path, layout)
    [block] = again.find(ROOT, [hash], [tokens])
    assert [block.record.has(each) for each in range(2)] == [each == group for each in range(2)]
    target = bytearray(layout.block_bytes)
    assert again.read(block, [memoryview(target) if each == group else None for each in range(2)])
    assert bytes(target) == contents
    assert not again.read(block, [memoryview(target) if each != group else None for each in range(2)])


def test_a_state_is_kept_with_the_block_at_whose_end_it_was_saved(tmp_path: Path) -> None:
    layout, state = LAYOUT._replace(state_bytes=1000), bytes(range(250)) * 4
    store = opened(tmp_path, layout, limit=8 * 4000)
    blocks = chain(1, 5)
    for index, (hash, parent, tokens, contents) in enumerate(blocks):
        assert store.append(hash, parent, tokens, [contents, state if index in (1, 4) else None])
    hash, parent, tokens, contents = blocks[2]
    assert store.append(hash, parent, tokens, [contents, None])  # as it is known
    assert store.written == 5
    assert store.append(hash, parent, tokens, [contents, state[::-1]])  # its state was saved later
    store.close()
    assert len(segments(tmp_path)) > 1
    again = opened(tmp_path, layout)
    stored = found(again, 1, 5)
    assert [block.record.has(1) for block in stored] == [False, True, True, False, True]
    assert again.stored_bytes == 5 * 64 + 3 * 1000
    for block, expected in ((stored[1], state), (stored[2], state[::-1]), (stored[4], state)):
        target, own = bytearray(1000), bytearray(64)
        assert again.read(block, [memoryview(own), memoryview(target)])
        assert bytes(target) == expected
        assert bytes(own) == blocks[stored.index(block)][3]
    assert opened(tmp_path).skipped["foreign"] == len(segments(tmp_path))


def test_a_damaged_state_is_not_served(tmp_path: Path) -> None:
    layout = LAYOUT._replace(state_bytes=100)
    store = opened(tmp_path, layout)
    hash, parent, tokens, contents = chain(1)[0]
    assert store.append(hash, parent, tokens, [contents, bytes(100)])
    store.close()
    [path] = segments(tmp_path)
    whole = bytearray(path.read_bytes())
    for at in range(len(whole) - 100, len(whole)):
        path.write_bytes(whole[:at] + bytes([1]) + whole[at + 1 :])
        again = opened(tmp_path, layout)
        [block] = found(again, 1, 1)
        assert not again.read(block, [None, memoryview(bytearray(100))])
        assert again.skipped["damaged"] == 1
        again.close()


def test_a_segment_cut_at_any_byte_loses_only_what_was_cut(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=8 * 3 * 200)
    write(store, 1)
    store.close()
    [path] = segments(tmp_path)
    whole = path.read_bytes()
    counts = set()
    for end in [*range(0, 600, 7), *range(4090, len(whole))]:
        path.write_bytes(whole[:end])
        cut = opened(tmp_path)
        count = restored(cut, 1)
        assert count == max(end - 4096, 0) // LAYOUT.block_bytes
        assert cut.skipped.total() == cut.skipped["cut"]
        assert cut.skipped["cut"] or not end or end in (len(whole),) or count == 3 or end == HEADER.size
        cut.close()
        counts.add(count)
    assert counts == {0, 1, 2}


def test_a_flipped_bit_is_found_and_the_rest_is_served(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=8 * 3 * 200)
    write(store, 1)
    store.close()
    [path] = segments(tmp_path)
    whole = path.read_bytes()
    used = [*range(HEADER.size + 3 * LAYOUT.slot.size), *range(4096, len(whole))]
    for at in used:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        flipped = opened(tmp_path)
        count = restored(flipped, 1)
        assert count < 3
        assert flipped.skipped["damaged"] + flipped.skipped["foreign"] == 1
        flipped.close()
        if at >= 4096:
            assert count == (at - 4096) // LAYOUT.block_bytes
            again = opened(tmp_path)
            assert again.skipped.total() == 0  # it was erased
            again.close()


def test_foreign_files_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(opened(tmp_path, OTHER), 1)
    [path] = segments(tmp_path)
    mine = tmp_path / LAYOUT.fingerprint.hex()
    mine.mkdir()
    path.rename(mine / path.name)
    (mine / "notes.kv").write_text("this is no segment, and it is long enough to have a header")
    (mine / "folder.kv").mkdir()
    store = opened(tmp_path)
    assert store.skipped == {"foreign": 2, "unreadable": 1}
    assert restored(store, 1) == 0
    assert [record.message.count("foreign") for record in caplog.records].count(1) == 1


def test_bytes_are_bounded_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    clock, limit = Clock(), 100_000
    store = opened(tmp_path, limit=limit, clock=clock)
    for seed in range(1, 400):
        clock.time += 100
        write(store, seed)
        assert restored(store, 1) == 3  # is in use, so it stays
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    assert restored(store, 399) == 3
    assert restored(store, 100) == 0
    assert store.dropped > 100
    assert len(store) + store.dropped == store.written


def test_segments_of_other_models_make_room(tmp_path: Path) -> None:
    limit = 60_000
    old = opened(tmp_path, OTHER, limit)
    for seed in range(100):
        write(old, seed)
    clock = Clock()
    clock.time = time.time() + 1
    store = opened(tmp_path, limit=limit, clock=clock)
    for seed in range(300):
        write(store, seed)
    assert len(list((tmp_path / OTHER.fingerprint.hex()).glob("*.kv"))) > 0  # is locked
    old.close()
    for seed in range(300, 600):
        write(store, seed)
    assert not list((tmp_path / OTHER.fingerprint.hex()).glob("*.kv"))
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    clock = Clock()
    first = opened(tmp_path)
    write(first, 1)
    second = opened(tmp_path, clock=clock)
    assert restored(second, 1) == 3
    hash, parent, tokens, contents = chain(2)[0]
    assert not second.append(hash, parent, tokens, [contents])
    assert second.skipped["locked"] == 2
    write(first, 3)
    first.close()
    assert not second.append(hash, parent, tokens, [contents])  # is not tried each time
    clock.time += RETRY
    assert second.append(hash, parent, tokens, [contents])
    assert restored(second, 3) == 3


def test_a_full_disk_stops_writing_for_a_while(tmp_path: Path) -> None:
    clock, left = Clock(), [0]
    store = SegmentStore(tmp_path, LAYOUT, 1 << 20, now=clock, free=lambda _: left[0])
    store.open()
    hash, parent, tokens, contents = chain(1)[0]
    assert not store.append(hash, parent, tokens, [contents])
    assert store.skipped == {"full": 1}
    left[0] = PLENTY
    clock.time += RETRY
    write(store, 1)
    assert restored(store, 1) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_fills_up_while_it_is_written_to(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    segment = store._segments[0]
    file = os.open("/dev/full", os.O_RDWR)
    kept = os.dup(segment._fd)
    os.dup2(file, segment._fd)
    hash, parent, tokens, contents = chain(2)[0]
    assert not store.append(hash, parent, tokens, [contents])
    assert store.skipped == {"full": 1}
    os.dup2(kept, segment._fd)
    os.close(kept)
    os.close(file)
    assert restored(store, 1) == 3
    assert restored(store, 2) == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    store = opened(tmp_path / "kv")
    hash, parent, tokens, contents = chain(1)[0]
    assert not store.append(hash, parent, tokens, [contents])
    assert store.skipped["unwritable"]
    assert restored(store, 1) == 0
    store.clear()


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path)
    write(first, 1)
    first.close()

    def refuse(*_: object) -> int:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr("penstock.engine.kv_disk.store._lock", refuse)
    store = opened(tmp_path)
    assert restored(store, 1) == 3
    hash, parent, tokens, contents = chain(2)[0]
    assert not store.append(hash, parent, tokens, [contents])
    assert store.skipped == {"unwritable": 2}


def test_what_is_forgotten_stays_forgotten(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    write(store, 2)
    store.forget([chain(1)[1][0]])
    assert (restored(store, 1), restored(store, 2)) == (1, 3)
    store.close()
    again = opened(tmp_path)
    assert (restored(again, 1), restored(again, 2)) == (1, 3)
    write(again, 1)
    assert restored(again, 1) == 3
    again.clear()
    assert not segments(tmp_path)
    assert len(again) == again.stored_bytes == 0


def test_reading_goes_on_while_a_segment_is_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    [first, *_] = found(store, 1)
    store.clear()
    assert contents_of(store, first) == chain(1)[0][3]


def test_use_is_noted_on_disk(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, clock=clock)
    write(store, 1)
    clock.time += TOUCH + 1
    assert restored(store, 1) == 3
    assert segments(tmp_path)[0].stat().st_mtime == clock.time
