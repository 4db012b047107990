"""The three parts of an evidence run, each written into its ledger.

`fifty`: a text that another process deposited, grafted here with fifty tails
and at several lengths, against a fresh computation. `invariance`: one text by
every schedule. `study`: the own-position study.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import engine
from kvgraft_jax import entries
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import resources
from kvgraft_jax import schedules
from kvgraft_jax import store as store_lib
from kvgraft_jax import study as study_lib
from kvgraft_jax import verification

_LOG = logging.getLogger(__name__)
_STORE = 'store'
Group = Mapping[str, str | int]
# Figure -> field of a `compare` line, rule.
_FIGURES = {
    'rows': ('rows', 'sum'), 'equal': ('equal', 'sum'),
    'argmax_agree': ('argmax_agree', 'sum'), 'kl_median': ('kl', 'median'),
    'kl_p99': ('kl', 'p99'), 'kl_max': ('kl', 'max'),
    'max_abs_median': ('max_abs', 'median'), 'max_abs_max': ('max_abs', 'max'),
}
_OF_THIS_PROCESS = ('cpu_seconds', 'bytes_read', 'bytes_written',
                    'bytes_source', 'peak_bytes', 'device_peak_bytes')
# Where all must be equal.
_BRIEF = {name: _FIGURES[name]
          for name in ('rows', 'equal', 'kl_max', 'max_abs_max')}
_UNITS = {'kl': 'nats', 'max_abs': 'logits'}


@dataclasses.dataclass
class Work:
  """What the parts work with.

  Attributes:
    settings: of the run (`evidence.Settings`).
    folder: the run directory.
    ledger: open.
    models: dtype -> model, its self-test done.
    ids: token ids of the text, bos in front.
    progress: called with (what, done, in all), or None.
  """

  settings: Any
  folder: pathlib.Path
  ledger: ledger_lib.Ledger
  models: Callable[[str], engine.Model]
  ids: list[int]
  progress: Callable[[str, int, int], None] | None

  def stage(self, what: str) -> None:
    """Says that a stage begins, to whoever listens to the package."""
    _LOG.info('evidence, %s', what)
    self.tell(what, 0, 1)

  def tell(self, what: str, done: int, total: int) -> None:
    """Tells people how far it is."""
    if self.progress:
      self.progress(what, done, total)

  @contextlib.contextmanager
  def meter(
      self, dtype: str, *, waits: bool = False, **group: str
  ) -> Iterator[resources.Meter]:
    """Measures a block and writes its resources.

    Args:
      dtype: of the model.
      waits: whether another process does the work, of which less is known.
      **group: labels of the line.
    """
    labels: dict[str, str | int] = {'dtype': dtype, **group}
    with resources.Meter(self.models(dtype).config, labels) as meter:
      yield meter
    body = {'id': '/'.join(map(str, labels.values())), **meter.body()}
    if waits:
      body |= dict.fromkeys(_OF_THIS_PROCESS)
    self.ledger.append('resources', body)

  def write(self, rows: entries.Rows) -> entries.Rows:
    """Writes the hashes of logits."""
    self.ledger.append('logits', rows.body)
    return rows

  def figures(
      self, prefix: str, where: Group, kind: str = 'compare',
      figures: Mapping[str, tuple[str, str]] | None = None,
  ) -> dict[str, int | str]:
    """Writes and returns figures over the lines that `where` selects."""
    over = {'kind': kind,
            'where': {f'group.{name}': x for name, x in where.items()}}
    return {
        name: self.ledger.summary(
            f'{prefix}/{name}', over, field, rule, _UNITS.get(field))
        for name, (field, rule) in (figures or _FIGURES).items()}


def positions(settings: Any) -> int:
  """Returns how many positions a context of the run takes at most."""
  s = settings
  longest = s.tokens + max(
      s.tail, verification.GREEDY_TOKENS, verification.LONGEST_TAIL)
  return max(longest, s.schedule_tokens, max(s.offsets) + s.block + s.tail)


# Part one.


def fifty(work: Work) -> None:
  """Compares grafts from a store that another process filled with fresh."""
  for dtype in work.settings.dtypes:
    _fifty(work, dtype)


def _fifty(work: Work, dtype: str) -> None:
  s, model = work.settings, work.models(dtype)
  ids, name = work.ids[:s.tokens], f'fifty/{dtype}'
  store = store_lib.Store(str(work.folder / _STORE), create=True)
  with work.meter(dtype, waits=True, part='fifty',
                  what='deposit by another process') as meter:
    work.stage(f'{name}: deposit by another process')
    manifest = store.find(_deposit(work, dtype, ids))
    meter.add(tokens_computed=len(ids), head_rows=1)
  work.ledger.append('artifact', entries.artifact(
      manifest, id=name, profile=dtype, input='text', store=_STORE))
  work.stage(f'{name}: {s.continuations} grafts')
  tails = verification.continuations(model, ids, s.continuations)
  with work.meter(dtype, part='fifty', what='computed afresh') as meter:
    fresh = model.prefill(
        ids, progress=lambda done, total: work.tell(
            f'{name}: fresh', done, total))
    meter.add(tokens_computed=len(ids), head_rows=1)
  with work.meter(dtype, part='fifty', what='grafts, and their tails afresh'
                  ) as meter:
    for i, tail in enumerate(tails):
      work.tell(name, i, len(tails))
      grafted = _against(work, f'{name}/{i}', {'part': 'fifty'}, dtype, store,
                         manifest, fresh, tail)
      done = {'tokens_computed': len(tail), 'head_rows': len(tail)}
      meter.add(tokens_restored=len(ids), every=True, **done)
      meter.add(start=len(ids), every=True, **done)
      if not i:
        _whole(work, name, dtype, ids, tail, grafted)
  _greedy(work, name, dtype, store, manifest, fresh)
  del fresh
  for n, length in enumerate(s.lengths):
    work.tell(f'{name}: lengths', n, len(s.lengths))
    _against(work, f'prefix/{dtype}/{length}', {'part': 'prefix', 'm': length},
             dtype, store, manifest, model.prefill(ids[:length]),
             work.ids[length:length + s.tail])
  because: list[dict[str, Any]] = []
  for part, least in (('fifty', len(ids)), ('prefix', min(s.lengths or [0]))):
    if part == 'fifty' or s.lengths:
      where = {'part': part, 'dtype': dtype}
      because += _all_equal(
          work, f'{part}/{dtype}', where, where | {'what': 'grafted'}, least)
  for what in ('end to end', 'greedy'):
    prefix = f'fifty/{dtype}/{what}'
    found = work.figures(
        prefix, {'part': 'fifty', 'dtype': dtype, 'what': what}, 'score',
        {'count': ('', 'count'), 'equal': ('value', 'count_true')})
    because.append({'summary': f'{prefix}/equal', 'op': '==',
                    'value': found['count']})
  work.ledger.verdict(
      name, 'fifty', {'dtype': dtype, 'artifact': manifest.id,
                      'continuations': len(tails),
                      'lengths': list(s.lengths)}, because)


def _all_equal(
    work: Work, prefix: str, where: Group, grafts: Group, least: int,
    zeros: Sequence[str] = ('kl_max',),
) -> list[dict[str, Any]]:
  """Writes the figures of grafts; returns what they are expected to be.

  Args:
    work: of the run.
    prefix: of the figures' ids.
    where: selects the comparisons.
    grafts: selects the logits of the grafts.
    least: positions that each graft restored, at least.
    zeros: figures that are 0.
  """
  found = work.figures(prefix, where)
  # That each graft ran its tail and nothing else.
  work.figures(f'{prefix}/grafts', grafts, 'logits', {
      'count': ('', 'count'), 'computed': ('tokens_computed', 'sum'),
      'restored_min': ('tokens_restored', 'min')})
  return [{'summary': f'{prefix}/{name}', 'op': '==', 'value': value}
          for name, value in (
              ('equal', found['rows']), ('argmax_agree', found['rows']),
              *((name, '0.0') for name in zeros),
              ('grafts/computed', found['rows']),
              ('grafts/restored_min', least))]


def _deposit(work: Work, dtype: str, ids: Sequence[int]) -> str:
  """Deposits in a process of its own; returns the artifact's id."""
  s = work.settings
  root = str(pathlib.Path(__file__).parent.parent)
  env = dict(os.environ, PYTHONPATH=os.pathsep.join(
      filter(None, (root, os.environ.get('PYTHONPATH')))))
  with tempfile.NamedTemporaryFile('w', suffix='.json') as f:
    json.dump(list(ids), f)
    f.flush()
    command = [
        sys.executable, '-m', 'kvgraft_jax.apps.deposit',
        f'--store={work.folder / _STORE}', f'--tokens_file={f.name}',
        f'--model={s.model}', f'--dtype={dtype}']
    command += [f'--{name}={getattr(s, name)}'
                for name in ('chunk', 'tile', 'page') if getattr(s, name)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False)
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ['no message'])[-1]
    raise errors.KvgraftError(f'the deposit by another process failed: {last}')
  return json.loads(done.stdout.splitlines()[-1])['artifact']


def _against(
    work: Work, id: str, group: Group, dtype: str, store: store_lib.Store,
    manifest: artifact_lib.Manifest, fresh: engine.Context,
    tail: Sequence[int],
) -> entries.Rows:
  """Records a graft of fresh's length with a tail against fresh with it."""
  length, group = fresh.length, {**group, 'dtype': dtype}
  work.ledger.append('input', entries.input(
      f'{id}/tail', tail, keep_tokens=True))
  context = _graft(work.models(dtype), store, manifest, length)
  ours, theirs = context.logits_of(tail), fresh.fork().logits_of(tail)
  grafted = work.write(entries.logits(
      f'{id}/grafted', ours, length, profile=dtype,
      group={**group, 'what': 'grafted'}, computed=context.tokens_computed,
      restored=context.tokens_restored))
  alone = work.write(entries.logits(
      f'{id}/fresh', theirs, length, profile=dtype,
      group={**group, 'what': 'fresh'}, computed=length + len(tail),
      restored=fresh.tokens_restored))
  work.ledger.append('compare', entries.compare(id, alone, grafted, group))
  return grafted


def _graft(model, store, manifest, length=None) -> engine.Context:
  """Grafts even where nothing is promised: what comes of it is a finding."""
  return grafting.graft(model, store, manifest, length, 'inexact')


def _whole(
    work: Work, name: str, dtype: str, ids: list[int], tail: list[int],
    grafted: entries.Rows,
) -> None:
  """Records a continuation computed in one go from position 0."""
  context = work.models(dtype).context()
  values = context.head(context.hidden_of(ids + tail)[-len(tail):])
  whole = work.write(entries.logits(
      f'{name}/0/whole', values, len(ids), profile=dtype,
      group={'part': 'fifty', 'dtype': dtype, 'what': 'end to end'},
      computed=context.tokens_computed, restored=0))
  pairs = zip(grafted.body['sha256'], whole.body['sha256'])
  for i, (ours, theirs) in enumerate(pairs):
    _score(work, f'{name}/0/whole/{i}', dtype, 'end to end', ours, theirs)


def _greedy(
    work: Work, name: str, dtype: str, store: store_lib.Store,
    manifest: artifact_lib.Manifest, fresh: engine.Context,
) -> None:
  """Records greedy tokens of a graft and of the fresh context."""
  model, hashes = work.models(dtype), []
  for what, context in (
      ('grafted', _graft(model, store, manifest)),
      ('fresh', fresh.fork())):
    found, = context.generate(verification.GREEDY_TOKENS, stop_ids=())
    work.ledger.append('output', {
        'id': f'{name}/greedy/{what}', 'input': 'text', 'text': found.text,
        'token_ids': found.token_ids})
    hashes.append(entries.input('', found.token_ids)['tokens_sha256'])
  _score(work, f'{name}/greedy', dtype, 'greedy', *hashes)


def _score(
    work: Work, id: str, dtype: str, what: str, answer: str, expected: str
) -> None:
  work.ledger.append('score', {
      'id': id, 'rule': 'equal', 'answer': answer, 'expected': expected,
      'group': {'part': 'fifty', 'dtype': dtype, 'what': what},
      'value': answer == expected})


# Part two.


def invariance(work: Work) -> None:
  """Records what every schedule leaves."""
  for dtype in work.settings.dtypes:
    model, ids = work.models(dtype), work.ids[:work.settings.schedule_tokens]
    prefix, group = f'invariance/{dtype}', {
        'part': 'invariance', 'dtype': dtype}
    work.stage(prefix)
    with work.meter(dtype, part='invariance', what='all schedules') as meter:
      for i, found in enumerate(schedules.run(model, ids)):
        work.tell(prefix, i, schedules.count(model))
        work.ledger.append('digest', {
            'id': f'{prefix}/{found.name}', 'sha256': found.sha256,
            'tokens_computed': found.tokens_computed, 'about': found.about,
            'group': {**group, 'schedule': found.name,
                      'promised': 'yes' if found.promised else 'no'}})
        meter.add(tokens_computed=found.tokens_computed, head_rows=1,
                  start=len(ids) - found.tokens_computed)
    work.figures(prefix, group, 'digest', {
        'schedules': ('', 'count'), 'results': ('sha256', 'distinct')})
    work.figures(f'{prefix}/promised', {**group, 'promised': 'yes'}, 'digest', {
        'schedules': ('', 'count'), 'results': ('sha256', 'distinct')})
    work.ledger.verdict(
        prefix, 'invariance', {'dtype': dtype, 'tokens': len(ids)}, [
            {'summary': f'{prefix}/promised/results', 'op': '==', 'value': 1}])


# Part three.


def study(work: Work) -> None:
  """Records the own-position study."""
  s, whole = work.settings, work.settings.block + work.settings.tail
  samples = [work.ids[:1] + work.ids[1 + i * (whole - 1):][:whole - 1]
             for i in range(s.samples)]
  for i, ids in enumerate(samples):
    work.ledger.append('input', entries.input(f'study/sample {i}', ids))
  for name in s.cases:
    case = study_lib.CASES[name]
    # float64 takes the weights of float32, where there are some.
    dtype = case.dtype if case.dtype in s.dtypes else s.dtypes[-1]
    try:
      if case.dtype not in (*s.dtypes, study_lib.PLAIN):
        raise errors.UsageError(
            f'{case.dtype} is not among the dtypes of this run')
      profile = study_lib.profile_of(work.models(dtype), case)
    except errors.UsageError as e:
      work.ledger.append('note', {'text': f'case {name} was left out: {e}'})
      continue
    work.stage(f'study: {name}')
    work.ledger.append('case', {
        'id': name, 'weights': dtype, **dataclasses.asdict(case),
        'kinds': list(case.kinds)})
    profile_id = case.dtype
    if case.dtype == study_lib.PLAIN:
      work.ledger.append('profile', entries.bare_profile(
          profile_id, entries.plain_factors()))
    elif profile != work.models(dtype).profile:
      profile_id = f'study/{name}'
      work.ledger.append('profile', entries.bare_profile(
          profile_id, profile.factors()))
    with work.meter(dtype, part='study', what=name) as meter:
      for i, ids in enumerate(samples):
        work.tell(f'study: {name}', i, len(samples))
        fresh: dict[int, entries.Rows] = {}
        for found in study_lib.compare(
            work.models(dtype), case, ids, s.block, s.offsets):
          _compared(work, case, profile_id, i, found, fresh)
          meter.add(tokens_computed=found.b.tokens_computed,
                    start=found.b.tokens_restored, head_rows=s.tail, every=True)
    _figures_of(work, name)


def _compared(
    work: Work, case: study_lib.Case, profile: str, sample: int,
    found: study_lib.Comparison, fresh: dict[int, entries.Rows],
) -> None:
  """Records a comparison; `fresh` holds those of 0 and of the last offset."""
  group: dict[str, str | int] = {
      'part': 'study', 'case': case.name, 'dtype': case.dtype,
      'what': found.what, 'm': found.m, 'sample': sample}
  prefix = f'study/{case.name}/{sample}'
  first = work.settings.block

  def rows(state: study_lib.State) -> entries.Rows:
    if state.what == study_lib.FRESH and state.m in fresh:
      return fresh[state.m]
    made = work.write(entries.logits(
        f'{prefix}/{state.m}/{state.what}', state.logits, first,
        profile=profile, group={**group, 'what': state.what, 'm': state.m},
        computed=state.tokens_computed, restored=state.tokens_restored))
    if state.what == study_lib.FRESH:
      for m in set(fresh) - {0}:
        del fresh[m]
      fresh[state.m] = made
    return made

  work.ledger.append('compare', entries.compare(
      f'{prefix}/{found.m}/{found.what}', rows(found.a), rows(found.b), group
  ) | {'keys': found.keys, 'keys_equal': found.keys_equal,
       'keys_max_abs': ledger_lib.number(found.keys_max_abs)})


def _figures_of(work: Work, name: str) -> None:
  """Writes a case's figures, and the verdict on its own positions."""
  s, own = work.settings, study_lib.OWN
  keys = {'keys': ('keys', 'sum'), 'keys_equal': ('keys_equal', 'sum')}
  for what in study_lib.WHATS:
    for m in s.offsets:
      if m or what != study_lib.FRESH:
        work.figures(
            f'study/{name}/{what}/{m}',
            {'part': 'study', 'case': name, 'what': what, 'm': m},
            figures=_BRIEF if what == own else _FIGURES | keys)
  where: Group = {'part': 'study', 'case': name, 'what': own}
  work.ledger.verdict(
      f'study/{name}', 'study', {'case': name, 'offsets': list(s.offsets)},
      _all_equal(work, f'study/{name}/{own}', where, where, s.block,
                 ('kl_max', 'max_abs_max')))


PARTS: dict[str, Callable[[Work], None]] = {
    'fifty': fifty, 'invariance': invariance, 'study': study}
