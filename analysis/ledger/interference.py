"""How much longer decode steps took because others' prompts ran in them: a fit over the steps without any."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.ledger.trace import Trace

_ROUNDING = 1e-9  # of a sum of squares
_FEWEST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Interference:
    """How much longer a decode step took because others' prompts ran in it: an estimate, and marked so.

    The forward of a decode-only step takes ``base + per_sequence * sequences + per_token * KV tokens`` ns, none of them
    below 0, by least squares over the run's decode-only steps; ``error_ns`` is the standard deviation of the residuals
    and ``steps`` how many steps the fit saw. Mixed steps, by sequence number ``seqs``, took ``excess_ns`` longer than
    the fit. Only steps that were launched in one way are compared, the way of most mixed ones: a step that is faster
    because it ran as a captured graph tells nothing of one that did not.
    """

    base_ns: float
    per_sequence_ns: float
    per_token_ns: float
    error_ns: float
    steps: int
    seqs: Ints
    excess_ns: Ints


def fit_interference(trace: Trace) -> Interference | None:
    """Fit the run's decode-only steps; None when there are fewer than twenty like the mixed ones."""
    steps = trace.step_loads
    forward, prompts, decoding = (steps[name].to_numpy() for name in ("forward_ns", "prompts", "decoding"))
    alone, mixed = (forward > 0) & (prompts == 0), (forward > 0) & (prompts > 0) & (decoding > 0)
    graph = steps["graph"].to_numpy()
    alike = graph == np.bincount(graph[mixed if mixed.any() else alone], minlength=1).argmax()
    alone, mixed = alone & alike, mixed & alike
    if np.count_nonzero(alone) < _FEWEST_STEPS:
        return None
    design = np.column_stack([np.ones(len(steps)), decoding, steps["kv_tokens"]])
    weights = least_squares(design[alone], forward[alone])
    residual = forward - design @ weights
    base, per_sequence, per_token = weights.tolist()
    return Interference(
        base_ns=base,
        per_sequence_ns=per_sequence,
        per_token_ns=per_token,
        error_ns=float(np.std(residual[alone])),
        steps=int(np.count_nonzero(alone)),
        seqs=steps["step"].to_numpy()[mixed],
        excess_ns=np.clip(residual, 0, None)[mixed].astype(np.int64),
    )


def least_squares(design: Floats, values: Floats) -> Floats:
    """The weights, none of them negative, with the smallest sum of squares: the best of all choices of columns.

    ``design`` is (rows, columns), with few columns. The best of the choices whose own solution has nothing negative is
    the constrained optimum (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). Where columns say the
    same (each sequence has as many KV tokens) the fewest and first are taken: rounding does not choose.
    """
    columns = design.shape[1]
    best, least = np.zeros(columns), float(values @ values)
    for chosen in sorted(itertools.product((True, False), repeat=columns), key=sum):
        weights = np.zeros(columns)
        weights[list(chosen)], *_ = np.linalg.lstsq(design[:, chosen], values, rcond=None)
        left = values - design @ weights
        if (weights >= 0).all() and float(left @ left) < least * (1 - _ROUNDING):
            best, least = weights, float(left @ left)
    return best
