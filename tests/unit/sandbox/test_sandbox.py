"""Programs run in real, confined processes, and attacks on the sandbox fail."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill_sandbox import cell
from gristmill_sandbox.app import DEFAULT_LIMITS, MAX_BODY_BYTES, MAX_RUNS, Sandbox, Work, create_app
from gristmill_sandbox.confine import Limits

pytestmark = pytest.mark.slow

MIB = 2**20
SECRET = "the-secret-of-the-service"


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the sandbox creates the folders of programs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "programs"))
    (tmp_path / "programs").mkdir()
    return tmp_path / "programs"


@pytest.fixture
async def sandbox(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    monkeypatch.setenv("SECRET", SECRET)
    sandbox = Sandbox(at_once=4)
    yield sandbox
    sandbox.close()


async def run(
    sandbox: Sandbox, program: str, *stdin: str, seconds: float = 20.0, **fields: Any
) -> list[dict[str, Any]]:
    limits = Limits(seconds=seconds, memory_bytes=256 * MIB, output_bytes=10_000)
    work = Work(program, list(stdin or [""]), fields.get("tests"), fields.get("files", {}), limits)
    answer = await sandbox.run(work)
    return [*answer["runs"]]


async def verdict(sandbox: Sandbox, program: str, tests: str) -> dict[str, Any]:
    work = Work(program, [], tests, {}, Limits(seconds=20.0, memory_bytes=256 * MIB, output_bytes=10_000))
    answer = await sandbox.run(work)
    report = answer["tests"]
    assert isinstance(report, dict)
    return report


async def test_each_input_is_a_process_of_its_own(sandbox: Sandbox) -> None:
    program = (
        "import sys\nopen('left', 'x').write('x')\nprint(sys.stdin.read().upper())\nprint('warned', file=sys.stderr)"
    )
    reports = await run(sandbox, program, "a", "b\u00e4", "c" * 200_000)
    assert [report["stdout"] for report in reports[:2]] == ["A\n", "B\u00c4\n"]
    assert [report["status"] for report in reports] == ["exited", "exited", "output_limit"]
    assert reports[0]["code"] == 0
    assert reports[0]["stderr"] == "warned\n"
    assert len(reports[2]["stdout"]) == 10_000


@pytest.mark.parametrize(
    ("program", "status", "code"),
    [
        ("", "exited", 0),
        ("raise SystemExit(3)", "exited", 3),
        ("raise SystemExit('text')", "exited", 1),
        ("import sys; sys.exit()", "exited", 0),
        ("1 / 0", "exited", 1),
        ("this is no Python", "exited", 1),
        ("def f(x: Unknown): pass", "exited", 1),
        ("def f(x: int): pass\nassert f.__annotations__ == {'x': int}", "exited", 0),
        ("import os; os.abort()", "signalled", 6),
        ("import os; os._exit(9)", "exited", 9),
        ("import os; os._exit(97)", "exited", 97),
        ("import threading; threading.Thread(target=lambda: print('late')).start()", "exited", 0),
    ],
)
async def test_a_program_ends_as_under_pythons_own_command(
    sandbox: Sandbox, program: str, status: str, code: int
) -> None:
    [report] = await run(sandbox, program)
    assert (report["status"], report["code"]) == (status, code)


async def test_a_traceback_names_the_programs_line_and_nothing_of_the_sandbox(sandbox: Sandbox) -> None:
    [report] = await run(sandbox, "def f():\n    return 1 / 0\nf()")
    assert 'File "program.py", line 2, in f\n    return 1 / 0\n' in report["stderr"]
    assert report["stderr"].endswith("ZeroDivisionError: division by zero\n")
    assert "gristmill" not in report["stderr"]


async def test_files_of_the_request_are_in_the_programs_folder(sandbox: Sandbox, folder: Path) -> None:
    program = "import helper, os\nprint(helper.x, open('data/in.txt').read(), sorted(os.listdir()))"
    [report] = await run(sandbox, program, files={"helper.py": "x = 5", "data/in.txt": "7"})
    assert report["stdout"] == "5 7 ['data', 'helper.py']\n"
    assert [*folder.iterdir()] == [], "the folder is removed"  # noqa: ASYNC240


async def test_a_program_reaches_no_file_of_a_program_that_runs_beside_it(sandbox: Sandbox, folder: Path) -> None:
    holder = "import time\nopen('mine.txt', 'w').write('mine')\nopen('ready', 'w')\ntime.sleep(60)"
    beside = asyncio.create_task(run(sandbox, holder))
    while not (ready := [*folder.glob("*/ready")]):  # noqa: ASYNC110, ASYNC240  a file has no event
        await asyncio.sleep(0.01)
    file = ready[0].with_name("mine.txt")
    for mode in ("r", "a", "w"):
        [report] = await run(sandbox, f"open({str(file)!r}, {mode!r})")
        assert DENIED in report["stderr"], report
    assert file.read_text() == "mine"
    beside.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beside


async def test_program_that_did_not_begin_is_a_fault_of_the_sandbox(sandbox: Sandbox) -> None:
    [report] = await run(sandbox, "print(1)", files={"a": "", "a/b": ""})
    assert (report["status"], report["stdout"]) == ("failed", "")
    assert "FileExistsError" in report["stderr"] or "NotADirectoryError" in report["stderr"]


# They are harmless if they succeed: signal 0 does nothing, and no fork repeats itself.
DENIED = "PermissionError"
ATTACKS = {
    "read a file": ("open('/etc/passwd').read()", DENIED),
    "read the service's environment": ("open(f'/proc/{__import__(\"os\").getppid()}/environ').read()", DENIED),
    "read its own environment's origin": ("open('/proc/self/environ').read()", DENIED),
    "read its memory by file": ("open('/proc/self/mem', 'rb').read(1)", DENIED),
    "list the other programs' folders": ("import os; os.listdir('..')", DENIED),
    "write elsewhere": ("open('/tmp/escaped', 'w')", DENIED),
    "write Python's files": ("import os; open(os.__file__, 'a')", DENIED),
    "truncate what it may read": ("import os; os.open('/dev/null', os.O_RDONLY | os.O_TRUNC)", DENIED),
    "remove the folder": ("import os; os.rmdir(os.getcwd())", DENIED),
    "change a mode": ("import os; os.chmod('/dev/null', 0o666)", DENIED),
    "change a time": ("import os; os.utime('/dev/null')", DENIED),
    "link out": ("import os; os.symlink('/etc/passwd', 'link')", DENIED),
    "use TCP": ("import socket; socket.socket()", DENIED),
    "use UDP": ("import socket; socket.socket(type=socket.SOCK_DGRAM)", DENIED),
    "reach a local socket": ("import socket; socket.socket(socket.AF_UNIX)", DENIED),
    "fork": ("import os\nif os.fork() == 0: os._exit(0)", DENIED),
    "fork by number": ("import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nfor n in (56, 57, 58, 220, 435):\n"
                       "    if c.syscall(n, 17, 0, 0, 0, 0) >= 0: print('escaped')\nraise PermissionError", DENIED),
    "start a shell": ("import os; os.system('echo escaped'); raise PermissionError", DENIED),
    "start a program": ("import subprocess; subprocess.run(['/bin/echo', 'escaped'])", DENIED),
    "become a program": ("import os; os.execv('/bin/echo', ['echo', 'escaped'])", DENIED),
    "start a process": ("import multiprocessing as m; m.get_context('fork').Process(target=print).start()", DENIED),
    "signal the parent": ("import os; os.kill(os.getppid(), 0)", DENIED),
    "signal all": ("import os; os.kill(-1, 0)", DENIED),
    "trace the parent": ("import ctypes, os\nc = ctypes.CDLL(None)\n"
                         "if c.ptrace(16, os.getppid(), 0, 0) == 0: print('escaped')\nraise PermissionError", DENIED),
    "leave shared memory": ("import ctypes\nif ctypes.CDLL(None).shmget(7, 4096, 0o1666) >= 0: print('escaped')\n"
                            "raise PermissionError", DENIED),
    "leave a namespace": ("import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('escaped')\n"
                          "raise PermissionError", DENIED),
    "take memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "take memory in threads": ("import threading as t, time\nwait = lambda: time.sleep(9)\n"
                               "while True: t.Thread(target=wait, daemon=True).start()", "RuntimeError"),
    "fill the disk": ("open('big', 'wb').write(bytes(20_000))", "OSError"),
    "open many files": ("f = [open('/dev/null') for _ in range(99)]", "OSError"),
    "make the kernel signal another process": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())", DENIED),
    "the same by ioctl": (
        "import fcntl, os, socket, struct\na, b = socket.socketpair()\n"
        "fcntl.ioctl(a, 0x8901, struct.pack('i', os.getppid()))", DENIED),
    "reach local sockets": ("import socket as s; s.socketpair(s.AF_UNIX, s.SOCK_DGRAM)", DENIED),
    "open for neither reading nor writing": ("import os; os.open('/etc/hostname', 3)", DENIED),
    "watch the other programs' folders": (
        "import ctypes\nc = ctypes.CDLL(None)\ni = c.inotify_init()\n"
        "if c.inotify_add_watch(i, b'..', 0xfff) >= 0: print('escaped')\nraise PermissionError", DENIED),
    "hold bytes beyond the end of a file": (
        "import ctypes\nx = open('x', 'wb')\n"
        "if ctypes.CDLL(None).fallocate(x.fileno(), 1, ctypes.c_long(0), ctypes.c_long(4096)) == 0: print('escaped')\n"
        "raise PermissionError", DENIED),
    "hold a file in memory": ("import os; os.memfd_create('x')", DENIED),
    "have a thread with its own open files": (
        "import ctypes\nc = ctypes.CDLL(None)\nfor n in (56, 220):\n"
        "    if c.syscall(n, 0x10900, 0, 0, 0, 0) >= 0: print('escaped')\nraise PermissionError", DENIED),
    "outlive its keeper": ("import ctypes\nif ctypes.CDLL(None).prctl(1, 0) == 0: print('escaped')\n"
                           "raise PermissionError", DENIED),
    "raise a limit": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_fails_with_an_error_in_the_program(sandbox: Sandbox, attack: str) -> None:
    program, error = ATTACKS[attack]
    [report] = await run(sandbox, program + "\nprint('escaped')")
    assert "escaped" not in report["stdout"]
    assert report["stderr"].splitlines()[-1].partition(":")[0].removeprefix("multiprocessing.") == error
    [after] = await run(sandbox, "print('works')")
    assert after["stdout"] == "works\n", "the sandbox still runs programs"


SEES = """
import gc
def sees(backwards):
    text = backwards[::-1]
    return any(text in repr(found) for found in gc.get_objects() if isinstance(found, (dict, list, tuple, str)))
"""


async def test_a_program_finds_no_secret_and_no_other_program_in_itself(sandbox: Sandbox) -> None:
    await run(sandbox, "x = 'tfel'[::-1]\nprint(x)", "stdin: tfel")
    [report] = await run(sandbox, "import os; print(sorted(os.environ))")
    assert report["stdout"] == "['LANG', 'TMPDIR']\n"
    [report] = await run(sandbox, f"{SEES}\nprint(sees({SECRET[::-1]!r}), sees('tfel :nidts'), sees('__niam__'))")
    assert report["stdout"] == "False False True\n", "the last is there, so the search works"


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(1000)", "import threading; threading.Event().wait()", "9**9**9"],
)
async def test_a_program_that_does_not_end_is_ended_at_its_limit(sandbox: Sandbox, program: str) -> None:
    [report] = await run(sandbox, program, seconds=0.3)
    assert (report["status"], report["code"]) == ("timed_out", None)


MAPS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
for _ in range(9000):
    file = OPEN
    os.write(file, bytes(9999))
    libc.mmap(None, 1, 1, 1, file, 0)
    os.close(file)
    END
time.sleep(60)
"""
"""Keeps 90 MB in files that it has removed, with 9,000 pages of addresses."""


HIDDEN = f"""
import ctypes, platform, threading
maps = {MAPS.replace("OPEN", "os.open('x', os.O_RDWR | os.O_CREAT)").replace("END", "os.unlink('x')")!r}
threading.Thread(target=exec, args=(maps, {{}})).start()
ctypes.CDLL(None).syscall({{"x86_64": 60, "aarch64": 93}}[platform.machine()], 0)
"""
"""The same in a thread, while the first thread has ended."""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import threading as t, time\nt.stack_size(32768)\nwait = lambda: time.sleep(60)\n"
         "for _ in range(90): t.Thread(target=wait).start()", "thread_limit"),
        ("import os, time\nfor n in range(2000): open(str(n), 'w')\ntime.sleep(60)", "disk_limit"),
        ("import time\nfor n in range(2000): open(str(n % 900), 'wb').write(bytes(9999)); open(f'{n}b', 'wb')\n"
         "time.sleep(60)", "disk_limit"),
        (MAPS.replace("OPEN", "os.open('x', os.O_RDWR | os.O_CREAT)").replace("END", "os.unlink('x')"), "disk_limit"),
        (HIDDEN, "disk_limit"),
    ],
)  # fmt: skip
async def test_threads_and_files_are_limited(sandbox: Sandbox, folder: Path, program: str, status: str) -> None:
    [report] = await run(sandbox, program)
    assert report["status"] == status
    assert [*folder.iterdir()] == []  # noqa: ASYNC240


async def test_a_program_ends_with_its_keeper(sandbox: Sandbox, folder: Path) -> None:
    running = asyncio.create_task(run(sandbox, "import time\nopen('ready', 'w')\ntime.sleep(600)", seconds=50))
    while not [*folder.glob("*/ready")]:  # noqa: ASYNC110, ASYNC240  a file has no event
        await asyncio.sleep(0.01)
    assert sandbox._process is not None
    [keeper] = children(sandbox._process.pid)
    [program] = children(keeper)
    ended = os.pidfd_open(program)
    os.kill(keeper, signal.SIGKILL)
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(900): os.mkdir('d' * 9); os.chdir('d' * 9)",
        "import os\nos.mkdir('d'); open('d/f', 'w'); os.mkdir('d/e', 0o000); os.mkdir('f', 0o300)",
        "import os\nr = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\n"
        "for _ in range(3000):\n    os.write(1, b'x')\n    try: os.read(r, 9)\n    except BlockingIOError: pass",
        "import socket as s\na, b = s.socketpair()\ns.send_fds(a, [b'x'], [1, a.fileno(), b.fileno()])",
    ],
)
async def test_a_program_cannot_make_the_sandbox_fail(sandbox: Sandbox, folder: Path, program: str) -> None:
    reports = await run(sandbox, program, "x" * 3_000_000)
    assert reports[0]["status"] in ("exited", "disk_limit"), reports[0]["stderr"]
    assert [*folder.iterdir()] == []  # noqa: ASYNC240


@pytest.mark.parametrize(
    "program",
    [
        "import atexit, io, sys\nb = sys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(b.getvalue()))\nprint(5)",
        "out = open(1, 'w', closefd=False)\nout.write('5\\n')",
        "import sys\nprint(5)\nsys.stdout = None",
        "import concurrent.futures as f\np = f.ThreadPoolExecutor(1)\np.submit(print, 5)",
        "import asyncio\nl = asyncio.new_event_loop()\nl.run_until_complete(l.run_in_executor(None, print, 5))",
    ],
)
async def test_what_a_program_has_written_arrives(sandbox: Sandbox, program: str) -> None:
    [report] = await run(sandbox, program)
    assert (report["status"], report["code"], report["stdout"]) == ("exited", 0, "5\n")


async def test_folders_removal_follows_no_link_of_a_program_without_landlock(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir(mode=0o755)
    (tmp_path / "outside" / "file").touch()
    sandbox = Sandbox(at_once=1, landlock=False)
    [report] = await run(sandbox, f"import os; os.symlink({str(tmp_path / 'outside')!r}, 'link'); print('linked')")
    sandbox.close()
    assert report["stdout"] == "linked\n"
    assert (tmp_path / "outside" / "file").exists()
    assert [*folder.iterdir()] == []  # noqa: ASYNC240


async def test_endless_output_ends_the_program(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        [report] = await run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
        assert report["status"] == "output_limit"
        assert len(report[stream]) == 10_000


async def test_a_program_ends_when_its_request_is_given_up(sandbox: Sandbox, folder: Path) -> None:
    asked = asyncio.create_task(run(sandbox, "while True: pass", seconds=50))
    while not [*folder.iterdir()]:  # noqa: ASYNC110, ASYNC240  a folder has no event
        await asyncio.sleep(0.01)
    asked.cancel()
    async with asyncio.timeout(30):
        while [*folder.iterdir()]:  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)


def test_files_of_a_program_are_removed_after_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    before = children(os.getpid())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cell, "_remove", lambda _: left.extend(children(os.getpid())))
    service, its = socket.socketpair()
    with its, service:
        service.sendall(
            cell.encode(cell.Feed("", 50.0, 1000)) + cell.encode(cell.Job("run", "while 1: 1", DEFAULT_LIMITS))
        )
        service.close()  # The service gives the request up.
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            with pytest.raises(BrokenPipeError):
                cell._keep(its, None)
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, handler)
    assert left == before


async def test_the_stem_process_is_started_again(sandbox: Sandbox) -> None:
    await run(sandbox, "")
    assert sandbox._process is not None
    sandbox._process.kill()
    sandbox._process.wait()
    [report] = await run(sandbox, "print(1)")
    assert report["stdout"] == "1\n"


# --- Tests of a program -----------------------------------------------------------------------------------------------

SORTS = """
import math
def f(xs, *, reverse=False):
    if not xs: raise ValueError('empty')
    return sorted(xs, reverse=reverse)
"""


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        ("assert f([2, 1]) == [1, 2]\nassert f((2, 1), reverse=True) == [2, 1]", 0),
        ("assert f([2, 1]) == [2, 1]", 1),
        ("from program import f as g\nassert g([1]) == [1]", 0),
        ("import program\nassert program.f({3}) == [3]", 0),
        ("try:\n    f([])\nexcept ValueError as error:\n    assert str(error) == 'empty'\nelse:\n    assert False", 0),
        ("assert math.floor(f([2.5])[0]) == 2", 0),
        ("missing()", 1),
    ],
)
async def test_tests_call_the_programs_functions(sandbox: Sandbox, tests: str, code: int) -> None:
    report = await verdict(sandbox, SORTS, tests)
    assert (report["status"], report["code"]) == ("exited", code), report["stderr"]


async def test_plain_values_pass_between_a_program_and_its_tests(sandbox: Sandbox) -> None:
    values = (
        "(1, -2**70, 1.5, float('inf'), True, None, 'ä', b'x', [1], {'a': (1,)}, {1, 2}, frozenset([1]), 1j, range(3))"
    )
    report = await verdict(
        sandbox, "def same(x): return x", f"v = {values}\nassert same(v) == v\nassert same(v)[4] is True"
    )
    assert report["code"] == 0, report["stderr"]


async def test_instances_of_subclasses_pass_as_the_plain_values_that_they_equal(sandbox: Sandbox) -> None:
    program = (
        "import collections as c\ndef f():\n"
        "    d = c.defaultdict(c.Counter)\n    d['a']['b'] += 2\n"
        "    return d, c.OrderedDict(a=1), c.namedtuple('P', 'x y')(1, 2), type('L', (list,), {})([3])"
    )
    tests = (
        "v = f()\nassert v == ({'a': {'b': 2}}, {'a': 1}, (1, 2), [3])\n"
        "assert [type(one) for one in v] == [dict, dict, tuple, list]"
    )
    report = await verdict(sandbox, program, tests)
    assert report["code"] == 0, report["stderr"]


CHEATS = {
    "exit at once": "import os\nos._exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "end when called": "import sys\ndef f(x): sys.exit(0)",
    "replace what tests use": "def abs(x): return 0\nclass AssertionError(Exception): pass\ndef f(x): return 9",
    "equal everything": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "equal everything as a list": "class E(list):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "equal everything as a number": "class E(int):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "send code": (
        "import os, pickle, struct\nclass E:\n    def __reduce__(self): return os._exit, (0,)\n"
        "def f(x):\n    b = pickle.dumps(('value', E()))\n    os.write(4, struct.pack('!I', len(b)) + b)\n    return 1"
    ),
    "name a builtin as its own": (
        "import os, pickle, struct\n"
        "b = pickle.dumps((['f', 'abs', 'AssertionError', '__builtins__'], {'abs': 'math'}))\n"
        "os.write(4, struct.pack('!I', len(b)) + b)\nimport time\ntime.sleep(1000)"
    ),
    "end the tests' loops": "def f(x): raise StopIteration",
    "never answer": "import time\ndef f(x): time.sleep(1000)",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_program_cannot_pass_tests_that_it_fails(sandbox: Sandbox, cheat: str) -> None:
    limits = Limits(seconds=2.0, memory_bytes=256 * MIB, output_bytes=10_000)
    answer = await sandbox.run(Work(CHEATS[cheat], [], "assert abs(f(3) - 4) < 1e-6", {}, limits))
    assert (answer["tests"]["status"], answer["tests"]["code"]) != ("exited", 0)


async def test_a_program_cannot_read_its_tests(sandbox: Sandbox) -> None:
    program = f"{SEES}\nimport os\ndef f(backwards): return sees(backwards), os.listdir()"
    report = await verdict(sandbox, program, "marker_of_the_tests = 1\nassert f('stset_eht_fo_rekram') == (False, [])")
    assert report["code"] == 0, report["stderr"]


@pytest.mark.parametrize(("runtime", "output"), [("runsc", "root\n"), ("runc", ""), ("", "")])
async def test_only_gvisor_runs_without_landlock(folder: Path, runtime: str, output: str) -> None:
    app = create_app({"SANDBOX_RUNTIME": runtime})
    async with app.router.lifespan_context(app):
        [report] = await run(app.state.sandbox, "print(open('/etc/passwd').read(4))")
    assert report["stdout"] == output, report
    assert (DENIED in report["stderr"]) == (output == "")


# --- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def http(sandbox: Sandbox) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app({})
    app.state.sandbox = sandbox
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
        yield client


async def test_a_request_is_answered_with_a_report_of_each_run(http: httpx.AsyncClient) -> None:
    body = {"program": "print(input())", "runs": [{"stdin": "a"}, {}], "limits": {"seconds": 9}, "tests": "assert 1"}
    answer = await http.post("/run", json=body)
    assert answer.status_code == 200
    assert [(run["status"], run["code"], run["stdout"]) for run in answer.json()["runs"]] == [
        ("exited", 0, "a\n"),
        ("exited", 1, ""),
    ]
    assert set(answer.json()["tests"]) == {
        "status",
        "code",
        "stdout",
        "stderr",
        "seconds",
        "cpu_seconds",
        "memory_bytes",
    }
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.head("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "program"),
        ({"program": 1}, "program"),
        ([], "object"),
        ({"program": "", "prog": ""}, "prog"),
        ({"program": "", "runs": [{"stdin": 1}]}, "stdin"),
        ({"program": "", "runs": [{"args": []}]}, "runs"),
        ({"program": "", "runs": [{}] * (MAX_RUNS + 1)}, "runs"),
        ({"program": "", "tests": 5}, "tests"),
        ({"program": "", "files": {"../x": ""}}, "files"),
        ({"program": "", "files": {"/x": ""}}, "files"),
        ({"program": "", "files": {"a/../../x": ""}}, "files"),
        ({"program": "", "files": {"a": "", "a/b": ""}}, "files"),
        ({"program": "", "files": {"\u6587" * 100: ""}}, "files"),
        ({"program": "", "files": {"a": 1}}, "files.a"),
        ({"program": "", "limits": {"seconds": 0}}, "limits.seconds"),
        ({"program": "", "limits": {"seconds": 1e9}}, "limits.seconds"),
        ({"program": "", "limits": {"seconds": True}}, "limits.seconds"),
        ({"program": "", "limits": {"memory_bytes": 1000}}, "limits.memory_bytes"),
        ({"program": "", "limits": {"cores": 1}}, "limits"),
        ({"program": "", "\ud800": 1}, "unknown"),
    ],
)
async def test_a_wrong_request_is_refused_and_names_the_field(http: httpx.AsyncClient, body: Any, named: str) -> None:
    answer = await http.post("/run", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_request")
    assert named in answer.json()["error"]["message"]


async def test_bodies_that_are_no_json_or_too_large_are_refused(http: httpx.AsyncClient) -> None:
    kind = {"Content-Type": "application/json"}
    assert (await http.post("/run", content=b"{", headers=kind)).status_code == 422
    assert (await http.post("/run", content=b"[" * 100_000, headers=kind)).status_code == 422
    assert (await http.post("/run", content=b" " * (MAX_BODY_BYTES + 1), headers=kind)).status_code == 413
    assert (await http.post("/run", content=b'{"program": ""}')).status_code == 415


async def test_client_that_leaves_within_its_body_is_no_error() -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/run", "query_string": b"", "headers": headers}
    await create_app({})(scope, receive, send)
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("name", "value"), [("SANDBOX_PORT", "none"), ("SANDBOX_AT_ONCE", "0"), ("SANDBOX_AT_ONCE", "-1")]
)
def test_wrong_settings_end_the_service_with_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    from gristmill_sandbox.__main__ import main

    def serve(*_: object) -> None:
        pytest.fail("the service starts")

    monkeypatch.setattr("gristmill_sandbox.__main__._serve", serve)
    monkeypatch.setenv("SANDBOX_PORT", "0")
    monkeypatch.setenv(name, value)
    assert main() == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert os.environ[name] == value
