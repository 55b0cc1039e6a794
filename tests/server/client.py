"""vLLM in a separate process, as tests drive it: folders are loaded one after another, answers are JSON.

    with Server(python, scratch) as server:
        server.load("model-fp8")
        server.score([[1, 2, 3]])

`engine/driver.py` is the other side. Whatever happens to it becomes one sentence: `ServerDied` for the process,
`ServerRefused` for a folder or command that vLLM raised on. Leaving the `with` block ends the process and its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parent / "engine" / "driver.py"
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0  # for one command; a load takes 5 to 10 on an idle core
END_SECONDS = 10.0

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: tests compare the weights in it
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # New memory holds 0x41 (12 in BF16 and fp32, 2.25 in E4M3): a parameter that gets no weights would otherwise
    # take those that the previous folder left there, and its answers could be right.
    "MALLOC_PERTURB_": str(0xFF ^ 0x41),
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerDied(Exception):
    """The process did not start, ended, or did not answer in time. It has been stopped."""


class ServerRefused(Exception):
    """vLLM raised; the process serves the next command."""


class Server:
    """A running `engine/driver.py`.

    Args:
        environment: the virtual environment that has vLLM.
        scratch: a folder for stderr and for temporary files of the process.
        driver: the script to run.
        start_seconds, answer_seconds: how long the start and one command may take.

    Raises ServerDied if it does not start.
    """

    def __init__(
        self,
        environment: Path,
        scratch: Path,
        driver: Path = DRIVER,
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        cache = (
            environment / "cache"
        )  # compiled code, 20 CPU seconds; in the environment, so that no other one reads it
        places = {"TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "VLLM_CACHE_ROOT": cache / "vllm"}
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("VLLM_")}
        self.stderr = scratch / "stderr.txt"
        python = environment / "bin" / "python"
        self._answers, answers = os.pipe()
        try:
            with self.stderr.open("wb") as stderr:
                self.process = subprocess.Popen(
                    [python, driver, str(answers)],
                    stdin=subprocess.PIPE,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(answers,),
                    env={**variables, **ENVIRONMENT, **{k: str(v) for k, v in places.items()}},
                    start_new_session=True,  # a group, which `_kill` stops with its children
                )
        except OSError as error:
            os.close(self._answers)
            raise ServerDied(f"The server did not start: {python}: {error.strerror}.") from error
        finally:
            os.close(answers)
        self._read, self._seconds = b"", answer_seconds
        self._answer("start", start_seconds)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process by the end of its input; stop it and its children if it does not react."""
        with contextlib.suppress(BrokenPipeError):  # bytes of a command that it did not read
            self.process.stdin.close()
        self._wait()
        self._kill()

    def load(self, folder: Path, kernel: str = "") -> dict[str, int]:
        """See `Driver.load`."""
        return self._ask("load", folder=str(Path(folder).absolute()), kernel=kernel)

    def score(self, rows: list[list[int]]) -> list[list[float]]:
        """See `Driver.score`."""
        return self._ask("score", rows=rows)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """See `Driver.generate`."""
        return self._ask("generate", prompts=prompts, tokens=tokens)

    def chat(self, question: str, tokens: int) -> list[int]:
        """See `Driver.chat`."""
        return self._ask("chat", question=question, tokens=tokens)

    def compare(self) -> dict[str, int]:
        """See `Driver.compare`."""
        return self._ask("compare")

    def update(self, folder: Path) -> None:
        """See `Driver.update`."""
        self._ask("update", folder=str(Path(folder).absolute()))

    def versions(self) -> dict[str, str]:
        """See `Driver.versions`."""
        return self._ask("versions")

    def _ask(self, command: str, **arguments: Any) -> Any:
        line = json.dumps({"do": command, **arguments}) + "\n"
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the pipe was closed by an earlier failure
            raise self._death(command) from None
        return self._answer(command, self._seconds)

    def _answer(self, command: str, seconds: float) -> Any:
        """The next line of answers. Raises ServerDied at their end or after `seconds`, ServerRefused for an error."""
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._kill()
                raise ServerDied(f"The server did not answer {command!r} within {seconds:g} s and was stopped.")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise self._death(command)
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise ServerRefused(answer["error"])
        return answer["value"]

    def _death(self, command: str) -> ServerDied:
        self._wait()  # before a kill replaces its exit code
        self._kill()
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.stderr.read_text(errors="replace").strip().splitlines()
        last = f"the last line of its stderr: {lines[-1]}" if lines else "its stderr is empty"
        return ServerDied(
            f"The server {'did not start' if command == 'start' else f'died in {command!r}'}: it {how}; {last}"
        )

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)

    def _kill(self) -> None:
        """Stop the group, wait for the process and close the pipes."""
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
