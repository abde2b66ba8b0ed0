"""Training a small net with numpy, so that it can be cut anywhere: the same state goes on to the same bits.

The state is all there is: the weights, what the Adam optimizer remembers of each, the random generator that picks the
examples, and the number of steps taken. Nothing else (no clock, no global generator) has a say in what comes next.

numpy is loaded when something is trained and not before: whoever only reads this file need not have it.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

INPUTS, HIDDEN, EXAMPLES, EXAMPLES_PER_STEP = 8, 32, 1024, 64
LEARNING_RATE, DECAY_OF_MEAN, DECAY_OF_SQUARE, TINY = 0.01, 0.9, 0.999, 1e-8
_EXAMPLES_SEED = 20_000

Arrays = dict[str, "np.ndarray"]
State = dict[str, Any]
"""``step``, ``weights``, ``means`` and ``squares`` (Adam's, of each weight's slopes), ``random`` (the generator's)."""


def begin(seed: int) -> State:
    """The state before the first step."""
    import numpy as np

    random = np.random.default_rng(seed)
    weights = {
        "in": random.normal(size=(INPUTS, HIDDEN)) / np.sqrt(INPUTS),
        "in_bias": np.zeros(HIDDEN),
        "out": random.normal(size=HIDDEN) / np.sqrt(HIDDEN),
        "out_bias": np.zeros(1),
    }
    return {
        "step": 0,
        "weights": weights,
        "means": {name: np.zeros_like(weight) for name, weight in weights.items()},
        "squares": {name: np.zeros_like(weight) for name, weight in weights.items()},
        "random": random.bit_generator.state,
    }


def advance(state: State, steps: int) -> State:
    """The state that many steps later; the one that was given is not touched."""
    import numpy as np

    random = np.random.default_rng()
    random.bit_generator.state = state["random"]
    inputs, answers = _examples()
    step, weights, means, squares = (state[part] for part in ("step", "weights", "means", "squares"))
    for _ in range(steps):
        picked = random.integers(0, EXAMPLES, EXAMPLES_PER_STEP)
        slopes = _slopes(weights, inputs[picked], answers[picked])
        step += 1
        means = {name: _decayed(means[name], slope, DECAY_OF_MEAN) for name, slope in slopes.items()}
        squares = {name: _decayed(squares[name], slope**2, DECAY_OF_SQUARE) for name, slope in slopes.items()}
        weights = {
            name: weight
            - LEARNING_RATE
            * (means[name] / (1 - DECAY_OF_MEAN**step))
            / (np.sqrt(squares[name] / (1 - DECAY_OF_SQUARE**step)) + TINY)
            for name, weight in weights.items()
        }
    return {
        "step": step,
        "weights": weights,
        "means": means,
        "squares": squares,
        "random": random.bit_generator.state,
    }


def accuracy(state: State) -> float:
    """How many of the examples the net gets right, from 0 to 1."""
    inputs, answers = _examples()
    _, guesses = _forward(state["weights"], inputs)
    return float(((guesses > 0.5) == (answers > 0.5)).mean())


def pack(state: State) -> bytes:
    """A state as a file in numpy's own format: the same state makes the same bytes."""
    import numpy as np

    arrays = {
        f"{part}.{name}": array
        for part in ("weights", "means", "squares")
        for name, array in state[part].items()
    }
    rest = json.dumps({"step": state["step"], "random": state["random"]})
    file = io.BytesIO()
    np.savez(file, rest=np.array(rest), **arrays)
    return file.getvalue()


def unpack(packed: bytes) -> State:
    """The state that was packed, bit by bit."""
    import numpy as np

    state: State = {"weights": {}, "means": {}, "squares": {}}
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        state |= json.loads(file["rest"].item())
        for label in file.files:
            part, _, name = label.partition(".")
            if name:
                state[part][name] = file[label]
    return state


# -- the net -----------------------------------------------------------------------------------------------------


def _examples() -> tuple[np.ndarray, np.ndarray]:
    """Points, and whether their first two coordinates have the same sign: no straight line tells that."""
    import numpy as np

    inputs = np.random.default_rng(_EXAMPLES_SEED).normal(size=(EXAMPLES, INPUTS))
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).astype(np.float64)


def _forward(weights: Arrays, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the hidden layer makes of the inputs, and the guesses, from 0 to 1."""
    import numpy as np

    hidden = np.maximum(inputs @ weights["in"] + weights["in_bias"], 0)
    return hidden, 1 / (1 + np.exp(-(hidden @ weights["out"] + weights["out_bias"])))


def _slopes(weights: Arrays, inputs: np.ndarray, answers: np.ndarray) -> Arrays:
    """How the loss (cross-entropy) changes with each weight."""
    hidden, guesses = _forward(weights, inputs)
    wrong = (guesses - answers) / len(answers)
    back = (wrong[:, None] * weights["out"]) * (hidden > 0)
    return {
        "in": inputs.T @ back,
        "in_bias": back.sum(axis=0),
        "out": hidden.T @ wrong,
        "out_bias": wrong.sum(keepdims=True),
    }


def _decayed(mean: np.ndarray, newest: np.ndarray, decay: float) -> np.ndarray:
    return decay * mean + (1 - decay) * newest
