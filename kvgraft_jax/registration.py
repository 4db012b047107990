"""Commits what a run must give, before it is run elsewhere; compares.

A registration is one canonical JSON file: the settings of a finished run and
every hash that it had. Its SHA-256 is what to publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
from typing import Any
from typing import NamedTuple

from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import recheck
from kvgraft_jax import results

FORMAT = 1
# What of a line another machine is told: no times, no texts, no resources.
_KEPT = {
    'input': ('id', 'sha256', 'tokens', 'tokens_sha256'),
    'artifact': ('id', 'artifact', 'digests', 'end', 'input', 'profile',
                 'start'),
    'logits': ('id', 'argmax', 'profile', 'rows', 'sha256'),
    'digest': ('id', 'sha256'),
    'output': ('id', 'input', 'token_ids'),
    'score': ('id', 'value'),
}
# An argmax follows from its logits: told beside them, but not counted.
NO_HASH = ('argmax',)
_SECTIONS = {'code': dict, 'config': dict, 'expected': list, 'model': dict,
             'profiles': dict, 'run': dict}


class Factor(NamedTuple):
  """A factor of the numerics, or of the code, that differs.

  Attributes:
    name: such as 'jax' or 'code.sources'.
    theirs: in the registration.
    ours: here.
    profiles: ids of the profiles in which it differs so; none of the code.
    in_class: whether equal bits are promised only where it is equal.
  """

  name: str
  theirs: str
  ours: str
  profiles: list[str]
  in_class: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Expected against found.

  Attributes:
    counts: kind -> {'equal', 'differing', 'missing'}.
    first: kind, id and part of the first result that differs or is missing, in
      the order in which one causes the next; None if all are equal.
    factors: every factor that differs.
    class_equal: whether equal bits were promised.
  """

  counts: dict[str, dict[str, int]]
  first: dict[str, str] | None
  factors: list[Factor]
  class_equal: bool

  def total(self, what: str) -> int:
    """Returns how many hashes are 'equal', 'differing' or 'missing'."""
    return sum(c[what] for k, c in self.counts.items() if k not in NO_HASH)

  @property
  def ok(self) -> bool:
    """Whether every expected result was found."""
    return self.first is None

  def __str__(self) -> str:
    equal = self.total('equal')
    every = equal + self.total('differing') + self.total('missing')
    if self.class_equal:
      text = f'classes equal; {equal} of {every} hashes equal'
    else:
      text = ('classes differ: equality was not promised; '
              f'{equal} of {every} hashes equal anyway')
    if self.first:
      text += '; first that differs: {kind} {id}, {part}'.format(**self.first)
    return text

  def to_json(self) -> dict[str, Any]:
    """Returns the canonical-JSON form."""
    return {
        'equal': self.total('equal'), 'differing': self.total('differing'),
        'missing': self.total('missing'), 'counts': self.counts,
        'factors': [f._asdict() for f in self.factors],
        'class_equal': self.class_equal, 'first_differing': self.first}


# Registering.


def of_run(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns what another machine must be told to repeat a run.

  Args:
    lines: the whole ledger of the run.

  Raises:
    UsageError: if the run is not finished, or holds nothing to compare.
  """
  if not lines or lines[0]['kind'] != 'run' or lines[-1]['kind'] != 'end' or (
      lines[-1]['body'].get('status') != 'done'):
    raise errors.UsageError(
        'the run is not finished: expected a ledger from a `run` line to an'
        ' `end` line; finish it, or run it again into a new directory')
  body = lines[0]['body']
  value = {
      'format': FORMAT, 'config': body['config'], 'code': body['code'],
      'model': body['model'],
      'run': {'head': lines[-1]['hash'], 'lines': len(lines)},
      'profiles': {
          line['body']['id']: {k: line['body'][k] for k in ('profile', 'class')}
          for line in lines if line['kind'] == 'profile'},
      'expected': [
          {'kind': line['kind'], 'body': {
              k: line['body'][k] for k in _KEPT[line['kind']]
              if k in line['body']}}
          for line in lines if line['kind'] in _KEPT],
  }
  if not any(results.collect(value['expected']).values()):
    raise errors.UsageError(
        'the run has no hash that another one could be held against')
  return value


def write(
    directory: str | os.PathLike[str], path: str | os.PathLike[str]
) -> str:
  """Writes the registration of a finished run; returns the file's SHA-256.

  Raises:
    DamageError: if the run does not pass its recheck.
    UsageError: if it is not finished, or `path` exists.
  """
  data = to_bytes(of_run(ledger_lib.checked(directory)))
  try:
    with open(path, 'xb') as f:
      f.write(data)
      f.flush()
      os.fsync(f.fileno())
  except FileExistsError:
    raise errors.UsageError(
        f'{os.fspath(path)}: it exists, and a registration is never changed;'
        ' choose another --out') from None
  return hashlib.sha256(data).hexdigest()


def to_bytes(value: Mapping[str, Any]) -> bytes:
  """Returns the file of a registration."""
  return hashing.canonical_json(value) + b'\n'


def read(
    path: str | os.PathLike[str], sha256: str | None = None
) -> tuple[dict[str, Any], str]:
  """Returns a registration and the SHA-256 of its file.

  Args:
    path: the file.
    sha256: what was published; None if that is not known.

  Raises:
    DamageError: if the file is not the published one.
    UsageError: if it is no registration.
  """
  where = os.fspath(path)
  try:
    data = recheck.read_file(where)
  except ValueError as e:
    raise errors.NotFoundError(
        f'{where}: {e}; give the file that `kvgraft ledger preregister`'
        ' wrote') from None
  found = hashlib.sha256(data).hexdigest()
  if sha256 is not None and found != sha256.lower():
    raise errors.DamageError(
        f'{where}: SHA-256 is {found}, expected {sha256}; get the file that was'
        ' published')
  try:
    value = json.loads(data)
    canonical = to_bytes(value) == data
  except (ValueError, TypeError, RecursionError):
    value, canonical = None, False
  if not canonical or not isinstance(value, dict):
    raise errors.UsageError(
        f'{where}: expected a registration in canonical JSON, as `kvgraft'
        ' ledger preregister` writes it')
  if value.get('format') != FORMAT:
    raise errors.IncompatibleError(
        f'{where}: registration format is {value.get("format")!r:.20}, this'
        f' version of kvgraft_jax reads {FORMAT}', 'format')
  for name, kind in _SECTIONS.items():
    if not isinstance(value.get(name), kind):
      raise errors.UsageError(
          f'{where}: it has no {name}; expected a registration as `kvgraft'
          ' ledger preregister` writes it')
  expected = results.collect(value['expected'])
  if not all(isinstance(value['model'].get(name), str) for name in (
      'source', 'fingerprint', 'tokenizer', 'template')) or not all(
          isinstance(profile, dict) and isinstance(profile.get(name), dict)
          for profile in value['profiles'].values()
          for name in ('profile', 'class')):
    raise errors.UsageError(
        f'{where}: its model or its profiles are not as `kvgraft ledger'
        ' preregister` writes them; get the file that was published')
  if not any(expected.values()):
    raise errors.UsageError(
        f'{where}: it expects nothing that a run could be held against; get'
        ' the file that was published')
  return value, found


# Comparing.


def compare(
    expected: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> Comparison:
  """Holds a ledger against a registration.

  Args:
    expected: the registration.
    lines: of the new run; it need not be finished.
  """
  theirs, ours = results.collect(expected['expected']), results.collect(lines)
  counts = {
      kind: {'equal': c['equal'], 'differing': c['differing'],
             'missing': c['only_a']}
      for kind, c in results.count(theirs, ours).items() if theirs[kind]}
  first = None
  for kind, found in theirs.items():
    for key, value in found.items():
      other = ours[kind].get(key, results.ABSENT)
      if first is None and other != value and kind not in NO_HASH:
        first = {'kind': kind, 'id': key[0], 'part': key[1], 'theirs': value,
                 'ours': other}
  profiles = {line['body']['id']: line['body'] for line in lines
              if line['kind'] == 'profile'}
  class_equal = bool(expected['profiles']) and all(
      name in profiles and profiles[name]['class'] == p['class']
      for name, p in expected['profiles'].items())
  return Comparison(counts, first, _factors(
      expected, profiles, lines[0]['body'].get('code', {})), class_equal)


def _factors(
    expected: Mapping[str, Any], profiles: Mapping[str, Any],
    code: Mapping[str, str],
) -> list[Factor]:
  """Returns every differing factor once, with the profiles it differs in."""
  found: dict[tuple[str, str, str], Factor] = {}
  for name, theirs in expected['profiles'].items():
    ours = profiles.get(name, {'profile': {}, 'class': {}})
    in_class = {x for x, _, _ in results.differences(
        theirs['class'], ours['class'])}
    differing = results.differences(theirs['profile'], ours['profile'])
    # A self-test that proved less leaves a factor in the class.
    known = {x for x, _, _ in differing}
    differing += [d for d in results.differences(theirs['class'], ours['class'])
                  if d[0] not in known]
    for d in differing:
      factor = found.setdefault(d, Factor(*d, [], d[0] in in_class))
      factor.profiles.append(name)
  return [*found.values(), *(
      Factor(f'code.{name}', a, b, [], False)
      for name, a, b in results.differences(expected['code'], code))]
