"""The main file of a server, with a package of the test's own in SGLang's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from producer.engine.sglang.arguments import LAUNCH

FAKE = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/server_args.py": "def prepare_server_args(argv): return argv",
    "srt/utils.py": "def kill_process_tree(pid, include_parent=True): print('killed the rest', flush=True)",
    "launch_server.py": """
import logging, multiprocessing, os, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout)

def child(queue):
    try:
        from sgl_kernel.deep.inside import gemm, scalar_types
        word = scalar_types.uint4b8.name
        gemm(1)
    except NotImplementedError as problem:
        queue.put(str(problem))
    except ImportError as problem:
        queue.put(f"no kernels: {problem}")

def run_server(args):
    logging.info("server_args=%s", args)
    print("path", [p for p in sys.path if p.endswith("producer/engine/sglang")], "argv", len(sys.argv), "args", len(args), flush=True)
    if "--spawn" in args:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get(), flush=True)
        process.join()
    if "--stay" in args:
        print("staying", flush=True)
        time.sleep(600)
""",
}
HOST = """
import os, subprocess, sys
server = subprocess.Popen(sys.argv[1:], env={**os.environ, "ROLLSTREAM_ENGINE_HOST_PID": str(os.getpid())}, stdout=subprocess.PIPE, text=True)
for line in server.stdout:
    if "staying" in line:
        print(server.pid, flush=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in FAKE.items():
        path = tmp_path / "site" / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLSTREAM", "SGLANG"))}
    return kept | {"PYTHONPATH": str(tmp_path / "site")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_keys_come_from_the_environment_and_are_not_logged(environment: dict[str, str]):
    keys = {"ROLLSTREAM_ENGINE_KEY": "one-secret", "ROLLSTREAM_ENGINE_ADMIN_KEY": "another"}
    said = subprocess.run([sys.executable, str(LAUNCH), "--x", "1"], env=environment | keys, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "server_args=['--x', '1', '--api-key', '***', '--admin-api-key', '***']" in said
    assert "path [] argv 3 args 6" in said, "what lies beside the file is not importable, and the keys are in no command line"
    assert "killed the rest" in said


def test_without_keys_nothing_is_added(environment: dict[str, str]):
    said = subprocess.run([sys.executable, str(LAUNCH), "--x"], env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "server_args=['--x']" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cpu", "words"), [("1", "sgl_kernel.deep.inside.gemm is a compiled kernel"), ("", "no kernels: No module named 'sgl_kernel'")])
def test_on_a_cpu_every_process_of_the_server_does_without_kernels(environment: dict[str, str], cpu: str, words: str):
    command = [sys.executable, str(LAUNCH), "--spawn"]
    said = subprocess.run(command, env=environment | {"SGLANG_USE_CPU_ENGINE": cpu}, capture_output=True, text=True, check=True, timeout=500).stdout
    assert words in said


@pytest.mark.faults
def test_a_server_dies_with_its_host(environment: dict[str, str]):
    command = [sys.executable, "-c", HOST, sys.executable, str(LAUNCH), "--stay"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        server = int(host.stdout.readline())
        assert alive(server)
        host.send_signal(signal.SIGKILL)
        host.wait(60)
        while alive(server):
            time.sleep(0.01)


def test_a_server_whose_host_is_gone_already_does_not_start(environment: dict[str, str]):
    done = subprocess.run(
        [sys.executable, str(LAUNCH), "--stay"], env=environment | {"ROLLSTREAM_ENGINE_HOST_PID": "1"}, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (1, "")
