"""`python -m benchmarks.dashboard_clients URL CLIENTS SECONDS`: clients that request the overview once a second.

Like open pages, each has its own connection and its own offset in the second. Prints the milliseconds of all answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit


async def _client(url: str, number: int, clients: int, seconds: float) -> list[float]:
    place = urlsplit(url)
    assert place.hostname is not None
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    request = f"GET /api/v1/overview HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: keep-alive\r\n\r\n".encode()
    began, found = time.perf_counter() + number / clients, []
    for turn in range(int(seconds)):
        await asyncio.sleep(max(0.0, began + turn - time.perf_counter()))
        asked = time.perf_counter()
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode(errors="replace"))
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")
        )
        await reader.readexactly(length)
        found.append((time.perf_counter() - asked) * 1e3)
    writer.close()
    return found


async def main() -> None:
    url, clients, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    found = await asyncio.gather(*(_client(url, number, clients, seconds) for number in range(clients)))
    print(json.dumps([one for each in found for one in each]))


if __name__ == "__main__":
    asyncio.run(main())
