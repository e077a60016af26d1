"""What somebody does who reaches the store and the guards' ports of a World that has met: test_attacks.py."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
from typing import Any

import torch.distributed as dist

from eprt.conformance.faults.job import CheckedLayer
from eprt.errors import RankLost
from eprt.world import World
from eprt.world.process import job_name
from support.builders import die

HELLO = struct.Struct(">16sI")
LIMIT_S = 4.0


def late_client() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def prefixes(store: dist.TCPStore) -> set[str]:
    """All places where a World may look for a key."""
    parts = [key.split("/") for key in store.list_keys()]
    return {"/".join(words[:depth]) for words in parts for depth in range(1, len(words))}


def keys_in(store: dist.TCPStore) -> set[bytes]:
    """Every key that a World could have made of what is readable: of one number, or of all in the order of ranks."""
    found: set[str] = set()
    offers: list[tuple[str, str]] = []
    for key in store.list_keys():
        text = store.get(key).decode(errors="replace") if store.check([key]) else ""
        numbers = re.findall(r"[0-9a-f]{16,}", f"{key} {text}")
        found.update(numbers)
        if "/offer/" in key:
            offers += [(key, number) for number in numbers]
    of_all = "\0".join([job_name(), *(number for _, number in sorted(offers))])
    return {hashlib.sha256(text.encode()).digest() for text in [of_all, *(f"{job_name()}\0{n}" for n in found)]}


def enters(address: tuple[str, int], key: bytes, rank: int, its_rank: int) -> bool:
    """Whether a guard goes on talking with who says to be `rank` and knows `key`."""
    with socket.create_connection(address, 5.0) as caller:
        caller.settimeout(1.5)
        try:
            theirs, said = HELLO.unpack(caller.recv(HELLO.size, socket.MSG_WAITALL))
            assert said == its_rank
            mine = secrets.token_bytes(16)
            proof = hmac.new(key, b"caller" + HELLO.pack(mine, rank) + HELLO.pack(theirs, said), hashlib.sha256)
            caller.sendall(HELLO.pack(mine, rank) + proof.digest())
            caller.recv(32, socket.MSG_WAITALL)
            return caller.recv(1) != b""
        except (TimeoutError, ConnectionError):
            return False


def stuff(store: dist.TCPStore, said: list[str]) -> None:
    """Writes what would put ranks 1 and 3 out, wherever a World may look, and over all that is there."""
    ballot, over = json.dumps({"lost": [1, 3]}), json.dumps({"why": "exited", "ranks": [1, 3], "message": "gone"})
    places, keys = prefixes(store), store.list_keys()
    for place in places:
        for number in range(1, 5):
            store.set(f"{place}/lost/{number}", ballot)
        for name in ("over", "verdict", "without 1/over", "without/1/eprt/over"):
            store.set(f"{place}/{name}", over)
    for key in keys:
        if "eprt" in key and "init" not in key:
            store.set(key, ballot) if hash(key) % 2 else store.delete_key(key)
    said.append(f"{len(places)} places")


def attacked(context: Any) -> dict[str, Any]:
    """Rank 0 is also the attacker: a client of the store that came when the World had met. Rank 2 really dies."""
    world: World = context.world(timeout_s=LIMIT_S)
    job = CheckedLayer(world, "torch", "continue")
    for step in range(3):
        job.step(step)
    found: dict[str, Any] = {}
    guard = world._guard
    assert guard is not None
    addresses = guard.met.addresses
    if context.rank == 0:
        store, said = late_client(), []
        tried = keys_in(store)
        claims = [(rank, peer) for rank in (7, 3) for peer in (0, 2)]
        found["entered"] = [claim for key in tried for claim in claims if enters(addresses[claim[1]], key, *claim)]
        found["outside"] = enters(addresses[2], guard._links.key, 7, 2)  # even with the key
        found["tried"] = len(tried)
        stuff(store, said)
    world.barrier()
    if context.rank == 2:
        die()
    step = 3
    while step < 12:
        try:
            job.step(step)
            step += 1
        except RankLost as lost:
            found["lost"] = lost.ranks
            survivors = world.shrink()
            found["survivors"], step = survivors.lost, survivors.next_step
    found["alive"] = world.alive
    return found
