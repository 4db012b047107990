"""Runs a registration here, and checkers of verdicts again.

A replay runs the registered settings and appends to its own ledger what was
expected, how many hashes are equal, and the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import os
import pathlib
import tempfile
from typing import Any

from kvgraft_jax import engine
from kvgraft_jax import entries
from kvgraft_jax import errors
from kvgraft_jax import evidence
from kvgraft_jax import flywheel
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import numerics
from kvgraft_jax import recheck
from kvgraft_jax import registration
from kvgraft_jax import results
from kvgraft_jax import selftest
from kvgraft_jax import study
from kvgraft_jax.checkpoints import resolve

Lines = Sequence[Mapping[str, Any]]


def replay(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *,
    command: Sequence[str], model: str | None = None,
    sha256: str | None = None, progress: evidence.Progress | None = None,
) -> tuple[registration.Comparison, str]:
  """Runs the settings of a registration here and compares.

  Args:
    path: the registration.
    directory: of the new run.
    command: argument vector, for the record.
    model: where the same weights are here; None for the recorded source.
    sha256: the registration's, as published; None if not known.
    progress: as of `evidence.run`.

  Returns:
    The comparison, which the new ledger holds too, and the SHA-256 of the
    registration.

  Raises:
    IncompatibleError: if the model here is another one; nothing has run then.
    DamageError: if the registration is not the published one.
    KvgraftError: as the run itself does.
  """
  value, found = registration.read(path, sha256)
  runner = _runner(value['config'])
  settings = runner.Settings.from_json(value['config'])
  if model is not None:
    settings = dataclasses.replace(settings, model=model)
  _check_model(settings.model, value['model'], os.fspath(path))
  kept: list[registration.Comparison] = []

  def before_end(ledger: ledger_lib.Ledger) -> None:
    kept.append(conclude(ledger, value, found))

  runner.run(
      settings, directory, command=list(command), progress=progress,
      registration={'sha256': found, 'name': pathlib.Path(path).name},
      before_end=before_end)
  return kept[0], found


def _runner(config: Mapping[str, Any]) -> Any:
  """Returns the module that runs such settings."""
  return flywheel if 'dataset' in config else evidence


def _check_model(spec: str, theirs: Mapping[str, str], where: str) -> None:
  """Raises IncompatibleError unless the weights, and all else, are the same."""
  here = resolve.resolve(spec, 'bfloat16')
  ours = {'model': here.model_fingerprint,
          'tokenizer': here.tokenizer_fingerprint,
          'template': here.template_fingerprint}
  for name in results.FINGERPRINTS:
    expected = theirs['fingerprint' if name == 'model' else name]
    if ours[name] != expected:
      what = 'the weights are not the same' if name == 'model' else (
          f'the weights are the same, but not the {name}')
      raise errors.IncompatibleError(
          f'{where}: {name} differs, expected {expected[:16]} (from'
          f' {theirs["source"]!s:.80}), found {ours[name][:16]} in {spec}:'
          f' {what}; give the same checkpoint with --model', name)


def conclude(
    ledger: ledger_lib.Ledger, value: Mapping[str, Any], sha256: str
) -> registration.Comparison:
  """Appends what was expected, the counts and the verdict to a new ledger.

  Args:
    ledger: of the new run, all results in it.
    value: the registration.
    sha256: of the registration's file.
  """
  found = registration.compare(value, ledger.lines)
  ledger.append('expected', {'id': 'replay', 'registration': dict(value)})
  for kind, counts in found.counts.items():
    group = {'hash': kind not in registration.NO_HASH}
    ledger.append('replayed', {'id': kind, 'group': group, **counts})
  for what in ('equal', 'differing', 'missing'):
    ledger.summary(
        f'replay.{what}',
        {'kind': 'replayed', 'where': {'group.hash': True}}, what, 'sum')
  ledger.verdict(
      'replay', 'replay', {'registration_sha256': sha256},
      [{'summary': f'replay.{what}', 'op': '==', 'value': 0}
       for what in ('differing', 'missing')], found.to_json())
  return found


# Running checkers again, for `ledger recheck --full`.


def _check_replay(
    lines: Lines, verdict: Mapping[str, Any]
) -> bool:
  """Compares again what the ledger holds with what it was to hold."""
  expected = [line['body']['registration'] for line in lines
              if line['kind'] == 'expected']
  published = [line['body']['sha256'] for line in lines
               if line['kind'] == 'registration']
  if len(expected) != 1 or published != [
      hashlib.sha256(registration.to_bytes(expected[0])).hexdigest()]:
    raise errors.DamageError(
        'the expected results are not those of the registration')
  found = registration.compare(expected[0], lines)
  if verdict['evidence'] != found.to_json() or (
      verdict['ran'] != {'registration_sha256': published[0]}):
    raise errors.DamageError(
        f'the evidence is not what the lines show: {found}')
  return found.ok


def _check_self_test(lines: Lines, verdict: Mapping[str, Any]) -> bool:
  """Runs a self-test again; nothing of it is taken from the cache."""
  run, dtype = lines[0]['body'], verdict['ran']['dtype']
  recorded = _find(lines, 'profile', dtype)
  _check_here(run, [recorded])
  sizes: dict[str, Any] = {
      name: int(recorded['profile'][name])
      for name in ('chunk', 'tile', 'page')}
  model = engine.load_model(
      run['config']['model'], dtype=dtype, self_test=False, **sizes)
  report = selftest.run(model.config, model.profile, model.params)
  # A later version of the recipe tests more, and nothing else otherwise.
  theirs, ours = ({
      what: {k: v for k, v in side[what].items()
             if recorded['self_test'][what].get(k) is not None}
      for what in ('digests', 'invariances')}
                  for side in (recorded['self_test'], report.to_json()))
  for name, a, b in results.differences(theirs['digests'], ours['digests']):
    raise errors.DamageError(
        f'self-test of {dtype}, case {name}: expected {a[:16]}, found {b[:16]}')
  for name, a, b in results.differences(
      theirs['invariances'], ours['invariances']):
    raise errors.DamageError(
        f'self-test of {dtype}, {name}: expected {a}, found {b}')
  return report.exact


# (head of a ledger, part) -> lines of the part, run again here.
_RUNS: dict[tuple[str, str], list[dict[str, Any]]] = {}


def _check_part(lines: Lines, verdict: Mapping[str, Any]) -> bool:
  """Runs a part of a run again, or all of it; all must be as recorded."""
  part = verdict['checker']
  if lines[0]['body']['run'] == 'flywheel':
    part = 'flywheel'
  key = lines[-1]['hash'], part
  if key not in _RUNS:  # Several verdicts may rest on one part.
    _RUNS[key] = _run_part(lines, part)
  again = _RUNS[key]
  _check_lines(lines, again, part)
  ours = _find(again, 'verdict', verdict['id'])
  for name, a, b in results.differences(
      {k: verdict[k] for k in ('ran', 'because')},
      {k: ours[k] for k in ('ran', 'because')}):
    raise errors.DamageError(f'{name}: expected {b:.200}, found {a:.200}')
  return ours['passed']


def _run_part(lines: Lines, part: str) -> list[dict[str, Any]]:
  """Returns the lines of a part run again.

  Raises:
    ClassMismatchError: if equal bits are not promised here.
  """
  run = lines[0]['body']
  _check_here(run, [
      line['body'] for line in lines if line['kind'] == 'profile'])
  runner = _runner(run['config'])
  settings = runner.Settings.from_json(run['config'])
  if runner is evidence:
    settings = dataclasses.replace(settings, parts=(part,))
  with tempfile.TemporaryDirectory(prefix='kvgraft-recheck-') as place:
    runner.run(settings, place)
    return ledger_lib.read(place)


def _check_lines(lines: Lines, again: Lines, part: str) -> None:
  """Compares the lines of a part run again with the recorded ones.

  Raises:
    ClassMismatchError: if equal bits are not promised here.
    DamageError: naming the first hash, or figure, that is not as recorded.
  """
  expected = registration.of_run(lines)
  known = {(line['kind'], line['body'].get('id')) for line in again}
  expected['expected'] = [
      entry for entry in expected['expected']
      if (entry['kind'], entry['body']['id']) in known]
  expected['profiles'] = {
      name: profile for name, profile in expected['profiles'].items()
      if ('profile', name) in known}
  found = registration.compare(expected, again)
  for factor in found.factors:
    if factor.in_class:
      raise errors.ClassMismatchError(
          f'numerics differ in {factor.name}, recorded {factor.theirs}, found'
          f' {factor.ours}; run it where they are equal', factor.name)
  if not found.ok or not found.total('equal'):
    raise errors.DamageError(f'run again, {part} shows other hashes: {found}')
  _check_bodies(lines, again, part)


# Steps of a reply, fewer where a later version guesses better; and the head of
# a library that other runs may have filled.
_FREE = (
    ('attempt', 'steps'), ('answer', 'steps'), ('entry', 'library_head'))
# Checked elsewhere, different each time, or without an id.
_APART = ('run', 'profile', 'resources', 'registration', 'recovered',
          'resumed', 'note', 'end')


def _check_bodies(lines: Lines, again: Lines, part: str) -> None:
  """Raises DamageError unless the lines of a part say what they say again.

  Only fields that were recorded are compared: later versions write more.
  """
  ours = {(line['kind'], line['body']['id']): line['body'] for line in again
          if line['kind'] not in _APART}
  roots = {_root(name) for _, name in ours} - {''}
  for number, line in enumerate(lines, 1):
    body, kind = line['body'], line['kind']
    if kind in _APART or not isinstance(body.get('id'), str):
      continue
    other = ours.get((kind, body['id']))
    where = recheck.where(number, dict(line))
    if other is None:
      if _root(body['id']) in roots:
        raise errors.DamageError(f'run again, {part} writes no {where}')
      continue
    for name, value in body.items():
      if (kind, name) not in _FREE and value != other.get(name):
        raise errors.DamageError(
            f'{where}: {_first(name, value, other.get(name))}')
  recorded = {(line['kind'], line['body'].get('id')) for line in lines}
  for kind, name in ours:
    if kind == 'compare' and (kind, name) not in recorded:
      raise errors.DamageError(f'there is no {kind} {name!r}, run again there'
                               ' is')


def _root(name: str) -> str:
  """Returns what the ids of a part begin with, '' of an id that says none."""
  return name.rpartition('/')[0].partition('/')[0]


def _first(name: str, theirs: Any, ours: Any) -> str:
  """Returns where a field first differs, and both values."""
  if isinstance(theirs, list) and isinstance(ours, list) and (
      len(theirs) == len(ours)):
    at = next(i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b)
    name, theirs, ours = f'{name} of row {at}', theirs[at], ours[at]
  return (f'{name} is {results.text(theirs):.100}, run again'
          f' {results.text(ours):.100}')


def _check_here(
    run: Mapping[str, Any], profiles: Sequence[Mapping[str, Any]]
) -> None:
  """Raises what can be known to differ before anything has run."""
  for profile in profiles:
    plain = profile['class'].get('dtype') == study.PLAIN
    here = entries.plain_factors() if plain else numerics.environment()
    theirs = {k: v for k, v in profile['class'].items() if k in here}
    for name, a, b in results.differences(theirs, here):
      raise errors.ClassMismatchError(
          f'numerics differ in {name}, recorded {a}, found {b}; run it where'
          ' they are equal', name)
  _check_model(run['config']['model'], run['model'], 'the run')


def _find(lines: Lines, kind: str, name: str) -> Mapping[str, Any]:
  for line in lines:
    if line['kind'] == kind and line['body']['id'] == name:
      return line['body']
  raise errors.DamageError(f'there is no {kind} {name!r}')


CHECKERS = {
    'replay': _check_replay,
    'self_test': _check_self_test,
    **{part: _check_part
       for part in (*evidence.PARTS, 'flywheel', 'verified')},
}
