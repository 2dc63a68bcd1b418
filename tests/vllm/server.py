"""Runs vLLM's OpenAI server from the same descriptions as `engine`: the engine and its worker are processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine import ARGUMENTS, EngineError, Run, environment

# Messages side by side, as this tokenizer of words has no roles.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Server(NamedTuple):
    """A server that answers."""

    url: str
    log: Path

    def scraped(self) -> str:
        """Return all that the server shows to Prometheus."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            return answer.read().decode()

    def ask(self, method: str) -> Any:
        """Return what each worker answers to a method; vLLM takes such requests in its development mode only."""
        asked = urllib.request.Request(f"{self.url}/collective_rpc", json.dumps({"method": method}).encode())
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)["results"]

    def metrics(self) -> dict[str, float]:
        """Return the counters that the server shows, without labels: of one engine and one model."""
        pairs = [line.rsplit(" ", 1) for line in self.scraped().splitlines() if not line.startswith("#")]
        return {name.split("{")[0].removeprefix("vllm:"): float(value) for name, value in pairs if "_pos" not in name}


@contextmanager
def serve(run: Run, *, timeout: float = 180) -> Iterator[Server]:
    """Start a server with a run's engine, wait until it is healthy, and stop it in the end.

    Args:
        run: The description; rounds, `prepare` and `probe` are not for servers.
        timeout: Seconds to wait for it.

    Raises:
        EngineError: it died or took too long.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    variables = environment(run) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with log.open("w") as sink:
            process = subprocess.Popen(
                [*command, *_flags(run)], env=variables, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log, timeout)
            yield Server(url, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                _kill_group(process.pid)


def _flags(run: Run) -> list[str]:
    arguments = ARGUMENTS | {"enable_prefix_caching": False, "chat_template": CHAT_TEMPLATE} | run.arguments
    arguments |= {"model": run.model, "speculative_config": run.speculative}
    flags: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise EngineError(f"no healthy server; exit code: {process.poll()}", log.read_text())


def _kill_group(leader: int) -> None:
    """Kill what a server left running: its engine is a process of its own."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
