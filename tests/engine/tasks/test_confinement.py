"""Ways out of the confinement of a program, as root and as a user, with namespaces and without.

Each program does what it must not, and ends with an error of the kernel's. Where it escapes it says so, and
does no harm: signals are ones that nobody hears, and numbers are set to what they are.
"""

import ctypes
import errno
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from zerokl.engine.tasks import confinement, system_calls
from zerokl.verify.run_environment import PACKAGE_ROOT

LINUX, NAMES = sys.platform == "linux", "names and sizes of other files"
OPEN = [place for place in confinement.missing() if place != NAMES] if LINUX else ["anything"]
pytestmark = pytest.mark.skipif(bool(OPEN), reason=f"this kernel does not close {', '.join(OPEN)}")
NOBODY = 65534

# Runs programs in one process, and prints what they print, as JSON.
DRIVER = """
import json, os, sys, tempfile
work = json.load(sys.stdin)
tempfile.tempdir = work["package"]
sys.path.insert(0, work["package"])
from zerokl.engine.tasks import confinement
from zerokl.engine.tasks.run_python import ToolLimits, run_python
if not work["has_root"]:
    confinement.is_allowed = lambda places: False
is_closed = not confinement.missing()
print(json.dumps([is_closed, [run_python(p, ToolLimits(2, 1 << 29, 4000)) for p in work["programs"]]]))
"""

PRELUDE = """
import ctypes, fcntl, mmap, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = libc.shmat.restype = ctypes.c_long
file, parent = %r, os.getppid()
def call(name, *args):
    result = getattr(libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def raw(on_x86, elsewhere, *args):
    return call("syscall", on_x86 if os.uname().machine == "x86_64" else elsewhere, *args)
def size(n):
    return ctypes.c_size_t(n)
def pages(at, flags):
    return call("mmap", ctypes.c_void_p(at), size(4096), 3, 0x22 | flags, -1, ctypes.c_long(0))
def pair(family, kind):
    array = (ctypes.c_int * 2)()
    call("socketpair", family, kind, 0, array)
    return array[0]
def named(path):
    return struct.pack("H", 1) + path
"""

# What each program does after PRELUDE. `file` lies outside; `parent` is the process that has begun it.
SIGNALS = {
    "the owner of a pipe": "r, w = os.pipe(); fcntl.fcntl(r, 8, parent)",
    "the owner by another call": "r, w = os.pipe(); fcntl.fcntl(r, 15, struct.pack('ii', 1, parent))",
    "the owner by ioctl": "r, w = os.pipe(); call('ioctl', r, 0x8901, ctypes.byref(ctypes.c_int(parent)))",
    "the signal of an owner": "r, w = os.pipe(); fcntl.fcntl(r, 10, signal.SIGWINCH)",
    "a signal": "os.kill(parent, signal.SIGWINCH)",
    "a signal to a thread": "call('tgkill', parent, parent, 0)",
    "a handle of a process": "os.pidfd_open(parent)",
    "its priority": "os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent))",
    "its processors": "os.sched_setaffinity(parent, os.sched_getaffinity(parent))",
    "its limits": "import resource as r; r.prlimit(parent, r.RLIMIT_CORE)",
    "its memory": "call('process_vm_readv', parent, None, size(0), None, size(0), size(0))",
    "tracing": "call('ptrace', 0x4206, parent, None, None)",
}
OUTLIVES = {
    "shared memory": "call('shmget', 7, size(4096), 0o1666)",
    "semaphores": "call('semget', 7, 1, 0o1666)",
    "messages": "call('msgget', 7, 0o1666)",
    "a queue": "call('mq_open', b'/zerokl', 0o102, 0o666, None)",
    "a key": "raw(248, 217, b'user', b'a', b'b', size(1), -4)",
    "a keyring": "raw(250, 219, 1, None)",
    "a lock of a file": "f = open(os.__file__); fcntl.lockf(f, fcntl.LOCK_SH)",
    "a lock of flock": "f = open(os.__file__); fcntl.flock(f, fcntl.LOCK_SH)",
    "who has a lock": "f = open(os.__file__); fcntl.fcntl(f, fcntl.F_GETLK, b' ' * 32)",
    "a watch": "call('inotify_init1', 0)",
    "a file in memory": "os.memfd_create('a')",
}
NETWORK = {
    "datagrams to a path": "pair(1, 2)",
    "packets to a path": "pair(1, 5)",
    "a pair of another family": "pair(30, 1)",
    "a socket": "socket.socket()",
    "a stream to a path": "call('sendto', pair(1, 1), b'x', size(1), 0, named(file.encode()), 100)",
    "a stream with a name": "call('bind', pair(1, 1), named(b'\\0zerokl'), 9)",
    "a stream to a name": "call('connect', pair(1, 1), named(b'\\0zerokl'), 9)",
}
FILES = {
    "reading": "open(file)",
    "writing": "open(file, 'a')",
    "making empty": "os.truncate(file, 1)",
    "emptying a file of Python's": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC | os.O_EXCL)",
    "its time": "os.utime(file)",
    "an attribute": "os.setxattr(file, 'user.a', b'b')",
    "its mode": "os.chmod(file, 0o644)",
    "its owner": "os.chown(file, -1, -1)",
    "removing": "os.remove(file)",
    "a node": "os.mknod('a', 0o10666)",
    "another root": "os.chroot('.')",
}
PROGRAMS = {
    "bash": "os.execv('/bin/bash', ['bash', '-c', 'echo escaped'])",
    "Python": "os.execv(sys.executable, ['python', '-c', 'print(\"escaped\")'])",
    "the loader": "os.execv('/lib64/ld-linux-x86-64.so.2', ['ld.so', sys.executable, '-c', 'print(3)'])",
    "a copy": "copied = os.open('a', os.O_WRONLY | os.O_CREAT, 0o755); "
    "os.write(copied, open(sys.executable, 'rb').read()); os.close(copied); os.execv('a', ['a'])",
    "what it was given": "os.execv('/proc/self/fd/0', ['a'])",
    "a descriptor": "os.execve(os.open(sys.executable, 0), ['python', '-c', 'print(3)'], {})",
    "a process": "os.fork()",
    "a process by posix_spawn": "os.posix_spawn(sys.executable, ['python'], {})",
    # The one address with which a program may be executed.
    "the address": f"pages({system_calls.PATH_ADDRESS}, 0x10)",
    "the address as a wish": f"assert pages({system_calls.PATH_ADDRESS}, 0) == {system_calls.PATH_ADDRESS}",
    "the address without another": f"pages({system_calls.PATH_ADDRESS}, 0x100000)",
    "from the beginning": f"call('mmap', None, size({2 * system_calls.PATH_ADDRESS}), 3, 0x32, -1, size(0))",
    "a page that grows down": "pages(1 << 22, 0x100)",
    "a page that moves": (
        f"call('mremap', size(pages(0, 0)), size(4096), size(4096), 3, size({system_calls.PATH_ADDRESS}))"
    ),
    "a page that moves to a wish": (
        f"p, to = size(pages(0, 0)), size({system_calls.PATH_ADDRESS}); "
        "assert raw(25, 216, p, size(4096), size(4096), size(5), to) == to.value"
    ),
}
KERNEL = {
    "a namespace of users": "call('unshare', 0x10000000)",
    "a namespace of mounts": "call('unshare', 0x20000)",
    "a thread in a namespace": "raw(56, 220, size(0x30f00), 0)",
    "faults of pages": "raw(323, 282, 1)",
    "a filter": "call('prctl', 22, 1, 0, 0, 0)",
    "a terminal": "call('ioctl', 0, 0x5412, b'a')",
    "counters": "raw(298, 241, b' ' * 128, 0, -1, -1, 0)",
    "a personality": "call('personality', size(0x40000))",
    "more descriptors": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (65, 65))",
}
KINDS = {"signals": SIGNALS, "outlives": OUTLIVES, "network": NETWORK, "files": FILES, "programs": PROGRAMS}
KINDS["kernel"] = KERNEL
WAYS = [(kind, name) for kind, programs in KINDS.items() for name in programs]
# Every number that is not in the table, with arguments that do nothing.
ALL_CALLS = """
codes = {}
for number in %r:
    ctypes.set_errno(0)
    result = libc.syscall(number, -1, -1, -1, -1, -1, -1)
    codes.setdefault(ctypes.get_errno() if result == -1 else 'escaped', []).append(number)
print(sorted(codes))
"""
# Nobody but root can list or empty such a folder.
UNREADABLE = "os.mkdir('a', 0o700); open('a/b', 'w').close(); os.mkdir('c', 0o300); open('c/d', 'w').close()"
SEEN = "print([os.path.exists(p) for p in (file, '/proc/1', '/etc/passwd', os.__file__)])"


@pytest.fixture(scope="module")
def outside():
    """A folder that everybody can read, with a file that everybody may write to, and the package."""
    folder = Path(tempfile.mkdtemp(prefix="zerokl-test-"))
    folder.chmod(0o777)
    (folder / "file").write_text("42")
    (folder / "file").chmod(0o666)
    (folder / "zerokl").symlink_to(PACKAGE_ROOT)
    yield folder
    shutil.rmtree(folder)


def python_of(user: int) -> str | None:
    """A Python that a user may execute and that can read the package; None where there is none."""
    if user == os.geteuid():
        return sys.executable
    for python in (sys.executable, "/usr/bin/python3"):
        code = f"import os, sys; os.listdir({str(PACKAGE_ROOT)!r}); sys.exit(sys.version_info < (3, 11))"
        try:
            if subprocess.run([python, "-c", code], user=user, cwd="/", capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    return None


@pytest.fixture(
    scope="module",
    params=[(user, has_root) for user in ("this user", "nobody") for has_root in (True, False)],
    ids=lambda param: f"{param[0]}, {'namespaces' if param[1] else 'no namespaces'}",
)
def printed(request, outside) -> dict[str, str]:
    """What each program prints, by its kind and name."""
    name, has_root = request.param
    user = os.geteuid() if name == "this user" else NOBODY
    if user != os.geteuid() and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if (python := python_of(user)) is None:
        pytest.skip("no Python of this machine can be executed by nobody, or not with this package")
    prelude = PRELUDE % str(outside / "file")
    # Linux filters neither uretprobe nor uprobe: it ends whoever calls them (SIGILL).
    passed = {335, 336, *system_calls.allowed_calls(platform.machine()).values()}
    closed = [number for number in range(500) if number not in passed]
    programs = {f"{kind} {name}": KINDS[kind][name] + "\nprint('escaped')" for kind, name in WAYS}
    programs |= {"calls": ALL_CALLS % closed, "seen": SEEN, "unreadable": UNREADABLE}
    work = {
        "package": str(outside),
        "has_root": has_root,
        "programs": [prelude + program for program in programs.values()],
    }
    done = subprocess.run(
        [python, "-B", "-c", DRIVER],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        cwd="/",
        **({} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    is_closed, texts = json.loads(done.stdout)
    if has_root and not is_closed:
        pytest.skip("this kernel allows users no namespaces")
    return dict(zip(programs, texts, strict=True)) | {"has_root": has_root}


@pytest.mark.parametrize(("kind", "name"), WAYS, ids=lambda text: text)
def test_no_way_leads_out(printed, outside, kind, name):
    text = printed[f"{kind} {name}"]
    assert "escaped" not in text
    assert re.search(r"(OSError|PermissionError|FileNotFoundError): \[Errno (1|2|13|30|38|106)\]", text) or (
        name in ("the address as a wish", "more descriptors") and re.search("Error", text)
    ), text
    assert (outside / "file").read_text() == "42"


def test_no_call_beside_the_table_reaches_the_kernel(printed):
    assert printed["calls"] in ("[1, 38]\n", "[1]\n")


def test_nothing_is_left_of_a_folder_that_cannot_be_read(printed, outside):
    assert printed["unreadable"] == ""
    assert not [path.name for path in outside.iterdir() if path.name.startswith("zerokl-python-")]


def test_other_files_have_no_name_where_namespaces_are_allowed(printed):
    expected = [False, False, False, True] if printed["has_root"] else [True] * 4
    assert printed["seen"] == f"{expected}\n"


def test_control_a_kernel_without_namespaces_is_named(monkeypatch):
    monkeypatch.setattr(confinement, "is_allowed", lambda places: False)
    assert confinement.missing() == [NAMES]


def test_namespaces_are_used_where_the_kernel_allows_them():
    """Or nothing above would be tried with them."""
    limit = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL(None).unshare(0x10020000) != 0)
    refused = os.waitpid(child, 0)[1] != 0 or (limit.exists() and limit.read_text().strip() != "0")
    assert refused or NAMES not in confinement.missing()


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_calls_are_those_of_the_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"needs {HEADERS[machine]}, of the package linux-libc-dev")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in lines}
    if machine == "aarch64":
        numbers["newfstatat"] = numbers["fstatat"]
    calls = system_calls.allowed_calls(machine)
    assert len(calls) > 120
    assert {name: numbers.get(name) for name in calls} == calls


def test_a_filter_fits_in_what_the_kernel_takes():
    for machine in HEADERS:
        assert len(system_calls.call_filter(machine, 1)) // 8 < 4096


def answer_of(machine: str, name: str | int, *args: int, architecture: int | None = None) -> int:
    """What the filter of process 7 answers, computed here: a machine of each kind is rarely there."""
    number = name if isinstance(name, int) else system_calls.allowed_calls(machine)[name]
    kind = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine] if architecture is None else architecture
    given = struct.pack("<IIQ6Q", number, kind, 0, *args, *[0] * (6 - len(args)))
    lines = [*struct.iter_unpack("HBBI", system_calls.call_filter(machine, 7))]
    place = value = 0
    while True:
        code, if_true, if_false, k = lines[place]
        place += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("<I", given, k)
        elif code == 0x54:
            value &= k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            place += if_true if holds else if_false


KEY, FAR = system_calls.PATH_ADDRESS, 1 << 40
ALLOWED = {
    "read": [()],
    "execve": [(KEY,)],
    "mmap": [(0,), (FAR, 1, 3, 0x32), (1 << 22, 1, 3, 0x32)],
    "mremap": [(FAR, 1, 1, 1)],
    "clone": [(0x3D0F00,), (0x7D0F00,)],  # glibc, musl
    "kill": [(7,), (0,)],
    "fcntl": [(1, 1030)],
    "socketpair": [(1, 0x80001)],
    "openat": [(0, 0, 0x80241)],
    "prctl": [(15,)],
}
REFUSED = {
    "execve": [(KEY + 1,), (KEY + (1 << 32),)],
    "mmap": [(KEY,), (KEY, 1, 3, 0x32), (0, 2 * KEY, 3, 0x32), (FAR, 1, 3, 0x122)],
    "mremap": [(FAR, 1, 1, 3, KEY), (FAR, 1, 1, 5, KEY)],
    "clone": [(0x11,), (0x3D0F00 | 0x10000000,)],
    "kill": [(8,), (0xFFFFFFFF,)],
    "fcntl": [(1, 8)],
    "socketpair": [(1, 2), (2, 1)],
    "openat": [(0, 0, 0x200)],
    "prctl": [(22,)],
    434: [()],
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_of_each_machine_answers_as_its_rules_say(machine):
    for expected, calls in ((0x7FFF0000, ALLOWED), (0x50000 | errno.EPERM, REFUSED)):
        for name, arguments in calls.items():
            answers = [answer_of(machine, name, *args) for args in arguments]
            assert answers == [expected] * len(arguments), name
    assert answer_of(machine, 435) == 0x50000 | errno.ENOSYS
    assert answer_of(machine, 0x40000000) == 0x80000000, "x32"
    assert answer_of(machine, 0, architecture=0x40000003) == 0x80000000, "32 bits"
