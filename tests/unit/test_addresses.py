"""Where a rank listens, what a host's own idea of its address costs the others, and where rank 0 can't serve the
store. test_hosts.sh has real networks."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from support.ports import free_port

from eprt.errors import ConfigError, RankLost
from eprt.world import World, addresses, groups
from eprt.world.rendezvous import meet
from eprt.world.verdicts import cut_off


def resolves(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    """Only these names have an address."""

    def look(host: str, *_: Any, **__: Any) -> list[Any]:
        found = names.get(host, host if host[0].isdigit() else "")
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"node": "127.0.1.1"}, "this host's name 'node' resolves to 127.0.1.1, which no other host reaches"),
        ({}, "this host's name 'node' resolves to nothing"),
    ],
)
def test_a_name_that_leads_nowhere_names_the_interface_to_set(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str], says: str
) -> None:
    resolves(monkeypatch, **names, head="10.9.8.7")
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setattr(addresses, "_towards", lambda host: {"head": "10.9.8.6"}[host])
    monkeypatch.setattr(addresses, "_addresses", lambda: {"lo": "127.0.0.1", "eth7": "10.9.8.6"})
    with pytest.raises(ConfigError) as failure:
        addresses.own_address()
    assert str(failure.value).startswith(says)
    assert "set GLOO_SOCKET_IFNAME=eth7" in str(failure.value)


def test_the_way_to_the_master_is_before_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, node="10.1.1.1")
    monkeypatch.setenv("MASTER_ADDR", "unknown")
    assert addresses.own_address() == "10.1.1.1"
    monkeypatch.setattr(addresses, "_towards", lambda _: "10.2.2.2")
    assert addresses.own_address() == "10.2.2.2"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    for make in (addresses.own_address, lambda: meet(dist.HashStore(), "label", 0, 1, 5.0, 5.0, "the store")):
        with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME='eth77': this host has no such .* it has (.*, )?lo"):
            make()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "\udcff")  # a byte that is no text
    with pytest.raises(ConfigError, match="this host has no such interface"):
        addresses.named_interface()


def test_a_minority_names_itself_and_of_two_halves_neither_is_to_blame() -> None:
    ranks, words = cut_off([2, 3], [0, 1, 4, 5], False, "; is there a firewall?") or ((), "")
    assert ranks == (2, 3)
    assert "ranks [2, 3] silent: they hear none of ranks [0, 1, 4, 5]: they are cut off; is there a firewall?" in words
    assert cut_off([0, 1, 4, 5], [2, 3], False, "") is None  # the others are lost
    assert cut_off([0, 1], [2, 3], False, "") == cut_off([2, 3], [0, 1], False, "")
    ranks, words = cut_off([0, 1], [2, 3], False, "") or ((-1,), "")
    assert ranks == ()
    assert "the network is cut in two: ranks [0, 1] and ranks [2, 3] don't hear each other" in words
    assert cut_off([0, 1], [2, 3], True, "") is None  # no cable lies between processes of a host


def test_a_port_that_another_process_has_is_named(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(RankLost, match=r"can't be served: .*EADDRINUSE.* Give each job a MASTER_PORT") as failure:
            World.from_env("cpu", timeout_s=5.0)
    assert "\n" not in str(failure.value)


def test_an_address_of_another_host_is_named_where_rank_0_cannot_reach_itself(monkeypatch) -> None:
    """192.0.2.1 is nobody's; torch's words for it."""
    names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(free_port())}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    said = "The client socket has timed out after 5000ms while trying to connect to (192.0.2.1, 29500)."
    monkeypatch.setattr(groups, "_job_store", Mock(side_effect=dist.DistNetworkError(said)))
    with pytest.raises(RankLost, match=r"at 192\.0\.2\.1:\d+ isn't rank 0's: .* Set MASTER_ADDR to an address of this"):
        World.from_env("cpu", timeout_s=5.0)
