import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from process_ends import ended

from jaxring._src import native_facts, outcomes
from jaxring.cli.main import main

TRACEBACK = outcomes._TRACEBACK


@pytest.fixture
def jaxring_command(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, which has imported JAX already: (exit code, out, err)."""

    def run(*arguments, **env):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["jaxring", *arguments])
        monkeypatch.delenv("JAXRING_SECRET", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        with pytest.raises(SystemExit) as e:
            main()
        return e.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def script(tmp_path):
    """Writes a script that needs no JAX, so that starting it is fast, and gives its name."""

    def write(text, name="script.py"):
        (tmp_path / name).write_text(
            "import os, sys, time\nrank = os.environ.get('JAXRING_RANK')\n" + text
        )
        return name

    return write


def test_ranks_arguments_and_prefixes(script, jaxring_command):
    name = script(
        "names = ('WORLD_SIZE', 'LOCAL_RANK')\n"
        "print(rank, *(os.environ['JAXRING_' + n] for n in names), sys.argv[1:])\n"
        "print('to stderr', file=sys.stderr)"
    )
    code, out, err = jaxring_command("run", "-n", "3", name, "--epochs", "3", "-n", "9")
    assert code == 0
    expected = [f"[{r}] {r} 3 {r} ['--epochs', '3', '-n', '9']" for r in range(3)]
    assert sorted(out.splitlines()) == expected
    assert sorted(err.splitlines()) == [f"[{r}] to stderr" for r in range(3)]


def test_module(script, jaxring_command, tmp_path, monkeypatch):
    script("print(__name__, sys.argv[1:])", "program.py")
    monkeypatch.syspath_prepend(tmp_path)
    done = jaxring_command("run", "-n", "1", "-m", "program", "-m", "--flag")
    assert done == (0, "[0] __main__ ['-m', '--flag']\n", "")


def test_failing_rank(script, jaxring_command):
    name = script("if rank == '1': raise ValueError('no data')\ntime.sleep(100)")
    code, _, err = jaxring_command("run", "-n", "3", name)
    assert code == 1
    prefixed, last = re.split(
        r"\njaxring run: rank 1 \(pid \d+\) exited with code 1; its last words:\n", err
    )
    assert all(line.startswith("[1] ") for line in prefixed.splitlines())
    assert last.startswith(TRACEBACK)
    assert last.endswith("\nValueError: no data\n")


def test_how_ranks_ended_as_json(script, jaxring_command, tmp_path):
    name = script(
        "if rank == '0': time.sleep(100)\n"
        "if rank == '2': open('up', 'w')\n"
        "while not os.path.exists('up'): time.sleep(0.05)\n"
        "sys.exit(3 if rank == '1' else 0)"
    )
    code, out, _ = jaxring_command("run", "-n", "3", "--json", "ended.json", name)
    found = json.loads((tmp_path / "ended.json").read_text())
    assert (code, out, found["exit_code"], found["world_size"]) == (3, "", 3, 3)
    assert (found["cause"]["rank"], found["cause"]["how"]) == (1, "exited with code 3")
    rows = [(row["rank"], row["exit_code"], row["signal"]) for row in found["ranks"]]
    assert rows == [(0, None, "SIGTERM"), (1, 3, None), (2, 0, None)]


def test_a_rank_that_ends_before_init_is_named_at_once(script, jaxring_command):
    name = script("if rank == '1': sys.exit()\nimport jaxring\njaxring.init(timeout_s=100)")
    begin = time.monotonic()
    code, _, err = jaxring_command("run", "-n", "2", name)
    assert code == 1
    assert "PeerError: the process of rank 1 (pid " in err
    assert "ended with exit code 0 without a call of jaxring.init()" in err
    assert time.monotonic() - begin < 40


def test_a_stopped_rank_is_named(script, jaxring_command):
    name = script(
        "import signal\nif rank: os.kill(os.getpid(), 19) if rank == '1' else sys.exit(5)"
    )
    code, _, err = jaxring_command("run", "-n", "2", name)
    assert code == 5
    assert re.search(r"rank 1 \(pid \d+\) was stopped \(SIGSTOP\)", err.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run",), "no script given; for example: jaxring run -n 4 train.py"),
        (("run", "-n", "2"), "no script given"),
        (("run", "-n", "2", "nope.py"), "no script 'nope.py' in "),
        (("run", "-n", "2", "."), "'.' is a folder without a __main__.py"),
        (("run", "-n", "2", "-m", "nope"), "no module named 'nope'"),
        (("run", "script.py"), "say how many processes to start, for example -n 4"),
        (("run", "-n", "0", "script.py"), "expected -n >= 1, got 0"),
        (("run", "-n", "3", "--per-host", "2", "script.py"), "expected -n 2 for 1 hosts"),
        (("run", "--hosts", "2", "--per-host", "1", "script.py"), "0 <= --host-rank < --hosts"),
        (
            ("run", "--hosts", "2", "--host-rank", "0", "--per-host", "1", "script.py"),
            "JAXRING_SECRET",
        ),
        (("run", "-n", "1", "--coordinator", "nowhere", "script.py"), "expected host:port"),
    ],
)
def test_bad_usage_is_one_sentence(script, jaxring_command, arguments, sentence):
    script("")
    code, _, err = jaxring_command(*arguments)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("jaxring: ")
    assert sentence in line


@pytest.fixture
def running(script, tmp_path):
    """Starts `jaxring run -n 2` of a script and waits until each rank has printed its pid."""
    started = []

    def start(text):
        command = [sys.executable, "-m", "jaxring", "run", "-n", "2", script(text)]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, [int(process.stdout.readline().split()[1]) for _ in range(2)]

    yield start
    for process in started:
        process.kill()
        process.communicate()


IN_A_COLLECTIVE = """
import jax.numpy as jnp, jaxring
comm = jaxring.init()
print(os.getpid(), flush=True)
if rank == "1":
    time.sleep(100)
jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
"""
STUBBORN = """
import signal
import socket
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("what", ["collective", "stubborn"])
def test_ctrl_c_ends_all(running, what):
    process, pids = running({"collective": IN_A_COLLECTIVE, "stubborn": STUBBORN}[what])
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=30)
    # A stubborn one is killed after 4 s; else 2 s, with as many again for a busy machine.
    assert time.monotonic() - start < (8 if what == "stubborn" else 4)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "jaxring run: ended by SIGINT"
    assert ended(pids)


def test_children_die_with_the_launcher(running):
    process, pids = running("print(os.getpid(), flush=True)\ntime.sleep(100)")
    process.kill()
    process.wait()
    assert ended(pids)


def test_reader_that_goes_away(script, tmp_path):
    """As in `jaxring run … | head -1`."""
    name = script("while True: print('y'); time.sleep(0.01)")
    command = f"{sys.executable} -m jaxring run -n 2 {name} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r"\[\d\] y\n141\n", done.stdout)


def own_address() -> str:
    """One that another host could use: the loopback's is refused as a coordinator of several."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses a route
        except OSError as e:
            pytest.skip(f"this machine has no network: {e}")
        return probe.getsockname()[0]


def test_two_launchers_of_one_job(script, tmp_path, free_port):
    """What runs on each of two hosts, here on one."""
    name = script("import jaxring\nc = jaxring.init()\nprint(c.rank, c.world_size)")
    coordinator = f"{own_address()}:{free_port()}"
    options = ["--hosts", "2", "--per-host", "1", "--coordinator", coordinator]
    env = {**os.environ, "JAXRING_SECRET": "of this test"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxring", "run", *options, "--host-rank", str(host), name],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in (0, 1)
    ]
    assert [p.communicate(timeout=60)[0] for p in processes] == ["[0] 0 2\n", "[1] 1 2\n"]


# --- jaxring info ---


def test_info_json(jaxring_command):
    env = {"JAXRING_TYPO": "1", "JAXRING_TIMEOUT": "9", "JAXRING_RESTART": "1"}
    code, out, _ = jaxring_command("info", "--json", **env)
    assert code == 0
    facts, lists = json.loads(out), native_facts.lists()
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["ops"] == lists["ops"]
    assert [row["name"] for row in facts["algorithms"]] == [a["name"] for a in lists["algorithms"]]
    (warn_s,) = [row for row in facts["settings"] if row["name"] == "warn_s"]
    assert (warn_s["value"], warn_s["variable"]) == (30, "JAXRING_WARN_S")
    assert facts["place"] == {"rank": 0, "world size": 1, "from": "none found: a world of one"}
    assert facts["warnings"] == [
        "JAXRING_TIMEOUT is set but is no setting of this version; is JAXRING_TIMEOUT_S meant?",
        "JAXRING_TYPO is set but is no setting of this version",
    ]


def test_info_tables(jaxring_command):
    code, out, _ = jaxring_command("info", COLUMNS="200")
    assert code == 0
    for word in ("timeout_s", "in_process", "direct", "cuda", "off: "):
        assert word in out


def test_python_m_jaxring(tmp_path):
    command = [sys.executable, "-m", "jaxring", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for word in ("run", "info", "bench"):
        assert word in done.stdout
