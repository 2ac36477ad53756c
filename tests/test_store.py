import contextlib
import json
import os
import resource
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest

import jaxring
from jaxring import errors
from jaxring._src.rendezvous import wait_for_server
from jaxring._src.store import MESSAGE_BYTES_MAX, StoreServer, TcpStore, format_address


def test_set_and_get(store):
    store.set("a/ß", "1")
    store.set("a/ß", "two")
    assert store.get("a/ß", 0) == "two"


def test_get_waits_for_the_value(store):
    threading.Timer(0.2, store.set, ("late", "here")).start()
    assert store.get("late", 10) == "here"


def test_get_ends_at_its_deadline(store):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        store.get("never", 0.2)
    assert 0.15 < time.monotonic() - start < 2


def test_a_wait_does_not_block_other_threads(store):
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(store.get(f"key{i}", 10)))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for i in reversed(range(20)):
        store.set(f"key{i}", str(i))
    for thread in threads:
        thread.join(10)
    assert sorted(results, key=int) == [str(i) for i in range(20)]


def test_wrong_secret_is_refused(server, store):
    with pytest.raises(AuthenticationError):
        TcpStore(server.address, "guess").ping(5)
    store.ping(5)


def test_a_wrong_secret_is_the_reason_that_init_gives(server):
    where = format_address(*server.address)
    with pytest.raises(jaxring.TimeoutError, match="the secrets differ: JAXRING_SECRET"):
        wait_for_server(lambda: (server.address, "guess"), 1, where, 0.5)


def test_a_server_without_our_secret_is_refused():
    """Somebody else's program on the port must not be able to give us values."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            sock, _ = listener.accept()
            connection = Connection(sock.detach())
            connection.send_bytes(b"#CHALLENGE#" + b"{sha256}" + b"x" * 20)
            connection.recv_bytes(256)
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes(256)  # our challenge, which it can't answer
            connection.send_bytes(b"nothing")
            connection.close()

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            TcpStore(listener.getsockname(), "secret").ping(5)
        thread.join(5)


def _raw(server, data):
    """Sends bytes as a stranger and gives what comes back before the server hangs up."""
    got = b""
    with (
        socket.create_connection(server.address, timeout=5) as sock,
        contextlib.suppress(OSError),  # it may hang up before we are through
    ):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(4096):
            got += part
    return got


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x7f\xff\xff\xff" + b"x" * 100,  # 2 GiB to come
        b"\xff\xff\xff\xff" + b"\x7f" * 8,  # 8 EiB to come
        b"\xff\xff\xff\xfe",
        b"\x00\x00\x00\x10" + b"y" * 16,
        os.urandom(4096),
    ],
)
def test_strangers_do_no_harm(server, store, data):
    assert b"WELCOME" not in _raw(server, data)
    store.set("still", "here")
    assert store.get("still", 5) == "here"


@pytest.mark.parametrize(
    "request_",
    [
        b"no json",
        b"[]",
        b"[" * 100_000,
        b'{"op": "get"}',
        b'{"op": "get", "key": 3, "wait_s": 0}',
        b'{"op": "get", "key": "k", "wait_s": NaN}',
        b'{"op": "get", "key": "k", "wait_s": 1e999}',
        b'{"op": "get", "key": "k", "wait_s": -1}',
        b'{"op": "get", "key": "k", "wait_s": true}',
        b'{"op": "set", "key": "k", "value": {"a": 1}}',
        json.dumps({"op": "set", "key": "k" * 2000, "value": "v"}).encode(),
        b'{"op": "eval", "key": "k"}',
        b"\xff\xfe",
    ],
)
def test_bad_requests_get_an_error(server, store, request_):
    connection = Connection(socket.create_connection(server.address, timeout=5).detach())
    os.set_blocking(connection.fileno(), True)
    answer_challenge(connection, b"secret")
    deliver_challenge(connection, b"secret")
    connection.send_bytes(request_)
    assert "error" in json.loads(connection.recv_bytes(1000))
    connection.close()
    store.ping(5)


def test_too_large_a_message_is_not_taken(store):
    with pytest.raises(jaxring.PeerError):
        store.set("big", "x" * (MESSAGE_BYTES_MAX + 1))
    store.set("small", "x")


def test_a_server_that_ends_is_named():
    server = StoreServer("127.0.0.1", 0, "s")
    store = TcpStore(server.address, "s")
    server.close()
    with pytest.raises(jaxring.PeerError, match=f"store at 127.0.0.1:{server.address[1]} is gone"):
        store.get("x", 1)


def test_a_server_without_a_free_descriptor_goes_on(server, store):
    client = socket.socket()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds, before[1]))
    try:
        client.connect(server.address)
        time.sleep(0.3)  # accept fails meanwhile
        with pytest.raises(errors.UsageError, match="ulimit -n"):
            store.set("a", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        client.close()
    store.set("a", "1")
    assert store.get("a", 5) == "1"
