"""Reading JSON on several threads: msgspec must look at each type once, by one thread."""

from __future__ import annotations

import subprocess
import sys

RACE = """
import sys, threading
from stillframe.format.epochs import Parent
from stillframe.untrusted import decode_json
sys.setswitchinterval(1e-6)
data = b'{"epoch":1,"run":"0123abcd","sequence":1,"is_shared":true,"parent":null,"lineage":[]}'
together = threading.Barrier(16)
def work():
    together.wait()
    try:
        decode_json(data, Parent)
    except ValueError:
        pass
threads = [threading.Thread(target=work) for _ in range(16)]
for each in threads: each.start()
for each in threads: each.join()
"""


def test_the_first_look_at_a_type_by_many_threads_ends_no_process() -> None:
    """A keeper that asked about many saves at once died of SIGSEGV in one of four such processes."""
    for _ in range(10):
        found = subprocess.run([sys.executable, "-c", RACE], capture_output=True, timeout=60)
        assert (found.returncode, found.stderr) == (0, b"")
