"""Writes a run directory with every kind of line, for tests of the report."""

from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import pathlib
import random
from typing import Any
from unittest import mock

from kvgraft_jax import ledger

OFFSETS = (0, 8, 128, 4096)
CASES = {
    'base': ('bfloat16', 'bfloat16, every row stored, exact rotary rows'),
    'float32': ('float32', 'float32 weights, operands and cache'),
    'float64': ('float64', 'float64 throughout, the plain NumPy forward'),
    'slots': ('bfloat16', 'cache slots move, rotary positions stay'),
}
PARTS = ('fifty', 'invariance', 'study', 'verdicts', 'resources')
_UNIT = {'bfloat16': 2.0 ** -8, 'float32': 2.0 ** -24, 'float64': 2.0 ** -53}


def sha(*parts: object) -> str:
  return hashlib.sha256(repr(parts).encode()).hexdigest()


def run_body(**changes: Any) -> dict[str, Any]:
  return {
      'format': 1, 'run': 'evidence',
      'command': ['kvgraft', 'evidence', '--model=gemma3-270m', '--out=my run'],
      'config': {'model': 'gemma3-270m', 'study': {
          'offsets': list(OFFSETS), 'samples': 1}},
      'code': {'version': '0.2.0', 'sources': sha('s'), 'python': '3.11.9'},
      'model': {'source': 'gemma3-270m', 'fingerprint': sha('m'),
                'tokenizer': sha('t'), 'template': 'none'},
      'created': '2026-11-29T20:00:00Z'} | changes


def write(path: pathlib.Path, parts: Sequence[str] = PARTS) -> None:
  """Writes a ledger with the named parts of an evidence run."""
  rng = random.Random(7)
  # Some thousand lines: that they survive a power cut is not tested here.
  with mock.patch('os.fsync'), ledger.Ledger(path, create=True) as book:
    book.append('run', run_body())
    _profiles(book)
    book.append('input', {'id': 'document', 'sha256': sha('text'),
                          'tokens_sha256': sha('ids'), 'tokens': 2003})
    book.append('artifact', {
        'id': 'a', 'artifact': sha('art'), 'key': sha('key'), 'start': 0,
        'end': 2003, 'profile': 'bfloat16', 'input': 'document', 'store': '',
        'digests': [{'kind': 'sliding', 'start': 0, 'stop': 512,
                     'parts': [[0, 'k', sha(1)], [0, 'v', sha(2)]]}]})
    if 'fifty' in parts:
      _fifty(book)
    if 'invariance' in parts:
      _invariance(book)
    if 'study' in parts:
      _study(book, rng)
    if 'verdicts' in parts:
      _verdicts(book, parts)
    if 'resources' in parts:
      _resources(book)
    book.append('end', {'status': 'done'})


def _profiles(book: ledger.Ledger) -> None:
  for dtype, tile in (('bfloat16', 4), ('float32', 64)):
    profile = {
        'numerics_version': '1', 'dtype': dtype, 'page': '128',
        'chunk': '512', 'tile': str(tile), 'jax': '0.10.2',
        'device': 'cpu', 'cpu_features': 'sse4_2 avx avx2 fma f16c ' * 3,
        'xla_flags': ''}
    book.append('profile', {
        'id': dtype, 'profile': profile,
        'class': {k: v for k, v in profile.items() if k not in (
            'chunk', 'tile')},
        'profile_fingerprint': sha(dtype), 'class_fingerprint': sha(dtype, 1),
        'self_test': {
            'version': 1, 'tokens': 700, 'elapsed_ms': 4000, 'digests': {},
            'invariances': {'run': True, 'chunk': True, 'mesh': None,
                            'rows_4': dtype == 'bfloat16'}}})


def _pair(book, name, rows, equal, group, kl, max_abs) -> None:
  """Writes the lines of two computations and of their comparison."""
  for side in 'ab':
    book.append('logits', {
        'id': f'{name}/{side}', 'profile': group['dtype'], 'group': group,
        'rows': list(range(rows)), 'argmax': [5] * rows,
        'sha256': [sha(name, i, '' if i < equal else side)
                   for i in range(rows)],
        'tokens_computed': 40, 'tokens_restored': 0})
  book.append('compare', {
      'id': name, 'a': f'{name}/a', 'b': f'{name}/b', 'group': group,
      'rows': rows, 'equal': equal, 'argmax_agree': rows, 'kl': kl,
      'max_abs': max_abs})


def _fifty(book: ledger.Ledger) -> None:
  for i in range(50):
    _pair(book, f'fifty/bfloat16/{i}', 4, 4, {
        'part': 'fifty', 'dtype': 'bfloat16'}, ['0.0'] * 4, ['0.0'] * 4)
  _pair(book, 'prefix/bfloat16/1024', 4, 4, {
      'part': 'prefix', 'dtype': 'bfloat16', 'm': 1024},
        ['0.0'] * 4, ['0.0'] * 4)
  book.append('score', {
      'id': 'fifty/bfloat16/greedy', 'rule': 'equal', 'answer': sha('g'),
      'expected': sha('g'), 'value': True, 'group': {
          'part': 'fifty', 'dtype': 'bfloat16', 'what': 'greedy'}})
  for name in ('rows', 'equal'):
    book.summary(f'fifty/bfloat16/{name}', {'kind': 'compare', 'where': {
        'group.part': 'fifty'}}, name, 'sum')


def _invariance(book: ledger.Ledger) -> None:
  for dtype in ('bfloat16', 'float32'):
    for schedule in ('rows_512', 'rows_4', 'capacity'):
      differs = dtype == 'float32' and schedule == 'rows_4'
      book.append('digest', {
          'id': f'{dtype}/{schedule}', 'sha256': sha(dtype, differs),
          'about': f'by {schedule}', 'tokens_computed': 700,
          'group': {'part': 'invariance', 'dtype': dtype, 'schedule': schedule,
                    'promised': 'no' if differs else 'yes'}})


def _study(book: ledger.Ledger, rng: random.Random) -> None:
  figures = {
      'rows': ('rows', 'sum'), 'equal': ('equal', 'sum'),
      'argmax_agree': ('argmax_agree', 'sum'), 'kl_median': ('kl', 'median'),
      'kl_p99': ('kl', 'p99'), 'kl_max': ('kl', 'max'),
      'max_abs_median': ('max_abs', 'median'),
      'max_abs_max': ('max_abs', 'max')}
  for case, (dtype, about) in CASES.items():
    book.append('case', {'id': case, 'about': about, 'dtype': dtype})
    for what in ('fresh', 'own', 'moved'):
      for m in OFFSETS:
        if not m and what == 'fresh':
          continue
        exact = what == 'own' or case == 'slots' or not m
        unit = 0.0 if exact else _UNIT[dtype]
        kl = [ledger.number(200 * unit ** 2 * rng.lognormvariate(0, 0.9))
              for _ in range(16)]
        apart = [ledger.number(40 * unit * rng.lognormvariate(0, 0.4))
                 for _ in range(16)]
        group = {'part': 'study', 'case': case, 'dtype': dtype, 'what': what,
                 'm': m, 'sample': 0}
        _pair(book, f'study/{case}/0/{m}/{what}', 16, 16 if exact else 0,
              group, kl, apart)
        over = {'kind': 'compare', 'where': {
            'group.part': 'study', 'group.case': case, 'group.what': what,
            'group.m': m}}
        for name, (field, rule) in figures.items():
          if what != 'own' or name in ('rows', 'equal', 'kl_max'):
            book.summary(f'study/{case}/{what}/{m}/{name}', over, field, rule)


def _verdicts(book: ledger.Ledger, parts: tuple[str, ...]) -> None:
  book.verdict('self_test', 'self_test', {'dtype': 'bfloat16'}, [],
               {'run': True}, passed=True)
  if 'fifty' in parts:
    book.verdict('fifty', 'fifty', {'tails': 50, 'artifact': sha('art')}, [
        {'summary': 'fifty/bfloat16/equal', 'op': '==', 'value': 200}])
  if 'study' in parts:
    for case in CASES:
      book.verdict(f'study/{case}', 'study', {
          'case': case, 'offsets': list(OFFSETS)}, [
              {'summary': f'study/{case}/own/{m}/equal', 'op': '==',
               'value': 16} for m in OFFSETS])
    book.verdict('study/elsewhere', 'study', {'case': 'base'}, [
        {'summary': f'study/{case}/own/{m}/equal', 'op': '==', 'value': 16}
        for case in CASES for m in OFFSETS] + [
            {'summary': 'study/base/moved/8/kl_median', 'op': '==',
             'value': 0}])
  book.append('note', {'role': 'finding', 'text': (
      'A graft at its own position has every bit of the fresh computation: 16'
      ' of 16 rows in each case and at each offset.\n\nMoved elsewhere it has'
      ' not, and the difference shrinks with the unit roundoff.')})


def _resources(book: ledger.Ledger) -> None:
  book.append('resources', {
      'id': 'fifty', 'group': {'part': 'fifty'}, 'seconds': '241.518',
      'cpu_seconds': '470.2', 'tokens_computed': 104000,
      'tokens_restored': 100150, 'tokens_decoded': None,
      'flops': 51_234_567_890_123, 'bytes_read': 5_123_456_789,
      'bytes_written': None, 'bytes_source': 'told',
      'peak_bytes': 2_345_678_901, 'device_peak_bytes': None,
      'energy': {'joules': 'not measured',
                 'reason': 'no RAPL package under /sys/class/powercap'}})
  book.append('resources', {
      'id': 'study', 'group': {'part': 'study'}, 'seconds': '1800.0',
      'tokens_computed': 1, 'tokens_restored': 1, 'tokens_decoded': 1,
      'flops': None, 'bytes_read': None, 'bytes_written': None,
      'peak_bytes': None, 'energy': {'joules': '1234.5', 'source': 'nvml'}})


def poisoned(value: Any, poison: str, names: bool = False) -> Any:
  """Returns a value with `poison` behind each of its strings.

  Args:
    value: of a ledger.
    poison: what to add.
    names: whether to add it to the names in objects as well.
  """
  if isinstance(value, str):
    return f'{value}{poison}'
  if isinstance(value, Mapping):
    return {f'{k}{poison}' if names else k: poisoned(v, poison, names)
            for k, v in value.items()}
  if isinstance(value, list):
    return [poisoned(v, poison, names) for v in value]
  return value
