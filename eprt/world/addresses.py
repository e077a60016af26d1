"""The address at which a rank listens for the others, and what is wrong with a host's own idea of it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from eprt.errors import ConfigError
from eprt.json_files import shown
from eprt.world.process import Member

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_GLOBAL = "00"  # scope of an IPv6 address that other hosts reach: include/net/ipv6.h


def listen(members: list[Member]) -> socket.socket:
    """Returns a listening socket: on loopback if all are on this host, else on the address that gloo would use.

    Raises ConfigError where gloo would listen on loopback, or on an interface that isn't there.
    """
    alone = len({(member.boot, member.net) for member in members}) == 1
    address = "127.0.0.1" if alone else own_address()
    return socket.create_server((address, 0), family=family_of(address), backlog=len(members) + 16)


def named_interface() -> str:
    """Returns the interface that GLOO_SOCKET_IFNAME names, "" where it names none. Raises ConfigError for one that this
    host hasn't got: gloo looks for it also where all ranks are on one host."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and _address_of(interface) is None:
        names = [name for _, name in socket.if_nameindex()]  # eth0:1, which has an address, has no number of its own
        if interface not in names:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={shown(interface)}: this host has no such interface; it has {', '.join(names)}"
            )
    return interface


def own_address() -> str:
    """Returns the address of the interface that GLOO_SOCKET_IFNAME names, else the one by which MASTER_ADDR is reached,
    else that of this host's name. Raises ConfigError where other hosts can't reach what gloo would listen on."""
    if interface := named_interface():
        if (address := _address_of(interface)) is not None:
            return address
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={shown(interface)}: that interface has no address; choose from "
            f"{', '.join(_addresses())}"
        )
    host = socket.gethostname()
    named, _ = resolve(host)
    towards = _towards(os.environ.get("MASTER_ADDR", ""))
    if not named or is_loopback(named[0]):  # gloo takes the first
        what = f"to {named[0]}, which no other host reaches" if named else "to nothing"
        fitting = next((name for name, address in _addresses().items() if address == towards), "eth0")
        raise ConfigError(
            f"this host's name {host!r} resolves {what}: set GLOO_SOCKET_IFNAME={fitting}, the interface by which the "
            "other hosts are reached, or correct /etc/hosts"
        )
    return towards or named[0]


def resolve(host: str) -> tuple[list[str], str]:
    """Returns the addresses of a host's name, and why there are none."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)], ""
    except OSError as error:
        return [], str(error.strerror or error)
    except UnicodeError as error:  # no name of DNS: a label is empty, or too long
        return [], str(error)


def _towards(host: str) -> str | None:
    """Returns this host's address on the way to another; None where there is no way, or it is loopback."""
    for address in resolve(host)[0] if host else []:
        try:
            with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(found):
            return found
    return None


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_of(interface: str) -> str | None:
    """Returns an interface's IPv4 address, else its IPv6 address of global scope."""
    packed = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)[20:24])
        except OSError:  # no such interface, or none of its addresses is an IPv4 one
            pass
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        address, _, _, scope, _, name = line.split()
        if name == interface and (scope == _GLOBAL or name == "lo"):
            return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return None


def _addresses() -> dict[str, str]:
    """Returns the interfaces of this host that have an address."""
    found = {name: _address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}
