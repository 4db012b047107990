"""What a run found, in sentences, from the figures of its ledger.

Each is a `note` line with the role `finding`; anybody derives them again from
the summaries in front of them. Words such as "flat" have their threshold here,
and what takes several offsets to judge is not said of fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import statistics
from typing import Any

from kvgraft_jax import findings_flywheel

ROLE = 'finding'
# Raised with every change of a sentence, so that older runs are not said to be
# wrong; a `note` without `rules` has 1.
VERSION = 1
# Across the offsets, largest median over smallest: below it, "flat".
FLAT = 2.0
# What changes with the offset is judged from so many, so far apart.
_OFFSETS, _SPREAD = 3, 16
_ROWS = 100  # Of fewer the 99th percentile is the maximum.
_BITS = {'bfloat16': 8, 'float32': 24, 'float64': 53}
_PUBLISHED = (
    'For comparison: a closed system publishes (arXiv:2607.14431, Gemma 4 12B'
    ' and 31B on GPUs, not checked here) a KL of about 0.015 for a moved block'
    ' and for a fresh computation at M alike, flat over M = 8, 128, 1,024 and'
    ' 4,096, and excludes several causes. Here: ')


def sentences(lines: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the findings of the parts that a ledger holds.

  Args:
    lines: of a run, all or those in front of its findings.
  """
  if lines[0]['body'].get('run') == 'flywheel':
    return findings_flywheel.sentences(lines)
  bodies = [(line['kind'], line['body']) for line in lines]
  return list(_Findings(
      bodies[0][1],
      {b['id']: b['value'] for kind, b in bodies if kind == 'summary'},
      {b['id']: b for kind, b in bodies if kind == 'case'},
      {b['id']: b['profile'] for kind, b in bodies if kind == 'profile'}))


def _numbers(values: Sequence[int]) -> str:
  return ', '.join(f'{v:,}' for v in values)


def random_weights(source: str) -> bool:
  """Tells whether a model's source says that its weights are random."""
  return source.startswith(('tiny', 'random'))


def version(lines: Sequence[Mapping[str, Any]]) -> int:
  """Returns the version of the sentences of such a run."""
  flywheel = lines[0]['body'].get('run') == 'flywheel'
  return findings_flywheel.VERSION if flywheel else VERSION


def derivable(
    body: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> bool:
  """Tells whether a `note` of a run is a finding by the present sentences."""
  return body.get('role') == ROLE and body.get('rules', 1) == version(lines)


class _Findings:
  """Iterates over the sentences."""

  def __init__(self, run, figures, cases, profiles):
    self.source = run['model']['source']
    self.config, self.f, self.cases = run['config'], figures, cases
    self.offsets = sorted(m for m in self.config['offsets'] if m)
    self.page = int(profiles.get('bfloat16', {}).get('page', 0))

  def __iter__(self) -> Iterator[str]:
    if random_weights(self.source):
      yield (f'The weights of {self.source} are random: these figures test the'
             ' software and say nothing of a language model.')
    for dtype in self.config['dtypes']:
      if f'fifty/{dtype}/rows' in self.f:
        yield self.grafts(dtype)
    for dtype in self.config['dtypes']:
      if f'invariance/{dtype}/results' in self.f:
        yield self.schedules(dtype)
    self.cases = {name: case for name, case in self.cases.items()
                  if f'study/{name}/own/rows' in self.f}
    if self.cases:
      yield self.own()
    if self.cases and self.offsets:
      yield from self.elsewhere()

  # Figures.

  def of(self, equal: str, rows: str) -> str:
    return f'{self.f[equal]:,} of {self.f[rows]:,}'

  def values(self, case: str, what: str, figure: str) -> list[float]:
    return [float(self.f[f'study/{case}/{what}/{m}/{figure}'])
            for m in self.offsets]

  def median(self, case: str, what: str, figure: str) -> float:
    return statistics.median(self.values(case, what, figure))

  def total(self, case: str, what: str, figure: str) -> int:
    return sum(self.f[f'study/{case}/{what}/{m}/{figure}']
               for m in self.offsets)

  def range(self, values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    if not low or not self.many:
      return f'{high:.2g}' if low == high else f'{low:.2g} to {high:.2g}'
    return (f'{low:.2g} to {high:.2g}, '
            + ('flat' if high < FLAT * low else 'not flat')
            + f' over M (largest over smallest {high / low:.1f})')

  @property
  def many(self) -> bool:
    """Whether there are offsets enough to judge what changes with them."""
    return len(self.offsets) >= _OFFSETS and (
        self.offsets[-1] >= _SPREAD * self.offsets[0])

  # Sentences.

  def grafts(self, dtype: str) -> str:
    p = f'fifty/{dtype}'
    text = (
        f'{dtype}: another process stored {self.config["tokens"]:,} tokens; of'
        f' {self.f[f"{p}/grafts/count"]} continuations grafted here'
        f' {self.of(f"{p}/equal", f"{p}/rows")} rows of logits have the SHA-256'
        ' of a fresh computation, argmax agrees in'
        f' {self.of(f"{p}/argmax_agree", f"{p}/rows")}, and the largest KL is'
        f' {self.f[f"{p}/kl_max"]} nats. The grafts computed'
        f' {self.f[f"{p}/grafts/computed"]:,} positions in all, which are their'
        ' tails.')
    p = f'prefix/{dtype}'
    if f'{p}/rows' in self.f:
      text += (f' Of the same artifact cut to'
               f' {_numbers(self.config["lengths"])} positions,'
               f' {self.of(f"{p}/equal", f"{p}/rows")} rows are equal.')
    return text

  def schedules(self, dtype: str) -> str:
    p = f'invariance/{dtype}'
    every = self.f[f'{p}/schedules']
    promised = self.f[f'{p}/promised/schedules']

    def leave(count):
      return ('the same keys, values and logits, bit for bit' if count == 1
              else f'{count} different results')

    text = (f'{dtype}: {every} ways to compute one text leave'
            f' {leave(self.f[f"{p}/results"])}.')
    if promised < every:
      text += (f' The self-test promises equality for {promised} of them, which'
               f' leave {leave(self.f[f"{p}/promised/results"])}.')
    return text

  def own(self) -> str:
    rows, equal = (sum(self.f[f'study/{c}/own/{figure}'] for c in self.cases)
                   for figure in ('rows', 'equal'))
    cases = f'{len(self.cases)} case{"s" * (len(self.cases) != 1)}'
    if equal == rows:
      return ('A block restored at its own position is exact: '
              f'{equal:,} of {rows:,} rows of logits behind it are equal, in'
              f' {cases} and at every offset M.')
    return ('A block restored at its own position is NOT always exact:'
            f' {equal:,} of {rows:,} rows of logits behind it are equal, in'
            f' {cases}.')

  def elsewhere(self) -> Iterator[str]:
    if 'base' in self.cases:
      yield from self.base()
    yield from self.rounding()
    if 'base' in self.cases:
      yield from self.factors()
    yield from self.slots()
    yield from self.angles()
    if 'base' in self.cases and self.many and not random_weights(self.source):
      seen = list(self.excluded())
      if seen:
        yield _PUBLISHED + '; '.join(seen) + '.'

  def base(self) -> Iterator[str]:
    for what, words in (
        ('moved', 'Elsewhere a block is not exact. Stored at 0, its keys turned'
         ' to M and restored there (bfloat16), it differs from a fresh'
         ' computation at M'),
        ('fresh', 'Nor is a fresh computation at M that at 0, though nothing'
         ' but the rotary positions differs: they are apart')):
      size = self.range(self.values('base', what, 'kl_median'))
      tail = ''
      if min(self.values('base', what, 'rows')) >= _ROWS:
        tail = (' the 99th percentile reaches'
                f' {max(self.values("base", what, "kl_p99")):.2g},')
      yield (
          f'{words} by a median KL in nats of {size};{tail} argmax'
          f' agrees in {self.total("base", what, "argmax_agree"):,} of'
          f' {self.total("base", what, "rows"):,} rows.')
    keys, equal = (self.total('base', 'moved', figure)
                   for figure in ('keys', 'keys_equal'))
    yield ('It begins in the first layer, whose inputs are the same: of its'
           f' turned keys {100 * equal / keys:.0f} % have the bits of fresh'
           ' ones. The others were rounded twice, at 0 and after turning.')

  def rounding(self) -> Iterator[str]:
    sizes = {
        self.cases[c]['dtype']: self.median(c, 'moved', 'max_abs_median')
        for c in ('base', 'float32', 'float64') if c in self.cases}
    if len(sizes) < 2 or not all(sizes.values()):
      return
    text = ('The size follows the number format, as rounding would have it: the'
            ' largest logit difference of a row, median over rows and offsets'
            ' of a moved block, is '
            + ', '.join(f'{size:.2g} in {dtype}'
                        for dtype, size in sizes.items()) + '.')
    for a, b in zip(list(sizes), list(sizes)[1:]):
      roundoff = 2.0 ** (_BITS[b] - _BITS[a])
      text += (f' From {a} to {b} it shrinks {sizes[a] / sizes[b]:.2g} times,'
               f' the unit roundoff {roundoff:.2g} times')
      text += (', since sums, norms, softmax and the residual stream are'
               ' float32 in both.' if (a, b) == ('bfloat16', 'float32')
               and sizes[a] < roundoff / 2 * sizes[b] else '.')
    yield text

  def factors(self) -> Iterator[str]:
    base = self.median('base', 'moved', 'kl_median')
    found = [
        f'{case["about"]}: {self.median(c, "moved", "kl_median") / base:.2f}'
        for c, case in self.cases.items() if base and c != 'base'
        and case['dtype'] == 'bfloat16' and not case['slots']]
    if found:
      yield ('One factor changed at a time, as a multiple of the median KL of a'
             ' moved block: ' + '; '.join(found) + '.')

  def apart(self) -> list[int]:
    """Returns the offsets of slots at which rows differ."""
    return [m for m in self.offsets if self.f[f'study/slots/fresh/{m}/equal']
            < self.f[f'study/slots/fresh/{m}/rows']]

  def slots(self) -> Iterator[str]:
    if 'slots' not in self.cases:
      return
    apart = self.apart()
    exact = [m for m in self.offsets if m not in apart]
    text = 'Where only cache slots and masks move by M, and no rotary position,'
    if exact:
      text += f' every row is equal at {_numbers(exact)}'
    if apart:
      text += (' and' if exact else '') + f' rows differ at {_numbers(apart)}'
      if self.page and all(m % self.page for m in apart):
        text += (f': an offset that is no whole number of pages of {self.page}'
                 ' regroups the partial sums of attention')
    yield text + '.'

  def growth(self) -> tuple[list[float], list[float]] | None:
    """Returns float32's median KL with exact angles and with float32 ones."""
    if not {'float32', 'float32_both'} <= set(self.cases) or not self.many:
      return None
    exact, product = (self.values(c, 'moved', 'kl_median')
                      for c in ('float32', 'float32_both'))
    return (exact, product) if all(exact) else None

  def angles(self) -> Iterator[str]:
    found = self.growth()
    if found:
      yield ('Large angles show once other rounding is small: in float32 with'
             ' exact rotary rows the median KL of a moved block is'
             f' {self.range(found[0])}; with angles multiplied in float32 it is'
             f' {self.range(found[1])}.')

  def excluded(self) -> Iterator[str]:
    """Yields what this run says of causes that were published as excluded."""
    base = self.median('base', 'moved', 'kl_median')
    wider = [self.median(c, 'moved', 'kl_median')
             for c in ('float32', 'float64') if c in self.cases]
    if wider:
      yield ('half-precision rounding is not the cause alone, wider formats'
             ' still differ, but sets the size'
             if all(0 < size < base for size in wider)
             else 'wider formats do not simply differ by less')
    if 'window' in self.cases:
      yield ('what is stored of the window has no influence on any figure'
             if self.same('window') else 'what is stored of the window matters')
    alone = [self.median(c, 'moved', 'kl_median')
             for c in ('sliding_only', 'global_only') if c in self.cases]
    if alone:
      yield ('each rotary base alone leaves a difference' if all(alone)
             else 'one rotary base alone leaves none')
    found = self.growth()
    if found:
      yield ('large angles matter in float32, where bfloat16 hides them'
             if found[1][-1] > FLAT * found[0][-1]
             else 'large angles have no influence')
    if 'slots' in self.cases:
      apart = self.apart()
      yield ('the physical slot has no influence' if not apart else
             'the physical slot has none by whole pages, and some otherwise'
             if len(apart) < len(self.offsets) else 'the physical slot matters')

  def same(self, case: str) -> bool:
    """Tells whether a case has every figure of the base case."""
    return all(
        self.values(case, what, figure) == self.values('base', what, figure)
        for what in ('fresh', 'moved') for figure in (
            'kl_median', 'kl_p99', 'max_abs_median', 'max_abs_max'))
