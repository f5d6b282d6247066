"""What watching a large map costs the directory and its watchers."""

from __future__ import annotations

from kintsugi.rpc.v1 import directory_pb2 as pb
from kintsugi.serving.directory import WATCH_BYTES_PER_S, WATCH_POLL_S, DirectoryService, pause_after
from kintsugi.store.client.directory import ShardAddress, ShardDirectory, ShardMap, map_from_wire


class Counted(ShardDirectory):
    """A directory that counts how often it is read."""

    def __init__(self) -> None:
        self.map = ShardMap(1, (ShardAddress("a", "h:1"),))
        self.reads = 0

    def current(self) -> ShardMap:
        self.reads += 1
        return self.map

    def close(self) -> None:
        return None


def test_all_watchers_share_one_message_until_the_map_changes() -> None:
    now_s, directory = [0.0], Counted()
    service = DirectoryService(directory, lambda: now_s[0])
    first = service.read_message()
    assert all(service.read_message() is first for _ in range(1000))
    assert directory.reads == 1
    now_s[0] += WATCH_POLL_S
    assert service.read_message() is first
    assert directory.reads == 2
    directory.map = ShardMap(2, ())
    now_s[0] += WATCH_POLL_S
    assert map_from_wire(pb.ShardMap.FromString(service.read_message())) == directory.map


def test_a_large_map_is_sent_less_often() -> None:
    assert pause_after(b"x" * 100) < 0.01
    assert pause_after(bytes(WATCH_BYTES_PER_S)) == 1.0
