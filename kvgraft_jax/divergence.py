"""Explains two runs that disagree by where they first do.

Stages are compared in the order in which one can cause the next: input,
config, fingerprint, tokens, K or V, logits, what was made of them. Within K
and V the lowest layer is first: a fault there reaches higher layers and later
positions only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import errors
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import registration
from kvgraft_jax import results
from kvgraft_jax import run_stores

_FLOATS = {'bfloat16': ml_dtypes.bfloat16, 'float32': np.float32}


@dataclasses.dataclass(frozen=True)
class Divergence:
  """Where two runs first differ in one stage.

  Attributes:
    what: 'input', 'config', 'model', 'tokenizer', 'template', 'profile',
      'class', 'tokens', 'K', 'V', 'logits', 'artifact', 'compare', 'digest',
      'output', 'score', or 'missing' for what only one of them has.
    where: names and integers that say the place; of K and V the size as well.
    a: what the first run has.
    b: what the second run has.
  """

  what: str
  where: dict[str, Any]
  a: str
  b: str

  def to_json(self) -> dict[str, Any]:
    """Returns the JSON form."""
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    w = self.where
    sides = f'{_short(self.a)} against {_short(self.b)}'
    if self.what not in artifact_lib.PARTS:
      place = ', '.join(f'{k} {_short(v)}' for k, v in w.items())
      return f'{self.what} ({place}): {sides}' if place else (
          f'{self.what}: {sides}')
    block = f'positions {w["start"]} to {w["stop"] - 1}'
    head = (f'{self.what} of layer {w["layer"]} ({w["kind"]}), artifact'
            f' {w["id"]}')
    if 'position' not in w:
      return f'{head}, somewhere in {block}: {sides}; no finer: {w["coarse"]}'
    return (f'{head}, position {w["position"]}, kv head {w["kv_head"]}, element'
            f' {w["element"]}: {sides}; {w["differing"]} of {w["values"]}'
            f' values in {block} differ, by at most {w["largest"]}')


@dataclasses.dataclass(frozen=True)
class Explanation:
  """How two runs differ.

  Attributes:
    divergences: the first of each stage that differs, in order.
    counts: kind of result -> {'equal', 'differing', 'only_a', 'only_b'}.
  """

  divergences: list[Divergence]
  counts: dict[str, dict[str, int]]

  @property
  def first(self) -> Divergence | None:
    """The first divergence of all, None if the runs agree."""
    return self.divergences[0] if self.divergences else None

  @property
  def results_equal(self) -> bool:
    """Whether every hash and score of one is there, and equal, in the other."""
    return all(c['equal'] == sum(c.values()) for c in self.counts.values())

  def __str__(self) -> str:
    counted = [c for kind, c in self.counts.items()
               if kind not in registration.NO_HASH]
    differing = {d.what for d in self.divergences}
    return (f'results: {sum(c["equal"] for c in counted)} of'
            f' {sum(sum(c.values()) for c in counted)} equal'
            + '; settings differ' * ('config' in differing)
            + '; numerics differ' * bool({'profile', 'class'} & differing))


def explain(
    a: str | os.PathLike[str], b: str | os.PathLike[str]
) -> Explanation:
  """Compares two run directories.

  Args:
    a: the first run's; its stores are read where they are in reach.
    b: the second run's.

  Raises:
    UsageError: if one of them is not a run's ledger.
    DamageError: if a ledger's chain is broken.
  """
  runs = _Run(a), _Run(b)
  stages: tuple[Callable[[_Run, _Run], Iterator[Divergence]], ...] = (
      _inputs, _config, _fingerprints, _tokens, _keys_and_values, _logits,
      _figures, _rest, _missing)
  return Explanation(
      [d for stage in stages for d in stage(*runs)],
      results.count(runs[0].results, runs[1].results))


class _Run:
  """One run's lines by kind and id."""

  def __init__(self, directory: str | os.PathLike[str]):
    self.directory = pathlib.Path(directory)
    lines = ledger_lib.read(self.directory)
    try:
      self.results = results.collect(lines)
    except errors.UsageError as e:
      raise errors.UsageError(f'{directory}: {e}') from None
    self.bodies: dict[str, dict[str, Any]] = {}
    for line in lines:
      self.bodies.setdefault(line['kind'], {})[
          str(line['body'].get('id', ''))] = line['body']

  def kind(self, kind: str) -> dict[str, Any]:
    """Returns id -> body."""
    return self.bodies.get(kind, {})

  @property
  def run(self) -> dict[str, Any]:
    """The body of the first line."""
    return self.kind('run').get('', {})


def _pairs(a: _Run, b: _Run, kind: str) -> Iterator[tuple[str, Any, Any]]:
  """Yields (id, body, body) of what both have, in the first run's order."""
  for name, body in a.kind(kind).items():
    if name in b.kind(kind):
      yield name, body, b.kind(kind)[name]


def _inputs(a: _Run, b: _Run) -> Iterator[Divergence]:
  yield from _simple(a, b, 'input', 'sha256', 'input')


def _simple(
    a: _Run, b: _Run, kind: str, field: str, what: str
) -> Iterator[Divergence]:
  """Yields the first line of a kind of which one field differs."""
  for name, x, y in _pairs(a, b, kind):
    left, right = results.text(x.get(field)), results.text(y.get(field))
    if left != right:
      yield Divergence(what, {'id': name}, left, right)
      return


def _config(a: _Run, b: _Run) -> Iterator[Divergence]:
  configs = [_flat(run.run.get('config', {})) for run in (a, b)]
  yield from _named('config', {}, [
      (name, _default(a, configs[0], name, left),
       _default(b, configs[1], name, right))
      for name, left, right in results.differences(*configs)])


def _default(
    run: _Run, config: Mapping[str, Any], name: str, shown: str
) -> str:
  """Returns a setting that was left to the default as 'default (16)'."""
  if config.get(name, '') is not None:
    return shown
  values = dict.fromkeys(
      str(body['profile'][name]) for body in run.kind('profile').values()
      if name in body.get('profile', {}))
  return f'default ({" or ".join(values)})' if values else 'default'


def _named(
    what: str, where: dict[str, Any], found: list[tuple[str, str, str]]
) -> Iterator[Divergence]:
  """Yields the first of the differing entries; the others by name."""
  if found:
    name, left, right = found[0]
    where = {**where, 'name': name}
    if found[1:]:
      where['also'] = [n for n, _, _ in found[1:]]
    yield Divergence(what, where, left, right)


def _fingerprints(a: _Run, b: _Run) -> Iterator[Divergence]:
  ours, theirs = a.run.get('model', {}), b.run.get('model', {})
  for name in results.FINGERPRINTS:
    key = 'fingerprint' if name == 'model' else name
    left, right = (x.get(key, results.ABSENT) for x in (ours, theirs))
    if left != right:
      yield Divergence(name, {}, left, right)
  for name, x, y in _pairs(a, b, 'profile'):
    for what in ('profile', 'class'):
      found = results.differences(x.get(what, {}), y.get(what, {}))
      if found:
        yield from _named(what, {'id': name}, found)
        return


def _tokens(a: _Run, b: _Run) -> Iterator[Divergence]:
  for name, x, y in _pairs(a, b, 'input'):
    if x['tokens_sha256'] != y['tokens_sha256']:
      where, left, right = {'id': name}, x.get('token_ids'), y.get('token_ids')
      if not left or not right:
        yield Divergence(
            'tokens', where, x['tokens_sha256'], y['tokens_sha256'])
        return
      at = next((i for i, (s, t) in enumerate(zip(left, right)) if s != t),
                min(len(left), len(right)))
      yield Divergence('tokens', {**where, 'position': at}, *(
          str(ids[at]) if at < len(ids) else 'no token'
          for ids in (left, right)))
      return


def _keys_and_values(a: _Run, b: _Run) -> Iterator[Divergence]:
  for name, x, y in _pairs(a, b, 'artifact'):
    theirs = {block[:-1]: block[-1] for block in results.blocks(y)}
    differing = [block for block in results.blocks(x)
                 if theirs.get(block[:-1], block[-1]) != block[-1]]
    if not differing:
      continue
    layer, start, part, kind, stop, digest = differing[0]
    where = {'id': name, 'layer': layer, 'kind': kind, 'start': start,
             'stop': stop}
    try:
      yield _first_value(
          _rows(a, x, where), _rows(b, y, where), where)
    except errors.KvgraftError as e:
      yield Divergence(
          part, where | {'coarse': str(e)}, digest,
          theirs[layer, start, part, kind, stop])
    return


def _rows(
    run: _Run, body: Mapping[str, Any], where: Mapping[str, Any]
) -> tuple[np.ndarray, str]:
  """Returns bit patterns [K and V, positions, heads, dim] and their dtype."""
  store, manifest = run_stores.find(run.directory, body)
  layout = manifest.layouts.get(where['kind'])
  if layout is None or where['layer'] not in layout.layers:
    raise errors.NotFoundError(
        f'{run.directory}: artifact {manifest.id[:12]} has no {where["kind"]}'
        f' layer {where["layer"]}')
  k, v = run_stores.read_block(
      store, manifest, where['kind'], where['start'], where['stop'])
  row = layout.layers.index(where['layer'])
  return np.stack([k[row], v[row]]), layout.dtype


def _first_value(
    ours: tuple[np.ndarray, str], theirs: tuple[np.ndarray, str],
    where: dict[str, Any],
) -> Divergence:
  """Returns the first differing value of a block, and how large it all is."""
  (a, dtype), (b, other) = ours, theirs
  if dtype != other or a.shape != b.shape:
    raise errors.IncompatibleError(
        f'blocks are {dtype}{list(a.shape)} and {other}{list(b.shape)}')
  differs = a != b
  if not differs.any():
    raise errors.DamageError(
        'the stored blocks are equal, so a ledger does not describe its store')
  # K before V at one position, since K feeds the scores.
  position = int(np.argmax(differs.any(axis=(0, 2, 3))))
  part = int(np.argmax(differs[:, position].any(axis=(1, 2))))
  head, element = (int(i) for i in np.argwhere(differs[part, position])[0])
  left, right = (x.view(_FLOATS[dtype]).astype(np.float64) for x in (a, b))
  wrong = differs[part]
  with np.errstate(invalid='ignore'):  # Infinity less infinity is NaN.
    largest = np.abs(left[part][wrong] - right[part][wrong]).max()
  at = part, position, head, element
  return Divergence(
      artifact_lib.PARTS[part],
      where | {
          'position': where['start'] + position, 'kv_head': head,
          'element': element, 'differing': int(wrong.sum()),
          'values': int(wrong.size), 'dtype': dtype,
          'largest': repr(float(largest))},
      _value(left[at], a[at]), _value(right[at], b[at]))


def _value(value: np.float64, bits: np.unsignedinteger) -> str:
  return f'{float(value)!r} (bits {int(bits):#0{2 + 2 * bits.itemsize}x})'


def _logits(a: _Run, b: _Run) -> Iterator[Divergence]:
  for name, x, y in _pairs(a, b, 'logits'):
    pairs = list(zip(x['rows'], x['sha256'], y['rows'], y['sha256']))
    wrong = [p for p in pairs if p[:2] != p[2:]]
    if wrong:
      row, left, _, right = wrong[0]
      yield Divergence(
          'logits', {'id': name, 'position': row, 'differing': len(wrong),
                     'rows': len(pairs)}, left, right)
      return
  for name, x, y in _pairs(a, b, 'artifact'):
    if x['artifact'] == y['artifact'] or (
        results.blocks(x) != results.blocks(y)):
      continue
    # With one key, and equal blocks, the last logits are all that is left.
    what, where = 'artifact', {'id': name}
    if x.get('key') == y.get('key'):
      what, where = 'logits', {'artifact': name, 'position': x['end'] - 1}
    yield Divergence(what, where, x['artifact'], y['artifact'])
    return


def _figures(a: _Run, b: _Run) -> Iterator[Divergence]:
  for field in ('kl', 'max_abs'):
    for one in _simple(a, b, 'compare', field, 'compare'):
      yield dataclasses.replace(one, where=one.where | {'field': field})


def _rest(a: _Run, b: _Run) -> Iterator[Divergence]:
  for kind, field in (
      ('digest', 'sha256'), ('output', 'token_ids'), ('score', 'value')):
    yield from _simple(a, b, kind, field, kind)


def _missing(a: _Run, b: _Run) -> Iterator[Divergence]:
  for kind, ours in a.results.items():
    theirs = b.results[kind]
    for one, other, sides in ((ours, theirs, ('there', 'not there')),
                              (theirs, ours, ('not there', 'there'))):
      only = [key for key in one if key not in other]
      if only:
        yield Divergence(
            'missing', {'kind': kind, 'id': only[0][0], 'part': only[0][1],
                        'count': len(only)}, *sides)
        return


def _flat(value: Any, path: str = '') -> dict[str, Any]:
  """Returns dotted path -> value of nested objects."""
  if not isinstance(value, Mapping):
    return {path: value}
  found: dict[str, Any] = {}
  for key, item in value.items():
    found |= _flat(item, f'{path}.{key}' if path else key)
  return found


def _short(value: Any) -> str:
  text = ', '.join(map(str, value)) if isinstance(value, list) else str(value)
  if artifact_lib.is_hash(text):
    return text[:12]
  return text if len(text) <= 200 else f'{text[:200]}...'
