"""Addresses: of this host's network interfaces, and those that only this host can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from jaxring import errors

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def address_of(interface: str) -> str:
    """The address of an interface ("eth0"), or the address itself ("10.0.0.1", "fd00::1")."""
    try:
        return str(ipaddress.ip_address(interface.strip("[]")))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            pass
    for line in _lines("/proc/net/if_inet6"):  # address index prefix-length scope flags name
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope == "00":  # global
            return str(ipaddress.ip_address(bytes.fromhex(digits)))
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise errors.UsageError(
        f"interface: expected a network interface of this host that has an address ({known}), or "
        f"an address, got {interface!r}"
    )


def _lines(path: str) -> list[str]:
    try:
        with open(path) as f:
            return f.read().splitlines()
    except OSError:
        return []


def refuse_loopback(coordinator: str, what: str) -> None:
    """UsageError if `coordinator` ("host:port") is an address that only its own host can reach."""
    host, port = coordinator.rpartition(":")[::2]
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return  # the attempt to reach it says so
    if all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found):
        raise errors.UsageError(
            f"{what}: the coordinator {coordinator} is a loopback address, which ranks on other "
            "hosts cannot reach; give an address of host 0 that the others can reach"
        )
