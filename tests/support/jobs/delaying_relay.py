"""A switch whose every frame takes SECONDS: python -m support.jobs.delaying_relay SECONDS PORT...

Each frame goes to all other ports. The header before a frame (virtio_net.h) carries what network cards would do, so
that frames with checksums still to be made stay valid.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque

_ALL = 0x0003  # ETH_P_ALL
_SOL_PACKET, _PACKET_VNET_HDR, _OUTGOING = 263, 15, 4
_HEADER_AND_FRAME = 10 + 65_600


def main(seconds: float, ports: list[str]) -> None:
    sockets: list[socket.socket] = []
    for port in ports:
        one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        one.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        one.bind((port, 0))
        sockets.append(one)
    selector = selectors.DefaultSelector()
    for one in sockets:
        selector.register(one, selectors.EVENT_READ)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(pause):
            frame, address = key.fileobj.recvfrom(_HEADER_AND_FRAME)  # type: ignore[union-attr]
            if address[2] != _OUTGOING:  # what this relay itself sent
                waiting.append((time.monotonic() + seconds, key.fileobj, frame))  # type: ignore[arg-type]
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            for other in sockets:
                if other is not source:
                    other.send(frame)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
