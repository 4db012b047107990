"""How a run was computed: the last part of its report."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import shlex
from typing import Any

from kvgraft_jax import report_page as page

_SHOWN = 10  # Inputs and artifacts; a run may have thousands.


def section(
    run: Mapping[str, Any], profiles: Sequence[Mapping[str, Any]],
    inputs: Sequence[Mapping[str, Any]], artifacts: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
) -> page.Section:
  """Returns command, settings, code, model, profiles and inputs.

  Args:
    run: body of the `run` line.
    profiles: bodies of the `profile` lines.
    inputs: bodies of the `input` lines.
    artifacts: bodies of the `artifact` lines.
    kinds: of every line.
  """
  blocks: page.Blocks = []
  command = page.sequence(run.get('command'))
  if command:
    blocks += [page.Text('Command', 'heading'),
               page.Text(shlex.join(map(page.plain, command)), 'command')]
  about = {f'{part}.{name}': value for part in ('code', 'model')
           for name, value in page.flat(page.mapping(run.get(part))).items()}
  for caption, values in (
      ('Settings of the run.', page.flat(page.mapping(run.get('config')))),
      ('Code and model. Fingerprints are SHA-256.', about)):
    if values:
      blocks.append(page.Table(
          caption, ['Name', 'Value'],
          [[name, page.Cell('code', page.plain(value))]
           for name, value in values.items()]))
  blocks += _profiles(profiles)
  if inputs:
    blocks += [page.Text('Inputs', 'heading'), page.Table(
        f'{_first(inputs)}Inputs by hash; a text that may not be copied is not'
        ' in the ledger.',
        ['Input', 'Tokens', 'SHA-256 of the text', 'SHA-256 of the token ids',
         'In the ledger'],
        [[page.plain(b.get('id')), page.number(b.get('tokens')),
          page.cell(b.get('sha256')), page.cell(b.get('tokens_sha256')),
          ' and '.join(name for key, name in (
              ('text', 'text'), ('token_ids', 'token ids')) if key in b)
          or 'hashes only'] for b in inputs[:_SHOWN]], [1])]
  if artifacts:
    blocks += [page.Text('Artifacts', 'heading'), page.Table(
        f'{_first(artifacts)}Artifacts that were deposited.',
        ['Artifact', 'Positions', 'Profile', 'Input', 'Id', 'Key', 'Digests'],
        [[page.plain(b.get('id')), f'{page.number(b.get("start"))} to'
          f' {page.number(b.get("end"))}', page.plain(b.get('profile')),
          page.plain(b.get('input')), page.cell(b.get('artifact')),
          page.cell(b.get('key')), f'{_digests(b):,}']
         for b in artifacts[:_SHOWN]], [6])]
  blocks += [page.Text('Lines of the ledger', 'heading'), page.Table(
      'How many lines of each kind.', ['Kind', 'Lines'],
      [[kind, f'{count:,}'] for kind, count in collections.Counter(
          kinds).items()], [1])]
  return page.Section('setup', 'How it was computed', blocks)


def _first(bodies: Sequence[Any]) -> str:
  return (f'The first {_SHOWN} of {len(bodies):,}. '
          if len(bodies) > _SHOWN else '')


def _digests(artifact: Mapping[str, Any]) -> int:
  blocks = map(page.mapping, page.sequence(artifact.get('digests')))
  return sum(len(page.sequence(block.get('parts'))) for block in blocks)


def _profiles(bodies: Sequence[Mapping[str, Any]]) -> page.Blocks:
  """Returns fingerprints, factors, and what the self-tests proved, if any."""
  profiles = {page.plain(b.get('id')): b for b in bodies}
  if not profiles:
    return []
  rows: list[list[str | page.Cell]] = []
  factors = dict.fromkeys(name for b in profiles.values()
                          for name in page.mapping(b.get('profile')))
  for factor in factors:
    owners: dict[str, list[str]] = {}
    for name, body in profiles.items():
      owners.setdefault(_factor(factor, body), []).append(name)
    rows += [[factor, value, 'all' if len(owners) == 1 else ', '.join(names)]
             for value, names in owners.items()]
  blocks: page.Blocks = [
      page.Text('Numerics profiles', 'heading'),
      page.Table(
          'What fixes the bits, as SHA-256: of all factors, and of those that'
          ' are not proved irrelevant.',
          ['Profile', 'Profile fingerprint', 'Class fingerprint'],
          [[name, *(page.Cell('code', page.plain(b.get(f'{which}_fingerprint')))
                    for which in ('profile', 'class'))]
           for name, b in profiles.items()]),
      page.Fold(f'Factors of the profiles: {len(factors):,}',
                [page.Table(
                    'Everything that may fix the bits. † proved irrelevant by'
                    ' the self-test: in the profile, not in the class.',
                    ['Factor', 'Value', 'Profiles'], rows)])]
  words = {True: page.Cell('good', '= equal'),
           False: page.Cell('bad', '≠ differs')}
  tests = {name: page.mapping(page.mapping(b.get('self_test')).get(
      'invariances')) for name, b in profiles.items()}
  tests = {name: found for name, found in tests.items() if found}
  names = dict.fromkeys(n for test in tests.values() for n in test)
  if tests:
    blocks.append(page.Table(
        'Self-test: which schedules left the same bits.', ['Schedule', *tests],
        [[n, *(words[found] if isinstance(found, bool) else
               page.Cell('soft', 'not run')
               for found in (t.get(n) for t in tests.values()))]
         for n in names]))
  return blocks


def _factor(name: str, body: Mapping[str, Any]) -> str:
  """Returns a factor's value, marked if the class leaves it out."""
  found = page.mapping(body.get('profile'))
  if name not in found:
    return 'none'
  mark = '' if name in page.mapping(body.get('class')) else ' †'
  return f'{page.plain(found[name]) or "(empty)"}{mark}'
