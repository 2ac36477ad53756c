"""Fuzzes what reads text that other processes wrote while ranks meet: the store's requests, the
tables they exchange, addresses, rendezvous files, errors that come back as text.

    pip install atheris && python tests/fuzz/bootstrap_fuzz.py -max_total_time=60

Whatever comes, only jaxring's own errors may leave these functions, and soon.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading

import atheris

with atheris.instrument_imports(include=["jaxring", "json"]):
    from jaxring import bootstrap, errors
    from jaxring._src import elastic_gathering, elastic_server, rendezvous, store_server

store_server.WAIT_S_MAX = 0.0  # requests that wait are refused, so that no input takes long
FOLDER = tempfile.mkdtemp(prefix="jaxring-fuzz-")
tempfile.tempdir = FOLDER


def server() -> store_server.StoreServer:
    """A server without its socket."""
    one = store_server.StoreServer.__new__(store_server.StoreServer)
    one._values, one._lost, one._changed = {}, {}, threading.Condition()
    return one


class Liar:
    """A store in which another process has written something else than it should."""

    def __init__(self, text: str):
        self.text = text

    def set(self, key: str, value: str) -> None:
        if key.endswith("/0"):
            self.mine = value

    def get(self, key: str, timeout_s: float, group: str = "") -> str:
        del timeout_s, group
        return self.mine if key.endswith("/0") else self.text


SERVER = server()


def answer(text: str) -> None:
    request = store_server._checked(text.encode("utf-8", "surrogatepass"))
    store_server._names_a_member(request)
    json.dumps(SERVER._answer(request))


def lead(text: str) -> None:
    table = bootstrap.exchange(Liar(text), "fuzz", [0, 1], 0, bootstrap.host_identity(), 0.01)
    assert sorted(table) == [0, 1]


def follow(text: str) -> None:
    bootstrap.exchange(Liar(text), "fuzz", [0, 1], 1, bootstrap.host_identity(), 0.01)


def address(text: str) -> None:
    _, port = bootstrap.parse_address(text)
    assert 0 < port < 65536


def rendezvous_file(text: str) -> None:
    with open(rendezvous._path("fuzz"), "w", errors="surrogatepass") as f:
        f.write(text)
    found = rendezvous.read("fuzz")
    assert found is None or isinstance(found[1], str)


def error_text(text: str) -> None:
    found = errors.from_exception(RuntimeError(f"INTERNAL: jaxring.{text}"))
    str(found)


def gather(text: str) -> None:
    """ValueError ends the connection."""
    members = elastic_gathering.Gathering(lambda member, message: json.dumps(message))
    members.enter("one")
    with contextlib.suppress(ValueError):
        message = elastic_server._parsed(text.encode("utf-8", "surrogatepass"))
        elastic_server.Gatherings(lambda: 0)._hear(members, "one", message)


TARGETS = (answer, lead, follow, address, rendezvous_file, error_text, gather)


WORDS = (
    *("op", "key", "value", "wait_s", "0", "1", "2", "address", "secret", "set", "get", "ping"),
    *("do", "form", "look", "withdraw", "finish", "offer", "number", "world_size", "min_ranks"),
    *("suspects", "row"),
)


def value(provider: atheris.FuzzedDataProvider, depth: int = 0) -> object:
    """Some JSON value: random text hardly ever is one."""
    kind = provider.ConsumeIntInRange(0, 9 if depth < 4 else 6)
    if kind < 3:
        return WORDS[provider.ConsumeIntInRange(0, len(WORDS) - 1)]
    if kind == 3:
        return provider.ConsumeUnicode(8)
    if kind == 4:
        return provider.ConsumeInt(8)
    if kind == 5:
        return provider.ConsumeFloat()
    if kind == 6:
        return (None, True, False)[provider.ConsumeIntInRange(0, 2)]
    length = provider.ConsumeIntInRange(0, 4)
    if kind == 7:
        return [value(provider, depth + 1) for _ in range(length)]
    return {
        WORDS[provider.ConsumeIntInRange(0, len(WORDS) - 1)]: value(provider, depth + 1)
        for _ in range(length)
    }


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    target = TARGETS[provider.ConsumeIntInRange(0, len(TARGETS) - 1)]
    if provider.ConsumeBool():
        text = json.dumps(value(provider))
    else:
        text = provider.ConsumeUnicode(2000)
    with contextlib.suppress(errors.Error):
        target(text)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
