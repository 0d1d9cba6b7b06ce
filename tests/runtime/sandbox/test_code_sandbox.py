"""What programs try in a box fails there, and works outside of it: each attempt is one that could have got out."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runtime.sandbox.escapes import ATTEMPTS, SYSTEM

from spmdrl.runtime.sandbox.boxes import BoxLimits, BoxLost, BoxServer
from spmdrl.runtime.workers.descent import ProcessTree

# With all rights in a namespace of its own, where attempts at the system can't harm it.
AS_ROOT = ("unshare", "-rmu", "--propagation", "private")


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """What there is to be had: files, a variable, a descriptor, a process and sockets."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("secret", ".job_secret", "removed"):
        (folder / name).write_text("ESCAPED")
    os.environ["JOB_KEY"] = "ESCAPED"
    inherited = os.open(folder / "secret", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    victim = subprocess.Popen(["sleep", "600"])
    abstract = f"spmdrl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen()
        yield {
            "secret": folder / "secret", "folder": folder, "victim": victim.pid, "port": listener.getsockname()[1],
            "name": abstract, "inherited": inherited,
        }  # fmt: skip
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    os.close(inherited)
    del os.environ["JOB_KEY"]


@pytest.fixture(scope="module")
def server(surroundings):
    server = BoxServer(BoxLimits(memory_bytes=1 << 30))
    yield server
    server.close()


def test_the_end_of_the_server_is_the_end_of_its_boxes():
    def running() -> set[int]:
        return {one.pid for one in ProcessTree(os.getpid()).members()}

    before, server = running(), BoxServer(BoxLimits(memory_bytes=1 << 30))
    with server.box() as box, ThreadPoolExecutor(1) as pool:
        call = pool.submit(box.run_program, "import time; time.sleep(60)", "", 30.0)
        deadline = time.monotonic() + 20
        while len(running() - before) < 4:
            assert time.monotonic() < deadline, "server, the box's parent, its first process and the program"
            time.sleep(0.01)
        server.close()
        with pytest.raises(BoxLost):
            call.result(20)
    while running() - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_program_gets_nothing_out_of_a_box(server, surroundings, attempt):
    program = ATTEMPTS[attempt].format(**surroundings)
    with server.box() as box:
        finished = box.run_program(program, "", 5.0)
    assert "ESCAPED" not in finished.output, finished
    assert finished.errors or finished.output or finished.codes != [0] or attempt == "an inherited descriptor"


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_same_program_does_it_outside_of_a_box(surroundings, attempt):
    program = ATTEMPTS[attempt].format(**surroundings)
    (surroundings["folder"] / "removed").write_text("")
    around = AS_ROOT if attempt in SYSTEM else ()
    command = [*around, sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, close_fds=False, timeout=60, cwd=surroundings["folder"]
    )
    assert "ESCAPED" in done.stdout, done


def test_a_program_that_ignores_signals_and_sleeps_is_ended_at_its_time(server):
    program = (
        "import signal, time\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\ntime.sleep(60)"
    )
    started = time.monotonic()
    with server.box() as box:
        finished = box.run_program(program, "", 0.3)
        assert finished.late and finished.codes == [-signal.SIGKILL]
        assert box.run_program("print('next')", "", 5.0).output == "next\n", "the box goes on"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM])
def test_signals_to_the_first_process_of_a_box_do_nothing(server, number):
    program = f"import os\nfor _ in range(200): os.kill(1, {int(number)})\nprint('sent')"
    with server.box() as box:
        assert box.run_program(program, "", 5.0).output == "sent\n"
        assert box.run_program("print('next')", "", 5.0).output == "next\n"


def test_a_program_that_stops_itself_is_ended_at_its_time(server):
    with server.box() as box:
        assert box.run_program("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "", 0.3).late


def test_output_without_end_is_cut_off(server):
    with server.box() as box:
        finished = box.run_program("import sys\nwhile True: sys.stdout.write('x' * 65536)", "", 5.0)
    assert len(finished.output) == 16 << 20 and finished.codes != [0]


def test_a_row_finds_nothing_of_the_row_before(server):
    with server.box() as box:
        assert box.run_program("open('left', 'w').write('x'); print(open('left').read())", "", 5.0).output == "x\n"
        assert box.run_program("import os; print(os.listdir('.'))", "", 5.0).output == "['left']\n", "the same row"
    with server.box() as box:
        assert box.run_program("import os; print(os.listdir('.'))", "", 5.0).output == "[]\n"


def test_an_ordinary_user_makes_boxes_too(tmp_path):
    """As nobody where the tests run as root; the interpreter must be one that nobody can start."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or not Path(python).exists():
        pytest.skip("the other tests run as an ordinary user already")
    source = Path(__file__).parents[3] / "src"
    os.chmod(tmp_path.parent.parent, 0o755)
    script = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "from spmdrl.runtime.sandbox.boxes import BoxLimits, BoxServer\n"
        "with BoxServer(BoxLimits(1 << 30)).box() as box:\n"
        "    print(box.run_program('import os; print(os.getuid())', '', 5.0))"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, user=65534, group=65534, cwd="/")
    if "Permission denied" in done.stderr:
        pytest.skip("nobody may not read the package")
    assert "output='1000\\n'" in done.stdout, done.stderr
