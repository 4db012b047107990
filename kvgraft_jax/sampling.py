"""Choosing a token: a pure function of (logits, seed, sample index, position).

Greedy takes the first maximum. Otherwise: temperature, then top-k (ties go to
the lower id), then top-p over the survivors, then one draw. Survivors stand in
one order, descending logit and ascending id, and their weights are summed in
that order. Nothing here keeps state, so a draw is the same fresh, grafted, in
a batch or alone.

The draw has the same bits on every platform: it is made of float64 additions,
subtractions, multiplications, divisions and comparisons alone, each a
separate correctly rounded operation, and of SHA-256. In particular `exp` is
the polynomial below and not that of libm or of NumPy, whose last bit depends
on the version and on the instruction set. (`kl_divergence` and
`log_softmax_at` are figures to report and use `log` of the platform.)
"""

import dataclasses
import math
import numbers
from typing import Any

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import hashing

_LOG2_E = float.fromhex('0x1.71547652b82fep+0')
# ln 2 in two parts; the high one has 32 bits, so n * _LN2_HIGH is exact.
_LN2_HIGH = float.fromhex('0x1.62e42feep-1')
_LN2_LOW = float.fromhex('0x1.a39ef35793c76p-33')
# Taylor: on |r| <= ln(2) / 2 the first term left out is below 5e-18.
_EXP_TERMS = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))
# Weights below exp(-700) of the largest are zero: no subnormals, ever.
_EXP_FLOOR = -700.0


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How tokens are chosen.

  Attributes:
    temperature: divides the logits; 0 is greedy and ignores the rest.
    top_k: candidates kept, the largest first; 0 keeps all.
    top_p: keeps the fewest largest candidates that hold this probability.
    seed: of the draws, in [0, 2^64).
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0

  def check(self) -> None:
    """Raises UsageError, naming the first value out of its range."""
    _check_real('temperature', self.temperature)
    if not 0.0 <= self.temperature < math.inf:
      _refuse('temperature', 'a finite number >= 0', self.temperature)
    _check_count('top_k', self.top_k)
    _check_real('top_p', self.top_p)
    if not 0.0 < self.top_p <= 1.0:
      _refuse('top_p', 'a number in (0, 1]', self.top_p)
    _check_count('seed', self.seed)


def sample(
    logits: np.ndarray,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
) -> int:
  """Returns the token id chosen from one row of logits.

  Args:
    logits: float32 [V], one sequence's row.
    temperature: see `SamplingParams`.
    top_k: see `SamplingParams`.
    top_p: see `SamplingParams`.
    seed: see `SamplingParams`.
    sample_index: number of the sample among those drawn with one seed.
    position: absolute position that the chosen token will have.

  Raises:
    UsageError: if a parameter is out of its range.
    NumericsError: if a logit is not finite.
  """
  SamplingParams(temperature, top_k, top_p, seed).check()
  _check_count('sample_index', sample_index)
  _check_count('position', position)
  logits = _finite_row('logits', logits)
  if temperature == 0.0:
    return int(np.argmax(logits))

  ids = _top_ids(logits, top_k)
  kept = logits[ids].astype(np.float64)
  with np.errstate(over='ignore'):  # a tiny temperature: -inf, weight 0
    weights = _exp((kept - kept[0]) / float(temperature))
  cumulative = np.cumsum(weights)  # first to last, one addition each
  if top_p < 1.0:
    count = np.searchsorted(cumulative, top_p * cumulative[-1], 'left') + 1
    cumulative = cumulative[:count]
  target = uniform(seed, sample_index, position) * cumulative[-1]
  return int(ids[np.searchsorted(cumulative, target, 'right')])


def uniform(seed: int, sample_index: int, position: int) -> float:
  """Returns a multiple of 2^-53 in [0, 1): 53 bits of SHA-256.

  Args:
    seed: in [0, 2^64), as are the other two.
    sample_index: number of the sample.
    position: absolute position.
  """
  parts = (int(v).to_bytes(8, 'little') for v in (seed, sample_index, position))
  digest = hashing.sha256('kvgraft.sample', *parts)
  return math.ldexp(int(digest[:16], 16) >> 11, -53)


def kl_divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
  """Returns KL(softmax(p) || softmax(q)) in nats; 0.0 for equal rows.

  With d = q - p less its mean under p, the divergence is
  log(1 + sum p (exp(d) - 1 - d)): every term is positive, so nothing cancels
  and rows that differ in the last bit of float64 still give a sensible value.

  Args:
    p_logits: float32 or float64 [V].
    q_logits: same.

  Raises:
    NumericsError: if a logit is not finite.
  """
  p_row = _finite_row('p_logits', p_logits).astype(np.float64)
  q_row = _finite_row('q_logits', q_logits).astype(np.float64)
  if p_row.shape != q_row.shape:
    raise errors.UsageError(
        f'kl_divergence: expected rows of one size, found {p_row.size} and'
        f' {q_row.size}'
    )
  p = np.exp(p_row - _logsumexp(p_row))
  d = q_row - p_row
  d -= np.cumsum(p * d)[-1]
  # Below 1e-3 the next term of the series is less than 1e-14 of the first.
  series = d * d * (0.5 + d * (1 / 6 + d * (1 / 24 + d / 120)))
  with np.errstate(over='ignore'):  # Both are computed, one is chosen.
    excess = np.where(abs(d) < 1e-3, series, np.expm1(np.minimum(d, 700)) - d)
  return math.log1p(float(np.cumsum(p * excess)[-1]))


def log_softmax_at(logits_row: np.ndarray, token: int) -> float:
  """Returns the log-probability of `token` in nats, in float64.

  Args:
    logits_row: float32 [V].
    token: id in [0, V).

  Raises:
    UsageError: if the id is out of range.
    NumericsError: if a logit is not finite.
  """
  row = _finite_row('logits_row', logits_row).astype(np.float64)
  if not 0 <= token < row.size:
    _refuse('token', f'an id in [0, {row.size})', token)
  return float(row[token]) - _logsumexp(row)


def _top_ids(logits: np.ndarray, top_k: int) -> np.ndarray:
  """Returns the `top_k` ids (0: all) by descending logit, ascending id."""
  ids = np.arange(logits.size)
  if 0 < top_k < logits.size:
    # The k-th largest value bounds the candidates; its ties are cut below.
    bound = np.partition(logits, logits.size - top_k)[logits.size - top_k]
    ids = np.flatnonzero(logits >= bound)
  order = np.argsort(-logits[ids], kind='stable')
  return ids[order][: top_k or None]


def _exp(x: np.ndarray) -> np.ndarray:
  """Returns exp of float64 `x` <= 0, within 2 units in the last place."""
  zero = x < _EXP_FLOOR
  x = np.where(zero, 0.0, x)
  n = np.rint(x * _LOG2_E)
  r = (x - n * _LN2_HIGH) - n * _LN2_LOW
  value = np.full_like(r, _EXP_TERMS[0])
  for term in _EXP_TERMS[1:]:
    value = value * r + term  # two ufuncs: never contracted to one rounding
  power = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
  return np.where(zero, 0.0, value * power)


def _logsumexp(row: np.ndarray) -> float:
  top = row.max()
  return float(top) + math.log(float(np.cumsum(_exp(row - top))[-1]))


def _finite_row(name: str, row: np.ndarray) -> np.ndarray:
  row = np.asarray(row)
  if row.ndim != 1 or not row.size:
    _refuse(name, 'one non-empty row [V]', f'shape {list(row.shape)}')
  finite = np.isfinite(row)
  if not finite.all():
    first = int(np.argmin(finite))
    raise errors.NumericsError(
        f'{name}: expected finite values, found {row[first]} at id {first}'
        f' ({int((~finite).sum())} of {row.size} not finite); the weights or'
        ' the numerics are broken'
    )
  return row


def _check_real(name: str, value: Any) -> None:
  if not isinstance(value, numbers.Real) or isinstance(value, bool):
    _refuse(name, 'a number', value)


def _check_count(name: str, value: Any) -> None:
  if not isinstance(value, numbers.Integral) or isinstance(value, bool):
    _refuse(name, 'an integer', value)
  if not 0 <= value < 2**64:
    _refuse(name, 'an integer in [0, 2^64)', value)


def _refuse(name: str, expected: str, found: Any) -> None:
  raise errors.UsageError(f'{name}: expected {expected}, found {found}')
