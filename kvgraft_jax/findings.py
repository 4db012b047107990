"""What an evidence run found, in sentences, from the figures of its ledger.

Each sentence is a `note` line with the role `finding`. Words such as "flat"
have their threshold beside them; nothing is said that no figure says.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import statistics
from typing import Any

from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import study

# Across the offsets, largest median over smallest: below it, "flat".
FLAT = 2.0
_PUBLISHED = (
    'Published for a closed system (arXiv:2607.14431, Gemma 4 12B and 31B on'
    ' GPUs; not checked here): a block moved by M positions and a fresh'
    ' computation at offset M both differ by a KL of about 0.015, flat over'
    ' M = 8, 128, 1,024 and 4,096. Of the causes that it excludes, this run'
    ' shows: ')


def write(ledger: ledger_lib.Ledger) -> None:
  """Appends the findings of the parts that were run."""
  config = ledger.lines[0]['body']['config']
  figures = {line['body']['id']: line['body']['value']
             for line in ledger.lines if line['kind'] == 'summary'}
  for text in _sentences(config, figures):
    ledger.append('note', {'role': 'finding', 'text': text})


def _sentences(
    config: dict[str, Any], figures: dict[str, Any]
) -> Iterator[str]:
  for dtype in config['dtypes']:
    if f'fifty/{dtype}/rows' in figures:
      yield _grafts(config, figures, dtype)
  for dtype in config['dtypes']:
    if f'invariance/{dtype}/results' in figures:
      yield _schedules(figures, dtype)
  offsets = [m for m in config['offsets'] if m]
  cases = [c for c in config['cases'] if f'study/{c}/own/rows' in figures]
  if cases and offsets:
    yield from _study(figures, cases, offsets)


def _of(equal: Any, rows: Any) -> str:
  return f'{equal:,} of {rows:,}'


def _grafts(config: dict[str, Any], f: dict[str, Any], dtype: str) -> str:
  fifty = {name: f[f'fifty/{dtype}/{name}'] for name in (
      'rows', 'equal', 'argmax_agree', 'kl_max', 'grafts/count',
      'grafts/computed')}
  parts = [
      f'Grafts in {dtype}, from a store that another process filled with'
      f' {config["tokens"]:,} tokens: of {fifty["grafts/count"]} continuations'
      f' {_of(fifty["equal"], fifty["rows"])} rows of logits have the SHA-256'
      ' of the fresh computation, argmax agrees in'
      f' {_of(fifty["argmax_agree"], fifty["rows"])}, the largest KL is'
      f' {fifty["kl_max"]} nats; the grafts computed'
      f' {fifty["grafts/computed"]:,} positions in all, their tails.']
  if f'prefix/{dtype}/rows' in f:
    lengths = ', '.join(f'{n:,}' for n in config['lengths'])
    parts.append(
        f'Cut to {lengths} positions,'
        f' {_of(f[f"prefix/{dtype}/equal"], f[f"prefix/{dtype}/rows"])} rows'
        ' are equal.')
  return ' '.join(parts)


def _schedules(f: dict[str, Any], dtype: str) -> str:
  prefix = f'invariance/{dtype}'
  every, promised = f[f'{prefix}/schedules'], f[f'{prefix}/promised/schedules']
  text = (f'Schedules in {dtype}: {every} ways to compute one text leave'
          f' {_results(f[f"{prefix}/results"])}.')
  if promised < every:
    text += (f' The self-test promises equality for {promised} of them; these'
             f' leave {_results(f[f"{prefix}/promised/results"])}.')
  return text


def _results(count: int) -> str:
  return ('the same keys, values and logits, bit for bit' if count == 1
          else f'{count} different results')


def _study(
    f: dict[str, Any], cases: Sequence[str], offsets: Sequence[int]
) -> Iterator[str]:
  rows = sum(f[f'study/{c}/own/rows'] for c in cases)
  equal = sum(f[f'study/{c}/own/equal'] for c in cases)
  yield (
      f'At its own position a restored block is exact: {_of(equal, rows)} rows'
      f' of logits are equal, over {len(cases)} cases and all offsets.'
      if equal == rows else
      f'At its own position a restored block is NOT always exact:'
      f' {_of(equal, rows)} rows are equal.')
  if 'base' in cases:
    yield _elsewhere(f, offsets)
  sizes = {c: _median(f, c, 'moved', 'max_abs_median', offsets)
           for c in ('base', 'float32', 'float64') if c in cases}
  if len(sizes) > 1:
    yield _rounding(sizes)
  if 'base' in cases:
    yield from _factors(f, cases, offsets)
  if {'float32', 'float32_both'} <= set(cases):
    yield _angles(f, offsets)
  if 'base' in cases:
    seen = _excluded(f, cases, offsets)
    if seen:
      yield _PUBLISHED + '; '.join(seen) + '.'


def _values(f, case, what, figure, offsets) -> list[float]:
  return [float(f[f'study/{case}/{what}/{m}/{figure}']) for m in offsets]


def _median(f, case, what, figure, offsets) -> float:
  return statistics.median(_values(f, case, what, figure, offsets))


def _range(values: Sequence[float]) -> str:
  low, high = min(values), max(values)
  if not high:
    return '0 everywhere'
  if not low:
    return f'0 to {high:.2g}'
  ratio = high / low
  return (f'{low:.2g} to {high:.2g}, '
          + ('flat' if ratio < FLAT else 'not flat')
          + f' over M (largest over smallest {ratio:.1f})')


def _agreement(f, case, what, offsets) -> str:
  agree, rows = (
      sum(f[f'study/{case}/{what}/{m}/{figure}'] for m in offsets)
      for figure in ('argmax_agree', 'rows'))
  return _of(agree, rows)


def _elsewhere(f: dict[str, Any], offsets: Sequence[int]) -> str:
  parts = []
  for what, words in (
      ('fresh', 'a fresh computation at offset M differs from one at 0'),
      ('moved', 'a block moved by M, keys turned, differs from fresh at M')):
    kl = _values(f, 'base', what, 'kl_median', offsets)
    p99 = _values(f, 'base', what, 'kl_p99', offsets)
    parts.append(
        f'{words} by a median KL in nats of {_range(kl)}; the 99th percentile'
        f' reaches {max(p99):.2g}, argmax agrees in'
        f' {_agreement(f, "base", what, offsets)}')
  keys, equal = (sum(f[f'study/base/moved/{m}/{name}'] for m in offsets)
                 for name in ('keys', 'keys_equal'))
  return (f'Elsewhere, in bfloat16, {". And ".join(parts)}. Already in the'
          f' first layer, whose inputs are the same, {100 * equal / keys:.0f} %'
          ' of the turned keys have the bits of the fresh ones.')


def _rounding(sizes: dict[str, float]) -> str:
  bits = {'base': 8, 'float32': 24, 'float64': 53}
  names = {'base': 'bfloat16', 'float32': 'float32', 'float64': 'float64'}
  text = ('The residual is rounding: the median largest logit difference of a'
          ' moved block is ' + ', '.join(
              f'{size:.2g} in {names[c]}' for c, size in sizes.items()) + '.')
  pairs = list(zip(sizes, list(sizes)[1:]))
  for a, b in pairs:
    if sizes[a] and sizes[b]:
      text += (f' From {names[a]} to {names[b]} it shrinks'
               f' {sizes[a] / sizes[b]:.2g} times; the unit roundoff shrinks'
               f' {2.0 ** (bits[b] - bits[a]):.2g} times.')
  if {'base', 'float32'} <= set(sizes) and 0 < sizes['base'] < (
      2.0 ** 15 * sizes['float32']):
    text += (' The bfloat16 profile already keeps sums, norms, softmax and the'
             ' residual stream in float32, so that its step to float32 is'
             ' smaller than the roundoff says.')
  return text


def _factors(
    f: dict[str, Any], cases: Sequence[str], offsets: Sequence[int]
) -> Iterator[str]:
  base = _median(f, 'base', 'moved', 'kl_median', offsets)
  found = []
  for case in cases:
    spec = study.CASES[case]
    if case == 'base' or spec.dtype != 'bfloat16' or spec.slots or not base:
      continue
    ratio = _median(f, case, 'moved', 'kl_median', offsets) / base
    found.append(f'{spec.about}: {ratio:.2f}')
  if found:
    yield ('One factor at a time, median KL of a moved block over that of the'
           ' base case: ' + '; '.join(found) + '.')
  if 'slots' in cases:
    exact = [m for m in offsets if f[f'study/slots/fresh/{m}/equal']
             == f[f'study/slots/fresh/{m}/rows']]
    other = [m for m in offsets if m not in exact]
    text = 'Cache slots and masks moved without any rotary change: '
    text += (f'every row is equal at {", ".join(f"{m:,}" for m in exact)}'
             if exact else 'no offset leaves every row equal')
    if other:
      text += (f', and not at {", ".join(f"{m:,}" for m in other)}, median KL'
               f' {_median(f, "slots", "fresh", "kl_median", other):.2g}: an'
               ' offset that is no whole number of pages regroups the partial'
               ' sums of attention')
    yield text + '.'


def _angles(f: dict[str, Any], offsets: Sequence[int]) -> str:
  exact, product = (
      _values(f, case, 'moved', 'kl_median', offsets)
      for case in ('float32', 'float32_both'))
  return ('Large angles: in float32 with exact rotary rows the median KL of a'
          f' moved block is {_range(exact)}; with angles multiplied in float32'
          f' it is {_range(product)}.')


def _excluded(
    f: dict[str, Any], cases: Sequence[str], offsets: Sequence[int]
) -> list[str]:
  """Returns what this run says of causes that were published as excluded."""
  def size(case: str) -> float:
    return _median(f, case, 'moved', 'kl_median', offsets)

  base, found = size('base'), []
  wider = [c for c in ('float32', 'float64') if c in cases]
  if wider:
    found.append(
        'half-precision rounding: wider formats still differ, by less'
        if all(0 < size(c) < base for c in wider) else
        'half-precision rounding: wider formats do not simply differ by less')
  if 'window' in cases:
    found.append('window buffering: ' + (
        'no influence on any figure' if _same(f, 'window', offsets)
        else f'the KL becomes {size("window") / base:.2f} times as large'))
  alone = [c for c in ('sliding_only', 'global_only') if c in cases]
  if alone:
    found.append('the rotary bases: ' + (
        'each alone leaves a difference' if all(size(c) > 0 for c in alone)
        else 'one alone leaves none'))
  if {'float32', 'float32_both'} <= set(cases):
    exact, product = (
        _values(f, c, 'moved', 'kl_median', offsets)
        for c in ('float32', 'float32_both'))
    grows = product[-1] > FLAT * exact[-1] > 0
    found.append('large angles: ' + (
        'lost in bfloat16, but in float32 angles multiplied in float32 make it'
        f' {product[-1] / exact[-1]:.2g} times as large at M ='
        f' {offsets[-1]:,}' if grows else 'no influence'))
  if 'slots' in cases:
    apart = [m for m in offsets if f[f'study/slots/fresh/{m}/equal']
             < f[f'study/slots/fresh/{m}/rows']]
    found.append('the physical slot: ' + (
        'none by itself' if not apart else
        'none by whole pages, but regrouped sums where M is no multiple of the'
        ' page' if len(apart) < len(offsets) else 'it matters'))
  return found


def _same(f: dict[str, Any], case: str, offsets: Sequence[int]) -> bool:
  """Tells whether a case has every figure of the base case."""
  return all(
      _values(f, case, what, figure, offsets)
      == _values(f, 'base', what, figure, offsets)
      for what in (study.FRESH, study.MOVED)
      for figure in ('kl_median', 'kl_p99', 'max_abs_median', 'max_abs_max'))
